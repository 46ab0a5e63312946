"""NextUse: when each expert of the model is needed next, from the token's path so far and the experts' past use.

One hidden layer over the path of the token at hand, that of the token before and decayed use, added to a linear
model of past use (`moetool.learning.next_use_network` has the formulas). It is what the policy `foresight` evicts and
prefetches by; on its own it predicts the next layer from the path alone, as every predictor does.

Source: ours. Each training token is looked at after one layer drawn at random. Two targets, by binary cross-entropy:
for every expert of the model, a discount to the power of the forwards that pass it by before it is used; for the next
layer's, whether it is used. One token in eight is shown without its past, so that the path alone also has an answer.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moetool.learning.predictor
from moetool.learning import next_use_network as next_use
from moetool.learning import past_use
from moetool.learning.fit_options import PathOptions
from moetool.learning.tokens import Tokens
from moetool.types import ModelSpec
from predictors.popularity import popularity

_ALONE = 0.125
"""Share of the training tokens that are shown without their past."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(PathOptions):
    """Options of NextUse."""

    dropout: float = 0.3


class Predictor(moetool.learning.predictor.Predictor):
    """Scores are the logits of use in the coming layer.

    Attributes:
        net: the weights of `moetool.learning.next_use_network.shapes`.

    Shapes: parameter alone_A, the bias of use where the past is not known.
    """

    learned = True
    one_layer = True

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        # The parameters come before their values, so that sizes that are too large are noticed before they are filled.
        sizes = next_use.shapes(spec, options.hidden)
        self.net = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in sizes.items()})
        rng = np.random.default_rng(int(torch.randint(1 << 31, ()).item()))
        for name, value in next_use.fresh(spec, options.hidden, rng).items():
            self.net[name].data.copy_(torch.from_numpy(value))
        self.alone_A = nn.Parameter(torch.full_like(self.net["use_A"], -2))
        self._streams: list[_Stream] = []

    def count(self, tokens: Tokens) -> None:
        """The biases of use begin at how often each expert was used."""
        rate_LE = np.clip(popularity(tokens.experts_TPK.numpy(), self.num_experts) * self.top_k, 1e-3, 1 - 1e-3)
        logit_A = torch.from_numpy(np.log(rate_LE / (1 - rate_LE)).ravel())
        self.alone_A.data.copy_(logit_A)
        self.net["use_A"].data.copy_(logit_A)

    def weights(self) -> dict[str, np.ndarray]:
        """State that `moetool.learning.next_use_network.NextUse` starts from."""
        return {name: value.detach().numpy() for name, value in self.net.items()}

    def prepare(self, tokens: Tokens) -> Tokens:
        """One request after the other, and numbers of tokens, counted over all calls.

        Effects: keeps features and targets of each token, 15 bytes for each expert of the model.
        """
        assert tokens.request_T is not None
        ordered = tokens.take(tokens.request_T.argsort(stable=True))
        assert ordered.request_T is not None
        start = sum(len(stream) for stream in self._streams)
        self._streams.append(_Stream(self.spec, ordered.experts_TPK.numpy(), ordered.request_T.numpy()))
        return replace(ordered, example_T=torch.arange(start, start + len(ordered)))

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        experts_TPK = tokens.experts_TPK
        num_tokens, num_seen, _ = experts_TPK.shape
        stride = self.num_experts
        now_TA = self.alone_A.new_zeros(num_tokens, len(self.alone_A))
        offset_P1 = torch.arange(num_seen, device=experts_TPK.device)[:, None] * stride
        now_TA.scatter_(1, (experts_TPK + offset_P1).flatten(1), 1.0)
        hidden_TH = torch.relu(now_TA @ self.net["now_AH"] + self.net["phase_LH"][layer - 1])
        span = slice(layer * stride, (layer + 1) * stride)
        return hidden_TH @ self.net["use_HA"][:, span] + self.alone_A[span]

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        assert tokens.example_T is not None, "made by `prepare`"
        token_N, after_N = tokens.example_T, layer_N - 1
        now_NA, before_NA, features_NFA, target_NA = self.look(token_N, after_N)
        net, stride, rows = self.net, self.num_experts, len(token_N)
        known_N1 = torch.ones(rows, 1, device=layer_N.device)
        if self.training:
            known_N1 = (torch.rand(rows, 1, device=layer_N.device) >= _ALONE).float()
        use_NA = (features_NFA[:, past_use.HABIT].exp() - past_use.FLOOR).clamp(min=0)
        path_NA = F.dropout(now_NA, self.options.forget, self.training) @ net["now_AH"]
        last_NH = F.dropout(before_NA, self.options.forget, self.training) @ net["before_AH"]
        z_NH = path_NA + (last_NH + use_NA.sqrt() @ net["habit_AH"]) * known_N1 + net["phase_LH"][after_N]
        hidden_NH = F.dropout(torch.relu(z_NH), self.options.dropout, self.training)
        loss = z_NH.new_zeros(())
        for head, context_NA in (("value", hidden_NH @ net["value_HA"]), ("past", 0)):
            coef_FA = net[f"{head}_FA"] + net[f"{head}_F1"]
            logit_NA = context_NA + net[f"{head}_A"] + torch.einsum("nfa,fa->na", features_NFA, coef_FA)
            each_N = F.binary_cross_entropy_with_logits(logit_NA, target_NA, reduction="none").mean(1, keepdim=True)
            part = (each_N * known_N1).sum() / known_N1.sum().clamp(min=1)
            loss = loss + part
        span_NE = layer_N[:, None] * stride + torch.arange(stride, device=layer_N.device)
        own_NE = net["use_A"][span_NE]
        for feature in range(past_use.FEATURES):
            own_NE = own_NE + features_NFA[:, feature].gather(1, span_NE) * net["use_FA"][feature][span_NE]
        own_NE = own_NE * known_N1 + self.alone_A[span_NE] * (1 - known_N1)
        context_NE = (hidden_NH @ net["use_HA"]).gather(1, span_NE)
        used_NE = (target_NA.gather(1, span_NE) == 1).float()
        return loss + next_use.USE_WEIGHT * F.binary_cross_entropy_with_logits(context_NE + own_NE, used_NE)

    def look(self, token_N: Tensor, after_N: Tensor) -> list[Tensor]:
        """Each token's path so far, the last path, features and targets, float32, as they are after a layer."""
        device, token_N, after_N = token_N.device, token_N.cpu(), after_N.cpu()
        for stream in self._streams:
            if len(token_N) and int(token_N.min()) < len(stream):
                break
            token_N = token_N - len(stream)
        return [part.to(device) for part in stream.look(token_N, after_N)]


class _Stream:
    """Tokens one after the other, and for each its features before it and how far each expert's next use is.

    Shapes: used_NA bool; first_N bool; features_NGA float16, G = F - 1 features that do not depend on the layer, one
        row more than tokens; passed_NA uint8, tokens that pass before the next use, one row more.
    """

    def __init__(self, spec: ModelSpec, experts_NLK: np.ndarray, request_N: np.ndarray) -> None:
        num_tokens, num_layers, _ = experts_NLK.shape
        stride = spec.num_experts
        num = num_layers * stride
        key_NS = (experts_NLK.astype(np.int64) + np.arange(num_layers)[:, None] * stride).reshape(num_tokens, -1)
        used_NA = np.zeros((num_tokens, num), bool)
        used_NA[np.arange(num_tokens)[:, None], key_NS] = True
        past = past_use.Past(spec)
        features_NGA = np.empty((num_tokens + 1, past_use.FEATURES - 1, num), np.float16)
        for token in range(num_tokens):
            features_NGA[token] = past.features_FA[:-1]
            past.pass_layers(0, num_layers, key_NS[token].tolist())
        features_NGA[num_tokens] = past.features_FA[:-1]
        passed_NA = np.full((num_tokens + 1, num), past_use.HORIZON, np.uint8)
        for token in range(num_tokens - 1, -1, -1):
            passed_NA[token] = np.minimum(passed_NA[token + 1] + 1, past_use.HORIZON)
            passed_NA[token, key_NS[token]] = 0
        self.layer_A = torch.arange(num) // stride
        self.used_NA, self.features_NGA = torch.from_numpy(used_NA), torch.from_numpy(features_NGA)
        self.passed_NA = torch.from_numpy(passed_NA)
        self.first_N = torch.from_numpy(np.concatenate([[True], request_N[1:] != request_N[:-1]]))

    def __len__(self) -> int:
        return len(self.used_NA)

    def look(self, token_N: Tensor, after_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        over_NA = self.layer_A <= after_N[:, None]
        now_NA = (self.used_NA[token_N] & over_NA).float()
        before_NA = (self.used_NA[(token_N - 1).clamp(min=0)] & ~self.first_N[token_N, None]).float()
        own_NGA = torch.where(over_NA[:, None], self.features_NGA[token_N + 1], self.features_NGA[token_N])
        features_NFA = torch.cat([own_NGA.float(), (~over_NA)[:, None].float()], dim=1)
        passed_NA = torch.where(over_NA, self.passed_NA[token_N + 1], self.passed_NA[token_N])
        target_NA = torch.where(passed_NA < past_use.HORIZON, past_use.DISCOUNT ** passed_NA.float(), 0.0)
        return now_NA, before_NA, features_NFA, target_NA
