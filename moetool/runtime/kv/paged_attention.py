"""Attention over pages of keys and values, and over one plain sequence."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moetool.kernels.cpu.attention import attend_one_query, find_attention_kernel, supports
from moetool.models.transformers_internals import attention_of
from moetool.runtime.kv import indexed
from moetool.runtime.kv.indexed import indexed_arguments
from moetool.runtime.kv.latents import Expansion, attend_to_rows, is_unexpanded
from moetool.runtime.kv.pages import PLAIN, KvBatch

PAGED = "moetool_paged"
"""Name of `paged_attention` among transformers' attention functions. No mask function has it, so none is made."""
_LEAST_ROOM = 256
MASK_NUMBERS = 2**23
"""Most numbers of a mask with sinks, which has its own for each head."""
_ABSENT = 0  # the model passes no window; None: it passes that there is none
# Without cuDNN, which would plan for each new shape.
_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_WITHOUT_MASK = [SDPBackend.FLASH_ATTENTION, *_WITH_MASK]


class DecodeRows(NamedTuple):
    """Positions in a paged cache of the keys of sequences with one new token each, in fixed-shape tensors.

    They are computed on the device and padded, so that a step recorded as a CUDA graph also fits longer sequences.

    Attributes:
        index_BN: positions in the cache, int64 [sequences, room]; 0 beyond a sequence's keys, a position without
            infinite values.
        num_keys_B1: keys of each sequence.
        mask_B11N: 0 for keys of the sequence, minus infinity beyond them.
    """

    index_BN: torch.Tensor
    num_keys_B1: torch.Tensor
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
        return cls(index_BN, end - first, mask_BN[:, None, None])

    def within(self, window: int | None) -> "DecodeRows":
        """The same rows for layers with a sliding window of so many keys; None: without one."""
        if window is None:
            return self
        room = torch.arange(self.index_BN.shape[1], device=self.index_BN.device)
        beyond_BN = room < self.num_keys_B1 - window
        return self._replace(mask_B11N=self.mask_B11N.masked_fill(beyond_BN[:, None, None], float("-inf")))

    @staticmethod
    def room_for(num_keys: int) -> int:
        """Padded number of keys."""
        return max(_LEAST_ROOM, 1 << (num_keys - 1).bit_length())


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = _ABSENT,
    kv_batch: KvBatch | str | None = None,
    recorder: Any = None,
    s_aux: torch.Tensor | None = None,
    indices: Sequence[torch.Tensor | None] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a batch of concatenated sequences, each over its own keys only; writes the new keys and values.

    The arguments are those of every transformers attention function.

    An sdpa over the keys of all sequences at once, under a mask, takes several times as long on a CPU.

    Args:
        recorder: records the call (`moetool.runtime.steps.recorder`); nothing is computed.
        kv_batch: the batch and its pages; `PLAIN`: one whole sequence, without pages.
        s_aux: attention sinks: for each head the score of a further key, whose value is 0.
        indices: for each sequence, the keys that an indexer has chosen (`moetool.runtime.kv.indexed`).

    Shapes:
        query [1, heads, sum of query lengths, head]; key and value likewise with the KV heads, new tokens only.

    Raises:
        RuntimeError: there is no `kv_batch`: sequences would attend to each other.
    """
    if sliding_window is _ABSENT:  # qwen2_moe and phimoe apply it by their masks only
        config = getattr(module, "config", None)
        place = config if getattr(config, "model_type", "") == "phimoe" else module
        sliding_window = getattr(place, "sliding_window", None) or None
    if recorder is not None:
        expansion = Expansion.of(module) if is_unexpanded(module) else None
        values = {"scaling": scaling, "window": sliding_window, "sinks": s_aux, "expansion": expansion}
        return recorder.record_attention(module, query, key, value, values), None
    if is_unexpanded(module):
        return attend_latents(module, query, (key, value), scaling, kv_batch, indices), None
    if kv_batch == PLAIN:
        return attend(query, key, value, scaling, sliding_window, s_aux).transpose(1, 2).contiguous(), None
    kv_batch = _require_batch(module, kv_batch)
    views = kv_batch.pages.rows_of(module.layer_idx)
    for view, new in zip(views, (key, value), strict=True):
        view.index_copy_(0, kv_batch.write_row_T, new[0].transpose(0, 1))
    if kv_batch.decode is not None:
        return _decode(query, views, kv_batch.decode.within(sliding_window), scaling, s_aux), None
    spans = kv_batch.spans(sliding_window, supports(query, views[0]))
    if spans.rows is not None:
        key, value = (view.index_select(0, spans.rows).transpose(0, 1)[None] for view in views)
    if not spans.singles:  # views of all sequences at once cost less than slices of each
        num_queries = [end - begin for begin, end, _, _ in spans.others]
        num_keys = [last - first for _, _, first, last in spans.others]
        parts = zip(query.split(num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2), strict=True)
        outputs = [attend(*part, scaling, sliding_window, s_aux).transpose(1, 2) for part in parts]
        return torch.cat(outputs, dim=1), None
    output = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    attend_one_query(query[0], views, kv_batch.key_rows, spans.singles, scaling, output[0], s_aux)
    for begin, end, first, last in spans.others:
        keys = slice(first, last)
        one = attend(query[:, :, begin:end], key[:, :, keys], value[:, :, keys], scaling, sliding_window, s_aux)
        output[:, begin:end] = one.transpose(1, 2)
    return output, None


def attend_latents(
    module: Any,
    query: torch.Tensor,
    new: tuple[torch.Tensor, torch.Tensor],
    scaling: float | None,
    kv_batch: KvBatch | str | None,
    choices: Sequence[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Attention [1, T, heads, value] as `paged_attention`, from latents and rotary keys of the new tokens.

    Args:
        choices: `indices` of `paged_attention`.
    """
    expansion = Expansion.of(module)
    row_T1W = torch.cat(new, dim=-1)[0].transpose(0, 1)
    if kv_batch == PLAIN:
        alone = _causal_or_chosen(scaling, None if choices is None else choices[0])
        return attend_to_rows(expansion, query, row_T1W[:, 0], alone).transpose(1, 2).contiguous()
    kv_batch = _require_batch(module, kv_batch)
    chosen: dict[int, torch.Tensor | None] = {}
    if choices is not None:
        chosen = dict(zip(kv_batch.query_ends, choices, strict=False))
        kv_batch = kv_batch.of_chosen(choices)
    rows = kv_batch.pages.keys[module.layer_idx]
    rows.index_copy_(0, kv_batch.write_row_T, row_T1W)
    if kv_batch.decode is not None:
        assert choices is None, "fixed shapes have all keys"
        sums_BHW = _decode(expansion.absorb(query[0])[None], (rows, rows), kv_batch.decode, scaling)[0]
        return expansion.values(sums_BHW.transpose(0, 1)).transpose(0, 1)[None].contiguous()
    spans = kv_batch.spans(None, compiled_for_rows(query, rows))
    output = query.new_empty(1, query.shape[2], query.shape[1], expansion.value_HVR.shape[1])
    if spans.singles:
        row_B = torch.tensor([one.row for one in spans.singles])
        absorbed_HBW = expansion.absorb(query[0].index_select(1, row_B))
        sums_BHW = query.new_empty(len(row_B), *query.shape[1:2], rows.shape[-1])
        singles = [one._replace(row=i) for i, one in enumerate(spans.singles)]
        attend_one_query(absorbed_HBW, (rows, rows), kv_batch.key_rows, singles, scaling, sums_BHW)
        output[0].index_copy_(0, row_B, expansion.values(sums_BHW.transpose(0, 1)).transpose(0, 1))
    row_NW = (row_T1W if spans.rows is None else rows.index_select(0, spans.rows))[:, 0]
    for begin, end, first, last in spans.others:
        alone = _causal_or_chosen(scaling, chosen.get(begin) if end - begin > 1 else None)
        one = attend_to_rows(expansion, query[:, :, begin:end], row_NW[first:last], alone)
        output[:, begin:end] = one.transpose(1, 2)
    return output


def _causal_or_chosen(scaling: float | None, chosen_TK: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """Attention of one sequence to all keys up to each query's own, or to chosen ones."""
    if chosen_TK is None:
        return partial(attend, scaling=scaling, window=None)
    return partial(_attend_to_chosen, scaling=scaling, chosen_TK=chosen_TK)


def _attend_to_chosen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, chosen_TK: torch.Tensor
) -> torch.Tensor:
    """`attend` to the chosen keys of each query, for some queries at a time: a mask has a number for each key."""
    outputs = []
    step = max(1, indexed.MOST_SCORES // key.shape[2])
    for part_TK, queries in zip(chosen_TK.split(step), query.split(step, dim=2), strict=True):
        mask = torch.zeros(len(part_TK), key.shape[2], dtype=torch.bool, device=query.device)
        outputs.append(_scored(queries, key, value, scaling, mask.scatter_(1, part_TK.long(), True)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def compiled_for_rows(query: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether the compiled kernel attends to rows as to keys and values of one head."""
    return (
        query.dtype == rows.dtype == torch.bfloat16
        and rows.device.type == "cpu"
        and find_attention_kernel(query.shape[1], rows.shape[-1]) is not None
    )


def _require_batch(module: Any, kv_batch: KvBatch | str | None) -> KvBatch:
    if not isinstance(kv_batch, KvBatch):
        raise RuntimeError(f"{type(module).__name__} has not received the batch of its forward (kv_batch)")
    return kv_batch


def plain_arguments(model: Any) -> dict[str, Any]:
    """Arguments of a forward of one whole sequence, whichever attention the model has."""
    return {"kv_batch": PLAIN, **indexed_arguments(model)} if attention_of(model) == PAGED else {}


def _decode(
    query: torch.Tensor,
    views: Sequence[torch.Tensor],
    rows: DecodeRows,
    scaling: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention [1, B, heads, head] of the new tokens of B sequences over a layer's rows [., KV heads, head]."""
    held = [
        view.index_select(0, rows.index_BN.flatten()).view(*rows.index_BN.shape, *view.shape[1:]).transpose(1, 2)
        for view in views
    ]
    num_heads, batch, width = query.shape[1:]
    num_kv_heads = held[0].shape[1]
    query_BHGD = query[0].transpose(0, 1).reshape(batch, num_kv_heads, num_heads // num_kv_heads, width)
    mask = rows.mask_B11N
    if sinks is not None:
        held = [_with_sink(each) for each in held]
        mask = _sink_mask(mask, sinks.view(num_kv_heads, -1, 1))
    with sdpa_kernel(_WITH_MASK):
        output = F.scaled_dot_product_attention(query_BHGD, held[0], held[1], mask, scale=scaling)
    return output.reshape(1, batch, num_heads, width)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention [1, heads, T, head] of one sequence whose last key belongs to its last query.

    Args:
        query: [1, heads, T, head]; key and value likewise with the KV heads and at least T tokens.
        scaling: factor on the scores (default: 1 / sqrt(head)).
        window: number of keys that a query attends to; None: all up to its own.
        sinks: for each head the score of a further key, whose value is 0.
    """
    num_q, num_k = query.shape[2], key.shape[2]
    if sinks is not None:
        return _attend_with_sinks(query, key, value, scaling, window, sinks)
    plain = (window is None or num_k <= window) and num_q in (1, num_k)
    return _scored(query, key, value, scaling, None if plain else _causal_mask(num_q, num_k, window, query.device))


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """`attend`, with the sinks as scores of a last key of zeros, for some queries at a time."""
    (heads, num_q), num_k = query.shape[1:3], key.shape[2]
    span = num_k if window is None else min(num_k, 2 * window)
    step = max(1, min(span, MASK_NUMBERS // (heads * span)))
    outputs = []
    for begin in range(0, num_q, step):
        end = min(begin + step, num_q)
        first = 0 if window is None else max(0, num_k - num_q + begin - window + 1)
        keys, values = (each[:, :, first : num_k - num_q + end] for each in (key, value))
        attended = _causal_mask(end - begin, keys.shape[2], window, query.device)
        mask = query.new_zeros(attended.shape).masked_fill_(~attended, float("-inf"))
        mask = _sink_mask(mask, sinks.view(1, heads, 1, 1))
        outputs.append(_scored(query[:, :, begin:end], _with_sink(keys), _with_sink(values), scaling, mask))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _with_sink(rows: torch.Tensor) -> torch.Tensor:
    """Keys or values [., ., N, D] and a further one of zeros."""
    return F.pad(rows, (0, 0, 0, 1))


def _sink_mask(mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """A mask [.., N] to be added to scores, with sinks [.., 1] as a further column."""
    shape = torch.broadcast_shapes(mask.shape[:-1], sinks.shape[:-1])
    return torch.cat([mask.expand(*shape, -1), sinks.to(mask.dtype).expand(*shape, 1)], dim=-1)


def _scored(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention under a mask [T, N] or [1, heads, T, N]; causal without one."""
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
        grouped_mask = mask if mask.dim() == 2 else mask[0].unflatten(0, (key.shape[1], -1))
        return scored(groups, *shared, attn_mask=grouped_mask).flatten(0, 1)[None]


def _causal_mask(num_q: int, num_k: int, window: int | None, device: torch.device) -> torch.Tensor:
    """True where a query attends, [T, N]."""
    mask = torch.ones(num_q, num_k, dtype=torch.bool, device=device).tril(num_k - num_q)
    return mask if window is None else mask.triu(num_k - num_q - window + 1)
