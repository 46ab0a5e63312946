"""Capture larger than memory, and by several processes: the same rows as one process with the model in memory."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from moetool import prompts as prompt_sets
from moetool.capture import CaptureOptions, capture
from moetool.errors import CapacityError, MoetoolError
from moetool.prompts import Prompt
from moetool.serving.assembly import open_pooled
from moetool.shares import capture_with_workers, join, share_path
from moetool.trace import TokenBatch, Trace

OPTIONS = CaptureOptions(max_new_tokens=4, batch_size=3, keep=("logits", "embeddings", "hidden"), threads=1)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def texts() -> list[Prompt]:
    return prompt_sets.load(["all"], max_prompts=2)[:13]  # five batches, the last one short


@pytest.fixture(scope="module")
def one(texts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(capture("reference", texts, tmp_path_factory.mktemp("one") / "t", OPTIONS).out)


def _files(trace: Trace) -> dict[str, str]:
    return {name: facts["sha256"] for name, facts in trace.manifest["files"].items()}


@pytest.mark.parametrize("workers", [2, 3])
def test_shares_joined_are_the_trace_of_one_process(
    workers: int, texts: list[Prompt], one: Trace, tmp_path: Path
) -> None:
    out = tmp_path / "t"
    for i in range(workers):
        capture("reference", texts, share_path(out, i), OPTIONS, share=(i, workers))
    made = join(out, workers)
    assert made.requests == 13
    assert _files(Trace(out)) == _files(one)
    join(tmp_path / "t", workers, overwrite=True)


def test_workers_write_the_trace_of_one_process(texts: list[Prompt], one: Trace, tmp_path: Path) -> None:
    capture_with_workers("reference", texts, tmp_path / "t", OPTIONS, 2)
    assert _files(Trace(tmp_path / "t")) == _files(one)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_worker_that_fails_leaves_nothing(texts: list[Prompt], tmp_path: Path) -> None:
    opener = partial(open_pooled, device_memory_bytes=1000)
    with pytest.raises(MoetoolError):
        capture_with_workers("reference", texts, tmp_path / "t", OPTIONS, 2, open_model=opener)
    assert list(tmp_path.iterdir()) == []


def test_torchrun_writes_the_trace_of_one_process(tmp_path: Path) -> None:
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher, name in ((run, "two"), ([sys.executable], "one")):
        whole = [*launcher, "-m", "moetool.cli", *command, "--out", str(tmp_path / name), "--json"]
        done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["requests"] == 5
    assert _files(Trace(tmp_path / "two")) == _files(Trace(tmp_path / "one"))


def test_a_model_larger_than_memory_gives_the_same_experts(texts: list[Prompt], one: Trace, tmp_path: Path) -> None:
    """A pool of two experts of 256: the experts exceed it 128 times."""
    dense, expert = 6_503_168, 73_728
    opener = partial(open_pooled, device_memory_bytes=dense + 2 * expert)
    small = Trace(capture("reference", texts, tmp_path / "t", OPTIONS, open_model=opener).out)
    rows, expected = (TokenBatch.concatenate(list(t.batches(["weights", "logits"]))) for t in (small, one))
    assert (rows.token_id_T == expected.token_id_T).all()
    assert (rows.experts_TS == expected.experts_TS).all()
    assert np.allclose(rows.logits_TF, expected.logits_TF, atol=5e-3)
    assert np.allclose(rows.weights_TS, expected.weights_TS, atol=1e-3)
    with pytest.raises(CapacityError, match="at least 2 expert slots"):
        capture("reference", texts, tmp_path / "u", OPTIONS, open_model=partial(open_pooled, device_memory_bytes=dense))
