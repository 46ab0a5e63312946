"""Prediction of a prompt's routing from its token ids, before it runs: stacked one-layer transformers.

`predictors/single_transformer.py` and `predictors/cascade.py` share this and differ in their stages. Each stage is one
causal transformer layer that predicts the experts of a block of consecutive MoE layers, for every token. The first
stage reads the tokens; each later one also reads the previous stage's predicted routing.

Shapes:
    S  tokens of a request      R  requests that are padded together      W  width      V  known token ids
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import moetool.training.predictor
from moetool.base.config import DROPPED, Span, require_within
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import GateEvent, ModelSpec, Phase
from moetool.training.tokens import Tokens

_RUNNING = 1024  # maximum number of kept prompts; the oldest is dropped
_NO_ID = 1 << 62  # padding of unused ids
_FLOOR = 1e-4  # distance of shares from 0 and 1 for finite logits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Options of a predictor that reads prompts.

    Attributes:
        width: width of the embedding and of each layer.
        heads: attention heads, a divisor of the width.
        vocabulary: number of token ids with their own embedding.
        dropout: share of activations and token ids dropped in training.

    Raises:
        UsageError: the values do not fit a transformer layer.
    """

    width: int = 64
    heads: int = 4
    vocabulary: int = 4096
    dropout: float = 0.1

    def __post_init__(self) -> None:
        name = type(self).__module__.rpartition(".")[2]
        if self.heads < 1 or self.width < 2 or self.width % self.heads or self.width % 2:
            raise UsageError(
                f"{name}: width is {self.width}, expected an even multiple of heads, which is {self.heads}"
            )
        require_within(self, f"{name}: ", vocabulary=Span(1), dropout=DROPPED)


class BlockTransformer(nn.Module):
    """One pre-norm transformer layer with causal attention, and an output for a block of MoE layers.

    Args:
        routed: number of logits from the previous stage; 0 for the first.
        outputs: number of its own logits.
    """

    def __init__(self, width: int, heads: int, routed: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.routing = nn.Linear(routed, width) if routed else None
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.inner_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs)
        nn.init.zeros_(self.output.bias)

    def forward(self, x_RSW: Tensor, share_RSF: Tensor | None) -> Tensor:
        """Return logits of the block relative to the base rate, [R, S, outputs].

        Args:
            x_RSW: embedded tokens.
            share_RSF: probability of each expert of the previous block by the previous stage; None for the first.
        """
        if self.routing is not None:
            assert share_RSF is not None, "a later stage is conditioned on the one before it"
            x_RSW = x_RSW + self.routing(share_RSF)
        R, S, W = x_RSW.shape
        qkv_3RHSd = self.qkv(self.attention_norm(x_RSW)).view(R, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv_3RHSd.unbind(0)
        seen_RHSd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_RSW = x_RSW + self._drop(self.mix(seen_RHSd.transpose(1, 2).reshape(R, S, W)))
        x_RSW = x_RSW + self._drop(self.down(F.gelu(self.up(self.inner_norm(x_RSW)))))
        return self.output(self.output_norm(x_RSW))

    def _drop(self, x_RSW: Tensor) -> Tensor:
        return F.dropout(x_RSW, self.dropout, self.training)


class PromptPredictor(moetool.training.predictor.Predictor):
    """Scores are logits: a prompt's tokens have their own, later tokens the mean over the prompt.

    Only the ids of the prompt are used, so all layers are predicted before the first runs. Each new token of a pending
    request gets the mean over the prompt's tokens and is scored separately, as the phase `decode`. Of a chunked prompt,
    the chunks so far are known. Tokens of a request with an unseen prompt get the base rate.

    Args:
        boundaries: first layers of the second and later stages, ascending.

    Attributes:
        blocks: first layer and end (exclusive) of each stage.

    Shapes: buffers id_V, known token ids, ascending, and base_LE, logits of each expert's frequency. Row 0 of the
    embedding is for all other ids.
    """

    needs = frozenset({"experts", "token_id"})
    learned = True
    remembers = True
    predicts_prompts = True
    scores_are = "logits"
    id_V: Tensor
    base_LE: Tensor

    def __init__(self, spec: ModelSpec, options: PromptOptions, boundaries: Sequence[int] = ()) -> None:
        super().__init__(spec, options)
        width, heads, vocabulary, dropout = options.width, options.heads, options.vocabulary, options.dropout
        L, E = self.num_layers, self.num_experts
        self.lookahead = L
        self.dropout = dropout
        edges = (0, *boundaries, L)
        self.blocks = tuple(itertools.pairwise(edges))
        self.register_buffer("id_V", torch.full((vocabulary,), _NO_ID, dtype=torch.int64))
        share = min(self.top_k / E, 0.999)
        self.register_buffer("base_LE", torch.full((L, E), math.log(share / (1 - share))))
        self.embedding = nn.Embedding(vocabulary + 1, width)
        nn.init.normal_(self.embedding.weight, std=1.0)
        outputs = [(end - start) * E for start, end in self.blocks]
        self.stages = nn.ModuleList(
            BlockTransformer(width, heads, before, after, dropout)
            for before, after in zip([0, *outputs[:-1]], outputs, strict=True)
        )
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}  # ids and mean logits_LE, by running request
        self._logits_TLE: Tensor | None = None

    def count(self, tokens: Tokens) -> None:
        """Count the most frequent token ids (ties: lower first), and each expert's frequency."""
        assert tokens.token_id_T is not None
        id_U, count_U = tokens.token_id_T.unique(return_counts=True)
        kept = count_U.argsort(descending=True, stable=True)[: len(self.id_V)]
        self.id_V.fill_(_NO_ID)
        self.id_V[: len(kept)] = id_U[kept].sort().values
        L, E = self.num_layers, self.num_experts
        expert_TLK = tokens.experts_TPK.long() + E * torch.arange(L)[:, None]
        used_LE = torch.bincount(expert_TLK.flatten(), minlength=L * E).view(L, E)
        self.base_LE.copy_(_logit((used_LE + self.top_k / E) / (len(tokens) + 1)))

    def logits(self, token_id_RS: Tensor) -> Tensor:
        """Return logits [R, S, L, E] of whole prompts; no token sees a later one.

        Raises:
            MismatchError: a token id is withheld.
        """
        if bool((token_id_RS < 0).any()):
            raise MismatchError(
                f"{self.name or type(self).__module__} predicts from token ids, but some are withheld (-1), expected "
                f"all of a prompt; use a trace from moetool capture"
            )
        index_RS = torch.searchsorted(self.id_V, token_id_RS).clamp(max=len(self.id_V) - 1)
        row_RS = torch.where(self.id_V[index_RS] == token_id_RS, index_RS + 1, 0)
        if self.training:  # trains row 0, for unknown ids
            row_RS = row_RS * (torch.rand(row_RS.shape, device=row_RS.device) >= self.dropout)
        x_RSW = self.embedding(row_RS)
        x_RSW = x_RSW + _positions(*x_RSW.shape[1:]).to(x_RSW)
        made: list[Tensor] = []
        share_RSF = None
        for (start, end), stage in zip(self.blocks, self.stages, strict=True):
            logits_RSF = stage(x_RSW, share_RSF) + self.base_LE[start:end].flatten()
            share_RSF = logits_RSF.sigmoid()
            made.append(logits_RSF)
        return torch.cat(made, dim=2).unflatten(2, self.base_LE.shape)

    @torch.inference_mode()
    def predict_prompt(self, token_id_S: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return logits of the prompt; for new tokens those of the mean probability over the prompt.

        Raises:
            MismatchError: a token id is withheld.
        """
        logits_SLE = self.logits(torch.tensor([list(token_id_S)]))[0]
        return logits_SLE, _logit(logits_SLE.sigmoid().mean(dim=0))

    def loss(self, tokens: Tokens, layer_N: Tensor) -> Tensor:
        """Return the binary cross-entropy of every layer of every token in both phases; `layer_N` is ignored."""
        assert tokens.token_id_T is not None and tokens.request_T is not None
        lengths = tokens.request_T.unique_consecutive(return_counts=True)[1].tolist()
        padded_RS = pad_sequence(list(tokens.token_id_T.split(lengths)), batch_first=True)
        logits_RSLE = self.logits(padded_RS)  # no token of a request sees the padding after its end
        logits_NLE = torch.cat([logits_RSLE[i, :length] for i, length in enumerate(lengths)])
        chosen_NLE = torch.zeros_like(logits_NLE).scatter_(2, tokens.experts_TPK, 1.0)
        return F.binary_cross_entropy_with_logits(logits_NLE, chosen_NLE)

    @torch.inference_mode()
    def observe(self, event: GateEvent) -> None:
        """Predict the prompts of a forward at its beginning; a request is new at position 0."""
        if event.layer:
            return
        info = event.forward
        assert info.token_id_T is not None, "the forward lacks token ids"
        ids_T = torch.tensor(info.token_id_T, dtype=torch.int64)
        request_T, position_T = np.array(info.request_T), np.array(info.position_T)
        prompt_T = np.array(info.phase_T) == Phase.PREFILL
        self._logits_TLE = self.base_LE.repeat(len(request_T), 1, 1)
        for request in dict.fromkeys(info.request_T):
            mine = np.flatnonzero((request_T == request) & prompt_T)
            if len(mine):
                earlier = self._prompts.pop(request, None)
                fresh = earlier is None or (position_T[mine] == 0).any()
                ids_S = ids_T[mine] if fresh or earlier is None else torch.cat([earlier[0], ids_T[mine]])
                logits_SLE = self.logits(ids_S[None])[0]
                self._logits_TLE[mine] = logits_SLE[-len(mine) :]
                self._prompts[request] = (ids_S, _logit(logits_SLE.sigmoid().mean(dim=0)))
            later = np.flatnonzero((request_T == request) & ~prompt_T)
            if len(later) and request in self._prompts:
                self._logits_TLE[later] = self._prompts[request][1]
        for request in [r for r in self._prompts if r not in info.request_T][: max(0, len(self._prompts) - _RUNNING)]:
            del self._prompts[request]

    def scores(self, layer: int) -> np.ndarray:
        assert self._logits_TLE is not None, "nothing was observed"
        return self._logits_TLE[:, layer].numpy()


def _logit(share: Tensor) -> Tensor:
    return torch.logit(share.float(), eps=_FLOOR)


def _positions(count: int, width: int) -> Tensor:
    """Return sines and cosines of the positions 0..count-1, [count, width]."""
    rate_F = torch.exp(torch.arange(0, width, 2) * (-math.log(1e4) / width))
    angle_SF = torch.arange(count)[:, None] * rate_F
    return torch.cat([angle_SF.sin(), angle_SF.cos()], dim=1)
