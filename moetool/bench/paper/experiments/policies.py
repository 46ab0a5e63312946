"""Compare cache policies by replay on the assumed machine: hit rate, TTFT and TPOT."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from moetool.bench.experiment_figure import Curve, ExperimentResult
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.named_machine import changed
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.shaped_routes import shaped
from moetool.bench.paper.verdict import CannotTestError, require
from moetool.bench.paper.workbench import ALL, Workbench, requests_of
from moetool.caching.policy import parse_options, policy_class
from moetool.caching.residency import Counts
from moetool.costing.pricing import Prices
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplayRow

LINKS = True

SYNCHRONOUS = frozenset({"moesys", "moe_infinity", "mixtral_offloading"})
"""Systems that compute a layer's experts only after all prefetches: FineMoE § 4.3, DuoServe-MoE § 6.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLine:
    """A policy of the comparison.

    Attributes:
        predictor: predictor trained on the history, or on other prompts (`Options.apart`); empty: none.
        synchronous: whether a layer's experts wait for all prefetches, as in `moetool.costing.pricing.TimelineOptions`
            (default: whether the policy is in `SYNCHRONOUS`).
        machine: costs of this line only, as `Options.machine`.

    Raises:
        UsageError: an unknown policy or option.
    """

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = ""
    synchronous: bool | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_options(self.policy, self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed, or a given trace instead; seven tenths of the requests are the history, which every
            policy serves before the measurement.
        apart: train predictors on all other parts of the prompts and measure every request, without a history, for
            pools that keep nothing from one request to the next; without effect on a given trace, which has no other
            parts.
        memory: expert memory, as shares of all experts.
        batch: sizes of batches.
        measure: `hits`, hit rate in decode; `ttft` and `tpot`; `sides`, time per output token that the link transfers
            experts, and that the host computes them; `latency` of a request; `speed`, output tokens per second.
        along: an abscissa for each line, such as a distance: one curve for all lines, or one for each name before a
            comma. Three or more sizes of memory or batches give curves too.
        axis: label of that abscissa.
        shape: model of `recipes/models` whose experts per layer and top-k the routes get (default: the trace's).
        machine: costs that replace those of the recipe's machine, or another machine and model by name.
    """

    data: tuple[str, ...] = ALL
    apart: bool = False
    lines: Mapping[str, PolicyLine]
    memory: tuple[float, ...] = (0.25,)
    batch: tuple[int, ...] = (1,)
    measure: Literal["hits", "ttft", "tpot", "sides", "latency", "speed"] = "hits"
    along: Mapping[str, float] = field(default_factory=dict)
    axis: str = ""
    shape: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)


UNITS = {"hits": "%", "ttft": "ms", "tpot": "ms", "sides": "ms", "latency": "s", "speed": "tokens/s"}
_WHAT = {
    "hits": "hit rate of experts needed in decode",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "sides": "busy with experts, per output token",
    "latency": "mean latency per request",
    "speed": "decode speed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMeasures:
    """A line's results on the measured requests.

    Attributes:
        decode: counts of the forwards without prompt tokens.
        request_s: seconds of each request's prompt and decode.
        request_tokens: decode tokens of each request.
        decode_s, compute_s, link_s, host_s, forwards: totals over decode forwards: seconds, of them device compute,
            link transfers and host compute, and their number.
        best: the same with the least seconds of any exact policy; None if this one is not exact or uses the host.
    """

    decode: Counts
    request_s: tuple[tuple[float, float], ...]
    request_tokens: tuple[int, ...]
    decode_s: float
    compute_s: float
    link_s: float
    host_s: float
    forwards: int
    best: "PolicyMeasures | None" = None

    @property
    def token_s(self) -> float:
        """Seconds per output token."""
        return self.decode_s / self.forwards


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Replay every line with every memory and batch, with another part of the prompts per seed.

    Raises:
        CannotTestError: a trace lacks the prompts or the new tokens that are measured.
    """
    samples = Samples(bench)
    samples.highest_best = options.measure in ("hits", "speed")
    each: dict[str, list[float]] = {}  # of all requests of all parts
    machine = changed(bench.machine, options.machine)
    measured_on = "30 % of the requests"
    for fold in bench.folds:
        for batch in options.batch:
            trace = bench.trace(
                options.data, batch=batch, fold=fold, resident=options.memory[0] if look_through(options.lines) else 0.0
            )
            trace = samples.use(shaped(bench, trace, options.shape))
            learned = bench.others(options.data, fold) if options.apart else None
            learned = learned and shaped(bench, learned, options.shape)
            measured_on = measured_on if learned is None else "all"
            for memory in options.memory:
                for name, line in options.lines.items():
                    own = changed(machine, line.machine)
                    measured = measure(bench, trace, line, memory, batch, fold, learned=learned, machine=own)
                    label = _label(name, memory, batch, options)
                    if missing := _missing(measured, options.measure):
                        raise CannotTestError(f"{trace.path} has no {missing} in the measured requests")
                    if options.measure == "sides":
                        for side, seconds in (("link", measured.link_s), ("host", measured.host_s)):
                            samples.add(f"{label}, {side}", 1e3 * seconds / measured.forwards)
                        continue
                    samples.add(label, _value(measured, options.measure))
                    if options.measure == "hits":
                        samples.best.setdefault(label, []).append(1.0)
                    elif measured.best is not None:
                        samples.best.setdefault(label, []).append(_value(measured.best, options.measure))
                    if loads_layers(line, trace):
                        samples.whole_layers[label] = None
                    if options.measure in ("latency", "speed"):
                        each.setdefault(label, []).extend(_by_request(measured, options.measure))
    on = f"replayed on the assumed machine, {measured_on} measured"
    what, unit = _WHAT[options.measure], UNITS[options.measure]
    axes = ("decode speed, tokens/s" if options.measure == "speed" else "latency, s", "cumulative share of requests, %")
    if axis := _draw(samples, options):
        axes = (axis, f"{what}, {unit}")
    else:
        for label, values in each.items():
            samples.draw(label, *distribution(values))
    return samples.found(what, unit, on, axes=axes, traces=len(bench.folds))


_LEAST_POINTS = 3  # of a curve over memory or batches


def _draw(samples: Samples, options: Options) -> str:
    """Draw curves over memory, batches or `along`, if any; return the label of their abscissa, else an empty text.

    Raises:
        UsageError: a line of `along` was not measured.
    """
    points: dict[str, dict[float, str]] = {}  # by curve, the label of the values at each abscissa
    axis = options.axis
    if len(options.memory) >= _LEAST_POINTS:
        axis, batch = "experts in memory, %", options.batch[0]
        points = {name: {100 * m: _label(name, m, batch, options) for m in options.memory} for name in options.lines}
    elif len(options.batch) >= _LEAST_POINTS:
        axis, memory = "requests per batch", options.memory[0]
        points = {name: {b: _label(name, memory, b, options) for b in options.batch} for name in options.lines}
    for name, number in options.along.items() if not points else ():
        points.setdefault(name.partition(", ")[0] if ", " in name else _WHAT[options.measure], {})[number] = name
    for series, labels in points.items():
        rows = [require(samples.values, label) for label in labels.values()]
        samples.sweep(series, labels, rows, scale=100 if options.measure == "hits" else 1)
    return axis if points else ""


def look_through(lines: Mapping[str, PolicyLine]) -> bool:
    """Whether a policy uses a partial forward through resident experts."""
    return any(line.options.get("predict_from") == "resident" for line in lines.values())


def loads_layers(line: PolicyLine, trace: Trace) -> bool:
    """Whether the policy moves whole layers, so that its pool holds one at least."""
    options = parse_options(line.policy, line.options)
    return policy_class(line.policy).min_slots(trace.spec, options) >= trace.spec.num_experts


def measure(
    bench: Workbench,
    trace: Trace,
    line: PolicyLine,
    memory: float,
    batch: int,
    fold: int,
    *,
    learned: Trace | None = None,
    machine: AssumedMachine | None = None,
) -> PolicyMeasures:
    """Replay one line on the requests after the history, which it serves first, or on all if it learned elsewhere."""
    if learned is None:
        history, later = bench.history(trace, batch)
        before = frozenset(history.requests["request"].to_pylist())
    else:
        history, later, before = learned, frozenset(requests_of(trace)), frozenset[int]()
    predictor = None
    if line.predictor:
        predictor = bench.predictor(line.predictor, history, seed=fold)
    budget = int(memory * trace.spec.total_experts) * trace.spec.slot_bytes
    more: dict[str, Any] = {
        "options": {line.policy: line.options},
        "predictor": predictor,
        "sequential": batch == 1,
        "machine": machine,
        "synchronous": line.policy in SYNCHRONOUS if line.synchronous is None else line.synchronous,
    }

    def replayed(requests: frozenset[int]) -> ReplayRow:
        return bench.replayed(trace, line.policy, budget, requests, **more)

    row = replayed(before | later)
    assert row.timing is not None, "replayed with a profile"
    decode, spent, forwards = row.decode, _seconds(row), row.timing.decode_forwards
    if before:
        earlier = replayed(before)
        assert earlier.timing is not None, "replayed with a profile"
        names = Counts.__dataclass_fields__
        decode = Counts(**{name: getattr(decode, name) - getattr(earlier.decode, name) for name in names})
        spent = spent - _seconds(earlier)
        forwards -= earlier.timing.decode_forwards
    tokens = {each["request"]: each["tokens"] - each["prompt_tokens"] for each in trace.requests.to_pylist()}
    measured = [request for request in row.timing.request_s if request in later]
    decode_s, compute_s, link_s, host_s = spent.tolist()
    found = PolicyMeasures(
        decode=decode,
        request_s=tuple(row.timing.request_s[request] for request in measured),
        request_tokens=tuple(tokens[request] for request in measured),
        decode_s=decode_s,
        compute_s=compute_s,
        link_s=link_s,
        host_s=host_s,
        forwards=forwards,
    )
    kind = policy_class(line.policy)
    if not kind.lossless or row.prefill.hosted or row.decode.hosted:
        return found
    slots = kind.slots_used(trace.spec, parse_options(line.policy, line.options), budget // trace.spec.slot_bytes)
    machine = machine or bench.machine
    least = partial(least_seconds, trace, machine, slots, later, sequential=batch == 1)
    request_s, decode_s = bench.once(f"least {trace.path} {machine} {slots} {sorted(later)} {batch}", least)
    return replace(found, best=replace(found, request_s=tuple(request_s[one] for one in measured), decode_s=decode_s))


def least_seconds(
    trace: Trace, machine: AssumedMachine, slots: int, requests: frozenset[int], *, sequential: bool
) -> tuple[dict[int, tuple[float, float]], float]:
    """Return the least seconds of each request's prompt and decode, and of all decode forwards, under exact policies.

    A forward takes as long as its arithmetic, or as loading what it needs beyond a full pool, at least.
    """
    profile, timeline = machine.profile(trace.spec)
    prices = Prices(profile, trace.spec, timeline)
    request_s: dict[int, tuple[float, float]] = {}
    decode_s = 0.0
    for info, events in trace.forwards(sequential=sequential, requests=requests):
        costs = prices.forward(info)
        computed = sum(costs.before_L) + len(events) * costs.after + costs.rest
        computed += sum(sum(prices.experts(event).values()) for event in events)
        needed = sum(len(event.needed) for event in events)
        seconds = max(computed, (needed - slots) * prices.load_ns(timeline.tier, 0)) / 1e9
        decode_s += 0.0 if info.prefill else seconds
        for request in dict.fromkeys(info.request_T):
            prompt_s, later_s = request_s.get(request, (0.0, 0.0))
            parts = (prompt_s + seconds, later_s) if info.prefill else (prompt_s, later_s + seconds)
            request_s[request] = parts
    return request_s, decode_s


def _seconds(row: ReplayRow) -> np.ndarray:
    """Seconds of decode: all, device compute, link transfers, host compute."""
    assert row.timing is not None, "replayed with a profile"
    spent = row.timing.decode
    return np.array([spent.seconds, spent.compute_s, sum(spent.io_s.values()), spent.host_s])


def _missing(measured: PolicyMeasures, what: str) -> str:
    """The tokens that a measure needs and the trace lacks; empty if it has them."""
    if what == "ttft":
        return "" if any(prompt_s for prompt_s, _ in measured.request_s) else "prompt tokens"
    return "" if measured.forwards else "new tokens"


def _value(measured: PolicyMeasures, what: str) -> float:
    if what == "hits":
        return measured.decode.hit_rate
    if what in ("tpot", "speed"):
        return 1e3 * measured.token_s if what == "tpot" else 1 / measured.token_s
    prompt_s, later_s = np.mean(measured.request_s, axis=0).tolist()
    return float(1e3 * prompt_s if what == "ttft" else prompt_s + later_s)


def _by_request(measured: PolicyMeasures, what: str) -> list[float]:
    """Latency or speed of each request; a request without output tokens has no speed."""
    if what == "latency":
        return [prompt_s + later_s for prompt_s, later_s in measured.request_s]
    pairs = zip(measured.request_tokens, measured.request_s, strict=True)
    return [tokens / later_s for tokens, (_, later_s) in pairs if later_s]


def distribution(values: Sequence[float]) -> Curve:
    """Percentage of values that are at most each value."""
    return tuple(sorted(values)), tuple(100 * (place + 1) / len(values) for place in range(len(values)))


def _label(name: str, memory: float, batch: int, options: Options) -> str:
    words = [name]
    words += [f"{memory:.3g}"] if len(options.memory) > 1 else []
    words += [f"batch {batch}"] if len(options.batch) > 1 else []
    return ", ".join(words)
