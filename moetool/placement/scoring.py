"""Scores of a placement on requests: locality, latency, balance, bytes, gaps to the bounds."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moetool.base.types import Cluster, ModelSpec
from moetool.placement.bounds import latency_bound, memory_bound, remote_bound
from moetool.placement.demand import Demand, per_server
from moetool.placement.latency import VALUE_BYTES, flows
from moetool.placement.planner import Problem

FORWARD_TOKENS = 4
"""Tokens of a forward of which `PlacementScore.messages` counts messages: a decode step of a few requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementScore:
    """Scores of a placement on the demand of some requests.

    Attributes:
        local_N: share of each server's expert calls that one of its own GPUs computes (None: an idle server).
        local: the same over all calls.
        local_mean: mean over servers that are not idle.
        remote_calls: Prism's Eq. 2, in calls: those that no GPU of the token's server computes.
        remote_bound: the least of any placement in these slots (`prism_exact`); None if not computed, or not within
            two minutes. A slot has the size of the model's largest expert. With experts of several sizes, more may fit
            by bytes, and the bound does not hold.
        messages: other servers that a forward of `FORWARD_TOKENS` calls in each layer, the expected mean.
        comp: DIRECTOR's T_comp (Eq. 2), in the unit of the costs.
        comm: T_comm (Eq. 4).
        memory_bound: lower bound of comp + comm of any placement in this memory, with or without copies: perfect
            balance, and the traffic that memory cannot avoid. None if not computed.
        latency_bound: a tighter bound of comp + comm for fewer placements, or None. If this placement has one copy of
            each expert, it is that of the relaxation with the hottest expert. It then covers placements with one copy
            each, and per GPU at most as many experts of a layer as this one or `layer_slots`; others may have less. For
            a placement with copies, a large layer, or after two minutes, it is `memory_bound`. Compared placements
            share one bound.
        balancedness: three definitions on the same loads of GPUs: `sglang`, the mean over layers of
            (mean + 1e-5) / (max + 1e-5); `vllm`, the sum of means over the sum of maxima; `tensorrt_llm`, the mean
            over layers of (max - mean) / mean, where 0 is best.
        even_balancedness: `sglang`'s if copies shared their expert's tokens evenly, as EPLB assumes.
        link_bytes: bytes between each pair of servers, dispatch and combine together, as [from, to, bytes]; None where
            the model's hidden size is unknown.
        copies: expert copies on all GPUs over the model's experts.
        unit: unit of comp, comm and their bound.
    """

    local_N: tuple[float | None, ...]
    local: float
    local_mean: float
    remote_calls: float
    remote_bound: float | None
    messages: float
    comp: float
    comm: float
    memory_bound: float | None
    latency_bound: float | None
    balancedness: dict[str, float]
    even_balancedness: float
    link_bytes: tuple[tuple[str, str, float | None], ...]
    copies: float
    unit: str

    @property
    def latency(self) -> float:
        """Return T_comp + T_comm."""
        return self.comp + self.comm

    @property
    def latency_gap(self) -> float | None:
        """Return the gap to `latency_bound`, as a share of it."""
        return None if not self.latency_bound else self.latency / self.latency_bound - 1

    @property
    def remote_gap(self) -> float | None:
        """Return the gap of Eq. 2 to its bound, as a share of all calls."""
        if self.remote_bound is None:
            return None
        calls = self.remote_calls / max(1e-12, 1 - self.local) if self.local < 1 else None
        return 0.0 if calls is None else (self.remote_calls - self.remote_bound) / calls

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "latency": self.latency, "latency_gap": self.latency_gap, "remote_gap": self.remote_gap}


def score(
    problem: Problem,
    placed_GLE: np.ndarray,
    *,
    bounds: bool = True,
    routing: str = "nearest",
    value_bytes: int = VALUE_BYTES,
    c_max: int = 0,
) -> PlacementScore:
    """Score a placement on the demand of a problem.

    Args:
        bounds: whether to compute the lower bounds, the slowest part.
        routing: choice of the copy for a token (`moetool.placement.latency.flows`).
        value_bytes: bytes of one number of a hidden state, for `link_bytes`.
        c_max: limit that the latency bound assumes.
    """
    demand, cluster, latency = problem.demand, problem.cluster, problem.latency
    flow_LGG = np.stack(
        [flows(cluster, demand.tokens_GLE[:, i], placed_GLE[:, i], routing) for i in range(problem.spec.num_layers)]
    )
    calls_N = demand.tokens_NLE.sum(axis=(1, 2))
    flow_NN = per_server(cluster, per_server(cluster, flow_LGG.sum(axis=0)).T).T
    local_N = np.diag(flow_NN)
    busy_N = calls_N > 0
    parts = np.array([latency.layer(flow_GG) for flow_GG in flow_LGG])
    even_LG = np.stack(
        [
            flows(cluster, demand.tokens_GLE[:, i], placed_GLE[:, i], "even").sum(axis=0)
            for i in range(problem.spec.num_layers)
        ]
    )
    return PlacementScore(
        local_N=tuple(float(a / b) if b else None for a, b in zip(local_N, calls_N, strict=True)),
        local=float(local_N.sum() / calls_N.sum()),
        local_mean=float((local_N[busy_N] / calls_N[busy_N]).mean()),
        remote_calls=float(flow_NN.sum() - local_N.sum()),
        remote_bound=remote_bound(problem) if bounds else None,
        messages=messages(demand, placed_GLE),
        comp=float(parts[:, 0].sum()),
        comm=float(parts[:, 1].sum()),
        memory_bound=memory_bound(problem) if bounds else None,
        latency_bound=latency_bound(problem, placed_GLE, c_max=c_max) if bounds else None,
        balancedness=balancedness(flow_LGG.sum(axis=1)),
        even_balancedness=balancedness(even_LG)["sglang"],
        link_bytes=_link_bytes(problem, flow_NN, value_bytes),
        copies=float(placed_GLE.sum() / problem.spec.total_experts),
        unit=latency.unit,
    )


def remote_calls(cluster: Cluster, tokens_GLE: np.ndarray, placed_GLE: np.ndarray) -> float:
    """Return Prism's Eq. 2 in calls: (token, expert) pairs whose expert no GPU of the token's server holds."""
    held_NLE = per_server(cluster, placed_GLE) > 0
    return float((per_server(cluster, tokens_GLE) * ~held_NLE).sum())


def messages(demand: Demand, placed_GLE: np.ndarray, forward_tokens: int = FORWARD_TOKENS) -> float:
    """Return how many other servers a forward calls in each layer: the expected mean over forwards of all servers.

    A forward sends one message to each server that it needs: to those that alone hold a missing expert, and for other
    experts to those that it most likely calls anyway.
    """
    spec, held_NLE = demand.spec, per_server(demand.cluster, placed_GLE) > 0
    tokens_NLE, servers = demand.tokens_NLE, np.arange(len(held_NLE))
    tokens_NL = tokens_NLE.sum(axis=2) / np.array(spec.top_k_L)
    needs_NLE = needed_by_forward(spec, tokens_NLE, forward_tokens)
    total = 0.0
    for layer in range(spec.num_layers):
        held_NE = held_NLE[:, layer]
        missing_NE = np.where(held_NE, 0.0, needs_NLE[:, layer])
        alone_E = held_NE.sum(axis=0) == 1
        needs_NN = missing_NE[:, alone_E] @ held_NE[:, alone_E].T
        missing_NE[:, alone_E] = 0.0
        while missing_NE.any():
            more_NN = missing_NE @ held_NE.T
            called_N = np.where(more_NN > 0, needs_NN + more_NN, -1.0).argmax(axis=1)
            needs_NN[servers, called_N] += more_NN[servers, called_N]
            missing_NE[held_NE[called_N]] = 0.0
        total += float(tokens_NL[:, layer] @ -np.expm1(-needs_NN).sum(axis=1))
    return total / float(tokens_NL.sum())


def needed_by_forward(spec: ModelSpec, tokens_NLE: np.ndarray, forward_tokens: int) -> np.ndarray:
    """Return -log of the chance that no token of a forward on a server uses an expert.

    Tokens and experts count as independent, so sums over experts are those of none being used.

    Shapes: tokens_NLE float64 -> needs_NLE float64.
    """
    tokens_NL = np.maximum(tokens_NLE.sum(axis=2), 1e-12) / np.array(spec.top_k_L)
    share_NLE = np.minimum(tokens_NLE / tokens_NL[:, :, None], 1 - 1e-9)
    return np.asarray(-forward_tokens * np.log1p(-share_NLE))


def remote_call_s(cluster: Cluster, token_bytes: float) -> float:
    """Return seconds of a token to another server and back, without computing: the mean over pairs of servers."""
    ways = [cluster.round_trip_s(a, b, token_bytes) for a in range(len(cluster.servers)) for b in range(a)]
    return float(np.mean(ways)) if ways else 0.0


def balancedness(load_LG: np.ndarray) -> dict[str, float]:
    """Return the three definitions of balancedness for loads of GPUs."""
    used_LG = load_LG[load_LG.sum(axis=1) > 0]
    mean_L, max_L = used_LG.mean(axis=1), used_LG.max(axis=1)
    return {
        "sglang": float(((mean_L + 1e-5) / (max_L + 1e-5)).mean()),
        "vllm": float(mean_L.sum() / max_L.sum()),
        "tensorrt_llm": float(((max_L - mean_L) / mean_L).mean()),
    }


def _link_bytes(problem: Problem, flow_NN: np.ndarray, value_bytes: int) -> tuple[tuple[str, str, float | None], ...]:
    names, known = [server.name for server in problem.cluster.servers], problem.spec.hidden_size > 0
    bytes_NN = (flow_NN + flow_NN.T) * problem.spec.hidden_size * value_bytes
    return tuple(
        (a, b, float(bytes_NN[i, j]) if known else None)
        for i, a in enumerate(names)
        for j, b in enumerate(names)
        if i != j
    )
