"""Counts of experts from programs, and their map."""

import numpy as np

from moetool.caching.event_counts import EventCounts, expert_map
from moetool.caching.residency import Step, StepKind
from tests.synthetic import make_spec


def test_each_needed_expert_counts_once_and_every_load() -> None:
    spec = make_spec(2, 4)
    counts = EventCounts(spec)
    counts.add([Step(StepKind.PREFETCH, 1, 0)])
    counts.add(
        [
            Step(StepKind.HOST, 7, -1),
            Step(StepKind.LOAD, 5, 1),
            Step(StepKind.LOAD, 6, 2),  # the rest of a whole layer: no event needs it
            Step(StepKind.COMPUTE, 4, 3),
            Step(StepKind.COMPUTE, 5, 1),
        ]
    )
    found = counts.to_map(spec, [1, 5, 6])
    assert found["by_layer"] == {"resident": [1, 2], "needed": [0, 3], "loaded": [1, 2], "hits": [0, 1]}
    (place,) = found["devices"]
    assert place["resident"] == [0, 1, 0, 0, 0, 1, 1, 0] and place["loaded"] == [0, 1, 0, 0, 0, 1, 1, 0]
    assert place["needed"] == [0, 0, 0, 0, 1, 1, 0, 1]


def test_many_places_are_added_up() -> None:
    spec = make_spec(1, 2)
    ones_LE = np.ones((1, 2), bool)
    found = expert_map(spec, [(f"s{n}", ones_LE, 2 * ones_LE, 0 * ones_LE) for n in range(17)])
    assert found["by_layer"] == {"resident": [34], "needed": [68], "loaded": [0]}
    assert [place["needed"] for place in found["devices"]] == [[34, 34]]
