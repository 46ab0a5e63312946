"""A checkpoint that lacks a tensor is never filled up with random numbers, whoever loads it."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.base.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from tests import families
from tests.refusals import refused


@pytest.mark.parametrize("load", [load_full, load_lazy])
def test_each_kind_of_tensor_is_needed(load: object, tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kinds = {re.sub(r"\d+", "N", name): name for name in tensors}
    assert len(kinds) >= 15
    for name in kinds.values():
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, file, {"format": "pt"})
        with pytest.raises(MismatchError) as caught:
            load(Checkpoint.open(tmp_path), torch.float32)  # type: ignore[operator]
        said = str(caught.value)
        assert name in said or ".".join(name.split(".")[:5]) in said, said
        assert str(tmp_path) in said and "\n" not in said


@pytest.mark.parametrize("load", [load_full, load_lazy])
def test_a_tensor_of_another_shape_is_named_with_both(load: object, tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.embed_tokens.weight"
    tensors = load_file(file)
    rows, width = tensors[name].shape
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(MismatchError) as caught:
        load(Checkpoint.open(tmp_path), torch.float32)  # type: ignore[operator]
    said = str(caught.value)
    assert name in said and f"[{rows - 1}, {width}]" in said and f"[{rows}, {width}]" in said, said
    assert str(tmp_path if load is load_full else file) in said, said


@pytest.mark.parametrize("load", [load_full, load_lazy])
def test_a_generation_config_that_is_none_is_refused_in_one_line(load: object, tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path)
    (tmp_path / "generation_config.json").write_text("[1, 2]")
    with refused(MismatchError, "not a mapping") as caught:
        load(Checkpoint.open(tmp_path), torch.float32)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
