"""A pool whose events are compiled (`moetool.caching.event_kernels`): its arrays, and what Python needs of them.

`moetool.caching.residency` decides the same in Python, for every policy and pool, and is the oracle.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.compiled_split import CompiledSplit
from moetool.prediction.token_memory import pack_ints

if TYPE_CHECKING:
    from moetool.caching.policy import Policy


@cache
def kernels() -> Any:
    """Return `moetool.caching.event_kernels`, or None if numba is missing, fails or has no folder for its results."""
    try:
        from moetool.caching import event_kernels  # numba takes half a second to import
    except Exception:  # numba raises errors of many types
        return None
    return event_kernels


class CompiledEvents:
    """One pool in slots, on one device.

    Args:
        policy: fills its part of the table (`Policy.compile_into`).
        capacity: slots without reserved ones.
        layer_slots: as for `Residency`.
        slot_of: residents and their slots, the longest resident first.
        free: free slots, the next one last; reserved slots are not among them.
        unused: residents that were prefetched and not used since.
        counts_26: counts so far (`Counts`) of prefill and decode.
        split: lets the host compute some misses.

    Attributes:
        table, memory: sizes, state and addresses, for compiled code.
        step_S6: steps of the last event or forward: forward, layer, kind, key, slot, evicted.
        counts_26: counts by phase.
    """

    def __init__(
        self,
        policy: "Policy",
        *,
        capacity: int,
        layer_slots: Sequence[int],
        slot_of: Mapping[int, int],
        free: Sequence[int],
        unused: Collection[int],
        counts_26: np.ndarray,
        split: CompiledSplit | None = None,
    ) -> None:
        self._kernels = k = kernels()
        self._split, self._split_table = split, None if split is None else split.table
        k.compile_for(policy.compiled_memory, self._split_table)
        spec = policy.spec
        layers, self._stride = spec.num_layers, spec.num_experts
        num = layers * self._stride
        self.table = np.zeros(k.TABLE_SIZE, np.int64)
        self._fields = self.table.data  # reading and writing one number is faster than in an array
        self.step_S6 = np.zeros((3 * num, 6), np.int64)
        self.counts_26 = counts_26.copy()
        self._slot_A, self._admitted_A = np.full(num, -1, np.int32), np.zeros(num, np.int64)
        self._unused_A = np.zeros(num, bool)
        self._free_P = np.zeros(policy.num_slots, np.int32)
        self._own_L, self._held_L = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
        link_2A = np.full((2, num + 1), num, np.int32)
        self.memory = policy.compiled_memory
        self._arrays: dict[int, np.ndarray] = {}
        self._set(
            {
                k.LAYERS: layers,
                k.EXPERTS: self._stride,
                k.SLOT_A: self._slot_A,
                k.ADMITTED_A: self._admitted_A,
                k.UNUSED_A: self._unused_A,
                k.RESIDENT_A: np.zeros(num, bool),
                k.HELD_A: np.zeros(num, np.uint8),
                k.NEEDED_E: np.zeros((4, self._stride), np.int32),
                k.WORTH_E: np.zeros(self._stride, np.float32),
                k.FREE_P: self._free_P,
                k.STEP_S6: self.step_S6,
                k.COUNT_26: self.counts_26,
                k.COLUMN_L: np.array([0, *accumulate(spec.top_k_L)], np.int64),
                k.OWN_L: self._own_L,
                k.HELD_L: self._held_L,
                k.USED_A: np.zeros(num, np.int64),
                k.USES_A: np.zeros(num, np.int64),
                k.NEXT_A: link_2A[0],
                k.LAST_A: link_2A[1],
                k.PHASE: Phase.DECODE,
                **policy.compile_into(self._fields),
            }
        )
        self._routes = self._bytes = memoryview(b"")
        self._add_free([*free, *reversed(list(slot_of.values()))])  # so that each resident gets its own
        self.set_capacity(capacity, layer_slots)
        for key in slot_of:
            self.place(key, prefetched=key in unused)

    @property
    def slot_of(self) -> dict[int, int]:
        """Return the residents and their slots, the longest resident first."""
        keys = np.flatnonzero(self._slot_A >= 0)
        keys = keys[np.argsort(self._admitted_A[keys])]
        return dict(zip(keys.tolist(), self._slot_A[keys].tolist(), strict=True))

    @property
    def free(self) -> list[int]:
        """Return the free slots, the next one last."""
        return self._free_P[: self._fields[self._kernels.FREE]].tolist()

    @property
    def unused(self) -> set[int]:
        """Return the residents that were prefetched and not used since."""
        return set(np.flatnonzero(self._unused_A).tolist())

    @property
    def num_residents(self) -> int:
        return self._fields[self._kernels.RESIDENTS]

    @property
    def room(self) -> int:
        """Return the free slots; negative while more slots are reserved than are free."""
        return self._fields[self._kernels.ROOM]

    def slot(self, key: int) -> int | None:
        """Return the slot of a resident expert; None if it is not resident."""
        slot = self._slot_A.item(key)
        return None if slot < 0 else slot

    def counts(self, phase: Phase) -> list[int]:
        """Return the counts of a phase, in the order of `Counts`."""
        return self.counts_26[phase].tolist()

    def begin_forward(self, info: ForwardInfo) -> None:
        """Begin a forward, after the policy has."""
        k = self._kernels
        self._fields[k.FORWARD] = info.forward_id
        self._fields[k.PHASE] = Phase.PREFILL if info.prefill else Phase.DECODE
        self._fields[k.TOKENS] = len(info.request_T)

    def event(self, event: GateEvent) -> int:
        """Run an event; return the number of its steps."""
        k, fields, experts_TK = self._kernels, self._fields, event.experts_TK
        width, num = len(experts_TK[0]), len(experts_TK)
        assert event.needed[0] >= 0 and event.needed[-1] < self._stride, "compiled code checks no bounds"
        if num == 1:
            if width > len(self._routes):
                self._set_routes(np.zeros((1, width), np.int32))
            pack_ints(width)(self._bytes, 0, *experts_TK[0])
        else:
            self._set_routes(np.array(experts_TK, np.int32))
        assert self.memory is None or num == fields[k.ROWS], "an event has the tokens of its forward"
        if self._split is not None:
            fields[k.SPLIT] = self._split.begin_event()
        fields[k.TOKENS], fields[k.WIDTH], fields[k.STRIDE] = num, width, width
        fields[k.LAYER], fields[k.STOP] = event.layer, event.layer + 1
        return k.run(self.table, self.memory, self._split_table)

    def forward(self, experts_TS: np.ndarray) -> np.ndarray:
        """Run the events of all layers; return their steps, valid until the next call.

        Args:
            experts_TS: experts of each token, layer by layer, in bounds.
        """
        k, fields = self._kernels, self._fields
        self._set_routes(experts_TS)
        assert self.memory is None or len(experts_TS) == fields[k.ROWS], "a forward has its own tokens"
        if self._split is not None:
            fields[k.SPLIT] = self._split.begin_event()
        fields[k.TOKENS], fields[k.STRIDE] = experts_TS.shape
        fields[k.WIDTH] = fields[k.STRIDE]  # read if there is one layer
        fields[k.LAYER], fields[k.STOP] = 0, fields[k.LAYERS]
        return self.step_S6[: k.run(self.table, self.memory, self._split_table)]

    def place(self, key: int, prefetched: bool) -> int:
        """Give an expert a free slot, outside of any event."""
        return self._kernels.place(self.table, self.memory, key, prefetched)

    def give_up(self, key: int | None = None) -> None:
        """Evict an expert outside of any event; None: the policy's choice."""
        self._kernels.give_up(self.table, self.memory, -1 if key is None else key)

    def set_capacity(self, capacity: int, layer_slots: Sequence[int]) -> None:
        """Set the slots without reserved ones, and those of each layer."""
        k, fields = self._kernels, self._fields
        fields[k.CAPACITY], fields[k.ROOM] = capacity, capacity - fields[k.RESIDENTS]
        self._own_L[:] = layer_slots or 0
        fields[k.BY_LAYER] = bool(layer_slots)
        fields[k.BEYOND] = int((self._held_L > self._own_L).sum())

    def take_slots(self, count: int) -> list[int]:
        """Take free slots out of the pool."""
        slots = [self.free[-1 - at] for at in range(count)]
        self._fields[self._kernels.FREE] -= count
        return slots

    def return_slots(self, slots: Sequence[int]) -> None:
        """Return reserved slots to the pool, the next one last."""
        self._add_free(slots)

    def _add_free(self, slots: Sequence[int]) -> None:
        free = self._fields[self._kernels.FREE]
        self._free_P[free : free + len(slots)] = slots
        self._fields[self._kernels.FREE] = free + len(slots)

    def _set_routes(self, experts_TK: np.ndarray) -> None:
        routes = np.ascontiguousarray(experts_TK, np.int32)
        self._routes = routes.data.cast("B").cast("i")
        self._bytes = routes.data.cast("B")
        self._set({self._kernels.ROUTES: routes})

    def _set(self, fields: Mapping[int, int | np.ndarray]) -> None:
        """Write numbers, and addresses of arrays, which stay alive, into the table."""
        for at, value in fields.items():
            if isinstance(value, np.ndarray):
                self._arrays[at] = value
                self._fields[at] = address(value)
            else:
                self._fields[at] = value


def address(array: np.ndarray) -> int:
    """Return the address of an array's first number."""
    return array.__array_interface__["data"][0]  # a fifth of the time of `ctypes`
