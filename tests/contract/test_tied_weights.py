"""A head that the config ties: both ways of loading follow transformers, whatever the files hold of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moetool.base.families import FAMILIES
from moetool.models import stored_embedding
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.models.stored_embedding import StoredEmbedding
from tests import families, quantized
from tests.greedy import generated, prompts, served
from tests.logs import warnings

SUPPORTED = sorted({name for name, family in FAMILIES.items() if not family.refused} - {"dbrx"})  # dbrx refuses ties
UNTIED = ("bailing_hybrid", "kimi_linear", "nemotron_h")
"""Families whose head is never tied, whatever the config says."""
FEW = ("deepseek_v3", "gemma4_text", "granitemoe", "jetmoe", "lfm2_moe", "phimoe", "qwen3_moe")
HEAD = "lm_head.weight"

Tensors = dict[str, torch.Tensor]


def _tied(family: str, folder: Path, change: Callable[[Tensors, str], None]) -> Path:
    """Write a tiny model whose config ties its head, and change its tensors; the change takes the embedding's name."""
    families.save(family, folder, tie_word_embeddings=True)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = next(name for name in tensors if name.endswith(("embed_tokens.weight", "embeddings.weight")))
    change(tensors, embedding)
    save_file(tensors, file, {"format": "pt"})
    return folder


def _own_head(tensors: Tensors, embedding: str) -> None:
    draw = torch.Generator().manual_seed(7)
    tensors[HEAD] = torch.empty_like(tensors[embedding]).normal_(0, 0.2, generator=draw)


def _same_head(tensors: Tensors, embedding: str) -> None:
    tensors[HEAD] = tensors[embedding].clone()


def _only_head(tensors: Tensors, embedding: str) -> None:
    tensors[HEAD] = tensors.pop(embedding)


def _only_embedding(tensors: Tensors, embedding: str) -> None:
    tensors.pop(HEAD, None)


def _weights(model: object) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", SUPPORTED)
def test_a_head_of_its_own_is_used_in_every_family(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    families.require_known(family)
    folder = _tied(family, tmp_path, _own_head)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with Checkpoint.open(folder) as checkpoint:
        loaded = load_lazy(checkpoint, torch.float32)
        for ours, expected in zip(_weights(loaded.model), _weights(theirs), strict=True):
            assert torch.equal(ours, expected)
        resident = sum(weight.nbytes for weight in loaded.model.parameters() if not weight.is_meta)
        assert resident >= checkpoint.dense_bytes(torch.float32, "cuda")
    said = warnings(caplog)
    assert len(said) == (family not in UNTIED)
    assert all(HEAD in line and str(folder) in line for line in said)


@pytest.mark.parametrize("family", FEW)
@pytest.mark.parametrize("change", [_same_head, _only_head, _only_embedding])
def test_one_stored_tensor_or_two_equal_ones_are_shared(
    family: str, change: Callable[[Tensors, str], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _tied(family, tmp_path, change)
    with Checkpoint.open(folder) as checkpoint:
        whole, lazy = (load(checkpoint, torch.float32).model for load in (load_full, load_lazy))
        for ours, expected in zip(_weights(lazy), _weights(whole), strict=True):
            assert torch.equal(ours, expected)
        assert _weights(lazy)[0] is _weights(lazy)[1]
        assert checkpoint.dense_token_bytes(torch.float32) >= _weights(lazy)[1].nbytes
    assert not warnings(caplog)


def test_served_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the embedding left in its file, and all of the memory counted."""
    monkeypatch.setattr(stored_embedding, "LEAST_BYTES", 0)
    folder = _tied("qwen3_moe", tmp_path, _own_head)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert generated(theirs, prompts(6)).require_same(served(folder, "lru", prompts(6))) == 0
    with Checkpoint.open(folder) as checkpoint:
        loaded = load_lazy(checkpoint, torch.float32)
        assert isinstance(loaded.model.get_input_embeddings(), StoredEmbedding)
        resident = sum(weight.nbytes for weight in loaded.model.parameters() if not weight.is_meta)
        assert resident == checkpoint.dense_bytes(torch.float32)


def test_a_quantized_head_of_its_own_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    families.save("qwen3_moe", tmp_path / "dense", tie_word_embeddings=True)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    config = quantized.compressed_config("float-quantized", weights) | {"ignore": []}
    write = quantized.compressed("float-quantized", weights)
    quantized.quantize(tmp_path / "dense", tmp_path / "m", config, lambda name: write)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    _own_head(tensors, "model.embed_tokens.weight")
    stored, meant = write(HEAD, tensors.pop(HEAD))
    save_file(tensors | stored, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    with Checkpoint.open(tmp_path / "m") as checkpoint:
        for load in (load_full, load_lazy):
            assert torch.allclose(load(checkpoint, torch.float32).model.lm_head.weight, meant, rtol=1e-6)
    assert len(warnings(caplog)) == 1
