"""NextUse: stored routes of many tokens, searched for those most similar to the running one.

The policy `foresight` uses it as prior memory and keeps these tokens (`moetool.prediction.token_memory`) in addition to
served ones. Used alone, it predicts a token's coming layers: by the share of each expert among the stored tokens with
the most experts in common.

Source: moetool. Counted, not fitted. From a trace with more tokens, evenly spaced whole requests are kept.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base.config import Span, require_within
from moetool.base.types import ModelSpec
from moetool.prediction.token_memory import PRIOR, SHARPNESS
from moetool.training.tokens import Tokens
from predictors.popularity import popularity


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of NextUse.

    Attributes:
        tokens: maximum number of stored tokens.
        neighbours: number of most similar tokens in a score.
    """

    tokens: int = 4096
    neighbours: int = 32

    def __post_init__(self) -> None:
        require_within(self, "next_use: ", tokens=Span(1, 1 << 24), neighbours=Span(1))


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by the share of the most similar tokens that used it.

    Shapes: buffers path_FLK int32, experts of the F stored tokens (-1: no token); before_F int32, the row of the
    previous token in its request (-1: none); popularity_LE float32.
    """

    path_FLK: Tensor
    before_F: Tensor
    popularity_LE: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        shape = (options.tokens, self.num_layers, self.top_k)
        self.register_buffer("path_FLK", torch.empty(shape, dtype=torch.int32).fill_(-1))
        self.register_buffer("before_F", torch.full((options.tokens,), -1, dtype=torch.int32))
        self.register_buffer("popularity_LE", torch.zeros(self.num_layers, self.num_experts))
        self._uses_LFE: Tensor | None = None

    def count(self, tokens: Tokens) -> None:
        assert tokens.request_T is not None
        request_T = tokens.request_T.numpy()
        requests = np.unique(request_T)
        share = min(1.0, self.options.tokens / len(request_T))
        number = max(1, math.ceil(share * len(requests)))
        chosen = requests[((np.arange(number) + 0.5) * len(requests) / number).astype(int)]
        rows_F = np.flatnonzero(np.isin(request_T, chosen))
        rows_F = rows_F[np.argsort(request_T[rows_F], kind="stable")][: self.options.tokens]
        kept = len(rows_F)
        self.path_FLK.fill_(-1)
        self.path_FLK[:kept] = tokens.experts_TPK[torch.from_numpy(rows_F)].int()
        same_F = np.append(False, request_T[rows_F][1:] == request_T[rows_F][:-1])
        self.before_F.fill_(-1)
        self.before_F[:kept] = torch.from_numpy(np.where(same_F, np.arange(kept) - 1, -1)).int()
        self.popularity_LE.copy_(torch.from_numpy(popularity(tokens.experts_TPK.numpy(), self.num_experts)))
        self._uses_LFE = None

    def validate(self) -> None:
        super().validate()
        kept, num_rows = self._kept, len(self.before_F)
        path_FLK, before_F = self.path_FLK, self.before_F
        if not (
            bool(((path_FLK[:kept] >= 0) & (path_FLK[:kept] < self.num_experts)).all())
            and bool((path_FLK[kept:] == -1).all())
            and bool(((before_F >= -1) & (before_F < torch.arange(num_rows))).all())
            and bool((before_F[kept:] == -1).all())
        ):
            raise ValueError("path_FLK or before_F has values out of range, or rows without a token before the last")

    @property
    def _kept(self) -> int:
        """Return the number of stored tokens; the rows after them are -1."""
        return int((self.path_FLK[:, 0, 0] >= 0).sum())

    def routes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return keys [F, L * K] of the stored tokens, and the row of the previous token, for a `TokenMemory`."""
        kept = self._kept
        key_FLK = self.path_FLK[:kept].numpy() + np.arange(self.num_layers, dtype=np.int32)[:, None] * self.num_experts
        return key_FLK.reshape(kept, self.num_layers * self.top_k), self.before_F[:kept].numpy()

    def layer_scores(self, tokens: Tokens, layer: int) -> Tensor:
        if self._uses_LFE is None:
            kept = self._kept
            path_LFK = self.path_FLK[:kept].transpose(0, 1).long()
            self._uses_LFE = torch.zeros(*path_LFK.shape[:2], self.num_experts, dtype=torch.uint8).scatter_(
                2, path_LFK, 1
            )
        uses_LFE = self._uses_LFE
        shared_TF = torch.zeros(len(tokens), uses_LFE.shape[1])
        for known in range(tokens.num_layers):
            used_TE = torch.zeros(len(tokens), self.num_experts).scatter_(1, tokens.experts_TPK[:, known].long(), 1)
            shared_TF += used_TE @ uses_LFE[known].float().T
        best_TM, row_TM = shared_TF.topk(min(self.options.neighbours, shared_TF.shape[1]), dim=1)
        scale = SHARPNESS / (tokens.num_layers * self.top_k)
        weight_TM = (scale * (best_TM - best_TM[:, :1])).exp()
        score_TE = torch.einsum("tm,tme->te", weight_TM, uses_LFE[layer][row_TM].float())
        return score_TE + float(PRIOR) * self.top_k * self.popularity_LE[layer]
