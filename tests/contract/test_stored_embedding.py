"""Embeddings that stay in their files give the rows that ones in memory give."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moetool.base.errors import MismatchError
from moetool.measuring.profile import ProfileOptions, profile
from moetool.models import stored_embedding
from moetool.models.checkpoint import Checkpoint
from moetool.models.conversion import TensorSource
from moetool.models.files.file_changes import WriteReports
from moetool.models.files.tensor_index import read_index
from moetool.models.loading import load_full, load_lazy
from moetool.models.stored_embedding import StoredEmbedding, readable_rows
from moetool.models.weight_index import WeightIndex
from moetool.models.weights.format import Dense, StoredWeight
from moetool.models.weights.fp8_block import Fp8BlockCodec
from moetool.models.weights.scaled import ScaledCodec
from tests import families
from tests.greedy import generated, prompts, served
from tests.refusals import refused

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "minimax_m2")


N_GRAMS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    **{"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 8},
    **{"indexer_kv_heads": 1, "indexer_n_heads": 2},
    **{"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "split_ngram_parts": 4},
}
"""Config of a model of qwen4_exp_text with two tables of n-grams, each in four tensors."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the embeddings of tiny models in their files too."""
    monkeypatch.setattr(stored_embedding, "LEAST_BYTES", 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_those_in_memory(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    families.save(family, tmp_path, tie_word_embeddings=False)
    checkpoint = Checkpoint.open(tmp_path)
    whole = load_full(checkpoint, dtype).model.get_input_embeddings()
    loaded = load_lazy(checkpoint, dtype)
    rows = loaded.model.get_input_embeddings()
    assert isinstance(rows, StoredEmbedding)
    tokens = torch.tensor([[3, 0, 3, rows.num_embeddings - 1], [1, 2, 0, 0]])
    assert torch.equal(rows(tokens), whole(tokens))
    assert rows(tokens[:, :0]).shape == (2, 0, rows.embedding_dim)
    assert checkpoint.dense_bytes(dtype, "cuda") - checkpoint.dense_bytes(dtype) == whole.weight.nbytes
    resident = sum(weight.nbytes for weight in loaded.model.parameters() if not weight.is_meta)
    assert resident == checkpoint.dense_bytes(dtype)


@pytest.mark.parametrize("name", ["qwen3moe", "glm4moe"])
def test_rows_of_a_gguf_file_are_unpacked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(GOLDEN / f"{name}.gguf")
    rows = load_lazy(checkpoint, torch.float32).model.get_input_embeddings()
    assert isinstance(rows, StoredEmbedding)
    monkeypatch.setattr(stored_embedding, "LEAST_BYTES", 1 << 40)
    whole = load_lazy(checkpoint, torch.float32).model.get_input_embeddings()
    tokens = torch.arange(rows.num_embeddings)
    assert torch.equal(rows(tokens), whole(tokens))


def test_served_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path, tie_word_embeddings=False)
    checkpoint = Checkpoint.open(tmp_path)
    expected = generated(load_full(checkpoint, torch.float32).model, prompts(6))
    assert expected.require_same(served(tmp_path, "lru", prompts(6))) == 0


@pytest.mark.parametrize(("family", "tied"), [("gemma4_text", False), ("qwen3_moe", True)])
def test_an_embedding_that_is_more_than_rows_stays_in_memory(family: str, tied: bool, tmp_path: Path) -> None:
    """It scales rows, or is the output head too."""
    families.save(family, tmp_path, tie_word_embeddings=tied)
    checkpoint = Checkpoint.open(tmp_path)
    assert isinstance(load_lazy(checkpoint, torch.float32).model.get_input_embeddings(), torch.nn.Embedding)
    assert checkpoint.dense_bytes(torch.float32) == checkpoint.dense_bytes(torch.float32, "cuda")


def test_tables_of_n_grams_in_several_files(tmp_path: Path) -> None:
    """Their rows are read from files beside a GPU too, and count as no memory."""
    families.require_known("qwen4_exp")
    families.save("qwen4_exp_text", tmp_path / "whole", **N_GRAMS)
    whole = load_full(Checkpoint.open(tmp_path / "whole"), torch.float32)
    whole.model.save_pretrained(tmp_path / "split", max_shard_size="20KB")
    checkpoint = Checkpoint.open(tmp_path / "split")
    assert len(checkpoint.index.files) > 4
    tables = {name: module for name, module in whole.model.named_modules() if name.endswith("ngram_embedding")}
    stored = checkpoint.stored_embeddings(torch.float32, "cuda")
    assert stored.keys() == tables.keys() and all(len(names) == 4 for names in stored.values())
    loaded = load_lazy(checkpoint, torch.float32)
    for name, table in tables.items():
        rows, ids = loaded.model.get_submodule(name), torch.arange(table.num_embeddings).flip(0).view(2, -1)
        assert isinstance(rows, StoredEmbedding)
        assert torch.equal(rows(ids), table(ids)) and rows.placeholder(ids).shape == rows(ids).shape
    loaded.close()
    in_files = sum(table.weight.nbytes for table in tables.values())
    in_memory = sum(p.nbytes for name, p in whole.model.named_parameters() if ".experts." not in name)
    assert checkpoint.dense_bytes(torch.float32, "cuda") == in_memory - in_files
    expected = generated(whole.model, prompts(3))
    expected.require_same(served(tmp_path / "split", "lru", prompts(3)))


def test_a_model_with_tables_of_n_grams_is_profiled_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables larger than memory are not made."""
    families.require_known("qwen4_exp")
    monkeypatch.setattr(stored_embedding, "LEAST_BYTES", 64 << 20)
    config = families.config("qwen4_exp_text", **{**N_GRAMS, "ngram_vocab_size_base": 10**9})
    config.save_pretrained(tmp_path)
    options = ProfileOptions(config_only=True, seconds=1.0, threads=1, dtype="float32", scratch=tmp_path)
    made = profile(str(tmp_path), options)
    assert made.spec.num_layers == 3 and made.compute[0].head(1) > 0
    assert Checkpoint.open(tmp_path, weights=False).dense_bytes(torch.float32) < 1 << 25


@pytest.mark.parametrize("kind", ["block", "block of one scale", "row", "whole", "plain"])
def test_rows_in_eight_bits(kind: str, tmp_path: Path) -> None:
    """Scales by blocks, rows or for all, over two tensors of a table."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    weights: dict[str, StoredWeight] = {}
    expected = []
    codecs = {
        "block": (Fp8BlockCodec((4, 8)), (3, 2), (4, 8)),
        "block of one scale": (Fp8BlockCodec(None), (1,), (10, 16)),
        "row": (ScaledCodec(None), (10, 1), (1, 16)),
        "whole": (ScaledCodec(None), (1,), (10, 16)),
        "plain": (Dense(), (1,), (10, 16)),
    }
    codec, scales, block = codecs[kind]
    for part in ("a", "b"):
        values = torch.randn(10, 16, generator=draw).to(torch.float8_e4m3fn)
        scale = torch.rand(scales, generator=draw) + 0.5
        by_row = scale.view(-1, 1) if scale.dim() == 1 else scale
        by_row = by_row.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:10]
        plain = values.float() * by_row
        expected.append(plain)
        dense = isinstance(codec, Dense)
        tensors |= {f"{part}.weight": plain} if dense else {f"{part}.values": values, f"{part}.scale": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    index = read_index(tmp_path)
    for part in ("a", "b"):
        mine = {name[2:]: tensor for name, tensor in index.tensors.items() if name.startswith(part)}
        weights[part] = StoredWeight(name=part, shape=(10, 16), tensors=mine, codec=codec, format="")
    table = torch.nn.Embedding(20, 16, device="meta")
    source = TensorSource("table.weight", {"a": ["a"]}, None)
    assert readable_rows(table, source, weights) == []  # half of it
    halves = torch.nn.Embedding(10, 16, device="meta")
    assert readable_rows(halves, source, weights) == ["a"]
    assert readable_rows(halves, source, {"a": replace(weights["a"], shape=(10, 4, 4))}) == []
    rows = StoredEmbedding(WeightIndex(index.files, index.stamps, weights, None), ["a", "b"], torch.float32)
    ids = torch.tensor([[19, 0, 9, 10], [3, 3, 11, 8]])
    assert torch.equal(rows(ids), torch.cat(expected)[ids])
    with pytest.raises(IndexError):
        rows(torch.tensor([20]))


def test_a_file_that_changes_gives_no_rows(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path, tie_word_embeddings=False)
    checkpoint = Checkpoint.open(tmp_path)
    rows = load_lazy(checkpoint, torch.float32).model.get_input_embeddings()
    with pytest.raises(IndexError, match=f"expected 0 to {rows.num_embeddings - 1}"):
        rows(torch.tensor([[rows.num_embeddings]]))
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with refused(OSError, "model.safetensors"):
        rows(torch.tensor([[0]]))
    with refused(MismatchError, "model.safetensors"):
        StoredEmbedding(checkpoint.weight_index, ["model.embed_tokens.weight"], torch.float32)
    os.truncate(tmp_path / "model.safetensors", 64)
    with refused(OSError, "model.safetensors"):
        rows(torch.tensor([[0]]))


@pytest.mark.parametrize("reported", [True, False])
def test_rows_that_are_written_over_are_found_with_their_time_set_back(
    reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reported:
        monkeypatch.setattr(WriteReports, "watch", lambda *args: (tmp_path / "none").stat())
    families.save("qwen3_moe", tmp_path, tie_word_embeddings=False)
    file, rows = tmp_path / "model.safetensors", load_lazy(Checkpoint.open(tmp_path), torch.float32)
    embedding = rows.model.get_input_embeddings()
    embedding(torch.tensor([[0]]))
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"!")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OSError, match=r"model\.safetensors (was|may have been) written to"):
        embedding(torch.tensor([[0]]))


def test_a_change_stops_all_reads_of_the_model(tmp_path: Path) -> None:
    families.save("qwen3_moe", tmp_path, tie_word_embeddings=False)
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
    assert loaded.files is not None
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with refused(OSError, "written"):
        loaded.model.get_input_embeddings()(torch.tensor([[0]]))
    assert "model.safetensors was written to" in loaded.files.shards.changed
