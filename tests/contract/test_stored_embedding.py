"""An input embedding that stays in its file gives the rows that one in memory gives."""

import os
from pathlib import Path

import pytest
import torch

from moetool.base.errors import MismatchError
from moetool.models import stored_embedding
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.file_changes import WriteReports
from moetool.models.loading import load_full, load_lazy
from moetool.models.stored_embedding import StoredEmbedding
from tests import families
from tests.greedy import generated, prompts, served
from tests.refusals import refused

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "minimax_m2")


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
    if family != "gpt_oss":  # its sinks stay in float32
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
        StoredEmbedding(checkpoint.weight_index, "model.embed_tokens.weight", torch.float32)
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
