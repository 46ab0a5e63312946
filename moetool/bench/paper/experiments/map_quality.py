"""Quality of stored expert maps: similarity, hit rates, sizes. FineMoE's Figures 8, 9, 16(a) and 18."""

from dataclasses import dataclass
from typing import Literal

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.trace.reader import Trace
from moetool.training.map_store import MapReport, SimilarityCorrelation, plan_maps

KINDS = ("semantic", "trajectory")
_WHAT = {
    "pearson": "correlation of similarity and hit rate (Pearson)",
    "rise": "hit rate of pairs of iterations",
    "best": "similarity of the best map (cosine)",
    "bytes": "size of the store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets; the given trace replaces them.
        capacities: capacities of the store, in maps.
        measure: `pearson`, the correlation of similarity and hit rate; `rise`, the mean hit rate of pairs in the lowest
            and highest nonempty fifth of similarity; `best`, the mean similarity of the best map; `bytes`, megabytes of
            a store at this capacity.
    """

    data: tuple[str, ...] = ALL
    capacities: tuple[int, ...] = (1024,)
    measure: Literal["pearson", "rise", "best", "bytes"] = "pearson"


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Make a store of each capacity per seed; a seed has its own prompts and held-out split.

    Source: FineMoE § 4.2.3, § 6.7, § 6.8 (`moetool.training.map_store.plan_maps`).
    """
    samples = Samples(bench)
    swept = len(options.capacities) > 1
    for seed in bench.seeds:
        trace = samples.use(bench.trace(options.data, fold=seed))
        for capacity in options.capacities:
            made = _report(bench, trace, capacity, seed)
            if options.measure == "bytes":
                samples.add(f"{capacity} maps", made.bytes / made.maps * capacity / 1e6)
                continue
            for kind, likeness in zip(KINDS, (made.meaning, made.path), strict=True):
                if likeness is None:
                    raise CannotTestError(f"{trace.path} has no embeddings")
                for name, value in _values(kind, likeness, options.measure).items():
                    samples.add(f"{name}, {capacity} maps" if swept else name, value)
                if options.measure in ("pearson", "rise") and not swept:
                    filled = [each for each in likeness.bins if each[3]]
                    samples.draw(kind, [each[0] for each in filled], [100 * each[2] for each in filled])
    unit = {"pearson": "", "rise": "%", "best": "", "bytes": "MB"}[options.measure]
    axes = ("similarity of the iterations, from", "hit rate, %")
    if swept:
        axes = ("maps in the store", f"{_WHAT[options.measure]}, {unit}".removesuffix(", "))
        for kind in ("", *(f"{kind}, " for kind in KINDS)):
            labels = [f"{kind}{capacity} maps" for capacity in options.capacities]
            if labels[0] in samples.values:
                rows = [samples.values[label] for label in labels]
                samples.sweep(kind.removesuffix(", ") or "all maps", options.capacities, rows)
    on = "maps of the training requests, iterations of held-out ones"
    return samples.found(_WHAT[options.measure], unit, on, axes=axes, exact=options.measure == "bytes")


def _report(bench: Workbench, trace: Trace, capacity: int, seed: int) -> MapReport:
    return bench.once(
        f"maps {trace.path} {capacity} {seed}",
        lambda: plan_maps(trace.path, bench.folder("maps"), options={"capacity": capacity}, seed=seed),
    )


def _values(kind: str, likeness: SimilarityCorrelation, measure: str) -> dict[str, float]:
    if measure == "best":
        return {kind: likeness.best}
    if measure == "pearson":
        if likeness.pearson is None:
            raise CannotTestError(f"the {kind} similarity or its hit rate does not vary")
        return {kind: likeness.pearson}
    filled = [each[2] for each in likeness.bins if each[3]]
    return {f"{kind}, least alike": filled[0], f"{kind}, most alike": filled[-1]}
