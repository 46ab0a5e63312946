"""Re-placement between two batches of ranks, from the last batch or from the waiting one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import Cluster, ModelSpec
from moetool.costing.costs import Curve
from moetool.placement import planner
from moetool.placement.decide import SEES, Decision, InForce, Observed, ReplacementCosts, Replanner, decide
from moetool.placement.latency import Latency, along, linear_latency

PLACEMENTS = tuple(mode for mode, sees in SEES.items() if sees != "prediction")
PredictRouting = Callable[[Sequence[int], int], np.ndarray]
"""Expert uses [L, E] of a request, from its prompt and the number of new tokens."""

_FORGET = 0.5
"""Weight of the newest measurement."""
_ASK_AGAIN = 32
"""Decisions without a predictor that was too slow, before it is measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request of the next batch."""

    prompt: Sequence[int]
    new_tokens: int
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCosts:
    """Measured costs of ranks, for both sides of a decision.

    Attributes:
        row_s: seconds of an expert per row; 0: only `expert` is known.
        byte_s_GG: seconds per byte of rows from GPU to GPU, or one number for all links.
        move_bytes_s: rate of experts to a GPU.
        added_byte_s: recent extra seconds of batches per migrated byte; 0 without migrations.
        row_bytes: bytes of a row; 0: float32.
        expert: seconds of an expert by number of rows.
        free_s: compute phases left before the next batch, in which moves cost nothing (0 if moves stop everything).
        within_s: deadline of a decision; later ones are dropped.
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
    """A predictor of waiting requests' routing, with its measured cost.

    Attributes:
        predict: returns the expert uses [L, E] of a prompt and a number of new tokens.
        token_s: recent seconds per prompt token; 0 before the first.
        passed_over: decisions since its last use.
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
        """Predicted tokens_GLE of a batch, and the prediction's seconds."""
        began = time.perf_counter()
        tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
        for one in batch:
            tokens_GLE[one.gpu] += self.predict(one.prompt, one.new_tokens)
        taken_s = time.perf_counter() - began
        token_s = taken_s / max(1, sum(len(one.prompt) for one in batch))
        stale = not self.token_s or self.passed_over  # an old measurement, perhaps of a busier machine
        self.token_s += (1.0 if stale else _FORGET) * (token_s - self.token_s)
        self.passed_over = 0
        return tokens_GLE, taken_s

    def cost_s(self, batch: Sequence[Waiting]) -> float:
        """Expected seconds for a batch."""
        return self.token_s * sum(len(one.prompt) for one in batch)


class BatchReplacement:
    """Makes new placements between two batches.

    Args:
        placement: `vanilla` and `offline` never change; `reactive` places for the last batch; `proactive` for the
            waiting one.
        cluster: cluster with the memory for placements, without the double buffer.
        planner_name, options: the planner. DIRECTOR skips its slowest steps by default.
        predictors: for `proactive`, the cheapest first: the cascade, then the replica. One is enough.
        always: whether to move at any cost.

    Source: DIRECTOR § V-A: the cascade is for frequent, minor adjustments, the replica for critical, major ones. The
    paper does not define the two. Here the cheaper predictor is always used. The other one follows if the predicted
    gain exceeds its measured cost (a major adjustment) and it is not too late. To measure it, it also runs before its
    first measurement and after 32 decisions without it.

    Deviations:
        - The paper's placement follows every prediction; here only if the predicted gain exceeds the cost
          (`moetool.placement.decide.decide`).
        - `reactive` sees the last batch after its end, so the next batch waits for its migrations.
        - Gain and cost treat a batch as one event per layer, like the paper's T_comp and T_comm. The loads of single
          forwards may differ from the batch's.
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
                "moetool train cascade --trace DIR, and pass it with --predictor DIR"
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
        """Whether it ever makes a new placement."""
        return SEES[self.placement] != "nothing"

    @property
    def looks_ahead(self) -> bool:
        """Whether it decides while the previous batch is still running."""
        return SEES[self.placement] == "queue"

    def saw(self, tokens_GLE: np.ndarray) -> None:
        """Record the routing of the last batch."""
        self._last_GLE = tokens_GLE.astype(np.float64)

    def decide(self, batch: Sequence[Waiting], placed_GLE: np.ndarray, costs: BatchCosts) -> Decision | None:
        """Decide whether to re-place for the next batch; None if nothing is known about it."""
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
        """Whether a further prediction is worth its measured cost."""
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
        """Decide from observed or predicted routing.

        Args:
            planned_s: seconds already spent planning with a worse prediction.
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
    """The ranks' costs for a decision; a remote call sends a row to another server and back."""
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
    """Latency model of the ranks, for planners."""
    row_s, row_bytes = costs.row_s or _row_s(tokens_GLE, costs.expert), costs.row_bytes or 4.0 * spec.hidden_size
    return linear_latency(cluster, row_s, costs.byte_s_GG, row_bytes, "measured")


def _row_s(tokens_GLE: np.ndarray, expert: Curve | None) -> float:
    """Mean seconds of a row, each source's rows of an expert computed at once."""
    assert expert is not None, "the cost of a row is unknown"
    rows = tokens_GLE[tokens_GLE > 0]
    return float(along(expert, rows).sum() / rows.sum())
