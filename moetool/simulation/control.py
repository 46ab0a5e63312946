"""Who places experts while the simulation runs: modes, what each of them sees, and Eq. 4."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from moetool import planner
from moetool.costing.latency import Latency
from moetool.placement_plan import PlacementPlan, bare_plan
from moetool.planner import Problem
from moetool.planning.demand import Demand
from moetool.planning.migration import plan_migration
from moetool.simulation.engine import Engine
from moetool.simulation.moving import Moving
from moetool.simulation.routing import Routing
from moetool.simulation.workload import Request, Route
from moetool.types import Cluster, ModelSpec

SEES = ("nothing", "past", "queue")
MIGRATIONS = ("overlap", "stop", "free")
DECISIONS = ("auto", "eq4", "always")
LOOKAHEADS = ("true", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Who places, and from what.

    Attributes:
        planner: name of a planner. It places before the simulation begins from the history, and anew from what it sees.
        sees: `nothing` while the simulation runs: the placement is static; `past`: requests that are through; `queue`:
            requests that wait or are under way.
        rounds: whether requests are served in static batches, unless asked otherwise.
        pays: whether Eq. 4 decides on a migration, unless asked otherwise.
        quick: the planner's options when it places anew.
    """

    planner: str
    sees: str = "nothing"
    rounds: bool = False
    pays: bool = True
    quick: Mapping[str, Any] = field(default_factory=dict)


_QUICK = {"kicks": 0, "relaxation": 0}
MODES: Mapping[str, Mode] = {
    "uniform": Mode(planner="uniform"),
    "redundant": Mode(planner="redundant"),
    **{name: Mode(planner=name, sees="past") for name in ("smartmoe", "eplb", "prism", "prism_exact")},
    "director-offline": Mode(planner="director", rounds=True),
    "director-reactive": Mode(planner="director", sees="past", rounds=True, pays=False, quick=_QUICK),
    "director-proactive": Mode(planner="director", sees="queue", rounds=True, pays=False, quick=_QUICK),
}
"""Prism § IV-A: all but uniform and redundant re-place by Prism's migration. DIRECTOR § VIII-B: three modes of one
planner, in batches; it takes migration to hide behind computing and has no Eq. 4."""


def find_mode(name: str) -> Mode:
    """A mode by name; any planner's name is one, and re-places as Prism does; so is PLANNER-offline, -reactive or
    -proactive, which is DIRECTOR's mode with another planner. Raises: UsageError."""
    if name in MODES:
        return MODES[name]
    other, _, when = name.rpartition("-")
    if other and f"director-{when}" in MODES:
        planner.find(other)
        return replace(MODES[f"director-{when}"], planner=other, quick={})
    of_any = (f"PLANNER-{mode.removeprefix('director-')}" for mode in MODES if mode.startswith("director-"))
    planner.find(name, option="--mode", others=[*MODES, *of_any])
    return Mode(planner=name, sees="past")


@dataclass(slots=True, kw_only=True)
class Migration:
    """One decision whether to migrate.

    Attributes:
        at_s: when it was taken.
        calls_before: remote calls over the horizon under the placement in force, counted on what the mode sees.
        calls_after: under the new one.
        saved_s: one side of Eq. 4: the calls saved, each as long as a remote call takes.
        cost_s: the other: the larger of Eq. 3 and all moves one after the other.
        worth_it: saved_s > cost_s.
        made: whether the experts moved.
        copies: experts that a GPU gets anew.
        bytes: that move.
        done_s: when the last move was done; None if none was made, or the simulation ended before.
    """

    at_s: float
    calls_before: float
    calls_after: float
    saved_s: float
    cost_s: float
    worth_it: bool
    made: bool
    copies: int
    bytes: int
    done_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


class Control:
    """Places anew at ticks (`moetool.simulation.engine`), or before each round where requests come in rounds.

    While experts are on the move nothing is decided.

    Args:
        placed_GLE: the placement in force at the beginning.
        call_s: seconds of a remote call.
        always: migrate whatever Eq. 4 says.
        migrate: `overlap`: experts move while requests are served. `stop`: a round waits for them. `free`: they are in
            place at once and cost nothing.
        decay: what statistics of past requests count for after each tick.
        predict: expert calls [L, E] of a request from its prompt; None: the queue's routing is known, also that of
            tokens still to be decoded.

    Attributes:
        migrations: every decision.

    Planning takes no simulated time: it is taken to run beside serving.
    """

    def __init__(
        self,
        mode: Mode,
        spec: ModelSpec,
        cluster: Cluster,
        latency: Latency,
        placed_GLE: np.ndarray,
        *,
        call_s: float,
        seed: int = 0,
        options: Mapping[str, Any] | None = None,
        always: bool = False,
        migrate: str = "overlap",
        decay: float = 0.5,
        piece_bytes: int = 1 << 16,
        predict: Callable[[Route], np.ndarray] | None = None,
    ) -> None:
        self.migrations: list[Migration] = []
        self._mode, self._spec, self._cluster, self._latency = mode, spec, cluster, latency
        self._placed_GLE, self._seed, self._options = placed_GLE, seed, {**mode.quick, **(options or {})}
        self._call_s, self._always, self._migrate, self._decay = call_s, always, migrate, decay
        self._piece_bytes, self._predict = piece_bytes, predict
        self._past_GLE = np.zeros(placed_GLE.shape)
        self._tokens = 0
        self._moving = False
        self._guessed: dict[int, np.ndarray] = {}

    def on_finished(self, request: Request) -> None:
        """Count a request that is through."""
        self._tokens += request.route.prompt_tokens + request.route.new_tokens
        if self._mode.sees == "past":
            self._past_GLE[request.gpu] += request.route.calls_LE

    def on_tick(self, engine: Engine) -> None:
        """Place anew from what the mode sees, if that pays."""
        tokens, self._tokens = self._tokens, 0
        queue = [*engine.running.values(), *(request for queue in engine.waiting_G for request in queue)]
        self._consider(engine, queue, tokens, lambda at_s: None)
        self._past_GLE *= self._decay

    def on_round(self, engine: Engine, begun: Sequence[Request], begin: Callable[[float], None]) -> None:
        """Place anew before a round: from the round before, or from the one to come."""
        tokens = sum(request.route.prompt_tokens + request.route.new_tokens for request in begun)
        waits = self._migrate == "stop"
        moves = self._consider(engine, begun, tokens, begin if waits else lambda at_s: None)
        self._past_GLE[:] = 0.0
        if not (moves and waits):
            begin(engine.now_s)

    def _consider(self, engine: Engine, queue: Sequence[Request], tokens: int, then: Callable[[float], None]) -> bool:
        """Decide, and begin to move; whether experts are now on the move.

        Args:
            tokens: the horizon.
            then: called with the time when the last expert is in place, if any moves.
        """
        if self._moving or self._mode.sees == "nothing" or not tokens:
            return False
        tokens_GLE = self._past_GLE
        if self._mode.sees == "queue":
            tokens_GLE = np.zeros_like(self._past_GLE)
            for request in queue:
                tokens_GLE[request.gpu] += self._expected(request.route)
        if not tokens_GLE.any():
            return False
        demand = Demand(spec=self._spec, cluster=self._cluster, tokens_GLE=tokens_GLE)
        problem = Problem(demand=demand, latency=self._latency, seed=self._seed)
        placed_GLE = planner.place(self._mode.planner, problem, dict(self._options))
        if (placed_GLE == self._placed_GLE).all():
            return False
        plan = plan_migration(
            self._as_plan(self._placed_GLE),
            self._as_plan(placed_GLE),
            demand,
            horizon_tokens=tokens,
            call_s=self._call_s,
        )
        record = Migration(
            at_s=engine.now_s,
            calls_before=plan.calls_before,
            calls_after=plan.calls_after,
            saved_s=plan.saved_s,
            cost_s=max(plan.eq3_s, plan.seconds),
            worth_it=plan.worth_it,
            made=plan.worth_it or self._always,
            copies=sum(move.kind == "copy" for move in plan.moves),
            bytes=plan.bytes,
        )
        self.migrations.append(record)
        if not record.made:
            return False
        self._placed_GLE = placed_GLE
        self._past_GLE[:] = 0.0
        if self._migrate == "free":
            engine.routing.near[:] = Routing(self._cluster, engine.network, placed_GLE).near
            record.done_s = engine.now_s
            return False
        self._moving = True

        def done(time_s: float) -> None:
            self._moving = False
            record.done_s = time_s
            then(time_s)

        Moving(engine, plan.moves, self._piece_bytes, done)
        return True

    def _expected(self, route: Route) -> np.ndarray:
        if self._predict is None:
            return route.calls_LE
        if id(route) not in self._guessed:
            self._guessed[id(route)] = self._predict(route)
        return self._guessed[id(route)]

    def _as_plan(self, placed_GLE: np.ndarray) -> PlacementPlan:
        return bare_plan(self._spec, self._cluster, placed_GLE, self._mode.planner, self._seed)
