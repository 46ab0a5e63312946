"""Activation matrix: the experts of the earlier request most similar to the running one.

A request's matrix counts its tokens for each layer and expert.

Source: MoE-Infinity (Xue et al., 2024), its published code, and FineMoE's description (§§ 2.4, 6.6: request-level
expert activations). Readings and deviations:

- The matrix of the running request, over its observed tokens and layers, is compared with those of the training
  requests: cosine of each layer's counts, averaged over the layers. The published code masks the stored matrices up to
  the current layer and compares the later layers.
- At most `history` training requests are kept, evenly spaced over the trace, so that each task has its share; the paper
  clusters them. The policy `moe_infinity` learns online, this predictor does not.
- All tokens of a request in a forward get the same scores.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import moetool.training.predictor
from moetool.base.config import Span, require_within
from moetool.base.types import GateEvent, ModelSpec
from moetool.prediction.request_matrices import ActivationMatrices, unit_rows
from moetool.training.tokens import Tokens

_RUNNING = 1024  # maximum number of kept matrices; the oldest is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the activation matrix.

    Attributes:
        history: number of stored training requests.
    """

    history: int = 128

    def __post_init__(self) -> None:
        require_within(self, "activation_matrix: ", history=Span(1))


class Predictor(moetool.training.predictor.Predictor):
    """Scores an expert by its share of the matching request's choices in its layer.

    Shapes: buffer past_HLE float32, rows of unit length; unused rows are zero and come last.
    """

    remembers = True
    past_HLE: Tensor

    def __init__(self, spec: ModelSpec, options: Options) -> None:
        super().__init__(spec, options)
        self.lookahead = self.num_layers
        self.register_buffer("past_HLE", torch.zeros(options.history, self.num_layers, self.num_experts))
        self._matrices: ActivationMatrices | None = None
        self._event: GateEvent | None = None

    def count(self, tokens: Tokens) -> None:
        assert tokens.request_T is not None
        request_T, experts_TLK = tokens.request_T.numpy(), tokens.experts_TPK.numpy().astype(np.int64)
        requests = np.unique(request_T)
        if len(requests) > (history := len(self.past_HLE)):
            requests = requests[((np.arange(history) + 0.5) * len(requests) / history).astype(int)]
        self.past_HLE.zero_()
        for row, request in enumerate(requests.tolist()):
            used_NLK = experts_TLK[request_T == request]
            cell_NLK = used_NLK + np.arange(self.num_layers)[:, None] * self.num_experts
            counts = np.bincount(cell_NLK.ravel(), minlength=self.num_layers * self.num_experts)
            unit_LE = unit_rows(counts.reshape(self.num_layers, self.num_experts).astype(np.float32))
            self.past_HLE[row] = torch.from_numpy(unit_LE)
        self._matrices = None

    def observe(self, event: GateEvent) -> None:
        """Observe an event; a request is new at position 0."""
        if self._matrices is None:
            past_HLE = self.past_HLE.numpy()
            self._matrices = ActivationMatrices(past_HLE, int(past_HLE.any(axis=(1, 2)).sum()))
        forward, running = event.forward, self._matrices.running
        for request, position in zip(forward.request_T, forward.position_T, strict=True):
            if request not in running or (position == 0 and event.layer == 0):
                running.pop(request, None)
                self._matrices.begin(request)
        if len(running) > _RUNNING:
            present = set(forward.request_T)
            self._matrices.forget([r for r in running if r not in present][: len(running) - _RUNNING])
        self._matrices.observe(event)
        self._event = event

    def scores(self, layer: int) -> np.ndarray:
        assert self._matrices is not None and self._event is not None, "nothing was observed"
        row_of: dict[int, np.ndarray] = {}
        for request in dict.fromkeys(self._event.forward.request_T):
            match = self._matrices.match(request)
            row_of[request] = self._matrices.used(match, slice(layer, layer + 1))[0]
        return np.stack([row_of[request] for request in self._event.forward.request_T]).astype(np.float32)
