"""From a trace and what a machine has to a checked plan, with its evidence and its bound."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from moetool.costing.costs import CostProfile
from moetool.costing.pricing import TimelineOptions
from moetool.errors import CapacityError, UsageError
from moetool.plan import CachePlan, PredictorReference
from moetool.planning.candidates import Candidates, touched_bytes, tpot_s
from moetool.planning.frontier import budgets_between, least_budget
from moetool.planning.frontier import frontier as frontier_of
from moetool.planning.tuning import Setup, as_it_comes, tune
from moetool.policy import MIN_SLOTS
from moetool.replay import DEFAULT_MACHINE, Row
from moetool.tables import numbered
from moetool.trace.reader import Trace
from moetool.trace.same_prompts import repeated
from moetool.types import ModelSpec

_BOUND = "belady"


def plan_cache(trace: Trace, predictor_dir: Path | None, device_memory_bytes: int, **choices: Any) -> CachePlan:
    """Choose a cache policy, with the predictor in a folder; see `choose_cache` for the rest.

    Raises:
        MismatchError: the predictor is of another model.
    """
    if predictor_dir is None:
        return choose_cache(trace, device_memory_bytes, **choices)
    from moetool.predictor import load_predictor

    predictor = load_predictor(predictor_dir)
    trace.spec.require_same(predictor.spec, "the trace", "the predictor")
    return choose_cache(
        trace,
        device_memory_bytes,
        predictor=predictor,
        reference=PredictorReference(name=predictor.name, sha256=predictor.sha256, path=str(predictor_dir.resolve())),
        trained_on=_trained_on(trace, predictor.card),
        predictor_bytes=predictor.num_bytes,
        **choices,
    )


def choose_cache(
    trace: Trace,
    device_memory_bytes: int,
    *,
    dense_bytes: int = 0,
    kv_bytes: int = 0,
    kv_tokens: int = 0,
    dtype: str = "float32",
    predictor: Any = None,
    predictor_bytes: int = 0,
    reference: PredictorReference | None = None,
    trained_on: Iterable[int] = (),
    policies: Sequence[str] | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    profile: CostProfile | None = None,
    timeline: TimelineOptions = DEFAULT_MACHINE,
    target_tpot_s: float | None = None,
    frontier: int = 0,
    tuned: bool = False,
    seed: int = 0,
) -> CachePlan:
    """Choose the cache policy that moves the fewest bytes per decode token, and show it on other requests.

    With a profile the choice is the policy with the shortest time per output token instead.

    The requests that the predictor was not trained on are halved at random. Every candidate is replayed on the
    first half, where the choice is made, and again on the second, which gives the plan's evidence.

    Args:
        device_memory_bytes: what the whole model may use on the device.
        dense_bytes: what its weights outside the routed experts take of that.
        kv_bytes: what is kept of it for the keys and values of `kv_tokens`.
        dtype: data type of everything but the experts.
        predictor: a `moetool.predictor.Predictor`, if there is one.
        predictor_bytes: what it takes of the device memory; only policies that use it pay.
        reference: names `predictor` in the plan.
        trained_on: requests of the trace that the predictor has seen.
        policies: candidates; by default every lossless policy that can serve with what there is, in the slots that
            fit.
        options: values for the `Options` of policies, by the policy's name.
        profile: costs of the machine to plan for.
        timeline: which of the profile's devices, data types and tiers.
        target_tpot_s: plan for the least memory, up to `device_memory_bytes`, in which the best policy as it comes
            takes at most this time per output token. It is met on the requests that the choice is made on; the plan's
            reason says whether it is on the others.
        frontier: for so many budgets, from the smallest pool to all experts, the plan shows the best policy too.
        tuned: try prefetch distances, pinned experts and limits of prefetching (`moetool.planning.tuning`).
        seed: of the split.

    Raises:
        MismatchError: the profile is of another model, or lacks what the timeline needs.
        CapacityError: what is left for experts is below the smallest legal pool, or below what one of `policies` needs,
            or no pool that fits is fast enough.
        UsageError: too few requests to choose on some and show on others, no candidate, or a time to reach without a
            profile or without decoded tokens.
    """
    spec = trace.spec
    budget = _expert_budget(spec, device_memory_bytes, dense_bytes, kv_bytes)
    used, held_out = _split(trace, frozenset(trained_on), seed)
    candidates = Candidates(
        trace,
        used,
        held_out,
        names=policies,
        options=options,
        predictor=predictor,
        predictor_bytes=predictor_bytes,
        profile=profile,
        timeline=timeline,
    )
    left_out = candidates.require(budget)
    fixed_bytes = dense_bytes + kv_bytes
    budgets = budgets_between(spec, frontier)
    if target_tpot_s is not None:
        if profile is None:
            raise UsageError("a time per output token to reach needs the costs of a machine; give a profile")
        budget = least_budget(candidates, budget, target_tpot_s, budgets, fixed_bytes)
        left_out = candidates.left_out(budget)
    candidates.winners([*budgets, budget])  # reads the trace once for all of them
    plain = as_it_comes(candidates, budget)
    setup = tune(candidates, budget, plain) if tuned else plain
    (evidence,) = candidates.rows([budget], held_out, _BOUND)
    untuned = next(row for row in evidence if row.policy == plain.row.policy)
    points = frontier_of(candidates, budgets, budget, untuned, fixed_bytes) if frontier else []
    if setup is not plain:
        shown = setup.replay(candidates, held_out)
        evidence = [shown if row.policy == shown.policy else row for row in evidence]
    choice = setup.row
    predicts = candidates.pays(choice.policy)
    return CachePlan(
        spec=spec,
        policy=choice.policy,
        options=setup.options,
        slots=choice.slots,
        pinned=tuple(divmod(key, spec.num_experts) for key in setup.pinned),
        prefetch_distance=setup.distance,
        limits=setup.limits,
        device_memory_bytes=device_memory_bytes if target_tpot_s is None else fixed_bytes + budget,
        dense_bytes=dense_bytes,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        dtype=dtype,
        predictor_bytes=predictor_bytes if predicts else 0,
        budget_bytes=choice.budget_bytes,
        predictor=reference if predicts else None,
        trace_sha256=trace.sha256,
        profile_sha256=None if profile is None else profile.sha256,
        requests_used=tuple(sorted(used)),
        requests_held_out=tuple(sorted(held_out)),
        evidence=tuple(row.to_json() for row in evidence),
        frontier=tuple(point.to_json() for point in points),
        target_tpot_s=target_tpot_s,
        reason=_reason(choice.policy, evidence, len(used), len(held_out), left_out)
        + (f"; {_tuning(setup, untuned)}" if setup is not plain else "")
        + (f"; {_target(target_tpot_s, choice, evidence)}" if target_tpot_s is not None else ""),
    )


def _expert_budget(spec: ModelSpec, device_memory_bytes: int, dense_bytes: int, kv_bytes: int) -> int:
    """What is left for experts once everything else is on the device."""
    smallest_bytes = MIN_SLOTS * spec.slot_bytes
    needed_bytes = dense_bytes + kv_bytes + smallest_bytes
    if device_memory_bytes < needed_bytes:
        raise CapacityError(
            f"{device_memory_bytes:,} bytes of device memory cannot hold {spec.name}: it needs at least "
            f"{needed_bytes:,} ({dense_bytes:,} for the weights outside the experts, {kv_bytes:,} for keys and "
            f"values, {smallest_bytes:,} for the smallest pool of {MIN_SLOTS} experts); raise --device-memory"
        )
    return device_memory_bytes - dense_bytes - kv_bytes


def _trained_on(trace: Trace, card: Mapping[str, Any]) -> frozenset[int]:
    """The requests of this trace whose prompts a predictor has seen, by its card: trained on or validated on."""
    if card["trace"]["sha256"] == trace.sha256:
        return frozenset([*card["requests"]["train"], *card["requests"]["validation"]])
    return repeated(trace, card["seen_prompts"])


def _split(trace: Trace, trained_on: frozenset[int], seed: int) -> tuple[frozenset[int], frozenset[int]]:
    """The requests to choose on and those to show the choice on."""
    table = trace.requests
    tokens = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
    unseen = sorted(request for request, num_tokens in tokens if num_tokens and request not in trained_on)
    if len(unseen) < 2:
        raise UsageError(
            f"{trace.path} has {numbered(len(unseen), 'request')} that the predictor was not trained on, and a plan "
            f"needs two (one to choose on, one to show it on); capture more prompts"
        )
    Random(seed).shuffle(unseen)
    half = len(unseen) // 2
    return frozenset(unseen[:half]), frozenset(unseen[half:])


def _reason(chosen: str, evidence: Sequence[Row], num_used: int, num_held_out: int, left_out: Mapping[str, str]) -> str:
    """One sentence with the numbers of the held-out requests."""
    timed = all(row.timing is not None and row.timing.tpot_mean_s is not None for row in evidence)
    show = _milliseconds if timed else _moved
    values = {row.policy: show(row) for row in evidence}
    hits = {row.policy: f"{100 * row.decode.hit_rate:.1f} %" for row in evidence}
    others = ", ".join(f"{name} {values[name]}" for name in values if name not in (chosen, _BOUND))
    absent = "; ".join(f"{name}, {why}" for name, why in left_out.items())
    if timed:
        won, does = "had the shortest time per output token", "takes"
    else:
        won, does = "moved the fewest bytes per decode token", "moves"
    return (
        f"{chosen} {won} on {num_used} requests; on {num_held_out} others, held out, it {does} {values[chosen]} at a "
        f"decode hit rate of {hits[chosen]}{f' (the other candidates: {others})' if others else ''}, and {_BOUND}, "
        f"which knows the future and makes the fewest loads in all, {values[_BOUND]}"
        f"{f' (left out: {absent})' if absent else ''}"
    )


def _tuning(setup: Setup, untuned: Row) -> str:
    """What was changed, and what the winner without it takes on the held-out requests."""
    parts = []
    if setup.distance:
        parts.append(f"prefetch distance {setup.distance}")
    if setup.pinned:
        parts.append(f"{len(setup.pinned)} experts pinned")
    if setup.limits is not None and setup.limits.forward_bytes is not None:
        parts.append(f"at most {setup.limits.forward_bytes:,} bytes prefetched in a forward")
    elif setup.limits is not None:
        parts.append(f"prefetching stopped below a recall of {setup.limits.min_recall}")
    show = _moved if tpot_s(untuned) is None else _milliseconds
    return f"tuned: {', '.join(parts)}; untuned, {untuned.policy} was the best, which takes {show(untuned)} there"


def _target(target_s: float, choice: Row, evidence: Sequence[Row]) -> str:
    """Whether the time to reach is reached on the held-out requests too."""
    shown = next(tpot_s(row) for row in evidence if row.policy == choice.policy)
    there = "they have no decoded tokens" if shown is None else "met" if shown <= target_s else "missed"
    return (
        f"{choice.slots} slots are what was found to bring a token to {target_s * 1e3:,.4g} ms where it was chosen "
        f"({_milliseconds(choice)}); on the held-out requests: {there}"
    )


def _moved(row: Row) -> str:
    return f"{touched_bytes(row):,.0f}"


def _milliseconds(row: Row) -> str:
    assert row.timing is not None and row.timing.tpot_mean_s is not None
    return f"{row.timing.tpot_mean_s * 1e3:,.2f} ms"
