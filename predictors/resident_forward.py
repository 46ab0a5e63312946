"""Resident forward: what the next router says where resident and shared experts alone have been computed.

Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), § IV-C: the hidden states
that the experts at hand give go through the next layer's attention and its gate. `moetool capture --keep resident`
runs that forward beside the model's own; `moetool.runtime.resident_gates` says which experts it takes to be resident,
and how it deviates. What remains here is to hand on what it found: the next layer only, as printed.

A server runs no such forward: the experts are in its cache and a forward beside the real one would cost what it hides.
So this predictor answers for traces, and the time that `moetool evaluate` gives for it is that of looking up what is
there: the forward itself takes about as long as the layer does. Nothing is counted or learned: its weights are empty.
"""

from dataclasses import dataclass

from torch import Tensor

import moetool.learning.predictor
from moetool.learning.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Resident forward has no options: the share of resident experts is that of the trace."""


class Predictor(moetool.learning.predictor.Predictor):
    """Scores an expert of the next layer by what its router says after the partial forward."""

    needs = frozenset({"experts", "resident"})

    def count(self, tokens: Tokens) -> None:
        """Nothing to count."""

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        assert tokens.resident_TPE is not None and layer == tokens.num_layers
        scores_TE: Tensor = tokens.resident_TPE[:, layer - 1]
        return scores_TE
