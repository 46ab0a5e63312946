"""A thread that runs a predictor, in the order of events."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from moetool.base.types import GateEvent


class PredictionThread:
    """Runs a predictor on its own thread, so that an event's first loads need not wait for it.

    A predictor that policies share runs on the caller's thread instead, with the same results.

    Args:
        predictor: a `moetool.training.predictor.Predictor`.

    Effects: starts a thread, which ends with this object.
    """

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor
        shared = getattr(predictor, "is_shared", False)
        self._pool = None if shared else ThreadPoolExecutor(1, "prediction")

    def ask(self, event: GateEvent, layer: int | None) -> "Future[np.ndarray | None]":
        """Let the predictor observe an event and score the experts of a later layer; None only observes.

        Returns:
            The scores, float32 [T, E], or the predictor's error.
        """
        if self._pool is not None:
            return self._pool.submit(self._answer, event, layer)
        answer: Future[np.ndarray | None] = Future()
        answer.set_result(self._answer(event, layer))
        return answer

    def _answer(self, event: GateEvent, layer: int | None) -> np.ndarray | None:
        self._predictor.observe(event)
        return None if layer is None else self._predictor.scores(layer)
