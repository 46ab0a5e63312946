"""Routing entropy of an iteration and of a whole request: FineMoE's Figure 3."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.report.measures import popularity, spread
from moetool.report.sample import ReportOptions, read_router_entropy, read_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets; the given trace replaces them.
        measure: `levels`, entropy in bits of the routers' probabilities of an iteration and of a request's mean;
            `growth`, entropy of the experts used by several iterations together.
        steps: numbers of iterations for `growth`, rounded to the counted ones.
    """

    data: tuple[str, ...] = ALL
    measure: Literal["levels", "growth"] = "levels"
    steps: tuple[int, ...] = (1, 10, 24)


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Entropy in bits, mean over layers and requests, with another part of the prompts per seed.

    Source: FineMoE § 2.4 (`moetool.report.measures.spread`, `moetool.report.sample.read_router_entropy`).
    """
    samples = Samples(bench)
    for fold in bench.folds:
        trace = samples.use(bench.trace(options.data, fold=fold))
        chosen = replace(ReportOptions(), seed=fold)
        routes = read_routes(trace, chosen)
        if options.measure == "levels":
            router = read_router_entropy(trace, routes, chosen)
            if router is None:
                raise CannotTestError(f"{trace.path} has no logits")
            samples.add("iteration", np.nanmean(router.token_QL))
            samples.add("request", np.nanmean(router.request_QL))
            continue
        made = spread(routes, popularity(routes))
        bits_N = np.nanmean(made.growth_QN, axis=0)
        for step in options.steps:
            nearest = min(range(len(made.steps)), key=lambda i: abs(made.steps[i] - step))
            samples.add(f"{step} iterations", bits_N[nearest])
        samples.draw("all requests", made.steps, bits_N)
    what = "entropy over the experts, mean over layers"
    return samples.found(what, "bits", axes=("iterations combined", "entropy, bits"))
