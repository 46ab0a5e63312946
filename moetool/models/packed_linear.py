"""Linear layers outside the routed experts that keep their weights as stored, on a CPU."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moetool.base.families import own_cache
from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.int4 import KernelWeight
from moetool.kernels.cpu.matmul import MIN_ELEMENTS, RowsOf, multiplies, scattered_products
from moetool.kernels.cpu.scaled_weight import ScaledWeight
from moetool.kernels.cpu.tiles import find_tiles
from moetool.models.conversion import TensorSource
from moetool.models.experts.packed_slot import PackedSlot, packed_bytes, packed_slot, takes_packed
from moetool.models.experts.scaled_slot import ScaledSlot, scaled_slot, takes_scaled
from moetool.models.experts.stored_expert import layout_of
from moetool.models.files.tensor_index import Tensor
from moetool.models.shards import Shards
from moetool.models.tied_weights import head_is_tied
from moetool.models.weights.format import StoredWeight
from moetool.models.weights.gptq import in_even_groups
from moetool.models.weights.quantization_config import Quantization


class PackedLinear(nn.Module):
    """A linear layer [O, I] that multiplies its weight packed for up to `max_rows` rows, and unpacks it first for more.

    Args:
        stored: its weight, as `find_packed_linears` finds it.
        shards: the files that hold it.
        bias: bias of the layer that it replaces.

    Raises:
        OSError: the disk failed.
    """

    def __init__(self, stored: StoredWeight, shards: Shards, bias: nn.Parameter | None) -> None:
        super().__init__()
        form, layout = form_of_linear(stored), layout_of([[stored]])
        assert form is not None
        self.out_features, self.in_features = stored.shape
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
        for field in layout.fields:
            tensor = stored.tensors[field.role]
            data = shards.read(tensor.file, tensor.offset, tensor.num_bytes)
            memory[field.offset :][: field.num_bytes].copy_(torch.frombuffer(data, dtype=torch.uint8))
        slot = torch.empty(form.num_bytes, dtype=torch.uint8)
        ask_for_huge_pages(slot)
        form.fill(layout, memory, slot)
        (self._weight,) = form.views(slot)
        if isinstance(self._weight, ScaledWeight):
            find_tiles(self._weight.kind)  # no request waits for the compiler
        self.packed = nn.Parameter(slot, requires_grad=False)
        self.bias = bias

    @property
    def weight(self) -> torch.Tensor:
        """The weight, unpacked for this call."""
        assert isinstance(self._weight, ScaledWeight | KernelWeight)
        return self._weight.to(torch.bfloat16)

    @property
    def stored_weight(self) -> ScaledWeight | KernelWeight:
        assert isinstance(self._weight, ScaledWeight | KernelWeight)
        return self._weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, x = self._weight, input.reshape(-1, self.in_features)
        assert isinstance(weight, ScaledWeight | KernelWeight)
        if isinstance(weight, ScaledWeight) and multiplies(x, weight):
            output = scattered_products(x, [RowsOf(weight, range(len(x)), range(len(x)))], len(x))
        else:
            output = weight.times(x)
        output = output.view(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def form_of_linear(stored: StoredWeight) -> PackedSlot | ScaledSlot | None:
    """The packed form of a weight in a layer that computes in bfloat16; None if it is unpacked."""
    if len(stored.shape) != 2 or torch.Size(stored.shape).numel() < MIN_ELEMENTS:
        return None
    layout = layout_of([[stored]])
    scaled = scaled_slot(layout, (stored.shape,), torch.bfloat16)
    if scaled is not None:
        return None if layout.codecs[0][0].transposed else scaled
    return packed_slot(layout)


def estimate_packed_linears(model: Any, quantization: Quantization, declared: torch.dtype) -> dict[str, int]:
    """Bytes of the linear layers that would be `PackedLinear`, by name, from the config alone.

    Checkpoint writers leave the output head unpacked, whether the config says so or not.

    Args:
        declared: the model's data type, used for scales unless the format fixes theirs.
    """
    found = {}
    for name, module in _linears(model):
        format, (rows, columns) = quantization.format_of(name), module.weight.shape
        if format is None or rows * columns < MIN_ELEMENTS or module is model.get_output_embeddings():
            continue
        if takes_packed(format, rows, columns):
            found[name] = packed_bytes(format, rows, columns, declared)
        elif takes_scaled(format, rows, columns, declared):
            found[name] = format.stored_bytes(rows, columns, declared.itemsize)
    return found


def find_packed_linears(
    model: Any,
    sources: Mapping[str, TensorSource],
    weights: Mapping[str, StoredWeight],
    read: Callable[[Tensor], bytes],
) -> dict[str, StoredWeight]:
    """Names and weights of the linear layers that can be `PackedLinear`.

    Args:
        model: the model that the names refer to.
        sources: sources of its parameters.
        weights: weights of the checkpoint.
        read: returns the bytes of a small tensor.
    """
    found = {}
    for name, module in _linears(model):
        source = sources.get(f"{name}.weight")
        if source is None or source.converter is not None:
            continue
        if len(source.tensor_names) != 1:
            continue
        stored = weights[source.tensor_names[0]]
        if stored.shape != tuple(module.weight.shape) or form_of_linear(stored) is None:
            continue
        order = stored.tensors.get("order")
        if order is None or in_even_groups(read(order), stored.tensors["scale"].shape[0]):
            found[name] = stored
    return found


def _linears(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers whose weights are their own and used as a whole, with their names.

    Attention over paged latents multiplies by parts of `kv_b_proj`.
    """
    head = model.get_output_embeddings() if head_is_tied(model) else None
    in_parts = () if own_cache(model.config.get_text_config()) else ("kv_b_proj",)
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head and not name.endswith(in_parts):
            yield name, module
