"""Linear layers outside the experts that stay packed on a CPU: their weights, products and bytes."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from moetool.kernels.cpu import scaled_weight
from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.int4 import tile_rows
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.models import checkpoint as checkpoints
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.models.packed_linear import PackedLinear
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from tests import families
from tests.quantized import MXFP4, awq, compressed, compressed_config, fp8_block, gptq, mxfp4, quantize

gguf = pytest.importorskip("gguf")
from tests.gguf_models import written  # noqa: E402  # needs the package

pytestmark = [
    pytest.mark.skipif(not tile_rows(), reason="torch has no kernel for four bits on this processor"),
    pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here"),
]
_SIZE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
_TINY = {"num_hidden_layers": 1, "num_experts": 2, "moe_intermediate_size": 512, "vocab_size": 512}
_INT8 = {"num_bits": 8, "symmetric": True, "type": "int", "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def _quantized(config: dict[str, Any], writer: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        families.save("qwen3_moe", folder / "dense", **_SIZE, **_TINY)
        quantize(folder / "dense", folder / "m", config, lambda name: None if "lm_head" in name else writer)
        return folder / "m"

    return make


def _blocks(kind: str) -> Callable[[Path], Path]:
    types = dict.fromkeys(("gate", "up", "down", "dense"), kind)
    return lambda folder: written("qwen3_moe", folder, types, 512, **{**_SIZE, **_TINY})[0]


FORMATS = {
    "fp8_block": (_quantized(_BLOCK, fp8_block(128)), 4),
    "int8": (_quantized(compressed_config("int-quantized", _INT8), compressed("int-quantized", _INT8)), 4),
    "int4": (_quantized(compressed_config("pack-quantized", _INT4), compressed("pack-quantized", _INT4)), 4),
    "nvfp4": (
        _quantized(compressed_config("nvfp4-pack-quantized", _NVFP4), compressed("nvfp4-pack-quantized", _NVFP4)),
        4,
    ),
    "mxfp4": (_quantized(compressed_config("mxfp4-pack-quantized", MXFP4), mxfp4), 4),
    "gptq": (_quantized(_GPTQ, gptq(act_order=False, group=32)), 4),
    "awq": (_quantized(_AWQ, awq(32)), 4),
    "q8_0": (_blocks("Q8_0"), 5),
    "q4_k": (_blocks("Q4_K"), 5),
}


@pytest.mark.parametrize("name", FORMATS)
def test_they_hold_and_multiply_the_weights_of_the_format(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No further off than a weight rounded to bfloat16, with the bytes that the checkpoint counts."""
    make, expected_count = FORMATS[name]
    path = make(tmp_path)
    with Checkpoint.open(path) as checkpoint:
        packed = load_lazy(checkpoint, torch.bfloat16, products=True).model
        exact, plain = (load_lazy(checkpoint, dtype).model for dtype in (torch.float32, torch.bfloat16))
        whole = load_lazy(checkpoint, torch.float32, products=True).model
        assert not any(isinstance(module, PackedLinear) for module in whole.modules())
        resident, unpacked = (
            sum(weight.nbytes for weight in model.parameters() if not weight.is_meta) for model in (packed, plain)
        )
        saved = checkpoint.dense_bytes(torch.bfloat16, products=False) - checkpoint.dense_bytes(torch.bfloat16)
        assert 0 < saved == unpacked - resident
        if path.is_dir():  # a GGUF file has a header
            (tmp_path / "alone").mkdir()
            shutil.copy(path / "config.json", tmp_path / "alone")
            estimate = Checkpoint.open(tmp_path / "alone", weights=False).dense_bytes(torch.bfloat16)
            assert estimate - 2 * 512 * 512 == pytest.approx(resident, rel=0.05)  # one is unpacked at a time
    found = {key: module for key, module in packed.named_modules() if isinstance(module, PackedLinear)}
    assert len(found) == expected_count
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    for key, module in found.items():
        weight = exact.get_submodule(key).weight
        assert torch.equal(module.weight, weight.bfloat16())
        expected = x.double() @ weight.double().T
        for rows in (1, 5, 40):
            monkeypatch.setattr(scaled_weight, "MOST_UNPACKED", 2**24 if rows < 40 else 2**16)
            with torch.inference_mode():
                made = module(x[None, :rows])[0].double()
            theirs = functional.linear(x[:rows], weight.bfloat16()).double()
            errors = [float((product - expected[:rows]).norm()) for product in (made, theirs)]
            if (
                name != "nvfp4"
            ):  # its library rounds to bfloat16, its kernel does not (tests/unit/kernels/cpu/test_scaled_weight.py)
                assert errors[0] <= errors[1] * (1.5 if name in ("int4", "gptq", "awq") else 1.01)
        assert torch.equal(module(x[3:4])[0], module(x[:5])[3])


def test_packed_linears_are_not_counted_in_float32_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoint.open(_blocks("Q8_0")(tmp_path)) as checkpoint:
        before, plain = (checkpoint.dense_bytes(torch.bfloat16, products=products) for products in (True, False))
        (linear, *_) = checkpoint.packed_linears(torch.bfloat16)
        monkeypatch.setattr(checkpoints, "wide_parameters", lambda model, dtype: (f"{linear}.",))
        wider = 2 * checkpoint.skeleton.get_submodule(linear).weight.numel()
        assert checkpoint.dense_bytes(torch.bfloat16) == before
        assert checkpoint.dense_bytes(torch.bfloat16, products=False) == plain + wider


def test_stats_have_the_bytes_stored_and_in_memory(reference: Path, tmp_path: Path) -> None:
    types = dict.fromkeys(("gate", "up", "down", "dense"), "Q8_0")
    sizes = {**_SIZE, **_TINY, "vocab_size": 4096}
    path, _ = written("qwen3_moe", tmp_path, types, 512, reference, **sizes)
    dense = [tensor for tensor in gguf.GGUFReader(path).tensors if "_exps" not in tensor.name]
    with Checkpoint.open(path) as checkpoint:
        options = ServeOptions(dtype="bfloat16", kv_tokens=64, prefill_chunk=16)
        engine = build_engine(checkpoint, options=options, policy="lru")
        found = engine.stats()["dense_bytes"]
        engine.close()
    assert found["stored"] == sum(int(tensor.n_bytes) for tensor in dense)
    numbers = {tensor.name: int(tensor.n_elements) for tensor in dense}
    unpacked = 2 * numbers["token_embd.weight"]
    packed = sum(count * 34 // 32 for name, count in numbers.items() if "attn_" in name and "norm" not in name)
    packed += numbers["output.weight"] * 34 // 32
    assert found["memory"] == pytest.approx(unpacked + packed, rel=0.01)


def test_groups_of_uneven_size_are_unpacked_and_counted_so(tmp_path: Path) -> None:
    """No known writer makes them."""
    config = {**_GPTQ, "desc_act": True}

    def uneven(name: str, weight: torch.Tensor) -> Any:
        tensors, meant = gptq(act_order=True, group=32)(name, weight)
        if "q_proj" in name:
            tensors[name.replace("weight", "g_idx")][:2] = torch.tensor([0, 0], dtype=torch.int32)
        return tensors, meant

    path = _quantized(config, uneven)(tmp_path)
    with Checkpoint.open(path) as checkpoint:
        loaded = load_lazy(checkpoint, torch.bfloat16, products=True)
        found = {key for key, module in loaded.model.named_modules() if isinstance(module, PackedLinear)}
        assert found == {*checkpoint.packed_linears(torch.bfloat16)}
        assert found == {f"model.layers.0.self_attn.{leaf}_proj" for leaf in "kvo"}


def test_tied_and_small_layers_are_unpacked(tmp_path: Path) -> None:
    types = dict.fromkeys(("gate", "up", "down", "dense"), "Q8_0")
    path, _ = written("qwen3_moe", tmp_path, types, 64)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.packed_linears(torch.bfloat16) == {}
        loaded = load_lazy(checkpoint, torch.bfloat16, products=True)
        assert not any(isinstance(module, PackedLinear) for module in loaded.model.modules())
