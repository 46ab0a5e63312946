"""When each expert is needed next: a small network over the routing path, in NumPy, that goes on learning.

It is asked in the middle of a forward, after some layer's router has chosen, and answers for every expert of the
model. One hidden layer is added to a linear model of past use:

    z      = now' x + before' x0 + habit' sqrt(d) + phase[l]      x: the token's path so far, x0: the last token's path
    value  = sigmoid(relu(z) value + bias + (shared + coef) f)    expected discount ** (forwards that pass it by)
    chance = sigmoid(relu(z) use + bias + coef f)                 probability of use in the next layer
    past   = sigmoid(bias + (shared + coef) f)                    `value` by past use alone

f are `FEATURES` numbers of an expert's own past: the logarithm of its use, averaged over the past at five rates, and
of the forwards since its last use, and whether its layer is still to come in this forward.
`predictors/next_use.py` is the same network in torch, and fits it to a trace.

Shapes:
    A  experts of the model, L * E, by key     H  hidden width     F  features     R  requests of a forward
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np

from moetool.learning.past_use import DECAYS, FEATURES, FLOOR, HABIT, Past, Sample
from moetool.types import ModelSpec

USE_WEIGHT = 0.25
"""Weight of the loss of `chance`, a mean over one layer, beside that of `value`, a mean over all."""
_PIECE = 1 << 15
_KEEP, _HASTE = 0.9, 30.0  # of the confidence: how much of it stays, and how much it moves by a difference of losses


def shapes(spec: ModelSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    """The name and shape of each weight."""
    A, L, H, F = spec.num_layers * spec.num_experts, spec.num_layers, hidden, FEATURES
    return {
        "now_AH": (A, H),
        "before_AH": (A, H),
        "habit_AH": (A, H),
        "phase_LH": (L, H),
        "value_HA": (H, A),
        "value_A": (A,),
        "value_F1": (F, 1),
        "value_FA": (F, A),
        "use_HA": (H, A),
        "use_A": (A,),
        "use_FA": (F, A),
        "past_A": (A,),
        "past_F1": (F, 1),
        "past_FA": (F, A),
    }


def fresh(spec: ModelSpec, hidden: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights that know nothing but that recent and frequent use speaks for an expert."""
    scale = {"now_AH": 0.05, "before_AH": 0.05, "habit_AH": 0.02, "value_HA": 0.02, "use_HA": 0.02}
    made = {
        name: (rng.standard_normal(shape, np.float32) * scale.get(name, 0)).astype(np.float32)
        for name, shape in shapes(spec, hidden).items()
    }
    for head in ("value", "past"):
        made[f"{head}_A"] += 1
        made[f"{head}_F1"][: len(DECAYS)] = 0.15
        made[f"{head}_F1"][len(DECAYS)] = -0.15
    made["use_A"] -= 2
    return made


class NextUse:
    """The network, its memory of samples and its learning.

    Args:
        weights: a value for each name of `shapes`; copied.
        memory: samples that are kept to learn from again.
        learning_rate: of Adam; 0 learns nothing.
        batch: samples of a step.
        trained: whether the weights are of a fitted predictor; they are then kept beside those that learn, which
            begin with a third of the learning rate, and asked in their place while they predict better.

    Attributes:
        weights: those that learn.
        confidence_3: logarithms, up to a constant, of the trust in what learns, in past use and in what was fitted.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, np.ndarray],
        *,
        memory: int,
        learning_rate: float,
        batch: int,
        seed: int,
        trained: bool,
    ) -> None:
        self.spec = spec
        self.sizes = shapes(spec, weights["value_HA"].shape[0])
        # One array holds all weights, so that a step goes through them in pieces that stay in the processor's cache.
        self._flat, self.gradient, self._first, self._second = (
            np.zeros(sum(map(math.prod, self.sizes.values())), np.float32) for _ in range(4)
        )
        self.weights = split_weights(self._flat, self.sizes)
        for name, weight in self.weights.items():
            weight[:] = weights[name]
        self._fitted = {name: np.array(value, np.float32) for name, value in weights.items()} if trained else None
        self.confidence_3 = np.array([0.0, -5.0, -5.0 if trained else -np.inf])
        self._rate = learning_rate * (0.3 if trained else 1.0)
        self._coefficients()
        self._batch = batch
        self._rng = np.random.default_rng(seed)
        self._memory = memory
        self._samples: list[Sample] = []
        self._new: list[Sample] = []
        self._place = 0
        self._step = 0
        self._share_3 = self._shares()
        self._asked = self.weights
        self._habit_H = np.zeros_like(self.weights["phase_LH"][0])

    @property
    def pace(self) -> int:
        """Factor by which learning steps may be rarer, while the fitted weights predict better."""
        return 4 if self.confidence_3[2] > self.confidence_3[0] else 1

    def _shares(self) -> np.ndarray:
        """Weights of the three opinions. One below 2 % is not worth its time, nor is the worse of the two networks."""
        share_3 = np.exp(self.confidence_3 - self.confidence_3.max())
        share_3[share_3 < 0.02 * share_3.sum()] = 0
        share_3[0 if share_3[2] > share_3[0] else 2] = 0
        return share_3 / share_3.sum()

    def take_in(self, past: Past) -> None:
        """A forward begins: look at the habits of `past`, for all of it."""
        self._share_3 = self._shares()
        self._asked = self._fitted if self._fitted is not None and self._share_3[2] else self.weights
        self._habit_H = past.habit_A @ self._asked["habit_AH"]

    def begin_path(self, before: np.ndarray | None) -> np.ndarray:
        """z_H of a token that has chosen nothing yet; `before` are the keys of the last token's path, if any."""
        z_H: np.ndarray = self._habit_H.copy()
        if before is not None:
            z_H += self._asked["before_AH"][before].sum(axis=0)
        return z_H

    def follow_path(self, z_H: np.ndarray, keys: list[int]) -> None:
        """Add what the token has chosen to its z, in place."""
        z_H += self._asked["now_AH"][keys].sum(axis=0)

    def hidden_RH(self, z_RH: list[np.ndarray], layer: int) -> np.ndarray:
        """relu(z) of each request after the router of `layer`."""
        hidden_RH: np.ndarray = np.maximum(np.stack(z_RH) + self._asked["phase_LH"][layer], 0)
        return hidden_RH

    def values(self, hidden_RH: np.ndarray, past: Past) -> np.ndarray:
        """value_A, mixed by confidence; of several requests the one that wants an expert most speaks."""
        f_FA, mind = past.features_FA, self._asked
        past_use = float(self._share_3[1])
        value_A = np.zeros(f_FA.shape[1], np.float32)
        if past_use < 1:
            coef_FA = self._value_FA if mind is self.weights else self._fitted_FA
            logit_A = (hidden_RH @ mind["value_HA"]).max(axis=0) + mind["value_A"]
            logit_A += np.einsum("fa,fa->a", coef_FA, f_FA)
            value_A += _sigmoid(logit_A) * np.float32(1 - past_use)
        if past_use:
            logit_A = self.weights["past_A"] + np.einsum("fa,fa->a", self._past_FA, f_FA)
            value_A += _sigmoid(logit_A) * np.float32(past_use)
        return value_A

    def chances(self, hidden_RH: np.ndarray, past: Past, layer: int) -> np.ndarray:
        """Probability that any request uses each expert of `layer`, the layer after that of `hidden_RH`."""
        span = slice(layer * self.spec.num_experts, (layer + 1) * self.spec.num_experts)
        w = self._asked
        own_E = w["use_A"][span] + (w["use_FA"][:, span] * past.features_FA[:, span]).sum(axis=0)
        chance_E: np.ndarray = 1 - np.prod(1 - _sigmoid(hidden_RH @ w["use_HA"][:, span] + own_E), axis=0)
        return chance_E

    def remember(self, sample: Sample) -> None:
        """Keep a sample whose future is known by now."""
        self._new.append(sample)
        if len(self._samples) < self._memory:
            self._samples.append(sample)
        else:
            self._samples[self._place] = sample
            self._place = (self._place + 1) % self._memory

    def learn(self) -> None:
        """One step of Adam on the samples since the last step and on others from memory.

        Effects: before it, confidence moves to the opinions that predicted the new samples better.
        """
        if not self._new or not self._rate:
            self._new.clear()
            return
        new = self._new[-self._batch :]
        num_old = self._batch - len(new)
        drawn = [self._samples[i] for i in self._rng.integers(0, len(self._samples), num_old).tolist()]
        self._new = []
        loss_3 = np.array(self.backward(new + drawn, len(new)))
        self.confidence_3 = _KEEP * self.confidence_3 - _HASTE * (loss_3 - loss_3.min())
        self.confidence_3 -= self.confidence_3.max()
        self._step += 1
        rate = self._rate * math.sqrt(1 - 0.999**self._step) / (1 - 0.9**self._step)
        for start in range(0, len(self._flat), _PIECE):
            piece = slice(start, start + _PIECE)
            gradient, first, second = self.gradient[piece], self._first[piece], self._second[piece]
            first += 0.1 * (gradient - first)
            gradient *= gradient
            gradient -= second
            gradient *= 0.001
            second += gradient
            np.sqrt(second, out=gradient)
            gradient += 1e-8
            np.divide(first, gradient, out=gradient)
            gradient *= rate
            self._flat[piece] -= gradient
        self._coefficients()

    def _coefficients(self) -> None:
        """Add the coefficients of each expert and those of all, once for many looks."""
        w = self.weights
        self._value_FA = w["value_FA"] + w["value_F1"]
        self._past_FA = w["past_FA"] + w["past_F1"]
        if self._fitted is not None:
            self._fitted_FA = self._fitted["value_FA"] + self._fitted["value_F1"]

    def state(self) -> dict[str, np.ndarray]:
        """Weights and confidence; the memory and the moments are not kept."""
        fitted = {f"fitted_{name}": value for name, value in (self._fitted or {}).items()}
        return {**self.weights, **fitted, "confidence_3": self.confidence_3}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        for name, weight in (*self.weights.items(), *(self._fitted or {}).items()):
            weight[:] = state[name if weight is self.weights.get(name) else f"fitted_{name}"]
        self.confidence_3 = np.array(state["confidence_3"], np.float64)
        self._coefficients()

    def backward(self, samples: list[Sample], num_new: int) -> list[float]:
        """The losses of the three opinions, means over the first `num_new` samples; inf where there is none.

        Effects: the gradient of the mean losses over all samples is in `gradient`.
        """
        w, E, B = self.weights, self.spec.num_experts, len(samples)
        A = len(w["value_A"])
        now_BA, before_BA = np.zeros((B, A), np.float32), np.zeros((B, A), np.float32)
        for row, sample in enumerate(samples):
            now_BA[row, sample.now] = 1
            if sample.before is not None:
                before_BA[row, sample.before] = 1
        layers = [sample.layer for sample in samples]
        features_BFA = np.stack([sample.features_FA for sample in samples]).astype(np.float32)
        habit_BA = np.sqrt(np.maximum(np.exp(features_BFA[:, HABIT]) - FLOOR, 0))
        target_BA = np.stack([sample.target_A for sample in samples]).astype(np.float32)
        z_BH = now_BA @ w["now_AH"] + before_BA @ w["before_AH"] + habit_BA @ w["habit_AH"] + w["phase_LH"][layers]
        hidden_BH = np.maximum(z_BH, 0)
        value_BA = hidden_BH @ w["value_HA"] + w["value_A"]
        value_BA += np.einsum("bfa,fa->ba", features_BFA, self._value_FA)
        past_BA = np.einsum("bfa,fa->ba", features_BFA, self._past_FA) + w["past_A"]
        losses = [_loss(logit_BA[:num_new], target_BA[:num_new]) for logit_BA in (value_BA, past_BA)]
        if (mind := self._fitted) is None:
            losses.append(np.inf)
        else:
            z_BH = now_BA[:num_new] @ mind["now_AH"] + before_BA[:num_new] @ mind["before_AH"]
            z_BH += habit_BA[:num_new] @ mind["habit_AH"] + mind["phase_LH"][layers[:num_new]]
            logit_BA = np.maximum(z_BH, 0) @ mind["value_HA"] + mind["value_A"]
            logit_BA += np.einsum("bfa,fa->ba", features_BFA[:num_new], self._fitted_FA)
            losses.append(_loss(logit_BA, target_BA[:num_new]))
        out = split_weights(self.gradient, self.sizes)
        for head, logit_BA in (("value", value_BA), ("past", past_BA)):
            error_BA = _sigmoid(logit_BA) - target_BA
            error_BA /= B * A
            error_BA.sum(axis=0, out=out[f"{head}_A"])
            np.einsum("bfa,ba->fa", features_BFA, error_BA, out=out[f"{head}_FA"])
            out[f"{head}_FA"].sum(axis=1, keepdims=True, out=out[f"{head}_F1"])
            if head == "value":
                np.matmul(hidden_BH.T, error_BA, out=out["value_HA"])
                hidden_error_BH = error_BA @ w["value_HA"].T
        for name in ("use_HA", "use_A", "use_FA"):
            out[name].fill(0)
        for row, layer in enumerate(layers):
            if layer + 1 == self.spec.num_layers:
                continue
            span = slice((layer + 1) * E, (layer + 2) * E)
            f_FE = features_BFA[row, :, span]
            logit_E = (
                hidden_BH[row] @ w["use_HA"][:, span] + w["use_A"][span] + (w["use_FA"][:, span] * f_FE).sum(axis=0)
            )
            error_E = (_sigmoid(logit_E) - (target_BA[row, span] == 1)) * (USE_WEIGHT / (B * E))
            out["use_HA"][:, span] += hidden_BH[row][:, None] * error_E
            out["use_A"][span] += error_E
            out["use_FA"][:, span] += f_FE * error_E
            hidden_error_BH[row] += w["use_HA"][:, span] @ error_E
        hidden_error_BH *= hidden_BH > 0
        np.matmul(now_BA.T, hidden_error_BH, out=out["now_AH"])
        np.matmul(before_BA.T, hidden_error_BH, out=out["before_AH"])
        np.matmul(habit_BA.T, hidden_error_BH, out=out["habit_AH"])
        out["phase_LH"].fill(0)
        np.add.at(out["phase_LH"], layers, hidden_error_BH)
        return losses


def split_weights(flat: np.ndarray, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Views of the parts of `flat` that hold arrays of these shapes, one after the other."""
    ends = list(itertools.accumulate(map(math.prod, sizes.values()), initial=0))
    spans = zip(sizes.items(), ends, ends[1:], strict=False)
    return {name: flat[start:end].reshape(shape) for (name, shape), start, end in spans}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = 1 / (1 + np.exp(-np.clip(x, -30, 30)))
    return value


def _loss(logit: np.ndarray, target: np.ndarray) -> float:
    """Mean binary cross-entropy."""
    return float((np.logaddexp(0, logit) - target * logit).mean())
