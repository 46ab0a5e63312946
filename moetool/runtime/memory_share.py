"""Memory that expert slots and the activations of prompt chunks share while serving."""

from dataclasses import dataclass

from moetool.runtime.sizing import LEAST_CHUNK

_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """How many expert slots a forward borrows for its activations.

    A forward of up to `LEAST_CHUNK` tokens has memory of its own; a longer one borrows in sixteenths of `most_slots`.

    Attributes:
        most_slots: that a whole chunk borrows.
        chunk_tokens: tokens of a whole chunk.
    """

    most_slots: int
    chunk_tokens: int

    def borrowed(self, num_tokens: int) -> int:
        """Slots that a forward of so many tokens borrows."""
        beyond = min(num_tokens, self.chunk_tokens) - LEAST_CHUNK
        if beyond <= 0:
            return 0
        steps = -(-beyond * _STEPS // (self.chunk_tokens - LEAST_CHUNK))
        return -(-self.most_slots * steps // _STEPS)
