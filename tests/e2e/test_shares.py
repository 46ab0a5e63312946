"""Capture larger than memory, and by several processes: the same rows as one process with the model in memory."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moetool.base.errors import CapacityError, MoetoolError
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.capture.workers import capture_with_workers
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full
from moetool.prompts import gather as prompt_sets
from moetool.prompts.gather import Prompt
from moetool.runtime.assembly import open_pooled
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests.command_line import child_environment, exit_code
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


def test_workers_write_the_trace_of_one_process(texts: list[Prompt], one: Trace, tmp_path: Path) -> None:
    capture_with_workers("reference", texts, tmp_path / "t", OPTIONS, 2)
    assert _files(Trace(tmp_path / "t")) == _files(one)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_worker_that_fails_leaves_nothing(texts: list[Prompt], tmp_path: Path) -> None:
    opener = partial(open_pooled, device_memory_bytes=1000)
    with pytest.raises(MoetoolError):
        capture_with_workers("reference", texts, tmp_path / "t", OPTIONS, 2, RunSetup(open_model=opener))
    assert list(tmp_path.iterdir()) == []


def test_torchrun_writes_the_trace_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        "capture",
        "reference",
        "--data",
        "chat",
        "--max-prompts",
        "5",
        "--max-new-tokens",
        "3",
        "--threads",
        "1",
    ]
    environment = child_environment(OMP_NUM_THREADS="1")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    whole = [*launcher, "-m", "moetool.cli.main", *command, "--out", str(tmp_path / "two"), "--json"]
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == 5
    assert exit_code(monkeypatch, *command, "--out", tmp_path / "one") == 0
    assert _files(Trace(tmp_path / "two")) == _files(Trace(tmp_path / "one"))


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
