"""How far an expert's popularity, and the experts just chosen, tell the next layer's: DuoServe's Figure 2."""

from dataclasses import dataclass, replace

import numpy as np

from moetool.bench.paper.verdict import CannotTestError, Curve, Found
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.report.sample import ReportOptions, read_routes
from moetool.report.transitions import affinity

CHANCE, POPULAR, AFFINE = "by chance", "by popularity", "by affinity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed; a given trace replaces them.
    """

    data: tuple[str, ...] = ALL


def run(stage: Workbench, options: Options) -> Found:
    """Share of a layer's experts that are named from counts of other requests; another part of the prompts a seed.

    Source: DuoServe-MoE § 2.1, whose figure shows the two matrices as heat maps; `moetool report` draws both. The share
    that they name on held-out requests (`moetool.report.transitions.affinity`) is moetool's measure of the pattern.

    Raises:
        CannotTestError: a trace has one MoE layer, or one request.
    """
    values: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    traces = []
    for fold in stage.folds:
        trace = stage.trace(options.data, fold=fold)
        traces.append(trace)
        found = affinity(read_routes(trace, replace(ReportOptions(), seed=fold)))
        rows = {CHANCE: found.chance_M, POPULAR: found.popular_M, AFFINE: found.match_M}
        if not len(found.chance_M) or np.isnan(found.match_M).any():
            raise CannotTestError(f"{trace.path} has {trace.spec.num_layers} layers and {len(trace.requests)} requests")
        layers = tuple(range(1, 1 + len(found.chance_M)))
        for name, row_M in rows.items():
            values.setdefault(name, []).append(float(row_M.mean()))
            curves.setdefault(name, []).append((tuple(map(float, layers)), tuple((100 * row_M).tolist())))
    what = "experts of a layer that were named"
    return Found(
        values=values,
        what=what,
        unit="%",
        on=f"{stage.on(traces)}; counted on half of the requests, scored on the other half",
        curves=curves,
        axes=("layer", f"{what}, %"),
        traces=len(traces),
    )
