"""Measured costs of a GPU in LLMServingSim's tables, as the costs of a rank."""

import csv
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np

from moetool.simulation.rank_seconds import RankWork

Table = list[tuple[float, ...]]


class MeasuredRank:
    """Tables of one layer's parts on one GPU, in microseconds; straight lines between their points.

    Args:
        folder: has dense.csv, attention.csv, per_sequence.csv and moe.csv.
    """

    LAYER: ClassVar = {"layernorm": 2, "qkv_proj": 1, "qk_norm": 1, "rotary_emb": 1, "o_proj": 1}
    name = "tables of LLMServingSim"

    def __init__(self, folder: Path, top_k: int) -> None:
        self._top_k = top_k
        self._lines: dict[str, Table] = {}
        for file in ("dense", "per_sequence"):
            for name, *row in _rows(folder / f"{file}.csv"):
                self._lines.setdefault(name, []).append(tuple(map(float, row)))
        points = [tuple(map(float, row)) for row in _rows(folder / "attention.csv")]
        powers = {0.0, *(2.0**n for n in range(15))}  # a full grid; the other points are samples
        self._axes = [sorted({point[axis] for point in points} & powers) for axis in range(4)]
        self._attention = {point[:4]: point[4] for point in points}
        self._experts: dict[float, Table] = {}
        for tokens, experts, us in _rows(folder / "moe.csv"):
            self._experts.setdefault(float(experts), []).append((float(tokens), float(us)))

    def dense(self, work: RankWork) -> float:
        """See `RankSeconds`; an idle rank computes one token beside the others, as vLLM's does."""
        us = sum(count * self._line(name, max(1, work.tokens)) for name, count in self.LAYER.items())
        if work.tokens:
            us += self._attended(work.prompt_tokens, work.prompt_context, work.new_tokens, work.context)
        return 1e-6 * us

    def once(self, work: RankWork) -> float:
        """See `RankSeconds`."""
        us = sum(self._line(name, max(1, work.tokens)) for name in ("embedding", "final_layernorm"))
        us += sum(self._line(name, max(1, work.outputs)) for name in ("lm_head", "sampler"))
        return 1e-6 * us

    def experts(self, rows_X: np.ndarray, rank_X: np.ndarray, num_ranks: int) -> np.ndarray:
        """See `RankSeconds`; a table's token has `top_k` rows."""
        tokens_R = np.bincount(rank_X, rows_X, num_ranks) / self._top_k
        used_R = np.bincount(rank_X, minlength=num_ranks)
        known = sorted(self._experts)
        by_used = np.array([np.interp(tokens_R, *zip(*self._experts[used], strict=True)) for used in known])
        found_R = [np.interp(used, known, by_used[:, rank]) for rank, used in enumerate(used_R)]
        return 1e-6 * np.where(used_R > 0, found_R, 0.0)

    def _line(self, name: str, amount: float) -> float:
        return float(np.interp(amount, *zip(*self._lines[name], strict=True)))

    def _attended(self, *at: float) -> float:
        """Linear in each of the four axes."""
        ends = []
        for axis, value in zip(self._axes, at, strict=True):
            value = min(max(value, axis[0]), axis[-1])
            right = min(max(1, int(np.searchsorted(axis, value, side="right"))), len(axis) - 1)
            share = (value - axis[right - 1]) / (axis[right] - axis[right - 1])
            ends.append([(axis[right - 1], 1 - share), (axis[right], share)])
        total = 0.0
        for corner in product(*ends):
            weight = float(np.prod([share for _, share in corner]))
            if weight:
                total += weight * self._attention[tuple(value for value, _ in corner)]  # type: ignore[index]
        return total


def _rows(file: Path) -> list[list[str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.reader(lines))[1:]
