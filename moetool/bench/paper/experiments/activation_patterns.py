"""Expert usage of a task, compared with another task and between layers: Prism's Figures 2 and 3."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moetool.base.types import ModelSpec
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.report.measures import gini
from moetool.report.sample import ReportOptions, read_routes
from moetool.trace.diff import divergence
from moetool.trace.expert_counts import count_experts
from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, one per task; given traces replace them.
        measure: `tasks`, divergence of the first layer's expert usage within one task, and between tasks; `layers`,
            Gini coefficient of the first task's experts in every layer; `spread`, the same of the two layers that other
            requests of the task use most and least evenly.
    """

    data: tuple[str, ...] = ("arithmetic", "ascii_words")
    measure: Literal["tasks", "layers", "spread"] = "tasks"


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Count experts in halves of disjoint parts of the requests, one part per seed.

    Source: Prism § II-A. The figures show one layer or one task; the divergence between requests of one task is
    moetool's addition.

    Raises:
        CannotTestError: a task has fewer than two requests for each seed.
    """
    if bench.given:
        traces = list(bench.by_server(options.data).values())
    else:
        traces = [bench.trace((name,), fold=tuple(bench.folds)) for name in options.data]
    names = options.data if not bench.given else tuple(bench.given)
    samples = Samples(bench)
    spec = traces[0].spec
    counts = [_counted(samples.use(trace), len(bench.seeds)) for trace in traces]  # of each task [seeds, 2, L, E]
    independent = 1 if bench.given else len(bench.seeds)
    if options.measure == "tasks":
        for halves in zip(*counts, strict=True):
            pairs = [(p, q) for p in range(len(halves)) for q in range(len(halves)) if p != q]
            samples.add("same task", np.mean([divergence(a, b)[0] for a, b in halves]))
            other = [divergence(halves[p][0], halves[q][1])[0] for p, q in pairs]
            samples.add("other task", np.mean(other))
        for name, task_S2LE in zip(names, counts, strict=True):
            for row_E in task_S2LE.sum(axis=1)[:, 0, : spec.num_experts_L[0]]:
                samples.draw(name, range(len(row_E)), 100 * row_E / row_E.sum())
        axes = ("expert", "share of choices in layer 0, %")
        return samples.found("divergence of expert usage", "bits", axes=axes, traces=independent)
    for halves_2LE in counts[0]:
        whole_L, choose_L, judge_L = (
            np.array(_ginis(spec, counts_LE)) for counts_LE in (halves_2LE.sum(axis=0), *halves_2LE)
        )
        if options.measure == "spread":
            samples.add("least skewed layer", judge_L[choose_L.argmin()])
            samples.add("most skewed layer", judge_L[choose_L.argmax()])
        else:
            for layer, value in enumerate(whole_L):
                samples.add(f"layer {layer}", value)
        samples.draw(names[0], range(spec.num_layers), whole_L)
    what = f"Gini coefficient of {names[0]}'s experts"
    return samples.found(what, "", axes=("layer", "Gini coefficient"), traces=independent)


def _counted(trace: Trace, parts: int) -> np.ndarray:
    """Uses [parts, 2, L, E] of experts in two halves of each part of the requests."""
    routes = read_routes(trace, replace(ReportOptions(), seed=0))
    if len(routes.requests) < 2 * parts:
        raise CannotTestError(f"{trace.path} has {len(routes.requests)} requests, expected {2 * parts} or more")
    order = np.random.default_rng(0).permutation(len(routes.requests))
    counted_PLE = [
        sum(
            count_experts(routes.spec, routes.experts_TS[routes.rows(int(request))])
            for request in order[part :: 2 * parts]
        )
        for part in range(2 * parts)
    ]
    stacked = np.stack(counted_PLE)
    return stacked.reshape(parts, 2, *stacked.shape[1:])


def _ginis(spec: ModelSpec, counts_LE: np.ndarray) -> list[float]:
    return [gini(row_E[:num]) for row_E, num in zip(counts_LE, spec.num_experts_L, strict=True)]
