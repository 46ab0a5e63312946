"""The composition of a capture: which prompts run together, chosen once and reused by every run and process.

Equal compositions give equal rows. The rows of another composition differ by rounding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

from moetool.base.config import Span, parse, require_within
from moetool.runtime.sizing import pages

_FREE_SHARE = 1 / 6  # of the KV cache: while less is free, prompts wait for requests that decode
_LEAST_KV_TOKENS = 16  # of `ServeOptions`
MOST_TOGETHER = 256
"""Most prompts per batch: an interruption loses at most one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The batches of a capture.

    Attributes:
        sizes: prompts of each batch, in their order.
        kv_tokens: tokens of the KV cache, which holds every batch at full length and a sixth more.
        chunk_tokens: most prompt tokens of one forward.
        slots: expert slots by which the width of decode steps is chosen (`moetool.capture.decode_width`); 0: all
            requests of a batch decode together.
    """

    sizes: tuple[int, ...]
    kv_tokens: int
    chunk_tokens: int
    slots: int = 0

    def __post_init__(self) -> None:
        require_within(self, kv_tokens=Span(1), chunk_tokens=Span(1), slots=Span(0))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for the manifest."""
        return {**asdict(self), "sizes": list(self.sizes)}

    @property
    def most(self) -> int:
        """Most prompts of a batch."""
        return max(self.sizes)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the first prompt of each batch and the one after its last."""
        return pairwise(accumulate(self.sizes, initial=0))


def compose(
    lengths: Sequence[tuple[int, int]], *, batch_size: int | None, kv_tokens: int, chunk_tokens: int, slots: int = 0
) -> Composition:
    """Divide prompts, in their order, into batches.

    Args:
        lengths: tokens of each prompt, and most tokens with its answer.
        batch_size: prompts per batch; None: as many as `kv_tokens` hold at full length, up to `MOST_TOGETHER`, in
            batches of about equal size.
        kv_tokens: limit of the KV cache, where `batch_size` is None.
        chunk_tokens: limit of the prompt tokens of one forward.
    """
    full = [pages(total) for _, total in lengths]
    if batch_size is None:
        sizes = _filled(full, int(kv_tokens * (1 - _FREE_SHARE)))
    else:
        sizes = [min(batch_size, len(full) - start) for start in range(0, len(full), batch_size)]
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    longest_pass = max(sum(prompt for prompt, _ in lengths[start:end]) for start, end in bounds)
    most_tokens = max(sum(full[start:end]) for start, end in bounds)
    return Composition(
        sizes=tuple(sizes),
        kv_tokens=max(_LEAST_KV_TOKENS, pages(int(most_tokens / (1 - _FREE_SHARE)))),
        chunk_tokens=max(1, min(chunk_tokens, longest_pass)),
        slots=slots,
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


def _filled(full: Sequence[int], kv_tokens: int) -> list[int]:
    """Return sizes of batches that each fit into the cache."""
    fewest = len(list(_cut(full, kv_tokens, MOST_TOGETHER)))
    even = -(-len(full) // fewest)
    return list(_cut(full, kv_tokens, even))


def _cut(full: Iterable[int], kv_tokens: int, most: int) -> Iterator[int]:
    size = held = 0
    for tokens in full:
        if size and (size == most or held + tokens > kv_tokens):
            yield size
            size = held = 0
        size, held = size + 1, held + tokens
    yield size
