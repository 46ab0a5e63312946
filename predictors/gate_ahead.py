"""Gate-ahead: what the routers of the next layers say of the hidden states that this layer's router got.

A block adds to the residual stream and changes little of it, so a later gate already reads much of what it will see.

Source: Eliseev and Mazur, 2023 (Mixtral-Offloading), as FineMoE §§ 2.3 and 6.3 describe it: speculation by the next
layer's gate, worse the farther ahead. Deviations:

- Any of the next layers, not the next alone: distances 1 to 8, as far as the trace or the server looks ahead.
- The hidden states are those that the router of this layer got, normalised by this layer's own norm, since that is what
  a trace and a server have.

Nothing is counted or learned: its weights are empty.
"""

from dataclasses import dataclass

from torch import Tensor

import moetool.learning.predictor
from moetool.errors import MismatchError
from moetool.learning.tokens import Tokens
from moetool.types import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Gate-ahead has no options."""


class Predictor(moetool.learning.predictor.Predictor):
    """Scores an expert by the score that its layer's router gives on an earlier layer's hidden states."""

    needs = frozenset({"experts", "ahead"})

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = 8

    def count(self, tokens: Tokens) -> None:
        """Nothing to count."""

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        """Raises: MismatchError: the gates are not known so far ahead."""
        assert tokens.ahead_TPAE is not None
        last = tokens.num_layers - 1
        distance = layer - last
        if distance > (known := tokens.ahead_TPAE.shape[2]):
            raise MismatchError(
                f"gate_ahead is asked for {distance} layers ahead, but the gates are known for {known}; capture with "
                f"--keep topk,ahead --ahead {distance}, or prefetch less far"
            )
        scores_TE: Tensor = tokens.ahead_TPAE[:, last, distance - 1]
        return scores_TE
