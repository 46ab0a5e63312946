"""Rows of the layers, and the division of a batch."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch

from moetool.kernels.cpu.attention import OneQuery
from moetool.models.cache_argument import cache_argument
from moetool.models.loading import LoadedModel
from moetool.models.transformers_internals import attention_of
from moetool.runtime.decoding import RowShape
from moetool.runtime.kv.paged_attention import PAGED, paged_attention
from moetool.runtime.kv.pages import KvBatch, KvPages
from tests.refusals import refused

CPU = torch.device("cpu")


def _batch(pages: KvPages, query_ends: list[int], key_ends: list[int]) -> KvBatch:
    rows = torch.arange(4, 4 + key_ends[-1])
    return KvBatch(
        pages=pages, query_ends=query_ends, key_ends=key_ends, write_row_T=rows[: query_ends[-1]], key_rows=rows
    )


def test_sequences_are_divided_by_what_computes_their_attention() -> None:
    batch = _batch(KvPages([], 4, torch.float32, CPU), [0, 1, 4, 5], [0, 10, 15, 16])
    spans = batch.spans(None, True)
    assert spans.singles == [OneQuery(0, 0, 10), OneQuery(4, 15, 16)] and spans.others == [(1, 4, 0, 5)]
    assert spans.rows is not None and spans.rows.tolist() == list(range(14, 19))
    assert batch.spans(None, True) is spans
    windowed = batch.spans(3, False)
    assert windowed.others == [(0, 1, 0, 3), (1, 4, 3, 8), (4, 5, 8, 9)] and not windowed.singles
    assert windowed.rows is not None and windowed.rows.tolist() == [11, 12, 13, *range(14, 19), 19]
    assert _batch(batch.pages, [0, 1, 4], [0, 1, 4]).spans(None, True).rows is None  # nothing is cached


def test_a_single_query_has_only_the_keys_that_an_indexer_chose() -> None:
    batch = _batch(KvPages([], 4, torch.float32, CPU), [0, 1, 4, 5], [0, 5, 10, 12])
    chosen = torch.tensor([[3, 0, 4]])
    made = batch.of_chosen([chosen, torch.zeros(3, 2, dtype=torch.int64), None])
    assert made.key_rows.tolist() == [4, 7, 8, *range(9, 16)] and made.key_ends == [0, 3, 8, 10]
    assert made.spans(None, True).singles == [OneQuery(0, 0, 3), OneQuery(4, 8, 10)]
    assert batch.of_chosen([None, None, None]) is batch
    one = _batch(batch.pages, [0, 1], [0, 2]).of_chosen([torch.tensor([[0]])])
    assert one.spans(None, False).rows is not None  # its key is an earlier token's


def test_a_layer_of_latents_has_one_row_and_the_model_writes_none() -> None:
    pages = KvPages([RowShape(2, 8, 8), RowShape(1, 20, 0, 6)], 3, torch.float32, CPU)
    assert len(pages) == 2 and pages.values[1] is None
    assert [tensor.shape for tensor in pages.tensors] == [(16, 2, 8), (16, 1, 20), (16, 2, 8), (16, 6)]
    pages.batch = _batch(pages, [0, 2], [0, 2])
    latent, rotary = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 2, 4)
    given = pages.update(latent, rotary, 1, kwargs={})
    assert given[0] is latent and given[1] is rotary
    for tensor in pages.tensors:
        tensor[4:] = 1.0
    before = [tensor.clone() for tensor in pages.tensors]
    pages.update(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8), 0)
    pages.update(latent, rotary, 1)
    assert all(torch.equal(tensor, other) for tensor, other in zip(pages.tensors, before, strict=True))
    assert not pages.keys[0][:4].any() and not pages.keys[1][:4].any()


def test_attention_without_its_batch_is_an_error_and_not_attention_of_one_sequence(full: LoadedModel) -> None:
    query = torch.randn(1, 4, 3, 8)
    with refused(RuntimeError, "kv_batch"):
        paged_attention(SimpleNamespace(layer_idx=0), query, query, query, None)
    model, before = full.model, attention_of(full.model)
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)
    model.set_attn_implementation(PAGED)
    try:
        with refused(RuntimeError, "kv_batch"):
            model(torch.tensor([[3, 4, 5]]), use_cache=False)
    finally:
        model.set_attn_implementation(before)


def test_the_cache_has_the_name_that_the_model_gives_it(full: LoadedModel) -> None:
    def newer(input_ids: Any = None, cache: Any = None) -> None: ...
    def older(input_ids: Any = None, past_key_values: Any = None) -> None: ...

    assert cache_argument(SimpleNamespace(forward=newer)) == "cache"
    assert cache_argument(SimpleNamespace(forward=older)) == "past_key_values"
    assert cache_argument(full.model) in inspect.signature(full.model.forward).parameters
