"""Sort a layer's choices by expert."""

from itertools import groupby
from typing import NamedTuple

import torch

_SUMMED_TOKENS = 256
"""Tokens whose products are weighted together on a CPU: the weighted products of all would take twice their memory."""


class Choices(NamedTuple):
    """A layer's choices, sorted by expert.

    Attributes:
        experts: the expert of each choice.
        places: the choice's position in [T * K].
        span_of: an expert's choices.
    """

    experts: torch.Tensor
    places: torch.Tensor
    span_of: dict[int, slice]

    def split(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """Split a tensor with one row per choice by expert."""
        return {expert: x[span] for expert, span in self.span_of.items()}


def by_expert(index_TK: torch.Tensor) -> Choices:
    """Sort choices by expert; those of one expert by rank, then by token.

    The families' own loops use this order, and a row's position can change its last bit.
    """
    # On the CPU: on a GPU every size query would synchronize.
    num_tokens, top_k = index_TK.shape
    ids, order = torch.sort(index_TK.cpu().T.reshape(-1), stable=True)
    places = order % num_tokens * top_k + order // num_tokens
    span_of: dict[int, slice] = {}
    start = 0
    for expert, run in groupby(ids.tolist()):
        stop = start + sum(1 for _ in run)
        span_of[expert] = slice(start, stop)
        start = stop
    return Choices(ids.to(index_TK.device), places.to(index_TK.device), span_of)


def weighted_sum(products: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Sum over each token's experts, [T, D] in the wider type of products [T * K, D] and weights."""
    tokens = _SUMMED_TOKENS if products.device.type == "cpu" else len(weights_TK)
    if len(weights_TK) > tokens:
        summed = torch.empty(
            len(weights_TK), products.shape[1], dtype=torch.promote_types(products.dtype, weights_TK.dtype)
        )
        shares = products.view(len(weights_TK), -1).split(tokens)
        for target, some, weights in zip(summed.split(tokens), shares, weights_TK.split(tokens), strict=True):
            target.copy_(weighted_sum(some.view(weights.numel(), -1), weights))
        return summed
    return (products * weights_TK.reshape(-1, 1)).view(*weights_TK.shape, -1).sum(dim=1)
