"""Addresses of experts in slots, for compiled functions on a CPU."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moetool.caching.residency import Step, StepKind
from moetool.kernels.cpu.gates import ClampedGate, find_gate_kernel, is_silu_gate
from moetool.kernels.cpu.matmul import RowWeight, row_weight
from moetool.kernels.cpu.step_operations import TABLE
from moetool.kernels.cpu.vectors import LANES
from moetool.models.experts.expert_form import ExpertForm, out_in
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.experts.stored_expert import Weight
from moetool.models.loading import LoadedModel
from moetool.models.transformers_internals import clamped_gate
from moetool.runtime.experts.store import ExpertStore


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Addresses of a layer's experts, for compiled functions that multiply by them.

    Attributes:
        up, down: one of the experts' weights, for kind and shape.
        table_E6: for each expert the addresses of up and its scales, of down and its scales, and of their biases; 0 if
            it has no slot.
        gate: constants of the gate of experts with biases; None: it is SiLU's, without biases.
    """

    up: RowWeight
    down: RowWeight
    table_E6: np.ndarray
    gate: ClampedGate | None


class SlotTables:
    """The addresses of each layer's experts: an expert is in its table while its slot holds it.

    Args:
        store: one device's; that of a CPU.

    Effects: follows the store's replacements.
    """

    def __init__(self, loaded: LoadedModel, store: ExpertStore) -> None:
        self._store = store
        self._weights_L: list[ExpertWeights | None] = [self._describe(layer) for layer in loaded.layers]
        self._addresses: dict[tuple[int, int], list[int]] = {}  # by layout and slot
        self._holders: dict[int, tuple[int, int]] = {}  # layer and expert in the tables, by slot
        self._slot_of_L: list[dict[int, int]] = [{} for _ in loaded.layers]  # the same, by layer and expert
        store.on_replaced = self._remove

    def weights(self, layer: MoeLayer) -> ExpertWeights | None:
        """A layer's table, and one of its experts; None if no compiled functions compute them."""
        return self._weights_L[layer.index]

    def hold(self, layer: MoeLayer, steps: Sequence[Step]) -> bool:
        """Whether a layer's table has each expert that these steps compute in the slot that they name."""
        slot_of = self._slot_of_L[layer.index]
        first = self._store.files.spec.expert_key(layer.index, 0)
        return all(slot_of.get(step.key - first) == step.slot for step in steps if step.kind is StepKind.COMPUTE)

    def place(self, layer: MoeLayer, expert: int, slot: int) -> None:
        """Write an expert that its slot holds into the layer's table."""
        slot_of = self._slot_of_L[layer.index]
        if (before := slot_of.get(expert)) == slot:
            return
        if before is not None:  # a policy gave it up, and loaded it again into another slot
            del self._holders[before]
        self._remove(slot)
        layout = self._layout_of(layer)
        found = self._addresses.get((layout, slot))
        if found is None:
            weights = self._store.views_of(layout, slot)
            up, down = _products(layer.form, weights)
            assert up is not None and down is not None
            biases = [bias.data_ptr() for bias in weights[1::2]] if layer.form.has_bias else [0, 0]  # type: ignore[union-attr]
            found = self._addresses[layout, slot] = [up.values, up.scale, down.values, down.scale, *biases]
        self._holders[slot] = (layer.index, expert)
        slot_of[expert] = slot
        self._table(layer.index)[expert] = found

    @contextlib.contextmanager
    def only(self, layer: MoeLayer, experts: Iterable[int]) -> Iterator[None]:
        """Leave all other experts out of a layer's table meanwhile."""
        table_E6 = self._table(layer.index)
        kept_E6, chosen = table_E6.copy(), list(experts)
        table_E6[:] = 0
        table_E6[chosen] = kept_E6[chosen]
        try:
            yield
        finally:
            table_E6[:] = kept_E6

    def _remove(self, slot: int) -> None:
        if (holder := self._holders.pop(slot, None)) is not None:
            del self._slot_of_L[holder[0]][holder[1]]
            self._table(holder[0])[holder[1]] = 0

    def _table(self, layer: int) -> np.ndarray:
        weights = self._weights_L[layer]
        assert weights is not None
        return weights.table_E6

    def _layout_of(self, layer: MoeLayer) -> int:
        return self._store.files.layout_of(self._store.files.spec.expert_key(layer.index, 0))

    def _describe(self, layer: MoeLayer) -> ExpertWeights | None:
        form, spec = layer.form, self._store.files.spec
        keys = [spec.expert_key(layer.index, expert) for expert in range(form.num_experts)]
        if len({self._store.files.layout_of(key) for key in keys}) > 1:
            return None
        weights = self._store.views_of(self._layout_of(layer), 0)
        constants = clamped_gate(form.gate) if form.has_bias else None
        gate = None if constants is None else ClampedGate(*constants)
        if form.finish is not None or form.num_identity or (gate is None and not is_silu_gate(form.gate)):
            return None
        if form.has_bias and (gate is None or not all(map(_is_bias, weights[1::2]))):
            return None
        up, down = _products(form, weights)
        if up is None or down is None or find_gate_kernel() is None or (up.shape.outputs // 2) % LANES:
            return None
        return ExpertWeights(up, down, np.zeros((form.num_experts, TABLE), np.int64), gate)


def _products(form: ExpertForm, weights: tuple[Weight, ...]) -> tuple[RowWeight | None, RowWeight | None]:
    up, down = weights[:: 2 if form.has_bias else 1]
    return row_weight(out_in(up, form.up_transposed)), row_weight(out_in(down, form.down_transposed))


def _is_bias(weight: Weight) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and weight.is_contiguous()
