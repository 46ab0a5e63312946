"""Demand, read from traces: the tokens on each GPU that use each expert."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetool.base.errors import MismatchError, UsageError, unknown_name
from moetool.base.types import Cluster, ModelSpec
from moetool.trace.expert_counts import ExpertCounts, count_experts

if TYPE_CHECKING:
    from moetool.trace.reader import Trace

    Workload = Trace | ExpertCounts

Batch = tuple["Demand", tuple[tuple[str, np.ndarray], ...]]
"""The demand of a batch, and for each GPU the request's task and its tokens' routes [T, S]."""
STARTS = ("round_robin", "random", "first")
WHOLE = ""
"""In place of a server's name: a trace of the whole cluster, whose requests start on all its GPUs."""
_IDLE_TOKENS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The workload matrices W of DIRECTOR, and the activation frequencies f of Prism.

    Attributes:
        cluster: cluster of the GPUs where tokens start.
        tokens_GLE: tokens that start on GPU g and use expert e of layer l (float64); 0 beyond a layer's experts.

    Raises:
        UsageError: a number is not finite or below zero, or all are zero.
    """

    spec: ModelSpec
    cluster: Cluster
    tokens_GLE: np.ndarray

    def __post_init__(self) -> None:
        expected = (len(self.cluster.gpus), self.spec.num_layers, self.spec.num_experts)
        if self.tokens_GLE.shape != expected:
            raise UsageError(
                f"the loads have the shape {self.tokens_GLE.shape}, expected {expected} (GPU, layer, expert)"
            )
        if not np.isfinite(self.tokens_GLE).all() or (self.tokens_GLE < 0).any():
            raise UsageError("the loads hold numbers that are not finite or below 0, expected counts of tokens")
        if not self.tokens_GLE.any():
            raise UsageError("the loads are all zero, expected tokens; give a trace with tokens")

    @property
    def tokens_LE(self) -> np.ndarray:
        """Return the tokens of the whole cluster."""
        return self.tokens_GLE.sum(axis=0)

    @property
    def tokens_NLE(self) -> np.ndarray:
        return per_server(self.cluster, self.tokens_GLE)

    @property
    def frequency_NLE(self) -> np.ndarray:
        """Return f of Prism's Eq. 2: the tokens of each server; a layer that a server never used counts as uniform.

        A uniform layer weighs a thousandth of a token: enough to break ties, too little to outweigh a call.
        """
        frequency_NLE = self.tokens_NLE
        for layer, (num_experts, top_k) in enumerate(zip(self.spec.num_experts_L, self.spec.top_k_L, strict=True)):
            idle_N = frequency_NLE[:, layer].sum(axis=1) == 0
            frequency_NLE[idle_N, layer, :num_experts] = _IDLE_TOKENS * top_k / num_experts
        return frequency_NLE


def per_server(cluster: Cluster, values_GX: np.ndarray) -> np.ndarray:
    """Return sums over the GPUs of each server, along the first axis."""
    first_N = np.flatnonzero(np.diff(np.array(cluster.server_G), prepend=-1))  # a server's GPUs are consecutive
    return np.add.reduceat(values_GX, first_N, axis=0, dtype=np.float64)


def spread(spec: ModelSpec, cluster: Cluster, tokens_NLE: np.ndarray) -> Demand:
    """Return the loads of servers as loads of GPUs, split evenly, as with many requests round robin."""
    server_G = np.array(cluster.server_G)
    share_G = 1.0 / np.bincount(server_G)[server_G]
    if tokens_NLE.shape[:1] != (len(cluster.servers),):
        raise UsageError(f"the loads are of {len(tokens_NLE)} servers, but the cluster has {len(cluster.servers)}")
    return Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_NLE[server_G] * share_G[:, None, None])


def loads(workload: "Workload", only: Container[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (request, tokens_LE): tokens of a request per expert; a request may come in several pieces.

    For counts, passes take the place of requests.

    Args:
        only: the requests to count.
    """
    if isinstance(workload, ExpertCounts):
        yield from ((number, workload.counts_WLE[number]) for number in workload.requests if number in only)
        return
    for batch in workload.batches():
        for request in np.unique(batch.request_T).tolist():
            if request in only:
                yield request, count_experts(workload.spec, batch.experts_TS[batch.request_T == request])


def numbers(workload: "Workload") -> list[int]:
    """Return the requests of a trace, or the passes of counts, in their order."""
    if isinstance(workload, ExpertCounts):
        return list(workload.requests)
    return workload.requests["request"].to_pylist()


def read_demand(
    traces: Mapping[str, "Workload"],
    cluster: Cluster,
    uses: Callable[[str, int], bool] = lambda server, place: True,
    *,
    starts: str = "round_robin",
    seed: int = 0,
) -> Demand:
    """Count the routes of each server's trace. A server without a trace is idle.

    A request's tokens all start on one GPU of its server. The tokens of counts, of many requests each, start evenly on
    all its GPUs, unless `starts` is `first`.

    Args:
        traces: trace or counts by server name, or one of `WHOLE` cluster.
        uses: whether to count a request, by server name and the request's index in its trace.
        starts: GPU of a request: `round_robin`, in the order of the requests; `random`, by `seed`; or `first`.

    Raises:
        UsageError: no trace, an unknown server, no token, or an unknown `starts`.
        MismatchError: the traces are of different models.
    """
    if starts not in STARTS:
        raise unknown_name("--set starts", starts, STARTS)
    rng = np.random.default_rng(seed)
    spec = one_model(traces, cluster)
    tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
    for name, gpus in _gpus(cluster, traces).items():
        trace = traces[name]
        used = [request for place, request in enumerate(numbers(trace)) if uses(name, place)]
        if isinstance(trace, ExpertCounts) and starts != "first":
            tokens_GLE[gpus.start : gpus.stop] += trace.counts_WLE[used].sum(axis=0) / len(gpus)
            continue
        turns = np.arange(len(used)) if starts != "first" else np.zeros(len(used), np.int64)
        turns = rng.integers(len(gpus), size=len(used)) if starts == "random" else turns % len(gpus)
        gpu = {request: gpus[turn] for request, turn in zip(used, turns.tolist(), strict=True)}
        for request, tokens_LE in loads(trace, gpu):
            tokens_GLE[gpu[request]] += tokens_LE
    return Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)


def _gpus(cluster: Cluster, traces: Mapping[str, "Workload"]) -> dict[str, range]:
    """Return the GPUs of each trace's server."""
    if WHOLE in traces:
        return {WHOLE: range(len(cluster.gpus))}
    ends = np.cumsum([len(server.gpus) for server in cluster.servers]).tolist()
    known = zip(cluster.servers, ends, strict=True)
    return {server.name: range(end - len(server.gpus), end) for server, end in known if server.name in traces}


def one_model(traces: Mapping[str, "Workload"], cluster: Cluster) -> ModelSpec:
    """Return the common model of all traces.

    Raises:
        UsageError: there is no trace, the cluster lacks a trace's server, or one of several traces is of the whole
            cluster.
        MismatchError: they are of different models.
    """
    names = [server.name for server in cluster.servers]
    if not traces:
        raise UsageError("no trace to plan from; pass --trace SERVER=DIR for each server that has requests")
    if WHOLE in traces and len(traces) > 1:
        raise UsageError(
            f"--trace {traces[WHOLE].path} is of the whole cluster, expected it alone; give every trace as SERVER=DIR"
        )
    if unknown := [name for name in traces if name not in (*names, WHOLE)]:
        raise UsageError(f"unknown server {unknown[0]!r} in --trace, expected one of {', '.join(names)}")
    (first, trace), *others = traces.items()
    for name, other in others:
        if other.spec.revision != trace.spec.revision:
            raise MismatchError(
                f"the trace of {name} is of {other.spec.name} ({other.spec.revision[:12]}), but that of {first} is of "
                f"{trace.spec.name} ({trace.spec.revision[:12]}); capture all of one model"
            )
    return trace.spec


def planned_share(split: float, traces: Mapping[str, "Workload"] | None = None) -> Callable[[str, int], bool]:
    """Choose the requests to plan on: a share `split`.

    Of a trace they are evenly spaced; 0.5 takes every other. Of counts they are the first windows: plans are made on
    the past and judged on the future.

    Args:
        traces: the traces, if some may be counts.

    Raises:
        UsageError: the share is not above 0 and at most 1, or counts have a single window to split.
    """
    if not 0 < split <= 1:
        raise UsageError(f"--split {split}: expected a share above 0 and at most 1, such as 0.5")
    past: dict[str, int] = {}
    for server, trace in (traces or {}).items():
        if not isinstance(trace, ExpertCounts):
            continue
        windows = len(trace.requests)
        if split < 1 and windows < 2:
            raise UsageError(
                f"{trace.path} holds counts of one window, expected two or more to split by time; import counts with a "
                f"column for the time, or give --split 1"
            )
        past[server] = windows if split == 1 else min(max(1, int(windows * split + 1e-9)), windows - 1)

    def uses(server: str, place: int) -> bool:
        if server in past:
            return place < past[server]
        return int((place + 1) * split + 1e-9) > int(place * split + 1e-9)

    return uses


def held_out(uses: Callable[[str, int], bool]) -> Callable[[str, int], bool]:
    """Return the complement of `uses`."""
    return lambda server, place: not uses(server, place)


def read_batches(
    traces: Iterable["Trace"], cluster: Cluster, tokens: int, seed: int, uses: Callable[[str, int], bool]
) -> Iterator[Batch]:
    """Read batches that mix the requests of traces: in each, every GPU of the cluster gets one piece of a request.

    A request of more than `tokens` tokens is cut into independent pieces of this length, without the remainder. A
    shorter one is one piece. Pieces that fill no whole batch are dropped.

    Raises:
        UsageError: there is no whole batch.
    """
    parts: list[tuple[str, np.ndarray]] = []
    spec = None
    for trace in traces:
        spec = spec or trace.spec
        table = trace.requests
        tasks = dict(zip(table["request"].to_pylist(), table["task"].to_pylist(), strict=True))
        wanted = {request for place, request in enumerate(tasks) if uses("", place)}
        rows: dict[int, list[np.ndarray]] = {}
        for batch in trace.batches():
            for request in np.unique(batch.request_T).tolist():
                if request in wanted:
                    rows.setdefault(request, []).append(batch.experts_TS[batch.request_T == request])
        for request, pieces in rows.items():
            whole_TS = np.concatenate(pieces)
            cuts = range(0, max(1, len(whole_TS) - tokens + 1), tokens)
            parts += [(tasks[request], whole_TS[cut : cut + tokens]) for cut in cuts]
    num_gpus = len(cluster.gpus)
    if spec is None or len(parts) < num_gpus:
        raise UsageError(
            f"{len(parts)} pieces of requests make no batch of {num_gpus} GPUs; give traces with more requests"
        )
    order: Sequence[int] = np.random.default_rng(seed).permutation(len(parts)).tolist()
    for start in range(0, len(parts) - num_gpus + 1, num_gpus):
        chosen = tuple(parts[i] for i in order[start : start + num_gpus])
        tokens_GLE = np.stack([count_experts(spec, rows_TS) for _, rows_TS in chosen])
        yield Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE), chosen
