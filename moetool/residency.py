"""Which expert is in which slot: the one place where that is decided, for `serve` and `replay` alike.

`Residency` turns each gate event into a *program*: an ordered list of steps over slots (compute this expert,
load that one into the slot it frees, prefetch a third). The order is the schedule: an executor that starts
loads without waiting and waits only before computing overlaps all that may overlap. Nothing here knows a clock
or a byte's arrival, so a replayed trace and a live model take the same decisions.

A `Policy` says what to prefetch, in which order to load misses and whom to evict. It gets Python integers:
an expert is one key, `ModelSpec.expert_key(layer, expert)`.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from moetool.errors import CapacityError
from moetool.types import ForwardInfo, GateEvent, ModelSpec

MIN_SLOTS = 2
"""The smallest legal pool: one expert being computed and one in flight."""


class StepKind(IntEnum):
    """What a step of the program does."""

    COMPUTE = 0
    LOAD = 1
    PREFETCH = 2


class Step(NamedTuple):
    """One step: `key` is computed in, loaded or prefetched into `slot`, in place of `evicted` (-1: a free slot)."""

    kind: StepKind
    key: int
    slot: int
    evicted: int = -1


@dataclass(slots=True)
class Counts:
    """What happened, counted in experts of events (an expert that ten tokens of an event use counts once).

    Attributes:
        kept: needed, and resident with no prefetch since the last use.
        prefetched: needed, and resident because of a prefetch (whether the bytes were there in time is the
            store's to say).
        missed: needed and not resident; loaded on demand.
        prefetch_loads: loads that a prefetch caused.
        wasted: prefetched experts that were evicted unused.
    """

    kept: int = 0
    prefetched: int = 0
    missed: int = 0
    prefetch_loads: int = 0
    wasted: int = 0

    @property
    def needed(self) -> int:
        """Experts that events needed."""
        return self.kept + self.prefetched + self.missed

    @property
    def loads(self) -> int:
        """Experts read, on demand or ahead."""
        return self.missed + self.prefetch_loads

    @property
    def hit_rate(self) -> float:
        """Share of needed experts that were resident when the event began (0 for no events)."""
        return (self.kept + self.prefetched) / self.needed if self.needed else 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def to_json(self) -> dict[str, Any]:
        """The counts and what follows from them."""
        return {**asdict(self), "loads": self.loads, "hit_rate": self.hit_rate}


class Policy:
    """What a cache policy answers; the defaults load on demand and prefetch nothing.

    A policy file defines a frozen dataclass `Options` and a subclass `Policy` of this class. It keeps whatever
    order it needs over the residents by `admit` and `removed`, does no I/O and reads no clock.

    Class attributes:
        needs: trace columns without which it cannot decide (`experts`, `logits`, `embeddings`, `hidden`).
        needs_predictor: whether it cannot work without a trained predictor.
        needs_future: whether it must know the coming events (replay only); `foresee` then gets them first.
        in_order: load and compute one expert after the other, residents first, with no overlap.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"experts"})
    needs_predictor: ClassVar[bool] = False
    needs_future: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        self.spec = spec
        self.options = options
        self.num_slots = num_slots
        self.predictor = predictor

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        """How many of the `num_slots` that fit the policy makes use of (all of them by default)."""
        return num_slots

    def foresee(self, events: Sequence[Sequence[int]]) -> None:
        """The keys that each coming event needs, in order; only called where `needs_future` is true."""

    def begin_request(self, request: int) -> None:
        """A request appears for the first time."""

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        """A forward begins; answers what to prefetch before its first MoE layer, most wanted first."""
        return ()

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        """The router has chosen; answers the misses in the order in which to load them."""
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        """The event's first expert is computed; answers what to prefetch, most wanted first.

        A prefetch is placed only when every miss of the event has its slot.
        """
        return ()

    def admit(self, key: int, prefetched: bool) -> None:
        """A slot was given to `key`."""

    def removed(self, key: int) -> None:
        """`key` lost its slot."""

    def evict(self, locked: Collection[int]) -> int:
        """The resident to give up for a demand load; never one of `locked`."""
        raise NotImplementedError

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        """The resident to give up for prefetching `key`, or None if `key` is worth none of them."""
        return self.evict(locked)

    def end_forward(self, info: ForwardInfo) -> None:
        """The forward is complete."""

    def end_request(self, request: int) -> None:
        """A request is over, finished or cancelled."""


class Residency:
    """The slots, who is in them, and the program of each event.

    Args:
        policy: decides; its `num_slots` is the size of the pool.
        sink: is given every step with its forward and layer (-1 before the first), for logs and comparisons.

    Raises:
        CapacityError: the pool is smaller than the smallest legal one.
    """

    def __init__(self, policy: Policy, sink: Callable[[int, int, Step], None] | None = None) -> None:
        if policy.num_slots < MIN_SLOTS:
            raise CapacityError(
                f"a pool of {policy.num_slots} expert slots is too small: the smallest legal one has {MIN_SLOTS} "
                f"({MIN_SLOTS * policy.spec.slot_bytes:,} bytes for this model); raise --device-memory"
            )
        self.policy = policy
        self.num_slots = policy.num_slots
        self.slot_of: dict[int, int] = {}
        self.prefill = Counts()
        self.decode = Counts()
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._unused: set[int] = set()  # prefetched and not used since
        self._counts = self.decode
        self._sink = sink
        self._requests: dict[int, None] = {}

    @property
    def counts(self) -> Counts:
        """Prefill and decode together."""
        return self.prefill + self.decode

    def begin_forward(self, info: ForwardInfo) -> list[Step]:
        """Announce a forward and its requests; gives the prefetches to start before its first MoE layer."""
        self._counts = self.prefill if info.prefill else self.decode
        for request in dict.fromkeys(info.request_T):
            if request not in self._requests:
                self._requests[request] = None
                self.policy.begin_request(request)
        steps: list[Step] = []
        self._prefetch(deque(self.policy.begin_forward(info)), set(), set(), steps)
        return self._emit(info.forward_id, -1, steps)

    def event(self, event: GateEvent) -> list[Step]:
        """The program of one gate event.

        Every needed expert is computed exactly once, while it is in its slot; nothing that the event still
        needs is evicted before it is computed; an event larger than the pool goes through it in waves.
        """
        base = event.layer * self.policy.spec.num_experts
        slot_of, policy, counts = self.slot_of, self.policy, self._counts
        hits: list[int] = []
        misses: list[int] = []
        for expert in event.needed:
            (hits if base + expert in slot_of else misses).append(base + expert)
        for key in hits:
            if key in self._unused:
                self._unused.discard(key)
                counts.prefetched += 1
            else:
                counts.kept += 1
        counts.missed += len(misses)

        steps: list[Step] = []
        to_load = deque(policy.gate(event, hits, misses))
        to_compute = deque(hits)
        locked = set(hits)
        prefetches: deque[int] | None = None
        wanted: set[int] = set()
        while to_load or to_compute:
            while to_load and not (policy.in_order and to_compute):
                if not self._free and len(slot_of) == len(locked):
                    break  # the pool is full of experts that wait to be computed
                key = to_load.popleft()
                evicted = -1 if self._free else policy.evict(locked)
                steps.append(Step(StepKind.LOAD, key, self._place(key, evicted, prefetched=False), evicted))
                locked.add(key)
                to_compute.append(key)
            key = to_compute.popleft()
            steps.append(Step(StepKind.COMPUTE, key, slot_of[key]))
            locked.discard(key)
            if prefetches is None:
                prefetches = deque(policy.after_first_expert(event))
            if not to_load:
                self._prefetch(prefetches, locked, wanted, steps)
        return self._emit(event.forward.forward_id, event.layer, steps)

    def end_forward(self, info: ForwardInfo) -> None:
        """The forward is complete."""
        self.policy.end_forward(info)

    def end_request(self, request: int) -> None:
        """A request is over. Unknown ones are ignored: a request can end before its first forward."""
        if request in self._requests:
            del self._requests[request]
            self.policy.end_request(request)

    def _prefetch(self, keys: deque[int], locked: set[int], wanted: set[int], steps: list[Step]) -> None:
        """Place as many of `keys` as slots can be had for; `locked` experts and those `wanted` before stay."""
        while keys:
            key = keys[0]
            evicted: int | None = -1
            if key not in self.slot_of and not self._free:
                kept = locked | wanted
                if len(kept) == len(self.slot_of):
                    return  # until another expert of the event is computed
                evicted = self.policy.evict_for_prefetch(key, kept)
            keys.popleft()
            if evicted is None:
                continue
            wanted.add(key)
            if key not in self.slot_of:
                steps.append(Step(StepKind.PREFETCH, key, self._place(key, evicted, prefetched=True), evicted))
                self._unused.add(key)
                self._counts.prefetch_loads += 1

    def _place(self, key: int, evicted: int, prefetched: bool) -> int:
        if evicted < 0:
            slot = self._free.pop()
        else:
            slot = self.slot_of.pop(evicted)
            if evicted in self._unused:
                self._unused.discard(evicted)
                self._counts.wasted += 1
            self.policy.removed(evicted)
        self.slot_of[key] = slot
        self.policy.admit(key, prefetched)
        return slot

    def _emit(self, forward: int, layer: int, steps: list[Step]) -> list[Step]:
        if self._sink is not None:
            for step in steps:
                self._sink(forward, layer, step)
        return steps
