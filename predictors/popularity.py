"""Popularity: the most often chosen experts of a layer, for any token.

Source: DuoServe-MoE § 4.1, Eq. 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base.types import ModelSpec
from moetool.training.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options."""


def popularity(experts_NLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Return P_l(i): the share of expert i among all choices of layer l (Eq. 2).

    Shapes: returns float32 [L, E]; each row sums to 1.
    """
    _, num_layers, _ = experts_NLK.shape
    count_LE = np.stack(
        [np.bincount(experts_NLK[:, layer].ravel(), minlength=num_experts) for layer in range(num_layers)]
    )
    return (count_LE / count_LE.sum(axis=1, keepdims=True)).astype(np.float32)


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by its popularity in its layer.

    Shapes: buffer popularity_LE float32.
    """

    predicts_prompts = True
    popularity_LE: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        self.register_buffer("popularity_LE", torch.zeros(self.num_layers, self.num_experts))

    def count(self, tokens: Tokens) -> None:
        self.popularity_LE.copy_(torch.from_numpy(popularity(tokens.experts_TPK.numpy(), self.num_experts)))

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        return self.popularity_LE[layer].repeat(len(tokens), 1)

    def predict_prompt(self, token_id_S: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the same scores for every token of any prompt."""
        return self.popularity_LE.expand(len(token_id_S), -1, -1), self.popularity_LE
