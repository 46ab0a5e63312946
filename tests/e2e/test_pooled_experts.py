"""One product over the pool, as on a GPU, by the same code on a CPU: the plain tokens, and the same bits always."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.types import ForwardInfo, Phase
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_full, load_lazy
from moetool.runtime.experts.device_stores import fill_device, load_residents
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import open_store
from tests import families
from tests.engines import AllOnHost, Answered, RandomPolicy, SomeOnHost, engine, every_read_fails_once, generate
from tests.greedy import forward_logits
from tests.refusals import refused
from tests.servers import eventually
from tests.streams import Eager

MIXED = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 ="]


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any) -> Answered:
    """Every expert has a slot; the tokens are those of experts that are computed one by one."""
    plain = Answered.by(engine(reference, tokenizer, "lru", 256), MIXED, 6)
    pooled = Answered.by(engine(reference, tokenizer, "lru", 256, pooled=True), MIXED, 6)
    assert pooled.tokens == plain.tokens
    return pooled


@pytest.mark.parametrize(
    ("policy", "slots"),
    [("on_demand", 4), ("on_demand", 256), ("lru", 2), ("lru", 64), ("foresight", 40), ("layerwise", 80)],
)
def test_every_policy_gives_the_same_bits(
    policy: str, slots: int, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    metrics = baseline.require_same(engine(reference, tokenizer, policy, slots, pooled=True))
    assert metrics["misses"] > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", [RandomPolicy, SomeOnHost, AllOnHost])
def test_no_order_of_loads_changes_a_bit(
    kind: Any, seed: int, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    """But for experts computed on the host, whose product is another."""
    policy = kind(Checkpoint.open(reference).spec, 12, seed)
    made = engine(reference, tokenizer, policy, 12, host_memory_bytes=40 * 73_728, io_threads=1 + seed, pooled=True)
    baseline.require_same(made, atol=0.0 if kind is RandomPolicy else 1e-3)


class Replayed:
    """Stands in for a CUDA graph of a layer's experts: computes what the graph would, when it would."""

    def __init__(self, runtime: ExpertRuntime, layer: Any) -> None:
        self.runs = 0
        self._runtime, self._layer = runtime, layer
        self._hidden_TD: Any = None

    def takes(self, hidden_TD: torch.Tensor) -> bool:
        self._hidden_TD = hidden_TD
        return True

    def run(self, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self._runtime.compute_by_table(self._layer, self._hidden_TD, index_TK, weights_TK)


@pytest.mark.parametrize(("policy", "slots"), [("lru", 12), ("lru", 256), ("foresight", 64), ("layerwise", 80)])
def test_products_by_the_table_alone_are_those_of_the_steps(
    policy: str, slots: int, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    made = engine(reference, tokenizer, policy, slots, pooled=True)
    layers = [
        module.moetool_binding[1] for module in made.batcher.model.modules() if hasattr(module, "moetool_binding")
    ]
    graphs = {layer.index: Replayed(made.runtime, layer) for layer in layers}
    made.runtime.recorded = graphs
    counts = baseline.require_same(made)
    assert sum(graph.runs for graph in graphs.values()) > 0
    other = engine(reference, tokenizer, policy, slots, pooled=True)
    assert baseline.require_same(other)["misses"] == counts["misses"]


@pytest.mark.parametrize("experts", [None, 30, 256])
def test_copies_from_host_memory_are_waited_for(
    experts: int | None, baseline: Answered, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetool.runtime.experts.store.open_copies", lambda device: Eager())
    memory = None if experts is None else experts * 73_728
    for policy, slots in (("lru", 20), ("foresight", 50), ("on_demand", 4)):
        baseline.require_same(engine(reference, tokenizer, policy, slots, host_memory_bytes=memory, pooled=True))


def test_with_every_expert_in_its_slot_the_residency_hears_of_events_after_the_forward(
    baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    counts, events = [], []
    for pooled in (False, True):
        made = engine(reference, tokenizer, "lru", 256, pooled=pooled)
        steps: list[Any] = []
        made.residency.sink = lambda *step, steps=steps: steps.append(step)
        if pooled:
            baseline.require_same(made)
        else:
            generate(made, baseline.ids, 6)
            made.close()
        counts.append(made.residency.counts)
        events.append(steps)
    assert counts[0] == counts[1]
    assert events[0] == events[1]


def test_a_residency_that_could_not_hear_of_events_hears_of_the_end_of_their_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.save("qwen3_moe", tmp_path)
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
    residency = Residency(build_policy("lru", loaded.spec, {}, loaded.spec.total_experts))
    store = open_store(loaded, residency)
    load_residents(range(loaded.spec.total_experts), residency, store)
    eventually(lambda: all(store.holds(key, slot) for key, slot in residency.slot_of.items()))
    runtime = ExpertRuntime(loaded, residency, store, pooled=True)
    ended: list[int] = []
    monkeypatch.setattr(residency.policy, "end_forward", lambda info: ended.append(info.forward_id))

    def forward(number: int) -> torch.Tensor:
        phases = (Phase.PREFILL,) * 4
        info = ForwardInfo(forward_id=number, request_T=(0,) * 4, phase_T=phases, position_T=tuple(range(4)))
        runtime.begin_forward(info)
        with torch.inference_mode():
            logits: torch.Tensor = loaded.model(torch.tensor([[3, 4, 5, 6]]), use_cache=False).logits
        return logits

    def broken(slots: Any) -> None:
        raise RuntimeError("the device is lost")

    before = forward(0)
    with monkeypatch.context() as failing:
        failing.setattr(store, "computed", broken)
        with refused(RuntimeError, "device", "lost"):
            runtime.end_forward()
    assert ended == [0]
    assert torch.equal(forward(1), before)
    runtime.end_forward()
    assert ended == [0, 1]
    assert [forward.info.forward_id for forward in runtime.window.forwards()] == [0, 1]
    runtime.close()


def test_a_device_with_room_for_all_is_filled_before_anything_is_asked_for(
    baseline: Answered, reference: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetool.runtime.experts.store.open_copies", lambda device: Eager())
    made = engine(reference, tokenizer, "lru", 256, pooled=True)
    fill_device(made.residency, made.store)
    eventually(lambda: made.metrics()["expert_reads"] == 256)
    metrics = baseline.require_same(made)
    assert metrics["misses"] == 0 and metrics["expert_reads"] == 256


def test_reads_that_fail_are_tried_again(baseline: Answered, reference: Path, tokenizer: Any) -> None:
    made = engine(reference, tokenizer, "lru", 24, pooled=True)
    with every_read_fails_once(made.store.files):
        metrics = baseline.require_same(made)
    assert metrics["reads_retried"] > 0


@pytest.mark.parametrize(
    "family",
    (
        *("qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "olmoe", "glm4_moe", "llama4_text", "longcat_flash"),
        *("jetmoe", "dbrx", "gemma4_text", "nemotron_h"),
    ),
)
@pytest.mark.parametrize("slots", [3, None])
def test_families_give_their_own_logits(family: str, slots: int | None, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    tokens = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(24)]])
    full = load_full(Checkpoint.open(tmp_path), torch.float32)
    full.model.set_experts_implementation("eager")
    with torch.inference_mode():
        expected = full.model(tokens, use_cache=False).logits[0]
    loaded = load_lazy(Checkpoint.open(tmp_path), torch.float32)
    residency = Residency(build_policy("lru", loaded.spec, {}, slots or loaded.spec.total_experts))
    runtime = ExpertRuntime(loaded, residency, open_store(loaded, residency), pooled=True)
    info = ForwardInfo(forward_id=0, request_T=(0,) * 24, phase_T=(Phase.PREFILL,) * 24, position_T=tuple(range(24)))
    for _ in range(2):  # the second time every expert that was needed is there
        runtime.begin_forward(info)
        with torch.inference_mode():
            found = loaded.model(tokens, use_cache=False).logits[0]
        runtime.end_forward()
        assert torch.allclose(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    runtime.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v2"])
def test_in_bfloat16_they_are_as_near_as_transformers_own_ways_to_each_other(family: str, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    tokens = torch.tensor([[(7 * i + 3) % 60 + 3 for i in range(40)]])
    theirs = load_full(Checkpoint.open(tmp_path), torch.bfloat16).model
    logits = {}
    with torch.inference_mode():
        for kind in ("eager", "grouped_mm"):
            theirs.set_experts_implementation(kind)
            logits[kind] = theirs(tokens, use_cache=False).logits[0].float()
    found = forward_logits(tmp_path, tokens, pooled=True, dtype=torch.bfloat16).float()
    bound = 2 * (logits["eager"] - logits["grouped_mm"]).abs().max()
    rounding = 4 * torch.finfo(torch.bfloat16).eps * logits["eager"].abs().max()
    assert (found - logits["eager"]).abs().max() <= max(bound, rounding)
