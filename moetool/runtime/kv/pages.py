"""Pages of keys and values, and the batch that one forward reads and writes there.

A page is `PAGE_TOKENS` consecutive rows of every layer; `moetool.runtime.kv.ledger` says which request has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from transformers.cache_utils import Cache

from moetool.kernels.cpu.attention import OneQuery
from moetool.runtime.decoding import PAGE_TOKENS, RowShape
from moetool.runtime.returned_memory import release_pages

PLAIN: Final = "one whole sequence"
"""In place of a `KvBatch`, for a forward of one sequence without a cache."""


class Spans(NamedTuple):
    """The sequences of a batch, by how they attend in layers with one window.

    Attributes:
        singles: sequences with one new token that the compiled kernel takes; their keys are in `KvBatch.key_rows`.
        others: for each other sequence, the ends of its queries, and of its keys in `rows`.
        rows: rows of their keys; None: the new tokens are all keys.
    """

    singles: list[OneQuery]
    others: list[tuple[int, int, int, int]]
    rows: torch.Tensor | None


@dataclass(slots=True, eq=False)
class KvBatch:
    """The sequences of one forward, and their rows of the pages.

    Attributes:
        pages: the rows of every layer.
        query_ends: cumulative numbers of the sequences' new tokens, from 0.
        key_ends: cumulative numbers of their keys, new tokens' included, from 0.
        write_row_T: row of each new token, int64.
        key_rows: rows of all keys, sequence by sequence, int64.
        decode: the keys in tensors of fixed shapes (`moetool.runtime.kv.paged_attention.DecodeRows`), if every
            sequence has one new token and all attend in one call.
        cached: whether there are earlier keys (default: if there are more keys than new tokens).
    """

    pages: "KvPages"
    query_ends: list[int]
    key_ends: list[int]
    write_row_T: torch.Tensor
    key_rows: torch.Tensor
    decode: Any = None
    cached: bool | None = None
    _spans: dict[tuple[int | None, bool], Spans] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cached is None:
            self.cached = self.key_ends[-1] > self.query_ends[-1]

    @property
    def sequences(self) -> list[tuple[int, int, int, int]]:
        """For each sequence the ends of its new tokens, and of its keys in `key_rows`."""
        ends = zip(pairwise(self.query_ends), pairwise(self.key_ends), strict=True)
        return [(*queries, *keys) for queries, keys in ends]

    def of_chosen(self, choices: Sequence[torch.Tensor | None]) -> "KvBatch":
        """The batch in which each sequence with one new token has only the keys that it attends to.

        Args:
            choices: for each sequence, the keys of each query [t, k]; None: all before it.
        """
        rows = []
        for (_, _, first, last), chosen_TK in zip(self.sequences, choices, strict=True):
            row_N = self.key_rows[first:last]
            rows.append(row_N if chosen_TK is None or len(chosen_TK) > 1 else row_N[chosen_TK[0].sort().values])
        ends = list(accumulate(map(len, rows), initial=0))
        if ends == self.key_ends:
            return self
        return replace(self, key_ends=ends, key_rows=torch.cat(rows), _spans={})

    def spans(self, window: int | None, compiled: bool) -> Spans:
        """Divide the sequences, once for all layers alike.

        Args:
            window: keys that a query attends to; None: all up to its own.
            compiled: whether the compiled kernel takes sequences with one new token.
        """
        if (window, compiled) in self._spans:
            return self._spans[window, compiled]
        singles: list[OneQuery] = []
        others: list[tuple[int, int, int, int]] = []
        rows: list[torch.Tensor] = []
        num_rows = 0
        for begin, end, first, last in self.sequences:
            if window is not None:
                first = max(first, last - window - (end - begin) + 1)
            if end - begin == 1 and compiled and self.cached:
                singles.append(OneQuery(begin, first, last))
                continue
            others.append((begin, end, num_rows, num_rows + last - first))
            rows.append(self.key_rows[first:last])
            num_rows += last - first
        spans = Spans(singles, others, torch.cat(rows) if self.cached and rows else None)
        self._spans[window, compiled] = spans
        return spans


class KvPages(Cache):
    """Rows of every layer, for any number of requests; to a model it is a cache without earlier tokens.

    Args:
        num_pages: pages that requests may have.
        dtype: of the rows.

    Attributes:
        keys: by layer, [rows, heads, key_width], contiguous. Memory is used from the first write on. The first page
            belongs to nobody and holds zeros, for positions beyond a sequence.
        values: likewise, None for a layer with latents.
        index_keys: by layer, [rows, index_width], None for a layer without an indexer.
        batch: the batch of the forward that runs.
    """

    def __init__(self, shapes: Sequence[RowShape], num_pages: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        self.batch: KvBatch | None = None
        num_rows = (num_pages + 1) * PAGE_TOKENS

        def rows(*shape: int) -> torch.Tensor:
            made = torch.empty(num_rows, *shape, dtype=dtype, device=device)
            made[:PAGE_TOKENS].zero_()
            return made

        self.keys = [rows(shape.heads, shape.key_width) for shape in shapes]
        self.values = [rows(shape.heads, shape.value_width) if shape.value_width else None for shape in shapes]
        self.index_keys = [rows(shape.index_width) if shape.index_width else None for shape in shapes]

    def __len__(self) -> int:
        return len(self.keys)

    def return_memory(self, first: int, end: int) -> None:
        """Return the memory of unused pages, from the first to the end, until they are written again."""
        for rows in self.tensors:
            release_pages(rows[first * PAGE_TOKENS : end * PAGE_TOKENS])

    def close(self) -> None:
        """Free the memory."""
        self.batch = None
        self.keys, self.values, self.index_keys = [], [], []

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The rows of all layers."""
        return [rows for rows in (*self.keys, *self.values, *self.index_keys) if rows is not None]

    def rows_of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values."""
        value = self.values[layer]
        assert value is not None, "latents have attention of their own"
        return self.keys[layer], value

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new tokens' states, as given; they are written where they are attended to."""
        return key_states, value_states
