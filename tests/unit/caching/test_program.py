"""The interpreter of steps: in which order a machine is called."""

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetool.caching.program import run
from moetool.caching.residency import Residency, Step, StepKind
from tests.engines import SomeOnHost
from tests.synthetic import make_spec, random_stream

SPEC = make_spec(layers=2, experts=8)


class Recorder:
    """A machine that records its calls, with the keys of their steps."""

    def __init__(self, in_waves: bool) -> None:
        self.in_waves = in_waves
        self.calls: list[tuple[str, list[int]]] = []

    def load(self, steps: Sequence[Step], idle: bool) -> None:
        self._called("load at once" if idle else "load", steps)

    def prefetch(self, step: Step) -> None:
        self._called("prefetch", [step])

    def wait(self, steps: Iterable[Step]) -> None:
        self._called("wait", steps)

    def compute_on_host(self, steps: Sequence[Step]) -> None:
        self._called("host", steps)

    def compute(self, wave: Sequence[Step]) -> None:
        self._called("compute", wave)

    def _called(self, call: str, steps: Iterable[Step]) -> None:
        self.calls.append((call, [step.key for step in steps]))


def load(key: int, slot: int) -> Step:
    return Step(StepKind.LOAD, key, slot)


def ahead(key: int, slot: int) -> Step:
    return Step(StepKind.PREFETCH, key, slot)


def use(key: int, slot: int) -> Step:
    return Step(StepKind.COMPUTE, key, slot)


def host(key: int) -> Step:
    return Step(StepKind.HOST, key, -1)


def calls(*steps: Step, in_waves: bool = True) -> list[tuple[str, list[int]]]:
    machine = Recorder(in_waves)
    run(steps, machine)
    return machine.calls


def test_residents_are_one_wave_or_computed_one_by_one() -> None:
    steps = use(1, 0), use(2, 1)
    assert calls(*steps) == [("compute", [1, 2])]
    assert calls(*steps, in_waves=False) == [("compute", [1]), ("compute", [2])]


def test_the_host_begins_after_the_first_loads_and_before_the_first_expert() -> None:
    steps = host(3), load(1, 0), load(2, 1), use(1, 0), use(2, 1)
    assert calls(*steps) == [("load", [1, 2]), ("host", [3]), ("compute", [1, 2])]
    assert calls(host(3), ahead(4, 0)) == [("prefetch", [4]), ("host", [3])]


def test_a_wave_ends_where_a_load_reuses_its_slot() -> None:
    steps = use(1, 0), use(2, 1), load(3, 0), use(3, 0), ahead(9, 2)
    assert calls(*steps) == [("compute", [1, 2]), ("load at once", [3]), ("prefetch", [9]), ("compute", [3])]


def test_the_rest_of_a_layer_delays_the_next_expert() -> None:
    steps = load(1, 0), load(5, 2), use(1, 0), load(6, 3), use(2, 1)
    one_by_one = [("load", [1, 5]), ("wait", [5]), ("compute", [1]), ("load", [6]), ("wait", [6]), ("compute", [2])]
    assert calls(*steps, in_waves=False) == one_by_one
    assert calls(*steps)[-1] == ("compute", [1, 2])


@pytest.mark.parametrize("before", [[use(2, 1)], [host(2)], [load(2, 1)]])
def test_a_load_is_idle_only_if_nothing_can_be_computed_before_its_expert(before: list[Step]) -> None:
    assert calls(load(1, 0), use(1, 0))[0] == ("load at once", [1])
    assert all(call != "load at once" for call, _ in calls(*before, load(1, 0), use(1, 0)))


@given(seed=st.integers(0, 999), slots=st.integers(2, 9), in_waves=st.booleans())
def test_no_slot_is_reused_before_its_expert_is_computed(seed: int, slots: int, in_waves: bool) -> None:
    residency = Residency(SomeOnHost(SPEC, slots, seed))
    content: dict[int, int] = {}

    class Slots(Recorder):
        def load(self, steps: Sequence[Step], idle: bool) -> None:
            content.update({step.slot: step.key for step in steps})

        def prefetch(self, step: Step) -> None:
            content[step.slot] = step.key

        def compute(self, wave: Sequence[Step]) -> None:
            assert all(content[step.slot] == step.key for step in wave)
            super().compute(wave)

    for info, events in random_stream(SPEC, num_requests=3, prompt_tokens=3, new_tokens=4, seed=seed):
        run(residency.begin_forward(info), Slots(in_waves))
        for event in events:
            machine = Slots(in_waves)
            run(residency.event(event), machine)
            made = [key for call, keys in machine.calls if call in ("compute", "host") for key in keys]
            assert sorted(made) == [SPEC.expert_key(event.layer, expert) for expert in event.needed]
        residency.end_forward(info)
