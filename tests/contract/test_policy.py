"""Every cache policy makes legal programs for any stream and pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetool.base import plugins
from moetool.base.errors import CapacityError
from moetool.base.types import ModelSpec
from moetool.caching.decision_digest import DecisionDigest
from moetool.caching.devices import build_policies, open_pool, own_part
from moetool.caching.layer_slots import equal_slots
from moetool.caching.policy import MIN_SLOTS, Policy, build_policy, policy_class
from moetool.caching.residency import Residency, Step, StepKind
from tests.synthetic import MadeUpPredictor, make_spec, random_stream, run_forwards, slots_of

NAMES = plugins.names("policy")

streams = {
    "num_slots": st.integers(MIN_SLOTS, 40),
    "layers": st.integers(1, 4),
    "top_k": st.integers(1, 4),
    "prompt_tokens": st.integers(0, 9),
    "seed": st.integers(0, 1 << 16),
}


def build(name: str, spec: ModelSpec, num_slots: int, stream: list) -> Policy:
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events in stream for e in events]
    return build_policy(name, spec, {}, num_slots, predictor=MadeUpPredictor(spec), future=future)


def least(name: str, spec: ModelSpec) -> int:
    """The fewest slots that the policy works with."""
    return policy_class(name).min_slots(spec, plugins.load("policy", name).Options())


def run(policies: list[Policy], stream: list, layer_slots: tuple[int, ...] = ()) -> str:
    """Drive a policy, or one for each of several devices, checking each program as an executor would suffer it.

    Gives the digest of all decisions.
    """
    spec = policies[0].spec
    digest = DecisionDigest()
    residency = open_pool(policies, digest, layer_slots=layer_slots)
    in_slot: dict[int, int] = {}  # what an executor that only sees the steps believes
    needed = hits = loads = 0
    requests: list[int] = []
    for info, events in stream:
        programs: list[tuple[set[int], dict[int, int], list[Step]]] = [(set(), {}, residency.begin_forward(info))]
        requests += [r for r in info.request_T if r not in requests]
        for event in events:
            resident = slots_of(residency)
            keys = {spec.expert_key(event.layer, expert) for expert in event.needed}
            needed, hits = needed + len(keys), hits + len(keys & set(resident))
            ready = {key: resident[key] for key in keys if key in resident}  # and where it waits
            programs.append((keys, ready, residency.event(event)))
            after = slots_of(residency)
            assert len(after) <= residency.num_slots
            assert len(set(after.values())) == len(after)
        for waiting, ready, program in programs:
            for step in program:
                if step.kind == StepKind.HOST:
                    assert policies[0].computes_on_host and step.slot == step.evicted == -1
                    waiting.remove(step.key)
                    assert step.key not in ready
                    continue
                assert 0 <= step.slot < residency.num_slots
                if step.kind == StepKind.COMPUTE:
                    assert in_slot[step.slot] == step.key, "computed with the weights of another expert"
                    waiting.remove(step.key)  # once, and only if needed
                    assert ready.pop(step.key) == step.slot
                    continue
                loads += 1
                held = in_slot.get(step.slot)
                assert step.slot not in ready.values(), "overwritten before it was computed"
                assert step.evicted in (-1, held)
                in_slot[step.slot] = step.key
                if step.kind == StepKind.LOAD:
                    ready[step.key] = step.slot
            assert not waiting, "needed and never computed"
        assert all(in_slot[slot] == key for key, slot in slots_of(residency).items())
        residency.end_forward(info)
    for request in requests:
        residency.end_request(request)
    counts = residency.counts
    assert (counts.needed, counts.kept + counts.prefetched, counts.loads) == (needed, hits, loads)
    return digest.hexdigest()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(**streams)
def test_programs_are_legal(name: str, num_slots: int, layers: int, top_k: int, prompt_tokens: int, seed: int) -> None:
    spec = make_spec(layers=layers, experts=8, top_k=top_k)
    stream = list(
        random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=5, seed=seed, signals=True)
    )
    num_slots = max(num_slots, least(name, spec))
    policy = build(name, spec, num_slots, stream)
    used = policy.slots_used(spec, policy.options, num_slots)
    assert MIN_SLOTS <= used <= num_slots
    assert used == policy.num_slots
    assert run([policy], stream) == run([build(name, spec, num_slots, stream)], stream), "not deterministic"


@pytest.mark.parametrize("name", [name for name in NAMES if not policy_class(name).needs_future])
@settings(max_examples=15, deadline=None)
@given(share=st.floats(0.2, 1), **streams)
def test_programs_of_layers_with_slots_of_their_own_are_legal(
    name: str, share: float, num_slots: int, layers: int, top_k: int, prompt_tokens: int, seed: int
) -> None:
    spec = make_spec(layers=layers, experts=8, top_k=top_k)
    stream = list(
        random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=5, seed=seed, signals=True)
    )
    policies = [build(name, spec, max(num_slots, least(name, spec)), stream) for _ in range(2)]
    slots = (
        equal_slots(spec, max(layers, int(policies[0].num_slots * share))) if policies[0].num_slots >= layers else ()
    )
    assert run(policies[:1], stream, slots) == run(policies[1:], stream, slots), "not deterministic"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(devices=st.integers(2, 4), **streams)
def test_programs_of_several_devices_are_legal(
    name: str, devices: int, num_slots: int, layers: int, top_k: int, prompt_tokens: int, seed: int
) -> None:
    spec = make_spec(layers=layers, experts=8, top_k=top_k)
    stream = list(
        random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=5, seed=seed, signals=True)
    )
    future = [[spec.expert_key(e.layer, x) for x in e.needed] for _, events in stream for e in events]
    shares = [max(num_slots // devices, least(name, own_part(spec, device, devices))) for device in range(devices)]

    def build_each() -> list[Policy]:
        return build_policies(name, spec, {}, shares, predictor=MadeUpPredictor(spec), future=future)

    assert run(build_each(), stream) == run(build_each(), stream), "not deterministic"


@pytest.mark.parametrize("name", NAMES)
def test_too_few_slots_are_refused_with_the_numbers(name: str) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    fewest = least(name, spec)
    assert MIN_SLOTS <= fewest <= spec.total_experts
    assert build(name, spec, fewest, []).num_slots <= fewest
    if fewest > MIN_SLOTS:
        message = rf"{name} needs at least {fewest} .*{fewest},000 bytes.* {fewest - 1} fit"
        with pytest.raises(CapacityError, match=message):
            build(name, spec, fewest - 1, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_of_all_experts_loads_each_at_most_once(name: str) -> None:
    spec = make_spec(layers=3, experts=8, top_k=2)
    stream = list(random_stream(spec, num_requests=3, prompt_tokens=6, new_tokens=9, seed=1, signals=True))
    policy = build(name, spec, spec.total_experts, stream)
    if policy.num_slots < spec.total_experts:
        pytest.skip(f"{name} makes use of {policy.num_slots} slots only")
    residency = Residency(policy)
    run_forwards(residency, stream)
    assert residency.counts.loads <= spec.total_experts


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name: str) -> None:
    module, kind = plugins.load("policy", name), policy_class(name)
    assert module.__doc__ and kind.__doc__ and module.Options.__doc__
    assert module.Options.__dataclass_params__.frozen
    assert module.Options() == module.Options()


LENDING = [name for name in NAMES if not policy_class(name).needs_future and not policy_class(name).computes_on_host]


@pytest.mark.parametrize("name", LENDING)
@settings(max_examples=15, deadline=None)
@given(by_layer=st.booleans(), lent=st.lists(st.integers(0, 40), min_size=12, max_size=12), **streams)
def test_programs_are_legal_while_slots_are_lent_and_come_back(
    name: str, by_layer: bool, lent: list[int], num_slots: int, layers: int, top_k: int, prompt_tokens: int, seed: int
) -> None:
    spec = make_spec(layers=layers, experts=8, top_k=top_k)
    stream = list(
        random_stream(spec, num_requests=2, prompt_tokens=prompt_tokens, new_tokens=5, seed=seed, signals=True)
    )
    num_slots = max(num_slots, least(name, spec))
    digests = []
    for _ in range(2):
        digest, policy = DecisionDigest(), build(name, spec, num_slots, stream)
        own = equal_slots(spec, policy.num_slots) if by_layer and policy.num_slots >= layers else ()
        residency = Residency(policy, digest, layer_slots=own)
        lent_slots: list[int] = []
        for (info, events), count in zip(stream, lent * len(stream), strict=False):
            before, newly = residency.reserved_slots, residency.reserve_slots(count)
            assert len(newly) == max(0, residency.reserved_slots - before) and residency.reserved_slots <= count
            capacity = policy.num_slots - residency.reserved_slots
            assert capacity == max(policy.num_slots - count, min(policy.num_slots, max(MIN_SLOTS, len(own))))
            assert len(residency.slot_of) <= capacity
            lent_slots = lent_slots[: residency.reserved_slots] + newly
            assert len(lent_slots) == residency.reserved_slots
            residency.begin_forward(info)
            for event in events:
                keys = {spec.expert_key(event.layer, expert) for expert in event.needed}
                computed = [s.key for s in residency.event(event) if s.kind in (StepKind.COMPUTE, StepKind.HOST)]
                assert sorted(computed) == sorted(keys)
                assert len(residency.slot_of) <= capacity
                assert set(lent_slots).isdisjoint(residency.slot_of.values())
            residency.end_forward(info)
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1], "not deterministic"


@pytest.mark.parametrize("name", ["lru", "lfu", "lfru", "foresight"])
def test_slots_that_come_back_are_used(name: str) -> None:
    spec = make_spec(layers=2, experts=8, top_k=2)
    stream = list(random_stream(spec, num_requests=1, prompt_tokens=0, new_tokens=60, seed=1))
    residency = Residency(build(name, spec, 16, stream), layer_slots=equal_slots(spec, 16))
    for number, (info, events) in enumerate(stream):
        residency.reserve_slots(8 if number < 30 else 0)
        run_forwards(residency, [(info, events)])
        assert number != 29 or len(residency.slot_of) == 8
    assert len(residency.slot_of) == 16
