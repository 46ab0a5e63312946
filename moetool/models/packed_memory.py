"""A model that stays packed in memory: each product unpacks the weight that it needs, and drops it afterwards."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.experts.stored_expert import Weight
from moetool.models.loading import LoadedModel, load_lazy
from moetool.models.weights.pack_quantized import PackCodec
from moetool.models.weights.packed import PackedWeight

_PACKED = "packed_weights"  # attribute of the module that holds them


def load_packed(checkpoint: Checkpoint, dtype: torch.dtype) -> LoadedModel:
    """Load the decoder of a packed checkpoint: linear modules and experts packed, embeddings as stored.

    It has no output head, for callers that only need gates: call `get_decoder()`. In addition to `held_bytes` it needs
    `unpacking_bytes` while it runs.

    Args:
        dtype: data type of computation and of all other weights.

    Raises:
        MismatchError: the files do not match the model.
    """
    loaded = load_lazy(checkpoint, dtype)
    files, model = loaded.files, loaded.model
    assert files is not None
    try:
        for name, source in checkpoint.sources.items():
            stored = source.tensor_names[0]
            owner, _, leaf = name.rpartition(".")
            if source.converter is not None or leaf != "weight":
                continue
            module = model.get_submodule(owner)
            weight = files.shards.weights[stored]
            if isinstance(module, nn.Linear) and isinstance(weight.codec, PackCodec):
                block = weight.codec.block(files.shards.stored(stored))
                _keep_linear(module, PackedWeight((block,), weight.codec.bits))
            elif isinstance(module, nn.Embedding):
                module._parameters["weight"] = nn.Parameter(files.shards.load(stored), requires_grad=False)
                module.register_forward_hook(lambda module, args, output: output.to(dtype))
        for layer in loaded.layers:
            assert layer.form.call is Call.INTERFACE, "packed experts are stored one by one"
            _keep_experts(layer, loaded)
        model.set_output_embeddings(None)
    finally:
        loaded.close()
    return loaded


def weights_of(layer: MoeLayer, expert: int) -> tuple[Weight, ...]:
    """Parts of an expert of a model in memory, packed or not."""
    kept = getattr(layer.experts, _PACKED, None)
    if kept is not None:
        return kept[expert]
    return tuple(layer.experts.get_parameter(part.parameters[0])[expert] for part in layer.form.parts)


def held_bytes(model: Any) -> int:
    """Bytes of all weights of a model in memory, packed or not."""
    total = sum(tensor.nbytes for tensor in model.parameters() if not tensor.is_meta)
    for module in model.modules():
        for weights in getattr(module, _PACKED, ()):
            total += sum(weight.nbytes for weight in weights)
    return total


def unpacking_bytes(model: Any, dtype: torch.dtype) -> int:
    """Unpacked bytes of the largest expert or linear module; 0 for a model without packed weights."""
    largest = 0
    for module in model.modules():
        for weights in getattr(module, _PACKED, ()):
            largest = max(largest, sum(weight.numel for weight in weights))
    return largest * dtype.itemsize


def _keep_linear(module: Any, weight: PackedWeight) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight.to(x.dtype), module.bias)

    setattr(module, _PACKED, [(weight,)])
    module._parameters["weight"] = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    module.forward = forward


def _keep_experts(layer: MoeLayer, loaded: LoadedModel) -> None:
    files = loaded.files
    assert files is not None
    kept = []
    for expert in range(layer.form.num_experts):
        slot = torch.empty(files.slot_bytes, dtype=torch.uint8)
        key = files.spec.expert_key(layer.index, expert)
        files.read_into(key, slot)
        kept.append(files.views(slot, files.layout_of(key)))

    def forward(hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        for expert in index_TK.unique().tolist():
            rows, rank = torch.where(index_TK == expert)
            made = layer.form.compute(hidden_TD[rows], kept[expert])
            output_TD.index_add_(0, rows, made * weights_TK[rows, rank, None].to(made.dtype))
        return output_TD

    setattr(layer.experts, _PACKED, kept)
    layer.experts.forward = forward
