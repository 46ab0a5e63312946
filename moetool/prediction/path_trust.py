"""Fused predictions during a run: fitted trust in the signals of a path, adapted online.

This applies the fit of `predictors/fused.py` without torch and learns online. Each request updates an `Offset` of the
trust after each of its tokens, by the error on the next layer. When it ends, it shares the offset with the others. The
same holds for its `HitRecord`: if one of `ALONE` has recently been right more often than the fused logits, for a layer
at some distance, that signal ranks the experts.

Shapes: D distances, S signals, G as in `moetool.prediction.path_signals`; R the fused logits, then `ALONE`; P prompts,
    then tokens by themselves.
"""

import copy
import math

import numpy as np

from moetool.base.types import GateEvent
from moetool.prediction.path_signals import SIGNALS, PathSignals

DISTANCES = (1, 2, 3, 4, 6, 8)
"""Distances with fitted trust; others use the next lower one."""

ALONE = ("path", "states", "affinity", "log memory", "ahead")
"""Signals that may rank the experts by themselves."""
_ALONE = [SIGNALS.index(name) for name in ALONE]
_LATELY = 1024  # memory of the record, in predictions of one token each
_OTHERS = 128  # weight of the other layers, in predictions
_LEAD = 0.5  # required lead in match, times the root of the number of predictions


class HitRecord:
    """Recent hit rates of the fused logits and of single signals, for each layer from each distance.

    Shapes: right_PDLR, decayed sum of matched shares of a token's experts; seen_PDL, of its tokens.
    """

    __slots__ = ("right_PDLR", "seen_PDL")

    def __init__(self, num_layers: int) -> None:
        self.right_PDLR = np.zeros((2, len(DISTANCES), num_layers, 1 + len(ALONE)), np.float32)
        self.seen_PDL = np.zeros((2, len(DISTANCES), num_layers), np.float32)

    def count(self, kind: int, index: int, layer: int, right_TR: np.ndarray) -> None:
        """Count the matched shares of each token's experts."""
        kept = (1 - 1 / _LATELY) ** len(right_TR)
        right_R, seen = self.right_PDLR[kind, index, layer], self.seen_PDL[kind, index, layer]
        self.right_PDLR[kind, index, layer] = kept * right_R + right_TR.sum(axis=0)
        self.seen_PDL[kind, index, layer] = kept * seen + len(right_TR)

    def leader(self, kind: int, index: int, layer: int) -> int | None:
        """Return the leading signal of `ALONE`, or None for the fused logits. Rare layers borrow from the others."""
        right_LR, seen_L = self.right_PDLR[kind, index], self.seen_PDL[kind, index]
        if not (everywhere := float(seen_L.sum())):
            return None
        others = min(everywhere, _OTHERS)
        right_R = right_LR[layer] + right_LR.sum(axis=0) * (others / everywhere)
        best = int(right_R[1:].argmax())
        lead = _LEAD * math.sqrt(float(seen_L[layer]) + others)
        return best if right_R[1 + best] - right_R[0] > lead else None

    def add(self, began: "HitRecord", now: "HitRecord") -> None:
        """Add the changes of a request since its beginning."""
        for name in self.__slots__:
            mine = getattr(self, name)
            np.maximum(mine + getattr(now, name) - getattr(began, name), 0, out=mine)


class Offset:
    """An offset of the trust, moved by AdaGrad."""

    __slots__ = ("offset_S", "power_S")

    def __init__(self, num_signals: int) -> None:
        self.offset_S = np.zeros(num_signals, np.float32)
        self.power_S = np.full(num_signals, 1e-4, np.float32)

    def step(self, gradient_S: np.ndarray, haste: float) -> None:
        self.power_S += gradient_S**2
        self.offset_S -= haste * gradient_S / np.sqrt(self.power_S)


class FusedPath:
    """Observes forwards with fitted trust, and adapts it.

    Args:
        trust_DS, trust_LS, gate_GS: fitted values.
        haste: learning rate of the offsets; 0 keeps the trust fixed.
    """

    def __init__(
        self, signals: PathSignals, trust_DS: np.ndarray, trust_LS: np.ndarray, gate_GS: np.ndarray, haste: float
    ) -> None:
        self.signals = signals
        self._trust_DS, self._trust_LS, self._gate_GS = trust_DS, trust_LS, gate_GS
        self._haste = haste
        self._common = Offset(trust_DS.shape[1])
        self._own: dict[int, tuple[Offset, Offset]] = {}  # initial and current offset, by running request
        self._records = HitRecord(signals.num_layers)
        self._own_records: dict[int, tuple[HitRecord, HitRecord]] = {}
        self.computed: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # signals and fused logits, by coming layer
        self._returned: dict[int, np.ndarray] = {}  # returned logits, by coming layer
        self._pending: dict[int, dict[int, np.ndarray]] = {}  # ranked_TER, by coming layer and index of the distance

    def observe(self, event: GateEvent) -> None:
        """Learn from the predictions for this layer, then predict ahead."""
        if event.layer and self._haste:
            if event.layer in self.computed:
                self._learn(event)
            for index, ranked_TER in self._pending.pop(event.layer, {}).items():
                self._compare(event, index, ranked_TER)
        self.signals.observe(event)
        if event.layer == 0:
            for request in self.signals.ended:
                began, now = self._own.pop(request)
                self._common.offset_S += now.offset_S - began.offset_S
                self._common.power_S += now.power_S - began.power_S
                self._records.add(*self._own_records.pop(request))
            for request in self.signals.running.keys() - self._own.keys():
                self._own[request] = copy.deepcopy(self._common), copy.deepcopy(self._common)
                self._own_records[request] = copy.deepcopy(self._records), copy.deepcopy(self._records)
            self._pending = {}
        self.computed, self._returned = {}, {}

    def logits(self, layer: int) -> np.ndarray:
        """Return logit_TE of a coming layer, float32."""
        if layer not in self.computed:
            f_TES, context_TG = self.signals.signals(layer)
            distance = layer - self.signals.layer
            index = sum(d <= distance for d in DISTANCES) - 1
            trust_S = self._trust_DS[index] + self._trust_LS[layer]
            trust_TS = trust_S + context_TG @ self._gate_GS
            for request, mine in self.signals.tokens_of.items():
                trust_TS[mine] += self._own[request][1].offset_S
            logit_TE = np.einsum("tes,ts->te", f_TES, trust_TS)
            self.computed[layer], self._returned[layer] = (f_TES, logit_TE), logit_TE
            if self._haste:
                self._returned[layer] = self._reordered(index, layer, f_TES, logit_TE)
                ranked_TER = np.concatenate([logit_TE[..., None], f_TES[..., _ALONE]], axis=2)
                if distance in DISTANCES:
                    self._pending.setdefault(layer, {})[index] = ranked_TER
        return self._returned[layer]

    def _reordered(self, index: int, layer: int, f_TES: np.ndarray, logit_TE: np.ndarray) -> np.ndarray:
        """Return the logits, reordered by the leading signal, if any."""
        returned_TE = logit_TE
        for request, mine in self.signals.tokens_of.items():
            leader = self._own_records[request][1].leader(int(len(mine) == 1), index, layer)
            if leader is not None:
                order_TE = np.argsort(-f_TES[mine, :, _ALONE[leader]], axis=1, kind="stable")
                if returned_TE is logit_TE:
                    returned_TE = logit_TE.copy()
                given_TE = np.empty_like(logit_TE[mine])
                np.put_along_axis(given_TE, order_TE, -np.sort(-logit_TE[mine], axis=1), axis=1)
                returned_TE[mine] = given_TE
        return returned_TE

    def _compare(self, event: GateEvent, index: int, ranked_TER: np.ndarray) -> None:
        """Record the match of each ranking on this layer, for each request."""
        experts_TK = np.asarray(event.experts_TK)
        top_k = experts_TK.shape[1]
        chosen_TE = np.zeros(ranked_TER.shape[:2], np.float32)
        np.put_along_axis(chosen_TE, experts_TK, 1 / top_k, axis=1)
        best_TKR = np.argpartition(-ranked_TER, min(top_k, ranked_TER.shape[1] - 1), axis=1)[:, :top_k]
        right_TR = np.take_along_axis(chosen_TE[..., None], best_TKR, axis=1).sum(axis=1)
        for request, mine in self.signals.tokens_of.items():
            self._own_records[request][1].count(int(len(mine) == 1), index, event.layer, right_TR[mine])

    def _learn(self, event: GateEvent) -> None:
        """Take one step for each request with one token in this forward."""
        f_TES, logit_TE = self.computed[event.layer]
        for request, mine in self.signals.tokens_of.items():
            if len(mine) > 1:
                continue
            error_E = 1 / (1 + np.exp(-np.clip(logit_TE[mine[0]], -30, 30)))
            error_E[list(event.experts_TK[mine[0]])] -= 1
            self._own[request][1].step(error_E @ f_TES[mine[0]], self._haste)
