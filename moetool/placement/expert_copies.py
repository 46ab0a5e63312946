"""Greedy copies of a layer's experts into free slots, with DIRECTOR's T_comp + T_comm as the objective."""

import math
import time

import numpy as np

from moetool.placement.latency import along, flows, flows_to
from moetool.placement.planner import Problem

_EXPERTS, _GPUS = 4, 32
"""Limits of tried experts, and of tried GPUs (those with the least work), per copy."""
_LIGHT, _SWAPS = 16, 8
"""GPUs with the least work, and swaps tried with them, per swap."""


class CopySearch:
    """A layer's placement, improved by copies.

    A copy changes only the traffic to the GPUs that hold the expert, so a trial computes only these GPUs.

    Args:
        placed_GE: changed in place.
        room_G: maximum experts on each GPU.

    Attributes:
        cost: T_comp + T_comm of `placed_GE`.
    """

    def __init__(self, problem: Problem, layer: int, placed_GE: np.ndarray, room_G: np.ndarray) -> None:
        self.placed_GE = placed_GE
        self._room_G, self._latency = room_G, problem.latency
        self._tokens_GE = problem.demand.tokens_GLE[:, layer]
        self._total_E = self._tokens_GE.sum(axis=0)
        self._server_G, self._speed_G = np.array(problem.cluster.server_G), np.array(problem.latency.speed_G)
        self._routing = problem.routing
        self._flow_GG = flows(problem.cluster, self._tokens_GE, placed_GE, self._routing)
        self._sum()

    def run(self, most: int = 0, until: float = math.inf) -> None:
        """Add copies of the stragglers' experts, best first, until none helps or memory is full.

        If a GPU has no room for a copy, it gives up its coldest expert, which moves to the free GPU with the least work
        unless it has another copy.

        Args:
            most: limit of copies, and of tried experts and of tried GPUs per copy (0: as many copies as help, 4
                experts and 32 GPUs).
            until: end of the time for it, in seconds of `time.perf_counter`.
        """
        made = 0
        while time.perf_counter() < until and self._add_best(most or _EXPERTS, most or _GPUS):
            made += 1
            if made == most:
                return

    def swap(self, most: int, until: float = math.inf) -> None:
        """Swap copies of the slowest GPU with copies of GPUs with the least work until none helps.

        Of the swaps that should even out two GPUs best, the first that lowers the cost is made.

        Args:
            most: limit of swaps.
            until: end of the time for it, in seconds of `time.perf_counter`.
        """
        for _ in range(most):
            if time.perf_counter() >= until or not self._swap_best():
                return

    def _swap_best(self) -> bool:
        load_G, placed_GE = self._flow_GG.sum(axis=0), self.placed_GE
        slow = int((self._comp_G + self._latency.ways * np.maximum(self._send_G, self._recv_G)).argmax())
        share_E = self._total_E / np.maximum(placed_GE.sum(axis=0), 1)
        here = np.flatnonzero(placed_GE[slow])
        order = np.argsort(self._comp_G, kind="stable")
        others = order[order != slow][:_LIGHT]
        gpu_X, there_X = np.nonzero(placed_GE[others] & ~placed_GE[slow])
        gpu_X = others[gpu_X]
        change_XH = share_E[here] - share_E[there_X, None]
        x_Y, h_Y = np.nonzero((change_XH > 0) & ~placed_GE[gpu_X][:, here])
        # A swap that evens out two GPUs moves half of their difference.
        off_Y = np.abs(change_XH[x_Y, h_Y] - (load_G[slow] - load_G[gpu_X[x_Y]]) / 2)
        if len(off_Y) > _SWAPS:  # sorting all takes longer than scoring the best
            near = np.flatnonzero(off_Y <= np.partition(off_Y, _SWAPS - 1)[_SWAPS - 1])
            x_Y, h_Y, off_Y = x_Y[near], h_Y[near], off_Y[near]
        for y in np.argsort(off_Y, kind="stable")[:_SWAPS].tolist():
            swapped = [here[h_Y[y]], there_X[x_Y[y]]]
            with_GE = placed_GE.copy()
            with_GE[slow, swapped] = False, True
            with_GE[gpu_X[x_Y[y]], swapped] = True, False
            tried = self._try(with_GE)
            if tried[0] < self.cost * (1 - 1e-9):
                self._take(with_GE, *tried[1:])
                return True
        return False

    def _take(self, with_GE: np.ndarray, to_H: np.ndarray, flow_GH: np.ndarray) -> None:
        self._flow_GG[:, to_H] = flow_GH
        self.placed_GE[:] = with_GE
        self._sum()

    def _add_best(self, experts: int, gpus: int) -> bool:
        free_G = self.placed_GE.sum(axis=1) < self._room_G
        computing, talking = int(self._comp_G.argmax()), int(np.maximum(self._send_G, self._recv_G).argmax())
        here_E, away_E = self.placed_GE[computing], self.placed_GE[talking]
        busiest = np.argsort(-np.where(here_E, self._total_E, -1.0), kind="stable")[:experts].tolist()
        wanted = np.argsort(-np.where(away_E, -1.0, self._tokens_GE[talking]), kind="stable")[:experts].tolist()
        idle = np.argsort(self._comp_G, kind="stable")[:gpus].tolist()
        load_G = self._flow_GG.sum(axis=0)
        best, chosen = self.cost * (1 - 1e-9), None
        for g, expert in sorted({(g, e) for e in busiest for g in idle} | {(talking, e) for e in wanted}):
            with_GE = _with_copy(self.placed_GE, g, expert, free_G, self._total_E, load_G)
            if with_GE is not None and (tried := self._try(with_GE)[0]) < best:
                best, chosen = tried, with_GE
        if chosen is None:
            return False
        self._take(chosen, *self._try(chosen)[1:])
        return True

    def _try(self, with_GE: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Return T_comp + T_comm with these copies, the GPUs with changed tokens, and the tokens [G, H] to those."""
        changed = np.flatnonzero((with_GE != self.placed_GE).any(axis=0))
        to_H = np.flatnonzero((with_GE[:, changed] | self.placed_GE[:, changed]).any(axis=1))
        tokens_GX = self._tokens_GE[:, changed]
        more_GX = np.concatenate([tokens_GX, -tokens_GX], axis=1)
        placed_GX = np.concatenate([with_GE[:, changed], self.placed_GE[:, changed]], axis=1)
        more_GH = flows_to(to_H, self._server_G, more_GX, placed_GX, self._routing)
        flow_GH = np.maximum(self._flow_GG[:, to_H] + more_GH, 0.0)
        latency, comp_G, recv_G = self._latency, self._comp_G.copy(), self._recv_G.copy()
        comp_G[to_H] = along(latency.comp, flow_GH.sum(axis=0)) / self._speed_G[to_H]
        comm_GH = self._comm_s(flow_GH, to_H)
        recv_G[to_H] = comm_GH.sum(axis=0)
        send_G = self._send_G + (comm_GH - self._comm_GG[:, to_H]).sum(axis=1)
        return self._cost_of(comp_G, send_G, recv_G), to_H, flow_GH

    def _comm_s(self, flow_GH: np.ndarray, to_H: np.ndarray | slice) -> np.ndarray:
        if self._latency.linear:
            return flow_GH * self._latency.link_slope_GG[:, to_H]
        return self._latency.link_s(flow_GH, self._latency.link_GG[:, to_H])

    def _sum(self) -> None:
        self._comp_G = self._latency.comp_s(self._flow_GG.sum(axis=0))
        self._comm_GG = self._comm_s(self._flow_GG, slice(None))
        self._send_G, self._recv_G = self._comm_GG.sum(axis=1), self._comm_GG.sum(axis=0)
        self.cost = self._cost_of(self._comp_G, self._send_G, self._recv_G)

    def _cost_of(self, comp_G: np.ndarray, send_G: np.ndarray, recv_G: np.ndarray) -> float:
        straggler = float(send_G.max())
        if self._latency.sides == "both":
            straggler = max(straggler, float(recv_G.max()))
        return float(comp_G.max()) + self._latency.ways * straggler


def _with_copy(
    placed_GE: np.ndarray, g: int, expert: int, free_G: np.ndarray, total_E: np.ndarray, load_G: np.ndarray
) -> np.ndarray | None:
    """Return the placement with one more copy; None if the GPU holds the expert or cannot make room."""
    if placed_GE[g, expert]:
        return None
    with_GE = placed_GE.copy()
    with_GE[g, expert] = True
    if not free_G[g]:
        coldest = int(np.where(placed_GE[g], total_E, np.inf).argmin())
        targets_G = free_G & ~placed_GE[:, coldest]
        if not placed_GE[g, coldest]:
            return None
        with_GE[g, coldest] = False
        if placed_GE[:, coldest].sum() == 1:
            if not targets_G.any():
                return None
            with_GE[int(np.where(targets_G, load_G, np.inf).argmin()), coldest] = True
    return with_GE
