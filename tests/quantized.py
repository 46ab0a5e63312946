"""Quantized checkpoints, each with a twin of the dequantized weights.

Formats of compressed-tensors are written and unpacked by its own compressors. GPTQ, AWQ, FP8 and MXFP4 are laid out
here as published; the golden tensors of tests/unit/models/weights/test_format.py check both.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Writer = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
"""From a weight's name and value to its stored tensors and the weight that they represent."""

GROUP = 16
_LINEAR = re.compile(r"\.(self_attn|mlp|mixer|block_sparse_moe)\..*\.weight$")
_KEPT = re.compile(r"(norm|\.gate|router)\.weight$")


def quantize(dense: Path, out: Path, config: dict[str, Any], writer: Callable[[str], Writer | None]) -> Path:
    """Write a quantized copy of a checkpoint with separate experts.

    Args:
        config: the `quantization_config`.
        writer: quantizes a linear weight by name; None keeps it.

    Returns:
        The folder of its twin, next to it.
    """
    made, meant = {}, {}
    for name, weight in load_file(dense / "model.safetensors").items():
        write = writer(name) if _LINEAR.search(name) and not _KEPT.search(name) and weight.dim() == 2 else None
        if write is None:
            made[name] = meant[name] = weight
            continue
        tensors, meant[name] = write(name, weight)
        made |= tensors
    return _save(dense, out, made, meant, config)


def _save(dense: Path, out: Path, made: Tensors, meant: Tensors, config: dict[str, Any]) -> Path:
    """Write a quantized checkpoint with the other files of `dense`, and its twin; returns the twin's folder."""
    twin = out.with_name(out.name + "-twin")
    for folder, tensors in ((out, made), (twin, meant)):
        folder.mkdir(parents=True)
        for file in dense.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return twin


def fp8_block(block: int) -> Writer:
    """FP8 in square blocks."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        values = (blocks / scale).to(torch.float8_e4m3fn)
        meant = (values.float() * scale).view(weight.shape)
        return {name: values.view(weight.shape), f"{name}_scale_inv": scale[:, 0, :, 0]}, meant

    return write


def compressed(form: str, weights: dict[str, Any], scales: torch.dtype = torch.float32) -> Writer:
    """A format of compressed-tensors with scales of a data type, by its own compressor."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)
    bits, group = weights["num_bits"], weights.get("group_size")

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, group or weight.shape[1]))
        if weights["strategy"] == "tensor":
            groups = weight.view(1, 1, -1)
        low, high = groups.amin(-1), groups.amax(-1)
        local = {"weight": weight}
        if weights["type"] == "float":
            local["weight_scale"] = torch.maximum(-low, high) / (448 if bits == 8 else 6)
            if weights["strategy"] == "tensor_group":
                whole = 448 * 6 / weight.abs().amax()
                local["weight_global_scale"] = whole.reshape(1)
                local["weight_scale"] = (local["weight_scale"] * whole).to(torch.float8_e4m3fn).float()
        elif weights["symmetric"]:
            local["weight_scale"] = 2 * torch.maximum(-low, high) / (2**bits - 1)
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            local["weight_scale"] = (high - low) / (2**bits - 1)
            zero = -(2 ** (bits - 1)) - low / local["weight_scale"]
            local["weight_zero_point"] = zero.round().to(torch.int8)
        if weights["strategy"] == "tensor":
            local["weight_scale"] = local["weight_scale"].reshape(1)
        local["weight_scale"] = local["weight_scale"].to(scales)
        made = compressor.compress(local, scheme)
        stem = name.removesuffix("weight")
        meant = compressor.decompress(dict(made), scheme)["weight"].float()
        return {f"{stem}{local_name}": tensor for local_name, tensor in made.items()}, meant

    return write


def compressed_config(form: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Its config.json entry."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    head = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**head, "quantization_status": "compressed", "ignore": ["lm_head"], **more}


def gptq(act_order: bool, symmetric: bool = True, group: int = GROUP) -> Writer:
    """GPTQ in four bits; the groups of act-order are random."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns = weight.shape[1]
        index = torch.arange(columns) // group
        if act_order:
            index = index[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
        scale, zero = _affine(weight, index, symmetric)
        values = (weight / scale[:, index] + zero[:, index]).round().clamp(0, 15)
        meant = ((values - zero[:, index]) * scale[:, index]).half().float()
        stem = name.removesuffix("weight")
        return {
            f"{stem}qweight": _words(values.T, 0, range(8)),
            f"{stem}qzeros": _words(zero.T - 1, 1, range(8)),
            f"{stem}scales": scale.T.half(),
            f"{stem}g_idx": index.int(),
        }, meant

    return write


def awq(group: int = GROUP) -> Writer:
    """AWQ in four bits."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        index = torch.arange(weight.shape[1]) // group
        scale, zero = _affine(weight, index, symmetric=False)
        values = (weight / scale[:, index] + zero[:, index]).round().clamp(0, 15)
        meant = ((values - zero[:, index]) * scale[:, index]).half().float()
        stem, order = name.removesuffix("weight"), (0, 2, 4, 6, 1, 3, 5, 7)
        return {
            f"{stem}qweight": _words(values.T, 1, order),
            f"{stem}qzeros": _words(zero.T, 1, order),
            f"{stem}scales": scale.T.half(),
        }, meant

    return write


def _affine(weight: torch.Tensor, index: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Float16 scales and zero points from 1 to 15, [N, G]."""
    scales, zeros = [], []
    for group in range(int(index.max()) + 1):
        part = weight[:, index == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = (2 * torch.maximum(-low, high) if symmetric else high - low) / 15
        scales.append(scale.half().float())
        zeros.append(torch.full_like(scale, 8) if symmetric else (-low / scale).round().clamp(1, 15))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def _words(values: torch.Tensor, dim: int, order: Any) -> torch.Tensor:
    """Pack eight 4-bit values per word along a dimension; position `order[i]` goes into the i-th nibble."""
    eights = values.long().unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    words = sum(eights[..., place] << (4 * i) for i, place in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """MXFP4 in compressed-tensors' layout (a `Writer`)."""
    codes, scales, meant = _mxfp4(weight)
    return {f"{name}_packed": codes.flatten(1), f"{name}_scale": scales}, meant


def where_whole(writer: Writer, block: int) -> Writer:
    """A writer that keeps matrices whose sizes are no multiples of a block."""

    def write(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return ({name: weight}, weight) if any(size % block for size in weight.shape) else writer(name, weight)

    return write


def add_tensors(folder: Path, tensors: Tensors) -> None:
    """Add tensors to the one weight file of a checkpoint."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def shard(folder: Path, count: int) -> None:
    """Split a checkpoint's tensors over several files, with an index."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    files = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
    weight_map = {name: files[place % count] for place, name in enumerate(tensors)}
    for file in files:
        mine = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(mine, folder / file, {"format": "pt"})
    whole.unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values uint8 [..., K / 32, 16], exponents [..., K / 32] and the dequantized weight [..., K]."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    scaled = groups / exponent.exp2()
    values = (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = values | ((scaled < 0).long() << 3)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    meant = table[values] * scaled.sign() * exponent.exp2()
    return packed, (exponent[..., 0] + 127).to(torch.uint8), meant.flatten(-2)


def mxfp4_experts(dense: Path, out: Path) -> Path:
    """A gpt_oss checkpoint whose experts are MXFP4, and its twin."""
    made, meant = {}, {}
    for name, weight in load_file(dense / "model.safetensors").items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            made[name] = meant[name] = weight
            continue
        made[f"{name}_blocks"], made[f"{name}_scales"], numbers = _mxfp4(weight.transpose(1, 2))
        meant[name] = numbers.transpose(1, 2)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _save(dense, out, made, meant, config)
