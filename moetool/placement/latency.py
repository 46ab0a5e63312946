"""Cost of a placement in DIRECTOR's system model: T_comp + T_comm, with replicas and unequal links."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster, ModelSpec
from moetool.costing.costs import CostProfile, Curve

SIDES = ("both", "send")
ROUTINGS = ("nearest", "even")
VALUE_BYTES = 2
"""Bytes of one number of a hidden state in transit, unless set otherwise."""
_LINEAR = Curve(x=(0.0, 1.0), y=(0.0, 1.0))


@dataclass(frozen=True, kw_only=True)
class Latency:
    """f_comp of every GPU and f_comm of every pair of GPUs.

    Attributes:
        name: origin of the curves, for users.
        unit: `s`, or `tokens` if computing and sending a token each count 1.
        comp: time against the tokens of a GPU of speed 1.
        speed_G: speed of each GPU relative to that.
        links: curves of time against bytes.
        link_GG: index in `links` from GPU j to GPU k; -1 from a GPU to itself.
        token_bytes: d of Eq. 3, the bytes of a token's hidden state.
        sides: `both` counts for each GPU the larger of sending and receiving, for dispatch and combine; `send` is Eq. 4
            as printed.

    Source: DIRECTOR § VI-A, Eqs. 1 to 4. Deviations:
        - f(0) = 0: a GPU without tokens and a pair without bytes cost nothing, whatever a curve's value at 0.
        - `sides="both"`, the default: the printed Eq. 4 omits receiving and the second all-to-all. The combine carries
          the same bytes back, so it doubles the term.
        - GPUs may differ in speed; then the straggler is the slowest, not the fullest.
    """

    name: str
    unit: str
    comp: Curve
    speed_G: tuple[float, ...]
    links: tuple[Curve, ...]
    link_GG: np.ndarray
    token_bytes: float
    sides: str = "both"

    @cached_property
    def linear(self) -> bool:
        """Return whether every curve is a straight line through 0."""
        return all(_slope(curve) is not None for curve in (self.comp, *self.links))

    @cached_property
    def comp_slope_G(self) -> np.ndarray:
        """Return the time per token on each GPU, if the curves are `linear`."""
        return (_slope(self.comp) or 0.0) / np.array(self.speed_G)

    @cached_property
    def link_slope_GG(self) -> np.ndarray:
        """Return the time per token from GPU to GPU, if the curves are `linear`."""
        slopes = np.array([*(_slope(curve) or 0.0 for curve in self.links), 0.0])
        return slopes[self.link_GG] * self.token_bytes

    @property
    def ways(self) -> float:
        """Return the number of all-to-all exchanges per layer."""
        return 2.0 if self.sides == "both" else 1.0

    def comp_s(self, tokens_XG: np.ndarray) -> np.ndarray:
        """Return the compute time of each GPU."""
        return along(self.comp, tokens_XG) / np.array(self.speed_G)

    def comm_s(self, tokens_GG: np.ndarray) -> np.ndarray:
        """Return the time of each link from GPU j to GPU k."""
        return self.link_s(tokens_GG, self.link_GG)

    def link_s(self, tokens_X: np.ndarray, link_X: np.ndarray) -> np.ndarray:
        """Return the time of tokens over links, given by number."""
        taken_X = np.zeros(np.broadcast_shapes(tokens_X.shape, link_X.shape))
        for number, curve in enumerate(self.links):
            mine = link_X == number
            if mine.any():
                taken_X = np.where(mine, along(curve, tokens_X * self.token_bytes), taken_X)
        return taken_X

    def layer(self, flow_GG: np.ndarray) -> tuple[float, float]:
        """Return (T_comp, T_comm) of a layer, from the tokens of GPU j that GPU k computes."""
        comm_GG = self.comm_s(flow_GG)
        straggler = comm_GG.sum(axis=1).max()
        if self.sides == "both":
            straggler = max(straggler, comm_GG.sum(axis=0).max())
        return float(self.comp_s(flow_GG.sum(axis=0)).max()), self.ways * float(straggler)


def _slope(curve: Curve) -> float | None:
    """Return the slope of a straight line through 0."""
    if len(curve.x) != 2 or curve.x[0] != 0 or curve.y[0] != 0:
        return None
    return curve.y[1] / curve.x[1]


def along(curve: Curve, amount_X: np.ndarray) -> np.ndarray:
    """Evaluate a curve at many amounts; 0 at 0 and below."""
    x, y = np.array(curve.x), np.array(curve.y)
    if len(x) == 1:
        return np.where(amount_X > 0, y[0], 0.0)
    slope = _slope(curve)
    if slope is not None:
        return slope * np.maximum(amount_X, 0.0)
    value_X = np.interp(amount_X, x, y)
    first, last = (y[1] - y[0]) / (x[1] - x[0]), (y[-1] - y[-2]) / (x[-1] - x[-2])
    value_X = np.where(amount_X < x[0], np.maximum(0.0, y[0] + first * (amount_X - x[0])), value_X)
    value_X = np.where(amount_X > x[-1], y[-1] + max(0.0, last) * (amount_X - x[-1]), value_X)
    return np.where(amount_X > 0, value_X, 0.0)


def unit_latency(cluster: Cluster, *, sides: str = "both") -> Latency:
    """Return unit costs, used without a profile: 1 per computed token at speed 1, and 1 per sent token."""
    found = linear_latency(cluster, 1.0, 1.0, 1.0, "unit costs, no profile")
    return replace(found, unit="tokens", sides=_known(sides))


def linear_latency(
    cluster: Cluster, token_s: float, byte_s_GG: np.ndarray | float, token_bytes: float, name: str
) -> Latency:
    """Return straight lines through 0, so that the parts of a batch add up to the whole.

    Args:
        token_s: seconds of computing a token on a GPU of speed 1.
        byte_s_GG: seconds of sending a byte from GPU to GPU, or one number for all pairs.
    """
    num_gpus = len(cluster.gpus)
    byte_s_GG = np.broadcast_to(np.asarray(byte_s_GG, np.float64), (num_gpus, num_gpus))
    kinds, kind_GG = np.unique(byte_s_GG, return_inverse=True)
    comp, *links = (Curve(x=(0.0, 1.0), y=(0.0, slope)) for slope in (token_s, *kinds.tolist()))
    return Latency(
        name=name,
        unit="s",
        comp=comp,
        speed_G=tuple(gpu.speed for gpu in cluster.gpus),
        links=tuple(links),
        link_GG=np.where(np.eye(num_gpus, dtype=bool), -1, kind_GG.reshape(num_gpus, num_gpus)),
        token_bytes=token_bytes,
    )


def profiled_latency(
    cluster: Cluster, spec: ModelSpec, profile: CostProfile, *, sides: str = "both", value_bytes: int = VALUE_BYTES
) -> Latency:
    """Return f_comp from a profile's curve of one expert, and f_comm from the cluster's links or the profile's.

    The profile's link curve applies to pairs of servers for which the cluster has no `Link`.

    Args:
        value_bytes: bytes of one number of a hidden state.

    Raises:
        MismatchError: the profile is of another kind of layer, or the model's hidden size is unknown.
    """
    profile.check(spec)
    if spec.hidden_size <= 0:
        raise MismatchError(
            f"the hidden size of {spec.name} is unknown, and so are bytes per token; import its trace again with "
            f"--set hidden_size=NUMBER, or leave out --profile and --machine"
        )
    devices = {costs.device for costs in profile.compute}
    named = {frozenset(link.between) for link in cluster.links}
    kinds: dict[Any, int] = {}
    links: list[Curve] = []
    num_gpus, server_G = len(cluster.gpus), cluster.server_G
    link_GG = np.full((num_gpus, num_gpus), -1)
    for j in range(num_gpus):
        for k in range(num_gpus):
            if j == k:
                continue
            a, b = server_G[j], server_G[k]
            default = a != b and frozenset((cluster.servers[a].name, cluster.servers[b].name)) not in named
            key = "profile" if default and profile.link is not None else cluster.link(a, b)
            if key not in kinds:
                kinds[key] = len(links)
                links.append(_line(*key) if isinstance(key, tuple) else profile.link or _LINEAR)
            link_GG[j, k] = kinds[key]
    return Latency(
        name=f"profile of {profile.spec.name}",
        unit="s",
        comp=profile.on("cuda" if "cuda" in devices else "cpu").expert,
        speed_G=tuple(gpu.speed for gpu in cluster.gpus),
        links=tuple(links) or (_LINEAR,),
        link_GG=link_GG,
        token_bytes=float(spec.hidden_size * value_bytes),
        sides=_known(sides),
    )


def _line(bytes_s: float, latency_s: float) -> Curve:
    return Curve(x=(0.0, 1e6), y=(latency_s, latency_s + 1e6 / bytes_s))


def _known(sides: str) -> str:
    if sides not in SIDES:
        raise UsageError(f"unknown sides {sides!r}, expected {' or '.join(SIDES)}")
    return sides


def flows(cluster: Cluster, tokens_GE: np.ndarray, placed_GE: np.ndarray, routing: str = "nearest") -> np.ndarray:
    """Return the tokens [G, G] of a layer that start on GPU j and are computed on GPU k.

    Args:
        routing: `nearest`: on the token's GPU if it holds the expert, else evenly over those of its server, else evenly
            over all holders. `even`: evenly over all holders, as EPLB counts.
    """
    return flows_to(np.arange(len(tokens_GE)), np.array(cluster.server_G), tokens_GE, placed_GE, routing)


def flows_to(
    to_H: np.ndarray, server_G: np.ndarray, tokens_GX: np.ndarray, placed_GX: np.ndarray, routing: str
) -> np.ndarray:
    """Return tokens [G, H] of some experts to some GPUs, as `flows`.

    Args:
        to_H: the target GPUs.
        server_G: the server of each GPU, rising from 0.
        placed_GX: none beyond a layer's experts, which have no tokens.
    """
    hosts_HX = placed_GX[to_H].astype(np.float64)
    even_HX = hosts_HX / np.maximum(placed_GX.sum(axis=0), 1)
    if routing == "even":
        return np.asarray(tokens_GX @ even_HX.T)
    first_N = np.searchsorted(server_G, np.arange(server_G[-1] + 1))
    count_GX = np.add.reduceat(placed_GX, first_N, axis=0, dtype=np.float64)[server_G]
    away_GX = np.where(placed_GX, 0.0, tokens_GX)
    near_GX = np.where(count_GX > 0, away_GX, 0.0)
    flow_GH = near_GX @ (hosts_HX / np.maximum(count_GX[to_H], 1.0)).T
    flow_GH *= server_G[:, None] == server_G[to_H]
    flow_GH += (away_GX - near_GX) @ even_HX.T
    flow_GH[to_H, np.arange(len(to_H))] += (tokens_GX - away_GX).sum(axis=1)[to_H]
    return np.asarray(flow_GH)


def layers_s(
    latency: Latency, cluster: Cluster, tokens_GLE: np.ndarray, placed_GLE: np.ndarray, routing: str = "nearest"
) -> float:
    """Return T_comp + T_comm of all layers, each with its whole demand in one step."""
    return sum(
        sum(latency.layer(flows(cluster, tokens_GLE[:, layer], placed_GLE[:, layer], routing)))
        for layer in range(tokens_GLE.shape[1])
    )


def hull(cost: Callable[[np.ndarray], np.ndarray], knots: np.ndarray) -> list[tuple[float, float]]:
    """Return lines (slope, intercept) whose maximum is the largest convex function under a curve, with 0 at 0.

    It is a lower bound if the curve is straight between `knots`, which must start at 0 and cover every possible amount.
    """
    points = [(float(x), float(y)) for x, y in zip(knots, cost(knots), strict=True)]
    kept: list[tuple[float, float]] = []
    for x, y in points:
        while len(kept) > 1 and _rise(kept[-2], kept[-1]) >= _rise(kept[-1], (x, y)):
            kept.pop()
        kept.append((x, y))
    lines = []
    for a, b in pairwise(kept):
        slope = _rise(a, b)
        if math.isfinite(slope):
            lines.append((slope, a[1] - slope * a[0]))
    return lines or [(0.0, 0.0)]


def knots(curve: Curve, most: float, scale: float = 1.0) -> np.ndarray:
    """Return amounts from 0 to `most` between which a curve is straight, for `hull`.

    These are its own knots, a point just above 0, where it may jump, and the root of its first piece extended to 0.

    Args:
        scale: scale of the curve's amounts: bytes per token.
    """
    if most <= 0:
        return np.array([0.0, 1.0])
    inner = [x / scale for x in curve.x]
    if len(curve.x) > 1 and curve.y[1] > curve.y[0]:
        inner.append((curve.x[0] - curve.y[0] * (curve.x[1] - curve.x[0]) / (curve.y[1] - curve.y[0])) / scale)
    return np.array(sorted({0.0, most * 1e-9, *(float(x) for x in inner if 0 < x < most), most}))


def _rise(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
