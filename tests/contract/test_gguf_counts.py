"""Layers, prediction blocks and experts of a GGUF file are those of its tensors, whatever its header counts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moetool.base.errors import MismatchError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.families.text_part import build_empty
from tests import families
from tests.greedy import prompts, served
from tests.logs import warnings

gguf = pytest.importorskip("gguf")
from tests.gguf_models import rewritten  # noqa: E402  # needs the package

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
ARCHITECTURES = {
    "qwen3moe": "qwen3moe",
    "glm4moe": "glm4moe",
    "deepseek2-sigmoid": "deepseek2",
    "lfm2moe": "lfm2moe",
    "ernie4_5-moe": "ernie4_5-moe",
}
"""Architecture of golden files, each of two layers and four experts."""


def _changed(name: str, to: Path, tensors: Mapping[str, Any] | None = None, **counts: int | None) -> Path:
    """A golden file with other counts in its header, by key below the architecture."""
    values = {f"{ARCHITECTURES[name]}.{key}": value for key, value in counts.items()}
    return rewritten(GOLDEN / f"{name}.gguf", to / "m.gguf", values, tensors)


def _block(name: str, number: int, *, predicting: bool) -> dict[str, Any]:
    """The tensors of a golden file's last layer as a further block."""
    found = {}
    for tensor in gguf.GGUFReader(GOLDEN / f"{name}.gguf").tensors:
        if tensor.name.startswith("blk.1."):
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype("float32")
            found[tensor.name.replace("blk.1.", f"blk.{number}.")] = numbers
    if predicting:
        found[f"blk.{number}.nextn.eh_proj.weight"] = numbers
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_prediction_block_that_the_file_lacks_takes_no_layer(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = GOLDEN / f"{name}.gguf"
    expected = Checkpoint.open(whole).spec
    assert not warnings(caplog)
    path = _changed(name, tmp_path, nextn_predict_layers=1)
    assert Checkpoint.open(path).spec.layer_ids_L == expected.layer_ids_L
    (said,) = warnings(caplog)
    assert "1 layers (block_count 2, nextn_predict_layers 1), its tensors 2" in said and str(path) in said
    assert served(path, "lru", prompts(3)) == served(whole, "lru", prompts(3))


@pytest.mark.parametrize("name", ["qwen3moe", "glm4moe", "deepseek2-sigmoid"])
@pytest.mark.parametrize(("blocks", "predicting"), [(3, 1), (3, None), (2, 1), (2, None)])
def test_only_a_block_with_tensors_of_prediction_is_one(
    name: str, blocks: int, predicting: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The header counts it within block_count, beside it, or not at all."""
    block = _block(name, 2, predicting=True)
    path = _changed(name, tmp_path, block, block_count=blocks, nextn_predict_layers=predicting)
    assert Checkpoint.open(path).spec.layer_ids_L == Checkpoint.open(GOLDEN / f"{name}.gguf").spec.layer_ids_L
    assert len(warnings(caplog)) == (blocks - (predicting or 0) != 2)
    assert served(path, "lru", prompts(3)) == served(GOLDEN / f"{name}.gguf", "lru", prompts(3))


def test_a_layer_that_the_header_does_not_count_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _changed("qwen3moe", tmp_path, _block("qwen3moe", 2, predicting=False), block_count=2)
    assert Checkpoint.open(path).spec.layer_ids_L == (0, 1, 2)
    assert len(warnings(caplog)) == 1


def test_layers_that_the_tensors_lack_are_refused(tmp_path: Path) -> None:
    further, early = _block("qwen3moe", 3, predicting=False), _block("qwen3moe", 0, predicting=True)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({}, 3, r"counts 3 layers .* holds tensors of 2"),
        ({}, 2**31, "counts 2147483648 layers"),
        (further, 3, r"blk\.2 is missing"),
        (early, 2, r"blk\.0 is a prediction block"),
    ]
    for tensors, blocks, says in cases:
        path = _changed("qwen3moe", tmp_path, tensors, block_count=blocks)
        with pytest.raises(MismatchError, match=says) as caught:
            Checkpoint.open(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("count", [2, 8])
def test_experts_are_counted_from_routers_and_stacks(
    name: str, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _changed(name, tmp_path, expert_count=count)
    expected = Checkpoint.open(GOLDEN / f"{name}.gguf").spec
    assert Checkpoint.open(path).spec.num_experts_L == expected.num_experts_L
    (said,) = warnings(caplog)
    assert f"{count} experts (expert_count), its tensors 4" in said
    assert served(path, "lru", prompts(3)) == served(GOLDEN / f"{name}.gguf", "lru", prompts(3))


@pytest.mark.parametrize("leaf", ["ffn_gate_inp", "ffn_up_exps"])
def test_tensors_of_different_numbers_of_experts_are_refused(leaf: str, tmp_path: Path) -> None:
    name = f"blk.1.{leaf}.weight"
    numbers = _block("qwen3moe", 1, predicting=False)[name][:3]
    with pytest.raises(MismatchError, match=rf"{leaf}\.weight is of [34] experts, expected [34] as blk\."):
        Checkpoint.open(_changed("qwen3moe", tmp_path, {name: numbers}))


def test_errors_of_transformers_name_the_file_that_the_config_comes_from(tmp_path: Path) -> None:
    values = {"qwen3moe.attention.layer_norm_rms_epsilon": 1}
    path = rewritten(GOLDEN / "qwen3moe.gguf", tmp_path / "m.gguf", values, None)
    with pytest.raises(MismatchError, match="rms_norm_eps") as caught:
        Checkpoint.open(path)
    assert str(caught.value).startswith(f"cannot read {path}: ")
    config = families.config("qwen3_moe", hidden_act="unknown")
    with pytest.raises(UsageError, match=rf"cannot build a qwen3_moe model from {path}: "):
        build_empty(config, path, torch.float32)


def test_a_tensor_that_the_model_of_the_header_lacks_is_refused(tmp_path: Path) -> None:
    """Without it, a model of other logits would run."""
    with pytest.raises(MismatchError, match=r"shared_experts.*, which the model of its header lacks") as caught:
        _ = Checkpoint.open(_changed("ernie4_5-moe", tmp_path, expert_shared_count=0)).spec
    assert str(tmp_path) in str(caught.value)


def test_a_library_that_a_model_needs_is_not_called_a_wrong_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needs(*_: Any, **__: Any) -> None:
        raise ImportError("Qwen3Moe requires the kernels library but it was not found")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", needs)
    with pytest.raises(UsageError, match=r"requires the kernels library.*; install what is missing"):
        build_empty(families.config("qwen3_moe"), tmp_path / "config.json", torch.float32)
