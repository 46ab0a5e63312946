"""Attention of one query a sequence by the compiled kernel, against float64, and beside torch's in one batch."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moetool.kernels.cpu.attention import OneQuery, attend_one_query, find_attention_kernel
from moetool.runtime.decoding import PAGE_TOKENS, RowShape
from moetool.runtime.kv.paged_attention import paged_attention
from moetool.runtime.kv.pages import KvBatch, KvPages

SLOTS = 300


def _cache(kv_heads: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, SLOTS, kv_heads, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _queries(heads: int, count: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(heads, count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _attended(query: torch.Tensor, cache: torch.Tensor, keys: list[torch.Tensor]) -> torch.Tensor:
    ends = [0]
    for each in keys:
        ends.append(ends[-1] + len(each))
    output = torch.full((len(keys), query.shape[0], query.shape[2]), 7.0).bfloat16()
    sequences = [OneQuery(i, ends[i], ends[i + 1]) for i in range(len(keys))]
    attend_one_query(query, tuple(cache), torch.cat(keys), sequences, None, output)
    return output


def _exact(query: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    key, value = (each[positions].transpose(0, 1).double()[None] for each in cache)
    return F.scaled_dot_product_attention(query.double()[None], key, value, enable_gqa=True)[0, :, 0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(32, 4, 128), (4, 4, 192), (6, 2, 32), (24, 1, 64), (5, 1, 80)]
)
def test_attention_is_that_of_float64_but_for_one_rounding(heads: int, kv_heads: int, width: int) -> None:
    cache, query = _cache(kv_heads, width), _queries(heads, 3, width)
    keys = [torch.randperm(SLOTS, generator=torch.Generator().manual_seed(n))[:n] for n in (1, 17, 230)]
    for n, output in enumerate(_attended(query, cache, keys)):
        exact = _exact(query[:, n : n + 1], cache, keys[n])
        assert torch.allclose(output.double(), exact, rtol=2**-8, atol=1e-5)


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads() -> None:
    cache, query = _cache(4, 64), _queries(32, 5, 64)
    keys = [torch.arange(n, 2 * n) for n in (1, 90, 33, 149, 16)]
    together = _attended(query, cache, keys)
    threads = torch.get_num_threads()
    for count in (1, 2):
        torch.set_num_threads(count)
        for n, each in enumerate(keys):
            assert torch.equal(_attended(query[:, n : n + 1], cache, [each])[0], together[n])
    torch.set_num_threads(threads)


def test_scores_far_apart_and_numbers_that_are_not_finite() -> None:
    cache, query = _cache(2, 32), _queries(4, 2, 32)
    cache[0, 5] = 40 * query[0, 0]  # takes all the weight of its heads
    query[1, 1, 3] = float("nan")
    keys = torch.arange(20)
    output = _attended(query, cache, [keys, keys])
    assert torch.allclose(output[0].double(), _exact(query[:, :1], cache, keys), rtol=2**-8, atol=1e-5)
    assert output[1, 1].isnan().all()
    assert output[1, 0].isfinite().all()


def test_what_the_kernel_does_not_compute_is_left_to_torch() -> None:
    assert find_attention_kernel(2, 20) is None  # no whole vectors
    assert find_attention_kernel(2, 32) is not None


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(32, 4, 64), (6, 2, 32), (24, 1, 64), (4, 4, 32)])
def test_a_sink_is_a_key_whose_value_is_zero(heads: int, kv_heads: int, width: int) -> None:
    cache, query = _cache(kv_heads, width), _queries(heads, 2, width)
    sinks = 3 * torch.randn(heads, generator=torch.Generator().manual_seed(2)).bfloat16()
    keys = torch.arange(40)
    output = torch.empty(2, heads, width).bfloat16()
    sequences = [OneQuery(0, 0, 1), OneQuery(1, 0, 40)]
    attend_one_query(query, tuple(cache), keys, sequences, None, output, sinks)
    for row, (_, _, end) in enumerate(sequences):
        key, value = (each[:end].transpose(0, 1).double().repeat_interleave(heads // kv_heads, 0) for each in cache)
        scores = (query[:, row, None].double() @ key.mT)[:, 0] * width**-0.5
        weights = torch.cat([scores, sinks[:, None].double()], dim=1).softmax(1)[:, :-1]
        assert torch.allclose(output[row].double(), (weights[:, None] @ value)[:, 0], rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (1, 6, 1), (4, 3)])
def test_new_tokens_beside_prompts_are_computed_as_alone(lengths: tuple[int, ...], window: int | None) -> None:
    heads, kv_heads, width, past = 8, 2, 64, 40
    places = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3)).split(SLOTS // len(lengths))
    keys = [place[: past + length] for place, length in zip(places, lengths, strict=True)]
    new = sum(lengths)
    query = _queries(heads, new, width)[None]
    key, value = (_queries(kv_heads, new, width, seed)[None] for seed in (4, 5))
    written = torch.cat([place[past:] for place in keys])
    query_ends, key_ends = [0], [0]
    for length, place in zip(lengths, keys, strict=True):
        query_ends.append(query_ends[-1] + length)
        key_ends.append(key_ends[-1] + len(place))
    pages = KvPages([RowShape(kv_heads, width, width)], SLOTS // PAGE_TOKENS, torch.bfloat16, torch.device("cpu"))
    full = _cache(kv_heads, width)
    for rows, held in zip((pages.keys[0], pages.values[0]), full, strict=True):
        assert rows is not None
        rows[:SLOTS] = held
    batch = KvBatch(
        pages=pages, query_ends=query_ends, key_ends=key_ends, write_row_T=written, key_rows=torch.cat(keys)
    )
    output, _ = paged_attention(
        SimpleNamespace(layer_idx=0), query, key, value, None, sliding_window=window, kv_batch=batch
    )
    full = torch.stack([rows[:SLOTS] for rows in pages.rows_of(0)])
    assert torch.equal(full[0][written], key[0].transpose(0, 1))
    for n, length in enumerate(lengths):
        mine = query[0, :, query_ends[n] : query_ends[n + 1]]
        for i in range(length):
            exact = _exact(mine[:, i : i + 1], full, keys[n][: past + i + 1][-(window or SLOTS) :])
            assert torch.allclose(output[0, query_ends[n] + i].double(), exact, rtol=2**-6, atol=1e-2)
        if length == 1:
            assert torch.equal(output[0, query_ends[n]], _attended(mine, full, [keys[n][-(window or SLOTS) :]])[0])
