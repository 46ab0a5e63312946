"""The global scheduler: asks the workers what happens, places anew when that pays, and moves experts one by one."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moetool import durable, planner
from moetool.cluster.chronicle import Chronicle
from moetool.cluster.deciding import Decision, Step, pooled, steps_to, think
from moetool.cluster.launch import WorkerDied
from moetool.cluster.membership import Membership, Place
from moetool.cluster.statistics import Statistics
from moetool.errors import MismatchError, MoetoolError, UsageError, first_line, unknown_name
from moetool.types import Cluster

_SCHEMA_VERSION = 1
_SAVE_S = 30.0
_GLANCE_S = 0.2
_DECIDES = ("eq4", "always", "never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What `--set scheduler.NAME=VALUE` sets.

    Attributes:
        interval_s: between two decisions.
        poll_s: between two reports of each worker.
        planner: that places anew.
        options: of the planner.
        decide: `eq4`: migrate if Prism's Eq. 4 says so; `always`; `never`: watch only.
        horizon_s: how long a placement is taken to last, for Eq. 4 (0: the interval).
        half_life_s: after so long what was routed and called counts half (0: never).
        compute_s: how long seconds of computing are averaged.
        share: of the time that migrating may keep links busy; after each copy as much of a pause follows.
        seed: of planners that draw.

    Raises:
        UsageError: a value that makes no sense.
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

    def __post_init__(self) -> None:
        planner.find(self.planner)
        if self.decide not in _DECIDES:
            raise unknown_name("--set scheduler.decide", self.decide, _DECIDES)
        for name in ("interval_s", "poll_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"--set scheduler.{name}: found {getattr(self, name)}, expected seconds above 0")
        for name in ("horizon_s", "half_life_s", "compute_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"--set scheduler.{name}: found {getattr(self, name)}, expected seconds, 0 or more")
        if not 0 < self.share <= 1:
            raise UsageError(f"--set scheduler.share: found {self.share}, expected above 0 and at most 1")


class Scheduler:
    """Watches a cluster and keeps its placement good.

    It owns no clock: `tick` is told the time, does what is due and says when it wants to be called again. `run` does
    that on a thread. What workers hold is what they and the membership say, never what was wished for: a worker that
    dies in the middle of a migration ends it, and the next decision starts from what is there.

    Args:
        cluster: the plan's.
        membership: who serves and holds what; others may change it meanwhile (a worker dies, one comes back).
        state: file that everything is kept in, so that a scheduler that is started again goes on where it was.
        narrate: told what a person should know.

    Raises:
        MismatchError: the state is of another model or cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        options: Options,
        *,
        state: Path | None = None,
        narrate: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.cluster, self.membership, self.options = cluster, membership, options
        num_servers = len(cluster.servers)
        self.statistics = Statistics(
            membership.spec, num_servers, half_life_s=options.half_life_s, compute_s=options.compute_s
        )
        self.chronicle = Chronicle(num_servers, max(options.poll_s, 10.0 if options.interval_s > 60 else 0.0))
        self._state, self._narrate = state, narrate
        self._lock = threading.Lock()
        self._polled_s = self._decided_s = self._next_move_s = self._saved_s = float("-inf")
        self._seen_s: dict[int, float] = {}
        self._steps: list[Step] = []
        self._target: dict[int, frozenset[Place]] | None = None
        self._moving: Decision | None = None
        self._now_s: float | None = None
        self._resume = False
        self._shown: dict[str, Any] | None = None
        if state is not None and state.exists():
            self._restore(state)

    @property
    def migrating(self) -> bool:
        """Whether experts are on the move."""
        return self._target is not None

    def tick(self, now_s: float) -> float:
        """Do what is due; gives the seconds until there is more to do.

        Args:
            now_s: seconds since 1970.
        """
        with self._lock:
            self._now_s = now_s
            if self._decided_s == float("-inf"):
                self._decided_s = now_s  # the first decision comes after an interval
            if now_s - self._polled_s >= self.options.poll_s:
                self._polled_s = now_s
                self._poll(now_s)
                if now_s - self._saved_s >= _SAVE_S:
                    self._save()
            if self._resume:
                self._resume = False
                self._go_on()
            if self.migrating:
                if now_s >= self._next_move_s:
                    self._move(now_s)
            elif self.options.decide != "never" and now_s - self._decided_s >= self.options.interval_s:
                self._decide(now_s)
            report_s = self._polled_s + self.options.poll_s
            act_s = self._next_move_s if self.migrating else self._decided_s + self.options.interval_s
            if not self.migrating and act_s <= now_s:  # it cannot be decided just now
                act_s = report_s
            return max(0.0, min(report_s, act_s) - now_s)

    def run(self, stop: threading.Event, clock: Callable[[], float]) -> None:
        """Tick until told to stop. An error of the machinery is told of, and does not end it."""
        while not stop.is_set():
            try:
                wait_s = self.tick(clock())
            except MoetoolError as error:
                self._narrate(f"scheduler: {first_line(error)}")
                wait_s = self.options.poll_s
            stop.wait(max(wait_s, 0.001))
        self.save()

    def save(self) -> None:
        """Write the state now."""
        with self._lock:
            self._save()

    def decide_now(self) -> None:
        """Let the next tick decide, whatever the interval."""
        with self._lock:
            self._decided_s = 0.0

    def snapshot(self) -> dict[str, Any]:
        """All that a page about the cluster shows, as a JSON object. While an expert moves, as it was before."""
        if not self._lock.acquire(timeout=_GLANCE_S if self._shown else -1):
            assert self._shown is not None
            return self._shown
        try:
            workers, infos, held = self.membership.workers(), self.membership.infos(), self.membership.held()
            spec = self.membership.spec
            self._shown = {
                "now_s": self._now_s,
                "model": spec.name,
                "layers": list(spec.layer_ids_L),
                "experts": list(spec.num_experts_L),
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
                "uncovered": len(self.membership.uncovered()),
                "servers": [
                    {
                        "name": server.name,
                        "serves": n in workers,
                        "url": infos[n].url if n in infos else None,
                        "slots": infos[n].slots if n in infos else None,
                        "held": sorted(held.get(n, ())),
                    }
                    for n, server in enumerate(self.cluster.servers)
                ],
                "wanted": [
                    [round(float(value), 1) for value in tokens_LE.ravel()] for tokens_LE in self.statistics.tokens_NLE
                ],
                **self.chronicle.summary(),
            }
            return self._shown
        finally:
            self._lock.release()

    @property
    def _horizon_s(self) -> float:
        return self.options.horizon_s or self.options.interval_s

    def _poll(self, now_s: float) -> None:
        for n, worker in self.membership.workers().items():
            try:
                stats = worker.stats()
            except MoetoolError as error:
                self._narrate(f"scheduler: {first_line(error)}")
                continue
            self._seen_s[n] = now_s
            self.statistics.add(stats, now_s)
            self.chronicle.add(stats, now_s)

    def _decide(self, now_s: float) -> None:
        for n in self.membership.workers():
            self._ask(n)
        workers, infos, held = self.membership.workers(), self.membership.infos(), self.membership.held()
        away = [n for n in range(len(self.cluster.servers)) if n not in workers]
        # One that is being restarted is waited for; one that stays away is planned without.
        if any(now_s - self._seen_s.get(n, now_s) < self.options.interval_s for n in away if n in self._seen_s):
            return
        if not workers or self.membership.uncovered():
            return
        self._decided_s = now_s
        slots = {n: max(infos[n].slots, len(held[n])) for n in workers}
        thought = think(
            self.statistics,
            self.cluster,
            held,
            slots,
            now_s,
            name=self.options.planner,
            options=self.options.options,
            horizon_s=self._horizon_s,
            seed=self.options.seed,
        )
        decision = thought.decision
        self.chronicle.decide(decision)
        if thought.steps and (decision.worth_it or self.options.decide == "always"):
            decision.made = True
            decision.outcome = "under way"
            self._steps, self._target, self._moving = list(thought.steps), dict(thought.target), decision
            self._next_move_s = now_s
            self._narrate(
                f"scheduler: {decision.copies} experts move: {decision.saved_s:,.1f} s of remote calls saved over "
                f"{self._horizon_s:g} s, against {decision.cost_s:,.1f} s"
            )
        self._save()

    def _ask(self, server: int) -> None:
        """Go by what a worker says that it holds."""
        try:
            self.membership.refresh(server)
        except MoetoolError as error:
            self._narrate(f"scheduler: {first_line(error)}")

    def _move(self, now_s: float) -> None:
        """The next step of the migration: a copy, and the drops up to the next."""
        assert self._moving is not None
        pause_s = 0.0
        while self._steps:
            step = self._steps.pop(0)
            workers = self.membership.workers()
            if step.server not in workers:
                self._end(now_s, f"broken off: server {self.membership.names[step.server]} has ended")
                return
            try:
                if step.kind == "copy":
                    pause_s = self._copy(step)
                    break
                self._drop(step)
            except WorkerDied as error:
                self._end(now_s, f"broken off: {first_line(error)}")
                return
            except MoetoolError as error:
                self._moving.skipped += 1
                self._narrate(f"scheduler: expert {step.place} stays where it is: {first_line(error)}")
                self._ask(step.server)  # it may have come there all the same
        self._next_move_s = now_s + pause_s
        if not self._steps:
            left = f"; {self._moving.skipped} moves skipped" if self._moving.skipped else ""
            self._end(now_s, f"done{left}")

    def _copy(self, step: Step) -> float:
        """Bring an expert to a server and tell all; gives the seconds until the next may move."""
        assert self._moving is not None
        server, place = step.server, step.place
        held = self.membership.held()
        if place in held[server]:
            return 0.0
        if len(held[server]) >= self.membership.infos()[server].slots:
            self._moving.skipped += 1  # an earlier drop was not to be: its expert had no other place left
            return 0.0
        moved = self.membership.workers()[server].adopt(*place, self._nearest(server, place, held))
        self.membership.hold(server, place)
        self.statistics.moved(server, moved)
        return moved.seconds / self.options.share

    def _drop(self, step: Step) -> None:
        assert self._moving is not None
        if not self.membership.release(step.server, step.place):
            self._moving.skipped += 1
            return
        self.membership.workers()[step.server].drop(*step.place)

    def _nearest(self, server: int, place: Place, held: dict[int, set[Place]]) -> int:
        """Who sends the expert: over the fastest link, as the plan has them; -1 if nobody else has it."""
        sources = [n for n, places in held.items() if n != server and place in places]
        return min(sources, key=lambda n: (-self.cluster.link(n, server)[0], n), default=-1)

    def _end(self, now_s: float, outcome: str) -> None:
        assert self._moving is not None
        self._moving.outcome, self._moving.done_s = outcome, now_s
        self._narrate(f"scheduler: migration {outcome}")
        self._steps, self._target, self._moving = [], None, None
        self.statistics.changed(now_s)
        self._save()

    def _go_on(self) -> None:
        """Order anew what is left of a migration that an earlier scheduler began."""
        assert self._target is not None and self._now_s is not None
        infos, held = self.membership.infos(), self.membership.held()
        if set(self._target) <= set(held):
            slots = {n: max(infos[n].slots, len(held[n]), len(self._target[n])) for n in self._target}
            machines = pooled(self.membership.spec, self.cluster, slots)
            wanted = {n: set(places) for n, places in self._target.items()}
            self._steps = steps_to(self.membership.spec, machines, held, wanted)
        self._next_move_s = self._now_s
        if not self._steps:
            self._end(self._now_s, "broken off when the scheduler was started again")

    def _save(self) -> None:
        if self._state is None or self._now_s is None:
            return
        self._saved_s = self._now_s
        values = {
            "kind": "scheduler_state",
            "schema_version": _SCHEMA_VERSION,
            "revision": self.membership.spec.revision,
            "servers": [server.name for server in self.cluster.servers],
            "decided_s": self._decided_s,
            "target": None if self._target is None else {str(n): sorted(places) for n, places in self._target.items()},
            "held": {str(n): sorted(places) for n, places in self.membership.held().items()},
            "statistics": self.statistics.to_json(),
            "chronicle": self.chronicle.to_json(),
        }
        durable.write_text(self._state, json.dumps(values, allow_nan=False) + "\n")

    def _restore(self, path: Path) -> None:
        advice = "remove it or name another file"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values["kind"], values["schema_version"]
            if found != ("scheduler_state", _SCHEMA_VERSION):
                raise MismatchError(
                    f"{path} holds {found[0]} of version {found[1]}, expected scheduler_state; {advice}"
                )
            if values["revision"] != self.membership.spec.revision:
                raise MismatchError(f"{path} is of another model than {self.membership.spec.name}; {advice}")
            if values["servers"] != [server.name for server in self.cluster.servers]:
                raise MismatchError(f"{path} is of the servers {', '.join(values['servers'])}; {advice}")
            self.statistics.restore(values["statistics"])
            self.chronicle.restore(values["chronicle"])
            self._decided_s = float(values["decided_s"])
            if values["target"] is not None:
                self._target = {
                    int(n): frozenset((layer, expert) for layer, expert in places)
                    for n, places in values["target"].items()
                }
                self._moving = self.chronicle.decisions[-1]
                self._resume = True
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise MismatchError(f"{path} is no scheduler state ({first_line(error)}); {advice}") from None
