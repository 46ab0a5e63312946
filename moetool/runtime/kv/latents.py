"""Multi-head latent attention (MLA) over latents: one row per token for all heads, its latent and its rotary key.

Few queries are absorbed: multiplied by the weights that expand keys, they attend to the rows as to keys and values of
one KV head. Many queries attend to keys and values expanded from the rows, some heads at a time.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from moetool.runtime.kv.indexed import choose_by_sequence

_EXPANDED_BYTES = 64 << 20
"""Keys and values expanded at once."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Weights that expand a layer's latents to keys and values.

    Attributes:
        key_HNR: of keys without their rotary part, [heads, nope, rank].
        value_HVR: of values, [heads, value, rank].
    """

    key_HNR: torch.Tensor
    value_HVR: torch.Tensor

    @classmethod
    def of(cls, module: Any) -> "Expansion":
        """Return views of the weight of an attention module's `kv_b_proj`."""
        nope, value = module.qk_nope_head_dim, module.v_head_dim
        weight = module.kv_b_proj.weight.unflatten(0, (-1, nope + value))
        return cls(weight[:, :nope], weight[:, nope:])

    def absorbs(self, num_queries: int, width: int) -> bool:
        """Whether absorbed queries take less arithmetic per row than expanding it; `width` is a row's."""
        _, nope, rank = self.key_HNR.shape
        value = self.value_HVR.shape[1]
        return num_queries * (2 * width - (nope + width - rank) - value) < (nope + value) * rank

    def absorb(self, query_HTD: torch.Tensor) -> torch.Tensor:
        """Queries for rows [heads, T, rank + rotary], from queries for keys."""
        nope = self.key_HNR.shape[1]
        return torch.cat([query_HTD[..., :nope] @ self.key_HNR, query_HTD[..., nope:]], dim=-1)

    def values(self, sums_HTW: torch.Tensor) -> torch.Tensor:
        """Attention's outputs [heads, T, value], from weighted sums of rows."""
        return sums_HTW[..., : self.key_HNR.shape[2]] @ self.value_HVR.transpose(1, 2)

    def parts(self, row_NW: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Expand rows: some heads, their keys and their values, both [1, heads, N, nope + rotary], until all are done.

        Values are padded with zeros to the width of keys, which attention on most devices requires.
        """
        num_heads, nope, rank = self.key_HNR.shape
        latent_NR, rotary_NE = row_NW[:, :rank], row_NW[:, rank:]
        width, value = nope + rotary_NE.shape[1], self.value_HVR.shape[1]
        step = max(1, _EXPANDED_BYTES // (2 * len(row_NW) * width * row_NW.element_size()))
        for first in range(0, num_heads, step):
            heads = slice(first, first + step)
            key_HNN = latent_NR @ self.key_HNR[heads].transpose(1, 2)
            key = torch.cat([key_HNN, rotary_NE.expand(len(key_HNN), -1, -1)], dim=-1)
            value_HNV = latent_NR @ self.value_HVR[heads].transpose(1, 2)
            yield heads, key[None], F.pad(value_HNV, (0, width - value))[None]


def attend_to_rows(
    expansion: Expansion, query: torch.Tensor, row_NW: torch.Tensor, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Causal attention [1, heads, T, value] of one sequence whose last row belongs to its last query.

    Args:
        query: for keys, [1, heads, T, nope + rotary].
        row_NW: the sequence's rows.
        attend: attention of such queries to keys and values.
    """
    if expansion.absorbs(query.shape[2], row_NW.shape[1]):
        rows = row_NW[None, None]
        return expansion.values(attend(expansion.absorb(query[0])[None], rows, rows)[0])[None]
    value = expansion.value_HVR.shape[1]
    parts = [attend(query[:, heads], key, values)[..., :value] for heads, key, values in expansion.parts(row_NW)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def keep_latents(model: Any) -> Callable[[], None]:
    """Have the attention function of a model receive latents and rotary keys in place of keys and values.

    Indexers choose by sequence (`moetool.runtime.kv.indexed`).

    Returns:
        a function that undoes it.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    indexers = [module.indexer for module in modules if getattr(module, "indexer", None) is not None]
    for module in modules:
        module.expand_kv = _unexpanded
    for indexer in indexers:
        indexer.forward = partial(choose_by_sequence, indexer)

    def undo() -> None:
        for module in modules:
            vars(module).pop("expand_kv", None)
        for indexer in indexers:
            vars(indexer).pop("forward", None)

    return undo


def is_unexpanded(module: Any) -> bool:
    """Whether an attention module is one that `keep_latents` changed."""
    return "expand_kv" in vars(module)


def _unexpanded(kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv_nope, k_rot
