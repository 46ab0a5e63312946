"""Digest of a run's cache decisions, to compare `replay` with `serve`."""

import hashlib
import struct

import numpy as np

from moetool.caching.residency import Step


class DecisionDigest:
    """Digest of a run's decisions, used as the sink of a `Residency`."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def __call__(self, forward: int, layer: int, step: Step) -> None:
        self._hash.update(struct.pack("<6q", forward, layer, *step))

    def add(self, step_S6: np.ndarray) -> None:
        """Add steps, each after its forward and layer: int64 [S, 6]."""
        self._hash.update(step_S6.astype("<i8", copy=False).data)

    def hexdigest(self) -> str:
        """Return 16 hexadecimal digits over all steps so far, with their forwards and layers."""
        return self._hash.hexdigest()
