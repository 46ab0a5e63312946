"""Router scores and reuse of experts by rank: SMoE's Figures 4 and 6."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment, in decode.

    Attributes:
        data: prompt sets, mixed; a given trace replaces them.
        measure: `score`, mean score of the experts at a rank, as a share of the highest; `reuse`, share of the experts
            at a rank that the router chooses again within the next iterations of the request.
        within: these iterations.
    """

    data: tuple[str, ...] = ALL
    measure: Literal["score", "reuse"] = "score"
    within: int = 3


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Average over iterations and layers, with another part of the prompts per seed."""
    samples = Samples(bench)
    for fold in bench.folds:
        trace = samples.use(bench.trace(options.data, fold=fold))
        share_E = by_rank(trace, options)
        k = trace.spec.top_k_L[0]
        for name, rank in (("highest active", 0), ("lowest active", k - 1), ("highest inactive", k), ("lowest", -1)):
            samples.add(name, share_E[rank])
        samples.draw("experts", range(1, len(share_E) + 1), 100 * share_E)
    reuse = options.measure == "reuse"
    what = f"chosen again within {options.within} iterations" if reuse else "score, relative to the highest"
    return samples.found(what, "%", "decode", axes=("rank by score", f"{what}, %"))


def by_rank(trace: Trace, options: Options) -> np.ndarray:
    """The measure at each rank [E], from the highest score down.

    Raises:
        CannotTestError: no request decodes more than `options.within` tokens.
    """
    trace.require({"logits"}, "ranking experts by score")
    rows: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for info, events in trace.forwards(sequential=True, columns={"logits"}):
        if not info.prefill:
            scores_LE = np.stack([np.asarray(event.scores_TE)[0] for event in events])
            chosen_LE = np.zeros(scores_LE.shape, bool)
            for layer, event in enumerate(events):
                chosen_LE[layer, list(event.experts_TK[0])] = True
            rows.setdefault(info.request_T[0], []).append((scores_LE, chosen_LE))
    found = []
    for steps in rows.values():
        scores_TLE, chosen_TLE = (np.stack(each) for each in zip(*steps, strict=True))
        order_TLE = np.argsort(-scores_TLE, axis=-1, kind="stable")
        if options.measure == "score":
            ranked_TLE = np.take_along_axis(scores_TLE, order_TLE, -1)
            found.append(ranked_TLE / ranked_TLE[..., :1])
            continue
        last = len(steps) - options.within
        if last > 0:
            again_TLE = np.stack([chosen_TLE[t + 1 : t + 1 + options.within].any(0) for t in range(last)])
            found.append(np.take_along_axis(again_TLE, order_TLE[:last], -1))
    if not found:
        raise CannotTestError(f"{trace.path} has no request with more than {options.within} new tokens")
    return np.concatenate(found).mean((0, 1), dtype=np.float64)
