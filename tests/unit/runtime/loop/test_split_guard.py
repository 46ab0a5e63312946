"""When the split of misses ends: by steps with and without it, and between requests only."""

from collections.abc import Callable

import pytest

from moetool.runtime.loop.split_guard import SplitGuard


def _serve(guard: SplitGuard, seconds: Callable[[bool], float], requests: int, steps: int = 8) -> list[bool]:
    """Run requests of this many steps; returns whether the split served each."""
    served = []
    for _ in range(requests):
        served.append(guard.active)
        for _ in range(steps):
            guard.add(1, seconds(guard.active))
        guard.choose()
    return served


def test_a_faster_split_stays_and_is_compared_again() -> None:
    guard = SplitGuard(window=8, windows=3)
    served = _serve(guard, lambda split: 1.0 if split else 1.5, 13)
    assert served == [True, True, False, True, True, True, True, True, False, True, True, True, True]
    assert guard.ratio == pytest.approx(2 / 3) and not guard.ended


def test_a_slower_split_ends_for_good() -> None:
    guard = SplitGuard(window=8, windows=3)
    served = _serve(guard, lambda split: 1.5 if split else 1.0, 40)
    assert served == [True, True, False, True, *[False] * 36]
    assert guard.ended and guard.ratio == pytest.approx(1.5)


def test_it_waits_for_the_end_of_requests_and_for_comparable_steps() -> None:
    guard = SplitGuard(window=4, windows=3)
    for _ in range(100):
        guard.add(1, 1.0)
    assert guard.active  # nobody has asked between two requests
    guard.choose()
    for requests in (1, 2, 1):  # the part without the split had two requests in each step, the others one
        for _ in range(4):
            guard.add(requests, 5.0 if guard.active else 1.0)
        guard.choose()
    assert guard.ratio is None and not guard.ended and guard.active
