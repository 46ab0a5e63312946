"""Prediction of the next layer's experts from popularity and from affinity: DuoServe's Figure 2."""

from dataclasses import dataclass, replace

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
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


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Predict a layer's experts from counts on other requests; each seed takes another part of the prompts.

    Source: DuoServe-MoE § 2.1, whose figure shows the two matrices as heat maps; `moetool report` draws both. The share
    of experts predicted on held-out requests (`moetool.report.transitions.affinity`) is moetool's addition.

    Raises:
        CannotTestError: a trace has one MoE layer, or one request.
    """
    samples = Samples(bench)
    for fold in bench.folds:
        trace = samples.use(bench.trace(options.data, fold=fold))
        found = affinity(read_routes(trace, replace(ReportOptions(), seed=fold)))
        rows = {CHANCE: found.chance_M, POPULAR: found.popular_M, AFFINE: found.match_M}
        if not len(found.chance_M) or np.isnan(found.match_M).any():
            raise CannotTestError(f"{trace.path} has {trace.spec.num_layers} layers and {len(trace.requests)} requests")
        for name, row_M in rows.items():
            samples.add(name, row_M.mean())
            samples.draw(name, range(1, 1 + len(row_M)), 100 * row_M)
    what, on = "share of a layer's experts predicted", "counted on half of the requests, scored on the other half"
    return samples.found(what, "%", on, axes=("layer", f"{what}, %"))
