"""The composition of a capture: which prompts run together, chosen once and reused by every run and process.

Equal compositions give equal rows. The rows of another composition differ by rounding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from moetool.base.config import Span, parse, require_within
from moetool.runtime.sizing import pages

_FREE = 6  # share 1 / 6 of the KV cache: while less is free, prompts wait for requests that decode
_REFILL = 8  # share 1 / 8 of the rest: when it is free, further prompts begin beside those that decode
_REFILLS = 4  # times as many prompts as run together
_LEAST_KV_TOKENS = 16  # of `ServeOptions`
MOST_PROMPTS = 256
"""Most prompts per batch: an interruption loses at most one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The batches of a capture.

    Attributes:
        sizes: prompts of each batch, in their order.
        kv_tokens: tokens of the KV cache, which holds the requests that run at full length and a sixth more.
        chunk_tokens: most prompt tokens of one forward.
        together: most requests that run at once; further prompts of a batch begin as others end. 0: all.
        slots: expert slots by which the width of decode steps is chosen (`moetool.capture.decode_width`); 0: all
            requests of a batch decode together.
    """

    sizes: tuple[int, ...]
    kv_tokens: int
    chunk_tokens: int
    together: int = 0
    slots: int = 0

    def __post_init__(self) -> None:
        require_within(self, kv_tokens=Span(1), chunk_tokens=Span(1), together=Span(0), slots=Span(0))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for the manifest."""
        return {**asdict(self), "sizes": list(self.sizes)}

    @property
    def most(self) -> int:
        """Most requests that run at once."""
        return self.together or max(self.sizes)

    @property
    def room_tokens(self) -> int:
        """Tokens of the requests that run, at full length."""
        return self.kv_tokens - -(-self.kv_tokens // _FREE)

    @property
    def refill_tokens(self) -> int:
        """Free room from which further prompts begin beside others."""
        return self.room_tokens // _REFILL

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first prompt of each batch and the one after its last."""
        return pairwise(accumulate(self.sizes, initial=0))


def compose(
    lengths: Sequence[tuple[int, int]],
    *,
    batch_size: int | None,
    kv_tokens: int,
    chunk_tokens: int,
    most_together: int | None = None,
    most_prompts: int = MOST_PROMPTS,
) -> Composition:
    """Divide prompts, in their order, into batches.

    Args:
        lengths: tokens of each prompt, and most tokens with its answer.
        batch_size: prompts per batch, which all run together; None: a few times as many as `kv_tokens` hold at full
            length, which divide the prompts about equally.
        kv_tokens: limit of the KV cache, where `batch_size` is None.
        chunk_tokens: limit of the prompt tokens of one forward.
        most_together: limit of the requests that run at once, where `batch_size` is None.
        most_prompts: limit of the prompts per batch, where `batch_size` is None.
    """
    full = [pages(total) for _, total in lengths]
    if batch_size is None:
        room = kv_tokens - -(-kv_tokens // _FREE)
        together = max(_cut(full, room, min(most_together or len(full), most_prompts)))
        together = -(-len(full) // -(-len(full) // together))
        size = together * max(1, min(_REFILLS, most_prompts // together))
    else:
        room, together, size = sum(full), batch_size, batch_size
    sizes = [min(size, len(full) - start) for start in range(0, len(full), size)]
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    longest_pass = max(sum(sorted(prompt for prompt, _ in lengths[start:end])[-together:]) for start, end in bounds)
    most_tokens = max(max(full), min(room, max(sum(full[start:end]) for start, end in bounds)))
    return Composition(
        sizes=tuple(sizes),
        kv_tokens=max(_LEAST_KV_TOKENS, pages(-(-_FREE * most_tokens // (_FREE - 1)))),
        chunk_tokens=max(1, min(chunk_tokens, longest_pass)),
        together=min(together, max(sizes)),
    )


def stored_composition(facts: Mapping[str, Any], num_prompts: int) -> Composition | None:
    """Return the composition in the facts of an earlier run; None if there is none, or it has other prompts.

    Raises:
        UsageError: it is damaged.
    """
    if (stored := facts.get("composition")) is None:
        return None
    found: Composition = parse(Composition, stored, "composition")
    return found if sum(found.sizes) == num_prompts else None


def _cut(full: Iterable[int], kv_tokens: int, most: int) -> Iterator[int]:
    """Yield sizes of groups that each fit into the cache."""
    size = held = 0
    for tokens in full:
        if size and (size == most or held + tokens > kv_tokens):
            yield size
            size = held = 0
        size, held = size + 1, held + tokens
    yield size
