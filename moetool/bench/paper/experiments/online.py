"""Online requests at one server under cache policies without history: FineMoE's Figure 11."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.experiments.policies import PolicyLine, distribution, measure
from moetool.bench.paper.queueing import mean_by_server, serve_in_turn
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.simulation.arrivals import read_arrivals

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed; the given trace replaces them.
        lines: policies by name, without history; predictors are trained on another part of the prompts.
        memory: expert memory, as a share of all experts.
        busy: utilization under the first policy, which sets the rate of Poisson arrivals.
    """

    data: tuple[str, ...] = ALL
    lines: Mapping[str, PolicyLine]
    memory: float = 0.25
    busy: float = 0.7


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Mean seconds from arrival to the last token, one request at a time, as replayed on the assumed machine.

    Source: FineMoE § 6.3. Deviation: arrivals are Poisson, and requests have their own lengths.
    """
    samples = Samples(bench)
    ends: dict[str, list[float]] = {}
    for fold in bench.folds:
        trace = samples.use(bench.trace(options.data, fold=fold))
        other = bench.trace(options.data, fold=(fold + 1) % max(2, len(bench.folds)))
        coming: list[float] = []
        for name, line in options.lines.items():
            measured = measure(bench, trace, line, options.memory, 1, fold, learned=other)
            takes = [sum(seconds) for seconds in measured.request_s]
            if not coming:
                rate = f"poisson:{1e6 * float(np.mean(takes)) / options.busy:.0f}us"
                rng = np.random.default_rng(fold)
                coming = [one.at_s for one in read_arrivals(rate, [0], len(takes), rng)]
            work = [(at_s, 0, each) for at_s, each in zip(coming, takes, strict=True)]
            served = serve_in_turn(work, 1, lambda _, seconds: seconds)
            samples.add(name, mean_by_server(served)[-1])
            ends.setdefault(name, []).extend(seconds for _, seconds in served)
    for name, each in ends.items():
        samples.draw(name, *distribution(each))
    axes = ("time from arrival to the last token, s", "cumulative share of requests, %")
    on = "replayed on the assumed machine, one request at a time"
    return samples.found("mean time from arrival to the last token", "s", on, axes=axes)
