"""Who decides on placements: nobody, the past, the last batch, or the batch that waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moetool import planner
from moetool.costing.costs import Curve
from moetool.costing.latency import Latency, along, flows
from moetool.errors import UsageError, unknown_name
from moetool.planner import Problem
from moetool.planning.demand import Demand
from moetool.types import Cluster, ModelSpec

PLACEMENTS = ("vanilla", "offline", "reactive", "proactive")
Foretell = Callable[[Sequence[int], int], np.ndarray]
"""Uses [L, E] of experts by a request, from its prompt and the number of tokens it will make."""

_QUICK = {"kicks": 0, "relaxation": 0}
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
class Facts:
    """What things cost, for both sides of a decision.

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


@dataclass(slots=True, kw_only=True)
class Decision:
    """One decision whether to place anew.

    Attributes:
        saw: `batch` (the last one), or the predictor that foretold the coming one.
        predict_s: seconds of predicting, by all that were asked, and
        plan_s: of planning.
        gain_s: T_comp + T_comm of all layers under the placement in force, less that under the new one, on what was
            seen.
        cost_s: seconds that moving is expected to add.
        copies: experts that a GPU gets anew.
        bytes: of them.
        made: gain_s > cost_s.
        placed_GLE: the placement that follows.
    """

    saw: str
    predict_s: float
    plan_s: float
    gain_s: float
    cost_s: float
    copies: int
    bytes: int
    made: bool
    placed_GLE: np.ndarray = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """All but the placement."""
        return {name: value for name, value in asdict(self).items() if name != "placed_GLE"}


class Predictor:
    """A way to foretell, and what it was measured to take.

    Attributes:
        token_s: seconds a prompt token, lately; 0 before the first.
        passed_over: decisions since it was asked.
    """

    def __init__(self, name: str, foretell: Foretell) -> None:
        self.name = name
        self.token_s = 0.0
        self.passed_over = 0
        self._foretell = foretell

    def measure(self, prompt: Sequence[int]) -> None:
        """Find out what it takes, before anybody waits for it: the second time, since the first may have to load."""
        for _ in range(2):
            began = time.perf_counter()
            self._foretell(prompt, 0)
            self.token_s = (time.perf_counter() - began) / len(prompt)

    def demand(self, spec: ModelSpec, cluster: Cluster, batch: Sequence[Waiting]) -> tuple[Demand, float]:
        """What a batch will need, and the seconds that it took to say."""
        began = time.perf_counter()
        tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
        for one in batch:
            tokens_GLE[one.gpu] += self._foretell(one.prompt, one.new_tokens)
        taken_s = time.perf_counter() - began
        token_s = taken_s / max(1, sum(len(one.prompt) for one in batch))
        stale = not self.token_s or self.passed_over  # what it took long ago, the machine perhaps busier
        self.token_s += (1.0 if stale else _FORGET) * (token_s - self.token_s)
        self.passed_over = 0
        return Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE), taken_s

    def cost_s(self, batch: Sequence[Waiting]) -> float:
        """What it is expected to take."""
        return self.token_s * sum(len(one.prompt) for one in batch)


class Control:
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
    the gain that the first foretells is more than the other was measured to take (a major adjustment), and its answer
    would not come too late; and after each 32 decisions without it, or if it was never measured, to measure it.

    Deviations:
        - The paper's placement follows every prediction; here it does where the gain foretold exceeds the cost.
        - `reactive` sees the last batch when that has ended, so its migrations are waited for, whatever way they take.
        - Experts move for nothing in the compute phases that are left when the placement is known, as far as those
          that moved before did not hold batches up all the same.
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
        predictors: Sequence[Predictor] = (),
        always: bool = False,
        seed: int = 0,
    ) -> None:
        if placement not in PLACEMENTS:
            raise unknown_name("--set placement", placement, PLACEMENTS)
        if placement == "proactive" and not predictors:
            raise UsageError(
                "placement proactive foretells what the queue will need, and there is no predictor; train one with "
                "moetool train cascade --trace DIR, and give it with --predictor DIR"
            )
        self.placement, self.predictors = placement, list(predictors)
        self._spec, self._cluster, self._planner, self._seed = spec, cluster, planner_name, seed
        self._options = {**(_QUICK if planner_name == "director" else {}), **(options or {})}
        self._always = always
        self._last_GLE: np.ndarray | None = None

    @property
    def decides(self) -> bool:
        """Whether it ever places anew."""
        return self.placement in ("reactive", "proactive")

    @property
    def looks_ahead(self) -> bool:
        """Whether it decides while the batch before is still running."""
        return self.placement == "proactive"

    def saw(self, tokens_GLE: np.ndarray) -> None:
        """What the last batch needed."""
        self._last_GLE = tokens_GLE.astype(np.float64)

    def decide(self, batch: Sequence[Waiting], placed_GLE: np.ndarray, facts: Facts) -> Decision | None:
        """Whether to place anew for the batch that comes; None where nothing is known of it."""
        if self.placement == "reactive":
            if self._last_GLE is None or not self._last_GLE.any():
                return None
            demand = Demand(spec=self._spec, cluster=self._cluster, tokens_GLE=self._last_GLE)
            return self._weigh("batch", demand, 0.0, placed_GLE, facts)
        if self.placement != "proactive" or not batch:
            return None
        decision: Decision | None = None
        for number, predictor in enumerate(self.predictors):
            if decision is not None and number and not self._worth(predictor, batch, decision, facts):
                predictor.passed_over += 1
                continue
            demand, taken_s = predictor.demand(self._spec, self._cluster, batch)
            before_s = (0.0, 0.0) if decision is None else (decision.predict_s, decision.plan_s)
            decision = self._weigh(predictor.name, demand, taken_s + before_s[0], placed_GLE, facts, before_s[1])
        return decision

    def _worth(self, predictor: Predictor, batch: Sequence[Waiting], so_far: Decision, facts: Facts) -> bool:
        """Whether to know better than a decision does, by what that was measured to take."""
        if not predictor.token_s or predictor.passed_over >= _ASK_AGAIN:
            return True
        cost_s = predictor.cost_s(batch)
        return so_far.gain_s > cost_s and so_far.predict_s + 2 * so_far.plan_s + cost_s <= facts.within_s

    def _weigh(
        self,
        saw: str,
        demand: Demand,
        predict_s: float,
        placed_GLE: np.ndarray,
        facts: Facts,
        planned_s: float = 0.0,
    ) -> Decision:
        """A placement for a demand, and both sides of changing to it.

        Args:
            planned_s: seconds of planning before, for what was foretold less well.
        """
        latency = measured_latency(self._cluster, demand, facts)
        began = time.perf_counter()
        new_GLE = planner.place(
            self._planner, Problem(demand=demand, latency=latency, seed=self._seed), dict(self._options)
        )
        plan_s = planned_s + time.perf_counter() - began
        gain_s = layers_s(latency, demand, placed_GLE) - layers_s(latency, demand, new_GLE)
        copies_GL = (new_GLE & ~placed_GLE).sum(axis=2)
        bytes_G = copies_GL @ np.array(self._spec.expert_bytes_L)
        free_s = max(0.0, facts.free_s - predict_s - plan_s)
        foretold_s = float(bytes_G.max()) / facts.move_bytes_s - free_s
        cost_s = max(0.0, foretold_s, float(bytes_G.sum()) * facts.added_byte_s)
        return Decision(
            saw=saw,
            predict_s=predict_s,
            plan_s=plan_s,
            gain_s=gain_s,
            cost_s=cost_s,
            copies=int(copies_GL.sum()),
            bytes=int(bytes_G.sum()),
            made=bool((new_GLE != placed_GLE).any() and (self._always or gain_s > cost_s)),
            placed_GLE=new_GLE,
        )


def measured_latency(cluster: Cluster, demand: Demand, facts: Facts) -> Latency:
    """The ranks as planners see them: straight lines through 0, so that the parts of a batch add up to the whole."""
    num_gpus = len(cluster.gpus)
    byte_s_GG = np.broadcast_to(np.asarray(facts.byte_s_GG, np.float64), (num_gpus, num_gpus))
    kinds, kind_GG = np.unique(byte_s_GG, return_inverse=True)
    return Latency(
        name="measured",
        unit="s",
        comp=_line(facts.row_s or _row_s(demand, facts.expert)),
        speed_G=tuple(gpu.speed for gpu in cluster.gpus),
        links=tuple(_line(byte_s) for byte_s in kinds.tolist()),
        link_GG=np.where(np.eye(num_gpus, dtype=bool), -1, kind_GG.reshape(num_gpus, num_gpus)),
        token_bytes=facts.row_bytes or 4.0 * demand.spec.hidden_size,
    )


def _line(slope: float) -> Curve:
    return Curve(x=(0.0, 1.0), y=(0.0, slope))


def _row_s(demand: Demand, expert: Curve | None) -> float:
    """Mean seconds of a row, each source's rows of an expert computed at once."""
    assert expert is not None, "nothing says what a row takes"
    rows = demand.tokens_GLE[demand.tokens_GLE > 0]
    return float(along(expert, rows).sum() / rows.sum())


def layers_s(latency: Latency, demand: Demand, placed_GLE: np.ndarray) -> float:
    """T_comp + T_comm of all layers, each one's whole demand taken at once."""
    return sum(
        sum(latency.layer(flows(demand.cluster, demand.tokens_GLE[:, layer], placed_GLE[:, layer])))
        for layer in range(demand.spec.num_layers)
    )
