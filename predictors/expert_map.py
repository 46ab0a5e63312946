"""Expert maps: the gate distributions of the most similar earlier iteration.

Counted, not fitted: a store of maps (`moetool.prediction.expert_maps`) is searched for each token by its observed
gates, or by its embedding before the first gate. The score is the found map's row of the coming layer.

Source: FineMoE (Yu et al., EuroSys 2026), sections 4.1, 4.2 and 4.4. Readings and deviations:

- A map holds the whole distribution of each gate; sigmoid scores are divided by their sum.
- A prompt is one iteration, and its map and embedding are means over its tokens. `prompts = "tokens"` instead keeps a
  map of each token.
- The paper predicts layer l from the layers up to l - d, for one d. Here any layer is predicted from all observed ones;
  d remains in RDY, which decides what a full store keeps.
- The paper uses the single best map. `neighbours` uses the mean of the n best.
- `source = "topk"` is for traces without logits: it uses only the weights of chosen experts, and no search by
  embedding.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base.config import Span, require_within
from moetool.base.types import GateEvent, ModelSpec
from moetool.prediction.expert_maps import MapSearch, MapStore, Sizing, capacity_of, distribution, top_mass
from moetool.training.tokens import Tokens

NEEDS = {"logits": frozenset({"experts", "logits", "embeddings"}), "topk": frozenset({"experts", "weights"})}
_ARRAYS = ("maps_LCE", "embedding_CD", "next_C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Contents of the maps, and the search.

    Attributes:
        source: `logits`: whole distributions and embeddings; `topk`: the chosen experts' weights.
        capacity: maximum number of maps: a number, or the paper's sizings `2LJ` and `LJlnLJ/2`.
        distance: d of RDY: number of layers searched by embedding.
        prompts: maps of a prompt: its `mean`, or one for each of its `tokens`.
        neighbours: number of most similar maps in the score.
    """

    source: Literal["logits", "topk"] = "logits"
    capacity: Sizing = "LJlnLJ/2"
    distance: int = 3
    prompts: Literal["mean", "tokens"] = "mean"
    neighbours: int = 1

    def __post_init__(self) -> None:
        require_within(self, "expert_map: ", distance=Span(0), neighbours=Span(1))


class Predictor(moetool.training.predictor.Predictor):
    """Searches by the observed gates, one layer at a time.

    Attributes:
        maps: store, which shares its arrays with the buffers.

    Shapes: buffers maps_LCE float32, embedding_CD float32 (rows of length 1; no columns for `topk`) and next_C int32,
        for C maps. After loading, they stay memory-mapped.
    """

    needs = NEEDS["logits"]
    incremental = True
    maps_LCE: Tensor
    embedding_CD: Tensor
    next_C: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.needs = NEEDS[options.source]
        self.lookahead = self.num_layers
        width = spec.hidden_size if options.source == "logits" else 0
        capacity = capacity_of(options.capacity, self.num_layers, self.num_experts)
        for name in _ARRAYS:
            self.register_buffer(name, None)
        self._hold(MapStore(self.num_layers, self.num_experts, capacity, width, options.distance))
        self._searches: list[MapSearch] = []  # one per token of the forward
        self._found: list[list[list[int]]] = []  # rows of the best maps, by layer and token

    def count(self, tokens: Tokens) -> None:
        assert tokens.request_T is not None and tokens.iteration_T is not None
        request_T, iteration_T = tokens.request_T.numpy(), tokens.iteration_T.numpy()
        order_T = np.lexsort((iteration_T, request_T))
        pairs = np.stack([request_T[order_T], iteration_T[order_T]])
        starts = np.flatnonzero(np.any(pairs[:, 1:] != pairs[:, :-1], axis=0)) + 1
        maps = self.maps
        store = MapStore(self.num_layers, self.num_experts, maps.capacity, maps.embedding_CD.shape[1], maps.distance)
        row, request = -1, -1
        for rows_T in np.split(order_T, starts):
            part = tokens.take(torch.from_numpy(rows_T))
            if int(request_T[rows_T[0]]) != request:
                request, row = int(request_T[rows_T[0]]), -1
            map_TLE = self._chances(part)
            if self.options.prompts == "mean":
                map_TLE = map_TLE.mean(axis=0, keepdims=True, dtype=np.float32)
            for map_LE in map_TLE:
                embedding_D = None if part.embedding_TD is None else part.embedding_TD[0].numpy()
                search = MapSearch(store, embedding_D, compare=store.size == store.capacity)
                for chance_E in map_LE:
                    search.observe(chance_E)
                (row,) = store.add([search], [row])
        self._hold(store)

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        chance_TPE = self._chances(tokens)
        embedding_TD = None if tokens.embedding_TD is None else tokens.embedding_TD.numpy()
        found = []
        for t in range(len(tokens)):
            search = MapSearch(self.maps, None if embedding_TD is None else embedding_TD[t])
            for chance_E in chance_TPE[t]:
                search.observe(chance_E)
            found.append(self._best(search))
        return torch.from_numpy(self._mean(found, layer))

    def observe(self, event: GateEvent) -> None:
        if event.layer == 0:
            embedding_TD = event.forward.embedding_TD if "embeddings" in self.needs else None
            self._found = []
            self._searches = [
                MapSearch(self.maps, None if embedding_TD is None else embedding_TD[t])
                for t in range(len(event.experts_TK))
            ]
        assert event.layer == len(self._found), "events of a forward come layer by layer"
        if self.options.source == "logits":
            assert event.scores_TE is not None, "the event lacks scores"
            chance_TE = distribution(event.scores_TE)
        else:
            assert event.weights_TK is not None, "the event lacks weights"
            chance_TE = top_mass(np.asarray(event.experts_TK), event.weights_TK, self.num_experts)
        for search, chance_E in zip(self._searches, chance_TE, strict=True):
            search.observe(chance_E)
        self._found.append([self._best(search) for search in self._searches])

    def scores(self, layer: int) -> np.ndarray:
        known = min(layer, len(self._found))
        assert known > 0 and layer - known < self.lookahead, "too few layers were observed"
        return self._mean(self._found[known - 1], layer)

    def _chances(self, tokens: Tokens) -> np.ndarray:
        """Return P of each token in each known layer: float32 [T, P, E]."""
        T, P, K = tokens.experts_TPK.shape
        if self.options.source == "logits":
            assert tokens.scores_TPE is not None
            flat = distribution(tokens.scores_TPE.numpy().reshape(T * P, -1))
        else:
            assert tokens.weights_TPK is not None
            experts, weights = (c.numpy().reshape(T * P, K) for c in (tokens.experts_TPK, tokens.weights_TPK))
            flat = top_mass(experts, weights, self.num_experts)
        return flat.reshape(T, P, self.num_experts)

    def _best(self, search: MapSearch) -> list[int]:
        """Return the rows of the maps most similar to an iteration, by its gates; before the first, by embedding."""
        if not self.maps.size:
            return []
        if self.options.neighbours == 1:
            best = search.by_trajectory() or search.by_embedding()
            return [] if best is None else [best[0]]
        score_C = search.trajectory_C() if search.num_observed else search.semantic_C()
        return np.argsort(-score_C, kind="stable")[: self.options.neighbours].tolist()

    def _mean(self, found: list[list[int]], layer: int) -> np.ndarray:
        """Return for each token the mean of a layer's rows in the found maps: float32 [T, E]."""
        scores_TE = np.zeros((len(found), self.num_experts), np.float32)
        for t, rows in enumerate(found):
            if rows:
                scores_TE[t] = self.maps.maps_LCE[layer, rows].mean(axis=0)
        return scores_TE

    def _hold(self, store: MapStore) -> None:
        """Adopt a store and share its arrays."""
        arrays = store.arrays()
        for name in _ARRAYS:
            setattr(self, name, torch.from_numpy(arrays[name]))
        self.maps = MapStore.of(**arrays, capacity=store.capacity, distance=store.distance)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Assign the tensors, of any number of maps, without a copy, so that a memory-mapped file stays mapped."""
        missing_keys += [prefix + name for name in _ARRAYS if prefix + name not in state_dict]
        unexpected_keys += [key for key in state_dict if key.removeprefix(prefix) not in _ARRAYS]
        if missing_keys or unexpected_keys:
            return
        try:
            arrays = {name: state_dict[prefix + name].numpy() for name in _ARRAYS}
            store = MapStore.of(**arrays, capacity=self.maps.capacity, distance=self.maps.distance)
        except (ValueError, TypeError) as error:
            error_msgs.append(str(error))
            return
        expected = (self.maps.maps_LCE.shape[::2], self.maps.embedding_CD.shape[1:])
        if (store.maps_LCE.shape[::2], store.embedding_CD.shape[1:]) != expected:
            error_msgs.append(f"maps of another shape than {expected}")
            return
        self._hold(store)
