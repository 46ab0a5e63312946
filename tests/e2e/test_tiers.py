"""Tiers below the slots, and experts computed on the host: other bytes and other seconds, the same bits."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError
from moetool.caching.policy import build_policy
from moetool.capture.run import CaptureOptions, RunSetup, capture
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather as prompt_sets
from moetool.runtime.assembly import build_engine, open_pooled
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import Trace
from tests.engines import AllOnHost, Answered, RandomPolicy, SomeOnHost, engine
from tests.refusals import refused
from tests.streams import Eager

MIXED = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 ="]
SLOT = 73_728


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any) -> Answered:
    """Every expert has a slot."""
    return Answered.by(engine(reference, tokenizer, "lru", 256), MIXED, 6)


def _spec(reference: Path) -> Any:
    return Checkpoint.open(reference).spec


@pytest.mark.parametrize(("slots", "experts"), [(2, 1), (2, 256), (24, None), (24, 40), (24, 256)])
def test_a_host_tier_changes_no_bit(
    slots: int, experts: int | None, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    memory = None if experts is None else experts * SLOT
    metrics = baseline.require_same(engine(reference, tokenizer, "lru", slots, host_memory_bytes=memory))
    assert metrics["host_pool_bytes"] == (memory or 0)
    assert metrics["slots_bytes"] == slots * SLOT
    assert metrics["expert_reads"] + metrics["host_hits"] == metrics["misses"]
    assert metrics["bytes_read"] == metrics["expert_reads"] * SLOT
    if experts == 256:
        distinct = metrics["expert_reads"]
        assert distinct <= 256
        assert metrics["host_hits"] == metrics["misses"] - distinct > distinct
    if experts is None:
        assert metrics["host_hits"] == metrics["host_stall_seconds"] == 0


def test_decisions_do_not_depend_on_the_tiers(reference: Path, tokenizer: Any, baseline: Answered) -> None:
    counts = []
    for memory in (None, 30 * SLOT):
        made = engine(reference, tokenizer, "lfu", 20, host_memory_bytes=memory)
        baseline.require_same(made)
        counts.append(made.residency.counts)
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("policy", "experts"), [(SomeOnHost, None), (SomeOnHost, 5), (SomeOnHost, 256), (AllOnHost, 64)]
)
def test_experts_computed_on_the_host_give_the_same_bits(
    policy: Any, experts: int | None, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    memory = None if experts is None else experts * SLOT
    made = engine(reference, tokenizer, policy(_spec(reference), 16, seed=3), 16, host_memory_bytes=memory)
    metrics = baseline.require_same(made)
    assert metrics["hosted"] > 100
    assert policy is not AllOnHost or metrics["misses"] == 0


def test_experts_computed_by_the_thread_beside_a_device(
    baseline: Answered, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that a GPU takes, on a made-up one whose computing happens at once and whose copies do not."""
    monkeypatch.setattr("moetool.runtime.experts.store.open_copies", lambda device: Eager())
    for policy, slots in (
        (SomeOnHost(_spec(reference), 16, seed=5), 16),
        (RandomPolicy(_spec(reference), 6, seed=5), 6),
    ):
        made = engine(reference, tokenizer, policy, slots, pooled=False)
        metrics = baseline.require_same(made)
        assert metrics["host_pool_bytes"] == 256 * SLOT  # a ring, which has room for all


@pytest.mark.parametrize("experts", [None, 12, 256])
def test_reads_that_fail_now_and_then(experts: int | None, baseline: Answered, reference: Path, tokenizer: Any) -> None:
    memory = None if experts is None else experts * SLOT
    made = engine(reference, tokenizer, SomeOnHost(_spec(reference), 12, seed=8), 12, host_memory_bytes=memory)
    shards, draw, failed = made.store.files.shards, random.Random(0), set[int]()
    read = shards.read

    def failing(file: int, offset: int, num_bytes: int) -> memoryview:
        if offset not in failed and draw.random() < 0.3:
            failed.add(offset)  # a place fails once, so that the second try works
            raise OSError("the cable is loose")
        return read(file, offset, num_bytes)

    shards.read = failing
    metrics = baseline.require_same(made)
    assert metrics["reads_retried"] > 10
    assert metrics["failures"] == 0


def test_capture_with_a_host_tier_writes_the_same_rows(reference: Path, tmp_path: Path) -> None:
    texts = prompt_sets.load(["all"], max_prompts=1)
    memory = Checkpoint.open(reference).dense_bytes(torch.float32) + 8 * SLOT
    digests = []
    for name, host in (("without", None), ("with", 100 * SLOT)):
        opener = partial(open_pooled, device_memory_bytes=memory, host_memory_bytes=host)
        options = CaptureOptions(max_new_tokens=3, threads=1)
        made = capture("reference", texts, tmp_path / name, options, RunSetup(open_model=opener))
        trace = Trace(made.out)
        digests.append({file: facts["sha256"] for file, facts in trace.manifest["files"].items()})
        assert trace.manifest["provenance"]["device"] == "cpu"
    assert digests[0] == digests[1]


def test_serve_options_make_the_tier(reference: Path) -> None:
    options = ServeOptions(kv_tokens=256, host_memory_bytes=10 * SLOT + 5)
    made = build_engine(Checkpoint.open("reference"), options=options, device_memory_bytes=12_000_000)
    assert made.metrics()["host_pool_bytes"] == 10 * SLOT
    made.close()


def test_a_host_tier_that_is_too_small_to_compute_from_is_refused(reference: Path, tokenizer: Any) -> None:
    policy = SomeOnHost(_spec(reference), 16, seed=0)
    with refused(CapacityError, "--host-memory", "100,000", "1", "73,728"):
        engine(reference, tokenizer, policy, 16, host_memory_bytes=100_000)
    assert build_policy("lru", _spec(reference), {}, 4).computes_on_host is False
