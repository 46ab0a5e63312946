"""Checkpoints in the names and formats of released models have the weights, logits and answers of transformers' own.

Plain transformers reads each with `dequantize`, so the expected weights are not moetool's. Those in NVFP4 it reads from
a twin of the weights that compressed-tensors unpacks.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.models.tested_formats import BY_EXPERT, NVFP4_RELEASED, RELEASED
from tests import families, gguf_oracle, quantized
from tests.contract.test_quantized import NVFP4
from tests.greedy import forward_logits, generated, prompts, served

TOKENS = torch.tensor([[5, 9, 11, 3, 4, 20, 33, 7, 8, 6, 21, 40]])
_BLOCK = 16
_EXACT = torch.float8_e8m0fnu
Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """A released layout.

    Attributes:
        family: of the checkpoint.
        changed: further values of the config of its text.
        linear: pattern of the names of quantized weights.
        write: from a name and a weight to the stored tensors.
        config: its `quantization_config`.
    """

    family: str
    changed: dict[str, Any]
    linear: str
    write: Callable[[str, torch.Tensor], Tensors]
    config: dict[str, Any]


def _fp8(scale: str, dtype: torch.dtype, rows: int = _BLOCK, columns: int = _BLOCK) -> Callable[..., Tensors]:
    """FP8 with a scale for each block, or for the whole weight with 0 rows; its name replaces `weight`."""

    def write(name: str, weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows)) if rows else weight[None, :, None]
        scales = blocks.abs().amax((-3, -1), keepdim=True) / 448
        if dtype in (_EXACT, torch.uint8):
            scales = scales.log2().ceil().exp2()
        values = (blocks / scales).to(torch.float8_e4m3fn).view(weight.shape)
        stored = scales[..., 0, :, 0] if rows else scales.reshape(())
        stored = stored.to(_EXACT).view(torch.uint8) if dtype is torch.uint8 else stored.to(dtype)
        return {name: values, name.removesuffix("weight") + scale: stored}

    return write


def _deepseek_v4(name: str, weight: torch.Tensor) -> Tensors:
    """Experts in 4 bits with a scale for 32 numbers, other layers in FP8."""
    if ".experts." not in name:
        return _fp8("scale", _EXACT)(name, weight)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil().exp2()
    codes = ((groups / scale).abs()[..., None] - numbers).abs().argmin(-1) | ((groups < 0).long() << 3)
    codes = codes.flatten(1).to(torch.uint8)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return {name: packed, name.removesuffix("weight") + "scale": scale[..., 0].to(_EXACT)}


def _method(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    block = {"weight_block_size": [rows, columns]} if rows else {"weight_block_size": None}
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **block, **more}


LAYOUTS = {
    "DeepSeek-V4": Layout(
        "deepseek_v4",
        {"moe_intermediate_size": 32, "intermediate_size": 32, "head_dim": 32, "q_lora_rank": 32, "o_lora_rank": 16},
        r".*(attn\.w(q_a|q_b|kv|o_b)|ffn\..*w[123])\.weight",
        _deepseek_v4,
        {**_method(_BLOCK, _BLOCK, scale_fmt="ue8m0"), "expert_dtype": "fp4"},
    ),
    "GLM-5.2-FP8": Layout(
        "glm_moe_dsa",
        {"indexer_types": ["full", "shared", "shared"], "moe_intermediate_size": 32},
        r".*mlp\.(experts\.\d+|shared_experts)\..*_proj\.weight",
        _fp8("weight_scale_inv", torch.float32),
        _method(_BLOCK, _BLOCK),
    ),
    "Qwen3.8-FP8": Layout(
        "qwen3_5_moe",
        {},
        r".*language_model.*mlp\.(experts\.\d+|shared_expert)\..*_proj\.weight",
        _fp8("weight_scale_inv", torch.bfloat16),
        _method(_BLOCK, _BLOCK),
    ),
    "Gemma-4": Layout("gemma4", {}, "", _fp8("scale", torch.float32), {}),
    "MiniMax-M3-MXFP8": Layout(
        "minimax_m3_vl",
        {"intermediate_size": 32, "moe_intermediate_size": 32},
        r".*language_model.*experts\.\d+\.w[123]\.weight",
        _fp8("weight_scale_inv", torch.uint8, 1, 32),
        _method(1, 32),
    ),
    "Mistral-Large-4": Layout(
        "mistral_large4",
        {},
        r"layers.*experts\.\d+\.w[123]\.weight",
        _fp8("qscale_weight", torch.float32, 0),
        _method(0, 0),
    ),
    "Step-3.7-Flash-FP8": Layout(
        "step3p7",
        {
            **{"num_hidden_layers": 4, "moe_intermediate_size": 32, "swiglu_limits": [0.0, 0.0, 0.0, 0.5]},
            **{"mlp_layer_types": ["dense", *["sparse"] * 3], "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.75]},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
        },
        r"model\.layers\.\d+\.moe\.(gate|up|down)_proj\.weight",
        _fp8("weight_scale_inv", torch.float32),
        _method(_BLOCK, _BLOCK),
    ),
}
MULTIMODAL = (*families.MULTIMODAL, "minimax_m3_vl")


def _write(layout: Layout, folder: Path) -> Path:
    if layout.family in MULTIMODAL:
        families.save_multimodal(layout.family, folder, **layout.changed)
    else:
        families.save(layout.family, folder, **layout.changed)
    file = folder / "model.safetensors"
    if layout.family == "deepseek_v4":
        _flat(file)
    stored, quantized = {}, 0
    for name, weight in load_file(file).items():
        found = layout.write(name, weight) if re.fullmatch(layout.linear, name) else {name: weight}
        quantized += len(found) > 1
        stored |= {key: tensor.contiguous() for key, tensor in found.items()}
    assert quantized > 8 or not layout.config
    save_file(stored, file, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    if layout.config:
        (folder / "config.json").write_text(json.dumps({**raw, "quantization_config": layout.config}))
    return folder


def _flat(file: Path) -> None:
    """Give tensors the names of DeepSeek's files."""
    tensors = {}
    for name, tensor in load_file(file).items():
        for theirs, published in gguf_oracle.PUBLISHED["deepseek4"].items():
            name = name.replace(theirs, published, 1)
        tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def test_the_table_of_formats_counts_these_families() -> None:
    texts = {families.MULTIMODAL.get(each.family, each.family) for each in LAYOUTS.values() if each.config}
    texts = {"minimax_m3_vl_text" if text == "minimax_m3_vl" else text for text in texts}
    assert {*RELEASED} <= texts <= {*RELEASED, *BY_EXPERT}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_released_layout_is_served_as_transformers_dequantizes_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, FineGrainedFP8Config

    layout = LAYOUTS[name]
    families.require_known(layout.family)
    path = _write(layout, tmp_path)
    kind = AutoModelForImageTextToText if layout.family in MULTIMODAL else AutoModelForCausalLM
    options = {key: value for key, value in layout.config.items() if key in ("weight_block_size", "scale_fmt")}
    loading: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    if layout.config:
        loading["quantization_config"] = FineGrainedFP8Config(dequantize=True, **options)
    whole, report = kind.from_pretrained(path, **loading)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    if name == "Step-3.7-Flash-FP8":
        _scale_down(whole, path)
    ours, theirs = load_full(Checkpoint.open(path), torch.float32), whole.eval()
    expected = {key.replace(".language_model.", ".", 1): value for key, value in theirs.state_dict().items()}
    found = {key.replace(".language_model.", ".", 1): value for key, value in ours.model.state_dict().items()}
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    theirs.set_experts_implementation("eager")
    with torch.inference_mode():
        logits = theirs(TOKENS, use_cache=False).logits[0]
    rounding = 1e-5 * float(logits.abs().max())
    assert torch.allclose(forward_logits(path, TOKENS), logits, rtol=0, atol=rounding)
    generated(theirs, prompts(3)).require_same(served(path, "lru", prompts(3)))


def _scale_down(model: Any, path: Path) -> None:
    """Scale the second matrices of stacked experts, whose scales transformers' `dequantize` leaves out."""
    for name, scale in load_file(path / "model.safetensors").items():
        if found := re.fullmatch(r"model\.(layers\.\d+)\.moe\.down_proj\.weight_scale_inv", name):
            weight = model.get_parameter(f"model.language_model.{found[1]}.mlp.experts.down_proj")
            weight.data *= scale.repeat_interleave(_BLOCK, 1).repeat_interleave(_BLOCK, 2)


def _modelopt(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """NVFP4 in ModelOpt's names, with a factor for the whole weight that is a power of two (a `Writer`)."""
    weight = weight.clone()
    largest = int(weight.abs().argmax())
    weight.view(-1)[largest] = 21 * (weight.abs().max() / 21).log2().ceil().exp2()
    made, meant = quantized.compressed("nvfp4-pack-quantized", NVFP4)(name, weight)
    factor = 1 / made.pop(f"{name}_global_scale").reshape(())
    hint = {name.removesuffix("weight") + "input_scale": torch.tensor(1.0)}
    return {
        name: made[f"{name}_packed"],
        f"{name}_scale": made[f"{name}_scale"],
        f"{name}_scale_2": factor,
    } | hint, meant


def _eight_bits(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """FP8 with one scale (a `Writer`)."""
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    cache = {name.replace("proj.weight", "scale"): torch.tensor(1.0)} if name.endswith(("k_proj.weight",)) else {}
    return {name: values, f"{name}_scale": scale, **cache}, values.float() * scale


def _mixed(name: str) -> quantized.Writer:
    return _modelopt if ".experts." in name else _eight_bits


_ALL = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
_COMPRESSED = quantized.compressed_config("nvfp4-pack-quantized", NVFP4)
_OURS = quantized.compressed("nvfp4-pack-quantized", NVFP4)
NVFP4_LAYOUTS: dict[str, tuple[str, dict[str, Any], Callable[[str], quantized.Writer | None]]] = {
    "DeepSeek-R1-FP4": (
        "deepseek_v3",
        {**_ALL, "exclude_modules": ["lm_head", "model.layers.*.self_attn*"]},
        lambda name: None if "self_attn" in name else _modelopt,
    ),
    "Qwen3-30B-A3B-NVFP4": ("qwen3_moe", {"quant_method": "modelopt", **_ALL}, lambda name: _modelopt),
    "Qwen3.5-A3B-NVFP4": ("qwen3_next", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}, _mixed),
    "MiniMax-M2-NVFP4": (
        "minimax_m2",
        _COMPRESSED,
        lambda name: _OURS if ".experts." in name else None,
    ),
    "Nemotron-3-NVFP4": (
        "nemotron_h",
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
        lambda name: _modelopt if ".experts." in name else None,
    ),
}
"""Family, config and writer of a weight; configs without `quant_method` lie in hf_quant_config.json, as ModelOpt's."""


def test_the_table_of_formats_counts_the_nvfp4_families() -> None:
    found = {family for family, _, _ in NVFP4_LAYOUTS.values()}
    assert {*NVFP4_RELEASED} <= found <= {*NVFP4_RELEASED, *BY_EXPERT}


@pytest.mark.parametrize("name", NVFP4_LAYOUTS)
def test_nvfp4_of_a_release_is_read_as_compressed_tensors_unpacks_it(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    family, config, writer = NVFP4_LAYOUTS[name]
    families.save(family, tmp_path / "dense", moe_intermediate_size=32, intermediate_size=32)
    layers: dict[str, Any] = {}

    def writer_of(weight: str) -> quantized.Writer | None:
        write = writer(weight)
        if write is not None:
            algorithm = "FP8" if write is _eight_bits else "W4A16_NVFP4"
            layers[weight.removesuffix(".weight")] = {"quant_algo": algorithm}
        return write

    path = tmp_path / "made"
    twin = quantized.quantize(tmp_path / "dense", path, config, writer_of)
    assert len(layers) > 8
    raw = json.loads((path / "config.json").read_text())
    if "quantized_layers" in config:
        raw["quantization_config"]["quantized_layers"] = layers
    if "quant_method" not in config:
        own = raw.pop("quantization_config")
        (path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": own}))
    (path / "config.json").write_text(json.dumps(raw))
    theirs, report = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    expected, found = theirs.state_dict(), load_full(Checkpoint.open(path), torch.float32).model.state_dict()
    assert [key for key in found if not torch.equal(found[key], expected[key])] == []
    theirs.set_experts_implementation("eager")
    with torch.inference_mode():
        logits = theirs.eval()(TOKENS, use_cache=False).logits[0]
    assert torch.allclose(forward_logits(path, TOKENS), logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
