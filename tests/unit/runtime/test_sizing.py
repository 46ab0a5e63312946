"""How memory is divided between activations, KV cache and expert slots."""

import itertools
import re
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetool.base.errors import CapacityError
from moetool.runtime.decoding import PAGE_TOKENS
from moetool.runtime.expected_reads import ExpectedSplit, best_split
from moetool.runtime.memory_share import flexible_share
from moetool.runtime.sizing import (
    GOOD_CONTEXT,
    LEAST_CHUNK,
    LEAST_CONTEXT,
    MOST_CHUNK,
    Footprint,
    MemorySplit,
    with_rest,
)
from tests.refusals import refused

MODEL = Footprint(
    dense_bytes=3_000_000_000,
    slot_bytes=9_437_184,
    num_experts=48 * 128,
    min_slots=2,
    kv_token_bytes=98_304,
    token_bytes=150_000,
    max_context=40_960,
    token_experts=48 * 8,
    context_bytes=4096,
)


def found_with(memory: int) -> ExpectedSplit:
    return best_split(MODEL, memory, kv_tokens=None, chunk_tokens=None, longest=GOOD_CONTEXT)


def chosen(memory: int) -> MemorySplit:
    return found_with(memory).split


@pytest.mark.follows("moetool.runtime.sizing divide")
def test_memory_below_the_least_is_refused_with_the_least() -> None:
    asked = partial(best_split, MODEL, kv_tokens=20_000, chunk_tokens=None, longest=GOOD_CONTEXT)
    with refused(CapacityError, "in all", "a smaller --set kv_tokens") as caught:
        asked(5_000_000_000)
    said = re.search(r"in all ([\d,]+) bytes", str(caught.value))
    assert said is not None and asked(int(said[1].replace(",", ""))).split.slots == MODEL.min_slots
    assert asked(5_000_000_000, kv_tokens=LEAST_CONTEXT).split.slots > MODEL.min_slots


@given(
    memory=st.integers(0, 2**37),
    kv_tokens=st.none() | st.integers(16, 65_536),
    chunk_tokens=st.none() | st.integers(16, 8192),
    num_experts=st.integers(2, 20_000),
    max_context=st.integers(16, 200_000),
)
def test_the_parts_stay_within_the_memory(
    memory: int, kv_tokens: int | None, chunk_tokens: int | None, num_experts: int, max_context: int
) -> None:
    model = replace(MODEL, num_experts=num_experts, max_context=max_context, token_experts=min(384, num_experts))
    try:
        found = best_split(model, memory, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens, longest=GOOD_CONTEXT)
        split = found.split if kv_tokens is not None else with_rest(model, found.split)
    except CapacityError:
        return
    used = (
        model.dense_bytes
        + split.slots * model.slot_bytes
        + split.kv_tokens * (model.kv_token_bytes + model.context_bytes)
        + split.chunk_tokens * model.token_bytes
    )
    assert used + split.unused_bytes == memory
    assert split.unused_bytes >= 0
    assert model.min_slots <= split.slots <= num_experts
    assert split.slots == num_experts or split.unused_bytes < model.slot_bytes
    assert split.kv_tokens % PAGE_TOKENS == 0
    assert split.kv_tokens >= (kv_tokens or min(max_context, LEAST_CONTEXT))
    if chunk_tokens is not None:
        assert split.chunk_tokens == chunk_tokens


def test_more_memory_never_takes_slots_away_and_never_adds_reads() -> None:
    splits = [found_with(gigabytes * 10**9) for gigabytes in range(4, 90)]
    for less, more in itertools.pairwise(splits):
        assert less.split.slots <= more.split.slots
        assert 1.02 * less.loads >= more.loads


def test_a_prompt_is_one_forward_where_memory_is_not_tight() -> None:
    found = best_split(
        MODEL,
        24 * 10**9,
        kv_tokens=None,
        chunk_tokens=None,
        longest=GOOD_CONTEXT,
        share=partial(flexible_share, MODEL, chunk=True, cache=True),
    )
    split = found.split
    assert split.kv_tokens == GOOD_CONTEXT
    assert split.chunk_tokens == MOST_CHUNK
    assert 1500 < split.slots < MODEL.num_experts
    everything = with_rest(MODEL, chosen(96 * 10**9))
    assert everything.slots == MODEL.num_experts
    assert everything.kv_tokens >= MODEL.max_context


def test_too_little_memory_is_refused_with_the_parts() -> None:
    with refused(CapacityError, "3.0 GB", "allow that much") as caught:
        chosen(3 * 10**9)
    needed = int(str(caught.value).split("in all ")[1].split(" bytes")[0].replace(",", ""))
    split = chosen(needed)
    assert (split.slots, split.kv_tokens, split.chunk_tokens) == (MODEL.min_slots, LEAST_CONTEXT, LEAST_CHUNK)
    with pytest.raises(CapacityError):
        chosen(needed - 1)
