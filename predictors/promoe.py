"""ProMoE: a small perceptron per layer that predicts later layers' experts from its hidden states.

Source: ProMoE (Song et al., 2024), as FineMoE § 6.1 describes it: stride-based speculative prefetching by predictors
that are trained for each model. Readings and deviations:

- FineMoE describes trained predictors and a stride, but no inputs, widths, loss or training. Here a network with one
  hidden layer reads a router's hidden states and has an output for each of the next `stride` layers. One small network
  per layer thus serves every distance up to the stride.
- Inputs are standardized by the mean and deviation of the training tokens.
- The loss is the binary cross-entropy of ExpertMLP (DuoServe-MoE Eq. 6), mean over layers, distances and experts.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moetool.training.predictor
from moetool.base.config import DROPPED, Span, require_within
from moetool.base.types import ModelSpec
from moetool.training.tokens import Tokens

_PIECE = 4096  # tokens per partial sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ProMoE's predictors.

    Attributes:
        stride: maximum distance in layers.
        hidden: width of the hidden layer.
        dropout: share of the hidden activations dropped in training.
    """

    stride: int = 4
    hidden: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        require_within(self, "promoe: ", stride=Span(1), hidden=Span(1), dropout=DROPPED)


class Predictor(moetool.training.predictor.Predictor):
    """Scores are the logits of the network of the last observed layer.

    Shapes: M = L-1 networks, S = the stride, H = the hidden width: parameters in_MDH, in_MH, out_MHF and out_MF with
        F = S * E; buffers mean_MD and scale_MD.
    """

    needs = frozenset({"experts", "hidden"})
    learned = True
    scores_are = "logits"
    mean_MD: Tensor
    scale_MD: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        M, D, H, E = self.num_layers - 1, spec.hidden_size, options.hidden, self.num_experts
        self.lookahead = min(options.stride, M)
        self.dropout = options.dropout
        F_ = self.lookahead * E
        self.register_buffer("mean_MD", torch.zeros(M, D))
        self.register_buffer("scale_MD", torch.ones(M, D))
        self.in_MDH = nn.Parameter(torch.randn(M, D, H) / math.sqrt(D))
        self.in_MH = nn.Parameter(torch.zeros(M, H))
        self.out_MHF = nn.Parameter(torch.randn(M, H, F_) / math.sqrt(H))
        self.out_MF = nn.Parameter(torch.full((M, F_), math.log(self.top_k / max(E - self.top_k, 1))))  # the base rate

    def count(self, tokens: Tokens) -> None:
        assert tokens.hidden_TPD is not None
        M = self.num_layers - 1
        total = torch.zeros((2, *self.mean_MD.shape), dtype=torch.float64)
        for hidden_NLD in tokens.hidden_TPD.split(_PIECE):
            x_NMD = hidden_NLD[:, :M].double()
            total += torch.stack([x_NMD.sum(dim=0), x_NMD.square().sum(dim=0)])
        mean_MD, square_MD = total / max(len(tokens), 1)
        self.mean_MD.copy_(mean_MD)
        self.scale_MD.copy_((square_MD - mean_MD.square()).clamp(min=1e-12).rsqrt().clamp(max=1e4))

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        assert tokens.hidden_TPD is not None
        last = tokens.num_layers - 1
        return self.logits(tokens.hidden_TPD[:, last], last, layer - last)

    def logits(self, hidden_TD: Tensor, last: int, distance: int) -> Tensor:
        """Return logit_TE of the layer `distance` after `last`, from that layer's hidden states."""
        heads = slice((distance - 1) * self.num_experts, distance * self.num_experts)
        x_TD = (hidden_TD - self.mean_MD[last]) * self.scale_MD[last]
        inner_TH = F.relu(x_TD @ self.in_MDH[last] + self.in_MH[last])
        return inner_TH @ self.out_MHF[last, :, heads] + self.out_MF[last, heads]

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the binary cross-entropy of every layer's network at every distance; `layer_N` is ignored."""
        assert tokens.hidden_TPD is not None
        M, E, S = self.num_layers - 1, self.num_experts, self.lookahead
        x_MND = ((tokens.hidden_TPD[:, :M] - self.mean_MD) * self.scale_MD).transpose(0, 1)
        inner_MNH = F.dropout(
            F.relu(torch.baddbmm(self.in_MH[:, None], x_MND, self.in_MDH)), self.dropout, self.training
        )
        logits_MNSE = torch.baddbmm(self.out_MF[:, None], inner_MNH, self.out_MHF).unflatten(2, (S, E))
        chosen_NLE = logits_MNSE.new_zeros((len(tokens), M + 1, E)).scatter_(2, tokens.experts_TPK, 1.0)
        losses = [
            F.binary_cross_entropy_with_logits(
                logits_MNSE[: M + 1 - d, :, d - 1], chosen_NLE[:, d:].transpose(0, 1), reduction="sum"
            )
            for d in range(1, S + 1)
        ]
        pairs = sum(M + 1 - d for d in range(1, S + 1))
        return torch.stack(losses).sum() / (pairs * len(tokens) * E)
