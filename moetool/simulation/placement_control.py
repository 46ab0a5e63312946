"""Re-placement during the simulation: observations of each mode, and execution of its decisions."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from moetool.placement import planner
from moetool.placement.decide import SEES, Decision, InForce, Observed, ReplacementCosts, Replanner, decide
from moetool.placement.replacement_record import ReplacementRecord
from moetool.simulation.event_loop import EventLoop
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
        batches: DIRECTOR's scheme: ranks in lockstep, static batches, the planner's quick options for re-placement, and
            no Eq. 4, since migration overlaps with compute. Otherwise Prism's.
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


class PlacementDecisions:
    """Decisions of one run, and their records.

    Args:
        sees: `nothing`: the placement is static; `past`: finished requests; `queue`: waiting and running requests.
        in_force: initial placement.
        predict: expected expert calls [L, E] of a request from its prompt; None: the queue's routing is known, decoded
            tokens included.

    Attributes:
        in_force: current placement.
        records: records of decisions that proposed moves or delayed a batch.
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
        self.sees, self.in_force, self.options = sees, in_force, options
        self.records: list[ReplacementRecord] = []
        self._costs, self._replanner, self._predict = costs, replanner, predict
        self._guessed: dict[int, np.ndarray] = {}

    def expected(self, requests: Iterable[SimulatedRequest]) -> np.ndarray:
        """Return the tokens [G, L, E] that are known or predicted of requests."""
        tokens_GLE = np.zeros(self.in_force.placed_GLE.shape)
        for request in requests:
            route = request.route
            if self._predict is None:
                tokens_GLE[request.gpu] += route.calls_LE
                continue
            if id(route) not in self._guessed:
                self._guessed[id(route)] = self._predict(route)
            tokens_GLE[request.gpu] += self._guessed[id(route)]
        return tokens_GLE

    def consider(self, now_s: float, tokens_GLE: np.ndarray, horizon: int) -> tuple[Decision, ReplacementRecord] | None:
        """Decide; None if nothing was observed. A decision to migrate is in force at once.

        Args:
            horizon: tokens until the next decision.
        """
        if self.sees == "nothing" or not horizon or not tokens_GLE.any():
            return None
        observed = Observed(tokens_GLE=tokens_GLE, horizon_tokens=horizon, source=self.sees)
        began_s = time.process_time()
        decision = decide(observed, self.in_force, self._costs, self._replanner)
        took_s = time.process_time() - began_s
        _LOG.info(
            "at %.3f s: %.4g s gained against %.4g s: %s, %d copies",
            *(now_s, decision.gain_s, decision.cost_s, decision.reason, decision.copies),
        )
        record = ReplacementRecord(at_s=now_s, planner=self._replanner.planner)
        record.take(decision)
        if self.options.planning != "free":
            record.plan_s = self.options.plan_s or took_s
        if decision.moves:
            self.records.append(record)
        if decision.made:
            self.in_force = replace(self.in_force, placed_GLE=decision.placed_GLE)
        return decision, record


class SimulatedReplacement:
    """Re-places edge servers at ticks (`moetool.simulation.event_loop`), without decisions during a migration."""

    def __init__(self, decisions: PlacementDecisions) -> None:
        self._decisions = decisions
        self._past_GLE = np.zeros(decisions.in_force.placed_GLE.shape)
        self._tokens = 0
        self._moving = False

    def on_finished(self, request: SimulatedRequest) -> None:
        self._tokens += request.route.prompt_tokens + request.route.new_tokens
        if self._decisions.sees == "past":
            self._past_GLE[request.gpu] += request.route.calls_LE

    def on_tick(self, engine: EventLoop) -> None:
        """Re-place from the mode's observations, if it pays."""
        tokens, self._tokens = self._tokens, 0
        decisions, options = self._decisions, self._decisions.options
        seen_GLE = self._past_GLE
        if decisions.sees == "queue":
            queue = [*engine.running.values(), *(request for queue in engine.waiting_G for request in queue)]
            seen_GLE = decisions.expected(queue)
        considered = None if self._moving else decisions.consider(engine.now_s, seen_GLE, tokens)
        if considered is not None and considered[0].made:
            self._carry_out(engine, *considered)
        self._past_GLE *= options.decay

    def _carry_out(self, engine: EventLoop, decision: Decision, record: ReplacementRecord) -> None:
        self._past_GLE[:] = 0.0
        self._moving = True

        def done(time_s: float) -> None:
            self._moving = False
            record.done_s = time_s
            _LOG.info("the migration from %.3f s ended at %.3f s", record.at_s, time_s)

        if self._decisions.options.migrate == "free":
            cluster = self._decisions.in_force.cluster
            engine.routing.near[:] = Routing(cluster, engine.network, decision.placed_GLE).near
            done(engine.now_s)
        else:
            Moving(engine, decision.moves, self._decisions.options.piece_bytes, done)
