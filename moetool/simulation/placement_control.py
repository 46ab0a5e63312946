"""Re-placement during the simulation: observations of each mode, and execution of its decisions."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetool.placement import planner
from moetool.placement.decide import SEES, Decision, InForce, Observed, ReplacementCosts, Replanner, decide
from moetool.placement.replacement_record import ReplacementRecord
from moetool.simulation.event_loop import CALL, EventLoop
from moetool.simulation.migration_traffic import Moving
from moetool.simulation.replica_choice import Routing
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.workload import Route, SimulatedRequest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementMode:
    """A mode: a planner and its observations.

    Attributes:
        planner: name of a planner. It first places from the history, later from observations.
        sees: value of `SEES`.
        batches: DIRECTOR's scheme: static batches, the planner's quick options for re-placement, and no Eq. 4, since
            migration overlaps with compute. Otherwise Prism's.
    """

    planner: str
    sees: str = "nothing"
    batches: bool = False


MODES: Mapping[str, PlacementMode] = {
    "uniform": PlacementMode(planner="uniform"),
    "redundant": PlacementMode(planner="redundant"),
    **{name: PlacementMode(planner=name, sees="past") for name in ("smartmoe", "eplb", "prism", "prism_exact")},
    **{
        f"director-{mode}": PlacementMode(planner="director", sees=SEES[mode], batches=True)
        for mode in ("offline", "reactive", "proactive")
    },
}
"""Prism § IV-A: all planners except uniform and redundant re-place by Prism's migration. DIRECTOR § VIII-B: three
modes of one planner."""


def find_mode(name: str) -> PlacementMode:
    """Return a mode by name.

    Args:
        name: a planner, which re-places as Prism does; or PLANNER-offline, -reactive or -proactive, DIRECTOR's modes.

    Raises:
        UsageError: there is no such mode or planner.
    """
    if name in MODES:
        return MODES[name]
    other, _, when = name.rpartition("-")
    if other and f"director-{when}" in MODES:
        planner.find(other)
        return replace(MODES[f"director-{when}"], planner=other)
    of_any = (f"PLANNER-{mode.removeprefix('director-')}" for mode in MODES if mode.startswith("director-"))
    planner.find(name, option="--planner", others=[*MODES, *of_any])
    return PlacementMode(planner=name, sees="past")


class SimulatedReplacement:
    """Re-places at ticks (`moetool.simulation.event_loop`), or before each round of requests.

    During a migration there are no decisions.

    Args:
        sees: `nothing`: the placement is static; `past`: finished requests; `queue`: waiting and running requests.
        in_force: initial placement.
        predict: expected expert calls [L, E] of a request from its prompt; None: the queue's routing is known, decoded
            tokens included.

    Attributes:
        records: records of decisions that proposed moves or delayed a round.

    Before rounds, planning takes the simulated time of `SimulationOptions.planning`; at ticks it takes none.
    """

    def __init__(
        self,
        sees: str,
        in_force: InForce,
        costs: ReplacementCosts,
        replanner: Replanner,
        options: SimulationOptions,
        predict: Callable[[Route], np.ndarray] | None = None,
    ) -> None:
        self.records: list[ReplacementRecord] = []
        self._sees, self._in_force, self._costs, self._replanner = sees, in_force, costs, replanner
        self._options, self._predict = options, predict
        self._past_GLE = np.zeros(in_force.placed_GLE.shape)
        self._tokens = 0
        self._moving = False
        self._began_s: float | None = None  # start of the previous round
        self._guessed: dict[int, np.ndarray] = {}

    def on_finished(self, request: SimulatedRequest) -> None:
        """Count a finished request."""
        self._tokens += request.route.prompt_tokens + request.route.new_tokens
        if self._sees == "past":
            self._past_GLE[request.gpu] += request.route.calls_LE

    def on_tick(self, engine: EventLoop) -> None:
        """Re-place from the mode's observations, if it pays."""
        tokens, self._tokens = self._tokens, 0
        queue = [*engine.running.values(), *(request for queue in engine.waiting_G for request in queue)]
        considered = self._consider(engine, queue, tokens)
        if considered is not None and considered[0].made:
            self._carry_out(engine, *considered, engine.now_s, lambda at_s: None)
        self._past_GLE *= self._options.decay

    def on_round(self, engine: EventLoop, begun: Sequence[SimulatedRequest], begin: Callable[[float], None]) -> None:
        """Re-place before a round, from the previous round or the coming one, which waits for its plan."""
        tokens = sum(request.route.prompt_tokens + request.route.new_tokens for request in begun)
        before_s = 0.0 if self._began_s is None else engine.now_s - self._began_s

        def start(at_s: float) -> None:
            self._began_s = at_s
            begin(at_s)

        first = self._began_s is None and self._options.planning == "beside"  # no earlier round
        considered = None if first else self._consider(engine, begun, tokens)
        self._past_GLE[:] = 0.0
        if considered is None:
            start(engine.now_s)
            return
        decision, record = considered
        asked_s, late_s = engine.now_s, self._late_s(record.plan_s, before_s)
        ready_s = asked_s + late_s

        def start_after_moves(at_s: float) -> None:
            record.waited_s = at_s - asked_s
            start(at_s)

        waits = decision.made and self._options.migrate == "stop"
        if not waits:
            record.waited_s = late_s if self._sees == "queue" else 0.0
            start(asked_s + record.waited_s)
        if decision.made:
            self._carry_out(engine, decision, record, ready_s, start_after_moves if waits else lambda at_s: None)
        elif record.waited_s and not decision.moves:  # not recorded yet
            self.records.append(record)

    def _late_s(self, plan_s: float, before_s: float) -> float:
        """Return seconds until the plan is ready; planning for the queue began with the previous round."""
        if self._options.planning == "free":
            return 0.0
        if self._sees != "queue":
            return plan_s
        needs_s = plan_s + self._options.predict_share * before_s
        return max(0.0, needs_s - before_s) if self._options.planning == "beside" else needs_s

    def _observe(self, queue: Sequence[SimulatedRequest]) -> np.ndarray:
        tokens_GLE = self._past_GLE.copy()
        if self._sees == "queue":
            for request in queue:
                tokens_GLE[request.gpu] += self._expected(request.route)
        return tokens_GLE

    def _consider(
        self, engine: EventLoop, queue: Sequence[SimulatedRequest], tokens: int
    ) -> tuple[Decision, ReplacementRecord] | None:
        """Decide; None where no decision is possible.

        Args:
            tokens: the horizon.
        """
        if self._moving or self._sees == "nothing" or not tokens:
            return None
        tokens_GLE = self._observe(queue)
        if not tokens_GLE.any():
            return None
        observed = Observed(tokens_GLE=tokens_GLE, horizon_tokens=tokens, source=self._sees)
        began_s = time.process_time()
        decision = decide(observed, self._in_force, self._costs, self._replanner)
        took_s = time.process_time() - began_s
        _LOG.info(
            "at %.3f s: %.4g s gained against %.4g s: %s, %d copies",
            *(engine.now_s, decision.gain_s, decision.cost_s, decision.reason, decision.copies),
        )
        record = ReplacementRecord(at_s=engine.now_s, planner=self._replanner.planner)
        record.take(decision)
        if self._options.planning != "free":
            record.plan_s = self._options.plan_s or took_s
        if decision.moves:
            self.records.append(record)
        return decision, record

    def _carry_out(
        self,
        engine: EventLoop,
        decision: Decision,
        record: ReplacementRecord,
        ready_s: float,
        then: Callable[[float], None],
    ) -> None:
        """Move experts from `ready_s` on; `then` is called with the end time of the last move."""
        self._in_force = replace(self._in_force, placed_GLE=decision.placed_GLE)
        self._past_GLE[:] = 0.0
        self._moving = True

        def done(time_s: float) -> None:
            self._moving = False
            record.done_s = time_s
            _LOG.info("the migration from %.3f s ended at %.3f s", record.at_s, time_s)
            then(time_s)

        def move(engine: EventLoop, time_s: float) -> None:
            if self._options.migrate == "free":
                engine.routing.near[:] = Routing(self._in_force.cluster, engine.network, decision.placed_GLE).near
                done(time_s)
            else:
                Moving(engine, decision.moves, self._options, done)

        if ready_s > engine.now_s:
            engine.at(ready_s, CALL, move)
        else:
            move(engine, engine.now_s)

    def _expected(self, route: Route) -> np.ndarray:
        if self._predict is None:
            return route.calls_LE
        if id(route) not in self._guessed:
            self._guessed[id(route)] = self._predict(route)
        return self._guessed[id(route)]
