"""Cache plans from a trace and a machine's memory, with evidence and bound."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, UsageError
from moetool.base.tables import count, numbered, percent
from moetool.base.types import ModelSpec
from moetool.caching.plan import CachePlan, PredictorReference
from moetool.costing.costs import CostProfile
from moetool.costing.pricing import TimelineOptions
from moetool.prediction.predictor import Predictor
from moetool.trace.expert_counts import count_experts
from moetool.trace.reader import Trace
from moetool.tuning.candidates import Candidates, touched_bytes, tpot_s
from moetool.tuning.frontier import budgets_between, frontier, least_budget
from moetool.tuning.pool_choice import PoolChoice, divide
from moetool.tuning.replay import DEFAULT_MACHINE, ReplayRow, ReplaySetup, ignore_progress

_BOUND = "belady"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A division of device memory.

    Attributes:
        slots: expert slots.
        dense_bytes: part for dense weights.
        kv_bytes: part for keys and values of `kv_tokens`.
    """

    slots: int
    dense_bytes: int
    kv_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """The memory of a device, and how a server divides it.

    Attributes:
        device_memory_bytes: device memory for the whole model.
        least_bytes: device memory of the smallest pool.
        most_bytes: device memory of every expert and the longest expected context.
        divide: the division of a device memory beside a predictor of some bytes. Raises: CapacityError below the
            smallest pool.
        dtype: data type of everything but the experts.
    """

    device_memory_bytes: int
    least_bytes: int
    most_bytes: int
    slot_bytes: int
    divide: Callable[[int, int], Room]
    dtype: str = "float32"

    def stored_bytes(self, spec: ModelSpec, device_memory_bytes: int, predictor_bytes: int) -> int:
        """Return the stored bytes of the experts in the slots of a device memory, which replays count; 0: none."""
        try:
            return self.divide(device_memory_bytes, predictor_bytes).slots * spec.slot_bytes
        except CapacityError:
            return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPredictor:
    """The predictor that a plan may use, if any.

    Attributes:
        predictor_bytes: its device memory, charged to the policies that use it.
        reference: its reference in the plan.
        trained_on: requests of the trace in its training.
    """

    predictor: Predictor | None = None
    predictor_bytes: int = 0
    reference: PredictorReference | None = None
    trained_on: Collection[int] = ()

    @classmethod
    def of(cls, predictor: Predictor, folder: Path, trace: Trace, trained_on: Collection[int]) -> "PlanPredictor":
        """Use the predictor of a folder. Raises: MismatchError where it is of another model than the trace."""
        trace.spec.require_same(predictor.spec, "the trace", "the predictor")
        return cls(
            predictor=predictor,
            predictor_bytes=predictor.num_bytes,
            reference=PredictorReference(name=predictor.name, sha256=predictor.sha256, path=str(folder.resolve())),
            trained_on=trained_on,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSearch:
    """The candidates of a plan, and the measure that chooses.

    Attributes:
        policies: candidates (default: every lossless policy that can serve with this trace and predictor, in the slots
            that fit, and that may win; see `moetool.tuning.candidates.Candidates`).
        options: values for the `Options` of policies, by policy name.
        profile: costs of the machine to plan for.
        timeline: choice among the profile's devices, data types and tiers.
        target_tpot_s: plan for the least memory, up to the device's, in which the best policy with default options
            takes at most this time per output token. The choosing requests meet it; the plan's reason says whether
            held-out ones do.
        frontier: number of budgets, from the smallest pool to all experts, for which the plan also shows the best
            policy, in one pool for all layers.
        pool: form of the pool (`moetool.tuning.pool_choice.divide`); `auto`: the best.
        seed: seed of the split of requests.
        jobs: as for `ReplaySetup`.
        on_progress: called with the activity, the amount done and the total.
    """

    policies: Sequence[str] | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    profile: CostProfile | None = None
    timeline: TimelineOptions = DEFAULT_MACHINE
    target_tpot_s: float | None = None
    frontier: int = 0
    pool: str = "auto"
    seed: int = 0
    jobs: int = 1
    on_progress: Callable[[str, int, int], None] = ignore_progress


ALL_CANDIDATES = CacheSearch()
NO_PREDICTOR = PlanPredictor()


def plan_cache(
    trace: Trace, memory: DeviceBudget, search: CacheSearch = ALL_CANDIDATES, predictor: PlanPredictor = NO_PREDICTOR
) -> CachePlan:
    """Choose the cache policy that moves the fewest bytes per decode token, and score it on held-out requests.

    With a profile, choose by the shortest time per output token instead.

    The requests that the predictor was not trained on are halved at random. Every candidate is replayed on the
    first half, where the choice is made, and again on the second, which gives the plan's evidence.

    Raises:
        MismatchError: the profile is of another model, or lacks what the timeline needs.
        CapacityError: the memory for experts is below the smallest legal pool or the needs of `search.policies`, or no
            pool that fits is fast enough.
        UsageError: too few requests for a held-out half, no candidate, or a target time without a profile or decoded
            tokens.
    """
    spec, profile, target_tpot_s = trace.spec, search.profile, search.target_tpot_s
    budget = memory.device_memory_bytes
    memory.divide(budget, 0)  # refuse too little
    used, held_out = _split(trace, frozenset(predictor.trained_on), search.seed)
    setup = ReplaySetup(
        options=search.options,
        predictor=predictor.predictor,
        trained_on=predictor.trained_on,
        profile=profile,
        timeline=search.timeline,
        jobs=search.jobs,
        on_progress=search.on_progress,
    )
    candidates = Candidates(
        trace,
        used,
        held_out,
        setup,
        names=search.policies,
        predictor_bytes=predictor.predictor_bytes,
        room=cache(partial(memory.stored_bytes, spec)),
    )
    left_out = candidates.require(budget)
    budgets = budgets_between(memory.least_bytes, memory.most_bytes, memory.slot_bytes, search.frontier)
    forms = {"one": 0, "auto": 2}.get(search.pool, 1)
    pools = sum(len(candidates.fitting(one)) for one in [*budgets, *[budget] * (2 + forms)])
    candidates.progress.expect((pools + len(budgets)) * len(used | held_out) // 2)  # more with a target time
    if target_tpot_s is not None:
        if profile is None:
            raise UsageError("a target time per output token needs the costs of a machine; give a profile")
        budget = min(budget, memory.most_bytes + candidates.paid_bytes)
        budget = least_budget(candidates, memory.least_bytes, budget, memory.slot_bytes, target_tpot_s, budgets)
        left_out = candidates.left_out(budget)
    if target_tpot_s is None:
        everybody, candidates = candidates, candidates.worth_their_predictor(budget)
        if candidates is not everybody:
            saved = f"{predictor.predictor_bytes:,} bytes"
            left_out["the predictor"] = f"which saves less than its {saved} do as expert slots"
    candidates.winners([*budgets, budget])  # reads the trace once for all of them
    in_one_pool = PoolChoice(row=candidates.winners([budget])[budget])
    chosen = divide(candidates, budget, in_one_pool, search.pool)
    (evidence,) = candidates.rows([budget], held_out, _BOUND)
    winner = next(row for row in evidence if row.policy == in_one_pool.row.policy)
    points = frontier(candidates, budgets, budget, winner) if search.frontier else []
    if chosen is not in_one_pool:
        shown = chosen.replay(candidates, held_out)
        evidence = [shown if row.policy == shown.policy else row for row in evidence]
    candidates.progress.end()
    choice = chosen.row
    left_out |= candidates.left_out(budget)
    uses_LE = _uses(trace, used)
    predicts = candidates.pays(choice.policy)
    paid = predictor.predictor_bytes if predicts else 0
    room = memory.divide(budget, paid)
    _LOG.info("chosen: %s in %d bytes; left out: %s", choice.policy, budget, left_out)
    return CachePlan(
        spec=spec,
        policy=choice.policy,
        options=dict(candidates.options.get(choice.policy, {})),
        slots=choice.slots,
        layer_slots=chosen.layer_slots,
        prefetch_distance=candidates.distance(choice.policy),
        device_memory_bytes=budget,
        dense_bytes=room.dense_bytes,
        kv_bytes=room.kv_bytes,
        kv_tokens=room.kv_tokens,
        dtype=memory.dtype,
        slot_bytes=memory.slot_bytes,
        predictor_bytes=paid,
        budget_bytes=choice.budget_bytes,
        predictor=predictor.reference if predicts else None,
        trace_sha256=trace.sha256,
        profile_sha256=None if profile is None else profile.sha256,
        requests_used=tuple(sorted(used)),
        requests_held_out=tuple(sorted(held_out)),
        evidence=tuple(row.to_json() for row in evidence),
        frontier=tuple(point.to_json() for point in points),
        uses_LE=tuple(
            tuple(row[:size]) for row, size in zip(uses_LE.astype(int).tolist(), spec.num_experts_L, strict=True)
        ),
        target_tpot_s=target_tpot_s,
        reason=_reason(choice.policy, evidence, len(used), len(held_out), left_out)
        + (f" {_form(chosen.layer_slots, choice.slots)}." if chosen.layer_slots else "")
        + (f" {_target(target_tpot_s, choice, evidence)}." if target_tpot_s is not None else ""),
    )


def _uses(trace: Trace, requests: frozenset[int]) -> np.ndarray:
    """Tokens [L, E] of these requests that chose each expert."""
    wanted, uses_LE = np.array(sorted(requests)), np.zeros((trace.spec.num_layers, trace.spec.num_experts))
    for batch in trace.batches():
        uses_LE += count_experts(trace.spec, batch.experts_TS[np.isin(batch.request_T, wanted)])
    return uses_LE


def _split(trace: Trace, trained_on: frozenset[int], seed: int) -> tuple[frozenset[int], frozenset[int]]:
    """Split requests into choosing and held-out ones."""
    table = trace.requests
    tokens = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
    unseen = sorted(request for request, num_tokens in tokens if num_tokens and request not in trained_on)
    if len(unseen) < 2:
        new = " that the predictor was not trained on" if trained_on else ""
        raise UsageError(
            f"{trace.path} has {numbered(len(unseen), 'request')} with tokens{new}, and a plan needs two (one to "
            "choose on, one held out); capture more prompts"
        )
    Random(seed).shuffle(unseen)
    half = len(unseen) // 2
    return frozenset(unseen[:half]), frozenset(unseen[half:])


def _reason(
    chosen: str, evidence: Sequence[ReplayRow], num_used: int, num_held_out: int, left_out: Mapping[str, str]
) -> str:
    """Describe the choice, with the numbers of the held-out requests."""
    timed = all(row.timing is not None and row.timing.tpot_mean_s is not None for row in evidence)
    show = _milliseconds if timed else _moved
    values = {row.policy: show(row) for row in evidence}
    hits = {row.policy: percent(row.decode.hit_rate) for row in evidence}
    reasons = dict.fromkeys(left_out.values())
    absent = "; ".join(f"{', '.join(n for n in left_out if left_out[n] == why)}, {why}" for why in reasons)
    if timed:
        won, does = "had the shortest time per output token", "takes"
    else:
        won, does = "moved the fewest bytes per decode token", "moves"
    return (
        f"{chosen} {won} on {numbered(num_used, 'request')}. On {num_held_out} held out it {does} {values[chosen]} at "
        f"a decode hit rate of {hits[chosen]}; {_BOUND}, the bound without prefetching, {does} {values[_BOUND]}"
        f"{f' (left out: {absent})' if absent else ''}."
    )


def _form(layer_slots: Sequence[int], slots: int) -> str:
    """Describe the division of the pool."""
    shared = slots - sum(layer_slots)
    least, most = min(layer_slots), max(layer_slots)
    own = f"{least}" if least == most else f"{least} to {most}"
    return f"Each layer has {own} own slots" + (f"; all layers share {shared}" if shared else "")


def _target(target_s: float, choice: ReplayRow, evidence: Sequence[ReplayRow]) -> str:
    """Describe whether the held-out requests meet the target time."""
    shown = next(tpot_s(row) for row in evidence if row.policy == choice.policy)
    there = "they have no decoded tokens" if shown is None else "met" if shown <= target_s else "missed"
    return (
        f"{choice.slots} slots are the fewest found that reach {target_s * 1e3:,.4g} ms per token on the first "
        f"requests ({_milliseconds(choice)}); on the held-out requests: {there}"
    )


def _moved(row: ReplayRow) -> str:
    return count(touched_bytes(row), "B")


def _milliseconds(row: ReplayRow) -> str:
    assert row.timing is not None and row.timing.tpot_mean_s is not None
    return f"{row.timing.tpot_mean_s * 1e3:,.2f} ms"
