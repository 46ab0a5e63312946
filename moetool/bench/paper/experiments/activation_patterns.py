"""Expert usage of a task, compared with another task and between layers: Prism's Figures 2 and 3."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moetool.bench.paper.verdict import CannotTestError, Curve, Found
from moetool.bench.paper.workbench import Workbench
from moetool.placement._demand import count_experts
from moetool.report.measures import gini
from moetool.report.sample import ReportOptions, read_routes
from moetool.trace.diff import divergence
from moetool.trace.reader import Trace
from moetool.types import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, one per task; given traces replace them.
        measure: `tasks`, the divergence of a layer's experts from those of other requests of the same task, and of
            another; `layers`, the Gini coefficient of the first task's experts in every layer; `spread`, that of the
            layers that other requests of the task use most and least evenly.
        layer: layer of `tasks`.
    """

    data: tuple[str, ...] = ("arithmetic", "ascii_words")
    measure: Literal["tasks", "layers", "spread"] = "tasks"
    layer: int = 0


def run(stage: Workbench, options: Options) -> Found:
    """Count experts in halves of disjoint parts of the requests, one part per seed.

    Source: Prism § II-A. The figures show one layer or one task; the divergence between requests of one task is
    moetool's addition.

    Raises:
        CannotTestError: a task has fewer than two requests for each seed.
    """
    if stage.given:
        traces = list(stage.by_server(options.data).values())
    else:
        traces = [stage.trace((name,), fold=tuple(stage.folds)) for name in options.data]
    names = options.data if not stage.given else tuple(stage.given)
    spec = traces[0].spec
    counts = [_counted(trace, len(stage.seeds)) for trace in traces]  # of each task [seeds, 2, L, E]
    values: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    for seed in range(len(stage.seeds)):
        halves = [task_S2LE[seed] for task_S2LE in counts]
        if options.measure == "tasks":
            same = [float(divergence(a, b)[options.layer]) for a, b in halves]
            pairs = [(p, q) for p in range(len(halves)) for q in range(len(halves)) if p != q]
            other = [float(divergence(halves[p][0], halves[q][1])[options.layer]) for p, q in pairs]
            values.setdefault("same task", []).append(float(np.mean(same)))
            values.setdefault("other task", []).append(float(np.mean(other)))
            continue
        whole_L, choose_L, judge_L = (
            np.array(_ginis(spec, counts_LE)) for counts_LE in (sum(halves[0]), halves[0][0], halves[0][1])
        )
        if options.measure == "spread":
            values.setdefault("least skewed layer", []).append(float(judge_L[choose_L.argmin()]))
            values.setdefault("most skewed layer", []).append(float(judge_L[choose_L.argmax()]))
        else:
            for layer, value in enumerate(whole_L):
                values.setdefault(f"layer {layer}", []).append(float(value))
        layers = tuple(map(float, range(spec.num_layers)))
        curves.setdefault(names[0], []).append((layers, tuple(whole_L.tolist())))
    axes = ("layer", "Gini coefficient")
    if options.measure == "tasks":
        axes = ("expert", f"share of choices in layer {options.layer}, %")
        for name, task_S2LE in zip(names, counts, strict=True):
            shares_SE = task_S2LE.sum(axis=1)[:, options.layer, : spec.num_experts_L[options.layer]]
            shares_SE = 100 * shares_SE / shares_SE.sum(axis=1, keepdims=True)
            experts = tuple(map(float, range(shares_SE.shape[1])))
            curves[name] = [(experts, tuple(row_E.tolist())) for row_E in shares_SE]
    return Found(
        values=values,
        what="divergence of expert usage"
        if options.measure == "tasks"
        else f"Gini coefficient of {names[0]}'s experts",
        unit="bits" if options.measure == "tasks" else "",
        on=stage.on(traces),
        traces=1 if stage.given else len(stage.seeds),
        curves=curves,
        axes=axes,
    )


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
