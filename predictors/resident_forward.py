"""Resident forward: the next router's scores after only resident and shared experts are computed.

Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), § IV-C: the hidden states
from cached experts pass the next layer's attention and gate. `moetool capture --keep resident` runs that forward in
addition to the model's own; `moetool.runtime.recording.resident_gates` defines its resident experts and deviations.
This predictor returns the recorded scores, for the next layer only, as in the paper. A server does not run this
predictor, since a second forward would cost the time that it hides. `moetool evaluate` measures only the lookup in the
trace; the forward itself takes about as long as the layer. Nothing is counted or learned: its weights are empty.
"""

from dataclasses import dataclass

from torch import Tensor

import moetool.training.predictor
from moetool.training.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options: the trace fixes the share of resident experts."""


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert of the next layer by its router's score after the partial forward."""

    needs = frozenset({"experts", "resident"})

    def count(self, tokens: Tokens) -> None:
        """Nothing to count."""

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        assert tokens.resident_TPE is not None and layer == tokens.num_layers
        return tokens.resident_TPE[:, layer - 1]
