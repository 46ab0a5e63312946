"""Gate-ahead: the scores of the next layers' routers on this layer's hidden states.

A block changes the residual stream little, so a later gate already reads most of its input.

Source: Eliseev and Mazur, 2023 (Mixtral-Offloading). FineMoE §§ 6.1 and 6.6 describe its speculative prediction, whose
accuracy falls with distance. Deviations:

- It predicts any of the next 8 layers, as far as the trace or the server has their scores.
- The hidden states are those at this layer's router, after this layer's own norm, as available in a trace and a server.

Nothing is counted or learned: its weights are empty.
"""

from dataclasses import dataclass

from torch import Tensor

import moetool.training.predictor
from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.training.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options."""


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by its router's score on an earlier layer's hidden states."""

    needs = frozenset({"experts", "ahead"})

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = 8

    def count(self, tokens: Tokens) -> None:
        """Nothing to count."""

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        """Return the recorded scores. Raises: MismatchError: the gates are not known this far ahead."""
        assert tokens.ahead_TPAE is not None
        last = tokens.num_layers - 1
        distance = layer - last
        if distance > (known := tokens.ahead_TPAE.shape[2]):
            raise MismatchError(
                f"gate_ahead needs gates {distance} layers ahead, but {known} are known; capture with "
                f"--keep topk,ahead --ahead {distance}, or lower the prefetch distance"
            )
        return tokens.ahead_TPAE[:, last, distance - 1]
