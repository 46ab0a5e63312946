"""Cache policies in a live engine on this machine, timed in rounds like `moetool bench serve`."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moetool.bench.bench_result import BenchResult
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.bench.serve import bench_serve
from moetool.bench.serving_setup import BenchModel, ServingBenchOptions
from moetool.models.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, each timed alone.
        policies: cache policies.
        predictor: predictor for policies that need one; trained on a trace of other prompts of the same sets.
        memory: expert memory, as a share of all experts.
        measure: `latency` of a request, or `booking`, the policy's share of the time per output token.
    """

    data: tuple[str, ...] = ALL
    policies: tuple[str, ...]
    predictor: str = ""
    memory: str = "25%"
    new_tokens: int = 16
    measure: Literal["latency", "booking"] = "latency"


_WHAT = {"latency": "mean latency per request", "booking": "the policy's share of the time per output token"}


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Time the policies in paired rounds, with the median of the rounds of each prompt set instead of seeds.

    Effects: sets torch's number of threads to one.

    Raises:
        CannotTestError: only traces were given, and a live run needs the model.
    """
    if bench.given:
        raise CannotTestError("a live run needs the model, but only traces were given")
    predictor = None
    if options.predictor:
        predictor = bench.trained(options.predictor, bench.trace(options.data))
    values: dict[str, list[float]] = {}
    for one in options.data:
        made = bench.once(
            f"live {one} {replace(options, measure='latency')}", partial(_timed, bench, options, one, predictor)
        )
        for row in made.rows:
            if options.measure != "booking" or row["policy"] in options.policies:
                rounds = [_value(each, options) for each in row["rounds"]]
                values.setdefault(row["policy"], []).append(statistics.median(rounds))
    return ExperimentResult(
        values=values,
        what=_WHAT[options.measure],
        unit="s" if options.measure == "latency" else "%",
        on=f"{MODEL} live on {made.machine['cpu']}, {', '.join(options.data)}: medians of {bench.sizes.rounds} rounds "
        f"of {bench.sizes.texts} requests x {options.new_tokens} new tokens each",
        traces=len(options.data),
        expert_bytes=Checkpoint.open(MODEL).spec.all_experts_bytes,
    )


def _timed(bench: Workbench, options: Options, data: str, predictor: Path | None) -> BenchResult:
    return bench_serve(
        BenchModel(model=MODEL, data=(data,), predictor=predictor, work=bench.folder("bench")),
        policies=options.policies,
        budgets=[options.memory],
        options=ServingBenchOptions(
            rounds=bench.sizes.rounds, requests=bench.sizes.texts, new_tokens=options.new_tokens, threads=1
        ),
    )


def _value(found: Mapping[str, Any], options: Options) -> float:
    if options.measure == "booking":
        return float(found["decode"]["booking_share"])
    return float(found["prefill"]["mean_s"] + (options.new_tokens - 1) * found["decode"]["mean_s"])
