"""Memory shared by expert slots, activations of prompt chunks and the KV cache."""

from dataclasses import dataclass

from moetool.runtime.decoding import PAGE_TOKENS
from moetool.runtime.sizing import LEAST_CHUNK, LEAST_CONTEXT, MOST_CHUNK, Footprint, MemorySplit

_STEPS = 16
_FIRST_KV_TOKENS = 64
_FIRST_PART = 32  # largest part of the experts' memory, 1/32, for the initial KV cache, and for the least activations
_LEAST_FIRST_CHUNK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShare:
    """Expert slots that give way to the activations of a forward, and to the growth of the KV cache.

    A forward of up to `first_chunk` tokens borrows nothing; a longer one borrows in sixteenths of `most_slots`.
    A forward that cannot be split, such as a scored prompt, borrows more than a full chunk.

    Attributes:
        slots: slots while prompts are short and the KV cache is small.
        most_slots: slots that a full chunk borrows.
        chunk_tokens: tokens of a full chunk, more than `first_chunk` where it borrows.
        first_chunk: most tokens of a forward that borrows nothing.
        kv_slots: slots that the fully grown KV cache borrows.
        kv_tokens: tokens by which it may grow.
    """

    slots: int
    most_slots: int = 0
    chunk_tokens: int
    first_chunk: int = LEAST_CHUNK
    kv_slots: int = 0
    kv_tokens: int = 0

    def slots_for_forward(self, num_tokens: int) -> int:
        """Slots that a forward of this number of tokens borrows."""
        beyond = num_tokens - self.first_chunk
        if beyond <= 0 or not self.most_slots:
            return 0
        steps = -(-beyond * _STEPS // (self.chunk_tokens - self.first_chunk))
        return -(-self.most_slots * steps // _STEPS)

    def slots_for_cache(self, num_tokens: int) -> int:
        """Slots that the KV cache borrows after growing by this number of tokens."""
        return -(-self.kv_slots * min(num_tokens, self.kv_tokens) // self.kv_tokens) if self.kv_tokens else 0


def fixed_share(split: MemorySplit) -> MemoryShare:
    """The share in which every part keeps its size."""
    return MemoryShare(slots=split.slots, chunk_tokens=split.chunk_tokens)


def flexible_share(model: Footprint, split: MemorySplit, *, chunk: bool, cache: bool) -> MemoryShare:
    """The share with the slots that fit while prompts are short and the KV cache is small.

    A chunk that borrows may be longer than that of `split`, as long as half of the slots stay: a prompt in fewer chunks
    reads fewer experts twice.

    Args:
        split: division of the memory with a full chunk and a full KV cache.
        chunk, cache: which of the two borrow.
    """
    each = model.kv_token_bytes + model.context_bytes
    part = (split.slots * model.slot_bytes + split.kv_tokens * each) // _FIRST_PART
    first_chunk = min(LEAST_CHUNK, max(_LEAST_FIRST_CHUNK, part // model.token_bytes))
    activations = max(0, split.chunk_tokens - first_chunk) * model.token_bytes
    chunk = chunk and first_chunk <= split.chunk_tokens
    borrowed = min(activations // model.slot_bytes, model.num_experts - split.slots) if chunk else 0
    free = model.num_experts - split.slots - borrowed
    first = max(_FIRST_KV_TOKENS, min(LEAST_CONTEXT, part // each)) // PAGE_TOKENS * PAGE_TOKENS
    kv_slots = min(max(0, split.kv_tokens - first) * each // model.slot_bytes, free) if cache else 0
    slots, chunk_tokens = split.slots + borrowed + kv_slots, split.chunk_tokens
    longest = min(MOST_CHUNK, split.kv_tokens)
    if chunk and slots < model.num_experts and chunk_tokens < longest:
        own = activations - borrowed * model.slot_bytes
        missing = -(-((longest - first_chunk) * model.token_bytes - own) // model.slot_bytes)
        most = split.slots + borrowed - max(model.min_slots, (split.slots + borrowed) // 2)
        borrowed = max(borrowed, min(missing, most))
        tokens = first_chunk + (own + borrowed * model.slot_bytes) // model.token_bytes
        chunk_tokens = max(chunk_tokens, min(longest, tokens))
    return MemoryShare(
        slots=slots,
        most_slots=borrowed,
        chunk_tokens=chunk_tokens,
        first_chunk=first_chunk if borrowed else LEAST_CHUNK,
        kv_slots=kv_slots,
        kv_tokens=split.kv_tokens - first if kv_slots else 0,
    )
