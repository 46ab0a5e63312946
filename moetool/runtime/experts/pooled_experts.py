"""Compute a layer's experts by one product over the pool (`moetool.kernels.slot_products`), for a GPU.

A table on the device maps an event's routes to slots; the host receives the routes once per layer, for the residency's
decisions. While every expert of the model has a slot, even that can wait: the products are queued at once, and the
residency receives all layers' events in order after the forward.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from moetool.caching.residency import Residency, Step
from moetool.kernels.packed_part import PackedPart
from moetool.kernels.slot_backends import find_multiply, find_multiply_packed
from moetool.kernels.slot_products import FEW_ROWS, SlotRows
from moetool.models.experts.expert_form import ExpertForm
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.experts.packed_parts import packed_parts
from moetool.models.experts.slot_unpacking import SlotUnpacking
from moetool.models.loading import LoadedModel
from moetool.runtime.experts.copies import on_device
from moetool.runtime.experts.machines import ExpertPool, StoreMachine

Parts = tuple[torch.Tensor | PackedPart, ...]
"""Parts of a layer's experts in all slots."""


class _Input(NamedTuple):
    """Input rows, of which choice r has row r // `each`, and the choices."""

    x: torch.Tensor
    each: int
    rows: SlotRows


class PooledExperts:
    """The experts of a model in the slots of one device.

    Args:
        loaded: the model; packed weights are unpacked to its data type.
        residency: assigns the slots.
        pool: its store has them.

    Attributes:
        complete: whether every expert of the model has a slot, so that `compute_all` may be called.

    Effects: allocates the table and, for packed experts, memory to unpack some.
    """

    def __init__(self, loaded: LoadedModel, residency: Residency, pool: ExpertPool) -> None:
        (store,) = pool.store.stores
        self.pool = pool
        self._residency = residency
        self.store = store
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
        self._checked = False  # whether the table covers every expert

    def begin_forward(self, num_tokens: int) -> None:
        """Determine whether every expert has a slot and can be computed there."""
        spec = self._residency.policy.spec
        few = num_tokens * self._most_chosen <= FEW_ROWS
        suffices = all(parts or (few and packed) for parts, packed in zip(self._parts_L, self._packed_L, strict=True))
        self.complete = suffices and self._residency.num_residents == spec.total_experts
        if not self.complete or self._checked:
            return
        slot_of = self._residency.slot_of
        self.complete = self._checked = all(self.store.holds(key, slot) for key, slot in slot_of.items())
        if self.complete:
            for layer, form in enumerate(self._forms):
                self.place(layer, {e: slot_of[spec.expert_key(layer, e)] for e in range(form.num_experts)})

    def moved(self) -> None:
        """Record that an expert has another slot."""
        self._checked = False

    def compute_all(self, layer: MoeLayer, x: torch.Tensor, each: int, index_TK: torch.Tensor) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D] of the choices, with slots from the table.

        Needs `table_suffices`.

        Args:
            x: input rows; choice r is of row r // `each`.
        """
        given = _Input(x, each, SlotRows.of(index_TK, layer.form.num_experts))
        parts = self._parts(layer, given.rows)
        assert parts is not None
        return _finished(layer.form, self._run(layer.form, given, self._table_LE[layer.index], parts, None), given)

    def compute_some(
        self, layer: MoeLayer, slots: dict[int, int], x: torch.Tensor, index_TK: torch.Tensor
    ) -> torch.Tensor:
        """Like `compute_all`, of these experts in their slots; zeros for other choices.

        The slots must not be reused until the device has computed it.

        Raises:
            MoetoolError: an expert could not be read.
        """
        base = self._residency.policy.spec.expert_key(layer.index, 0)
        for expert, slot in slots.items():
            self.store.ready(base + expert, slot)
        given = _Input(x, index_TK.shape[1], SlotRows.of(index_TK, layer.form.num_experts))
        zeros = x.new_zeros(index_TK.numel(), x.shape[-1])
        return _finished(layer.form, self.compute_wave(layer, slots, given, zeros, whole=False), given)

    def computed_all(self) -> None:
        """Protect all slots from reuse until the computation queued so far is done."""
        self.store.computed(range(self.store.num_slots))

    def table_suffices(self, layer: MoeLayer, num_rows: int) -> bool:
        """Whether products of this number of a layer's choices need only the table, and nothing is unpacked first."""
        return bool(self._parts_L[layer.index] or (num_rows <= FEW_ROWS and self._packed_L[layer.index]))

    def compute_wave(
        self, layer: MoeLayer, slots: dict[int, int], given: _Input, output: torch.Tensor | None, *, whole: bool
    ) -> torch.Tensor:
        """Compute the experts of `slots` into the output's rows; if `whole`, these are all of the event's."""
        parts = self._parts(layer, given.rows)
        if parts is not None:
            table_E = self.place(layer.index, slots) if whole else self._table_of(slots)
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
        """Parts to multiply in their slots; None if slots hold packed experts that must be unpacked first."""
        few = rows.order_R is None
        return self._parts_L[layer.index] or (self._packed_L[layer.index] if few else None)

    def _run(
        self, form: ExpertForm, given: _Input, table_E: torch.Tensor, parts: Parts, output: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute both products, with the gate between them, for rows whose experts have a slot in the table."""
        x, each, rows = given
        second, count = len(parts) // 2, len(rows.expert_R)
        up, down = (
            part.transpose(-1, -2) if transposed and isinstance(part, torch.Tensor) else part
            for part, transposed in ((parts[0], form.up_transposed), (parts[second], form.down_transposed))
        )
        first = x.new_empty(count, up.shape[1])  # rows without a slot have arbitrary values that are never used
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
        """See `moetool.kernels.slot_products.multiply`; for plain and packed weights."""
        if isinstance(part, torch.Tensor):
            self._multiply(x, each, rows, table_E, part, out_RO)
        else:
            assert self._multiply_packed is not None
            self._multiply_packed(x, each, rows, table_E, part, out_RO)

    def place(self, layer: int, slots: dict[int, int]) -> torch.Tensor:
        """Return the layer's table with these experts' slots; other entries are arbitrary."""
        known, staged_E = self._slots_LE[layer], self._staged_LE[layer].numpy()
        if new := [(expert, slot) for expert, slot in slots.items() if known[expert] != slot]:
            # An earlier queued copy brings these entries too: no kernel before it reads them.
            for expert, slot in new:
                known[expert] = staged_E[expert] = slot
            self._table_LE[layer].copy_(self._staged_LE[layer], non_blocking=True)
        return self._table_LE[layer]

    def _table_of(self, slots: dict[int, int]) -> torch.Tensor:
        """Return a table of only these experts."""
        numbers = [-1] * self._num_experts
        for expert, slot in slots.items():
            numbers[expert] = slot
        return on_device(torch.tensor(numbers, dtype=torch.int32), self._device)


class PoolMachine(StoreMachine):
    """Runs an event's program by one product for each wave, all experts of which have slots.

    Args:
        x: input rows; choice r is of row r // `each`.
        num_needed: number of experts that the event needs.
        recorded: computes the layer's output by a CUDA graph, once all needed experts have slots and are in the table.

    Attributes:
        output: the result of `recorded`, if the program computes all experts in one wave.
    """

    def __init__(
        self,
        pooled: "PooledExperts",
        layer: MoeLayer,
        x: torch.Tensor,
        each: int,
        index_TK: torch.Tensor,
        num_needed: int,
        recorded: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        super().__init__(pooled.pool, layer, {})
        self._pooled, self._layer, self._x, self._each, self._index_TK = pooled, layer, x, each, index_TK
        self._num_needed, self._recorded = num_needed, recorded
        self._products: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    @cached_property
    def _given(self) -> _Input:
        return _Input(self._x, self._each, SlotRows.of(self._index_TK, self._form.num_experts))

    @cached_property
    def _positions_of(self) -> dict[int, torch.Tensor]:
        places_of: dict[int, list[int]] = {}
        for place, expert in enumerate(self._index_TK.reshape(-1).tolist()):
            places_of.setdefault(expert, []).append(place)
        return {expert: torch.tensor(places, device=self._x.device) for expert, places in places_of.items()}

    def products(self) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D]."""
        made = self._products
        if made is None:
            made = self._pooled.compute_wave(self._layer, {}, self._given, None, whole=False)
        self._products = _finished(self._form, made, self._given)
        self.finish()
        return self._products

    def load(self, steps: Sequence[Step], idle: bool) -> None:
        self._pooled.moved()
        super().load(steps, False)

    def prefetch(self, step: Step) -> None:
        self._pooled.moved()
        super().prefetch(step)

    def compute(self, wave: Sequence[Step]) -> None:
        whole = len(wave) == self._num_needed
        base, weighty = self._first_key, self._form.num_experts
        slots = {step.key - base: step.slot for step in wave if step.key - base < weighty}
        for expert, slot in slots.items():
            self._store.ready(base + expert, slot)
        if whole and self._recorded is not None:
            self._pooled.place(self._layer.index, slots)
            self.output = self._recorded()
        else:
            self._products = self._pooled.compute_wave(self._layer, slots, self._given, self._products, whole=whole)
        self._store.computed([step.slot for step in wave])

    def _input(self, expert: int) -> torch.Tensor:
        return self._x[self._positions_of[expert] // self._each]

    def _put(self, expert: int, output: torch.Tensor) -> None:
        if expert < self._form.num_experts:  # else the products have it
            assert self._products is not None
            self._products[self._positions_of[expert]] = output


def _bias(part: torch.Tensor | PackedPart) -> torch.Tensor:
    assert isinstance(part, torch.Tensor), "a bias is stored unpacked"
    return part


def _weighty(form: ExpertForm, rows: SlotRows) -> torch.Tensor:
    """Mask of rows whose expert has weights."""
    return rows.expert_R < form.num_experts


def _finished(form: ExpertForm, output: torch.Tensor, given: _Input) -> torch.Tensor:
    """Apply the family's own steps to the outputs; experts without weights return their input."""
    if form.finish is not None:
        output = form.finish(output)
    if form.num_identity:
        inputs = given.x.repeat_interleave(given.each, dim=0) if given.each > 1 else given.x
        output = torch.where(_weighty(form, given.rows)[:, None], output, inputs)
    return output
