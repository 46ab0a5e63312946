"""Rows of a trace as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

KEEP = ("topk", "logits", "embeddings", "hidden", "ahead", "resident")
"""Columns that a capture can keep for policies and predictors."""
EXTRA = ("scores", "logits32", "norms", "text")
"""Further columns that a capture can keep, for analysis."""
SIGNALS = ("logits", "hidden", "ahead", "resident", "scores", "logits32", "norms")
"""Optional columns of tokens/ in addition to the routes."""


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """Rows of tokens/, as arrays.

    Shapes:
        request_T, forward_T, iteration_T, position_T, token_id_T int32; phase_T uint8 (`Phase`);
        experts_TS uint16 and weights_TS float16 with S = sum of top_k_L; logits_TF float16 with F = sum of
        num_experts_L; hidden_TH float16 with H = L * D; ahead_TR float16 with R = L * A * E; resident_TW float16 with
        W = L * E; scores_TF float16; logits32_TF float32; norms_TS float16. `None` where not recorded or not requested.
        A token id of -1 was withheld.
    """

    request_T: np.ndarray
    forward_T: np.ndarray
    phase_T: np.ndarray
    iteration_T: np.ndarray
    position_T: np.ndarray
    token_id_T: np.ndarray
    experts_TS: np.ndarray
    weights_TS: np.ndarray | None = None
    logits_TF: np.ndarray | None = None
    hidden_TH: np.ndarray | None = None
    ahead_TR: np.ndarray | None = None
    resident_TW: np.ndarray | None = None
    scores_TF: np.ndarray | None = None
    logits32_TF: np.ndarray | None = None
    norms_TS: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.request_T)

    def select(self, index: Any) -> "TokenBatch":
        """Return the rows that `index` (a slice, a mask or an index array) selects."""
        picked: dict[str, Any] = {
            name: None if (column := getattr(self, name)) is None else column[index] for name in TokenBatch.__slots__
        }
        return TokenBatch(**picked)

    @staticmethod
    def concatenate(batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """Return the rows of several batches in sequence. All must have the same columns."""
        joined: dict[str, Any] = {}
        for name in TokenBatch.__slots__:
            parts = [getattr(batch, name) for batch in batches]
            joined[name] = None if parts[0] is None else np.concatenate(parts)
        return TokenBatch(**joined)


COLUMNS = {
    "request": "request_T",
    "forward": "forward_T",
    "phase": "phase_T",
    "iteration": "iteration_T",
    "position": "position_T",
    "token_id": "token_id_T",
    "experts": "experts_TS",
    "weights": "weights_TS",
    "logits": "logits_TF",
    "hidden": "hidden_TH",
    "ahead": "ahead_TR",
    "resident": "resident_TW",
    "scores": "scores_TF",
    "logits32": "logits32_TF",
    "norms": "norms_TS",
}
ALWAYS = ("request", "forward", "phase", "iteration", "position", "token_id", "experts")
