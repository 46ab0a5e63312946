"""From a trace and what a machine has to a checked plan, with its evidence and its bound."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from moetool import plugins
from moetool.costs import CostProfile
from moetool.errors import CapacityError, UsageError
from moetool.fleet import own_part, split_slots
from moetool.plan import CachePlan, PredictorReference
from moetool.policy import MIN_SLOTS, parse_options, policy_class, slots_within
from moetool.pricing import Prices, TimelineOptions, with_host_costs
from moetool.replay import DEFAULT_MACHINE, Row, replay
from moetool.trace import Trace
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
        seed: of the split.

    Raises:
        MismatchError: the profile is of another model, or lacks what the timeline needs.
        CapacityError: what is left for experts is below the smallest legal pool, or below what one of `policies` needs.
        UsageError: too few requests to choose on some and show on others, or no candidate.
    """
    spec = trace.spec
    budget = _expert_budget(spec, device_memory_bytes, dense_bytes, kv_bytes)
    used, held_out = _split(trace, frozenset(trained_on), seed)
    candidates = list(policies) if policies else servable(trace, predictor)
    paying = [name for name in candidates if predictor is not None and policy_class(name).uses(predictor)]
    left_out: dict[str, str] = {}  # candidates that do not fit, and why
    if budget - predictor_bytes < MIN_SLOTS * spec.slot_bytes and len(paying) < len(candidates):
        left_out = dict.fromkeys(paying, f"whose predictor of {predictor_bytes:,} bytes leaves no room for experts")
        candidates, paying = [name for name in candidates if name not in paying], []

    if profile is not None:
        options = with_host_costs(candidates, options or {}, Prices(profile, spec, timeline))
    chosen_options = {name: parse_options(name, (options or {}).get(name, {})) for name in candidates}
    if not policies:
        for name in candidates:
            left_out |= too_large([name], spec, budget - predictor_bytes if name in paying else budget, options or {})
        candidates, paying = ([name for name in names if name not in left_out] for names in (candidates, paying))

    def rows(names: list[str], requests: frozenset[int]) -> list[Row]:
        asked: dict[str, Any] = {"predictor": predictor, "options": options, "requests": requests, "pool": "slots"}
        asked |= {"profile": profile, "timeline": timeline}
        free = [name for name in names if name not in paying]
        made = replay(trace, free, [budget], **asked) if free else []
        return made + (replay(trace, paying, [budget - predictor_bytes], **asked) if paying else [])

    choice = best(rows(candidates, used))
    evidence = rows([*candidates, _BOUND], held_out)
    kind = policy_class(choice.policy)
    predicts = predictor is not None and kind.uses(predictor)
    return CachePlan(
        spec=spec,
        policy=choice.policy,
        options=dict((options or {}).get(choice.policy, {})),
        slots=choice.slots,
        prefetch_distance=getattr(chosen_options[choice.policy], "distance", kind.prefetch_distance),
        device_memory_bytes=device_memory_bytes,
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
        reason=_reason(choice.policy, evidence, len(used), len(held_out), left_out),
    )


def servable(trace: Trace, predictor: Any) -> list[str]:
    """The policies that keep the model's text and can work with this trace's columns and this predictor, if any."""
    kinds = {name: policy_class(name) for name in plugins.names("policy")}
    return [
        name
        for name, kind in kinds.items()
        if kind.lossless
        and not kind.needs_future
        and kind.needs <= trace.columns
        and _sees_far_enough(name, trace)
        and (predictor is not None or not kind.needs_predictor)
    ]


def _sees_far_enough(policy: str, trace: Trace) -> bool:
    """Whether a policy that asks later gates finds them in the trace as many layers ahead as it looks."""
    kind = policy_class(policy)
    distance = getattr(parse_options(policy, {}), "distance", kind.prefetch_distance)
    return "ahead" not in kind.needs or trace.ahead >= min(distance, trace.spec.num_layers - 1)


def too_large(
    names: Iterable[str],
    spec: ModelSpec,
    budget_bytes: int,
    options: Mapping[str, Mapping[str, Any]],
    devices: int = 1,
) -> dict[str, str]:
    """Those of the policies that need more slots than (each device's part of) a budget holds, and why in words."""
    slots = min(split_slots(spec, slots_within(spec, budget_bytes), devices))
    sizes = own_part(spec, 0, devices)
    needs = {name: policy_class(name).min_slots(sizes, parse_options(name, options.get(name, {}))) for name in names}
    return {name: f"which needs {fewest} slots" for name, fewest in needs.items() if fewest > slots}


def best(rows: Sequence[Row]) -> Row:
    """The shortest time per output token, on a timeline; the fewest bytes per decode token, without; then the fewest
    bytes in all; then the smallest pool.
    """

    def cost(row: Row) -> tuple[float, float, int, int]:
        seconds = row.timing.tpot_mean_s if row.timing is not None else None
        return seconds or 0.0, _touched_bytes(row), row.loaded_bytes, row.slots

    return min(rows, key=cost)


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
    seen = set(card["seen_prompts"])
    rows = trace.requests.to_pylist()
    return frozenset(row["request"] for row in rows if f"{row['dataset']}/{row['prompt_id']}" in seen)


def _split(trace: Trace, trained_on: frozenset[int], seed: int) -> tuple[frozenset[int], frozenset[int]]:
    """The requests to choose on and those to show the choice on."""
    table = trace.requests
    tokens = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
    unseen = sorted(request for request, num_tokens in tokens if num_tokens and request not in trained_on)
    if len(unseen) < 2:
        raise UsageError(
            f"{trace.path} has {len(unseen)} requests that the predictor was not trained on, and a plan needs two "
            f"(one to choose on, one to show it on); capture more prompts"
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


def _moved(row: Row) -> str:
    return f"{_touched_bytes(row):,.0f}"


def _milliseconds(row: Row) -> str:
    assert row.timing is not None and row.timing.tpot_mean_s is not None
    return f"{row.timing.tpot_mean_s * 1e3:,.2f} ms"


def _touched_bytes(row: Row) -> float:
    """Bytes for each decode token that were loaded, or that the host computed with where they lie."""
    return row.bytes_per_decode_token + row.host_bytes_per_decode_token
