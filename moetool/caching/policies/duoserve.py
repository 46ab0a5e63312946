"""DuoServe: K slots in all; a two-stream pipeline for prompts, learned prefetching for new tokens."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.policies import lru
from moetool.caching.policy import MIN_SLOTS
from moetool.caching.prediction_thread import PredictionThread


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of DuoServe's cache.

    Attributes:
        slots_per_layer: slots per MoE layer, L times as many in all (None: the paper's K slots in all).
        lag: events between the gate that starts a prediction and the event that uses it (0: the same event). The
            predictor then looks `lag` layers farther, and layers 1 to `lag` are not prefetched.
    """

    slots_per_layer: int | None = None
    lag: int = 0

    def __post_init__(self) -> None:
        if self.lag < 0:
            raise UsageError(f"policy duoserve: lag is {self.lag}, expected at least 0")


class Policy(lru.Policy):
    """Prefetches the predictor's top-k experts of the next layer once a layer's first expert is computed.

    A forward with prompt tokens is not predicted, since it needs nearly all experts. Each expert is fetched while the
    previous one is computed. The next layer's first expert is fetched before that layer's router has chosen.

    Source: DuoServe-MoE, section 5. Readings and deviations:
        - The prediction stream is a separate thread. The event's first expert waits for its answer (with `lag`, a later
          event's), so that replay decides as serve did. On-demand loads of the event begin earlier.
        - In a prompt, a pool of K slots holds two experts only for K = 2. With more slots, fetching runs further ahead
          of computing; the order and number of loads are the same.
        - The first expert of a layer is expert 0. A short prompt may not need it; that load is then wasted.
        - A forward that mixes prompts and new tokens is treated as a prompt.
        - For several new tokens in a forward, the union of their top-k is prefetched, by summed score, as slots permit.
        - Table 2's cache holds K experts, so an expert rarely survives from one token to the next. `slots_per_layer`
          makes the pool larger. All layers share it: wrong predictions are evicted first, then the least recently used
          expert.
    """

    needs_predictor = True
    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: Any = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self._predicted: Sequence[int] = ()  # for the coming event
        self._thread = PredictionThread(predictor)
        self._answers: deque[Future[np.ndarray | None]] = deque()  # predictions of the forward, oldest first
        self._lag = self.prediction_lag = min(options.lag, predictor.lookahead - 1)

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Options, num_slots: int) -> int:
        per_layer = options.slots_per_layer
        wanted = max(spec.top_k_L) if per_layer is None else per_layer * spec.num_layers
        return min(num_slots, max(MIN_SLOTS, wanted))

    @property
    def distance(self) -> int:
        return 1 + self._lag

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        self._predicted = (self.spec.expert_key(0, 0),) if info.prefill else ()
        self._answers.clear()
        return self._predicted

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        layer = event.layer + 1 + self._lag
        asked = None if event.forward.prefill or layer >= self.spec.num_layers else layer
        self._answers.append(self._thread.ask(event, asked))  # prompts too: some predictors remember them
        for key in self._predicted:
            if key in self._order:
                self._order.move_to_end(key, last=False)
        return super().gate(event, hits, misses)  # moves correct predictions back to the recent end

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        layer = event.layer + 1
        scores_TE = self._answers.popleft().result() if len(self._answers) > self._lag else None
        if event.forward.prefill and layer < self.spec.num_layers:
            self._predicted = (self.spec.expert_key(layer, 0),)
        elif scores_TE is None:
            self._predicted = ()
        else:
            experts = likeliest(scores_TE, self.spec.top_k_L[layer])
            self._predicted = [self.spec.expert_key(layer, e) for e in experts[: self.num_slots]]
        return self._predicted

    def end_forward(self, info: ForwardInfo) -> None:
        for answer in self._answers:
            answer.result()  # raises the predictor's error
        self._answers.clear()


def likeliest(scores_TE: np.ndarray, top_k: int) -> list[int]:
    """Return the union of the tokens' `top_k` best experts, by score summed over the tokens, highest first.

    Ties go to the lower number, so that a replay decides as the server did.
    """
    top_TK = np.argsort(-scores_TE, axis=1, kind="stable")[:, :top_k]
    total_E = scores_TE.sum(axis=0, dtype=np.float64)
    union = np.unique(top_TK)
    return union[np.argsort(-total_E[union], kind="stable")].tolist()
