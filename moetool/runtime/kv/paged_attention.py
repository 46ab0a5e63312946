"""Attention over a paged KV cache, and over one plain sequence."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moetool.kernels.cpu.attention import OneQuery, attend_one_query, supports

_LEAST_ROOM = 256
_ABSENT = 0  # the model passes no window; None: it passes that there is none
# Without cuDNN, which would plan for each new shape.
_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_WITHOUT_MASK = [SDPBackend.FLASH_ATTENTION, *_WITH_MASK]


class SequenceEnds(NamedTuple):
    """Ends of a batch's sequences, on the CPU: read once per forward, since each read from a GPU waits.

    Attributes:
        queries: cumulative lengths, from 0.
        keys: likewise, by the kind of layer.
    """

    queries: list[int]
    keys: dict[str, list[int]]


class DecodeRows(NamedTuple):
    """Positions in a paged cache of the keys of sequences with one new token each, in fixed-shape tensors.

    They are computed on the device and padded, so that a step recorded as a CUDA graph also fits longer sequences.

    Attributes:
        index_BN: positions in the cache, int64 [sequences, room]; 0 beyond a sequence's keys, a position without
            infinite values.
        newest_B: flat indices of the new tokens' positions.
        mask_B11N: 0 for keys of the sequence, minus infinity beyond them.
    """

    index_BN: torch.Tensor
    newest_B: torch.Tensor
    mask_B11N: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor, ends: torch.Tensor, room: int, dtype: torch.dtype) -> "DecodeRows":
        """Build from the concatenated positions of all sequences' keys and their cumulative lengths, from 0."""
        first, end = ends[:-1, None], ends[1:, None]
        place_BN = first + torch.arange(room, device=index.device)
        inside_BN = place_BN < end
        index_BN = torch.where(inside_BN, index[place_BN.clamp(max=len(index) - 1)], 0)
        mask_BN = torch.zeros(inside_BN.shape, dtype=dtype, device=index.device)
        mask_BN.masked_fill_(~inside_BN, float("-inf"))
        newest_B = torch.arange(len(first), device=index.device) * room + (end - first - 1)[:, 0]
        return cls(index_BN, newest_B, mask_BN[:, None, None])

    def within(self, window: int | None) -> "DecodeRows":
        """The same rows for layers with a sliding window of so many keys; None: without one."""
        if window is None:
            return self
        room = self.index_BN.shape[1]
        newest_B1 = self.newest_B[:, None] % room
        beyond_BN = torch.arange(room, device=newest_B1.device) <= newest_B1 - window
        return self._replace(mask_B11N=self.mask_B11N.masked_fill(beyond_BN[:, None, None], float("-inf")))

    @staticmethod
    def room_for(num_keys: int) -> int:
        """Padded number of keys."""
        return max(_LEAST_ROOM, 1 << (num_keys - 1).bit_length())


class Unwritten:
    """A paged cache whose writes are undone at once, so that attention leaves it unchanged.

    Args:
        cache: paged cache of transformers' continuous batching.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.layer_to_allocator = cache.layer_to_allocator

    def update(
        self, *, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cached keys and values of earlier tokens with those of the new ones."""
        allocator = self.layer_to_allocator[layer_idx]
        slots = kwargs["write_index"][allocator.index]
        views = allocator._kv_token_views[layer_idx]
        held = [view.index_select(0, slots) for view in views]
        key, value = self._cache.update(
            key_states=key_states, value_states=value_states, layer_idx=layer_idx, kwargs=kwargs
        )
        for view, values in zip(views, held, strict=True):
            view.index_copy_(0, slots, values)
        return key, value


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _ABSENT,
    cache: Any = None,
    sequence_ends: SequenceEnds | None = None,
    decode_rows: Sequence[DecodeRows] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a batch of concatenated sequences, each over its own keys only.

    The arguments are those of every transformers attention function.

    transformers' own sdpa path attends over the keys of all sequences at once under a mask, which takes several times
    as long on a CPU.

    Args:
        sequence_ends: ends of each sequence's queries and keys.
        decode_rows: by kind of layer, if every sequence has one new token: all attend in one call.

    Shapes:
        query [1, heads, sum of query lengths, head]; key and value likewise with the KV heads, new tokens only.
    """
    if sliding_window is _ABSENT:  # qwen2_moe applies it by its mask only
        sliding_window = getattr(module, "sliding_window", None) or None
    if cache is None:  # a plain forward of one whole sequence
        return attend(query, key, value, scaling, sliding_window).transpose(1, 2).contiguous(), None
    width = value.shape[-1]
    value = F.pad(value, (0, key.shape[-1] - width))  # latent attention has narrower values; the cache has one width
    allocator = cache.layer_to_allocator[module.layer_idx]
    if decode_rows and not isinstance(cache, Unwritten):
        views, slots = allocator._kv_token_views[module.layer_idx], kwargs["write_index"][allocator.index]
        rows = decode_rows[allocator.index].within(sliding_window)
        return _decode(query, key, value, scaling, rows, views, slots)[..., :width], None
    assert sequence_ends is not None
    query_ends, key_ends = sequence_ends.queries, sequence_ends.keys[allocator.layer_type]
    lengths = [end - first for first, end in pairwise(query_ends)]
    positions = kwargs["read_index"][allocator.index]
    views = allocator._kv_token_views[module.layer_idx]
    usable = len(positions) and not isinstance(cache, Unwritten) and supports(query, views[0])
    spans = [  # of the keys that a sequence's new tokens attend to
        (max(first, end - sliding_window - length + 1) if sliding_window else first, end)
        for (first, end), length in zip(pairwise(key_ends), lengths, strict=True)
    ]
    singles = [OneQuery(query_ends[i], *spans[i]) for i, length in enumerate(lengths) if length == 1 and usable]
    if singles and len(singles) == len(lengths):
        for view, new in zip(views, (key, value), strict=True):
            view.index_copy_(0, kwargs["write_index"][allocator.index], new[0].transpose(0, 1))
    else:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    if singles:
        attend_one_query(query[0], views, positions, singles, scaling, output[0])
    for i, length in enumerate(lengths):
        if length > 1 or not singles:
            queries, keys = slice(*query_ends[i : i + 2]), slice(*spans[i])
            one = attend(query[:, :, queries], key[:, :, keys], value[:, :, keys], scaling, sliding_window)
            output[:, queries] = one.transpose(1, 2)
    return output[..., :width].contiguous(), None


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    rows: DecodeRows,
    views: Sequence[torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Attention [1, B, heads, head] of the new tokens of B sequences.

    Args:
        views: keys and values of the layer in the cache, [., KV heads, head].
        slots: positions of the new ones, [B].
    """
    held = []
    for view, new in zip(views, (key, value), strict=True):
        new_BHD = new[0].transpose(0, 1)
        found = view.index_select(0, rows.index_BN.flatten()).index_copy_(0, rows.newest_B, new_BHD)
        held.append(found.view(*rows.index_BN.shape, *view.shape[1:]).transpose(1, 2))
        view.index_copy_(0, slots, new_BHD)
    num_heads, batch, width = query.shape[1:]
    query_BHGD = query[0].transpose(0, 1).reshape(batch, key.shape[1], num_heads // key.shape[1], width)
    with sdpa_kernel(_WITH_MASK):
        output = F.scaled_dot_product_attention(query_BHGD, held[0], held[1], rows.mask_B11N, scale=scaling)
    return output.reshape(1, batch, num_heads, width)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int | None
) -> torch.Tensor:
    """Causal attention [1, heads, T, head] of one sequence whose last key belongs to its last query.

    Args:
        query: [1, heads, T, head]; key and value likewise with the KV heads and at least T tokens.
        scaling: factor on the scores (default: 1 / sqrt(head)).
        window: number of keys that a query attends to; None: all up to its own.
    """
    mask = _causal_mask(query.shape[2], key.shape[2], window, query.device)
    scored = partial(
        F.scaled_dot_product_attention, is_causal=mask is None and query.shape[2] > 1, attn_mask=mask, scale=scaling
    )
    grouped = query.shape[1] != key.shape[1]
    if query.device.type != "cuda":
        return scored(query, key, value, enable_gqa=grouped)
    with sdpa_kernel(_WITHOUT_MASK if mask is None else _WITH_MASK):
        if mask is None or not grouped:
            return scored(query, key, value, enable_gqa=grouped)
        # The kernel that takes a mask knows no groups of heads: each KV head is a sequence of its own here.
        groups = query[0].unflatten(0, (key.shape[1], -1))
        shared = (heads[0, :, None].expand(-1, groups.shape[1], -1, -1) for heads in (key, value))
        return scored(groups, *shared).flatten(0, 1)[None]


def _causal_mask(num_q: int, num_k: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """True where a query attends; None if plain causal attention suffices."""
    if (window is None or num_k <= window) and (num_q in (1, num_k)):
        return None
    mask = torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)
    return mask if window is None else mask.triu(num_k - num_q - window + 1)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask, since `paged_attention` separates the sequences."""
