"""Weights of a quantized checkpoint as the library of its format unpacks them: an oracle for our own unpacking."""

from functools import partial
from typing import Any

import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.ggml_blocks import GgmlCodec
from moetool.models.gguf_weights import GgufWeights
from moetool.models.loading import ReadWeight
from moetool.models.weight_format import unpack

_COMPRESSED = frozenset({"float-quantized", "naive-quantized", "int-quantized", "pack-quantized"}) | {
    f"{kind}-pack-quantized" for kind in ("nvfp4", "mxfp4")
}
_F32 = 0  # of ggml's types


def library_reader(checkpoint: Checkpoint) -> tuple[ReadWeight, str] | None:
    """Reader of a checkpoint's weights and the name of its library; None where no library of the format is used.

    GGUF: the gguf package finds tensors and unpacks them. compressed-tensors with one scheme: the safetensors library
    reads, and the scheme's own compressor unpacks. Which tensors make a weight, and in what order, is ours.
    """
    quantization = checkpoint.quantization
    if isinstance(quantization, GgufWeights):
        from gguf import GGUFReader

        found = {tensor.name: tensor for file in checkpoint.index.files for tensor in GGUFReader(file).tensors}
        return partial(_from_gguf, checkpoint, quantization, found), "the gguf package"
    if quantization is None or quantization.method != "compressed-tensors":
        return None
    raw = checkpoint.raw["quantization_config"]
    groups = list(raw.get("config_groups", {}).values())
    if len(groups) != 1 or (form := groups[0].get("format") or raw.get("format")) not in _COMPRESSED:
        return None
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(groups[0])
    compressor = BaseCompressor.get_value_from_registry(form)
    return partial(_from_compressed, checkpoint, compressor, scheme), "compressed-tensors"


def _from_gguf(
    checkpoint: Checkpoint, weights: GgufWeights, found: dict[str, Any], name: str, dtype: torch.dtype
) -> torch.Tensor:
    from gguf import dequantize

    part, shape = weights.parts[name], checkpoint.weight_index.weights[name].shape
    stored = {}
    for role, stored_name in part.tensors.items():
        tensor = found[stored_name]
        stored[role] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    kinds = tuple((role, _F32) for role in stored)
    if len(kinds) == 1 and part.undo is None and not part.transposed:
        return next(iter(stored.values())).reshape(shape).to(dtype)
    return unpack(GgmlCodec(kinds, part.undo, part.transposed, part.interleaved), stored, shape, dtype)


def _from_compressed(
    checkpoint: Checkpoint, compressor: Any, scheme: Any, name: str, dtype: torch.dtype
) -> torch.Tensor:
    index, stem = checkpoint.index, name.removesuffix("weight")
    if name in index.tensors and f"{name}_scale" not in index.tensors:
        return read_by_safetensors(checkpoint, name, dtype)
    local = {
        stored.removeprefix(stem): read_by_safetensors(checkpoint, stored, dtype)
        for stored in index.tensors
        if stored.startswith(f"{name}_") or stored == name
    }
    value: torch.Tensor = compressor.decompress(local, scheme)["weight"]
    return value.to(dtype)


def read_by_safetensors(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """ReadWeight a stored tensor, in its own data type, by the safetensors library."""
    from safetensors import safe_open

    with safe_open(checkpoint.index.files[checkpoint.index.tensors[name].file], framework="pt") as file:
        value: torch.Tensor = file.get_tensor(name)
    return value
