"""Who decides on placements: nobody, the past, the last batch, or the batch that waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moetool import planner
from moetool.costing.costs import Curve
from moetool.costing.latency import Latency, flows
from moetool.errors import UsageError, unknown_name
from moetool.planner import Problem
from moetool.planning.demand import Demand
from moetool.types import Cluster, ModelSpec

PLACEMENTS = ("vanilla", "offline", "reactive", "proactive")
Foretell = Callable[[Sequence[int], int], np.ndarray]
"""Uses [L, E] of experts by a request, from its prompt and the number of tokens it will make."""

_QUICK = {"kicks": 0, "relaxation": 0}
_FORGET = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A request of the batch that comes next."""

    prompt: Sequence[int]
    new_tokens: int
    gpu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was measured, for both sides of a decision.

    Attributes:
        row_s: seconds that an expert takes for one row.
        link_bytes_s: of a GPU's way out.
        move_bytes_s: at which experts come to a GPU.
        free_s: compute phases that are left before the coming batch, in which moving costs nothing (0 where moving
            stops everything).
    """

    row_s: float
    link_bytes_s: float
    move_bytes_s: float
    free_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Decision:
    """One decision whether to place anew.

    Attributes:
        saw: `batch` (the last one), or the predictor that foretold the coming one.
        predict_s: seconds of predicting, and
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
    """

    def __init__(self, name: str, foretell: Foretell) -> None:
        self.name = name
        self.token_s = 0.0
        self._foretell = foretell

    def demand(self, spec: ModelSpec, cluster: Cluster, batch: Sequence[Waiting]) -> tuple[Demand, float]:
        """What a batch will need, and the seconds that it took to say."""
        began = time.perf_counter()
        tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
        for one in batch:
            tokens_GLE[one.gpu] += self._foretell(one.prompt, one.new_tokens)
        taken_s = time.perf_counter() - began
        token_s = taken_s / max(1, sum(len(one.prompt) for one in batch))
        self.token_s += (_FORGET if self.token_s else 1.0) * (token_s - self.token_s)
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
    the gain that the first foretells is more than the other was measured to take (a major adjustment), and once at the
    beginning, to measure it.

    Deviations:
        - The paper's placement follows every prediction; here it does where the gain foretold exceeds the cost.
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
            if decision is not None and number and predictor.token_s and decision.gain_s <= predictor.cost_s(batch):
                continue  # a minor adjustment: what is better known would not be worth the knowing
            demand, taken_s = predictor.demand(self._spec, self._cluster, batch)
            spent_s = taken_s + (0.0 if decision is None else decision.predict_s)
            decision = self._weigh(predictor.name, demand, spent_s, placed_GLE, facts)
        return decision

    def _weigh(self, saw: str, demand: Demand, predict_s: float, placed_GLE: np.ndarray, facts: Facts) -> Decision:
        latency = measured_latency(self._cluster, self._spec, facts)
        began = time.perf_counter()
        new_GLE = planner.place(
            self._planner, Problem(demand=demand, latency=latency, seed=self._seed), dict(self._options)
        )
        plan_s = time.perf_counter() - began
        gain_s = layers_s(latency, demand, placed_GLE) - layers_s(latency, demand, new_GLE)
        copies_GL = (new_GLE & ~placed_GLE).sum(axis=2)
        bytes_G = copies_GL @ np.array(self._spec.expert_bytes_L)
        cost_s = max(0.0, float(bytes_G.max()) / facts.move_bytes_s - facts.free_s)
        return Decision(
            saw=saw,
            predict_s=predict_s,
            plan_s=plan_s,
            gain_s=gain_s,
            cost_s=cost_s,
            copies=int(copies_GL.sum()),
            bytes=int(bytes_G.sum()),
            made=bool((new_GLE != placed_GLE).any()) and (self._always or gain_s > cost_s),
            placed_GLE=new_GLE,
        )


def measured_latency(cluster: Cluster, spec: ModelSpec, facts: Facts, value_bytes: int = 4) -> Latency:
    """The ranks as planners see them: straight lines through 0, of what was measured."""
    num_gpus = len(cluster.gpus)
    return Latency(
        name="measured",
        unit="s",
        comp=Curve(x=(0.0, 1.0), y=(0.0, facts.row_s)),
        speed_G=tuple(gpu.speed for gpu in cluster.gpus),
        links=(Curve(x=(0.0, 1.0), y=(0.0, 1.0 / facts.link_bytes_s)),),
        link_GG=np.where(np.eye(num_gpus, dtype=bool), -1, 0),
        token_bytes=float(spec.hidden_size * value_bytes),
    )


def layers_s(latency: Latency, demand: Demand, placed_GLE: np.ndarray) -> float:
    """T_comp + T_comm of all layers, each one's whole demand taken at once."""
    return sum(
        sum(latency.layer(flows(demand.cluster, demand.tokens_GLE[:, layer], placed_GLE[:, layer])))
        for layer in range(demand.spec.num_layers)
    )
