"""Local search for one layer: one copy per expert, with DIRECTOR's T_comp + T_comm as the objective."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.placement.latency import Latency, along

_POTENTIAL = 1e-7
_SENDERS = 2
"""Number of slowest senders whose time bounds a swap from below, before the full score."""
_CHUNK = 256
"""Number of swaps scored at once (`tests/bench/test_placement_reach.py`)."""
MOST = 2048
"""Maximum number of scored swaps per step, lowest bound first: many swaps leave the straggler unchanged."""
_REFRESH = 64
"""Swaps after which sums are recomputed, so that rounding errors do not accumulate."""


@dataclass(slots=True, kw_only=True)
class Layer:
    """A layer to place.

    Attributes:
        tokens_GE: W^l, the tokens on GPU j that use expert i.
        room_G: maximum experts on each GPU.
    """

    tokens_GE: np.ndarray
    room_G: np.ndarray
    latency: Latency

    @property
    def num_experts(self) -> int:
        return int(self.tokens_GE.shape[1])

    def flow(self, gpu_E: np.ndarray) -> np.ndarray:
        """Return tokens [G, G] from GPU j to GPU k; those that stay are on the diagonal."""
        return self.tokens_GE @ (gpu_E[:, None] == np.arange(len(self.room_G))).astype(np.float64)

    def cost(self, gpu_E: np.ndarray) -> float:
        """Return T_comp + T_comm."""
        return sum(self.latency.layer(self.flow(gpu_E)))


class Descent:
    """A placement of a layer, improved by one swap or move at a time.

    A free slot counts as an unused expert, so a move is a swap. A step tries every swap with the slowest GPU (by
    computing, sending or receiving) and takes the best; if none helps and links are unequal, it tries all swaps. Ties
    of the straggler are broken by the sum of squares, so that a step may lower a second straggler first. A lower bound
    from the two GPUs of a swap and the slowest senders leaves few swaps to score fully.

    Args:
        wide: whether all swaps may be tried.
        most: maximum number of scored swaps per step.
    """

    def __init__(self, layer: Layer, gpu_E: np.ndarray, *, wide: bool = True, most: int = MOST) -> None:
        self.layer, self.latency, self.most = layer, layer.latency, most
        num_gpus = len(layer.room_G)
        self.num_experts = layer.num_experts
        # GPUs first: NumPy reduces over a short last axis slowly.
        self.tokens_GX = np.concatenate([layer.tokens_GE, np.zeros((num_gpus, num_gpus))], axis=1)
        self.tokens_X = self.tokens_GX.sum(axis=0)
        self.gpu_X = np.concatenate([gpu_E, np.arange(num_gpus)])
        self.linear = self.latency.linear
        self.slope_GG = self.latency.link_slope_GG
        self.recv_GX = np.zeros_like(self.tokens_GX)
        self.recv_GX[:, : self.num_experts] = self.slope_GG.T @ layer.tokens_GE
        self.both = self.latency.sides == "both"
        # With unequal links, a swap between two other GPUs can help the slowest.
        self.uneven = wide and (not self.linear or len(np.unique(self.latency.link_GG)) > 2)
        self._swaps = 0
        self._refresh()

    def _refresh(self) -> None:
        """Recompute all sums."""
        gpu_E = self.gpu_X[: self.num_experts]
        self.flow_GG = self.layer.flow(gpu_E)
        self.free_G = self.layer.room_G - np.bincount(gpu_E, minlength=len(self.layer.room_G))
        self._sum()

    def _sum(self) -> None:
        self.load_G = self.flow_GG.sum(axis=0)
        self.comp_G = self.latency.comp_s(self.load_G)
        self.comm_GG = self.flow_GG * self.slope_GG if self.linear else self.latency.comm_s(self.flow_GG)
        self.send_G, self.recv_G = self.comm_GG.sum(axis=1), self.comm_GG.sum(axis=0)
        potential = (self.comp_G**2).sum() + (self.send_G**2).sum() * self.latency.ways
        self.score = float(self._score(self.comp_G.max(), self._comm(), potential))

    def _comm(self) -> float:
        return float(max(self.send_G.max(), self.recv_G.max()) if self.both else self.send_G.max())

    def _score(self, comp: Any, comm: Any, potential: Any) -> Any:
        cost = comp + self.latency.ways * comm
        return cost + _POTENTIAL * potential / np.maximum(cost, 1e-30)

    def run(self, steps: int = 0, until: float = math.inf) -> float:
        """Step until no swap helps, for at most `steps` (0: no limit) or `until` a time; return the cost."""
        taken = 0
        while time.perf_counter() < until and self._step():
            taken += 1
            if taken == steps:
                break
        return float(self.comp_G.max() + self.latency.ways * self._comm())

    def _step(self) -> bool:
        stragglers = {int(self.comp_G.argmax()), int(self.send_G.argmax())}
        if self.both:
            stragglers.add(int(self.recv_G.argmax()))
        return self._take_best(sorted(stragglers)) or (self.uneven and self._take_best(range(len(self.load_G))))

    def _take_best(self, gpus: Sequence[int]) -> bool:
        here, there = self.candidates(gpus)
        if not len(here):
            return False
        bound = self.bounds(here, there)
        best, found = self.score * (1 - 1e-12) - 1e-300, -1
        able = np.flatnonzero(bound < best)
        able = able[np.argsort(bound[able], kind="stable")[: self.most]]
        for start in range(0, len(able), _CHUNK):
            chunk = able[start : start + _CHUNK]
            if bound[chunk[0]] >= best:
                break
            score = self.scores(here[chunk], there[chunk])
            lowest = int(score.argmin())
            if score[lowest] < best:
                best, found = float(score[lowest]), int(chunk[lowest])
        if found < 0:
            return False
        self.swap(int(here[found]), int(there[found]))
        return True

    def candidates(self, gpus: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return every swap of an expert or free slot of these GPUs."""
        usable_X = np.concatenate([np.ones(self.num_experts, bool), self.free_G > 0])
        here, there = [], []
        for g in gpus:
            inside, outside = np.flatnonzero(usable_X & (self.gpu_X == g)), np.flatnonzero(usable_X & (self.gpu_X != g))
            here.append(np.repeat(inside, len(outside)))
            there.append(np.tile(outside, len(inside)))
        return np.concatenate(here), np.concatenate(there)

    def bounds(self, here: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Return a lower bound of the score after each swap, by the work of its two GPUs and the slowest senders."""
        if not self.linear:
            return np.zeros(len(here))
        g, h = self.gpu_X[here], self.gpu_X[there]
        more = self.tokens_X[there] - self.tokens_X[here]
        slope = self.latency.comp_slope_G
        comp = np.maximum((self.load_G[g] + more) * slope[g], (self.load_G[h] - more) * slope[h])
        comp = np.maximum(comp, _others(self.comp_G, g, h))
        comm = np.zeros(len(here))
        for j in np.argsort(-self.send_G, kind="stable")[:_SENDERS].tolist():
            tokens_X, slope_G = self.tokens_GX[j], self.slope_GG[j]
            comm = np.maximum(comm, self.send_G[j] + (tokens_X[there] - tokens_X[here]) * (slope_G[g] - slope_G[h]))
        if self.both:
            comm = np.maximum(comm, np.maximum(_others(self.recv_G, g, h), self._received(here, there).max(axis=0)))
        return comp + self.latency.ways * comm

    def _received(self, here: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Return the receive time [2, C] of the two GPUs of each swap after it, for linear curves."""
        g, h = self.gpu_X[here], self.gpu_X[there]
        gained_g = self.recv_GX[g, there] - self.recv_GX[g, here]
        gained_h = self.recv_GX[h, here] - self.recv_GX[h, there]
        return np.stack([self.recv_G[g] + gained_g, self.recv_G[h] + gained_h])

    def scores(self, here: np.ndarray, there: np.ndarray) -> np.ndarray:
        """Return the score after each swap."""
        g, h = self.gpu_X[here], self.gpu_X[there]
        more_GC = self.tokens_GX[:, there] - self.tokens_GX[:, here]
        more = self.tokens_X[there] - self.tokens_X[here]
        comp_2C = np.stack([self.load_G[g] + more, self.load_G[h] - more])
        if self.linear:
            slope = self.latency.comp_slope_G
            comp_2C = comp_2C * np.stack([slope[g], slope[h]])
            send_GC = self.send_G[:, None] + more_GC * (self.slope_GG[:, g] - self.slope_GG[:, h])
            if self.both:
                recv_2C = self._received(here, there)
        else:
            speed = np.array(self.latency.speed_G)
            comp_2C = along(self.latency.comp, comp_2C) / np.stack([speed[g], speed[h]])
            into_GC = self.latency.link_s(self.flow_GG[:, g] + more_GC, self.latency.link_GG[:, g])
            out_GC = self.latency.link_s(self.flow_GG[:, h] - more_GC, self.latency.link_GG[:, h])
            send_GC = self.send_G[:, None] + into_GC + out_GC - self.comm_GG[:, g] - self.comm_GG[:, h]
            recv_2C = np.stack([into_GC.sum(axis=0), out_GC.sum(axis=0)])
        comp = np.maximum(_others(self.comp_G, g, h), comp_2C.max(axis=0))
        comm = send_GC.max(axis=0)
        if self.both:
            comm = np.maximum(comm, np.maximum(_others(self.recv_G, g, h), recv_2C.max(axis=0)))
        squares = (self.comp_G**2).sum() - self.comp_G[g] ** 2 - self.comp_G[h] ** 2 + (comp_2C**2).sum(axis=0)
        potential = squares + self.latency.ways * (send_GC**2).sum(axis=0)
        return np.asarray(self._score(comp, comm, potential))

    def swap(self, here: int, there: int) -> None:
        """Swap two experts, or an expert and a free slot."""
        g, h = int(self.gpu_X[here]), int(self.gpu_X[there])
        for item, gpu in ((here, h), (there, g)):
            if item < self.num_experts:
                self.gpu_X[item] = gpu
        self._swaps += 1
        if self._swaps % _REFRESH == 0:
            self._refresh()
            return
        more_G = self.tokens_GX[:, there] - self.tokens_GX[:, here]
        self.flow_GG[:, g] += more_G
        self.flow_GG[:, h] -= more_G
        change = int(there < self.num_experts) - int(here < self.num_experts)
        self.free_G[g] -= change
        self.free_G[h] += change
        self._sum()

    def kick(self, rng: np.random.Generator, swaps: int) -> None:
        """Make random swaps and moves to leave a local optimum."""
        for _ in range(swaps):
            others = np.concatenate([np.arange(self.num_experts), self.num_experts + np.flatnonzero(self.free_G > 0)])
            here, there = int(rng.integers(self.num_experts)), int(rng.choice(others))
            if self.gpu_X[here] != self.gpu_X[there]:
                self.swap(here, there)

    def place(self) -> np.ndarray:
        """Return the GPU of each expert."""
        return self.gpu_X[: self.num_experts].copy()


def _others(value_G: np.ndarray, g: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Return the largest value except those at g and h."""
    order = np.argsort(-value_G, kind="stable")[:3].tolist()
    largest = np.zeros(len(g))
    for gpu in reversed(order):
        largest = np.where((g != gpu) & (h != gpu), value_G[gpu], largest)
    return largest


def improve(
    layer: Layer,
    starts: list[np.ndarray],
    rng: np.random.Generator,
    kicks: int,
    *,
    wide: bool = True,
    until: float = math.inf,
) -> tuple[float, np.ndarray]:
    """Descend from every start, then kick the best and descend again repeatedly; return the best found.

    Shapes: gpu_E int.

    Args:
        until: end of the time for it, in seconds of `time.perf_counter`.
    """
    best, found = np.inf, starts[0]
    for start in starts:
        descent = Descent(layer, start, wide=wide)
        cost = descent.run(until=until)
        if cost < best:
            best, found = cost, descent.place()
    for _ in range(kicks):
        if time.perf_counter() >= until:
            break
        descent = Descent(layer, found, wide=wide)
        descent.kick(rng, int(rng.integers(2, 5)))
        cost = descent.run(until=until)
        if cost <= best:
            best, found = cost, descent.place()
    return best, found
