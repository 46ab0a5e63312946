"""PathMLP: one hidden layer over a token's observed experts, fading per layer at each unit's own rate.

    z_l      = fade * z_{l-1} + sum over the experts i of layer l of (now[l, i] + root(weight_i) by_weight[l, i])
    logit_m  = relu(z_l + before + phase_l) out_m + bias_m                     for any layer m after l

One pass therefore predicts every later layer after every layer. A training token is used after each of its layers, and
a decode step adds K rows per layer. Units that fade fast hold the last choices; slow ones hold the whole path.

Source: moetool. `before` holds the experts of the request's previous token, known only in `fused`, else zero.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moetool.training.predictor
from moetool.base.types import ModelSpec
from moetool.prediction.path_trust import DISTANCES
from moetool.training.fit_options import PathOptions
from moetool.training.tokens import Tokens
from predictors.popularity import popularity

_DRAWN = 3  # distances per training step: the first and two random ones
_FORGOTTEN = 0.25  # share of training tokens without `before`


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PathOptions):
    """Options of PathMLP."""


class PathNet(nn.Module):
    """The network.

    Shapes: now_LFH, F = 2E: experts, then experts by the root of their weight; before_LEH; phase_LH; fade_H before
        the sigmoid; out_LHE; bias_LE.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int, hidden: int, dropout: float) -> None:
        super().__init__()
        L, E, H = num_layers, num_experts, hidden
        self.num_experts, self.dropout, self.root_scale = E, dropout, math.sqrt(top_k)
        self.now_LFH = nn.Parameter(torch.randn(L, 2 * E, H) * 0.1)
        self.before_LEH = nn.Parameter(torch.randn(L, E, H) * 0.03)
        self.phase_LH = nn.Parameter(torch.zeros(L, H))
        self.fade_H = nn.Parameter(torch.linspace(-1, 5, H))
        self.out_LHE = nn.Parameter(torch.randn(L, H, E) * 0.02)
        self.bias_LE = nn.Parameter(torch.full((L, E), -2.0))

    def begin_at(self, experts_NLK: np.ndarray) -> None:
        """Initialize the biases with each expert's frequency."""
        top_k = experts_NLK.shape[2]
        rate_LE = np.clip(popularity(experts_NLK, self.num_experts) * top_k, 1e-3, 1 - 1e-3)
        self.bias_LE.data.copy_(torch.from_numpy(np.log(rate_LE / (1 - rate_LE))))

    def marks(self, experts_TPK: Tensor, weights_TPK: Tensor) -> Tensor:
        """Return x_TPF: 1 for each used expert, then the root of its weight times the root of K."""
        x_TPF = weights_TPK.new_zeros(*experts_TPK.shape[:2], 2 * self.num_experts)
        x_TPF.scatter_(2, experts_TPK, 1.0)
        root_TPK = weights_TPK.abs().sqrt() * self.root_scale
        return x_TPF.scatter_(2, experts_TPK + self.num_experts, root_TPK)

    def hidden(self, x_TPF: Tensor, before_TLE: Tensor | None = None) -> Tensor:
        """Return hidden_PTH: the hidden layer after each of the first P layers."""
        num_seen = x_TPF.shape[1]
        x_PTH = torch.bmm(x_TPF.transpose(0, 1), self.now_LFH[:num_seen])
        fade_H = self.fade_H.sigmoid()
        z_TH = x_PTH[0]
        z_PTH = [z_TH]
        for p in range(1, num_seen):
            z_TH = z_TH * fade_H + x_PTH[p]
            z_PTH.append(z_TH)
        sum_PTH = torch.stack(z_PTH) + self.phase_LH[:num_seen, None]
        if before_TLE is not None:
            sum_PTH = sum_PTH + before_TLE.flatten(1) @ self.before_LEH.flatten(0, 1)
        return F.dropout(sum_PTH.relu(), self.dropout, self.training)

    def logits(self, hidden_PTH: Tensor, distance: int) -> Tensor:
        """Return logit_MTE of the layers `distance`, `distance` + 1, …, each from `distance` layers before."""
        num_layers = len(self.bias_LE)
        return torch.baddbmm(
            self.bias_LE[distance:, None], hidden_PTH[: num_layers - distance], self.out_LHE[distance:]
        )

    def loss(self, experts_TLK: Tensor, weights_TLK: Tensor, before_TLE: Tensor | None, forget: float) -> Tensor:
        """Return the mean binary cross-entropy over tokens, layers, experts and distances; distance 1 counts twice.

        Training drops the share `forget` of experts and some of `before`, and uses distance 1 and two random ones.
        """
        num_layers = len(self.bias_LE)
        x_TLF = self.marks(experts_TLK, weights_TLK)
        chosen_LTE = x_TLF[..., : self.num_experts].transpose(0, 1)
        distances = [d for d in DISTANCES if d < num_layers]
        if self.training:
            keep_TLE = (torch.rand(*x_TLF.shape[:2], self.num_experts, device=x_TLF.device) >= forget).float()
            x_TLF = x_TLF * keep_TLE.repeat(1, 1, 2)
            if before_TLE is not None:
                known_T = (torch.rand(len(x_TLF), 1, 1, device=x_TLF.device) >= _FORGOTTEN).float()
                before_TLE = before_TLE * known_T * (torch.rand_like(before_TLE) >= forget).float()
            others = [distances[1 + i] for i in torch.randperm(len(distances) - 1).tolist()]
            distances = [1, *others[: _DRAWN - 1]]
        hidden_PTH = self.hidden(x_TLF[:, :-1], before_TLE)
        losses = [
            F.binary_cross_entropy_with_logits(self.logits(hidden_PTH, d), chosen_LTE[d:]) for d in (1, *distances)
        ]
        return torch.stack(losses).mean()


class Predictor(moetool.training.predictor.Predictor):
    """Scores are the logits of the network.

    Attributes:
        net: network.
    """

    needs = frozenset({"experts", "weights"})
    learned = True
    scores_are = "logits"

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        self.net = PathNet(self.num_layers, self.num_experts, self.top_k, options.hidden, options.dropout)

    def count(self, tokens: Tokens) -> None:
        self.net.begin_at(tokens.experts_TPK.numpy())

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        assert tokens.weights_TPK is not None
        last_TH = self.net.hidden(self.net.marks(tokens.experts_TPK, tokens.weights_TPK))[-1]
        return last_TH @ self.net.out_LHE[layer] + self.net.bias_LE[layer]

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the loss over all layers of the tokens; `layer_N` is ignored."""
        assert tokens.weights_TPK is not None
        return self.net.loss(tokens.experts_TPK, tokens.weights_TPK, None, self.options.forget)
