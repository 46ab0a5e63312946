"""Expert residency: which expert occupies which slot, decided alike in `serve` and `replay`.

`Residency` turns each gate event into a *program*: an ordered list of steps over slots (compute this expert, load that
one into the freed slot, prefetch a third). The order is the schedule: an executor that starts loads without waiting,
and waits only before computing, overlaps everything that can overlap. No clock and no arrival of bytes enters, so a
replayed trace and a live model take the same decisions.

Where devices share a model (`moetool.caching.devices`), each has its own `Residency` for its experts.

A slot holds any expert of the model, unless each layer has its own slots (`layer_slots`). A pool in bytes, for replay
only, holds as many experts as their sizes allow; slots are then only numbers.

A `moetool.caching.policy.Policy` decides what to prefetch, in which order to load misses, and what to evict. The events
of some policies are compiled (`moetool.caching.compiled_events`), where they have one pool in slots on one device.
Decisions are the same.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from enum import IntEnum
from functools import partial
from operator import index
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moetool.base.errors import CapacityError, shortened
from moetool.base.plugins import WrongAnswer
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.compiled_events import CompiledEvents, kernels
from moetool.caching.compiled_split import CompiledSplit
from moetool.caching.layer_slots import scaled_down
from moetool.caching.machine_split import MachineSplit
from moetool.caching.policy import MIN_SLOTS, Policy, admits_by_value


class StepKind(IntEnum):
    """Kind of a step of the program."""

    COMPUTE = 0
    LOAD = 1
    PREFETCH = 2
    HOST = 3


class Step(NamedTuple):
    """One step: `key` is computed in, loaded or prefetched into `slot`, and replaces `evicted` (-1: a free slot).

    `HOST` computes `key` in host memory, without a slot (-1) and without a load. Such steps come first, so that an
    executor can overlap them with the others.

    In a pool in bytes one load may evict several experts; `evicted` is then the last of them.
    """

    kind: StepKind
    key: int
    slot: int
    evicted: int = -1


_LOAD, _COMPUTE = StepKind.LOAD, StepKind.COMPUTE  # an attribute of an enum takes 0.1 us
_KINDS = tuple(StepKind)
_step: Callable[[tuple[StepKind, int, int, int]], Step] = partial(tuple.__new__, Step)  # a third of Step()'s time


@dataclass(slots=True)
class Counts:
    """Counts of experts per event (an expert that ten tokens of an event use counts once).

    Attributes:
        kept: needed, and resident without a prefetch since its last use.
        prefetched: needed, and resident because it was loaded ahead (the store decides whether the bytes were in time).
        missed: needed and not resident; loaded on demand.
        hosted: needed and not resident; computed on the host.
        prefetch_loads: loads of experts that the current event did not need: prefetches, and the rest of whole layers.
        wasted: experts loaded ahead and evicted unused.
    """

    kept: int = 0
    prefetched: int = 0
    missed: int = 0
    prefetch_loads: int = 0
    wasted: int = 0
    hosted: int = 0

    @property
    def needed(self) -> int:
        """Return the number of experts that events needed."""
        return self.kept + self.prefetched + self.missed + self.hosted

    @property
    def loads(self) -> int:
        """Return the number of loads, on demand or ahead."""
        return self.missed + self.prefetch_loads

    @property
    def hit_rate(self) -> float:
        """Return the share of needed experts that were resident when their event began (0 for no events)."""
        return (self.kept + self.prefetched) / self.needed if self.needed else 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(**{f.name: getattr(self, f.name) - getattr(other, f.name) for f in fields(self)})

    def to_json(self) -> dict[str, Any]:
        """Return the counts and the numbers derived from them."""
        return {**asdict(self), "loads": self.loads, "hit_rate": self.hit_rate}


class Residency:
    """The slots, the resident experts, and the program of each event.

    Args:
        policy: makes the decisions; its `num_slots` is the size of the pool.
        sink: called with every step, its forward and its layer (-1 before the first), for logs and comparisons.
        capacity_bytes: makes it a pool in bytes; at least `num_slots` of the largest expert.
        layer_slots: slots guaranteed to each layer. A layer may use more as long as no other layer claims its own; then
            layers beyond their guarantee evict. Empty: one pool for all layers. If they add up to the pool, each layer
            has its own pool once all are full.
        share: (g, n): device g of n. It computes and loads only the experts whose key is g modulo n. The policy sees
            the whole event, since its predictions may need the whole route; its requests for other devices' experts are
            ignored. Hits and misses are this device's.
        split: lets the host compute some misses, unless the policy `computes_on_host` itself.
        short: whether so few events follow that Python decides them before code is compiled (once on a machine).

    Attributes:
        compiles: whether events may be compiled; False: Python decides, as an oracle.
        compiled: the slots and residents if events are compiled.
        places: all slot numbers are below this.

    Raises:
        CapacityError: the pool is smaller than the smallest legal one.
    """

    compiles: ClassVar[bool] = True

    def __init__(
        self,
        policy: Policy,
        sink: Callable[[int, int, Step], None] | None = None,
        *,
        capacity_bytes: int | None = None,
        share: tuple[int, int] = (0, 1),
        layer_slots: Sequence[int] = (),
        split: MachineSplit | None = None,
        short: bool = False,
    ) -> None:
        if policy.num_slots < MIN_SLOTS:
            raise CapacityError(
                f"a pool of {policy.num_slots} expert slots is too small: the smallest legal one has {MIN_SLOTS} "
                f"({MIN_SLOTS * policy.spec.slot_bytes:,} bytes for this model)"
            )
        self.policy = policy
        self.num_slots = policy.num_slots
        self._device, self._devices = share
        self._slot_of: dict[int, int] = {}
        self._prefill = Counts()
        self._decode = Counts()
        # Both kinds of pool share this code: an expert takes its layer's size, which is 1 in a pool of slots.
        spec = policy.spec
        self._stride = spec.num_experts
        if layer_slots:
            assert capacity_bytes is None and share == (0, 1) and len(layer_slots) == spec.num_layers
            assert min(layer_slots) >= 1 and sum(layer_slots) <= policy.num_slots
        self._guaranteed = self._layer_slots = tuple(layer_slots)  # with all slots, and without reserved ones
        self._reserved_slots: list[int] = []
        self._resident_L: list[dict[int, None]] = [{} for _ in layer_slots]
        self._beyond: set[int] = set()  # layers with more residents than their guarantee
        if capacity_bytes is None:
            self._capacity, self._size_L = policy.num_slots, (1,) * spec.num_layers
            self.places = policy.num_slots
        else:
            assert capacity_bytes >= policy.num_slots * spec.slot_bytes
            self._capacity, self._size_L = capacity_bytes, spec.expert_bytes_L
            self.places = spec.total_experts
        self._room = self._capacity
        self._free = list(range(self.places - 1, -1, -1))
        self._unused: set[int] = set()  # prefetched and not used since
        self._counts = self._decode
        self.sink = sink
        self._requests: dict[int, None] = {}
        split = None if policy.computes_on_host else split
        self._split: MachineSplit | CompiledSplit | None = split
        if type(split) is MachineSplit and self.compiles and not short and kernels() is not None:
            self._split = CompiledSplit(split)
        plain = capacity_bytes is None and share == (0, 1)
        plain = plain and (split is None or (type(split) is MachineSplit and not admits_by_value(policy.options)))
        self._may_compile = plain and self.compiles and not short
        self.compiled: CompiledEvents | None = None
        self._compile()

    @property
    def slot_of(self) -> Mapping[int, int]:
        """Return the residents and their slots, the longest resident first."""
        return self._slot_of if self.compiled is None else self.compiled.slot_of

    @property
    def num_residents(self) -> int:
        """Return the number of experts in slots."""
        return len(self._slot_of) if self.compiled is None else self.compiled.num_residents

    @property
    def prefill(self) -> Counts:
        """Return the counts over the forwards with prompt tokens."""
        return self._prefill if self.compiled is None else Counts(*self.compiled.counts(Phase.PREFILL))

    @property
    def decode(self) -> Counts:
        """Return the counts over the forwards without."""
        return self._decode if self.compiled is None else Counts(*self.compiled.counts(Phase.DECODE))

    @property
    def residencies(self) -> tuple["Residency"]:
        """This residency alone, as `moetool.caching.devices.DevicePools` has several."""
        return (self,)

    @property
    def residents(self) -> list[int]:
        """Return the keys of the experts in slots, the longest resident first."""
        return list(self.slot_of)

    @property
    def counts(self) -> Counts:
        """Return the counts of prefill and decode together."""
        return self.prefill + self.decode

    def begin_forward(self, info: ForwardInfo) -> list[Step]:
        """Announce a forward and its requests; return prefetches before its first MoE layer."""
        self._counts = self._prefill if info.prefill else self._decode
        for request in dict.fromkeys(info.request_T):
            if request not in self._requests:
                self._requests[request] = None
                self.policy.begin_request(request)
        if self.compiled is not None:
            ahead = self.policy.begin_forward(info)
            assert not ahead, "compiled events begin without prefetches"
            self.compiled.begin_forward(info)
            return []
        steps: list[Step] = []
        self._load_ahead(
            StepKind.PREFETCH, deque(self._own(_ask(self.policy.begin_forward, info))), set(), set(), steps
        )
        return self._emit(info.forward_id, -1, steps)

    def route(self, event: GateEvent) -> Sequence[Sequence[int]] | None:
        """Return the experts that replace the router's choice (`Policy.route`); None keeps it."""
        return None if self.policy.lossless else self.policy.route(event, self._slot_of.__contains__)

    def event(
        self, event: GateEvent, complete: Callable[[GateEvent, Sequence[Step]], GateEvent] | None = None
    ) -> list[Step]:
        """Return the program of one gate event.

        Every needed expert is computed exactly once, while it is in its slot. Nothing that the event still needs is
        evicted before it is computed. An event larger than the pool passes through it in waves.

        Args:
            complete: completes the event for `Policy.after_first_expert`. It is called with the program up to the first
                computed expert. The loads in it may already start: they evict nothing that the event needs.

        Raises:
            ValueError: the policy omitted a miss, or evicted none or one that is still needed. This stops a bug of a
                policy before wrong weights are used.
        """
        if self.compiled is not None:
            assert complete is None, "no policy with compiled events needs a completed event"
            rows = self.compiled.step_S6[: self.compiled.event(event), 2:].tolist()
            compiled = [_step((_KINDS[kind], key, slot, evicted)) for kind, key, slot, evicted in rows]
            return self._emit(event.forward.forward_id, event.layer, compiled)
        base = event.layer * self._stride
        size = self._size_L[event.layer]
        slot_of, policy, counts = self._slot_of, self.policy, self._counts
        hits: list[int] = []
        misses: list[int] = []
        needed: Collection[int] = [base + expert for expert in event.needed]
        for key in needed if self._devices == 1 else self._own(needed):
            (hits if key in slot_of else misses).append(key)
        ahead = self._unused.intersection(hits)
        counts.kept += len(hits) - len(ahead)
        if ahead:
            self._unused -= ahead
            counts.prefetched += len(ahead)

        steps: list[Step] = []
        if policy.computes_on_host and misses:
            hosted = set(_ask(policy.on_host, event, list(misses)))
            if not hosted <= set(misses):
                raise WrongAnswer(
                    f"on_host answered {shortened(repr(sorted(hosted)))}, expected some of the misses "
                    f"{shortened(repr(misses))}",
                    policy.on_host,
                )
            steps += [Step(StepKind.HOST, key, -1) for key in sorted(hosted)]
            misses = [key for key in misses if key not in hosted]
            counts.hosted += len(hosted)
        to_compute = deque(hits)
        answered = self._own(_ask(policy.gate, event, hits, list(misses)))
        admissible: list[int] = []
        split = None if self._split is None or not self._split.active else self._split
        if split is not None:
            worth = dict(zip(misses, policy.worth(misses), strict=True))
            hosted = split.choose(event, to_compute, misses, list(worth.values()))
            admissible = sorted(sorted(hosted), key=worth.__getitem__, reverse=True)
            steps += [Step(StepKind.HOST, key, -1) for key in sorted(hosted)]
            answered = [key for key in answered if key not in hosted]
            misses = [key for key in misses if key not in hosted]
            counts.hosted += len(hosted)
        counts.missed += len(misses)
        to_load, extra_loads = deque(answered), deque[int]()
        if answered != misses:
            if len(to_load) != len(misses):
                missing = set(misses)
                extra_loads = deque(key for key in to_load if key not in missing)
                to_load = deque(key for key in to_load if key in missing)
            if sorted(to_load) != misses:
                raise WrongAnswer(
                    f"gate answered {shortened(repr(answered))}, expected all of the misses {shortened(repr(misses))}",
                    policy.gate,
                )
        locked = set(hits)
        prefetches: deque[int] | None = None
        wanted: set[int] = set()
        while to_load or to_compute:
            among: list[int] | None = None
            among_others = False
            while to_load and not (policy.in_order and to_compute):
                if self._layer_slots and self._room < size and (among is None or among_others):
                    among, among_others = self._candidates(locked, event.layer), bool(self._beyond)
                if not among if among is not None else (len(locked) + 1) * size > self._capacity:
                    break  # full of experts that are still to be computed
                key = to_load.popleft()
                evicted = -1
                while self._room < size:
                    evicted = policy.evict(locked) if among is None else policy.evict_among(among, slot_of.keys())
                    self._give_up(evicted, locked)
                    if among is not None:
                        among.remove(evicted)  # the other candidates stay: the loaded expert is locked
                slot = self._place(key, size, prefetched=False)
                steps.append(_step((_LOAD, key, slot, evicted)))
                locked.add(key)
                to_compute.append(key)
            if extra_loads and not to_load:
                self._load_ahead(StepKind.LOAD, extra_loads, locked, wanted, steps)
            key = to_compute.popleft()
            steps.append(_step((_COMPUTE, key, slot_of[key], -1)))
            locked.discard(key)
            if prefetches is None:
                prefetches = deque(
                    self._own(_ask(policy.after_first_expert, complete(event, steps) if complete else event))
                )
            if prefetches and not to_load and not (extra_loads and to_compute):
                self._load_ahead(StepKind.PREFETCH, prefetches, locked, wanted, steps)
        if prefetches is None:  # every expert is on the host or on another device
            prefetches = deque(
                self._own(_ask(policy.after_first_expert, complete(event, steps) if complete else event))
            )
            self._load_ahead(StepKind.PREFETCH, prefetches, locked, wanted, steps)
        for key in _ask(policy.after_last_expert, event):
            self._give_up(key, ())
        if split is not None:
            split.note(steps)
            for key in admissible:
                if not split.admits(free=self._room >= size):
                    break
                before = len(steps)
                self._load_ahead(StepKind.PREFETCH, deque((key,)), locked, wanted, steps, admits=True)
                split.note(steps[before:])
        return self._emit(event.forward.forward_id, event.layer, steps)

    def slot(self, key: int) -> int | None:
        """Return the slot of a resident expert; None if it is not resident."""
        return self._slot_of.get(key) if self.compiled is None else self.compiled.slot(key)

    def load_into_free_slot(self, key: int) -> Step | None:
        """Put an expert into a free slot outside of any event; return the load to start.

        None if it is resident or if no slot is free: an event then loads it when needed. Counts, sink and
        replays ignore it.
        """
        size = self._size_L[key // self._stride]
        if self.compiled is not None:
            if self.compiled.slot(key) is not None or self.compiled.room < 1:
                return None
            return Step(StepKind.LOAD, key, self.compiled.place(key, prefetched=False))
        if key in self._slot_of or self._room < size or not self._own([key]):
            return None
        return Step(StepKind.LOAD, key, self._place(key, size, prefetched=False))

    def forget(self, key: int) -> None:
        """Evict an expert outside of any event, if it is resident."""
        if self.compiled is not None:
            if self.compiled.slot(key) is not None:
                self.compiled.give_up(key)
        elif key in self._slot_of:
            self._give_up(key, ())

    def change(self, policy: Policy, layer_slots: Sequence[int] = ()) -> None:
        """Replace the policy between two forwards; residents and counts stay.

        The new policy learns of a running request at its next forward.
        """
        assert policy.num_slots == self.policy.num_slots and len(layer_slots) in (0, policy.spec.num_layers)
        scaled = scaled_down(policy.spec, layer_slots, self._capacity) if layer_slots else ()  # may refuse
        self._leave_compiled()
        self.policy, self._guaranteed, self._layer_slots = policy, tuple(layer_slots), scaled
        self._requests.clear()
        self._resident_L = [{} for _ in layer_slots]
        for key in self.residents:
            if layer_slots:
                self._resident_L[key // self._stride][key] = None
            policy.admit(key, key in self._unused)
        self._find_beyond()
        self._compile()

    def _compile(self) -> None:
        """Let compiled code decide from now on, if it can."""
        split = self._split if isinstance(self._split, CompiledSplit) else None
        if not (self._may_compile and self.policy.compiles) or kernels() is None:
            if split is not None:
                split.compile()
            return
        counts = [list(astuple(counts)) for counts in (self._prefill, self._decode)]
        self.compiled = CompiledEvents(
            self.policy,
            capacity=self._capacity,
            layer_slots=self._layer_slots,
            slot_of=self._slot_of,
            free=self._free,
            unused=self._unused,
            counts_26=np.array(counts, np.int64),
            split=split,
        )

    def _leave_compiled(self) -> None:
        """Take over from compiled code."""
        if (compiled := self.compiled) is None:
            return
        self._prefill, self._decode = self.prefill, self.decode
        self._slot_of, self._free, self._unused = compiled.slot_of, compiled.free, compiled.unused
        self._room = compiled.room
        self._counts = self._decode
        self.compiled = None

    def _find_beyond(self) -> None:
        self._beyond = {layer for layer, slots in enumerate(self._layer_slots) if len(self._resident_L[layer]) > slots}

    @property
    def reserved_slots(self) -> int:
        return len(self._reserved_slots)

    def reserve_slots(self, count: int) -> list[int]:
        """Take slots out of the pool from the next forward on for their memory, but keep the smallest legal pool.

        Called between two forwards, for one pool in slots. The policy chooses the evicted experts. Slots that are no
        longer reserved come back empty. The sink is not called.

        Args:
            count: number of reserved slots in all.

        Returns:
            The newly reserved slots, whose memory is free.
        """
        assert self._devices == 1 and set(self._size_L) == {1}
        change = max(0, min(count, self.num_slots - max(MIN_SLOTS, len(self._guaranteed)))) - self.reserved_slots
        self._capacity -= change
        if self._guaranteed:
            self._layer_slots = scaled_down(self.policy.spec, self._guaranteed, self._capacity)
        if self.compiled is not None:
            return self._reserve_compiled(change)
        self._room -= change
        if self._guaranteed:
            self._find_beyond()
        while self._room < 0:
            among = [key for layer in sorted(self._beyond) for key in self._resident_L[layer]]
            policy, residents = self.policy, self._slot_of.keys()
            self._give_up(policy.evict_among(among, residents) if self._guaranteed else policy.evict(()), ())
        for _ in range(-change):
            self._free.append(self._reserved_slots.pop())
        newly = [self._free.pop() for _ in range(change)]
        self._reserved_slots += newly
        return newly

    def _reserve_compiled(self, change: int) -> list[int]:
        compiled = self.compiled
        assert compiled is not None
        compiled.set_capacity(self._capacity, self._layer_slots)
        while compiled.room < 0:
            compiled.give_up()
        if change < 0:
            compiled.return_slots([self._reserved_slots.pop() for _ in range(-change)])
        newly = compiled.take_slots(max(change, 0))
        self._reserved_slots += newly
        return newly

    def end_forward(self, info: ForwardInfo) -> None:
        self.policy.end_forward(info)

    def end_request(self, request: int) -> None:
        """Note the end of a request. Unknown ones are ignored: a request can end before its first forward."""
        if request in self._requests:
            del self._requests[request]
            self.policy.end_request(request)

    def _own(self, keys: Collection[int]) -> Collection[int]:
        """Return the keys that belong to this device."""
        return keys if self._devices == 1 else [key for key in keys if key % self._devices == self._device]

    def _load_ahead(
        self,
        kind: StepKind,
        keys: deque[int],
        locked: set[int],
        wanted: set[int],
        steps: list[Step],
        *,
        admits: bool = False,
    ) -> None:
        """Prefetch as many of `keys` as slots permit; `locked` and `wanted` experts stay.

        Args:
            admits: whether the host has just computed them.
        """
        policy = self.policy
        evict = policy.evict_for_admission if admits else policy.evict_for_prefetch
        evict_among = policy.evict_among_for_admission if admits else policy.evict_among_for_prefetch
        kept = locked | wanted
        while keys:
            key = keys[0]
            if key in self._slot_of:
                keys.popleft()
                wanted.add(key)
                kept.add(key)
                continue
            size = self._size_L[key // self._stride]
            evicted: int | None = -1
            if self._layer_slots and self._room < size:
                candidates = self._candidates(kept, key // self._stride)
                if not candidates:
                    return  # until another expert of the event is computed
                evicted = evict_among(key, candidates, self._slot_of.keys())
                if evicted is not None:
                    self._give_up(evicted, kept)
            while self._room < size and evicted is not None:
                if len(kept) >= len(self._slot_of):
                    return  # until another expert of the event is computed
                # In a pool in bytes, the first eviction for a prefetch justifies further ones.
                evicted = evict(key, kept) if evicted == -1 else policy.evict(kept)
                if evicted is not None:
                    self._give_up(evicted, kept)
            keys.popleft()
            if evicted is None:
                continue
            wanted.add(key)
            kept.add(key)
            slot = self._place(key, size, prefetched=True)
            steps.append(Step(kind, key, slot, evicted))
            self._unused.add(key)
            self._counts.prefetch_loads += 1

    def _candidates(self, locked: Collection[int], layer: int) -> list[int]:
        """Return residents that `layer` may evict: of layers beyond their guarantee, and its own if it is full."""
        own = self._resident_L[layer]
        full = len(own) >= self._layer_slots[layer]
        if not self._beyond:
            return [key for key in own if key not in locked] if full else []
        others = sorted(self._beyond | {layer}) if full else sorted(self._beyond)
        return [key for other in others for key in self._resident_L[other] if key not in locked]

    def _place(self, key: int, size: int, prefetched: bool) -> int:
        self._room -= size
        slot = self._free.pop()  # the slot of the last evicted expert, if any
        self._slot_of[key] = slot
        if self._layer_slots:
            layer = key // self._stride
            residents = self._resident_L[layer]
            residents[key] = None
            if len(residents) > self._layer_slots[layer]:
                self._beyond.add(layer)
        self.policy.admit(key, prefetched)
        return slot

    def _give_up(self, key: int, locked: Collection[int]) -> None:
        try:
            slot = None if key in locked else self._slot_of.pop(key, None)
        except TypeError:  # unhashable
            slot = None
        if slot is None:
            raise WrongAnswer(
                f"evict answered {shortened(repr(key))}, expected a resident expert that this event does not need",
                self.policy.evict,
            )
        self._free.append(slot)
        if self._layer_slots:
            layer = key // self._stride
            residents = self._resident_L[layer]
            del residents[key]
            if len(residents) <= self._layer_slots[layer]:
                self._beyond.discard(layer)
        self._room += self._size_L[key // self._stride]
        if key in self._unused:
            self._unused.discard(key)
            self._counts.wasted += 1
        self.policy.removed(key)

    def _emit(self, forward: int, layer: int, steps: list[Step]) -> list[Step]:
        if self.sink is not None:
            for step in steps:
                self.sink(forward, layer, step)
        return steps


def _ask(hook: Callable[..., Collection[int]], *arguments: Any) -> list[int]:
    """Return the experts that a policy's hook answers. Raises: WrongAnswer: they are no integers."""
    answer = hook(*arguments)
    try:
        return list(map(index, answer))
    except TypeError:
        message = f"{hook.__name__} answered {shortened(repr(answer))}, expected the keys of experts, integers"
        raise WrongAnswer(message, hook) from None
