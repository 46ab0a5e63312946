"""Experts served as they are packed: the same bits under every budget and policy, and the model's own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.int4 import tile_rows
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.kernels.cpu.scaled_weight import ScaledWeight
from moetool.models.checkpoint import Checkpoint
from tests import families
from tests.quantized import Writer, awq, compressed, compressed_config, fp8_block, gptq, mxfp4_experts, quantize
from tests.served_logits import require_near, served_logits

pytestmark = [
    pytest.mark.skipif(not tile_rows(), reason="torch has no kernel for four bits on this processor"),
    pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here"),
]


@pytest.fixture(scope="module")
def rounded(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with experts rounded to nearest."""
    path = tmp_path_factory.mktemp("rounded") / "model"
    form = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
    write, config = compressed("pack-quantized", form), compressed_config("pack-quantized", form)
    config["ignore"] = ["re:.*self_attn.*", "lm_head"]
    quantize(reference, path, config, lambda name: write if ".experts." in name else None)
    return path


def test_no_budget_and_no_policy_changes_a_bit(rounded: Path) -> None:
    whole = served_logits(rounded, 256, dtype=torch.bfloat16, products=True)
    for slots, seed in ((40, None), (9, 2)):
        assert torch.equal(served_logits(rounded, slots, dtype=torch.bfloat16, products=True, seed=seed), whole)


def test_they_come_as_near_to_the_model_as_unpacked_weights(rounded: Path) -> None:
    """In float32 nothing is multiplied packed; in bfloat16 both ways are as far from that as its own rounding."""
    exact, same = (served_logits(rounded, 256, dtype=torch.float32, products=products) for products in (False, True))
    assert torch.equal(same, exact)
    packed, unpacked = (served_logits(rounded, 256, dtype=torch.bfloat16, products=p) for p in (True, False))
    assert not torch.equal(packed, unpacked)
    errors = [float((found.float() - exact).norm() / exact.norm()) for found in (packed, unpacked)]
    assert errors[0] < 1.1 * errors[1] < 0.05


GROUP = 32
_ASYMMETRIC = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({**_GPTQ, "desc_act": False}, gptq(act_order=False, group=GROUP)),
    "gptq_act_order": ({**_GPTQ, "desc_act": True}, gptq(act_order=True, symmetric=False, group=GROUP)),
    "awq": (_AWQ, awq(GROUP)),
    "int4_asymmetric": (
        compressed_config("pack-quantized", _ASYMMETRIC),
        compressed("pack-quantized", _ASYMMETRIC),
    ),
}


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A tiny checkpoint of experts that the kernel takes, and the dense one that its writer means."""
    config, writer = FORMATS[request.param]
    families.save("qwen3_moe", tmp_path / "dense", hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    return tmp_path / "m", quantize(tmp_path / "dense", tmp_path / "m", config, lambda name: writer)


def test_other_formats_of_four_bits_stay_packed(written: tuple[Path, Path]) -> None:
    """No budget and no policy changes a bit, and logits are no further off than transformers' own in bfloat16 twice."""
    path, twin = written
    whole = served_logits(path, 24, dtype=torch.bfloat16, products=True, vocabulary=64)
    for slots, seed in ((5, None), (4, 2)):
        assert torch.equal(
            served_logits(path, slots, dtype=torch.bfloat16, products=True, seed=seed, vocabulary=64), whole
        )
    require_near(whole, twin)


def test_slots_of_other_formats_hold_the_weights_to_the_bit(written: tuple[Path, Path]) -> None:
    """Two values a byte and 9 bytes at most for each group of 32: a third of the unpacked weight."""
    path, _ = written
    with Checkpoint.open(path) as checkpoint:
        packed, unpacked = (checkpoint.expert_files(fastest=dtype) for dtype in (torch.bfloat16, torch.float32))
        alone = Checkpoint.open(path, weights=False).slot_bytes(torch.bfloat16)
        assert packed.slot_bytes == checkpoint.slot_bytes(torch.bfloat16) == pytest.approx(alone, rel=0.25)
        assert packed.slot_bytes < checkpoint.layers[0].form.num_elements * 4 / 4
        for layer in checkpoint.layers:
            expected = unpacked.stacked(layer, torch.float32)
            for name, found in packed.stacked(layer, torch.float32).items():
                assert torch.equal(found, expected[name])


_EIGHT = {"num_bits": 8, "symmetric": True}
_CHANNEL = {**_EIGHT, "type": "float", "strategy": "channel"}
_TENSOR = {**_EIGHT, "type": "float", "strategy": "tensor"}
_INT8 = {**_EIGHT, "type": "int", "strategy": "channel"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
SCALED: dict[str, tuple[dict[str, Any], Writer] | None] = {
    "fp8_block": (_BLOCK, fp8_block(128)),
    "fp8_channel": (compressed_config("float-quantized", _CHANNEL), compressed("float-quantized", _CHANNEL)),
    "fp8_tensor": (compressed_config("float-quantized", _TENSOR), compressed("float-quantized", _TENSOR)),
    "int8_channel": (compressed_config("int-quantized", _INT8), compressed("int-quantized", _INT8)),
    "nvfp4": (compressed_config("nvfp4-pack-quantized", _NVFP4), compressed("nvfp4-pack-quantized", _NVFP4)),
    "mxfp4": None,
}


@pytest.fixture(params=SCALED)
def scaled(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of experts large enough for the kernels, and the dense one that its writer means."""
    width, chosen = (576 if request.param == "mxfp4" else 512), SCALED[request.param]
    family = "gpt_oss" if chosen is None else "qwen3_moe"
    size = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2}
    families.save(family, tmp_path / "dense", **size, **({} if chosen is None else {"moe_intermediate_size": width}))
    if chosen is None:
        return tmp_path / "m", mxfp4_experts(tmp_path / "dense", tmp_path / "m")
    config, writer = chosen
    only = (
        (lambda name: writer if ".experts." in name else None) if request.param == "fp8_block" else lambda name: writer
    )
    return tmp_path / "m", quantize(tmp_path / "dense", tmp_path / "m", config, only)


def test_scaled_numbers_stay_as_they_are_stored(scaled: tuple[Path, Path]) -> None:
    """No budget and no policy changes a bit; slots take about the stored bytes, as the config alone says."""
    path, twin = scaled
    made = partial(served_logits, path, dtype=torch.bfloat16, products=True, vocabulary=64, kept=ScaledWeight)
    whole = made(16)
    for slots, seed in ((5, None), (4, 2)):
        assert torch.equal(made(slots, seed=seed), whole)
    require_near(whole, twin)
    with Checkpoint.open(path) as checkpoint:
        packed, unpacked = (checkpoint.expert_files(fastest=dtype) for dtype in (torch.bfloat16, torch.float32))
        alone = Checkpoint.open(path, weights=False).slot_bytes(torch.bfloat16)
        assert packed.slot_bytes == checkpoint.slot_bytes(torch.bfloat16) == pytest.approx(alone, rel=0.02)
        assert packed.slot_bytes == pytest.approx(packed.stored_bytes, rel=0.02)
        for layer in checkpoint.layers:
            expected = unpacked.stacked(layer, torch.float32)
            for name, found in packed.stacked(layer, torch.float32).items():
                assert torch.equal(found, expected[name].bfloat16().float())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
def test_with_scales_of_float16_the_config_alone_says_what_slots_take(name: str, tmp_path: Path) -> None:
    chosen = SCALED[name]
    assert chosen is not None
    config, writer = chosen

    def halved(weight_name: str, weight: torch.Tensor) -> Any:
        tensors, meant = writer(weight_name, weight)
        return {key: made.half() if "scale" in key else made for key, made in tensors.items()}, meant

    size = {"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1}
    families.save("qwen3_moe", tmp_path / "dense", **size)
    quantize(tmp_path / "dense", tmp_path / "m", config, lambda weight: halved if ".experts." in weight else None)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(raw | {"dtype": "float16"}))
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        files = checkpoint.expert_files(fastest=torch.bfloat16)
        alone = Checkpoint.open(tmp_path / "m", weights=False).slot_bytes(torch.bfloat16)
        assert files.slot_bytes == pytest.approx(alone, rel=0.02)
        assert (files.slot_bytes < 1.1 * files.stored_bytes) == (name == "fp8_block")


def test_what_is_no_number_is_not_read_as_one(tmp_path: Path) -> None:
    """FP8's NaN, which a damaged file may hold: all outputs of the expert are NaN, as with an unpacked weight some."""

    def broken(name: str, weight: torch.Tensor) -> Any:
        tensors, meant = fp8_block(128)(name, weight)
        if "experts.0.down" in name:
            tensors[name].view(torch.uint8)[5, 7] = 0xFF
        return tensors, meant

    families.save("qwen3_moe", tmp_path / "dense", hidden_size=512, moe_intermediate_size=512, num_hidden_layers=2)
    quantize(tmp_path / "dense", tmp_path / "m", _BLOCK, lambda name: broken if ".experts." in name else None)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        files, form = checkpoint.expert_files(fastest=torch.bfloat16), checkpoint.layers[0].form
        slot = torch.empty(files.slot_bytes, dtype=torch.uint8)
        for expert in (0, 1):
            files.read_into(expert, slot)
            made = form.compute(torch.ones(1, 512, dtype=torch.bfloat16), files.views(slot))
            assert bool(made.isnan().all()) == (expert == 0)


def test_groups_of_different_sizes_are_unpacked(tmp_path: Path) -> None:
    """A valid `g_idx` that no known writer makes."""
    config, writer = FORMATS["gptq_act_order"]

    def uneven(name: str, weight: torch.Tensor) -> Any:
        tensors, meant = writer(name, weight)
        index = next(tensor for key, tensor in tensors.items() if key.endswith("g_idx"))
        index[:] = 0
        return tensors, meant

    families.save("qwen3_moe", tmp_path / "dense", hidden_size=64, moe_intermediate_size=64, intermediate_size=64)
    quantize(tmp_path / "dense", tmp_path / "m", config, lambda name: uneven)
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        files = checkpoint.expert_files(fastest=torch.bfloat16)
        views = files.views(torch.empty(files.slot_bytes, dtype=torch.uint8))
        assert all(isinstance(view, torch.Tensor) for view in views)
        as_stored = checkpoint.expert_files().stacked(checkpoint.layers[0], torch.bfloat16)
        for name, found in files.stacked(checkpoint.layers[0], torch.bfloat16).items():
            assert torch.equal(found, as_stored[name])
