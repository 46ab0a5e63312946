"""Experts are read into host memory in the order of expected use: kept, or the plan's, else layer by layer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.caching.plan import CachePlan
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.experts.expected_use import BY_LAYER, read_order
from moetool.runtime.experts.source import ExpertSource
from moetool.runtime.experts.store import ExpertStore
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests.plans import choose_cache
from tests.servers import eventually
from tests.synthetic import make_spec, write_trace

HOST_EXPERTS = 40


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[int]]:
    """Orders that engines ask for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    orders: list[list[int]] = []
    read_ahead = ExpertStore.read_ahead

    def record(store: ExpertStore, keys: Any) -> None:
        orders.append(list(keys))
        read_ahead(store, orders[-1])

    monkeypatch.setattr(ExpertStore, "read_ahead", record)
    return orders


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Experts that idle threads have read into host memory."""
    keys: list[int] = []
    read_ahead = ExpertSource.read_ahead

    def record(source: ExpertSource, key: int) -> bool:
        before = source.in_host(key)
        room = read_ahead(source, key)
        if source.in_host(key) and not before:
            keys.append(key)
        return room

    monkeypatch.setattr(ExpertSource, "read_ahead", record)
    return keys


def _open(policy: str, *, host_experts: int = HOST_EXPERTS, plan: CachePlan | None = None) -> Engine:
    checkpoint = Checkpoint.open("reference")
    slot = stride_of(checkpoint.spec.slot_bytes)
    options = ServeOptions(
        kv_tokens=256, host_memory_bytes=host_experts * slot, io_threads=1, warm_start=True, oracle_s=0
    )
    memory = divide_with_slots(checkpoint, options, 48).device_bytes
    engine = build_engine(checkpoint, options=options, policy=policy, device_memory_bytes=memory, plan=plan)
    engine.state = "ready"
    return engine


@pytest.mark.parametrize("policy", ["lfu", "foresight"])
def test_a_second_start_reads_the_most_used_experts_first(asked: list[list[int]], read: list[int], policy: str) -> None:
    first = _open(policy)
    assert first.host_order == BY_LAYER == first.stats()["host_experts_read"]
    assert asked[0] == list(range(first.spec.total_experts))
    eventually(lambda: read == asked[0][:HOST_EXPERTS])
    prompt = first.tokenizer("User: What is 12 + 7?\nAssistant:")["input_ids"]
    first.submit(prompt, SamplingParams(max_tokens=60, ignore_eos=True), lambda output: None)
    while not first.idle:
        first.step()
    use = first.residency.policy.expected_use()
    first.close()
    read.clear()
    second = _open(policy, host_experts=80)
    assert second.host_order == "by use in earlier runs"
    assert sorted(asked[1]) == asked[0] and [use.get(key, 0) for key in asked[1]] == sorted(
        (use.get(key, 0) for key in asked[1]), reverse=True
    )
    resident = set(second.residency.slot_of)  # they came into host memory on their way to the slots
    assert len(resident) == 48
    eventually(lambda: read == [key for key in asked[1] if key not in resident][: 80 - 48])
    second.close()


def test_a_plan_orders_the_first_start(asked: list[list[int]], read: list[int], tmp_path: Path) -> None:
    spec = Checkpoint.open("reference").spec
    trace = write_trace(tmp_path / "trace", spec, num_requests=4)
    plan = choose_cache(trace, 12_000_000, policies=["lru"])
    uses_LE = np.array(plan.uses_LE)
    (tokens,) = set((uses_LE.sum(axis=1) / spec.top_k_L).tolist())
    lengths = dict(zip(*(trace.requests[name].to_pylist() for name in ("request", "tokens")), strict=True))
    assert tokens == sum(lengths[request] for request in plan.requests_used)
    plan.save(tmp_path / "plan.json")
    engine = _open("lru", plan=CachePlan.load(tmp_path / "plan.json"))
    assert engine.host_order == "by use in the plan's trace"
    assert asked[-1] == np.argsort(-uses_LE.ravel(), kind="stable").tolist()
    eventually(lambda: read == asked[-1][:HOST_EXPERTS])
    engine.close()


def test_layers_of_different_sizes_and_unknown_use() -> None:
    spec = make_spec(layers=2, experts=4, top_k=1)
    assert read_order(spec, {}, None, None) == (list(range(8)), BY_LAYER)
    assert read_order(spec, {5: 2.0, 1: 7.0}, None, None)[0] == [1, 5, 0, 2, 3, 4, 6, 7]
    assert read_order(spec, {}, np.array([[3, 6], [3, -1]]), None)[0][:2] == [3, 6]
    uneven = replace(spec, num_experts_L=(4, 2), expert_bytes_L=spec.expert_bytes_L)
    assert read_order(uneven, {5: 1.0}, None, None)[0] == [5, 0, 1, 2, 3, 4]
