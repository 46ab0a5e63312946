"""Foresight: evicts the expert whose next use is expected latest, by what followed the most similar tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.config import Span, require_within
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching import policy
from moetool.caching.compiled_events import address, kernels
from moetool.prediction.token_memory import RequestWindow, TokenMemory, compile_loops, memory_bytes

NEARNESS = 0.3
"""Value of an expert that can be used next after a whole forward, relative to one that can be used at once."""
_RANKED = 32  # most victims in one ranking
_MORE = 8  # further victims in a ranking, since some are locked and prefetches evict too


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of Foresight.

    Attributes:
        memory: tokens kept, at two bytes per expert of the model each.
        neighbours: number of most similar tokens used.
        refresh: layers between valuations of all experts, if one pool serves all layers.
        prefetch: prefetch experts of the next layer if that is expected to pay.
        waste: cost of an unused prefetch, relative to the load that a used one takes off the critical path.
    """

    memory: int = 1024
    neighbours: int = 32
    refresh: int = 2
    prefetch: bool = True
    waste: float = 2.0

    def __post_init__(self) -> None:
        rows = Span(1, 2**20)
        require_within(self, "policy foresight: ", memory=rows, neighbours=rows, refresh=Span(1), waste=Span(0))


class Policy(policy.Policy):
    """Evicts the expert whose next use is expected latest, and prefetches likely experts of the next layer.

    A memory of the last tokens (`moetool.prediction.token_memory`) estimates after each layer's routing how soon each
    expert is needed again. It uses the tokens with the most similar routes, and needs no training. A `next_use`
    predictor adds the tokens that it was made from; other predictors are ignored.

    An expert's value falls with the number of layers until its layer runs again. A prefetch saves a load on the
    critical path only if its expert is used and the evicted one is not needed in the same layer. It is made if the
    probability of that exceeds the expected cost: an unused prefetch (`waste`), and the value of an expert that was
    evicted in vain. Nothing is prefetched for the first layer. The same holds while a forward of events like this
    one needs more experts than there are slots: every load is then on the critical path.

    Each request has its own route; for a prompt, that of its last token.

    Source: moetool.
    """

    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        fixed = predictor.routes() if predictor is not None and self.uses(predictor) else None
        compile_loops()
        self.memory = TokenMemory(spec, options.memory, options.neighbours, fixed)
        num = spec.num_layers * spec.num_experts
        self._resident = bytearray(num)  # setting one expert is faster than in an array
        self._resident_A = np.frombuffer(self._resident, bool)
        self._value_A = np.zeros(num, np.float32)
        self._near_LL = _nearness(spec)
        self._stride, self._num_layers = spec.num_experts, spec.num_layers
        self._layer = 0
        self._value_age = options.refresh  # events since all experts were valued
        self._values_A = self._value_A.data  # reading one number is faster than from an array
        self._valued: set[int] = set()  # layers whose `_value_A` belongs to this event
        self._event_slots = num_slots / spec.num_layers
        self._crowded = False  # a forward of events like this one needs more experts than there are slots
        self._num_misses = 0  # misses of this event
        self._order: list[int] = []  # residents of lowest value, the next victim last
        self._ranked_M = np.zeros(_RANKED, np.int64)
        self._limit = np.float32(1 / (1 + options.waste))
        self._requests: dict[int, RequestWindow] = {}
        self._free_windows: dict[int, RequestWindow] = {}  # windows of finished requests, by request
        self._rows: list[list[int]] = []  # rows of each request's tokens in the forward
        self._batch = self.memory.begin([], [])
        self._seen_layers = 0
        self._table: memoryview | None = None  # if events are compiled: it holds the state of an event

    @classmethod
    def state_bytes(cls, spec: ModelSpec, options: Options) -> int:
        return memory_bytes(spec, options.memory)

    @classmethod
    def uses(cls, predictor: Any = None) -> bool:
        return predictor is None or getattr(predictor, "routes", None) is not None

    @property
    def compiles(self) -> bool:
        return type(self) is Policy

    @property
    def compiled_memory(self) -> np.ndarray:
        return self.memory.table

    def compile_into(self, table: memoryview) -> Mapping[int, Any]:
        self._table, k = table, kernels()
        return {
            k.REFRESH: self.options.refresh,
            k.PREFETCH: self.options.prefetch,
            k.EVENT_SLOTS: self.num_slots,
            k.VALUE_AGE: self._value_age,
            k.VALUE_A: self._value_A,
            k.NEAR_LL: self._near_LL,
            k.VALUED_L: np.zeros(self._num_layers, np.uint8),
            k.RESIDENT_A: self._resident_A,
            k.ORDER_M: np.zeros(k.RANKED, np.int64),
            k.KEY_E: self.memory.key_E,
            k.UNUSED_E: self.memory.unused_E,
            k.FLOAT_2: np.array([self.options.waste, self._limit]),
            **self._batch_fields(),
        }

    def begin_request(self, request: int) -> None:
        # Continue a finished request's window, whose experts are still resident. The lowest request number decides, not
        # the order of ends, since a server learns of an end later than a replay does.
        free = self._free_windows
        self._requests[request] = free.pop(min(free)) if free else self.memory.open_window()

    def end_request(self, request: int) -> None:
        self._free_windows[request] = self._requests.pop(request)

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        rows: dict[int, list[int]] = {}
        for row, request in enumerate(info.request_T):
            rows.setdefault(request, []).append(row)
        self._rows = list(rows.values())
        self._batch = self.memory.begin([self._requests[request] for request in rows], self._rows)
        self._seen_layers = 0
        if self._table is not None:
            for at, value in self._batch_fields().items():
                self._table[at] = value
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._layer = event.layer
        self.memory.observe(self._batch, event.layer, event.experts_TK)
        self._seen_layers += 1
        self._valued.clear()
        self._value_age += 1
        self._crowded = len(hits) + len(misses) > self._event_slots
        self._order = []
        self._num_misses = len(misses)
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        if not self._looks_ahead():
            return ()
        return self.memory.expect(self._batch, event.layer + 1, self._limit, self._resident_A)

    def admit(self, key: int, prefetched: bool) -> None:
        self._resident[key] = True

    def removed(self, key: int) -> None:
        self._resident[key] = False

    def evict(self, locked: Collection[int]) -> int:
        if not self._order:
            self._rank(())
        while self._order:
            key = self._order.pop()
            if self._resident[key] and key not in locked:
                return key
        self._rank(locked)
        return self._order.pop()

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        first, last = candidates[0] // self._stride, candidates[-1] // self._stride
        if first == last:
            if first not in self._valued:
                self._value(first, first)
            return min(candidates, key=self._values_A.__getitem__)
        if not self._valued.issuperset(range(first, last + 1)):
            self._value(first, last)
        near_L = self._near_LL[self._layer].tolist()
        return min(candidates, key=lambda key: self._values_A[key] * near_L[key // self._stride])

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        victim = self.evict(locked)
        if self._is_worth(key, victim):
            return victim
        self._order.append(victim)
        return None

    def evict_among_for_prefetch(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        victim = self.evict_among(candidates, residents)
        return victim if self._is_worth(key, victim) else None

    def worth(self, keys: Sequence[int]) -> Sequence[float]:
        if keys and self._layer not in self._valued:
            self._value(self._layer, self._layer)
        return [self._values_A[key] for key in keys]

    def evict_for_admission(self, key: int, locked: Collection[int]) -> int | None:
        victim = self.evict(locked)
        if self._is_worth_more(key, victim):
            return victim
        self._order.append(victim)
        return None

    def evict_among_for_admission(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        victim = self.evict_among(candidates, residents)
        return victim if self._is_worth_more(key, victim) else None

    def end_forward(self, info: ForwardInfo) -> None:
        path_TP, most = self._batch.path_TP, self.options.memory
        if self._table is not None:
            self._seen_layers = self._table[kernels().SEEN]
        for rows, window in zip(self._rows, self._batch.windows, strict=True):
            if self._seen_layers < self._num_layers:
                self.memory.clear(window)
                continue
            if len(rows) > most:
                self.memory.break_off(window)
            for row in rows[-most:]:
                self.memory.store(window, path_TP[row])

    def expected_use(self) -> Mapping[int, float]:
        return self.memory.uses()

    def state(self) -> dict[str, np.ndarray]:
        return self.memory.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        own = self.memory.state()
        if odd := sorted(own.keys() ^ state.keys()):
            raise ValueError(f"{odd[0]} is {'missing' if odd[0] in own else 'unknown'}")
        self.memory.restore(state)

    def _batch_fields(self) -> Mapping[int, int]:
        """Return the fields of a table that describe this forward's tokens."""
        k, batch = kernels(), self._batch
        rows, paths = address(batch.row_R3), address(batch.path_TP)
        return {k.REQUESTS: len(batch.row_R3), k.ROWS: len(batch.path_TP), k.ROW_R3: rows, k.PATH_TP: paths, k.SEEN: 0}

    def _looks_ahead(self) -> bool:
        return self.options.prefetch and not self._crowded and self._layer + 1 < self._num_layers

    def _value(self, first: int, last: int) -> None:
        """Compute the values of these layers' experts, and of the next layer's if prefetches may follow."""
        stop = last + 1 + (first == last == self._layer and self._looks_ahead())
        self.memory.value(self._batch, first * self._stride, stop * self._stride, self._value_A)
        self._valued.update(range(first, stop))

    def _is_worth(self, key: int, victim: int) -> bool:
        layer, expert = divmod(victim, self._stride)
        unused = self.memory.unused_E.item(key % self._stride)
        value = float(self._value_A[victim] * self._near_LL[self._layer, layer])
        needed = 1 - self.memory.unused_E.item(expert) if layer == self._layer + 1 else 0.0
        pays = (1 - unused) * (1 - needed)
        return pays > (1 - pays) * self.options.waste + unused * value

    def _is_worth_more(self, key: int, victim: int) -> bool:
        near_L, values = self._near_LL[self._layer], self._values_A
        return bool(values[key] * near_L[key // self._stride] > values[victim] * near_L[victim // self._stride])

    def _rank(self, locked: Collection[int]) -> None:
        """Find the next victims among the residents that are not locked."""
        if self._value_age >= self.options.refresh:
            self.memory.value_all(self._batch, self._value_A)
            self._value_age = 0
        near_L = self._near_LL[self._layer]
        held = list(locked)
        if held:
            self._resident_A[held] = False
        wanted_M = self._ranked_M[: _RANKED if held else self._num_misses + _MORE]
        found = self.memory.least_valued(self._value_A, near_L, self._resident_A, wanted_M)
        if held:
            self._resident_A[held] = True
        self._order = wanted_M[:found].tolist()


def _nearness(spec: ModelSpec) -> np.ndarray:
    """NEARNESS ** (share of a forward until a layer runs next, after each layer): float32 [L, L]."""
    layer_L = np.arange(spec.num_layers)
    ahead_LL = (layer_L - layer_L[:, None] - 1) % spec.num_layers + 1
    return (NEARNESS ** (ahead_LL / spec.num_layers)).astype(np.float32)
