"""Capture larger than memory, and by several processes: the same rows as one process with the model in memory."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moetool.base.errors import CapacityError, MoetoolError
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.cluster import capture_shards
from moetool.cluster.capture_shards import capture_on_cluster
from moetool.cluster.launch import Workers, parse_where
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.prompts import gather as prompt_sets
from moetool.prompts.gather import Prompt
from moetool.runtime.assembly import open_pooled
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests.refusals import refused

OPTIONS = CaptureOptions(
    max_new_tokens=4, batch_size=3, dtype="float32", keep=("logits", "embeddings", "hidden"), threads=1
)


@pytest.fixture(scope="module")
def texts() -> list[Prompt]:
    return prompt_sets.load(["all"], max_prompts=2)[:13]  # five batches, the last one short


@pytest.fixture(scope="module")
def one(texts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(capture("reference", texts, tmp_path_factory.mktemp("one") / "t", OPTIONS).out)


def _by_position(rows: TokenBatch) -> TokenBatch:
    return rows.select(np.lexsort((rows.position_T, rows.request_T)))


def _files(trace: Trace) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in trace.manifest["files"].items()}


class _Workers(Workers):
    """Workers of which the last does not see the stage, and some are killed or misled when they get a batch."""

    forwarded: ClassVar[list[int]] = []
    killed: ClassVar[set[int]] = set()
    misled = False

    def __init__(self, where: Any, build: Any, arguments: list[dict[str, Any]], *names: Any, **more: Any) -> None:
        arguments[-1] = {**arguments[-1], "out": "/nowhere/t"}
        super().__init__(where, build, arguments, *names, **more)

    def call(self, n: int, method: str, *args: Any, **more: Any) -> Any:
        if method == "forward":
            self.forwarded.append(n)
            if n in self.killed:
                os.kill(self.pid(n), signal.SIGKILL)
            if self.misled:  # the model embeds 4,096 tokens
                number, ((_, prompt, *_), *_) = args
                args = number, [(0, prompt, [4096], 4, 0)]
        return super().call(n, method, *args, **more)


@pytest.mark.parametrize("killed", [set(), {0}, {0, 1}], ids=["none lost", "one lost", "both lost"])
def test_workers_write_the_trace_of_one_process(
    killed: set[int], texts: list[Prompt], one: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_shards, "Workers", _Workers)
    monkeypatch.setattr(_Workers, "killed", killed)
    monkeypatch.setattr(_Workers, "forwarded", [])
    notes: list[str] = []
    setup = RunSetup(on_note=notes.append)
    if len(killed) == 2:
        with pytest.raises(MoetoolError, match="no node is left"):
            capture_on_cluster("reference", texts, tmp_path / "t", OPTIONS, parse_where("local:2"), setup)
        assert list(tmp_path.iterdir()) == []
        return
    made = capture_on_cluster("reference", texts, tmp_path / "t", OPTIONS, parse_where("local:2"), setup)
    assert _files(Trace(tmp_path / "t")) == _files(one)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert made.reads is not None and made.reads.tokens <= made.tokens  # without those of a killed worker
    if killed:
        assert any("take up its batch" in note for note in notes)
    else:
        assert set(_Workers.forwarded) == {0, 1} and made.reads.tokens == made.tokens


def test_a_failing_batch_ends_the_capture(texts: list[Prompt], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the worker's, whatever the others do."""
    monkeypatch.setattr(capture_shards, "Workers", _Workers)
    monkeypatch.setattr(_Workers, "misled", True)
    with pytest.raises(MoetoolError, match="the model failed on prompt"):
        capture_on_cluster("reference", texts, tmp_path / "t", OPTIONS, parse_where("local:1"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_larger_than_memory_gives_the_same_experts(texts: list[Prompt], one: Trace, tmp_path: Path) -> None:
    """A pool of two experts of 256: the experts exceed it 128 times."""
    dense, expert = 6_503_168, 73_728
    opener = partial(open_pooled, device_memory_bytes=dense + 2 * expert)
    small = Trace(capture("reference", texts, tmp_path / "t", OPTIONS, RunSetup(open_model=opener)).out)
    columns = ["weights", "logits"]
    rows, expected = (_by_position(TokenBatch.concatenate(list(t.batches(columns)))) for t in (small, one))
    assert (rows.token_id_T == expected.token_id_T).all()
    assert (rows.experts_TS == expected.experts_TS).all()
    assert np.allclose(rows.logits_TF, expected.logits_TF, atol=5e-3)
    assert np.allclose(rows.weights_TS, expected.weights_TS, atol=1e-3)
    with refused(CapacityError, "2 expert slots"):
        capture(
            "reference",
            texts,
            tmp_path / "u",
            OPTIONS,
            RunSetup(open_model=partial(open_pooled, device_memory_bytes=dense)),
        )


def test_experts_of_a_hundred_times_the_memory(texts: list[Prompt], reference: Path, tmp_path: Path) -> None:
    """A narrow model with 512 wide experts, random: 50 MB of them, and less than half a megabyte for everything."""
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=256,
        num_experts_per_tok=4,
        moe_intermediate_size=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference / name, tmp_path / "m")
    spec = Checkpoint.open(tmp_path / "m").spec
    memory = Checkpoint.open(tmp_path / "m").dense_bytes(torch.float32) + 2 * spec.slot_bytes
    assert sum(spec.expert_bytes_L) * 256 > 100 * memory
    options = CaptureOptions(max_new_tokens=2, batch_size=3, threads=1)
    opener = partial(open_pooled, device_memory_bytes=memory)
    whole, pooled = (
        Trace(capture(str(tmp_path / "m"), texts[:3], tmp_path / name, options, RunSetup(open_model=how)).out)
        for name, how in (("whole", load_full), ("pooled", opener))
    )
    expected, rows = (TokenBatch.concatenate(list(trace.batches())) for trace in (whole, pooled))
    assert (rows.token_id_T == expected.token_id_T).all()
    assert (rows.experts_TS == expected.experts_TS).all()
