"""Cache policies beside each other, replayed on the assumed machine: hits, times to first and to each later token."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moetool.bench.paper.stage import ALL, Stage
from moetool.bench.paper.verdict import CannotTestError, Curve, Found
from moetool.replay import Row
from moetool.residency import Counts
from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A policy of the comparison.

    Attributes:
        policy: its name.
        options: its own.
        predictor: trained on the history; none without a name.
        predictor_options, fit: of that (`moetool.learning.training.train`).
        before: it serves the history before it is measured.
    """

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = ""
    predictor_options: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    before: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is replayed.

    Attributes:
        data: prompt sets, mixed; seven tenths of the requests are the history. A given trace takes their place.
        lines: by name.
        memory: for experts, as shares of all of them.
        batch: requests that are forwarded together.
        measure: `hits`, the share of the experts needed in decode that were resident; `ttft`, seconds of a prompt;
            `tpot`, of a later token; `latency`, of a request; `speed`, its later tokens a second.
        new_tokens: of each request (0: as the sizes say).
    """

    data: tuple[str, ...] = ALL
    lines: Mapping[str, Line]
    memory: tuple[float, ...] = (0.25,)
    batch: tuple[int, ...] = (1,)
    measure: Literal["hits", "ttft", "tpot", "latency", "speed"] = "hits"
    new_tokens: int = 0


UNITS = {"hits": "%", "ttft": "ms", "tpot": "ms", "latency": "s", "speed": "tokens/s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A line on the requests that are measured.

    Attributes:
        decode: counts of the forwards without prompt tokens.
        request_s: of each request, of its prompt and of its later tokens.
        decode_s, compute_s, forwards: of the forwards without prompt tokens their seconds, those of the device's
            arithmetic, and how many they are.
    """

    decode: Counts
    request_s: tuple[tuple[float, float], ...]
    decode_s: float
    compute_s: float
    forwards: int

    @property
    def token_s(self) -> float:
        """Seconds of a later token."""
        return self.decode_s / self.forwards


def run(stage: Stage, options: Options) -> Found:
    """Replay every line with every memory and batch; another part of the prompts for each seed."""
    values: dict[str, list[float]] = {}
    curves: dict[str, Curve] = {}
    traces: dict[str, Trace] = {}
    for fold in stage.folds:
        for batch in options.batch:
            trace = stage.trace(
                options.data,
                new_tokens=options.new_tokens,
                batch=batch,
                fold=fold,
                resident=options.memory[0] if look_through(options.lines) else 0.0,
            )
            traces[str(trace.path)] = trace
            for memory in options.memory:
                for name, line in options.lines.items():
                    measured = measure(stage, trace, line, memory, batch, fold)
                    label = _label(name, memory, batch, options)
                    values.setdefault(label, []).append(_value(measured, options.measure))
                    if options.measure in ("latency", "speed") and fold == 0:
                        curves[label] = _distribution(measured, options.measure)
    return Found(
        values=values,
        unit=UNITS[options.measure],
        on=f"{stage.on(list(traces.values()))}; replayed on the assumed machine, 30 % of the requests measured",
        curves=curves,
        axes=("seconds" if options.measure == "latency" else "tokens a second", "requests, %"),
    )


def look_through(lines: Mapping[str, Line]) -> bool:
    """Whether a policy asks what the next router would say after a forward through resident experts."""
    return any(line.options.get("look") == "resident" for line in lines.values())


def measure(stage: Stage, trace: Trace, line: Line, memory: float, batch: int, fold: int) -> Measured:
    """Replay one line on the requests that come after the history.

    Raises:
        CannotTestError: they have no later tokens.
    """
    history, later = stage.history(trace, batch)
    predictor = None
    if line.predictor:
        how = {"seed": fold, "options": line.predictor_options, **line.fit}
        predictor = stage.predictor(line.predictor, history, **how)
    budget = int(memory * trace.spec.total_experts) * trace.spec.slot_bytes
    more = {"options": {line.policy: line.options}, "predictor": predictor, "sequential": batch == 1}

    def replayed(requests: frozenset[int]) -> Row:
        row: Row = stage.replayed(trace, line.policy, budget, requests, **more)
        return row

    before = frozenset(history.requests["request"].to_pylist()) if line.before else frozenset[int]()
    row = replayed(before | later)
    assert row.timing is not None, "replayed with a profile"
    decode, forwards = row.decode, row.timing.decode_forwards
    decode_s, compute_s = row.timing.decode.seconds, row.timing.decode.compute_s
    if before:
        earlier = replayed(before)
        assert earlier.timing is not None, "replayed with a profile"
        decode, forwards = _less(decode, earlier.decode), forwards - earlier.timing.decode_forwards
        decode_s -= earlier.timing.decode.seconds
        compute_s -= earlier.timing.decode.compute_s
    if not forwards:
        raise CannotTestError(f"{trace.path} has no new tokens in the requests that are measured")
    seconds = tuple(each for request, each in row.timing.request_s.items() if request in later)
    return Measured(decode=decode, request_s=seconds, decode_s=decode_s, compute_s=compute_s, forwards=forwards)


def _less(counts: Counts, others: Counts) -> Counts:
    left = {name: getattr(counts, name) - getattr(others, name) for name in Counts.__dataclass_fields__}
    return Counts(**left)


def _value(measured: Measured, what: str) -> float:
    if what == "hits":
        return measured.decode.hit_rate
    prompt_s, later_s = np.mean(measured.request_s, axis=0).tolist()
    each_s = measured.token_s
    return float(
        {"ttft": 1e3 * prompt_s, "tpot": 1e3 * each_s, "latency": prompt_s + later_s, "speed": 1 / each_s}[what]
    )


def _distribution(measured: Measured, what: str) -> Curve:
    """Requests in per cent, below each latency or speed; every request has as many later tokens as the mean."""
    each = measured.forwards / len(measured.request_s)
    if what == "latency":
        values = sorted(prompt_s + later_s for prompt_s, later_s in measured.request_s)
    else:
        values = sorted(each / later_s for _, later_s in measured.request_s if later_s)
    return tuple(values), tuple(100 * (place + 1) / len(values) for place in range(len(values)))


def _label(name: str, memory: float, batch: int, options: Options) -> str:
    words = [name]
    words += [f"{memory:.3g}"] if len(options.memory) > 1 else []
    words += [f"batch {batch}"] if len(options.batch) > 1 else []
    return ", ".join(words)
