"""Schedule of Python's cyclic garbage collector.

A process that starts a model creates hundreds of thousands of permanent objects, those of torch and transformers.
Python scans for garbage after every 700 new objects, so it would scan them repeatedly during the start.
"""

import gc

_USUAL = gc.get_threshold()
_STARTING = (200_000, 10, 10)


def rarely() -> None:
    """Collect garbage less often than by default. Effects: on this process."""
    gc.set_threshold(*_STARTING)


def as_usual() -> None:
    """Restore the default schedule, with present objects excluded from collection. Effects: on this process."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
