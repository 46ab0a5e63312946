"""Stores of expert maps from a trace, with scores of their similarities on held-out requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.base.json_files import JsonRecord
from moetool.base.types import GateEvent, ModelSpec, Phase
from moetool.prediction.expert_maps import MapSearch, MapStore, distribution, select, threshold, top_mass
from moetool.trace.reader import Trace

_MAX_ITERATIONS = 256
_BINS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityCorrelation:
    """Relation of one similarity score to the hit rate, over pairs of a held-out iteration and a stored map.

    Attributes:
        pearson: correlation with the hit rate (Figure 9); None where one of the two does not vary.
        bins: (least similarity, greatest, mean hit rate, pairs) of fifths of the range (Figure 8).
        best: mean similarity of the best map of each iteration.
        best_hit_rate: mean hit rate of that map.
    """

    pearson: float | None
    bins: tuple[tuple[float, float, float, int], ...]
    best: float
    best_hit_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReport(JsonRecord):
    """A store of expert maps, and its scores on held-out iterations.

    Attributes:
        out: folder of the store, a predictor.
        source: source of the maps: `logits` or `topk`.
        maps, capacity, bytes: number of maps, its limit, and their size.
        iterations: number of held-out one-token iterations compared with every map.
        meaning: similarity of the embeddings (Eq. 4); None without embeddings.
        path: similarity of all gates (Eq. 5).
        distance: d of the following values.
        selected: mean number of experts that δ selects per layer (Eqs. 6 to 8); compare `top_k`.
        selected_share: the same as a share of the layer's experts.
        widened_share: share of layers with more than K selected experts.
        hit_rate: share of a layer's needed experts among the selected ones.
        top_k: K.
    """

    out: str
    source: str
    maps: int
    capacity: int
    bytes: int
    iterations: int
    meaning: SimilarityCorrelation | None
    path: SimilarityCorrelation
    distance: int
    selected: float
    selected_share: float
    widened_share: float
    hit_rate: float
    top_k: int


def plan_maps(
    trace: Path, out: Path, *, options: Mapping[str, Any] | None = None, seed: int = 0, overwrite: bool = False
) -> MapReport:
    """Build a store of expert maps from the training requests of a trace, and score it on its test requests.

    Args:
        out: output folder: a predictor `expert_map`, for `--predictor` of serve, replay and plan cache.
        options: options of the predictor `expert_map`.

    Source: FineMoE (Yu et al., EuroSys 2026), Figures 8 and 9. The paper pairs one iteration per prompt. Here at most
    256 one-token iterations, evenly drawn from the test requests, are compared with every map. A map's hit rate is the
    share of the iteration's experts among the map's K likeliest, by layer.

    Raises:
        UsageError: as `moetool.training.training.train`; or no test request has an iteration of one token.
        MismatchError: the trace has no logits or embeddings.
    """
    from moetool.training.predictor import load_predictor
    from moetool.training.training import split_requests, train

    source = Trace(trace)
    kind = (options or {}).get("source", "logits")
    if kind == "logits" and (missing := sorted({"logits", "embeddings"} - source.columns)):
        raise MismatchError(
            f"expert maps need {', '.join(missing)}, but {trace} holds {', '.join(sorted(source.columns))}; capture "
            f"with --keep topk,logits,embeddings, or make maps from the chosen experts with --set source=topk"
        )
    split_requests(source, seed)  # holds out whole requests: a single request is not split in time
    card = train("expert_map", trace, out, options=options, seed=seed, overwrite=overwrite)
    predictor: Any = load_predictor(out)
    store: MapStore = predictor.maps
    chosen = predictor.options
    tests = frozenset(card["requests"]["test"])
    columns = predictor.needs - {"experts"}
    pairs = _Pairs(store, source.spec)
    selections = _Selections(store, source.spec, max(1, chosen.distance))
    tokens = [
        (info, events)
        for info, events in source.forwards(sequential=True, columns=columns, requests=tests)
        if info.phase_T == (Phase.DECODE,)
    ]
    if not tokens:
        raise UsageError(
            f"{out} is made, but the test requests of {trace} have no new tokens to score it; capture with more "
            f"--max-new-tokens"
        )
    step = max(1, len(tokens) // _MAX_ITERATIONS)
    for info, events in tokens[::step][:_MAX_ITERATIONS]:
        search = MapSearch(store, None if info.embedding_TD is None else info.embedding_TD[0])
        selections.begin(search)
        for event in events:
            search.observe(_chances(event, source.spec))
            selections.take(search, event)
        pairs.take(search, events)
    experts = source.spec.num_experts
    return MapReport(
        out=str(out),
        source=chosen.source,
        maps=store.size,
        capacity=store.capacity,
        bytes=predictor.num_bytes,
        iterations=pairs.iterations,
        meaning=pairs.likeness(0) if store.embedding_CD.shape[1] else None,
        path=pairs.likeness(1),
        distance=selections.distance,
        selected=selections.selected / max(1, selections.layers),
        selected_share=selections.selected / max(1, selections.layers * experts),
        widened_share=selections.widened / max(1, selections.layers),
        hit_rate=selections.hits / max(1, selections.needed),
        top_k=source.spec.top_k_L[0],
    )


def _chances(event: GateEvent, spec: ModelSpec) -> np.ndarray:
    if event.scores_TE is not None:
        chance_TE = distribution(event.scores_TE)
    else:
        chance_TE = top_mass(np.asarray(event.experts_TK), event.weights_TK, spec.num_experts_L[event.layer])
    return chance_TE[0]


class _Pairs:
    """Similarity and hit rate of iterations with every map."""

    def __init__(self, store: MapStore, spec: ModelSpec) -> None:
        self.iterations = 0
        self._likeness: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._hits: list[np.ndarray] = []
        self._has_embeddings = store.embedding_CD.shape[1] > 0
        self._top_LCK = np.argsort(-store.maps_LCE, axis=2, kind="stable")[..., : spec.top_k_L[0]]

    def take(self, search: MapSearch, events: list[GateEvent]) -> None:
        self.iterations += 1
        hits_C = np.zeros(self._top_LCK.shape[1])
        for event in events:
            used_E = np.zeros(search.map_LE.shape[1])
            used_E[list(event.experts_TK[0])] = 1
            hits_C += used_E[self._top_LCK[event.layer]].mean(axis=1)
        self._hits.append((hits_C / len(events)).astype(np.float32))
        if self._has_embeddings:
            self._likeness[0].append(search.semantic_C())
        self._likeness[1].append(search.trajectory_C())

    def likeness(self, kind: int) -> SimilarityCorrelation:
        like_NC, hits_NC = np.stack(self._likeness[kind]), np.stack(self._hits)
        like, hits = like_NC.ravel().astype(np.float64), hits_NC.ravel().astype(np.float64)
        varies = like.std() > 0 and hits.std() > 0
        edges = np.linspace(like.min(), like.max(), _BINS + 1)
        bin_of = np.clip(np.searchsorted(edges, like, side="right") - 1, 0, _BINS - 1)
        pairs = np.bincount(bin_of, minlength=_BINS)
        means = np.bincount(bin_of, hits, minlength=_BINS) / np.maximum(pairs, 1)
        best_N = like_NC.argmax(axis=1)
        rows_N = np.arange(len(best_N))
        return SimilarityCorrelation(
            pearson=float(np.corrcoef(like, hits)[0, 1]) if varies else None,
            bins=tuple(
                (float(edges[i]), float(edges[i + 1]), float(means[i]), int(pairs[i])) for i in range(_BINS) if pairs[i]
            ),
            best=float(like_NC[rows_N, best_N].mean()),
            best_hit_rate=float(hits_NC[rows_N, best_N].mean()),
        )


class _Selections:
    """Experts selected for each layer at a distance, and the share of the needed ones among them."""

    def __init__(self, store: MapStore, spec: ModelSpec, distance: int) -> None:
        self.distance = min(distance, spec.num_layers)
        self.layers = self.selected = self.widened = self.hits = self.needed = 0
        self._store, self._spec = store, spec
        self._match_L: list[tuple[int, float] | None] = []

    def begin(self, search: MapSearch) -> None:
        self._match_L = [search.by_embedding()] * self.distance

    def take(self, search: MapSearch, event: GateEvent) -> None:
        """Record the selection at a layer that `search` has observed."""
        self._match_L.append(search.by_trajectory())
        match = self._match_L[event.layer]
        if match is None:
            return
        row, score = match
        at_least = self._spec.top_k_L[event.layer]
        chance_E = self._store.maps_LCE[event.layer, row, : self._spec.num_experts_L[event.layer]]
        chosen = select(chance_E, threshold(score), at_least)
        self.layers += 1
        self.selected += len(chosen)
        self.widened += len(chosen) > at_least
        self.needed += len(event.needed)
        self.hits += len(set(chosen).intersection(event.needed))
