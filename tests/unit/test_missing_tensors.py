"""A checkpoint that lacks a tensor is never filled up with random numbers, whoever loads it."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moetool.errors import MismatchError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from tests import families


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
        assert "\n" not in said
