"""A digest of the decisions of a run, to compare `replay` with `serve`."""

import hashlib
import struct

from moetool.caching._residency import Step


class DecisionDigest:
    """A short digest of a run's decisions; give it to `Residency` as its sink."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=8)

    def __call__(self, forward: int, layer: int, step: Step) -> None:
        self._hash.update(struct.pack("<6q", forward, layer, *step))

    def hexdigest(self) -> str:
        """16 hexadecimal digits over every step so far, with its forward and layer."""
        return self._hash.hexdigest()
