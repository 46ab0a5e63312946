"""Every weight format unpacks to the weights that its own library makes, and refuses tensors that do not belong."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file

from moetool.base.errors import MismatchError, UsageError
from moetool.models.shards import Tensor
from moetool.models.weights.format import STORED_DTYPES, StoredWeight, unpack
from moetool.models.weights.quantization_config import quantization_of
from moetool.models.weights.value_scaling import eight_bits, four_bits

GOLDEN = Path(__file__).parents[3] / "golden" / "gptq_awq.safetensors"
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


def stored(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, StoredWeight]:
    """The weights that these tensors make under a config, as if they lay in one file."""
    index, data, offset = {}, b"", 0
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).clone().view(torch.uint8).numpy().tobytes()
        index[name] = Tensor(0, offset, len(raw), tuple(tensor.shape), _NAMES[tensor.dtype])
        data, offset = data + raw, offset + len(raw)
    quantization = quantization_of({"quantization_config": config}, Path("m"))
    assert quantization is not None
    return quantization.claim(index, [Path("m/a.safetensors")], lambda t: data[t.offset : t.offset + t.num_bytes])


def dense(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = "a.weight", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """One weight, unpacked."""
    weight = stored(config, tensors)[name]
    by_offset = {}
    offset = 0
    for tensor in tensors.values():
        by_offset[offset] = tensor
        offset += tensor.nbytes
    made = unpack(weight.codec, {r: by_offset[t.offset] for r, t in weight.tensors.items()}, weight.shape, dtype)
    assert made.shape == weight.shape and made.dtype == dtype
    assert weight.num_bytes == sum(t.num_bytes for t in weight.tensors.values())
    return made


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def scheme_config(form: str, weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **fields}},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_as_transformers_dequantizes_them(scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = random(256, 384).to(torch.float8_e4m3fn)
    scale = (random(2, 3, seed=1).abs() + 0.1).to(scale_dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, dtype)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert torch.equal(dense(config, {"a.weight": weight, "a.weight_scale_inv": scale}, dtype=dtype), theirs)


def test_fp8_blocks_may_be_cut_off_at_the_edges() -> None:
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    tensors = {"a.weight": random(200, 300).to(torch.float8_e4m3fn), "a.weight_scale_inv": random(2, 3, seed=1)}
    theirs = FP8BlockDequantizer(targets=["a"], dtype=torch.float32).process(dict(tensors))["a.weight"]
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert torch.equal(dense(config, tensors), theirs)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_may_have_one_scale(shape: tuple[int, ...]) -> None:
    weight = random(8, 16).to(torch.float8_e4m3fn)
    tensors = {"a.weight": weight, "a.weight_scale_inv": torch.full(shape, 0.5), "a.activation_scale": torch.ones(())}
    assert torch.equal(dense({"quant_method": "fp8"}, tensors), weight.float() * 0.5)


def test_fp8_checkpoints_may_hold_experts_of_four_bits() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    scale = torch.randint(120, 130, (64, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert torch.equal(dense(config, {"a.weight": weight, "a.scale": scale}), theirs)


@pytest.mark.parametrize("inside", [True, False])
def test_a_config_that_names_experts_of_four_bits_counts_their_bytes(inside: bool) -> None:
    own: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    kind = {"expert_dtype": "fp4"}
    config = {"quantization_config": own | kind} if inside else {"quantization_config": own, **kind}
    made = quantization_of(config, Path("m"))
    assert made is not None
    expert, dense_part = made.format_of("model.layers.1.mlp.experts.0.up_proj"), made.format_of("model.layers.1.attn.q")
    assert expert is not None and expert.stored_bytes(256, 512, 2) == 256 * (256 + 16)
    assert dense_part is not None and dense_part.stored_bytes(256, 512, 2) == 256 * 512 + 4 * 2 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_as_transformers_dequantizes_it(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 24, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 24, 3), dtype=torch.uint8)
    tensors = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales, "e.gate_up_proj_bias": random(2, 24)}
    ours = dense({"quant_method": "mxfp4"}, tensors, "e.gate_up_proj", dtype)
    assert torch.equal(ours, convert_moe_packed_tensors(blocks, scales, dtype=dtype))


def test_values_by_table_are_those_of_torch() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        values = every.view(dtype)
        assert torch.equal(eight_bits(values).nan_to_num(), values.to(torch.float32).nan_to_num())
    assert eight_bits(every[127:].view(torch.float8_e4m3fn)).isnan().sum() == 2  # those that are not numbers stay so
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    both = torch.cat([table, -table])
    expected = torch.stack([both[(every & 15).long()], both[(every >> 4).long()]], dim=-1).flatten()
    assert torch.equal(four_bits(every, e2m1=True), expected)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "weights", "scale_shape"),
    [
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}, (1,)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, (32, 1)),
        ("naive-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 16}, (32, 4)),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 24]}, (2, 3)),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, (32, 1)),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}, (32, 1)),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
         (32, 4)),
    ],
)  # fmt: skip
def test_scaled_values_are_as_compressed_tensors_makes_them(
    form: str, weights: dict[str, Any], scale_shape: tuple[int, ...], scale_dtype: torch.dtype
) -> None:
    kind = torch.float8_e4m3fn if weights["type"] == "float" else torch.int8
    values = (random(32, 64) * 20).to(kind)
    local = {"weight": values, "weight_scale": (random(*scale_shape, seed=1).abs() + 0.01).to(scale_dtype)}
    if not weights.get("symmetric", True):
        local["weight_zero_point"] = (random(*scale_shape, seed=2) * 20).to(torch.int8)
    theirs = _decompressed(form, weights, local)
    ours = dense(scheme_config(form, weights), {f"a.{name}": t for name, t in local.items()})
    assert torch.equal(ours, theirs.float())


def test_nvfp4_is_as_compressed_tensors_makes_it() -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    local = {
        "weight_packed": torch.randint(0, 256, (32, 24), dtype=torch.uint8),
        "weight_scale": (random(32, 3).abs() * 100).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1234.5]),
    }
    theirs = _decompressed("nvfp4-pack-quantized", weights, local)
    config = scheme_config("nvfp4-pack-quantized", weights, input_activations={"num_bits": 4, "type": "float"})
    tensors = {f"a.{name}": t for name, t in local.items()} | {"a.input_global_scale": torch.ones(1)}
    assert torch.equal(dense(config, tensors, dtype=torch.bfloat16), theirs)


def test_mxfp4_of_compressed_tensors() -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    local = {
        "weight_packed": torch.randint(0, 256, (32, 32), dtype=torch.uint8),
        "weight_scale": torch.randint(118, 130, (32, 2), dtype=torch.uint8),
    }
    theirs = _decompressed("mxfp4-pack-quantized", weights, local)
    ours = dense(scheme_config("mxfp4-pack-quantized", weights), {f"a.{n}": t for n, t in local.items()})
    assert torch.equal(ours, theirs.float())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [16, -1])
def test_pack_quantized_is_as_compressed_tensors_makes_it(bits: int, symmetric: bool, group: int) -> None:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    groups = 1 if group == -1 else 48 // group
    low = -(1 << (bits - 1))
    local = {"weight": random(40, 48), "weight_scale": random(40, groups, seed=1).abs() / -low + 0.01}
    if not symmetric:
        local["weight_zero_point"] = torch.randint(low, -low, (40, groups), dtype=torch.int8)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    packed = compressor.compress(local, scheme)
    theirs = compressor.decompress(packed, scheme)["weight"]
    ours = dense(scheme_config("pack-quantized", weights), {f"a.{name}": t for name, t in packed.items()})
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["sym", "asym", "order", "wide", "asym_order", "two"])
def test_gptq_is_as_autogptq_makes_it(name: str) -> None:
    """Golden tensors: packed by AutoGPTQ 0.7.1, whose own layer unpacked them."""
    golden = load_file(GOLDEN)
    tensors = {f"a.{part}": golden[f"gptq.{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
    bits = {"wide": 8, "two": 2}.get(name, 4)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "desc_act": "order" in name}
    weight = golden[f"gptq.{name}.weight"]
    assert torch.equal(dense(config, tensors, dtype=torch.float16), weight)
    plus_one = tensors | {"a.qzeros": _plus_one(tensors["a.qzeros"], bits)}  # the second version keeps them as they are
    assert torch.equal(dense({**config, "checkpoint_format": "gptq_v2"}, plus_one, dtype=torch.float16), weight)
    if "order" not in name:
        del tensors["a.g_idx"]
        assert torch.equal(dense(config, tensors, dtype=torch.float16), weight)


def test_awq_is_as_autoawq_makes_it() -> None:
    """Golden tensors: packed and unpacked by AutoAWQ 0.2.9."""
    golden = load_file(GOLDEN)
    tensors = {f"a.{part}": golden[f"awq.{part}"] for part in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    assert torch.equal(dense(config, tensors, dtype=torch.float16), golden["awq.weight"])


def test_a_mixture_is_what_its_tensors_are() -> None:
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": fp8, "format": "float-quantized"},
            "group_1": {"targets": [r"re:.*experts\.\d+\..*"], "weights": int4, "format": "pack-quantized"},
        },
        "ignore": ["re:.*gate$"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }
    found = stored(
        config,
        {
            "m.attn.weight": random(4, 16).to(torch.float8_e4m3fn),
            "m.attn.weight_scale": random(4, 1),
            "m.attn.k_scale": torch.ones(1),
            "m.experts.0.up.weight_packed": torch.zeros(4, 2, dtype=torch.int32),
            "m.experts.0.up.weight_scale": random(4, 1),
            "m.gate.weight": random(4, 4),
        },
    )
    formats = {name: weight.format for name, weight in found.items()}
    assert formats == {
        "m.attn.weight": "fp8_scaled",
        "m.attn.k_scale": "dense",
        "m.experts.0.up.weight": "int4",
        "m.gate.weight": "dense",
    }


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16}
_F8 = torch.zeros(128, 256).to(torch.float8_e4m3fn)


def _gptq(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    golden = load_file(GOLDEN)
    return {f"a.{part}": golden[f"gptq.sym.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")} | {
        f"a.{name}": tensor for name, tensor in changed.items()
    }


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (_FP8, {"a.weight": _F8}, "a.weight is stored as F8_E4M3 without scales"),
        (_FP8, {"a.weight_scale_inv": random(1, 2)}, "a.weight, the values of a weight, is missing"),
        (_FP8, {"a.weight": _F8, "a.weight_scale_inv": random(2, 1)}, r"a.weight_scale_inv has shape \[2, 1\]"),
        (_FP8, {"a.weight": random(128, 256), "a.weight_scale_inv": random(1, 2)}, "a.weight is stored as F32"),
        ({"quant_method": "mxfp4"}, {"e.up_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)}, "up_scales, .* mis"),
        ({"quant_method": "mxfp4"}, {"e.up_scales": torch.zeros(2, 4, 1, dtype=torch.uint8)}, "up_blocks, .* mis"),
        (_GPTQ, _gptq(scales=torch.zeros(2, 64, dtype=torch.float16)), r"a.scales has shape \[2, 64\], expected \[4"),
        ({**_GPTQ, "group_size": 32}, _gptq(), r"a.scales has shape \[4, 64\], expected \[2, 64\] for 64 inputs"),
        (_GPTQ, {"a.scales": random(4, 64)}, "a.scales belongs to a weight whose values are missing"),
        (_GPTQ, _gptq(g_idx=torch.zeros(7, dtype=torch.int32)), r"a.g_idx has shape \[7\]"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_belong_together(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(MismatchError, match=message) as caught:
        stored(config, tensors)
    assert "m/a.safetensors: " in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "gptq", "bits": 3, "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
        {"quant_method": "fp8", "weight_block_size": 128},
        scheme_config("marlin-24", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
        scheme_config("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 0}),
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_schemes_that_are_not_read_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"^m"):
        quantization_of({"quantization_config": config}, Path("m"))


_GROUP = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "group_size": 32}}


@pytest.mark.parametrize(
    "config",
    [
        "fp8",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": 3},
        {"quant_method": "gptq", "bits": [4], "group_size": 128},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": ["x"]},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:(": {}}},
        {"quant_method": "compressed-tensors", "config_groups": 7},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": "x"}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {**_GROUP, "weights": [4]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {**_GROUP, "targets": ["re:("]}}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}, "ignore": ["lm_head", "re:["]},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}, "sparsity_config": "x"},
    ],
)
def test_values_of_the_wrong_kind_are_refused_in_one_line(config: Any) -> None:
    with pytest.raises(UsageError, match=r"^m") as caught:
        quantization_of({"quantization_config": config}, Path("m"))
    assert "quant" in str(caught.value) and "\n" not in str(caught.value)


def _decompressed(form: str, weights: dict[str, Any], local: dict[str, torch.Tensor]) -> torch.Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)
    made: torch.Tensor = compressor.decompress(dict(local), scheme)["weight"]
    return made


def _plus_one(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, 32, bits)
    mask = (1 << bits) - 1
    values = (words.long()[..., None] >> shifts) & mask
    return (((values + 1) & mask) << shifts).sum(-1).to(torch.uint32).view(torch.int32)
