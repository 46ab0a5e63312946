"""Replicas of the reference model: activation-aware scales beside rounding to nearest; what packing costs and saves.

    python -m pytest tests/bench/test_awq.py -s

Scales are chosen on 8,192 tokens of four of five embedded prompts; replicas are judged on 2,048 tokens of the others.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel
from moetool.prediction.unseen_requests import held_out
from moetool.prompts import gather as prompts
from moetool.runtime.assembly import open_pooled
from moetool.trace.reader import Trace
from moetool.training.prediction_time import prompt_time, step_time
from moetool.training.predictor import load_predictor
from moetool.training.quantize.calibration import Calibration, from_prompts
from moetool.training.quantize.replica import make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions

pytestmark = pytest.mark.slow

NEAREST = {"grid": 0, "clip": False}
WAYS = {"nearest": NEAREST, "awq": {"grid": 10}}
MEMORY_BYTES = 10_000_000  # 6.5 MB of it for dense weights in float32


@pytest.fixture(scope="module")
def calibration(reference: Path) -> Calibration:
    checkpoint = Checkpoint.open(reference)
    return from_prompts(
        prompts.load(["all"]), checkpoint.tokenizer, checkpoint.vocab_size, length=128, max_tokens=8192, seed=0
    )


@pytest.fixture(scope="module")
def made(
    reference: Path, calibration: Calibration, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[int, str], tuple[Path, dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("awq")
    found = {}
    for group in (32, 64):
        for name, way in WAYS.items():
            out = folder / f"{name}-{group}"
            card = make_replica(Checkpoint.open(reference), out, calibration, ReplicaOptions(group=group, **way))  # type: ignore[arg-type]
            found[group, name] = (out, card)
            judged = card["judged"]
            print(
                f"\ngroup {group}, {name}: KL {judged['kl']:.5f}, match {judged['match']:.4f}, same next token "
                f"{judged['top1']:.4f}, {card['weights']['bytes']:,} of {card['weights']['of_bytes']:,} bytes, "
                f"{card['seconds']:.0f} s",
                flush=True,
            )
    yield found


def test_scales_beat_rounding_to_nearest(made: dict[tuple[int, str], tuple[Path, dict[str, Any]]]) -> None:
    for group in (32, 64):
        ours, nearest = (made[group, name][1] for name in ("awq", "nearest"))
        assert ours["judged"]["kl"] < nearest["judged"]["kl"]
        assert ours["judged"]["match"] > nearest["judged"]["match"] > 0.91
        assert ours["reloaded_by"] == "transformers"


def test_packed_experts_are_read_less_at_equal_memory(
    reference: Path, made: dict[tuple[int, str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """The same memory holds more of them, so that fewer are read, of fewer bytes each."""
    texts = prompts.load(["chat"], max_prompts=6)
    read = {}
    for name, path in (("bf16", reference), ("int4", made[64, "awq"][0])):
        opened: list[Any] = []

        def keep(path: Path, dtype: torch.dtype, device: torch.device, into: list[Any] = opened) -> LoadedModel:
            into.append(open_pooled(path, dtype, device, device_memory_bytes=MEMORY_BYTES))
            return into[0]

        began = time.perf_counter()
        options = CaptureOptions(max_new_tokens=16, keep=("topk",))
        done = capture(str(path), texts, tmp_path / name, options, RunSetup(open_model=keep))
        store = opened[0].pool.store
        read[name] = store.stats.bytes_read
        print(
            f"\n{name} experts in {MEMORY_BYTES:,} bytes: {store.num_slots} slots, {store.stats.reads:,} reads, "
            f"{store.stats.bytes_read / done.tokens:,.0f} bytes a token, {store.stats.stall_seconds:.2f} s waiting of "
            f"{time.perf_counter() - began:.2f} s"
        )
    assert 8 * read["int4"] < read["bf16"]


def test_a_pending_request_packed_and_unpacked(
    reference: Path, made: dict[tuple[int, str], tuple[Path, dict[str, Any]]], tmp_path: Path
) -> None:
    """The same scores out of a fraction of the memory; milliseconds by turns, the medians of seven rounds."""
    options = CaptureOptions(max_new_tokens=4, keep=("topk",))
    capture(str(reference), prompts.load(["all"], max_prompts=10), tmp_path / "trace", options)
    trace, (folder, card) = Trace(tmp_path / "trace"), made[64, "awq"]
    requests = held_out(card, trace)
    twins = {
        name: load_predictor(folder, {"awq_replica": {"unpacked": name == "unpacked"}})
        for name in ("packed", "unpacked")
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in twins}
    for _ in range(7):
        for name, twin in twins.items():
            found[name].append((*prompt_time(twin, trace, requests), step_time(twin, trace, requests)))
    for name, times in found.items():
        request_s, tokens, step_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(
            f"\n{name}: {twins[name].num_bytes:,} bytes, {1e3 * request_s:.1f} ms a pending request of {tokens:.0f} "
            f"tokens, {1e3 * step_s:.1f} ms a decode step"
        )
    assert 4 * twins["packed"].num_bytes < twins["unpacked"].num_bytes
