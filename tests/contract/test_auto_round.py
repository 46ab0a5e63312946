"""Checkpoints that AutoRound writes are served as its own layers unpack them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetool.base.errors import UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.models.weights.quantization_config import quantization_of
from tests import families
from tests.auto_round_writer import EXPORTS
from tests.contract.test_quantized import written as written_as
from tests.greedy import generated, prompts, served

PROMPTS = prompts(3)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Path:
    """A folder with a checkpoint per export and its twin."""
    pytest.importorskip("auto_round")
    folder = tmp_path_factory.mktemp("auto-round")
    widths = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 32, "intermediate_size": 64}
    families.save("qwen3_moe", folder / "dense", num_hidden_layers=2, num_experts=4, **widths)
    for file in reference.glob("token*"):
        shutil.copy(file, folder / "dense")
    command = [sys.executable, "-m", "tests.auto_round_writer", str(folder / "dense"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_are_served_as_auto_round_unpacks_them(written: Path, name: str) -> None:
    path, export = written / name, EXPORTS[name]
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config.get("packing_format")) == (export.method, export.packing)
    theirs = load_full(Checkpoint.open(written / f"{name}-twin"), torch.float32)
    ours = load_full(Checkpoint.open(path), torch.float32)
    expected, found = theirs.model.state_dict(), ours.model.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    assert ours.spec.all_experts_bytes < 0.5 * theirs.spec.all_experts_bytes
    greedy = generated(theirs.model, PROMPTS)
    for policy in ("lru", "promoe"):
        greedy.require_same(served(path, policy, PROMPTS))


def test_modules_have_their_own_bits(written: Path) -> None:
    path = written / "mixed_bits"
    quantization = quantization_of(json.loads((path / "config.json").read_text()), path)
    assert quantization is not None
    names = {module: quantization.format_of(f"model.layers.1.{module}") for module in ("mlp.gate", "self_attn.q_proj")}
    expert = quantization.format_of("model.layers.1.mlp.experts.3.up_proj")
    assert names["mlp.gate"] is None
    assert {getattr(names["self_attn.q_proj"], "bits", 0), getattr(expert, "bits", 0)} == {4, 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotation_config": {"kind": "hadamard"}}, "also rotates weights"),
        ({"packing_format": "auto_round:mlx"}, r"4 bits \(int, groups of 32\) and stored as auto_round:mlx"),
        ({"bits": 3}, "to 3 bits in groups of 32"),
        ({"bits": 4.0}, r"to 4\.0 bits in groups of 32"),
        ({"group_size": True}, "to 4 bits in groups of True"),
        ({"extra_config": {"lm_head": {"data_type": "mx_fp"}}}, r"4 bits \(mx_fp, groups of 32\)"),
        ({"extra_config": ["lm_head"]}, "of the wrong kind"),
    ],
)
def test_other_exports_are_refused(change: dict[str, object], message: str) -> None:
    own = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    with pytest.raises(UsageError, match=message):
        quantization_of({"quantization_config": own | change}, Path("m"))


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (
            "qwen3_moe-nvfp4",
            {"packing_format": "auto_round:llm_compressor", "bits": 4, "group_size": 16, "data_type": "nv_fp"},
        ),
        (
            "qwen3_moe-fp8_channel",
            {"packing_format": "auto_round:fp8_static", "bits": 8, "group_size": -1, "data_type": "fp"},
        ),
    ],
)
def test_layouts_of_compressed_tensors_are_read(name: str, own: dict[str, object], tmp_path: Path) -> None:
    """AutoRound needs data for these exports; their tensors have the names that compressed-tensors gives."""
    path, twin = written_as(name, tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "auto-round", **own}
    (path / "config.json").write_text(json.dumps(config))
    expected = load_full(Checkpoint.open(twin), torch.float32).model.state_dict()
    found = load_full(Checkpoint.open(path), torch.float32).model.state_dict()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_patterns_choose_modules() -> None:
    own = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
    changed = {
        r".*layers\.0.*": {"bits": 8},
        "norm": {},
        "shared": {"bits": 2},
        "model.layers.1.mlp.gate": {"bits": 16, "data_type": "float"},
    }
    quantization = quantization_of({"quantization_config": own | {"extra_config": changed}}, Path("m"))
    assert quantization is not None
    found = [quantization.format_of(f"model.layers.{layer}.mlp.gate") for layer in range(3)]
    assert [getattr(format, "bits", None) for format in found] == [8, None, 4]
    shared = quantization.format_of("model.layers.2.mlp.shared_expert.up_proj")
    assert getattr(shared, "bits", None) == 2
