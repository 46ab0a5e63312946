"""The global scheduler: collects workers' statistics, re-places experts when that pays, and moves them in rounds."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moetool.base import config, durable
from moetool.base.config import POSITIVE, SHARE, Span, require_within
from moetool.base.errors import CapacityError, first_line, unknown_name
from moetool.base.types import Cluster, ModelSpec
from moetool.caching.event_counts import expert_map
from moetool.cluster.edge.history import ReportHistory
from moetool.cluster.edge.load_statistics import Statistics
from moetool.cluster.edge.protocol import ArrivedExpert, MigrationRoundResult, WorkerInfo, WorkerStats
from moetool.cluster.edge.replacement import (
    by_server,
    migration_s,
    next_round,
    observe,
    places_of,
    pooled,
    round_transfers,
    steps_to,
    trial_copies,
)
from moetool.cluster.edge.scheduler_state import SchedulerState, reading
from moetool.cluster.worker_link import WorkerDied
from moetool.placement import planner
from moetool.placement.decide import Decision, Replanner, decide
from moetool.placement.plan import Move, Place
from moetool.placement.replacement_record import ReplacementRecord
from moetool.placement.scoring import remote_calls

_LOG = logging.getLogger(__name__)

_SAVE_S = 30.0
_SNAPSHOT_WAIT_S = 0.2
_LEAST_TICK_S = 0.005
_DECIDES = ("eq4", "latency", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Options of `--set scheduler.NAME=VALUE`.

    Attributes:
        interval_s: seconds between decisions. A quarter of it must be longer than most requests and contain many of
            them, because a placement from few requests fits only these.
        poll_s: seconds between a worker's reports.
        planner: planner of new placements.
        decide: `eq4`: migrate if Prism's Eq. 4 says so, which prices remote calls; `latency`: if T_comp +
            T_comm, which count the busiest server, fall by more than the moves take (Eq. 4 until costs are measured);
            `always`; `never`: watch only.
        horizon_s: assumed duration of a placement in Eq. 4 (0: the interval).
        half_life_s: half-life of observed routes and calls (0: no decay).
        compute_s: seconds over which compute time is averaged.
        share: share of time in which migration may use links; a pause follows each round of copies.
        seed: seed of randomized planners.
        state: file that keeps the state for the next start (empty: none).

    Raises:
        UsageError: a value is invalid.
    """

    interval_s: float = 300.0
    poll_s: float = 5.0
    planner: str = "prism_exact"
    options: dict[str, Any] = field(default_factory=dict)
    decide: str = "eq4"
    horizon_s: float = 0.0
    half_life_s: float = 300.0
    compute_s: float = 30.0
    share: float = 0.5
    seed: int = 0
    state: str = ""

    def __post_init__(self) -> None:
        config.parse(planner.find(self.planner).Options, self.options, f"planner {self.planner}")
        if self.decide not in _DECIDES:
            raise unknown_name("--set scheduler.decide", self.decide, _DECIDES)
        amount = Span(0, below=True)
        require_within(self, "scheduler.", interval_s=POSITIVE, poll_s=POSITIVE, share=SHARE)
        require_within(self, "scheduler.", horizon_s=amount, half_life_s=amount, compute_s=amount)


class Servers(Protocol):
    """The scheduler's view of the head (`moetool.cluster.edge.edge_head.EdgeHead`); servers are given by number."""

    def infos(self) -> Sequence[WorkerInfo | None]: ...
    def held(self) -> Sequence[frozenset[Place]]: ...
    def stats(self) -> Sequence[WorkerStats | None]: ...
    def move(
        self, drops: Sequence[tuple[int, Place]], copies: Sequence[tuple[int, Place, int]]
    ) -> MigrationRoundResult: ...
    def time_copies(self, copies: Sequence[tuple[int, Place, int]]) -> Sequence[tuple[int, ArrivedExpert]]: ...


@dataclass(slots=True, kw_only=True)
class _Moved:
    """Measurements of the current migration.

    Attributes:
        transfer_s: seconds of its transfers, summed over servers.
        beside_s: seconds of its rounds besides the longest server's transfers.
        expected_s: expected `transfer_s`.
    """

    copies: int = 0
    rounds: int = 0
    transfer_s: float = 0.0
    beside_s: float = 0.0
    expected_s: float = 0.0


class Scheduler:
    """Observes a cluster and re-places its experts.

    It has no clock: `tick` receives the time, acts, and returns when to call it again. It relies on experts that
    servers are known to hold, never on planned ones. A server that dies during a migration ends it, and the next
    decision starts from the actual state.

    Args:
        spec: spec of the served model.
        cluster: the plan's.
        narrate: called with lines for the user.

    Attributes:
        tick_s: seconds until the next `on_tick`.
        in_force: experts of each server in the saved state, for a cluster that ended meanwhile; None: unknown, or some
            expert was unplaced.

    Raises:
        MismatchError: the state belongs to another model or cluster.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        options: SchedulerOptions,
        *,
        narrate: Callable[[str], object] = lambda line: None,
    ) -> None:
        self.spec, self.cluster, self.options = spec, cluster, options
        num_servers = len(cluster.servers)
        self.statistics = Statistics(
            spec,
            num_servers,
            half_life_s=options.half_life_s,
            block_s=options.interval_s / 4,
            compute_s=options.compute_s,
        )
        self.history = ReportHistory(num_servers, max(options.poll_s, 10.0 if options.interval_s > 60 else 0.0))
        self.tick_s = 0.0
        self._state, self._narrate = Path(options.state) if options.state else None, narrate
        self._lock = threading.Lock()
        self._polled_s = self._decided_s = self._next_move_s = self._saved_s = float("-inf")
        self._seen_s: dict[int, float] = {}
        self._steps: list[Move] = []
        self._target: dict[int, frozenset[Place]] | None = None
        self._moving: ReplacementRecord | None = None
        self._loaded_NLE = np.zeros((num_servers, spec.num_layers, spec.num_experts), np.int64)
        self._moved = _Moved()
        self._timed = False  # whether its decision knew the rate of every link
        self._now_s: float | None = None
        self._resume = False
        self._servers: Servers | None = None
        self._shown: dict[str, Any] | None = None
        self.in_force: list[frozenset[Place]] | None = None
        if self._state is not None:
            durable.require_writable(self._state)
            if self._state.exists():
                with reading(self._state):
                    self._restore(SchedulerState.load(self._state, spec, cluster))

    @property
    def migrating(self) -> bool:
        return self._target is not None

    def on_tick(self, head: Servers) -> None:
        """Call `tick` with the current time, and set `tick_s`."""
        began = time.monotonic()
        try:
            wait_s = self.tick(head, time.time())
            self.tick_s = max(_LEAST_TICK_S, wait_s - (time.monotonic() - began))  # a round of moves takes long
        except Exception:
            self.tick_s = self.options.poll_s  # pauses between repeated errors
            raise

    def tick(self, servers: Servers, now_s: float) -> float:
        """Act if due; returns the seconds until the next action.

        Args:
            now_s: seconds since 1970.
        """
        with self._lock:
            if now_s < max(self._now_s or now_s, self._decided_s):  # the clock was set back: do not wait for it
                self._polled_s, self._saved_s = min(self._polled_s, now_s), min(self._saved_s, now_s)
                self._decided_s, self._next_move_s = min(self._decided_s, now_s), min(self._next_move_s, now_s)
            self._servers, self._now_s = servers, now_s
            if self._decided_s == float("-inf"):
                self._decided_s = now_s  # the first decision comes after an interval
            if now_s - self._polled_s >= self.options.poll_s:
                self._polled_s = now_s
                self._poll(servers, now_s)
                if now_s - self._saved_s >= _SAVE_S:
                    self._save()
            if self._resume:
                self._resume = False
                self._go_on(servers, now_s)
            if self.migrating:
                if now_s >= self._next_move_s:
                    self._move(servers, now_s)
            elif self.options.decide != "never" and now_s - self._decided_s >= self.options.interval_s:
                self._decide(servers, now_s)
            report_s = self._polled_s + self.options.poll_s
            act_s = self._next_move_s if self.migrating else self._decided_s + self.options.interval_s
            if not self.migrating and act_s <= now_s:  # no decision is possible now
                act_s = report_s
            return max(0.0, min(report_s, act_s) - now_s)

    def report(self, servers: Servers) -> None:
        """Collect the counters of all servers now."""
        with self._lock:
            self._servers, self._now_s = servers, time.time()
            self._poll(servers, self._now_s)

    def save(self) -> None:
        """Write the state now."""
        with self._lock:
            self._save()

    def snapshot(self) -> dict[str, Any]:
        """Data of `/stats` as a JSON object; during a move, the state before it."""
        if not self._lock.acquire(timeout=_SNAPSHOT_WAIT_S if self._shown else -1):
            assert self._shown is not None
            return self._shown
        try:
            num_servers = len(self.cluster.servers)
            infos = self._servers.infos() if self._servers is not None else [None] * num_servers
            held = self._servers.held() if self._servers is not None else [frozenset()] * num_servers
            spec = self.spec
            self._shown = {
                "now_s": self._now_s,
                "model": spec.name,
                "experts": expert_map(spec, self._places(held)),
                "pairs": sum(spec.top_k_L),
                "planner": self.options.planner,
                "decide": self.options.decide,
                "interval_s": self.options.interval_s,
                "next_decision_s": None if self._now_s is None else self._decided_s + self.options.interval_s,
                "horizon_s": self._horizon_s,
                "call_s": self.statistics.call_s,
                "expert_s": self.statistics.expert_s,
                "tokens_s": self.statistics.tokens_s,
                "since_s": self.statistics.since_s,
                "moves_left": len(self._steps),
                "uncovered": spec.total_experts - len(frozenset[Place]().union(*held)),
                "servers": [
                    {
                        "name": server.name,
                        "serves": info is not None,
                        "url": None if info is None else info.url,
                        "slots": None if info is None else info.slots,
                        "held": sorted(places),
                    }
                    for server, info, places in zip(self.cluster.servers, infos, held, strict=True)
                ],
                **self.history.to_json(),
            }
            return self._shown
        finally:
            self._lock.release()

    def _places(self, held: Sequence[frozenset[Place]]) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
        """Each server's name, its experts, recent uses by its users, and copies to it."""
        for server, places, used_LE, loaded_LE in zip(
            self.cluster.servers, held, self.statistics.tokens_NLE, self._loaded_NLE, strict=True
        ):
            resident_LE = np.zeros(used_LE.shape, np.int64)
            for place in places:
                resident_LE[place] = 1
            yield server.name, resident_LE, used_LE, loaded_LE

    @property
    def _horizon_s(self) -> float:
        return self.options.horizon_s or self.options.interval_s

    def _poll(self, servers: Servers, now_s: float) -> None:
        for stats, info in zip(servers.stats(), servers.infos(), strict=True):
            if stats is not None and info is not None:  # one that is leaving reports, but is not planned with
                self._seen_s[stats.server] = now_s
                self.statistics.add(stats, now_s)
                self.history.add(stats, now_s)

    def _decide(self, servers: Servers, now_s: float) -> None:
        slots, held = _there(servers)
        # Wait for a restarting server; plan without one that stays down.
        if any(now_s - seen_s < self.options.interval_s for n, seen_s in self._seen_s.items() if n not in slots):
            return
        if len(frozenset[Place]().union(*held.values())) < self.spec.total_experts:
            return
        self._decided_s = now_s
        began = time.monotonic()
        if trials := trial_copies(self.statistics, self.cluster, held):
            for server, moved in servers.time_copies(trials):
                self.statistics.moved(server, moved)
        self._timed = self.statistics.moved_between.issuperset(map(frozenset, combinations(slots, 2)))
        timed = time.monotonic()
        servers.move([], [])  # a round without moves: informing all servers
        self.statistics.migrated(1, time.monotonic() - timed)
        record = ReplacementRecord(at_s=now_s, planner=self.options.planner)
        decision = self._propose(record, held, slots)
        record.plan_s = time.monotonic() - began
        self.statistics.measure_again()
        self.history.decisions.append(record)
        if decision is None or not decision.made:
            self.statistics.stayed()
        else:
            record.outcome = "under way"
            servers_there = sorted(slots)
            self._steps = by_server(decision.moves, servers_there)
            self._target = {n: frozenset(places_of(decision.placed_GLE[i])) for i, n in enumerate(servers_there)}
            self._moving, self._next_move_s, self._moved = record, now_s, _Moved()
            self._moved.expected_s = sum(move.seconds for move in decision.moves)
            both = "unknown"
            if record.step_before_s is not None and record.step_after_s is not None:
                both = f"{record.step_before_s:,.1f} s before, {record.step_after_s:,.1f} s after"
            self._narrate(
                f"{record.copies} experts move: {decision.gain_s:,.1f} s of {decision.gain_of} saved over "
                f"{self._horizon_s:g} s, against {record.cost_s:,.1f} s of migration; T_comp + T_comm {both}"
            )
        self._save()

    def _propose(
        self, record: ReplacementRecord, held: dict[int, frozenset[Place]], slots: dict[int, int]
    ) -> Decision | None:
        """Decide from the observations, and record it; None if no decision was possible."""
        seen = observe(self.statistics, self.cluster, held, slots, self._horizon_s)
        if seen is None:
            record.outcome = "too few observations"
            _LOG.debug("no decision: too few observations")
            return None
        observed, in_force, costs = seen

        def local(placed_GLE: np.ndarray) -> float:
            away = remote_calls(in_force.cluster, observed.tokens_GLE, placed_GLE)
            return 1 - away / float(observed.tokens_GLE.sum())

        record.local_before, record.horizon_tokens = local(in_force.placed_GLE), observed.horizon_tokens
        replanner = Replanner(
            planner=self.options.planner,
            options=self.options.options,
            seed=self.options.seed,
            weighs="steps" if self.options.decide == "latency" else "calls",
            always=self.options.decide == "always",
        )
        try:
            decision = decide(observed, in_force, costs, replanner)
        except CapacityError as error:
            record.outcome = f"no room: {error}"
            return None
        record.take(decision)
        transfers_s = round_transfers(by_server(decision.moves, sorted(slots)), held, slots)
        record.foreseen_s = migration_s(transfers_s, self.statistics.round_s, self.options.share)
        _LOG.info(
            "%.4g s of %s saved against %.4g s (%s): %d copies; %s",
            *(decision.gain_s, decision.gain_of, decision.cost_s, self.options.planner, decision.copies),
            decision.reason,
        )
        record.local_after = local(decision.placed_GLE)
        record.measured = bool(decision.moves) and costs.call_s is not None
        return decision

    def _move(self, servers: Servers, now_s: float) -> None:
        """Run the next round of the migration."""
        assert self._moving is not None and self._target is not None
        began = time.monotonic()
        slots, held = _there(servers)
        if gone := sorted(self._target.keys() - slots.keys()):
            self._end(now_s, f"cancelled: server {self.cluster.servers[gone[0]].name} has gone")
            return
        drops, copies, done, skipped = next_round(self._steps, held, slots)
        self._steps = self._steps[done:]
        self._moving.skipped += skipped
        left = {n: places - {step.place for step in drops if step.gpu == n} for n, places in held.items()}
        made = servers.move(
            [(step.gpu, step.place) for step in drops],
            [(step.gpu, step.place, self._nearest(step.gpu, step.place, left)) for step in copies],
        )
        busy_N = np.zeros(len(self.cluster.servers))  # seconds of transfer, which servers do at once
        for (server, place), moved in made.arrived.items():
            self.statistics.moved(server, moved)
            self._loaded_NLE[(server, *place)] += 1
            busy_N[server] += moved.seconds
        busy_s, took_s = float(busy_N.sum()), time.monotonic() - began
        self._moved.copies += len(made.arrived)
        self._moved.rounds += 1
        self._moved.transfer_s += busy_s
        self._moved.beside_s += max(0.0, took_s - float(busy_N.max()))
        for _, place, error in made.failed:
            if isinstance(error, WorkerDied):
                self._end(now_s, f"cancelled: {first_line(error)}")
                return
            self._moving.skipped += 1
            self._narrate(f"expert {place[1]} of MoE layer {place[0]} is not moved: {first_line(error)}")
        _LOG.debug("%d experts moved in %.3g s; %d steps left", len(made.arrived), busy_s, len(self._steps))
        self._next_move_s = now_s + busy_s / self.options.share
        if not self._steps:
            self._migrated()
            left_out = f"; {self._moving.skipped} moves skipped" if self._moving.skipped else ""
            self._end(now_s + took_s, f"done{left_out}")

    def _migrated(self) -> None:
        """Measure a migration's seconds besides transfer, and those of transfer by their estimate."""
        assert self._moving is not None
        moved = self._moved
        if moved.copies and moved.copies == self._moving.copies:  # else it was aborted, or another scheduler began it
            self.statistics.migrated(moved.rounds, moved.beside_s)
            if self._timed and moved.transfer_s > 0 and moved.expected_s > 0:
                self.statistics.overran(moved.transfer_s / moved.expected_s)

    def _nearest(self, server: int, place: Place, held: dict[int, frozenset[Place]]) -> int:
        """The holder with the plan's fastest link to a server; -1 if there is none."""
        sources = [n for n, places in held.items() if n != server and place in places]
        return min(sources, key=lambda n: (-self.cluster.link(n, server)[0], n), default=-1)

    def _end(self, now_s: float, outcome: str) -> None:
        assert self._moving is not None
        self._moving.outcome, self._moving.done_s = outcome, now_s
        took_s = now_s - self._moving.at_s - self._moving.plan_s
        took = f"{took_s:,.1f} s, {self._moving.foreseen_s:,.1f} s expected"
        self._narrate(f"the migration of experts: {outcome} ({took})")
        self._steps, self._target, self._moving = [], None, None
        self.statistics.changed(now_s)
        self._save()

    def _go_on(self, servers: Servers, now_s: float) -> None:
        """Continue a migration that an earlier scheduler began."""
        assert self._target is not None
        slots, held = _there(servers)
        if self._target.keys() <= held.keys():
            room = {n: max(slots[n], len(held[n]), len(places)) for n, places in self._target.items()}
            self._steps = steps_to(self.spec, pooled(self.spec, self.cluster, room), held, self._target)
        self._next_move_s = now_s
        if not self._steps:
            self._end(now_s, "cancelled by a restart of the scheduler")

    def _save(self) -> None:
        if self._state is None or self._now_s is None:
            return
        self._saved_s = self._now_s
        SchedulerState(
            decided_s=self._decided_s,
            target=self._target,
            held=None if self._servers is None else self._servers.held(),
            statistics=self.statistics.to_json(),
            decisions=self.history.decisions_json(),
        ).save(self._state, self.spec, self.cluster)

    def _restore(self, kept: SchedulerState) -> None:
        self.statistics.restore(kept.statistics)
        self.history.restore(kept.decisions)
        self._decided_s = kept.decided_s
        if kept.held is not None and len(frozenset[Place]().union(*kept.held)) == self.spec.total_experts:
            self.in_force = list(kept.held)
        if kept.target is not None and self.history.decisions:
            self._target, self._moving = dict(kept.target), self.history.decisions[-1]
            self._resume = True


def _there(servers: Servers) -> tuple[dict[int, int], dict[int, frozenset[Place]]]:
    """Slots and experts of the live servers."""
    held = dict(enumerate(servers.held()))
    slots = {n: max(info.slots, len(held[n])) for n, info in enumerate(servers.infos()) if info is not None}
    return slots, {n: held[n] for n in slots}
