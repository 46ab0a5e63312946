"""A start is not slowed down by looking for garbage, and what comes after it is looked through as usual."""

import gc
import weakref

from moetool.base import garbage


class _Ring:
    def __init__(self) -> None:
        self.itself = self


def _collected_among(num_objects: int) -> bool:
    """Whether garbage is gone once so many objects have been made after it."""
    ring = weakref.ref(_Ring())
    kept = [[] for _ in range(num_objects)]
    return ring() is None and len(kept) == num_objects


def test_garbage_waits_while_a_process_starts() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    kept = [[]]  # is not frozen yet
    try:
        garbage.rarely()
        gc.collect()
        assert not _collected_among(100_000)
        garbage.as_usual()
        assert gc.get_freeze_count() > frozen and kept
        assert _collected_among(100_000)
    finally:
        gc.set_threshold(*usual)
