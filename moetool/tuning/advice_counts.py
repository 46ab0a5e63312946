"""Pinning and placement by counts of experts, chosen on one half of the requests and scored on the other.

Shapes, in addition to the letters of `moetool.base.types`: Q tasks, H the two halves of each task's requests: even
places for choices, odd ones for scores.
"""

from dataclasses import dataclass

import numpy as np

from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.placement import planner
from moetool.placement.demand import loads as counted_loads
from moetool.placement.demand import numbers, spread
from moetool.placement.latency import unit_latency
from moetool.placement.planner import Problem
from moetool.placement.scoring import PlacementScore, score
from moetool.trace.expert_counts import ExpertCounts, count_experts
from moetool.trace.reader import Trace

MOST_TASKS = 8
HOT_SHARE = 0.25
NUM_GPUS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvedCounts:
    """Counts of a trace, or of a folder of counts, by task and half.

    Attributes:
        tasks: tasks with the most tokens; one for counts.
        halves: whether there is a second half: several requests or passes, or the later half of a single request.
    """

    spec: ModelSpec
    tasks: tuple[str, ...]
    tokens_QHLE: np.ndarray
    halves: bool

    @property
    def chosen_LE(self) -> np.ndarray:
        """Return the tokens of the choosing requests, all tasks together."""
        return self.tokens_QHLE[:, 0].sum(axis=0)

    @property
    def scored_LE(self) -> np.ndarray:
        """Return the tokens of the scoring requests; the same ones for a single request."""
        return self.tokens_QHLE[:, int(self.halves)].sum(axis=0)


def halve(workload: "Trace | ExpertCounts") -> tuple[HalvedCounts, frozenset[int], frozenset[int]]:
    """Return counts by task and half, the choosing requests, and the scoring ones.

    The counts of a single request are halved by its tokens; there is no other request to score on.
    """
    named = _tasks(workload)
    places = dict.fromkeys(dict.fromkeys(named.values()), 0)
    half_of: dict[int, int] = {}
    for request in numbers(workload):
        half_of[request] = places[named[request]] % 2
        places[named[request]] += 1
    used = frozenset(request for request, half in half_of.items() if not half)
    held_out = frozenset(half_of) - used
    tasks = list(places)
    tokens_QHLE = np.zeros((len(tasks), 2, workload.spec.num_layers, workload.spec.num_experts))
    if len(half_of) == 1 and not isinstance(workload, ExpertCounts):
        experts_TS = np.concatenate([batch.experts_TS for batch in workload.batches()])
        parts = np.array_split(experts_TS, 2)
        tokens_QHLE[0] = [count_experts(workload.spec, part) for part in parts]
    else:
        for request, tokens_LE in counted_loads(workload, half_of):
            tokens_QHLE[tasks.index(named[request]), half_of[request]] += tokens_LE
    largest = np.sort(np.argsort(-tokens_QHLE.sum(axis=(1, 2, 3)), kind="stable")[:MOST_TASKS])
    counts = HalvedCounts(
        spec=workload.spec,
        tasks=tuple(tasks[i] for i in largest.tolist()),
        tokens_QHLE=tokens_QHLE[largest],
        halves=bool(tokens_QHLE[:, 1].any()),
    )
    return counts, used, held_out


def _tasks(workload: "Trace | ExpertCounts") -> dict[int, str]:
    if isinstance(workload, ExpertCounts):
        return dict.fromkeys(workload.requests, "counted")
    return {row["request"]: f"{row['dataset']}/{row['task']}" for row in workload.requests.to_pylist() if row["tokens"]}


def covered(spec: ModelSpec, by_LE: np.ndarray, on_LE: np.ndarray, shares: tuple[float, ...]) -> list[float]:
    """Return the share of choices taken by the most used experts of each layer, mean over layers.

    Args:
        by_LE: tokens that rank the experts.
        on_LE: tokens to count.
        shares: shares of a layer's experts.
    """
    found = []
    for layer, num_experts in enumerate(spec.num_experts_L):
        order = np.argsort(-by_LE[layer, :num_experts], kind="stable")
        taken = np.concatenate([[0.0], np.cumsum(on_LE[layer][order])])
        found.append(taken[[round(share * num_experts) for share in shares]] / max(taken[-1], 1.0))
    return np.mean(found, axis=0).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stability:
    """Share of choices taken by the `HOT_SHARE` most used experts of each layer; NaN where unknown.

    Attributes:
        same: on the requests of their counts.
        own: on other requests of the same task.
        other: on another task, mean over pairs.
    """

    same: float
    own: float
    other: float


def stability(counts: HalvedCounts) -> Stability:
    """Measure whether hot experts stay hot."""

    def mean(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
        found = [covered(counts.spec, by, on, (HOT_SHARE,))[0] for by, on in pairs if by.any() and on.any()]
        return float(np.mean(found)) if found else float("nan")

    tokens, every = counts.tokens_QHLE, range(len(counts.tasks))
    return Stability(
        same=mean([(tokens[q, 0], tokens[q, 0]) for q in every]),
        own=mean([(tokens[q, 0], tokens[q, 1]) for q in every]),
        other=mean([(tokens[q, 0], tokens[p, 1]) for q in every for p in every if p != q]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementGain:
    """A planner against an even placement, on held-out requests.

    Attributes:
        planner, baseline: names.
        measure: name of the two values.
    """

    planner: str
    baseline: str
    measure: str
    planned: float
    even: float


def balance_gain(counts: HalvedCounts, num_gpus: int = NUM_GPUS) -> PlacementGain | None:
    """Return the load balance of EPLB against a placement by number; None for too few experts."""
    spec = counts.spec
    if len(set(spec.num_experts_L)) > 1 or spec.num_experts % num_gpus or spec.num_experts < 2 * num_gpus:
        return None
    each = spec.total_experts // num_gpus * spec.slot_bytes
    cluster = Cluster(servers=(Server(name="node", gpus=(Gpu(memory_bytes=each),) * num_gpus),))
    planned, even = _scores(counts, cluster, ("eplb", "uniform"), by_task=False)
    return PlacementGain(
        planner="eplb",
        baseline="uniform",
        measure=f"mean load / load of the busiest of {num_gpus} GPUs",
        planned=planned.balancedness["sglang"],
        even=even.balancedness["sglang"],
    )


def locality_gain(counts: HalvedCounts) -> PlacementGain | None:
    """Return the local compute share of Prism with a server per task; None with one task.

    Each server has room for its part of the experts and a quarter more, for copies.
    """
    num = len(counts.tasks)
    if num < 2:
        return None
    each = -(-counts.spec.total_experts * 5 // (4 * num)) * counts.spec.slot_bytes
    cluster = Cluster(servers=tuple(Server(name=f"s{i}", gpus=(Gpu(memory_bytes=each),)) for i in range(num)))
    planned, even = _scores(counts, cluster, ("prism", "uniform"), by_task=True)
    return PlacementGain(
        planner="prism",
        baseline="uniform",
        measure=f"local compute share of {num} servers with one task each",
        planned=planned.local,
        even=even.local,
    )


def _scores(counts: HalvedCounts, cluster: Cluster, names: tuple[str, ...], *, by_task: bool) -> list[PlacementScore]:
    tokens_QHLE = counts.tokens_QHLE if by_task else counts.tokens_QHLE.sum(axis=0, keepdims=True)
    chosen, scored = (
        Problem(demand=spread(counts.spec, cluster, tokens_QHLE[:, half]), latency=unit_latency(cluster))
        for half in (0, int(counts.halves))
    )
    return [score(scored, planner.place(name, chosen), bounds=False) for name in names]
