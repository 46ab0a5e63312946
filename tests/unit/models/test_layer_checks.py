"""Layers fit together, and with the experts in safetensors files, or the model is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from tests import families
from tests.logs import warnings
from tests.refusals import refused

EXPERTS = {"qwen3_moe": "num_local_experts", "deepseek_v3": "n_routed_experts"}


def _model(folder: Path, family: str = "qwen3_moe", **changed: Any) -> Path:
    """A tiny model of three layers and eight experts, with other values in its config.json."""
    families.save(family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def _add(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "changed", "module"),
    [
        ("longcat_flash", {"qk_nope_head_dim": 9}, "model.layers.0.self_attn.0"),
        ("hy_v4", {"index_head_dim": 16, "qk_rope_head_dim": 64}, "indexer"),
        ("nemotron_h", {"chunk_size": 0}, "model.layers.0.mixer"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "x", "num_shared_experts": 1}, "model.layers.1.mlp"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(
    family: str, changed: dict[str, Any], module: str, tmp_path: Path
) -> None:
    """transformers accepts these configs, and fails in the first forward."""
    families.require_known(family)
    (tmp_path / "config.json").write_text(json.dumps(families.config(family).to_dict() | changed))
    with refused(MismatchError, tmp_path / "config.json", module):
        _ = Checkpoint(tmp_path, weights=False).spec


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_a_kernel_that_takes_no_meta_tensors_is_no_fault_of_the_config(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """causal-conv1d, where it is installed, takes tensors of a GPU only."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    def kernel(*args: Any, **options: Any) -> None:
        raise error("Expected x.is_cuda() to be true, but got false.")

    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_fn", kernel, raising=False)
    (tmp_path / "config.json").write_text(json.dumps(families.config("qwen3_next").to_dict()))
    assert Checkpoint(tmp_path, weights=False).spec.num_layers


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("predicting", [0, 1])
def test_a_config_of_fewer_layers_than_its_weights_is_refused(family: str, predicting: int, tmp_path: Path) -> None:
    """A count of prediction blocks does not hide an ordinary layer."""
    _model(tmp_path, family, num_hidden_layers=2, num_nextn_predict_layers=predicting)
    with refused(MismatchError, "model.layers.2", "2") as caught:
        _ = Checkpoint.open(tmp_path).spec
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    assert Checkpoint.open(tmp_path, weights=False).spec.layer_ids_L[-1] == 1


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("predicting", [0, 1, 2])
def test_a_prediction_block_is_no_layer(
    family: str, predicting: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds tensors that layers lack, whatever the config counts."""
    _model(tmp_path, family, num_nextn_predict_layers=predicting)
    stored = load_file(tmp_path / "model.safetensors")
    block = {name.replace(".2.", ".3.", 1): value for name, value in stored.items() if ".layers.2." in name}
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    _add(tmp_path, {**block, **{f"model.layers.3.{name}.weight": torch.ones(4) for name in names}})
    assert Checkpoint.open(tmp_path).spec.layer_ids_L[-1] == 2
    assert not warnings(caplog)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("count", [4, 16])
def test_a_config_of_other_experts_than_its_weights_is_refused(family: str, count: int, tmp_path: Path) -> None:
    """With the headers of the files alone, before a plan is made of the wrong count."""
    _model(tmp_path, family, **{EXPERTS[family]: count})
    with pytest.raises(MismatchError, match=rf"hold 8 experts of model\.layers\.\d\.mlp\.experts, expected {count} "):
        _ = Checkpoint.open(tmp_path).spec


def test_experts_with_a_gap_in_their_numbers_are_refused(tmp_path: Path) -> None:
    """As after pruning. transformers stacks as many as the config counts, whatever their numbers."""
    file = _model(tmp_path) / "model.safetensors"
    stored = load_file(file)
    save_file({name.replace(".experts.5.", ".experts.8."): value for name, value in stored.items()}, file)
    with refused(MismatchError, "expert 8", "model.layers.0.mlp.experts", "0", "7"):
        _ = Checkpoint.open(tmp_path).spec


def test_weights_that_layers_do_not_take_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _model(tmp_path)
    _ = Checkpoint.open(tmp_path).spec
    assert not warnings(caplog)
    _add(tmp_path, {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)})
    _ = Checkpoint.open(tmp_path).spec
    (said,) = warnings(caplog)
    assert "ignores 1 weights" in said and "model.layers.1.self_attn.q_proj.bias" in said and str(tmp_path) in said
