"""Arithmetic of `moetool.runtime.budget`: memory split between weights, activations, KV cache and expert slots."""

from dataclasses import dataclass, replace

from moetool.base.errors import CapacityError
from moetool.base.tables import count, percent
from moetool.runtime.decoding import PAGE_TOKENS

GOOD_CONTEXT = 8192
"""Tokens of the longest expected conversation, limited by the model's context."""
LEAST_CONTEXT = 1024
"""Fewest useful tokens of KV cache."""
MOST_KV_TOKENS = 65_536
"""Most tokens of KV cache, even with free memory, unless one context is longer."""
MOST_CHUNK = 8192
"""Most prompt tokens of one forward; longer prompts take several."""
LEAST_CHUNK = 256
"""Prompt tokens of one forward that always have memory."""
_SHARE = 16  # 1/16 of the memory for experts goes to activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory of a model's parts on its device.

    Attributes:
        dense_bytes: weights outside the routed experts, predictor included.
        slot_bytes: one expert slot.
        num_experts: routed experts of all layers.
        min_slots: slots of the smallest pool that works.
        kv_token_bytes: KV cache of one token.
        token_bytes: activations of one token of a forward, at their peak.
        context_bytes: memory for reading the KV cache per token of context: a copy of one layer's keys and values.
        max_context: longest context that the model was trained for.
        token_experts: routed experts that a token needs, over all layers.
    """

    dense_bytes: int
    slot_bytes: int
    num_experts: int
    min_slots: int
    kv_token_bytes: int
    token_bytes: int
    max_context: int
    token_experts: int
    context_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """A division of device memory.

    Attributes:
        slots: expert slots.
        kv_tokens: tokens of the KV cache, whole pages.
        chunk_tokens: most prompt tokens of one forward.
        unused_bytes: the rest.
        why: reasons for slots and chunk, in a few words.
    """

    slots: int
    kv_tokens: int
    chunk_tokens: int
    unused_bytes: int
    why: dict[str, str]


def divide(model: Footprint, memory_bytes: int, *, kv_tokens: int, chunk_tokens: int | None = None) -> MemorySplit:
    """Divide memory between activations, a KV cache of given size and expert slots.

    Activations of `LEAST_CHUNK` tokens come first. If experts lack slots, longer chunks get a fixed share of the rest,
    up to `MOST_CHUNK` tokens.

    Args:
        memory_bytes: bytes for weights, activations, KV cache and slots together.
        chunk_tokens: fixed by the user; None: automatic.

    Raises:
        CapacityError: the memory is below the minimum; the message lists the parts.
    """
    why = {"chunk_tokens": "as set"}
    kv = pages(kv_tokens)
    chunk = min(LEAST_CHUNK, kv) if chunk_tokens is None else chunk_tokens
    kv_token_bytes = model.kv_token_bytes + model.context_bytes
    fixed = model.dense_bytes + kv * kv_token_bytes + chunk * model.token_bytes
    left = memory_bytes - fixed - model.min_slots * model.slot_bytes
    if left < 0:
        raise CapacityError(
            f"{count(memory_bytes, 'B')} is too little: weights outside the experts take "
            f"{count(model.dense_bytes, 'B')}, a KV cache of {kv:,} tokens {count(kv * kv_token_bytes, 'B')}, "
            f"activations {count(chunk * model.token_bytes, 'B')} and {model.min_slots} expert slots "
            f"{count(model.min_slots * model.slot_bytes, 'B')}, in all {memory_bytes - left:,} bytes; "
            + ("allow that much" if kv <= LEAST_CONTEXT else "allow that much, or give a smaller --set kv_tokens")
        )
    if chunk_tokens is None:
        most = min(MOST_CHUNK, kv)
        more = max(0, min(most - chunk, left // _SHARE // model.token_bytes))
        chunk, left = chunk + more, left - more * model.token_bytes
        why["chunk_tokens"] = _size_reason("whole prompts", chunk >= most, more)
    slots = min(model.num_experts, model.min_slots + left // model.slot_bytes)
    left -= (slots - model.min_slots) * model.slot_bytes
    why["slots"] = (
        "every expert" if slots == model.num_experts else f"{percent(slots / model.num_experts, '.0f')} of the experts"
    )
    return MemorySplit(slots=slots, kv_tokens=kv, chunk_tokens=chunk, unused_bytes=left, why=why)


def with_rest(model: Footprint, split: MemorySplit) -> MemorySplit:
    """Give the KV cache the unused memory of a division in which every expert has a slot."""
    kv_token_bytes = model.kv_token_bytes + model.context_bytes
    most = min(max(MOST_KV_TOKENS, model.max_context), 4 * model.max_context) - split.kv_tokens
    more = max(0, min(most, split.unused_bytes // kv_token_bytes)) // PAGE_TOKENS * PAGE_TOKENS
    return replace(split, kv_tokens=split.kv_tokens + more, unused_bytes=split.unused_bytes - more * kv_token_bytes)


def _size_reason(everything: str, complete: bool, more: int) -> str:
    if complete:
        return everything
    return f"1/{_SHARE} of the experts' memory" if more else "the minimum, to leave memory for experts"


def pages(tokens: int) -> int:
    """Tokens of the whole pages that hold this number."""
    return -(-tokens // PAGE_TOKENS) * PAGE_TOKENS
