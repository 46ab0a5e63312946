"""Quality of stored expert maps: similarity, hit rates, sizes. FineMoE's Figures 8, 9, 16(a) and 18."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.costing.machines import NamedModel, read_named_model
from moetool.prediction.expert_maps import MapStore
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
        model: model of `recipes/models` whose layers, experts and hidden states a store of `bytes` has.
    """

    data: tuple[str, ...] = ALL
    capacities: tuple[int, ...] = (1024,)
    measure: Literal["pearson", "rise", "best", "bytes"] = "pearson"
    model: str = ""


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Make a store of each capacity per seed; a seed has its own prompts and held-out split.

    Source: FineMoE § 4.2.3, § 6.7, § 6.8 (`moetool.training.map_store.plan_maps`).
    """
    if options.measure == "bytes":
        return _sizes(options)
    samples = Samples(bench)
    swept = len(options.capacities) > 1
    for seed in bench.seeds:
        trace = samples.use(bench.trace(options.data, fold=seed))
        for capacity in options.capacities:
            made = _report(bench, trace, capacity, seed)
            for kind, likeness in zip(KINDS, (made.meaning, made.path), strict=True):
                if likeness is None:
                    raise CannotTestError(f"{trace.path} has no embeddings")
                for name, value in _values(kind, likeness, options.measure).items():
                    samples.add(f"{name}, {capacity} maps" if swept else name, value)
                if options.measure in ("pearson", "rise") and not swept:
                    filled = [each for each in likeness.bins if each[3]]
                    samples.draw(kind, [each[0] for each in filled], [100 * each[2] for each in filled])
    unit = "%" if options.measure == "rise" else ""
    axes = ("similarity of the iterations, from", "hit rate, %")
    if swept:
        axes = ("maps in the store", f"{_WHAT[options.measure]}, {unit}".removesuffix(", "))
        for kind in KINDS:
            labels = [f"{kind}, {capacity} maps" for capacity in options.capacities]
            if labels[0] in samples.values:
                samples.sweep(kind, options.capacities, [samples.values[label] for label in labels])
    on = "maps of the training requests, iterations of held-out ones"
    return samples.found(_WHAT[options.measure], unit, on, axes=axes)


def _sizes(options: Options) -> ExperimentResult:
    """Measure full stores of a model's maps, without embeddings and with them."""
    model = read_named_model(options.model)
    widths = {"maps": 0, "maps with embeddings": model.hidden}
    sizes = {
        stored: [_megabytes(model, capacity, width) for capacity in options.capacities]
        for stored, width in widths.items()
    }
    values = {
        f"{capacity} {stored}": [size]
        for stored, row in sizes.items()
        for capacity, size in zip(options.capacities, row, strict=True)
    }
    return ExperimentResult(
        values=values,
        what=_WHAT["bytes"],
        unit="MB",
        on=f"stores of {model.name}'s maps",
        curves={stored: [(options.capacities, tuple(row))] for stored, row in sizes.items()},
        axes=("maps in the store", f"{_WHAT['bytes']}, MB"),
        exact=True,
    )


def _megabytes(model: NamedModel, capacity: int, width: int) -> float:
    """Return the megabytes of a full store of maps with embeddings of this width."""
    maps_LCE = np.zeros((model.layers, capacity, model.experts), np.float32)
    embedding_CD, next_C = np.zeros((capacity, width), np.float32), np.full(capacity, -1, np.int32)
    store = MapStore.of(maps_LCE, embedding_CD, next_C, capacity=capacity, distance=1)
    arrays = (store.maps_LCE, store.embedding_CD, store.next_C, store.squares_LC)
    return sum(array.nbytes for array in arrays) / 1e6


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
