"""Several devices share the embedded model: the same bits, and a replay of the log takes the same decisions.

Pools in one memory stand for devices here; what is different between GPUs is tested where there are two
(`tests/e2e/test_cuda.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, Phase
from moetool.caching.devices import build_policies, open_pool
from moetool.caching.policy import Policy
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy, parse_devices
from moetool.runtime.assembly import build_engine
from moetool.runtime.experts.device_stores import Stores, open_stores
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.tuning.replay import ReplaySetup, replay
from tests import families
from tests.engines import (
    AllOnHost,
    Answered,
    RandomPolicy,
    SomeOnHost,
    engine,
    every_read_fails_once,
    generate,
    require_replayed,
)
from tests.refusals import refused

TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]
SLOT = 73_728
COSTS = {"load_s": 3.0, "host_s": 1.0}


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any) -> Answered:
    """Every expert has a slot on one device."""
    return Answered.by(engine(reference, tokenizer, "lru", 256), TEXTS, 5)


@pytest.mark.parametrize(
    ("policy", "devices", "slots"),
    [
        *(("lru", devices, slots) for devices, slots in ((2, 4), (2, 65), (3, 40), (3, 256))),
        *((policy, 2, 60) for policy in ("on_demand", "lfu", "duoserve", "promoe", "moe_infinity", "static_split")),
        *(("layerwise", 2, 32), ("moesys", 3, 70), ("finemoe", 3, 60), ("foresight", 2, 30), ("hybrimoe", 2, 40)),
        ("mixtral_offloading", 2, 60),
    ],
)
def test_logits_are_those_of_one_device(
    policy: str, devices: int, slots: int, baseline: Answered, reference: Path, tokenizer: Any, predictor: Any
) -> None:
    made = engine(reference, tokenizer, policy, slots, predictor=predictor, devices=devices)
    assert isinstance(made.store, Stores)
    metrics = baseline.require_same(made)
    assert metrics["slots"] == made.residency.num_slots <= slots
    assert metrics["slots_bytes"] == metrics["slots"] * SLOT


@pytest.mark.parametrize("kind", [RandomPolicy, SomeOnHost, AllOnHost])
@pytest.mark.parametrize("devices", [2, 3])
def test_no_order_of_loads_changes_a_bit(
    kind: Any, devices: int, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    spec = Checkpoint.open(reference).spec
    policies: list[Policy] = [kind(spec, 2 + 3 * seed, seed=seed) for seed in range(devices)]
    made = engine(reference, tokenizer, policies, 0, host_memory_bytes=devices * 12 * SLOT)
    with every_read_fails_once(made.store.files):
        metrics = baseline.require_same(made)
    assert metrics["reads_retried"] > 10
    assert metrics["host_pool_bytes"] == devices * 12 * SLOT
    assert bool(metrics["hosted"]) == (kind is not RandomPolicy)


@pytest.mark.parametrize(
    ("policy", "devices", "slots", "options"),
    [
        ("lru", 2, 41, {}),
        ("lfu", 3, 90, {}),
        ("layerwise", 2, 40, {}),
        ("static_split", 3, 70, {}),
        ("finemoe", 2, 60, {}),
        ("foresight", 2, 60, {}),
        ("promoe", 3, 60, {}),
        ("hybrimoe", 2, 60, COSTS),
        ("smoe", 2, 40, {"alpha": 0.4, **COSTS}),
    ],
)
def test_replay_decides_as_serve_did(
    policy: str,
    devices: int,
    slots: int,
    options: dict[str, Any],
    reference: Path,
    tokenizer: Any,
    predictor: Any,
    tmp_path: Path,
) -> None:
    asked = {"predictor": predictor, "devices": devices}
    made = engine(reference, tokenizer, policy, slots, log=tmp_path / "log", options=options, **asked)
    for i, text in enumerate(TEXTS):  # a request begins while others run
        params = SamplingParams(max_tokens=5 + i, temperature=0.7, seed=i)
        made.submit(tokenizer(text)["input_ids"], params, lambda output: None)
        made.step()
    while not made.idle:
        made.step()
    trace, row = require_replayed(
        made, tmp_path / "log", policy, slots, ReplaySetup(options={policy: options}, **asked)
    )
    assert (row.slots, row.devices) == (made.store.num_slots, devices) and row.counts.needed > 300
    one_device = ReplaySetup(options={policy: options}, predictor=predictor)
    (other,) = replay(trace, [policy], [slots * trace.spec.slot_bytes], one_device)
    assert other.digest != row.digest


@pytest.mark.parametrize("name", ["llama4_text", "longcat_flash", "jetmoe", "dbrx", "gpt_oss", "finished"])
def test_every_way_to_call_experts(name: str, tmp_path: Path) -> None:
    finished = name == "finished"  # made up: what no family here does to an expert's output
    families.save("qwen3_moe" if finished else name, tmp_path)
    tokens = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(24)]])
    info = ForwardInfo(forward_id=0, request_T=(0,) * 24, phase_T=(Phase.PREFILL,) * 24, position_T=tuple(range(24)))
    logits = []
    for shares in ([30], [4, 4], [2, 5, 3]):
        loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
        if finished:
            layers = [replace(layer, form=replace(layer.form, finish=torch.cos)) for layer in loaded.layers]
            loaded = replace(loaded, layers=layers)
        pool = open_pool(build_policies("lru", loaded.spec, {}, shares))
        runtime = ExpertRuntime(loaded, pool, open_stores(loaded, pool, 1))
        runtime.begin_forward(info)
        with torch.inference_mode():
            logits.append(loaded.model(tokens, use_cache=False).logits)
        runtime.end_forward()
        runtime.close()
        assert loaded.files is not None
        loaded.files.shards.close()
    assert torch.equal(logits[1], logits[0]) and torch.equal(logits[2], logits[0])


def test_serve_options_make_the_devices_and_keep_what_they_learn(
    reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    options = ServeOptions(kv_tokens=256, devices=2, host_memory_bytes=21 * SLOT, state=str(tmp_path / "state"))
    memory = {"device_memory_bytes": 12_000_000}
    one = build_engine(Checkpoint.open("reference"), options=ServeOptions(kv_tokens=256), policy="lfu", **memory)
    hits = []
    for _ in range(2):
        made = build_engine(Checkpoint.open("reference"), options=options, policy="lfu", **memory)
        made.state = "ready"
        metrics = made.metrics()
        assert metrics["slots"] == one.store.num_slots  # the same memory in all
        assert metrics["host_pool_bytes"] == 20 * SLOT
        generate(made, [tokenizer(TEXTS[0])["input_ids"]], 12)
        hits.append(made.residency.counts.kept)
        made.close()
    one.close()
    assert (tmp_path / "state").exists()
    assert hits[0] != hits[1]


def test_fewer_gpus_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert parse_devices("cuda", 1) == [torch.device("cuda", 0)]
    assert parse_devices("cuda", 3) == [torch.device("cuda", index) for index in range(3)]
    assert parse_devices("cuda", 2, 2) == [torch.device("cuda", 2), torch.device("cuda", 0)]
    assert parse_devices("cpu", 2) == [torch.device("cpu")] * 2
    with refused(UsageError, "devices", "4", "3 GPUs"):
        parse_devices("cuda", 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with refused(UsageError, "devices", "2", "1 GPU"):
        build_engine(Checkpoint.open("reference"), options=ServeOptions(device="cuda", devices=2))
