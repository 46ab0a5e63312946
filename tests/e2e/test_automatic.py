"""`moetool serve MODEL` as a process: what it chooses, and what it says of it."""

import contextlib
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from moetool import prediction
from moetool.base import tables
from moetool.base.errors import CapacityError, MoetoolError
from moetool.caching.policy import build_policy
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy, parse_dtype
from moetool.prediction.token_memory import TokenMemory, compile_loops, memory_bytes
from moetool.runtime import automatic, budget
from moetool.runtime.automatic import choose
from moetool.runtime.budget import footprint
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.serve_options import ServeOptions
from tests.refusals import refused
from tests.server_process import loads_arrow, served
from tests.servers import get
from tests.synthetic import make_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "gguf"


def test_stats_have_the_settings_that_are_printed() -> None:
    with served("reference", "--device", "cpu", "--set", "kv_tokens=512") as process:
        settings = json.loads(get(process.url, "/stats")[2])["settings"]
        printed = process.narration
        assert not loads_arrow(process)  # only a gate log does: tests/e2e/test_gate_log.py
    assert {"device", "dtype", "memory", "KV cache", "prefill chunk"} <= {row["name"] for row in settings}
    assert {"name": "KV cache", "value": "512 tokens", "why": "as set"} in settings
    words = " ".join(printed.split())
    assert all(f"{row['name']} {row['value']} {row['why']}" in words for row in settings)


def test_a_gpu_is_planned_for_without_one(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    values, _ = automatic.on_this_machine(Checkpoint.open(str(reference)), {"device": "cuda"})
    assert (values["dtype"], values["io_threads"]) == ("bfloat16", 4) and values["host_memory_bytes"] > 0


def test_a_plans_settings_name_the_plan() -> None:
    values, planned = {"device": "cpu", "dtype": "float32", "kv_tokens": 512}, ["kv_tokens", "memory", "policy"]
    made = choose(Checkpoint.open("reference"), values, device_memory_bytes=40_000_000, policy="lru", planned=planned)
    why = {name: reason for name, _, reason in made.choices}
    assert {why[name] for name in ("KV cache", "memory", "policy")} == {"from the plan"}
    assert why["device"] == why["dtype"] == "as set" != why["prefill chunk"]


@pytest.mark.parametrize(("options", "gpu"), [({}, 0), ({"first_device": 1}, 1), ({"first_device": 3}, 0)])
def test_the_memory_is_that_of_the_first_of_its_gpus(
    options: dict[str, int], gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {0: 20_000_000, 1: 60_000_000, 2: 80_000_000}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (free[device.index], 10**9))
    values = {"dtype": "float32", "kv_tokens": 64, "prefill_chunk": 16, "warm_start": False, **options}
    made = choose(Checkpoint.open("reference"), values, policy="lru")
    rows = {name: (value, reason) for name, value, reason in made.choices}
    assert rows["device"][0] == "cuda"
    assert rows["memory"] == (tables.count(int(0.92 * free[gpu]), "B"), "free on the GPU")
    beside = 0 if gpu else 256 * 73_728  # a GPU with all experts needs no host memory for them
    assert made.options.host_memory_bytes == beside and ("host memory" in rows) == (beside > 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_are_those_that_unpacked_experts_leave(dtype: str) -> None:
    """An expert of a GGUF file can be larger in a slot than in the file."""
    checkpoint = Checkpoint.open(GOLDEN / "qwen3moe.gguf")
    options = ServeOptions(dtype=dtype, kv_tokens=64, prefill_chunk=16)
    with contextlib.closing(load_lazy(checkpoint, parse_dtype(dtype), products=True)) as loaded:
        assert loaded.files is not None
        slot = stride_of(loaded.files.slot_bytes)
    parts = footprint(checkpoint, options)
    memory = parts.dense_bytes + 64 * parts.kv_token_bytes + 5 * slot
    setup = choose(checkpoint, {**asdict(options), "warm_start": False}, device_memory_bytes=memory)
    assert parts.slot_bytes == slot and ("expert slots", "5 of 8") in [choice[:2] for choice in setup.choices]


def test_where_numba_is_missing_lfru_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint, values = Checkpoint.open("reference"), {"device": "cpu", "dtype": "float32", "warm_start": False}
    memory = 12_000_000
    assert choose(checkpoint, values, device_memory_bytes=memory).policy == "foresight"
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "moetool.prediction.token_kernels", raising=False)
    monkeypatch.delattr(prediction, "token_kernels", raising=False)
    compile_loops.cache_clear()
    made = choose(checkpoint, values, device_memory_bytes=memory)
    assert made.policy == "lfru"
    assert "lfru serves instead" in caplog.text
    with refused(MoetoolError, "foresight", "numba"):
        build_policy("foresight", checkpoint.spec, {}, 60)


def test_what_foresight_remembers_leaves_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(layers=6, experts=32, top_k=4)
    memory = TokenMemory(spec, 200, 8)
    for _ in range(8):
        memory.open_window()
    arrays = [value for value in vars(memory).values() if hasattr(value, "nbytes")]
    assert sum(array.nbytes for array in arrays) == pytest.approx(memory_bytes(spec, 200), rel=0.05)

    checkpoint, values = Checkpoint.open("reference"), {"device": "cpu", "dtype": "float32", "warm_start": False}
    monkeypatch.setattr(budget, "resident_bytes", lambda: 0)
    more, less = (
        choose(checkpoint, values, process_memory_bytes=455_000_000, policy=policy).budget.device_bytes
        for policy in ("lru", "foresight")
    )
    assert more - 73_728 * 20 < less < more - 73_728 * 10


def test_a_device_memory_that_is_too_small_is_refused_with_its_own_parts() -> None:
    checkpoint, values = Checkpoint.open("reference"), {"device": "cpu", "dtype": "float32", "warm_start": False}
    with refused(CapacityError, "--device-memory", "1.0", "MB") as e:
        choose(checkpoint, values, device_memory_bytes=1_000_000)
    assert "KV cache of 1,024 tokens" in str(e.value) and "--set kv_tokens" in str(e.value)
    parts = footprint(checkpoint, ServeOptions())
    least = parts.dense_bytes + 64 * parts.kv_token_bytes + 2 * parts.slot_bytes
    assert choose(checkpoint, {**values, "kv_tokens": 64}, device_memory_bytes=least).budget.device_bytes == least
    with refused(CapacityError, "KV cache", "64"):
        choose(checkpoint, {**values, "kv_tokens": 64}, device_memory_bytes=least - 1)


@pytest.mark.parametrize("more_bytes", [-500_000, 400_000, 60_000_000])
def test_both_limits_hold_where_the_cache_takes_the_rest(monkeypatch: pytest.MonkeyPatch, more_bytes: int) -> None:
    """A device memory that the process cannot fill changes nothing: reading the KV cache takes memory as well."""
    checkpoint, values = Checkpoint.open("reference"), {"device": "cpu", "dtype": "float32"}
    monkeypatch.setattr(budget, "resident_bytes", lambda: 0)
    process = partial(choose, checkpoint, values, process_memory_bytes=700_000_000, policy="lru")
    alone = process()
    assert ("expert slots", "256 of 256") in [row[:2] for row in alone.choices] and alone.options.kv_tokens > 1100
    limit = alone.budget.device_bytes + more_bytes
    made = process(device_memory_bytes=limit)
    assert made.budget.device_bytes <= min(limit, alone.budget.device_bytes)
    assert made.options.kv_tokens == alone.options.kv_tokens or more_bytes < 0
    assert made.options.prefill_chunk == alone.options.prefill_chunk
