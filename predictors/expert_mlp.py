"""ExpertMLP: a seven-layer perceptron over the observed path, popularity and affinity.

One network serves all layers. Its state (Eqs. 4, 5) is

    h_l        the experts of the layers 0..l-1, one multi-hot block of E per layer, zeros from layer l on
    p_l        the popularity of the experts of layer l
    a_{l-1,l}  the affinity rows of the experts just chosen, in the router's order
    l          the layer to predict, one-hot

Source: DuoServe-MoE § 4.2, Eqs. 4 to 6. Readings and deviations:

- "We flatten the expert indices and apply zero-padding": index 0 would equal the padding, and numbers would imply an
  order of experts. Multi-hot blocks have neither problem and give the first layer one weight row per (layer, expert).
- The layer is an input, since one network predicts every layer.
- Eq. 6 sums over samples; here it is the mean over samples and experts, so that the step size does not depend on the
  batch size. The gradient has the same direction.
- Seven layers, "2048 to 64, followed by a final output layer": six hidden layers, halving in width, and the output.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moetool.training.predictor
from moetool.base.config import DROPPED, Span, require_within
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.training.tokens import Tokens
from predictors.affinity import affinity
from predictors.popularity import popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of ExpertMLP; the defaults are the paper's.

    Attributes:
        hidden: widths of the hidden layers. The last one, 64, is a bottleneck for 128 experts or more, for which
            `[2048, 1024, 512, 256, 256, 256]` is wide enough.
        dropout: share of activations dropped after each hidden layer in training.
    """

    hidden: tuple[int, ...] = (2048, 1024, 512, 256, 128, 64)
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if not self.hidden:
            raise UsageError("expert_mlp: hidden is empty, expected one or more widths")
        require_within(self, "expert_mlp: ", hidden=Span(1), dropout=DROPPED)


class Predictor(moetool.training.predictor.Predictor):
    """Scores are the logits of the network for the coming layer.

    Shapes: buffers popularity_LE and affinity_MEE (M = L-1) float32, Eqs. 2 and 3; the network maps the state of
        M*E + E + K*E + M numbers to E logits.
    """

    learned = True
    one_layer = True
    scores_are = "logits"
    popularity_LE: Tensor
    affinity_MEE: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        M, E, K = self.num_layers - 1, self.num_experts, self.top_k
        self.register_buffer("popularity_LE", torch.zeros(M + 1, E))
        self.register_buffer("affinity_MEE", torch.zeros(M, E, E))
        layers: list[nn.Module] = []
        width = M * E + E + K * E + M
        for hidden in options.hidden:
            layers += [nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(options.dropout)]
            width = hidden
        output = nn.Linear(width, E)
        nn.init.constant_(output.bias, math.log(K / max(E - K, 1)))  # starts at the base rate of K experts in E
        self.network = nn.Sequential(*layers, output)

    def count(self, tokens: Tokens) -> None:
        experts_NLK = tokens.experts_TPK.numpy()
        self.popularity_LE.copy_(torch.from_numpy(popularity(experts_NLK, self.num_experts)))
        self.affinity_MEE.copy_(torch.from_numpy(affinity(experts_NLK, self.num_experts)))

    def state(self, experts_NPK: Tensor, layer_N: Tensor) -> Tensor:
        """Return s_l of Eq. 5: one row per token, to predict its layer from earlier layers.

        Args:
            experts_NPK: int64; only the layers before each token's `layer_N` are used.
            layer_N: int64, 1..P.

        Returns:
            float32 [N, M*E + E + K*E + M], M = L-1.
        """
        N, P, K = experts_NPK.shape
        M, E = self.num_layers - 1, self.num_experts
        P = min(P, M)  # no layer follows the last
        known_NP = torch.arange(P, device=layer_N.device) < layer_N[:, None]
        history_NME = experts_NPK.new_zeros((N, M, E), dtype=torch.float32)
        history_NME[:, :P].scatter_(2, experts_NPK[:, :P], known_NP[..., None].expand(-1, -1, K).float())
        chosen_NK = experts_NPK[torch.arange(N, device=layer_N.device), layer_N - 1]
        affinity_NKE = self.affinity_MEE[layer_N[:, None] - 1, chosen_NK]
        layer_NM = F.one_hot(layer_N - 1, M).float()
        return torch.cat(
            [history_NME.flatten(1), self.popularity_LE[layer_N], affinity_NKE.flatten(1), layer_NM], dim=1
        )

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        layer_T = torch.full((len(tokens),), layer, device=tokens.experts_TPK.device)
        return self.network(self.state(tokens.experts_TPK, layer_T))

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the binary cross-entropy with logits (Eq. 6), mean over tokens and experts."""
        experts_NLK = tokens.experts_TPK
        logits_NE = self.network(self.state(experts_NLK, layer_N))
        rows_N = torch.arange(len(layer_N), device=layer_N.device)
        chosen_NE = torch.zeros_like(logits_NE).scatter_(1, experts_NLK[rows_N, layer_N], 1.0)
        return F.binary_cross_entropy_with_logits(logits_NE, chosen_NE)
