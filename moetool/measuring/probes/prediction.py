"""Timings of one prediction."""

import time
from functools import partial
from typing import Any

import numpy as np

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec, Phase
from moetool.costing.costs import Curve
from moetool.measuring.probes.repeat import Timings, repeat

TOKENS = (1, 8, 64)
AHEAD = 8


def prediction_curve(predictor: Any, seconds: float) -> Curve:
    """Return the seconds of observing one layer and scoring the next, against the forward's tokens, on random routes.

    Args:
        predictor: a `moetool.training.predictor.Predictor`.
    """
    spec: ModelSpec = predictor.spec
    rng = np.random.default_rng(0)
    timings = Timings()

    def measure(tokens: int) -> None:
        events = _events(spec, tokens, rng)
        began = time.perf_counter()
        for event in events[:-1]:
            predictor.observe(event)
            predictor.scores(event.layer + 1)
        timings.add(tokens, (time.perf_counter() - began) / (len(events) - 1))

    repeat([partial(measure, tokens) for tokens in TOKENS], seconds)
    return timings.curve()


def _events(spec: ModelSpec, tokens: int, rng: np.random.Generator) -> list[GateEvent]:
    """Return one forward over random experts, with all fields that predictors may need."""
    info = ForwardInfo(
        forward_id=0,
        request_T=tuple(range(tokens)),
        phase_T=(Phase.DECODE,) * tokens,
        position_T=(0,) * tokens,
        embedding_TD=rng.standard_normal((tokens, spec.hidden_size), np.float32),
        token_id_T=tuple(range(tokens)),
    )
    events = []

    def scores(*shape: int) -> np.ndarray:
        return rng.random(shape, np.float32)

    for layer, (num_experts, top_k) in enumerate(zip(spec.num_experts_L, spec.top_k_L, strict=True)):
        scores_TE = scores(tokens, num_experts)
        experts_TK = np.argsort(-scores_TE)[:, :top_k]
        events.append(
            GateEvent(
                forward=info,
                layer=layer,
                experts_TK=tuple(map(tuple, experts_TK.tolist())),
                weights_TK=np.take_along_axis(scores_TE, experts_TK, axis=1),
                scores_TE=scores_TE,
                hidden_TD=rng.standard_normal((tokens, spec.hidden_size), np.float32),
                ahead_ATE=scores(min(AHEAD, spec.num_layers - 1 - layer), tokens, spec.num_experts),
                resident_TE=scores(tokens, spec.num_experts),
            )
        )
    return events
