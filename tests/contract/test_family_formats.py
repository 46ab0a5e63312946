"""Every family with one tensor per expert in a file is read and served in every weight format."""

from pathlib import Path

import pytest
import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.models.tested_formats import BY_EXPERT, BY_EXPERT_FORMATS
from tests import families, quantized
from tests.contract.test_quantized import AWQ, FP8_BLOCK, FP8_CHANNEL, GPTQ, INT4, NVFP4
from tests.greedy import generated, prompts, served
from tests.quantized import Writer, compressed, compressed_config, where_whole

PROMPTS = prompts(2)
SYMMETRIC = {**INT4, "symmetric": True}
FORMATS = {
    "fp8_block": (FP8_BLOCK, where_whole(quantized.fp8_block(16), 16)),
    "fp8_scaled": (compressed_config("float-quantized", FP8_CHANNEL), compressed("float-quantized", FP8_CHANNEL)),
    "nvfp4": (compressed_config("nvfp4-pack-quantized", NVFP4), compressed("nvfp4-pack-quantized", NVFP4)),
    "gptq": ({**GPTQ, "desc_act": False}, quantized.gptq(act_order=False)),
    "awq": (AWQ, quantized.awq()),
    "int4": (compressed_config("pack-quantized", SYMMETRIC), compressed("pack-quantized", SYMMETRIC)),
}


def _experts(writer: Writer, name: str) -> Writer | None:
    return writer if ".experts." in name else None


def _written(family: str, format: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint with experts in a format, and its twin."""
    config, writer = FORMATS[format]
    if not (folder / "dense").exists():
        families.save(family, folder / "dense", moe_intermediate_size=32)
    twin = quantized.quantize(folder / "dense", folder / format, config, lambda name: _experts(writer, name))
    return folder / format, twin


def test_all_formats_of_the_table_are_here() -> None:
    assert set(BY_EXPERT_FORMATS) == FORMATS.keys()


@pytest.mark.parametrize("family", BY_EXPERT)
def test_experts_in_slots_are_those_of_the_writer(family: str, tmp_path: Path) -> None:
    for format in FORMATS:
        path, twin = _written(family, format, tmp_path)
        theirs = load_full(Checkpoint.open(twin), torch.float32)
        ours = load_lazy(Checkpoint.open(path), torch.float32)
        assert ours.files is not None
        identities = getattr(ours.model.config, "zero_expert_num", 0)  # experts without weights, the last ones
        for layer in ours.layers:
            stored = slice(layer.num_experts - identities)
            for name, stacked in ours.files.stacked(layer, torch.float32).items():
                expected = theirs.layers[layer.index].experts.get_parameter(name)
                assert torch.equal(stacked[stored], expected[stored]), (format, name)
        assert ours.spec.all_experts_bytes < 0.5 * theirs.spec.all_experts_bytes
        ours.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", BY_EXPERT)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    for format in FORMATS:
        path, twin = _written(family, format, tmp_path)
        expected = generated(load_full(Checkpoint.open(twin), torch.float32).model, PROMPTS)
        expected.require_same(served(path, "lru", PROMPTS))
