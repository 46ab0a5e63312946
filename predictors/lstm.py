"""LSTM: reads the embeddings of a request's iterations and predicts the experts of all layers together.

Source: SiDA (Du et al., 2024), as DuoServe-MoE § 2.1 describes it: "an LSTM to directly predict the activated experts
of all layers at a time". Readings and deviations:

- The input is the mean output of the embedding layer over a request's tokens in each forward. For a new token this is
  its own embedding. A prompt is one step (or one per chunk), and all its tokens get the same scores.
- No other input of the current forward is used, so all layers are predicted at the forward's first event.
- No attention over the steps and no distillation, which DuoServe-MoE does not describe. The loss is the binary
  cross-entropy of ExpertMLP (DuoServe-MoE Eq. 6), mean over iterations, layers and experts; the target of a prompt is
  the share of its tokens that use an expert.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import moetool.training.predictor
from moetool.base.config import DROPPED, Span, require_within
from moetool.base.errors import MismatchError
from moetool.base.types import GateEvent, ModelSpec
from moetool.training.tokens import Tokens

_RUNNING = 1024  # maximum number of kept states; the oldest is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the LSTM.

    Attributes:
        hidden: width of its state.
        dropout: share of the state dropped before the output in training.
    """

    hidden: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        require_within(self, "lstm: ", hidden=Span(1), dropout=DROPPED)


class Predictor(moetool.training.predictor.Predictor):
    """Scores are the logits of one output for all layers.

    Shapes: buffers mean_D and scale_D standardize the embeddings; the output maps the state of H to L * E.

    Raises:
        MismatchError: the hidden size is unknown, as in imported routes.
    """

    needs = frozenset({"experts", "embeddings"})
    learned = True
    remembers = True
    scores_are = "logits"
    mean_D: Tensor
    scale_D: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        D, H, L, E = spec.hidden_size, options.hidden, self.num_layers, self.num_experts
        if not D:
            raise MismatchError(
                f"lstm needs embeddings, but the trace of {spec.name} has no hidden size; "
                f"capture with --keep topk,embeddings"
            )
        self.lookahead = L
        self.dropout = options.dropout
        self.register_buffer("mean_D", torch.zeros(D))
        self.register_buffer("scale_D", torch.ones(D))
        self.cell = nn.LSTM(D, H, batch_first=True)
        self.output = nn.Linear(H, L * E)
        nn.init.constant_(self.output.bias, math.log(self.top_k / max(E - self.top_k, 1)))  # the base rate
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}  # LSTM state by running request
        self._logits_TLE: Tensor | None = None

    def count(self, tokens: Tokens) -> None:
        assert tokens.embedding_TD is not None
        x_ND = tokens.embedding_TD.double()
        self.mean_D.copy_(x_ND.mean(dim=0))
        self.scale_D.copy_(x_ND.std(dim=0, unbiased=False).clamp(min=1e-6).reciprocal().clamp(max=1e4))

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the binary cross-entropy of every layer in every iteration; `layer_N` is ignored."""
        assert tokens.embedding_TD is not None and tokens.request_T is not None and tokens.iteration_T is not None
        step_N = torch.stack([tokens.request_T, tokens.iteration_T], dim=1)
        step_S2, of_N, tokens_S = step_N.unique_consecutive(dim=0, return_inverse=True, return_counts=True)
        x_SD = tokens.embedding_TD.new_zeros((len(step_S2), tokens.embedding_TD.shape[1]))
        x_SD[of_N] = (tokens.embedding_TD - self.mean_D) * self.scale_D
        chosen_NLE = x_SD.new_zeros((len(tokens), self.num_layers, self.num_experts))
        chosen_NLE.scatter_(2, tokens.experts_TPK, 1.0)
        used_SLE = x_SD.new_zeros((len(step_S2), *chosen_NLE.shape[1:])).index_add_(0, of_N, chosen_NLE)
        used_SLE = used_SLE / tokens_S[:, None, None]

        lengths = step_S2[:, 0].unique_consecutive(return_counts=True)[1].tolist()
        padded_RSD = pad_sequence(list(x_SD.split(lengths)), batch_first=True)
        states_RSH = self.cell(padded_RSD)[0]  # padding after the end of a request is ignored
        state_SH = torch.cat([states_RSH[i, :length] for i, length in enumerate(lengths)])
        logits_SF = self.output(F.dropout(state_SH, self.dropout, self.training))
        return F.binary_cross_entropy_with_logits(logits_SF.view_as(used_SLE), used_SLE)

    @torch.inference_mode()
    def observe(self, event: GateEvent) -> None:
        """Take one step for each request at a forward's beginning; a request is new at position 0."""
        if event.layer:
            return
        info = event.forward
        assert info.embedding_TD is not None, "the forward lacks embeddings"
        request_T, position_T = np.array(info.request_T), np.array(info.position_T)
        self._logits_TLE = torch.empty(len(request_T), self.num_layers, self.num_experts)
        for request in dict.fromkeys(info.request_T):
            mine = np.flatnonzero(request_T == request)
            memory = None if (position_T[mine] == 0).any() else self._memory.pop(request, None)
            x_D = (torch.from_numpy(info.embedding_TD[mine[0]]) - self.mean_D) * self.scale_D
            state_1H, self._memory[request] = self.cell(x_D[None], memory)
            self._logits_TLE[mine] = self.output(state_1H).view(self.num_layers, self.num_experts)
        for request in [r for r in self._memory if r not in info.request_T][: max(0, len(self._memory) - _RUNNING)]:
            del self._memory[request]

    def scores(self, layer: int) -> np.ndarray:
        assert self._logits_TLE is not None, "nothing was observed"
        return self._logits_TLE[:, layer].numpy()
