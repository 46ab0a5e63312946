"""Replay of a trace under cache policies: hits, loads and bytes, without a model.

The policies are called exactly as in the server, so on the same gate stream they take the same decisions. With a
machine's profile, a timeline executes the decisions and the rows have times.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, UsageError, unknown_name
from moetool.base.families import require_substitutable
from moetool.base.tables import numbered
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.devices import build_policies, open_pool, split_bytes, split_slots
from moetool.caching.layer_slots import SHARES, equal_slots, require_pool_form, scaled_down
from moetool.caching.machine_split import MODES, MachineSplit, SplitCosts
from moetool.caching.policy import Policy, SharedPredictor, policy_class, slots_within
from moetool.caching.residency import Counts, Residency, Step, StepKind
from moetool.costing.costs import CostProfile
from moetool.costing.pricing import Prices, TimelineOptions, with_host_costs
from moetool.costing.timeline import MeteredPredictor, Timeline
from moetool.costing.timing import Timing
from moetool.trace.events import gate_events
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.tuning.batches import Batching, batched_forwards
from moetool.tuning.server_log import late_ends, measured_costs, read_decisions

SERVED = "served"
"""Name for the policies of the server that wrote the log, each from its forward on."""
POOL_UNITS = ("auto", "slots", "bytes")
DEFAULT_MACHINE = TimelineOptions()
FEW_EVENTS = 10_000
"""Events of a pool that Python decides in a second. Compiling, once on a machine, takes up to half a minute."""


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRow:
    """Results of one policy with one budget.

    Attributes:
        slots: expert slots in the budget; for a pool in bytes, the number of largest experts that fit.
        prefill: counts over the forwards with prompt tokens.
        decode: counts over the forwards without.
        decode_tokens: tokens of the forwards without prompt tokens.
        prefill_bytes: bytes loaded in the forwards with prompt tokens, on demand and ahead.
        decode_bytes: the same in the forwards without.
        decode_host_bytes: bytes of the experts that the host computed in the forwards without prompt tokens.
        digest: digest of all decisions in order; equal digests mean equal decisions.
        devices: number of devices that share budget and model.
        timing: times on the timeline, with a profile.
        trained_on: number of replayed requests that its predictor was trained on; on new ones it hits less.
        requests: counts of each request, if one ran after the other; else none.
        misses: as in `ReplaySetup`; `own`: as the policy says, which computes on the host itself.
        bound_s: with costs of link and host, a bound of the time per output token of one request: compute without
            experts, then the misses at the rates of link and host together.
    """

    policy: str
    budget_bytes: int
    slots: int
    prefill: Counts
    decode: Counts
    decode_tokens: int
    prefill_bytes: int
    decode_bytes: int
    decode_host_bytes: int
    digest: str
    devices: int = 1
    timing: Timing | None = None
    trained_on: int = 0
    requests: tuple[Counts, ...] = ()
    misses: str = "load"
    bound_s: float | None = None

    @property
    def counts(self) -> Counts:
        """Return the counts of prefill and decode together."""
        return self.prefill + self.decode

    @property
    def loaded_bytes(self) -> int:
        return self.prefill_bytes + self.decode_bytes

    @property
    def loads_per_decode_token(self) -> float:
        """Return experts loaded per token of forwards without prompt tokens (0 without such tokens)."""
        return self.decode.loads / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def bytes_per_decode_token(self) -> float:
        """Return bytes loaded per token of forwards without prompt tokens (0 without such tokens)."""
        return self.decode_bytes / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def host_bytes_per_decode_token(self) -> float:
        """Return bytes per such token that host compute reads from memory or disk."""
        return self.decode_host_bytes / self.decode_tokens if self.decode_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return one flat object: the row of a table.

        With a timeline, `prefetched` is split into `in_time` and `late`.
        """
        counts, timing = self.counts, self.timing
        timed = {}
        if timing is not None:
            late = timing.total.late
            timed = {"in_time": counts.prefetched - late, "late": late, **timing.to_json()}
        return {
            "policy": self.policy,
            "budget_bytes": self.budget_bytes,
            "slots": self.slots,
            "devices": self.devices,
            "misses": self.misses,
            "hit_rate": counts.hit_rate,
            "hit_rate_decode": self.decode.hit_rate,
            "needed": counts.needed,
            "kept": counts.kept,
            "prefetched": counts.prefetched,
            "missed": counts.missed,
            "hosted": counts.hosted,
            "wasted": counts.wasted,
            "loads": counts.loads,
            "loaded_bytes": self.loaded_bytes,
            "decode_tokens": self.decode_tokens,
            "loads_per_decode_token": self.loads_per_decode_token,
            "bytes_per_decode_token": self.bytes_per_decode_token,
            "host_bytes_per_decode_token": self.host_bytes_per_decode_token,
            "digest": self.digest,
            "trained_on": self.trained_on,
            "tpot_link_and_host_bound_s": self.bound_s,
            **timed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySetup:
    """Inputs of a replay, in addition to policies and budgets.

    Attributes:
        predictor: a `moetool.training.predictor.Predictor`, for policies that need one.
        trained_on: requests that the predictor was trained on (`moetool.trace.same_prompts`), which the rows count.
        sequential: one request after the other, or the recorded forwards (default: recorded for the log of a server).
        requests: requests to include (default: all).
        batching: batches to form instead of the trace's forwards (not for `SERVED`).
        warm_tokens: tokens at the start that fill pools and memories and count in no row, in whole forwards. The digest
            includes them, and a timeline does not permit them.
        options: values for the `Options` of policies, by policy name. A profile sets the costs of host and link for
            policies that use them.
        pool: form of the pool (`moetool.caching.layer_slots.POOL_FORMS`). A policy that knows the future always has
            one pool.
        pool_unit: unit of the capacity of one pool for all layers: `slots` that each hold any expert, as in the server;
            `bytes`, where each expert has its own size; `auto`: bytes for imported traces, else slots.
        layer_slots: guaranteed slots of each layer instead (`moetool.caching.residency.Residency`).
        profile: costs of the machine for the rows' `timing`; None without times.
        timeline: which of the profile's devices, data types and tiers.
        misses: `load`, or a mode of `moetool.caching.machine_split` for policies that do not compute on the host
            themselves, by the costs of the profile or `split`.
        split: costs by which the split decides; None: those of the profile, which times follow in any case.
        host_experts: experts that host memory holds, for the split; None: all.
        split_changes: recorded forwards, and whether the split is used from there on.
        devices: number of devices that share the model (`moetool.caching.devices`), with equal parts of the budget.
        reserved_slots: recorded forwards, and the slots reserved from there on (`moetool.caching.residency`).
        jobs: processes of `moetool.tuning.replay_jobs`; 0: one per processor for a large replay.
        on_progress: called with the activity, the replayed tokens and the total.
    """

    predictor: Any = None
    trained_on: Collection[int] = ()
    sequential: bool | None = None
    requests: frozenset[int] | None = None
    batching: Batching | None = None
    warm_tokens: int = 0
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pool: str = "one"
    pool_unit: str = "auto"
    layer_slots: Sequence[int] = ()
    profile: CostProfile | None = None
    timeline: TimelineOptions = DEFAULT_MACHINE
    misses: str = "load"
    split: SplitCosts | None = None
    host_experts: int | None = None
    split_changes: Sequence[tuple[int, int]] = ()
    devices: int = 1
    reserved_slots: Sequence[tuple[int, int]] = ()
    jobs: int = 1
    on_progress: Callable[[str, int, int], None] = ignore_progress


AS_RECORDED = ReplaySetup()
"""All requests in the trace's own order, without predictor or profile."""


def replay(
    trace: Trace, policies: Sequence[str], budgets: Sequence[int], setup: ReplaySetup = AS_RECORDED
) -> list[ReplayRow]:
    """Run each policy with each budget over a trace.

    The trace is read once for all of them (twice if one must know the future), and predictions are shared.

    Args:
        policies: names, and `SERVED` for the log of a server.
        budgets: bytes for experts.

    Returns:
        A row for each policy and budget, in their orders.

    Raises:
        UsageError: an unknown policy or option, a missing predictor, nothing to replay, or a timeline for several
            devices.
        MismatchError: the trace lacks a column that a policy needs, the predictor or the profile is of another model,
            or the profile lacks what the timeline needs.
        CapacityError: a budget is below the smallest legal pool.
    """
    if setup.devices > 1 and setup.profile is not None:
        raise UsageError(
            f"a timeline has one device, but {setup.devices} were requested; leave out --profile, or the devices"
        )
    if SERVED in policies:
        name, as_served = _as_served(trace, setup)
        rows = {SERVED: [replace(row, policy=SERVED) for row in replay(trace, [name], budgets, as_served)]}
        rows |= {other: replay(trace, [other], budgets, setup) for other in policies if other != SERVED}
        return [row for policy in policies for row in rows[policy]]
    source = _Source(trace, setup)
    runs = _prepare(source, policies, budgets, setup)
    forwards = decode_tokens = tokens = 0
    warm = setup.warm_tokens > 0
    assert setup.profile is None or not warm
    title, total = f"replaying {numbered(len(runs), 'pool')} (tokens)", source.num_tokens()
    for forward in source.forwards(_columns(runs)):
        info = forward.info
        if warm and tokens >= setup.warm_tokens:
            warm = False
            forwards = decode_tokens = 0
            for run in runs:
                run.begin_counting()
        apart = [run for run in runs if not run.forward(forward)]
        for event in forward.events if apart else ():  # one by one, since runs may share a predictor
            for run in apart:
                run.event(event)
        for run in runs:
            run.end(forward)
        forwards += 1
        tokens += len(info.request_T)
        setup.on_progress(title, tokens, total)
        decode_tokens += 0 if info.prefill else len(info.request_T)
    if not forwards:
        raise UsageError(f"nothing to replay: {trace.path} has no forwards of the chosen requests")
    if warm:
        raise UsageError(f"nothing to count: {trace.path} ends within the first {setup.warm_tokens:,} tokens")
    return [run.row(decode_tokens) for run in runs]


def replay_served(trace: Trace, setup: ReplaySetup = AS_RECORDED) -> ReplayRow:
    """Repeat the decisions of the server that wrote a log, with its slots, and require that they are equal.

    Raises:
        UsageError: as `replay`, or a part of the requests is asked for.
        MismatchError: the log does not say what the server had, another predictor or none is given, or the decisions
            differ from the server's.
    """
    made = trace.manifest["provenance"]
    slots, digest = made.get("slots"), made.get("decisions")
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1 or not isinstance(digest, str):
        raise MismatchError(
            f"{trace.path} does not say the slots and decisions of its server, expected a log of serve; name policies "
            f"and a --budget to replay instead"
        )
    if setup.requests is not None and setup.requests < set(trace.requests["request"].to_pylist()):
        raise UsageError(f"policy {SERVED} repeats all decisions of the server; replay all requests")
    if made.get("state") is not None:
        raise MismatchError(
            f"the server of {trace.path} began with a learned state (sha256 {str(made['state'])[:12]}), which a replay "
            f"does not have; name policies and a --budget to replay instead"
        )
    served, given = made.get("predictor"), getattr(setup.predictor, "sha256", None)
    if "predictor" in made and served != given:
        raise MismatchError(
            f"the server of {trace.path} had {_predictor_name(served)}, but the replay has {_predictor_name(given)}; "
            f"give --predictor that of the server"
        )
    (row,) = replay(trace, [SERVED], [slots * trace.spec.slot_bytes], setup)
    if row.digest != digest:
        failed = made.get("failed_forwards")
        why = f", of which {failed} failed forwards leave no rows" if failed else ""
        raise MismatchError(
            f"the replay of {trace.path} decides {row.digest}, but its server decided {digest}{why}; the log is of "
            f"another version of moetool, or incomplete"
        )
    return row


def _predictor_name(sha256: object) -> str:
    return "no predictor" if sha256 is None else f"the predictor of sha256 {str(sha256)[:12]}"


def decisions(
    trace: Trace, policy: str, budget_bytes: int, setup: ReplaySetup = AS_RECORDED
) -> Iterator[tuple[int, int, Step]]:
    """Yield every step of one run as (forward, layer, step), to compare with the log of a server.

    Errors are those of `replay`. Layer -1 is before the first MoE layer.
    """
    source = _Source(trace, setup)
    (run,) = _prepare(source, [policy], [budget_bytes], setup)
    for forward in source.forwards(_columns([run])):
        for step in run.begin(forward.info):
            yield forward.info.forward_id, -1, step
        for event in forward.events:
            for step in run.event(event):
                yield forward.info.forward_id, event.layer, step
        run.end(forward)


def pools_bytes(trace: Trace, pool: str = "one", pool_unit: str = "auto") -> bool:
    """Whether the capacity of such a pool (see `ReplaySetup`) is in bytes.

    Raises:
        UsageError: an unknown form or unit, or bytes for a pool with slots per layer.
    """
    require_pool_form("pool", pool)
    if pool_unit not in POOL_UNITS:
        raise unknown_name("pool unit", pool_unit, POOL_UNITS)
    if pool != "one" and pool_unit == "bytes":
        raise UsageError(f"pool {pool} counts slots and pool unit is bytes; use pool one or pool unit slots")
    wanted = pool_unit == "bytes" or (pool_unit == "auto" and "imported" in trace.manifest["provenance"])
    return pool == "one" and wanted and len(set(trace.spec.expert_bytes_L)) > 1  # with one size, both are equal


def whole_bytes(trace: Trace, pool: str = "one", pool_unit: str = "auto") -> int:
    """Return the budget that holds every expert of the model. Raises: UsageError as in `pools_bytes`."""
    spec = trace.spec
    in_bytes = pools_bytes(trace, pool, pool_unit)
    return spec.all_experts_bytes if in_bytes else spec.total_experts * spec.slot_bytes


@dataclass(frozen=True)
class _Forward:
    """A forward to replay: its rows, and the requests that end with it."""

    spec: ModelSpec
    info: ForwardInfo
    rows: TokenBatch
    ended: list[int]

    @cached_property
    def events(self) -> list[GateEvent]:
        return gate_events(self.spec, self.rows, self.info)

    @cached_property
    def experts_TS(self) -> np.ndarray:
        return np.ascontiguousarray(self.rows.experts_TS, np.int32)


class _Source:
    """The part of a trace to replay, in the order to replay it."""

    def __init__(self, trace: Trace, setup: ReplaySetup) -> None:
        self.trace = trace
        logged = trace.manifest["composition"]["kind"] == "log"
        self.sequential = not logged if setup.sequential is None else setup.sequential
        self._requests = setup.requests
        self._batching = setup.batching
        self.late_ends = [] if self.sequential or self._batching else late_ends(trace)

    def requests(self) -> set[int]:
        recorded = set(self.trace.requests["request"].to_pylist())
        return recorded if self._requests is None else recorded & self._requests

    def num_tokens(self) -> int:
        table = self.trace.requests
        counts = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
        return sum(tokens for request, tokens in counts if self._requests is None or request in self._requests)

    def forwards(self, columns: Iterable[str]) -> Iterator[_Forward]:
        table, late = self.trace.requests, {request for _, request in self.late_ends} | self.trace.running
        left = dict(zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True))
        trace = self.trace
        for info, rows in self._forward_rows(columns):
            for request in info.request_T:
                left[request] -= 1
            ended = [request for request in dict.fromkeys(info.request_T) if not left[request]]
            yield _Forward(trace.spec, info, rows, [request for request in ended if request not in late])

    def _forward_rows(self, columns: Iterable[str]) -> Iterator[tuple[ForwardInfo, TokenBatch]]:
        trace, requests = self.trace, self._requests
        if self._batching is None:
            return trace.forward_rows(sequential=self.sequential, columns=columns, requests=requests)
        whole = (
            rows for rows in trace.whole_requests(columns) if requests is None or int(rows.request_T[0]) in requests
        )
        return batched_forwards(trace.spec, whole, self._batching)


class _Run:
    """One policy with one budget, split over devices, and its loads."""

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        policies: Sequence[Policy],
        capacity_bytes: Sequence[int] | None,
        setup: ReplaySetup,
        timeline: Timeline | None,
        source: _Source,
        costs: SplitCosts | None,
    ) -> None:
        self._name = name
        self._budget_bytes = budget_bytes
        self._devices = len(policies)
        self._spec = policies[0].spec
        self._size_L = np.array(self._spec.expert_bytes_L)
        self.columns = policies[0].columns
        self._digest = DecisionDigest()
        self._split: MachineSplit | None = None
        if (decides := setup.split or costs) is not None and setup.misses != "load":
            self._split = MachineSplit(self._spec, decides, setup.misses, setup.host_experts)
        self._residency = open_pool(
            policies,
            self._digest,
            capacity_bytes=capacity_bytes,
            layer_slots=() if policies[0].needs_future else _layer_slots(policies[0], setup),
            split=self._split,
            short=source.num_tokens() * self._spec.num_layers <= FEW_EVENTS,
        )
        self._costs_of_misses = costs
        self._misses = "own" if policies[0].computes_on_host else setup.misses
        self._timeline = timeline
        self._live = [policy for policy in policies if policy.live_costs]
        self._costs = deque(measured_costs(source.trace))  # of a server, each valid from a forward on
        self._late_ends = deque(source.late_ends)
        self._reserved_slots = deque(setup.reserved_slots)
        self._split_changes = deque(setup.split_changes)
        self._bytes = [0, 0]  # prefill, decode
        self._host_bytes = [0, 0]
        self._phase = Phase.DECODE
        self._warm = Counts(), Counts()  # prefill, decode
        self._by_request: list[Counts] | None = [] if source.sequential and not setup.batching else None
        self._before_request = Counts()
        predicts = setup.predictor is not None and policy_class(name).uses(setup.predictor)
        self._trained_on = len(source.requests() & set(setup.trained_on)) if predicts else 0

    def begin_counting(self) -> None:
        """Leave all forwards up to now out of the row."""
        self._warm = self._residency.prefill + Counts(), self._residency.decode + Counts()
        self._bytes, self._host_bytes = [0, 0], [0, 0]
        self._before_request = self._residency.prefill + self._residency.decode
        if self._by_request is not None:
            self._by_request = []

    def forward(self, forward: _Forward) -> bool:
        """Begin a forward, and run its events in one call if they are compiled; return whether they were."""
        self.begin(forward.info)
        compiled = self._residency.compiled if isinstance(self._residency, Residency) else None
        if compiled is None or self._timeline is not None:
            return False
        step_S6 = compiled.forward(forward.experts_TS)
        self._digest.add(step_S6)
        loaded = step_S6[step_S6[:, 2] != StepKind.COMPUTE, 3] // self._spec.num_experts
        self._bytes[self._phase] += int(self._size_L[loaded].sum())
        return True

    def begin(self, info: ForwardInfo) -> list[Step]:
        self._phase = Phase.PREFILL if info.prefill else Phase.DECODE
        while self._late_ends and self._late_ends[0][0] < info.recorded_id:
            self._residency.end_request(self._late_ends.popleft()[1])
        while self._live and self._costs and self._costs[0][0] <= info.recorded_id:
            _, load_s, host_s = self._costs.popleft()
            for policy in self._live:
                policy.take_costs(load_s, host_s)
        while self._split_changes and self._split_changes[0][0] <= info.recorded_id:
            assert self._split is not None
            self._split.active = bool(self._split_changes.popleft()[1])
        while self._reserved_slots and self._reserved_slots[0][0] <= info.recorded_id:
            self._residency.residencies[0].reserve_slots(self._reserved_slots.popleft()[1])
        steps = self._weigh(self._residency.begin_forward(info))
        if self._timeline is not None:
            self._timeline.begin_forward(info, steps)
        return steps

    def event(self, event: GateEvent) -> list[Step]:
        if (routed := self._residency.route(event)) is not None:
            event = replace(event, experts_TK=tuple(map(tuple, routed)))
        steps = self._weigh(self._residency.event(event))
        if self._timeline is not None:
            self._timeline.event(event, steps)
        return steps

    def end(self, forward: _Forward) -> None:
        self._residency.end_forward(forward.info)
        if self._timeline is not None:
            self._timeline.end_forward(forward.info)
        for request in forward.ended:
            self._residency.end_request(request)
        if forward.ended and self._by_request is not None:
            counts = self._residency.prefill + self._residency.decode
            self._by_request.append(counts - self._before_request)
            self._before_request = counts

    def row(self, decode_tokens: int) -> ReplayRow:
        timing = None if self._timeline is None else self._timeline.timing()
        decode = self._residency.decode - self._warm[1]
        bound_s = None
        if timing is not None and timing.decode_forwards and self._costs_of_misses is not None:
            costs, misses = self._costs_of_misses, decode.missed + decode.hosted
            dense_s = timing.decode.compute_s - (decode.needed - decode.hosted) * costs.device_s
            bound_s = (dense_s + misses * costs.missed_s) / timing.decode_forwards
        return ReplayRow(
            policy=self._name,
            budget_bytes=self._budget_bytes,
            slots=self._residency.num_slots,
            prefill=self._residency.prefill - self._warm[0],
            decode=decode,
            decode_tokens=decode_tokens,
            prefill_bytes=self._bytes[Phase.PREFILL],
            decode_bytes=self._bytes[Phase.DECODE],
            decode_host_bytes=self._host_bytes[Phase.DECODE],
            digest=self._digest.hexdigest(),
            devices=self._devices,
            timing=timing,
            trained_on=self._trained_on,
            requests=tuple(self._by_request or ()),
            misses=self._misses,
            bound_s=bound_s,
        )

    def _weigh(self, steps: list[Step]) -> list[Step]:
        sizes, stride = self._spec.expert_bytes_L, self._spec.num_experts
        for kind, key, _, _ in steps:
            if kind is StepKind.HOST:
                self._host_bytes[self._phase] += sizes[key // stride]
            elif kind is not StepKind.COMPUTE:
                self._bytes[self._phase] += sizes[key // stride]
        return steps


def _as_served(trace: Trace, setup: ReplaySetup) -> tuple[str, ReplaySetup]:
    """Return a server's policy, its pool and options, and what it changed.

    Raises:
        UsageError: several devices or another order are requested.
        MismatchError: as `moetool.tuning.server_log.read_decisions`.
    """
    if setup.devices > 1:
        raise UsageError(f"the server had one device; leave out devices={setup.devices} to replay it")
    if setup.sequential or setup.batching:
        raise UsageError(
            f"policy {SERVED} replays the forwards in the order in which the server ran them; "
            "leave out --order sequential and batching"
        )
    log = read_decisions(trace)
    return log.policy, replace(
        setup,
        options={**setup.options, log.policy: log.options},
        pool="one",
        pool_unit="slots",
        layer_slots=log.layer_slots,
        reserved_slots=log.reserved_slots,
        misses=setup.misses if log.split is None else "both",
        split=setup.split if log.split is None else log.split,
        host_experts=log.host_experts,
        split_changes=log.split_changes,
    )


def _layer_slots(policy: Policy, setup: ReplaySetup) -> Sequence[int]:
    if setup.pool in SHARES:
        return equal_slots(policy.spec, policy.num_slots, SHARES[setup.pool])
    return scaled_down(policy.spec, setup.layer_slots, policy.num_slots) if setup.layer_slots else ()


def _prepare(source: _Source, policies: Sequence[str], budgets: Sequence[int], setup: ReplaySetup) -> list[_Run]:
    """Create a run of each policy and budget; refuse impossible ones before reading forwards."""
    spec, predictor, devices = source.trace.spec, setup.predictor, setup.devices
    in_bytes = pools_bytes(source.trace, setup.pool, setup.pool_unit)
    prices = None if setup.profile is None else Prices(setup.profile, spec, setup.timeline)
    kinds = {name: policy_class(name) for name in policies}
    options = with_host_costs(policies, setup.options, prices)
    split = _split_costs(setup, prices)
    for name, kind in kinds.items():
        used = kind.needs | (predictor.needs if predictor is not None and kind.uses(predictor) else frozenset())
        if setup.batching is not None and "embeddings" in used:
            raise UsageError(f"{name} needs embeddings, recorded for the trace's own batches; leave out batching")
        source.trace.require(kind.needs, f"policy {name}")
        if not kind.lossless:
            require_substitutable(spec.name, name)
        if prices is not None and predictor is not None and kind.needs_predictor:
            prices.prediction_ns(1)  # refuses a profile without prediction times
    if setup.batching is not None and setup.sequential is not None:
        order = "sequential" if setup.sequential else "recorded"
        raise UsageError(f"batching forms an order of its own, but --order {order} is given; leave out one of them")
    if predictor is not None:
        source.trace.require(predictor.needs, "the predictor")
    slots = [slots_within(spec, budget) for budget in budgets]
    shared = _shared(predictor, policies)
    future = None
    if any(kind.needs_future for kind in kinds.values()):
        future = [
            [spec.expert_key(event.layer, expert) for expert in event.needed]
            for forward in source.forwards(())
            for event in forward.events
        ]

    def run(name: str, budget: int, num_slots: int) -> _Run:
        asked = shared.get(name)
        metered = None if asked is None or prices is None else MeteredPredictor(asked)
        shares = [num_slots]
        if devices > 1:
            shares = split_bytes(spec, budget, devices) if in_bytes else split_slots(spec, num_slots, devices)
        made = build_policies(name, spec, options.get(name, {}), shares, predictor=metered or asked, future=future)
        source.trace.require(made[0].columns, f"policy {name}")
        if "ahead" in made[0].columns:
            source.trace.require_ahead(min(made[0].distance, spec.num_layers - 1), f"policy {name}")
        lag = made[0].search_lag if made[0].prediction_lag is None else made[0].prediction_lag
        capacities = [
            budget // devices if policy.num_slots == fit else policy.num_slots * spec.slot_bytes
            for policy, fit in zip(made, shares, strict=True)
        ]
        return _Run(
            name,
            budget,
            made,
            capacities if in_bytes else None,
            setup,
            None if prices is None else Timeline(prices, predictor=metered, prediction_lag=lag, policy=made[0]),
            source,
            split,
        )

    return [run(name, budget, fit) for name in policies for budget, fit in zip(budgets, slots, strict=True)]


def require_place(misses: str, on_disk: bool) -> None:
    """Raise UsageError for an unknown place of misses, or one other than the device for experts that are on disk."""
    if misses not in ("load", *MODES):
        raise unknown_name("place of misses", misses, ("load", *MODES))
    if misses != "load" and on_disk:
        raise UsageError(
            f"misses {misses!r} are priced for experts in host memory, and timeline.tier is disk; use "
            f"timeline.tier=pinned, or load all misses"
        )


def _split_costs(setup: ReplaySetup, prices: Prices | None) -> SplitCosts | None:
    """Return the costs of link and host, by which times are told; None if they are unknown.

    Raises:
        UsageError: an unknown place of misses, several devices, no costs, or experts on disk.
    """
    on_disk = prices is not None and setup.timeline.tier == "disk"
    require_place(setup.misses, on_disk)
    splits = setup.misses != "load"
    if on_disk:
        return None  # reads bound a token, whatever link and host reach
    costs = setup.split if prices is None else None
    if prices is not None and (prices.host_costs() or (splits and setup.split is None)):
        costs = prices.split_costs()
    if splits and ((costs or setup.split) is None or setup.devices > 1):
        raise UsageError(
            f"misses {setup.misses!r} needs one device beside a host and the costs of both; name a machine with "
            f"--machine, or give a profile with --set timeline.device=cuda"
        )
    return costs


def _shared(predictor: Any, policies: Sequence[str]) -> dict[str, SharedPredictor]:
    """Return the predictor of each policy: shared, unless it has state across forwards."""
    if predictor is None:
        return {}
    if not predictor.remembers:
        return dict.fromkeys(policies, SharedPredictor(predictor))
    return {name: SharedPredictor(copy.deepcopy(predictor)) for name in policies}


def _columns(runs: Sequence[_Run]) -> frozenset[str]:
    """Return the trace columns that events need in addition to the experts."""
    return frozenset[str]().union(*(run.columns for run in runs)) - {"experts"}
