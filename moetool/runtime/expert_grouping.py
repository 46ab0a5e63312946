"""A layer's choices of experts, put in the order of the experts, and back."""

from itertools import groupby
from typing import NamedTuple

import torch


class Choices(NamedTuple):
    """The choices of a layer in the order of their experts.

    Attributes:
        experts: the expert of each choice.
        places: where the choice stands in [T * K].
        span_of: an expert's choices.
    """

    experts: torch.Tensor
    places: torch.Tensor
    span_of: dict[int, slice]

    def split(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """Each expert's part of what has a row for each choice."""
        return {expert: x[span] for expert, span in self.span_of.items()}

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """Rows for the choices, in the order of [T * K]."""
        restored = torch.empty_like(x)
        restored[self.places] = x
        return restored


def by_expert(index_TK: torch.Tensor) -> Choices:
    """The choices by expert; those of one expert are the first choices first, then by token.

    So do the families' own loops order them, and where a row lies can change its last bit.
    """
    # On the CPU: on a GPU every question of how many would wait for the answer.
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
