"""Re-placement between two batches of ranks, from the last batch or from the batch that waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moetool.costing.costs import Curve
from moetool.errors import UsageError, unknown_name
from moetool.placement import _planner as planner
from moetool.placement._decide import SEES, Decision, InForce, Observed, ReplacementCosts, Replanner, decide
from moetool.placement._latency import Latency, along, linear_latency
from moetool.types import Cluster, ModelSpec

PLACEMENTS = tuple(mode for mode, sees in SEES.items() if sees != "prediction")
PredictRouting = Callable[[Sequence[int], int], np.ndarray]
"""Expert uses [L, E] of a request, from its prompt and the number of new tokens."""

_FORGET = 0.5
_ASK_AGAIN = 32
"""Decisions without a predictor that was found too dear; then it is asked once more, to be measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request of the batch that comes next."""

    prompt: Sequence[int]
    new_tokens: int
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCosts:
    """Measured costs of ranks, for both sides of a decision about the next batch.

    Attributes:
        row_s: seconds that an expert takes for one row; 0 where only `expert` says.
        byte_s_GG: seconds of a byte of rows from GPU to GPU, or one number for all ways.
        move_bytes_s: at which experts come to a GPU.
        added_byte_s: seconds that batches have lately taken longer because of experts on the move, for each byte of
            these; 0 where none have moved.
        row_bytes: of a row; 0 for float32.
        expert: seconds of an expert against the rows that it gets at once.
        free_s: compute phases that are left before the coming batch, in which moving costs nothing (0 where moving
            stops everything).
        within_s: a decision that comes later is dropped.
    """

    row_s: float
    byte_s_GG: np.ndarray | float
    move_bytes_s: float
    added_byte_s: float = 0.0
    row_bytes: float = 0.0
    expert: Curve | None = None
    free_s: float = 0.0
    within_s: float = float("inf")


class RoutingPredictor:
    """A way to predict the routing of requests that wait, and its measured cost.

    Attributes:
        predict: gives the expert uses [L, E] of a prompt and a number of new tokens.
        token_s: seconds a prompt token, lately; 0 before the first.
        passed_over: decisions since it was asked.
    """

    def __init__(self, name: str, predict: PredictRouting) -> None:
        self.name = name
        self.token_s = 0.0
        self.passed_over = 0
        self.predict = predict

    def measure(self, prompt: Sequence[int]) -> None:
        """Measure its cost before a batch waits for it: the second call, since the first may load files."""
        for _ in range(2):
            began = time.perf_counter()
            self.predict(prompt, 0)
            self.token_s = (time.perf_counter() - began) / len(prompt)

    def demand(self, spec: ModelSpec, cluster: Cluster, batch: Sequence[Waiting]) -> tuple[np.ndarray, float]:
        """Predicted tokens_GLE of a batch, and the seconds that predicting took."""
        began = time.perf_counter()
        tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
        for one in batch:
            tokens_GLE[one.gpu] += self.predict(one.prompt, one.new_tokens)
        taken_s = time.perf_counter() - began
        token_s = taken_s / max(1, sum(len(one.prompt) for one in batch))
        stale = not self.token_s or self.passed_over  # what it took long ago, the machine perhaps busier
        self.token_s += (1.0 if stale else _FORGET) * (token_s - self.token_s)
        self.passed_over = 0
        return tokens_GLE, taken_s

    def cost_s(self, batch: Sequence[Waiting]) -> float:
        """Expected seconds for a batch."""
        return self.token_s * sum(len(one.prompt) for one in batch)


class BatchReplacement:
    """Places anew between two batches.

    Args:
        placement: `vanilla` and `offline` stay as they begin; `reactive` places for the last batch; `proactive` for
            the one that waits.
        cluster: with the memory that placements may fill: less than there is by the double buffer.
        planner_name, options: who places. DIRECTOR does so without the steps that take most of its time, unless asked.
        predictors: for `proactive`, the cheapest first: the cascade, then the replica. One is enough.
        always: move whatever it costs.

    Source: DIRECTOR § V-A: the cascade is for frequent, minor adjustments, the replica for critical, major ones. Which
    is which, the paper leaves open. Here the cheaper predictor is always asked. The other one is asked after it where
    the gain that the first predicts is more than the other was measured to take (a major adjustment), and its answer
    would not come too late; and after each 32 decisions without it, or if it was never measured, to measure it.

    Deviations:
        - The paper's placement follows every prediction; here it does where the gain predicted exceeds the cost
          (`moetool.placement._decide.decide`).
        - `reactive` sees the last batch when that has ended, so its migrations are waited for, whatever way they take.
        - Both sides take a batch as one event of each layer, as the paper's T_comp and T_comm do; its forwards may be
          uneven in other ways.
    """

    def __init__(
        self,
        placement: str,
        spec: ModelSpec,
        cluster: Cluster,
        *,
        planner_name: str = "director",
        options: Mapping[str, Any] | None = None,
        predictors: Sequence[RoutingPredictor] = (),
        always: bool = False,
        seed: int = 0,
    ) -> None:
        if placement not in PLACEMENTS:
            raise unknown_name("--set placement", placement, PLACEMENTS)
        if placement == "proactive" and not predictors:
            raise UsageError(
                "placement proactive needs a predictor; train one with "
                "moetool train cascade --trace DIR, and give it with --predictor DIR"
            )
        self.placement, self.predictors = placement, list(predictors)
        self._spec, self._cluster = spec, cluster
        quick = planner.quick_options(planner_name)
        self._replanner = Replanner(
            planner=planner_name, options={**quick, **(options or {})}, seed=seed, weighs="latency", always=always
        )
        self._last_GLE: np.ndarray | None = None
        self._plan_s = 0.0

    @property
    def decides(self) -> bool:
        """Whether it ever places anew."""
        return SEES[self.placement] != "nothing"

    @property
    def looks_ahead(self) -> bool:
        """Whether it decides while the batch before is still running."""
        return SEES[self.placement] == "queue"

    def saw(self, tokens_GLE: np.ndarray) -> None:
        """Note the routing of the last batch."""
        self._last_GLE = tokens_GLE.astype(np.float64)

    def decide(self, batch: Sequence[Waiting], placed_GLE: np.ndarray, costs: BatchCosts) -> Decision | None:
        """Whether to place anew for the batch that comes; None where nothing is known of it."""
        if not self.looks_ahead:
            if not self.decides or self._last_GLE is None or not self._last_GLE.any():
                return None
            return self._weigh("batch", self._last_GLE, placed_GLE, costs)
        decision: Decision | None = None
        for number, predictor in enumerate(self.predictors if batch else ()):
            if decision is not None and number and not self._worth(predictor, batch, decision, costs):
                predictor.passed_over += 1
                continue
            tokens_GLE, taken_s = predictor.demand(self._spec, self._cluster, batch)
            predict_s, planned_s = (0.0, 0.0) if decision is None else (decision.predict_s, decision.plan_s)
            decision = self._weigh(predictor.name, tokens_GLE, placed_GLE, costs, predict_s + taken_s, planned_s)
        return decision

    def _worth(
        self, predictor: RoutingPredictor, batch: Sequence[Waiting], so_far: Decision, costs: BatchCosts
    ) -> bool:
        """Whether to know better than a decision does, by what that was measured to take."""
        if not predictor.token_s or predictor.passed_over >= _ASK_AGAIN:
            return True
        cost_s = predictor.cost_s(batch)
        return so_far.gain_s > cost_s and so_far.predict_s + 2 * so_far.plan_s + cost_s <= costs.within_s

    def _weigh(
        self,
        source: str,
        tokens_GLE: np.ndarray,
        placed_GLE: np.ndarray,
        costs: BatchCosts,
        predict_s: float = 0.0,
        planned_s: float = 0.0,
    ) -> Decision:
        """Decide from what was seen or predicted.

        Args:
            planned_s: seconds of planning before, for a worse prediction.
        """
        spec, cluster = self._spec, self._cluster
        sides = replacement_costs(cluster, spec, tokens_GLE, costs, predict_s + planned_s + self._plan_s)
        tokens = float(tokens_GLE.sum()) / sum(spec.top_k_L)
        observed = Observed(tokens_GLE=tokens_GLE, horizon_tokens=tokens, source=source)
        began = time.perf_counter()
        decision = decide(observed, InForce(spec=spec, cluster=cluster, placed_GLE=placed_GLE), sides, self._replanner)
        self._plan_s = time.perf_counter() - began
        return replace(decision, predict_s=predict_s, plan_s=planned_s + self._plan_s)


def replacement_costs(
    cluster: Cluster, spec: ModelSpec, tokens_GLE: np.ndarray, costs: BatchCosts, plan_s: float = 0.0
) -> ReplacementCosts:
    """The ranks' costs as a decision reckons with them; a remote call is a row's way to another server and back."""
    latency = measured_latency(cluster, spec, tokens_GLE, costs)
    apart_GG = np.not_equal.outer(cluster.server_G, cluster.server_G)
    byte_s = np.broadcast_to(np.asarray(costs.byte_s_GG, np.float64), apart_GG.shape)[apart_GG]
    return ReplacementCosts(
        latency=latency,
        call_s=2 * latency.token_bytes * float(byte_s.mean()) if byte_s.size else 0.0,
        move_bytes_s=costs.move_bytes_s,
        added_byte_s=costs.added_byte_s,
        free_s=costs.free_s,
        plan_s=plan_s,
    )


def measured_latency(cluster: Cluster, spec: ModelSpec, tokens_GLE: np.ndarray, costs: BatchCosts) -> Latency:
    """The ranks as planners see them."""
    row_s, row_bytes = costs.row_s or _row_s(tokens_GLE, costs.expert), costs.row_bytes or 4.0 * spec.hidden_size
    return linear_latency(cluster, row_s, costs.byte_s_GG, row_bytes, "measured")


def _row_s(tokens_GLE: np.ndarray, expert: Curve | None) -> float:
    """Mean seconds of a row, each source's rows of an expert computed at once."""
    assert expert is not None, "nothing says what a row takes"
    rows = tokens_GLE[tokens_GLE > 0]
    return float(along(expert, rows).sum() / rows.sum())
