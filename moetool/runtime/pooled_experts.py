"""Computing the experts of a layer by one product over the pool (`moetool.runtime.slot_products`), for a GPU.

The routes of an event become slots by a table on the device, and come to the host once a layer, so that the residency
can decide. While every expert of the model lies in its slot, even that can wait: the products are asked for at once,
and the residency hears of all layers' events when the forward has ended, in their order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moetool.caching._residency import Residency, Step, StepKind
from moetool.models.expert_form import ExpertForm
from moetool.models.loading import LoadedModel
from moetool.models.packed_parts import PackedPart, packed_parts
from moetool.models.slot_unpacking import SlotUnpacking
from moetool.models.spec import MoeLayer
from moetool.runtime.copies import sent
from moetool.runtime.expert_store import ExpertStore
from moetool.runtime.host_compute import HostCompute
from moetool.runtime.slot_backends import find_multiply, find_multiply_packed
from moetool.runtime.slot_products import FEW_ROWS, SlotRows

Parts = tuple[torch.Tensor | PackedPart, ...]
"""The parts of a layer's experts in all slots."""


class _Input(NamedTuple):
    """Input rows, of which choice r has row r // `each`, and the choices."""

    x: torch.Tensor
    each: int
    rows: SlotRows


class PooledExperts:
    """The experts of a model in the slots of one device.

    Args:
        loaded: the model; packed weights are unpacked to its data type.
        residency: decides about the slots.
        store: has them.
        host: computes what the residency leaves in host memory.

    Attributes:
        complete: whether every expert of the model lies in its slot, so that `compute_all` may be called.

    Effects: allocates the table and, where experts are packed, room to unpack some.
    """

    def __init__(self, loaded: LoadedModel, residency: Residency, store: ExpertStore, host: HostCompute) -> None:
        self._residency = residency
        self._store = store
        self._host = host
        self._device = store.copies.device
        self._forms = [layer.form for layer in loaded.layers]
        self._num_experts = max(form.num_experts for form in self._forms)
        self._slots_LE = [[-1] * self._num_experts for _ in self._forms]  # what the table holds
        shape, pinned = (len(self._forms), self._num_experts), self._device.type == "cuda"
        self._staged_LE = torch.full(shape, -1, dtype=torch.int32, pin_memory=pinned)  # is copied to the table
        self._table_LE = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        self._multiply = find_multiply(self._device.type)
        self._parts_L = [store.stacked(layer.index) for layer in loaded.layers]
        self._packed_L: list[Parts | None] = [None] * len(loaded.layers)
        self._unpacking: SlotUnpacking | None = None
        if any(parts is None for parts in self._parts_L):
            assert loaded.files is not None
            self._unpacking = SlotUnpacking(loaded.files, store.slots, loaded.model.dtype)
            self._multiply_packed = find_multiply_packed(self._device.type)
            if self._multiply_packed is not None:
                forms = enumerate(self._forms)
                self._packed_L = [packed_parts(loaded.files, layer, form, store.slots) for layer, form in forms]
        self._most_chosen = max(layer.top_k for layer in loaded.layers)
        self.complete = False
        self._checked = False  # whether the table says where every expert is

    def begin_forward(self, num_tokens: int) -> None:
        """Find out whether every expert is in its slot, and can be computed where it is."""
        spec, slot_of = self._residency.policy.spec, self._residency.slot_of
        few = num_tokens * self._most_chosen <= FEW_ROWS
        suffices = all(parts or (few and packed) for parts, packed in zip(self._parts_L, self._packed_L, strict=True))
        self.complete = suffices and len(slot_of) == spec.total_experts
        if not self.complete or self._checked:
            return
        self.complete = self._checked = all(self._store.holds(key, slot) for key, slot in slot_of.items())
        if self.complete:
            for layer, form in enumerate(self._forms):
                self._place(layer, {e: slot_of[spec.expert_key(layer, e)] for e in range(form.num_experts)})

    def moved(self) -> None:
        """An expert has been given another slot."""
        self._checked = False

    def compute_all(self, layer: MoeLayer, x: torch.Tensor, each: int, index_TK: torch.Tensor) -> torch.Tensor:
        """The outputs [T * K, D] of the choices before their weights, by experts that are where the table says.

        Only where `table_suffices`.

        Args:
            x: input rows; choice r is of row r // `each`.
        """
        given = _Input(x, each, SlotRows.of(index_TK, layer.form.num_experts))
        parts = self._parts(layer, given.rows)
        assert parts is not None
        return _finished(layer.form, self._run(layer.form, given, self._table_LE[layer.index], parts, None), given)

    def computed_all(self) -> None:
        """No slot may be filled before all that was asked for so far is computed."""
        self._store.computed_together(range(self._store.num_slots))

    def table_suffices(self, layer: MoeLayer, num_rows: int) -> bool:
        """Whether products of so many choices of a layer need the table only, and nothing is unpacked first."""
        return bool(self._parts_L[layer.index] or (num_rows <= FEW_ROWS and self._packed_L[layer.index]))

    def settle(self, layer: MoeLayer, steps: Sequence[Step]) -> Sequence[Step] | None:
        """Bring all experts of an event into slots and update the table, before later work on the device.

        To be followed by the products and `settled`.

        Returns:
            The steps that must wait for the products; None, with nothing done, where the event takes several waves or
            the host.

        Raises:
            MoetoolError: an expert could not be read.
        """
        slots: dict[int, int] = {}
        first_later = len(steps)
        for place, step in enumerate(steps):
            if step.kind is StepKind.HOST or (step.kind is StepKind.COMPUTE and first_later < len(steps)):
                return None
            if step.kind is StepKind.COMPUTE:
                slots[step.slot] = step.key
            elif step.slot in slots:
                first_later = min(first_later, place)
        beside = self._start(steps[:first_later], slots)
        base, num_experts = self._residency.policy.spec.expert_key(layer.index, 0), layer.form.num_experts
        slot_of = {
            key - base: slot for slot, key in slots.items() if key - base < num_experts
        }  # others have no weights
        for slot, key in [*((slot, base + expert) for expert, slot in slot_of.items()), *beside.items()]:
            self._store.ready(key, slot)
        self._place(layer.index, slot_of)
        return steps[first_later:]

    def settled(self, steps: Sequence[Step], later: Sequence[Step]) -> None:
        """Carry out the steps that `settle` left, once the products of the event are queued."""
        self._store.computed_together(step.slot for step in steps if step.kind is StepKind.COMPUTE)
        for slot, key in self._start(later, {}).items():
            self._store.ready(key, slot)

    def _start(self, steps: Sequence[Step], needed: dict[int, int]) -> dict[int, int]:
        """Begin loads and prefetches; gives the slots of those on demand that are not among `needed`, with their keys.

        Loads with nothing between them are one batch of copies.
        """
        beside: dict[int, int] = {}
        missed: list[tuple[int, int]] = []
        for step in steps:
            if step.kind is StepKind.COMPUTE:
                continue
            self.moved()
            if step.kind is StepKind.LOAD:
                missed.append((step.key, step.slot))
                if step.slot not in needed:
                    beside[step.slot] = step.key
                continue
            self._store.load_together(missed)
            missed.clear()
            self._store.load(step.key, step.slot, prefetch=True)
        self._store.load_together(missed)
        return beside

    def compute(
        self, layer: MoeLayer, steps: Sequence[Step], x: torch.Tensor, each: int, index_TK: torch.Tensor
    ) -> torch.Tensor:
        """As `compute_all`, by the steps of the residency: in one call, or in waves where slots have to change hands.

        Raises:
            MoetoolError: an expert could not be read.
        """
        base, form, store = self._residency.policy.spec.expert_key(layer.index, 0), layer.form, self._store
        given = _Input(x, each, SlotRows.of(index_TK, form.num_experts))
        needed = {step.key for step in steps if step.kind in (StepKind.COMPUTE, StepKind.HOST)}
        hosted = {step.key - base for step in steps if step.kind is StepKind.HOST}
        output: torch.Tensor | None = None
        begun: list[tuple[torch.Tensor, Any]] | None = None
        together: list[Step] = []
        missed: list[Step] = []  # loads that nothing has come between
        beside: list[Step] = []  # loaded on demand though nothing here needs it: a whole layer's rest

        def load() -> None:
            store.load_together([(step.key, step.slot) for step in missed])
            beside.extend(step for step in missed if step.key not in needed)
            missed.clear()

        def compute() -> None:
            nonlocal output, begun
            load()
            if begun is None:
                begun = self._begin_on_host(layer, hosted, given, index_TK)  # now that loads are under way
            while beside:
                store.ready(beside[-1].key, beside.pop().slot)
            slots = {step.key - base: step.slot for step in together if step.key - base < form.num_experts}
            for expert, slot in slots.items():
                store.ready(base + expert, slot)
            output = self._wave(layer, slots, given, output, whole=len(together) == len(needed))
            store.computed_together(slots.values())
            together.clear()

        for step in steps:
            if step.kind is StepKind.COMPUTE:
                together.append(step)
            elif step.kind is not StepKind.HOST:
                self.moved()
                if any(other.slot == step.slot for other in together):
                    compute()
                if step.kind is StepKind.LOAD:
                    missed.append(step)
                else:
                    load()
                    store.load(step.key, step.slot, prefetch=True)
        if together or missed or beside or output is None:
            compute()
        assert output is not None
        output = _finished(form, output, given)
        for places, finished in begun or ():
            output[places] = finished()
        return output

    def _wave(
        self, layer: MoeLayer, slots: dict[int, int], given: _Input, output: torch.Tensor | None, *, whole: bool
    ) -> torch.Tensor:
        """Compute the experts of `slots`, which are all of the event if `whole`, into the output's rows."""
        parts = self._parts(layer, given.rows)
        if parts is not None:
            table_E = self._place(layer.index, slots) if whole else self._table_of(slots)
            return self._run(layer.form, given, table_E, parts, output)
        assert self._unpacking is not None
        experts, count = list(slots), self._unpacking.capacity
        for some in [experts[first : first + count] for first in range(0, len(experts), count)] or [[]]:
            unpacked = self._unpacking.unpack(layer.index, [slots[expert] for expert in some])
            table_E = self._table_of({expert: place for place, expert in enumerate(some)})
            output = self._run(layer.form, given, table_E, unpacked, output)
        assert output is not None
        return output

    def _parts(self, layer: MoeLayer, rows: SlotRows) -> Parts | None:
        """Parts that are multiplied in their slots; None if slots hold packed experts that must be unpacked first."""
        few = rows.order_R is None
        return self._parts_L[layer.index] or (self._packed_L[layer.index] if few else None)

    def _run(
        self,
        form: ExpertForm,
        given: _Input,
        table_E: torch.Tensor,
        parts: Parts,
        output: torch.Tensor | None,
    ) -> torch.Tensor:
        """Both products, with the gate between them, of rows whose experts have a slot by the table."""
        x, each, rows = given
        second, count = len(parts) // 2, len(rows.expert_R)
        up, down = (
            part.transpose(-1, -2) if transposed and isinstance(part, torch.Tensor) else part
            for part, transposed in ((parts[0], form.up_transposed), (parts[second], form.down_transposed))
        )
        first = x.new_empty(count, up.shape[1])  # rows without a slot hold anything, and nothing is made of them
        self._times(x.contiguous(), each, rows, table_E, up, first)
        if form.has_bias:
            slot_R = torch.where(_weighty(form, rows), table_E[rows.expert_R.clamp(max=form.num_experts - 1)], -1)
            first += _bias(parts[1])[slot_R.clamp(min=0)].to(x.dtype)
        output = x.new_empty(count, down.shape[1]) if output is None else output
        self._times(form.gate(first).contiguous(), 1, rows, table_E, down, output)
        if form.has_bias:
            biased = output + _bias(parts[second + 1])[slot_R.clamp(min=0)].to(x.dtype)
            output = torch.where((slot_R >= 0)[:, None], biased, output)
        return output

    def _times(
        self,
        x: torch.Tensor,
        each: int,
        rows: SlotRows,
        table_E: torch.Tensor,
        part: torch.Tensor | PackedPart,
        out_RO: torch.Tensor,
    ) -> None:
        """As `moetool.runtime.slot_products.multiply`, by weights of either kind."""
        if isinstance(part, torch.Tensor):
            self._multiply(x, each, rows, table_E, part, out_RO)
        else:
            assert self._multiply_packed is not None
            self._multiply_packed(x, each, rows, table_E, part, out_RO)

    def _begin_on_host(
        self, layer: MoeLayer, experts: set[int], given: _Input, index_TK: torch.Tensor
    ) -> list[tuple[torch.Tensor, Any]]:
        """Begin to compute experts in host memory; gives the places of each one's rows and what waits for them."""
        begun = []
        chosen = index_TK.reshape(-1).tolist() if experts else []
        for expert in sorted(experts):
            if expert < layer.form.num_experts:
                places = torch.tensor([i for i, other in enumerate(chosen) if other == expert]).to(given.x.device)
                key = self._residency.policy.spec.expert_key(layer.index, expert)
                begun.append((places, self._host.start(layer.form, key, given.x[places // given.each])))
        return begun

    def _place(self, layer: int, slots: dict[int, int]) -> torch.Tensor:
        """The layer's table, once it says where these experts are; of others it may say anything."""
        known, staged_E = self._slots_LE[layer], self._staged_LE[layer].numpy()
        if new := [(expert, slot) for expert, slot in slots.items() if known[expert] != slot]:
            # An earlier copy that is still to be carried out brings these entries too: no kernel before it reads them.
            for expert, slot in new:
                known[expert] = staged_E[expert] = slot
            self._table_LE[layer].copy_(self._staged_LE[layer], non_blocking=True)
        return self._table_LE[layer]

    def _table_of(self, slots: dict[int, int]) -> torch.Tensor:
        """A table of these experts and no others."""
        numbers = [-1] * self._num_experts
        for expert, slot in slots.items():
            numbers[expert] = slot
        return sent(numbers, self._device)


def _bias(part: torch.Tensor | PackedPart) -> torch.Tensor:
    assert isinstance(part, torch.Tensor), "a bias is stored as it is"
    return part


def _weighty(form: ExpertForm, rows: SlotRows) -> torch.Tensor:
    """Which rows are of an expert that has weights."""
    return rows.expert_R < form.num_experts


def _finished(form: ExpertForm, output: torch.Tensor, given: _Input) -> torch.Tensor:
    """The outputs after the family's own steps; experts without weights return their input."""
    if form.finish is not None:
        output = form.finish(output)
    if form.num_identity:
        inputs = given.x.repeat_interleave(given.each, dim=0) if given.each > 1 else given.x
        output = torch.where(_weighty(form, given.rows)[:, None], output, inputs)
    return output
