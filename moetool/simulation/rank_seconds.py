"""Seconds of ranks in lockstep: a dense layer, the experts of a layer, and the parts outside the layers.

Neither assumed nor profiled costs count everything: a chunk of a prompt reads the tokens before it for free
(`RankWork.prompt_context` is for costs of the caller's), the prompts of a step cost as one prompt of all their tokens,
and layers without routed experts cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moetool.base.types import ModelSpec
from moetool.costing.costs import ComputeCosts, CostProfile
from moetool.placement.latency import along
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.workload import Route
from moetool.trace.expert_counts import count_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """The tokens of a rank in one step.

    Attributes:
        prompt_context: mean number of earlier tokens of their prompts.
        new_tokens: decoded tokens, one per request.
        context: mean number of tokens that a decoded token attends to.
        outputs: tokens whose logits are taken.
    """

    prompt_tokens: int = 0
    prompt_context: float = 0.0
    new_tokens: int = 0
    context: float = 0.0
    outputs: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


class RankSeconds(Protocol):
    """Costs of a rank of speed 1."""

    @property
    def name(self) -> str:
        """Return the origin of the costs, for users."""

    def dense(self, work: RankWork) -> float:
        """Return the seconds of a layer without its routed experts."""

    def once(self, work: RankWork) -> float:
        """Return the seconds of a step outside the layers: embedding, output projection, sampling."""

    def experts(self, rows_X: np.ndarray, rank_X: np.ndarray, num_ranks: int) -> np.ndarray:
        """Return the seconds [R] of each rank's experts in a layer; their weights are read once.

        Args:
            rows_X: rows of each expert that has any, those of all requests merged.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedRank:
    """Assumed costs: straight lines.

    Attributes:
        roofline: a read of weights and arithmetic overlap, so that the longer one counts; otherwise their sum.
    """

    costs: AssumedCosts
    roofline: bool = False
    name: str = "assumed costs, no profile"

    def dense(self, work: RankWork) -> float:
        """See `RankSeconds`."""
        return float(self._line(self.costs.dense_s, self.costs.dense_token_s, np.array(work.tokens)))

    def once(self, work: RankWork) -> float:
        """See `RankSeconds`: not modelled."""
        return 0.0

    def experts(self, rows_X: np.ndarray, rank_X: np.ndarray, num_ranks: int) -> np.ndarray:
        """See `RankSeconds`."""
        taken_X = self._line(self.costs.expert_s, self.costs.expert_token_s, rows_X)
        return np.bincount(rank_X, taken_X, num_ranks)

    def _line(self, first_s: float, token_s: float, tokens_X: np.ndarray) -> np.ndarray:
        if self.roofline:
            return np.where(tokens_X > 0, np.maximum(first_s, token_s * tokens_X), 0.0)
        return np.where(tokens_X > 0, first_s + token_s * (tokens_X - 1.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRank:
    """Costs of a profile. Decoded tokens of a step share the reads of a prompt of as many tokens; each reads its own
    keys and values."""

    costs: ComputeCosts
    name: str

    def dense(self, work: RankWork) -> float:
        """See `RankSeconds`."""
        costs, tokens = self.costs, work.tokens
        if not tokens:
            return 0.0
        keys_s = max(0.0, costs.attention(work.context) - costs.attention(1)) * work.new_tokens
        alone = costs.attention(1) if tokens == 1 else costs.prompt_attention(tokens)
        return alone + keys_s + costs.gate(tokens) + costs.shared(tokens)

    def once(self, work: RankWork) -> float:
        """See `RankSeconds`."""
        return self.costs.head(work.outputs) if work.outputs else 0.0

    def experts(self, rows_X: np.ndarray, rank_X: np.ndarray, num_ranks: int) -> np.ndarray:
        """See `RankSeconds`."""
        return np.bincount(rank_X, along(self.costs.expert, rows_X), num_ranks)


def rank_seconds(costs: AssumedCosts | CostProfile | RankSeconds | None, spec: ModelSpec) -> RankSeconds:
    """Return the costs of a rank. Raises: MismatchError: a profile of another model."""
    if costs is None or isinstance(costs, AssumedCosts):
        return AssumedRank(costs=costs or AssumedCosts())
    if not isinstance(costs, CostProfile):
        return costs
    costs.check(spec)
    devices = {each.device for each in costs.compute}
    known = costs.on("cuda" if "cuda" in devices else "cpu")
    return ProfiledRank(costs=known, name=f"profile of {costs.spec.name}")


def mean_row_s(seconds: RankSeconds, routes: Sequence[Route]) -> float:
    """Return the mean seconds of a row of a batch, all of whose requests run together.

    Source: DIRECTOR § VI-A, whose f_comp is profiled.
    """
    total_s = rows = 0.0
    spec = routes[0].spec
    for step in range(-1, max(route.new_tokens for route in routes)):
        parts = [route.prompt_TS if step < 0 else route.reply_TS[step : step + 1] for route in routes]
        tokens_X = count_experts(spec, np.concatenate(parts)).ravel()
        tokens_X = tokens_X[tokens_X > 0]
        total_s += float(seconds.experts(tokens_X, np.zeros(len(tokens_X), np.int64), 1)[0])
        rows += float(tokens_X.sum())
    return total_s / rows
