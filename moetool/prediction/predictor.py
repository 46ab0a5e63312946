"""A predictor as replay, plans and simulation use it: arrays in, scores out.

`moetool.training.predictor.Predictor` is its implementation as a torch module, which the engine loads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from moetool.base.types import GateEvent, ModelSpec


class Predictor(Protocol):
    """Scores the experts of coming layers from the observed part of the current forward.

    Attributes:
        needs: trace columns that it reads.
        lookahead: maximum number of layers ahead of the last observed one.
        predicts_prompts: whether `workload` predicts a request from its prompt, before it runs.
        card, sha256: its card, and the sha256 of the card's file.
        num_bytes: bytes of everything learned or counted.
    """

    spec: ModelSpec
    name: str
    card: dict[str, Any]
    sha256: str
    needs: frozenset[str]
    lookahead: int

    @property
    def predicts_prompts(self) -> bool: ...

    @property
    def num_bytes(self) -> int: ...

    def observe(self, event: GateEvent) -> None:
        """Observe the event of the next layer of the current forward; layer 0 begins a new forward."""

    def scores(self, layer: int) -> np.ndarray:
        """Score MoE layer `layer` for every token of the observed forward, as float32 [T, E]."""

    def continue_path(self, experts_TK: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the expected choices share_TE float64 of each later layer, from the experts of the first one."""

    def workload(self, token_id_S: Sequence[int], new_tokens: int = 0) -> np.ndarray:
        """Return the expected tokens load_LE float64 of a pending request for each expert of each layer."""


Card = Mapping[str, Any]
