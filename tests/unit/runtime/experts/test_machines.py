"""Steps of an event that a machine may leave to later calls of a recorded step."""

import pytest

from moetool.caching.residency import Step, StepKind
from moetool.runtime.experts.machines import keeps_experts

COMPUTE, LOAD, PREFETCH = StepKind.COMPUTE, StepKind.LOAD, StepKind.PREFETCH


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([Step(LOAD, 4, 1), Step(COMPUTE, 3, 0), Step(COMPUTE, 4, 1)], True),
        ([Step(COMPUTE, 3, 0), Step(PREFETCH, 9, 1)], True),
        ([Step(COMPUTE, 3, 0), Step(PREFETCH, 9, 0, 3)], False),
        ([Step(COMPUTE, 3, 0), Step(LOAD, 4, 0, 3), Step(COMPUTE, 4, 0)], False),
    ],
)
def test_experts_stay_unless_a_load_takes_their_slot(steps: list[Step], kept: bool) -> None:
    assert keeps_experts(steps) is kept
