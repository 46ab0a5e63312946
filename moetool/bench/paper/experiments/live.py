"""Cache policies in a live engine on this machine, timed in rounds like `moetool bench serve`."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moetool.bench.paper.verdict import CannotTestError, Found
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.bench.serve import ServeBench, bench_serve
from moetool.bench.serving_setup import ServingBenchOptions, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, each timed alone.
        policies: cache policies.
        options: options of policies, by name.
        predictor: predictor for policies that need one; trained on a trace of other prompts of the same sets.
        memory: expert memory, as a share of all experts.
        new_tokens: new tokens per request.
        measure: `latency` of a request, `ttft`, `tpot`, or `booking`, the policy's share of the time per output token.
    """

    data: tuple[str, ...] = ALL
    policies: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    predictor: str = ""
    memory: str = "25%"
    new_tokens: int = 16
    measure: Literal["latency", "ttft", "tpot", "booking"] = "latency"


_WHAT = {
    "latency": "mean latency per request",
    "ttft": "time to first token",
    "tpot": "time per output token",
    "booking": "the policy's share of the time per output token",
}


def run(stage: Workbench, options: Options) -> Found:
    """Time the policies in paired rounds, with the median of the rounds of each prompt set instead of seeds.

    Effects: sets torch's number of threads to one.

    Raises:
        CannotTestError: only traces were given, and a live run needs the model.
    """
    if stage.given:
        raise CannotTestError("a live run needs the model, but only traces were given")
    predictor = None
    if options.predictor:
        predictor = stage.trained(options.predictor, stage.trace(options.data))
    values: dict[str, list[float]] = {}
    for one in options.data:
        made = stage.once(
            f"live {one} {replace(options, measure='latency')}", partial(_timed, stage, options, one, predictor)
        )
        for line in made.lines:
            if line.rounds and (options.measure != "booking" or line.policy in options.policies):
                rounds = [_value(each, options) for each in line.rounds]
                values.setdefault(line.policy, []).append(statistics.median(rounds))
    unit = {"latency": "s", "ttft": "ms", "tpot": "ms", "booking": "%"}[options.measure]
    return Found(
        values=values,
        what=_WHAT[options.measure],
        unit=unit,
        on=f"{MODEL} live on {made.machine.cpu}, {', '.join(options.data)}: medians of {stage.sizes.rounds} rounds of "
        f"{stage.sizes.texts} requests x {options.new_tokens} new tokens each",
        traces=len(options.data),
    )


def _timed(stage: Workbench, options: Options, data: str, predictor: Path | None) -> ServeBench:
    return bench_serve(
        Subject(model=MODEL, data=(data,), predictor=predictor, work=stage.folder("bench")),
        policies=options.policies,
        budgets=[options.memory],
        options=ServingBenchOptions(
            rounds=stage.sizes.rounds,
            requests=stage.sizes.texts,
            new_tokens=options.new_tokens,
            threads=1,
            offload=False,
        ),
        policy_options=options.options,
    )


def _value(found: Mapping[str, Any], options: Options) -> float:
    prompt_s, later_s = (statistics.fmean(found[phase]["seconds"]) for phase in ("prefill", "decode"))
    if options.measure == "booking":
        return float(found["decode"]["booking_s"]) / sum(found["decode"]["seconds"])
    if options.measure == "latency":
        return prompt_s + (options.new_tokens - 1) * later_s
    return 1e3 * (prompt_s if options.measure == "ttft" else later_s)
