"""Sort a layer's choices by expert, and sum their products."""

from collections.abc import Iterable, Mapping, Sequence

import torch

ROWS_TOGETHER = 1024
"""Most rows computed together, because the intermediate values of all are held at once."""
_SUMMED_TOKENS = 256
"""Tokens whose products are weighted together on a CPU: the weighted products of all would take twice their memory."""


class RowsByExpert:
    """Inputs and outputs of experts, by expert.

    Args:
        inputs_of: rows of each expert.

    Attributes:
        rows_of: has the number of each expert's rows as its length.
        outputs_of: rows of the experts computed so far.
    """

    def __init__(self, inputs_of: Mapping[int, torch.Tensor]) -> None:
        self.rows_of: Mapping[int, Sequence[int] | torch.Tensor] = inputs_of
        self.outputs_of: dict[int, torch.Tensor] = {}
        self._inputs_of = inputs_of

    def input(self, expert: int) -> torch.Tensor:
        return self._inputs_of[expert]

    def put(self, expert: int, output: torch.Tensor) -> None:
        """Receive an expert's outputs."""
        self.outputs_of[expert] = output


class ChoiceRows(RowsByExpert):
    """The choices of a layer, sorted by expert; those of one expert by rank, then by token.

    The families' own loops use this order, and a row's position can change its last bit. Few rows are gathered and
    written at once.

    Args:
        experts_TK: the choices.
        x: input rows; choice r is of row r // `each`.
    """

    def __init__(self, experts_TK: Sequence[Sequence[int]], x: torch.Tensor, each: int) -> None:
        top_k = len(experts_TK[0])
        places_of: dict[int, list[int]] = {}
        for rank, experts_T in enumerate(zip(*experts_TK, strict=True)):
            for place, expert in enumerate(experts_T):
                places_of.setdefault(expert, []).append(place * top_k + rank)
        self._places_of = {expert: places_of[expert] for expert in sorted(places_of)}
        counts = [len(places) for places in self._places_of.values()]
        self._at_R = torch.tensor([p for places in self._places_of.values() for p in places], device=x.device)
        self._x, self._each = x, each
        self._few = len(self._at_R) <= ROWS_TOGETHER
        rows = x[self._at_R // each] if self._few else self._at_R
        super().__init__(dict(zip(self._places_of, rows.split_with_sizes(counts), strict=True)))
        self.rows_of = self._places_of
        self._products: torch.Tensor | None = None

    def input(self, expert: int) -> torch.Tensor:
        rows = self._inputs_of[expert]
        return rows if self._few else self._x[rows // self._each]

    def put(self, expert: int, output: torch.Tensor) -> None:
        if self._few:
            self.outputs_of[expert] = output
            return
        if self._products is None:
            self._products = output.new_empty(len(self._at_R), output.shape[1])
        self._products[self._inputs_of[expert]] = output

    def once(self, experts: Iterable[int]) -> tuple[torch.Tensor, list[int] | None]:
        """Return the rows that experts need, each once, and the row of each of their pairs; None: in this order."""
        row_of: dict[int, int] = {}
        places = [place for expert in experts for place in self._places_of[expert]]
        sources = [row_of.setdefault(place // self._each, len(row_of)) for place in places]
        return self._x[list(row_of)], sources if len(row_of) < len(sources) else None

    def products(self) -> torch.Tensor:
        """Return the outputs [T * K, D] in the order of the choices."""
        if self._products is None:
            output = torch.cat([self.outputs_of[expert] for expert in self._places_of])
            self._products = torch.empty_like(output)
            self._products[self._at_R] = output
        return self._products


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
