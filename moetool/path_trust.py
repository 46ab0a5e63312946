"""Fused predictions while a model runs: fitted trust in the signals of a path, moved by how they fare.

What `predictors/fused.py` fits is used here without torch, and goes on learning: each request moves an `Offset` of the
trust after each of its tokens, by what was said of the next layer; the others hear of it when the request is over.

Shapes: D distances, S signals, G as in `moetool.path_signals`.
"""

import copy

import numpy as np

from moetool.path_signals import PathSignals
from moetool.types import GateEvent

DISTANCES = (1, 2, 3, 4, 6, 8)
"""The distances that trust is fitted for; the others take that of the next one below."""


class Offset:
    """What is added to the trust, moved by AdaGrad."""

    __slots__ = ("offset_S", "power_S")

    def __init__(self, num_signals: int) -> None:
        self.offset_S = np.zeros(num_signals, np.float32)
        self.power_S = np.full(num_signals, 1e-4, np.float32)

    def step(self, gradient_S: np.ndarray, haste: float) -> None:
        self.power_S += gradient_S**2
        self.offset_S -= haste * gradient_S / np.sqrt(self.power_S)


class FusedPath:
    """Follows forwards with fitted trust, and moves it.

    Args:
        trust_DS, trust_LS, gate_GS: as fitted.
        haste: of the offsets; 0 leaves the trust as it is.
    """

    def __init__(
        self,
        signals: PathSignals,
        trust_DS: np.ndarray,
        trust_LS: np.ndarray,
        gate_GS: np.ndarray,
        haste: float,
    ) -> None:
        self.signals = signals
        self._trust_DS, self._trust_LS, self._gate_GS = trust_DS, trust_LS, gate_GS
        self._haste = haste
        self._common = Offset(trust_DS.shape[1])
        self._own: dict[int, tuple[Offset, Offset]] = {}  # of each running request: as it began, and now
        self.said: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # of the layers ahead: signals and logits

    def observe(self, event: GateEvent) -> None:
        """Learn from what was said of this layer, then look ahead."""
        if event.layer and self._haste and event.layer in self.said:
            self._learn(event)
        self.signals.observe(event)
        if event.layer == 0:
            for request in self.signals.over:
                began, now = self._own.pop(request)
                self._common.offset_S += now.offset_S - began.offset_S
                self._common.power_S += now.power_S - began.power_S
            for request in self.signals.running.keys() - self._own.keys():
                self._own[request] = copy.deepcopy(self._common), copy.deepcopy(self._common)
        self.said = {}

    def logits(self, layer: int) -> np.ndarray:
        """logit_TE of a layer ahead, float32."""
        if layer not in self.said:
            f_TES, sure_TG = self.signals.signals(layer)
            distance = layer - self.signals.layer
            trust_S = self._trust_DS[sum(d <= distance for d in DISTANCES) - 1] + self._trust_LS[layer]
            trust_TS = trust_S + sure_TG @ self._gate_GS
            for request, mine in self.signals.tokens_of.items():
                trust_TS[mine] += self._own[request][1].offset_S
            self.said[layer] = f_TES, np.einsum("tes,ts->te", f_TES, trust_TS)
        return self.said[layer][1]

    def _learn(self, event: GateEvent) -> None:
        """One step for each request with one token in this forward."""
        f_TES, logit_TE = self.said[event.layer]
        for request, mine in self.signals.tokens_of.items():
            if len(mine) > 1:
                continue
            error_E = 1 / (1 + np.exp(-np.clip(logit_TE[mine[0]], -30, 30)))
            error_E[list(event.experts_TK[mine[0]])] -= 1
            self._own[request][1].step(error_E @ f_TES[mine[0]], self._haste)
