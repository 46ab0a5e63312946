"""Affinity: the experts that most often follow those just chosen.

Source: DuoServe-MoE § 4.1, Eq. 3. The paper defines the matrix, but no score from it alone. Here the scores of the next
layer are the mean row of the experts just chosen. Farther ahead, this mean is multiplied by the matrices of the layers
between, as in a Markov chain.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base.types import ModelSpec
from moetool.training.tokens import Tokens
from predictors.popularity import popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """No options."""


def affinity(experts_NLK: np.ndarray, num_experts: int) -> np.ndarray:
    """Return A_{l,l+1}(i, j): the share of expert j among layer l+1's choices after expert i of layer l (Eq. 3).

    Deviation: for an expert that was never chosen, Eq. 3 is 0/0; its row is the popularity of the next layer.

    Shapes: returns affinity_MEE float32, M = L-1: [l, i, j] is for experts i of layer l and j of layer l+1; each row
    sums to 1.
    """
    _, num_layers, _ = experts_NLK.shape
    popularity_LE = popularity(experts_NLK, num_experts)
    affinity_MEE = np.empty((num_layers - 1, num_experts, num_experts), np.float32)
    for layer in range(num_layers - 1):
        pair_NKK = experts_NLK[:, layer, :, None].astype(np.int64) * num_experts + experts_NLK[:, layer + 1, None, :]
        count_EE = np.bincount(pair_NKK.ravel(), minlength=num_experts**2).reshape(num_experts, num_experts)
        total_E1 = count_EE.sum(axis=1, keepdims=True)
        affinity_MEE[layer] = np.where(total_E1, count_EE / np.maximum(total_E1, 1), popularity_LE[layer + 1])
    return affinity_MEE


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by its mean affinity to the experts just chosen.

    Shapes: buffer affinity_MEE float32, M = L-1.
    """

    affinity_MEE: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        self.register_buffer("affinity_MEE", torch.zeros(self.num_layers - 1, self.num_experts, self.num_experts))

    def count(self, tokens: Tokens) -> None:
        self.affinity_MEE.copy_(torch.from_numpy(affinity(tokens.experts_TPK.numpy(), self.num_experts)))

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        last = tokens.num_layers - 1
        scores_TE = self.affinity_MEE[last, tokens.experts_TPK[:, last]].mean(dim=1)
        for between in range(last + 1, layer):
            scores_TE = scores_TE @ self.affinity_MEE[between]
        return scores_TE
