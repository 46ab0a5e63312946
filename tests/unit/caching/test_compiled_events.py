"""Compiled events decide as Python does: the same steps, counts and residents."""

import io
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetool.base import tables
from moetool.base.errors import CapacityError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.caching import event_kernels
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.layer_slots import equal_slots
from moetool.caching.machine_split import EventWork, MachineSplit, SplitCosts
from moetool.caching.policies import lru
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from tests.refusals import refused
from tests.synthetic import make_spec, random_stream, run_forwards

FORMS = ((), 1.0, 0.5)  # one pool, equal slots per layer, half of them


def forward(spec: ModelSpec, rng: np.random.Generator, number: int, requests: list[int]) -> ForwardInfo:
    """One forward of several requests, some with a prompt."""
    tokens = {request: int(rng.integers(1, 5)) if rng.random() < 0.2 else 1 for request in requests}
    request_T = tuple(request for request, count in tokens.items() for _ in range(count))
    phase_T = tuple(Phase.PREFILL if tokens[request] > 1 else Phase.DECODE for request in request_T)
    positions = tuple(range(len(request_T)))
    return ForwardInfo(forward_id=number, request_T=request_T, phase_T=phase_T, position_T=positions)


def gates(spec: ModelSpec, rng: np.random.Generator, info: ForwardInfo) -> Iterator[GateEvent]:
    for layer, (num, top_k) in enumerate(zip(spec.num_experts_L, spec.top_k_L, strict=True)):
        chance_E = np.roll(1 / np.arange(1, num + 1), info.request_T[0] * 3 + layer)
        chance_E /= chance_E.sum()
        experts_TK = [tuple(rng.choice(num, top_k, replace=False, p=chance_E).tolist()) for _ in info.request_T]
        yield GateEvent(forward=info, layer=layer, experts_TK=tuple(experts_TK))


def random_split(spec: ModelSpec, rng: np.random.Generator) -> MachineSplit:
    """A split with random costs, in host memory that may hold only some experts."""
    load_s, host_s, device_s = rng.choice([0.2, 0.5, 1.0, 1.7], 3)
    growth, device_growth = rng.choice([0.0, 0.05, 0.9], 2)
    costs = SplitCosts(
        load_s=load_s,
        host_s=host_s,
        device_s=0.1 * device_s,
        host_knots=((2.0, host_s + growth), (4.0, host_s + 3 * growth)) if rng.random() < 0.7 else (),
        device_knots=((2.0, 0.1 * device_s + device_growth),) if rng.random() < 0.7 else (),
        layer_s=float(rng.choice([0.0, 0.5, 3.0])),
        start_s=float(rng.choice([0.0, 0.1])),
        link_share=float(rng.choice([0.5, 0.8, 1.0])),
        host_share=float(rng.choice([0.6, 1.0])),
        disk_s=float(rng.choice([0.0, 0.4, 2.0])),
    )
    held = None if rng.random() < 0.5 else int(rng.integers(1, spec.num_layers * spec.num_experts + 1))
    return MachineSplit(spec, costs, str(rng.choice(["host", "both", "both"])), held)


def decisions(
    name: str, seed: int, monkeypatch: pytest.MonkeyPatch, *, compiled: bool, splits: bool = False
) -> list[Any]:
    """Everything that a residency decides and knows, over random forwards and changes between them."""
    monkeypatch.setattr(Residency, "compiles", compiled)
    rng, steps = np.random.default_rng(seed), list[Any]()
    layers, num = int(rng.integers(1, 5)), int(rng.integers(4, 14))
    spec = make_spec(layers=layers, experts=num, top_k=int(rng.integers(1, min(num, 5))))
    slots, share = int(rng.integers(2, layers * num + 1)), FORMS[seed % 3]
    options: dict[str, Any] = {}
    if name == "foresight":
        sizes = {"memory": int(rng.integers(1, 40)), "neighbours": int(rng.integers(1, 8))}
        options = {**sizes, "refresh": int(rng.integers(1, 4)), "waste": float(rng.choice([0, 0.2, 2.0]))}
    if name == "lfu":
        options = {"forget": bool(seed % 2)}
    own = equal_slots(spec, slots, share) if isinstance(share, float) and slots >= 2 * layers else ()
    policy = build_policy(name, spec, options, slots)
    split = random_split(spec, rng) if splits else None
    residency = Residency(policy, lambda *step: steps.append(step), layer_slots=own, split=split)
    assert (residency.compiled is not None) == (compiled and policy.compiles)
    running, coming = [0], 1
    for number in range(25):
        if rng.random() < 0.15:
            residency.end_request(running.pop(int(rng.integers(len(running)))))
        while not running or (rng.random() < 0.2 and len(running) < 4):
            running.append(coming)
            coming += 1
        if rng.random() < 0.15:
            steps.append(residency.reserve_slots(int(rng.integers(0, slots))))
        if rng.random() < 0.1:
            residency.forget(int(rng.integers(layers * num)))
        if rng.random() < 0.1:
            steps.append(residency.load_into_free_slot(int(rng.integers(layers * num))))
        if split is not None:
            split.active = bool(rng.random() < 0.9)
        if rng.random() < 0.05:
            other = build_policy(str(rng.choice(["lru", "foresight", "lfu", "lfru"])), spec, {}, slots)
            try:
                residency.change(other, () if rng.random() < 0.5 else own)
            except CapacityError:
                steps.append("too many slots are lent")
        info = forward(spec, rng, number, running)
        steps += residency.begin_forward(info)
        for event in gates(spec, rng, info):
            residency.event(event)
        residency.end_forward(info)
        held = {key: residency.slot(key) for key in range(layers * num)}
        steps.append((asdict(residency.prefill), asdict(residency.decode), list(residency.slot_of.items()), held))
        state = {what: array.tolist() for what, array in residency.policy.state().items()}
        steps.append((state, residency.policy.expected_use()))
        steps.append((residency.residents, residency.num_residents, residency.reserved_slots))
    return steps


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ["lru", "lfu", "lfru", "foresight"])
def test_every_decision_is_that_of_python(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decisions(name, seed, monkeypatch, compiled=True)
    assert made == decisions(name, seed, monkeypatch, compiled=False)


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", ["lru", "lfu", "lfru", "foresight"])
def test_every_split_of_misses_is_that_of_python(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decisions(name, seed, monkeypatch, compiled=True, splits=True)
    assert made == decisions(name, seed, monkeypatch, compiled=False, splits=True)


@pytest.mark.parametrize("seed", range(30))
def test_events_in_python_have_compiled_splits_like_those_of_python(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = Counter[bool]()
    plain = EventWork.loaded
    monkeypatch.setattr(EventWork, "loaded", lambda work: tried.update([Residency.compiles]) or plain(work))
    made = decisions("moe_infinity", seed, monkeypatch, compiled=True, splits=True)
    assert made == decisions("moe_infinity", seed, monkeypatch, compiled=False, splits=True)
    assert not tried[True]


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("name", ["lru", "lfu", "lfru", "foresight"])
def test_all_layers_in_one_call_take_the_decisions_of_single_events(name: str, layers: int) -> None:
    spec = make_spec(layers=layers, experts=16, top_k=3)
    one, alone = DecisionDigest(), DecisionDigest()
    stream = list(random_stream(spec, num_requests=3, prompt_tokens=5, new_tokens=30, seed=2))
    together, apart = Residency(build_policy(name, spec, {}, 14)), Residency(build_policy(name, spec, {}, 14), alone)
    for info, events in stream:
        together.begin_forward(info)
        assert together.compiled is not None
        one.add(together.compiled.forward(np.concatenate([event.experts_TK for event in events], axis=1)))
        together.end_forward(info)
        run_forwards(apart, [(info, events)])
    assert one.hexdigest() == alone.hexdigest()
    assert together.counts == apart.counts and apart.counts.missed > 0


@pytest.mark.parametrize("name", ["lfu", "foresight"])
def test_a_compiled_policy_goes_on_from_a_kept_state(name: str) -> None:
    spec = make_spec(layers=2, experts=16, top_k=2)
    stream = list(random_stream(spec, num_requests=2, prompt_tokens=4, new_tokens=12, seed=3))
    earlier = Residency(build_policy(name, spec, {}, 8))
    run_forwards(earlier, stream)
    state, expected = earlier.policy.state(), earlier.policy.expected_use()
    later = Residency(build_policy(name, spec, {}, 8))
    assert later.compiled is not None
    later.policy.restore(state)
    assert {what: array.tolist() for what, array in later.policy.state().items()} == {
        what: array.tolist() for what, array in state.items()
    }
    if name == "lfu":
        assert later.policy.expected_use() == expected and expected


class Changed(lru.Policy):
    """LRU, as a stranger may change it."""


@pytest.mark.parametrize("what", ["subclass", "bytes", "device"])
def test_python_decides_where_compiled_code_cannot(what: str) -> None:
    spec = make_spec()
    policy = Changed(spec, None, 6) if what == "subclass" else build_policy("lru", spec, {}, 6)
    given: dict[str, dict[str, Any]] = {
        "bytes": {"capacity_bytes": 6000},
        "device": {"share": (1, 2)},
    }
    assert Residency(policy, **given.get(what, {})).compiled is None


def test_an_expert_beyond_the_layer_is_refused() -> None:
    residency = Residency(build_policy("lru", make_spec(experts=8), {}, 6))
    info = ForwardInfo(forward_id=0, request_T=(0,), phase_T=(Phase.DECODE,), position_T=(0,))
    with refused(AssertionError, "bounds"):
        residency.event(GateEvent(forward=info, layer=0, experts_TK=((1, 8),)))


class _Said(io.StringIO):
    """Stderr that tells of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.event, self.text = threading.Event(), text

    def write(self, text: str) -> int:
        if self.text in text:
            self.event.set()
        return len(text)


def test_long_compiling_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = _Said("compiling")
    waited: list[bool] = []
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(tables, "START_S", 0.0)
    monkeypatch.setattr(
        event_kernels, "run", SimpleNamespace(compile=lambda signature: waited.append(stderr.event.wait(30)))
    )
    event_kernels.compile_for(None, None)
    assert waited == [True]
