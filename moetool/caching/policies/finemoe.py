"""FineMoE: prefetches and evicts by the earlier iteration with the most similar gates or embedding."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching import policy
from moetool.prediction.expert_maps import (
    MapSearch,
    MapStore,
    Sizing,
    capacity_of,
    check_state,
    distribution,
    select,
    threshold,
)

COLD_CAPACITY = 1024
"""Capacity of a store that starts empty, in maps: the paper evaluates with 1K."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of FineMoE.

    Attributes:
        distance: d. Layers 1 to d are searched by embedding, layer l > d by the gates of layers 1 to l-d.
        capacity: maximum number of maps: a number, `2LJ` or `LJlnLJ/2` (None: the given store's, else 1024).
        lag: events between the gate that starts a search and the event that uses its result; at most distance - 1.
        floor: least probability p in the eviction priority.
        meaning: whether to search by embedding; without it, nothing is prefetched for layers 1 to d.
        mass: whether to prefetch the probability mass δ; without it, the K likeliest experts.
        eviction: `maps`, by 1 / (p * freq); or `lfu` or `lru`, for comparison.
        evict_lower_only: whether a prefetch may evict only experts of lower value than its own. The paper has no such
            rule.
    """

    REFUSED: ClassVar[dict[str, str]] = {"spare": "it is called evict_lower_only"}

    distance: int = 3
    capacity: Sizing | None = None
    lag: int = 1
    floor: float = 1e-3
    meaning: bool = True
    mass: bool = True
    eviction: Literal["maps", "lfu", "lru"] = "maps"
    evict_lower_only: bool = False

    def __post_init__(self) -> None:
        if self.distance < 1:
            raise UsageError(f"policy finemoe: distance is {self.distance}, expected at least 1")
        if self.lag < 0:
            raise UsageError(f"policy finemoe: lag is {self.lag}, expected at least 0")
        if not 0 < self.floor <= 1:
            raise UsageError(f"policy finemoe: floor is {self.floor}, expected more than 0 and at most 1")


class Policy(policy.Policy):
    """Searches a store of expert maps, prefetches by the found map, and evicts by 1 / (p * freq).

    For each layer it prefetches the fewest experts, at least K, that hold δ = clip(1 - score) of the found map's
    probability. Their order is p / (l - l_now), and they are requested again at each event until their layer comes. At
    the end of a forward, each iteration's map joins the store, and a full store drops the most redundant map for it.
    The store is that of the predictor `expert_map`, if given; else it starts empty, without prefetches at first.

    Source: FineMoE (Yu et al., EuroSys 2026), section 4. Readings and deviations:
        - The search that the gate of layer l starts runs on a separate thread, and so does the update of the store at
          the end of a forward. A search's result is used `lag` events later, so that replay decides as serve did, and
          is then `distance` - `lag` layers ahead. The next forward begins with the updated store. If a result is not
          ready, the model's thread waits: this is the cost of a search. The search by embedding runs on the model's
          thread and is used at once: it starts after the embedding layer, and later it would miss the first layer.
        - The paper pauses all prefetches at a miss. Here a prefetch gets a slot only after every miss of the event.
        - 1 / (p * freq) is infinite for an expert that was never used or is not in the map. Here freq + 1 replaces
          freq, and p has a floor. freq counts the events that needed the expert, resident or not. Among equal
          priorities, the least recently used expert is evicted.
        - For coming layers, p is that of the latest map found for them. For passed layers, it is that of the next
          iteration after the found one, if known, else that of the found one.
        - Experts prefetched for a later layer are evicted last.
        - A prompt's map and embedding are means over its tokens. A chunk of a long prompt counts as an iteration.
        - In a forward of several requests, each has its own search; p is the sum over them.
        - `moetool.caching.devices` distributes experts over several devices (section 5). Each device has its own
          policy and store, and all of them see the whole route.
    """

    needs = frozenset({"experts", "logits", "embeddings"})
    prefetch_distance = 3

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        layers, experts = spec.num_layers, spec.num_experts
        self._lag = self.search_lag = min(options.lag, options.distance - 1)
        self._store = self._first_store(getattr(predictor, "maps", None))
        self._searcher = ThreadPoolExecutor(1, "finemoe-search")  # its thread ends with the policy
        self._joining: Future[dict[int, int]] | None = None  # rows of the last forward's iterations, by request
        self._requests: dict[int, _Request] = {}  # requests of the forward
        self._last: dict[int, int] = {}  # row of the previous iteration, by running request
        self.chance_LE = np.zeros((layers, experts), np.float32)  # p, over all requests of the forward
        self._wanted: list[list[int]] = [[] for _ in range(layers)]  # experts to prefetch for a layer
        self._found: deque[tuple[int, int]] = deque()  # running searches: (event that uses it, target layer)
        self._ahead: set[int] = set()  # prefetched for later layers of this forward
        # Arrays by key, so that NumPy weighs all residents at once.
        self._uses_X = np.zeros(layers * experts, np.int64)
        self._used_X = np.zeros(layers * experts, np.int64)  # time of the last use
        self._resident_X = np.zeros(layers * experts, bool)
        self._worth_X = np.zeros(layers * experts)
        self._stale = True
        self._time = 0

    @property
    def store(self) -> MapStore:
        """The maps, those of the last forward included."""
        self._finish_joining()
        return self._store

    @classmethod
    def uses(cls, predictor: Any = None) -> bool:
        return predictor is None or getattr(predictor, "maps", None) is not None

    def _first_store(self, given: MapStore | None) -> MapStore:
        spec, options = self.spec, self.options
        shape = (spec.num_layers, spec.num_experts)
        if given is None:
            sizing = COLD_CAPACITY if options.capacity is None else options.capacity
            return MapStore(*shape, capacity_of(sizing, *shape), spec.hidden_size, options.distance)
        if given.embedding_CD.shape[1] != spec.hidden_size:
            raise MismatchError(
                "policy finemoe needs maps with whole gate distributions and embeddings, but this predictor's maps "
                "hold chosen experts only; make them with 'moetool plan maps' from a trace with topk,logits,embeddings"
            )
        capacity = given.capacity if options.capacity is None else capacity_of(options.capacity, *shape)
        if capacity < given.size:
            raise UsageError(
                f"policy finemoe: capacity is {capacity}, expected at least the {given.size} maps of the given store"
            )
        store = given.copy()
        store.capacity, store.distance = capacity, min(options.distance, spec.num_layers)
        return store

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        assert info.embedding_TD is not None, "needs the embeddings"
        self._requests = {}
        first_T = {request: t for t, request in reversed(list(enumerate(info.request_T)))}
        for request in dict.fromkeys(info.request_T):
            search = MapSearch(self.store, info.embedding_TD[first_T[request]])
            self._requests[request] = _Request(search, np.zeros_like(self.chance_LE))
        self._ahead.clear()
        self._found.clear()
        self._wanted = [[] for _ in self._wanted]
        if self.options.meaning:
            self.searches += len(self._requests)
            for running in self._requests.values():
                running.match = running.search.by_embedding()
            self._use(-1, range(min(self.options.distance, self.spec.num_layers)))
        else:
            self._stale = True
        return self._ask(-1)

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        assert event.scores_TE is not None, "needs the logits"
        self._time += 1
        base = self.spec.expert_key(event.layer, 0)
        keys = [base + expert for expert in event.needed]
        self._uses_X[keys] += 1
        self._used_X[keys] = self._time
        end = self.spec.expert_key(event.layer + 1, 0)
        self._ahead = {key for key in self._ahead if key >= end}
        chance_TE = distribution(event.scores_TE)
        rows_T = np.asarray(event.forward.request_T)
        self.searches += len(self._requests)
        for request, running in self._requests.items():
            if len(self._requests) == len(rows_T):  # one token each
                chance_E = chance_TE[int(np.argmax(rows_T == request))]
            else:
                chance_E = chance_TE[rows_T == request].mean(axis=0, dtype=np.float32)
            running.pending.append(self._searcher.submit(_search_on, running.search, chance_E))
        self._found.append((event.layer + self._lag, event.layer + self.options.distance))
        self._stale = True
        while self._found and self._found[0][0] <= event.layer:
            target = self._found.popleft()[1]
            for running in self._requests.values():
                running.match = running.pending.popleft().result()
            self._use(event.layer, range(target, min(target + 1, self.spec.num_layers)), first=target)
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        return self._ask(event.layer)

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident_X[key] = True
        self._stale = True
        if prefetched:
            self._ahead.add(key)

    def removed(self, key: int) -> None:
        self._resident_X[key] = False
        self._worth_X[key] = np.inf
        self._ahead.discard(key)

    def evict(self, locked: Collection[int]) -> int:
        found = self._least(self._ahead.union(locked))
        if found is None:
            found = self._least(locked)
        assert found is not None, "asked for a resident where all are locked"
        return found

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        found = self._least(self._ahead.union(locked))
        if found is None or not self.options.evict_lower_only:
            return found
        return None if self._worth_X[found] > self._weigh(np.array([key]))[0] else found

    def end_forward(self, info: ForwardInfo) -> None:
        self._joining = self._searcher.submit(_join, self.store, self._requests, self._last)
        self._requests = {}

    def end_request(self, request: int) -> None:
        self._finish_joining()
        self._last.pop(request, None)

    def state(self) -> dict[str, np.ndarray]:
        arrays = {name: array.copy() for name, array in self.store.arrays().items()}
        return {**arrays, "uses_X": self._uses_X.copy(), "used_X": self._used_X.copy()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        check_state(state, ("maps_LCE", "embedding_CD", "next_C", "uses_X", "used_X"))
        layers, experts = self.spec.num_layers, self.spec.num_experts
        maps_LCE, embedding_CD = state["maps_LCE"], state["embedding_CD"]
        shapes = (maps_LCE.shape[::2], embedding_CD.shape[1:], state["uses_X"].shape, state["used_X"].shape)
        if shapes != ((layers, experts), (self.spec.hidden_size,), self._uses_X.shape, self._used_X.shape):
            raise ValueError(f"arrays of shapes {shapes}")
        for name in ("uses_X", "used_X"):
            if state[name].dtype.kind != "i" or (state[name] < 0).any():
                raise ValueError(f"{name} is not whole numbers of 0 or more")
        self._store = MapStore.of(
            maps_LCE.copy(),
            embedding_CD.copy(),
            state["next_C"],
            capacity=self._store.capacity,
            distance=self._store.distance,
        )
        self._uses_X, self._used_X = state["uses_X"].astype(np.int64), state["used_X"].astype(np.int64)
        self._time = int(self._used_X.max(initial=0))

    def _finish_joining(self) -> None:
        """Wait until the last forward's iterations have joined the store."""
        joining, self._joining = self._joining, None
        if joining is not None:
            rows = joining.result()
            taken = set(rows.values())
            self._last = {request: row for request, row in self._last.items() if row not in taken}
            self._last.update({request: row for request, row in rows.items() if row >= 0})

    def _use(self, layer: int, targets: range, *, first: int = 0) -> None:
        """Use the requests' newest matches: update p and select the experts to prefetch.

        Args:
            layer: current layer; up to it, p comes from the match's next iteration.
            targets: layers to select experts for.
            first: first layer whose p comes from the match.
        """
        selected: dict[int, set[int]] = {target: set() for target in targets}
        self._stale = True
        store = self.store
        for running in self._requests.values():
            if running.match is None:
                continue
            row, score = running.match
            after = int(store.next_C[row])
            fresh = not running.chance_LE.any()  # the first match of the forward
            running.chance_LE[0 if fresh else first :] = store.maps_LCE[0 if fresh else first :, row]
            running.chance_LE[: layer + 1] = store.maps_LCE[: layer + 1, row if after < 0 else after]
            for target in targets:
                mass = threshold(score) if self.options.mass else 0.0
                chance_E = store.maps_LCE[target, row, : self.spec.num_experts_L[target]]
                selected[target].update(select(chance_E, mass, self.spec.top_k_L[target]))
        if len(self._requests) == 1:
            self.chance_LE = next(iter(self._requests.values())).chance_LE
        else:
            self.chance_LE = np.sum([running.chance_LE for running in self._requests.values()], axis=0)
        for target, experts in selected.items():
            self._wanted[target] = sorted(experts)

    def _ask(self, layer: int) -> list[int]:
        """Return the experts to prefetch after the gate of `layer`, by PRI^prefetch = p / (l - l_now)."""
        last = min(layer + self.options.distance, self.spec.num_layers - 1)
        wanted: list[tuple[float, int]] = []
        for ahead in range(layer + 1, last + 1):
            base = self.spec.expert_key(ahead, 0)
            chance_E = self.chance_LE[ahead].tolist()
            wanted += [(-chance_E[expert] / (ahead - layer), base + expert) for expert in self._wanted[ahead]]
        return [key for _, key in sorted(wanted)]

    def _weigh(self, index: Any) -> np.ndarray:
        """Return the retention value of the experts at `index`: the reciprocal of PRI^evict."""
        if self.options.eviction == "lru":
            return self._used_X[index].astype(np.float64)
        uses = self._uses_X[index] + 1.0
        if self.options.eviction == "lfu":
            return uses
        return np.maximum(self.chance_LE.reshape(-1)[index], self.options.floor) * uses

    def _least(self, kept: Collection[int]) -> int | None:
        """Return the resident outside `kept` with the lowest value; ties go to the least recently used."""
        if self._stale:
            self._worth_X = np.where(self._resident_X, self._weigh(slice(None)), np.inf)
            self._stale = False
        worth_X = self._worth_X
        if kept:
            worth_X = worth_X.copy()
            worth_X[list(kept)] = np.inf
        least = worth_X.min()
        if least == np.inf:
            return None
        equal = np.flatnonzero(worth_X == least)
        return int(equal[self._used_X[equal].argmin()])


def _join(store: MapStore, requests: Mapping[int, "_Request"], last: Mapping[int, int]) -> dict[int, int]:
    """Add the iterations of a forward to the store after its searches; return their rows by request (-1: dropped)."""
    for running in requests.values():
        for search in running.pending:
            search.result()  # raises its error
    done = {request: running.search for request, running in requests.items() if running.search.complete}
    rows = store.add(list(done.values()), [last.get(request, -1) for request in done]) if done else []
    return dict(zip(done, rows, strict=True))


def _search_on(search: MapSearch, chance_E: np.ndarray) -> tuple[int, float] | None:
    """Observe one more layer, and search."""
    search.observe(chance_E)
    return search.by_trajectory()


@dataclass(slots=True, eq=False)
class _Request:
    """A request of the running forward.

    Attributes:
        search: its search.
        chance_LE: p, by its matches.
        match: row and score of the match in use.
        pending: searches whose results are not yet in use, oldest first.
    """

    search: MapSearch
    chance_LE: np.ndarray
    match: tuple[int, float] | None
    pending: "deque[Future[tuple[int, float] | None]]"

    def __init__(self, search: MapSearch, chance_LE: np.ndarray) -> None:
        self.search, self.chance_LE = search, chance_LE
        self.match, self.pending = None, deque()
