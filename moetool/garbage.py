"""Schedule of Python's cyclic garbage collector.

A process that starts a model makes 400,000 objects that stay: what torch and transformers consist of. As Python looks
for garbage after every 700 new objects, it looks through them again and again, a sixth of the time that a server
takes to start.
"""

import gc

_USUAL = gc.get_threshold()
_STARTING = (200_000, 10, 10)


def rarely() -> None:
    """Look for garbage after many more new objects than usual. Effects: on this process."""
    gc.set_threshold(*_STARTING)


def as_usual() -> None:
    """Look for garbage as usual again, but never among what is there by now. Effects: on this process."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
