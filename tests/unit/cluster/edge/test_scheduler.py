"""The scheduler against workers in this process that hold experts and draw tokens."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.edge.protocol import ArrivedExpert, MigrationRoundResult
from moetool.cluster.edge.replacement import (
    as_array,
    next_round,
    places_of,
    pooled,
    round_transfers,
    steps_to,
    trial_copies,
)
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.placement import planner
from moetool.placement.demand import Demand
from moetool.placement.latency import unit_latency
from moetool.placement.plan import Move, Place
from moetool.placement.planner import Problem
from tests.clusters import make_cluster
from tests.edge_workers import odds, open_cluster

SPEC = ModelSpec(
    name="drawn",
    revision="1" * 64,
    layer_ids_L=(0, 1, 2, 3),
    num_experts_L=(16,) * 4,
    top_k_L=(2,) * 4,
    has_logits_L=(True,) * 4,
    num_shared_experts=0,
    num_groups=1,
    hidden_size=8,
    expert_bytes_L=(1000,) * 4,
    score_function="softmax",
    renormalize=True,
)
SLOTS = (28, 28, 28)
CLUSTER = make_cluster([[room] for room in SLOTS], link_bytes_s=1e5)
OPTIONS = SchedulerOptions(interval_s=60.0, poll_s=5.0, half_life_s=60.0)


def planned(odds_NLE: np.ndarray, name: str = "prism_exact", cluster: Cluster = CLUSTER) -> dict[int, set[Place]]:
    """A placement for the odds themselves, as if they were counts."""
    demand = Demand(spec=SPEC, cluster=cluster, tokens_GLE=odds_NLE * 1e4)
    placed_NLE = planner.place(name, Problem(demand=demand, latency=unit_latency(cluster)))
    return {n: set(places_of(placed_NLE[n])) for n in range(len(placed_NLE))}


class World:
    """A cluster, its scheduler and a clock that goes on as the scheduler asks."""

    def __init__(
        self,
        odds_NLE: np.ndarray,
        held: dict[int, set[Place]],
        options: SchedulerOptions = OPTIONS,
        state: Path | None = None,
        slots: tuple[int, ...] = SLOTS,
    ) -> None:
        self.workers, self.table = open_cluster(SPEC, CLUSTER, held, slots, odds_NLE)
        self.said: list[str] = []
        self.options = replace(options, state=str(state or ""))
        self.now_s = 1e6
        self.start()

    def start(self) -> None:
        self.scheduler = Scheduler(SPEC, CLUSTER, self.options, narrate=self.said.append)

    def step(self, tokens: int = 60) -> float:
        """One tick, and what the servers do until the next; coverage and room are checked."""
        began_s = self.now_s
        wait_s = min(max(0.0, self.scheduler.tick(self.table, began_s) - (self.now_s - began_s)), 5.0)
        assert not self.table.uncovered()
        for worker in self.workers.values():
            assert len(worker.held) <= worker.slots
            if not worker.dead:
                worker.serve(max(1, int(tokens * wait_s / 5.0)), wait_s)
        self.now_s += max(wait_s, 1e-3)
        return wait_s

    def pass_s(self, seconds: float, tokens: int = 60) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.step(tokens)

    def lose(self, server: int) -> None:
        """A server is gone, and whoever watches has what nobody else holds adopted by those with room."""
        self.table.leave(server)
        there = [worker for worker in self.workers.values() if worker.server != server]
        for place in self.table.uncovered():
            self.table.adopt(min(there, key=lambda worker: len(worker.held)).server, *place, -1)
        assert not self.table.uncovered()

    def local(self) -> float:
        """Share computed at home since the last call."""
        self.scheduler.tick(self.table, self.now_s)
        for worker in self.workers.values():
            worker.stats()
        local, remote = (sum(getattr(w, name) for w in self.workers.values()) for name in ("local", "remote"))
        for worker in self.workers.values():
            worker.local = worker.remote = 0
        return local / (local + remote)

    @property
    def made(self) -> list[str]:
        return [one.outcome for one in self.scheduler.history.decisions if one.made]


def test_a_steady_mix_moves_nothing() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE))
    world.pass_s(10 * 60)
    assert len(world.scheduler.history.decisions) >= 9
    assert world.made == []


def test_a_clock_that_is_set_back_is_waited_for_by_nobody() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE))
    world.pass_s(2.5 * 60)
    before = len(world.scheduler.history.decisions)
    world.now_s -= 7200
    assert world.step() <= 5.0
    world.pass_s(2.5 * 60)
    assert before >= 2 and len(world.scheduler.history.decisions) >= before + 2


def test_after_a_change_of_mix_experts_move_once_and_more_is_computed_at_home() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE))
    world.pass_s(3 * 60)
    world.local()
    for n, worker in world.workers.items():
        worker.odds_LE = odds_NLE[(n + 1) % 3]
    world.pass_s(30)
    shifted = world.local()
    world.pass_s(6 * 60)
    assert 1 <= len(world.made) <= 2 and set(world.made) == {"done"}
    world.local()
    world.pass_s(60)
    settled = world.local()
    assert settled > shifted + 0.1
    best = planned(np.roll(odds_NLE, -1, axis=0))
    assert settled > 0.97 * expected_local(best, np.roll(odds_NLE, -1, axis=0))
    last = world.scheduler.history.decisions[-1]
    assert last.made is False and last.local_before > 0.5


def expected_local(held: dict[int, set[Place]], odds_NLE: np.ndarray) -> float:
    """The share that tokens drawn with these odds find at home, by drawing many."""
    workers, _ = open_cluster(SPEC, CLUSTER, held, SLOTS, odds_NLE)
    for worker in workers.values():
        worker.serve(4000, 1.0)
        worker.stats()
    local, remote = (sum(getattr(w, name) for w in workers.values()) for name in ("local", "remote"))
    return local / (local + remote)


def _take_per_round(world: World, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each round of moves, empty ones too, take so long besides transfer by the clock that the scheduler reads."""
    move = world.table.move

    def late(drops: Sequence[tuple[int, Place]], copies: Sequence[tuple[int, Place, int]]) -> MigrationRoundResult:
        made = move(drops, copies)
        transfers_s = Counter[int]()
        for (server, _), moved in made.arrived.items():
            transfers_s[server] += moved.seconds
        world.now_s += seconds + max(transfers_s.values(), default=0.0)  # servers transfer at once
        return made

    monkeypatch.setattr(world.table, "move", late)
    clock = SimpleNamespace(monotonic=lambda: world.now_s, time=lambda: world.now_s)
    monkeypatch.setattr("moetool.cluster.edge.scheduler.time", clock)


def test_eq4_has_both_sides_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    dear = World(odds_NLE, planned(odds_NLE, "uniform"))
    _take_per_round(dear, 0.1, monkeypatch)
    for worker in dear.workers.values():
        worker.call_s = 1e-7
    dear.pass_s(130)
    refused = dear.scheduler.history.decisions[-1]
    assert (refused.worth_it, refused.made, refused.outcome) == (False, False, "not worth it")
    assert refused.saved_s == pytest.approx((refused.calls_before - refused.calls_after) * 1e-7, rel=1e-6)
    assert refused.measured and refused.calls_after < refused.calls_before
    # Trial copies took 50 ms, though by the plan's links they take 10 ms; Eq. 3 goes by the GPUs' own rate.
    # A round takes as long besides as the one without moves before the decision.
    rounds = round((refused.moves_s - refused.copies * 0.05) / 0.1)
    assert refused.moves_s == pytest.approx(refused.copies * 0.05 + rounds * 0.1, rel=1e-4) and 4 <= rounds <= 8
    assert refused.eq3_s == pytest.approx(refused.copies * 1000 / 12e9)
    cheap = World(odds_NLE, planned(odds_NLE, "uniform"))
    cheap.pass_s(130)
    first = cheap.scheduler.history.decisions[0]
    assert first.made and first.saved_s > first.cost_s and first.outcome == "done"
    # 36 tokens a second of 3 servers at 60 tokens in 5 s, 8 pairs each, over 60 s
    assert first.horizon_tokens == pytest.approx(36 * 60, rel=0.1)


def test_copies_leave_links_their_share() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(
        odds_NLE, planned(odds_NLE, "uniform"), SchedulerOptions(interval_s=60.0, half_life_s=60.0, share=0.25)
    )
    world.pass_s(61)
    began_s = world.now_s
    while world.scheduler.migrating:
        world.step()
    copies = sum(len(worker.adopted) for worker in world.workers.values())
    assert copies > 10
    assert world.now_s - began_s >= (copies - 2) * 0.05 / 0.25


def test_a_round_passes_within_its_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"))
    while not world.scheduler.migrating:
        world.step()
    _take_per_round(world, 0.2, monkeypatch)
    world.scheduler.on_tick(world.table)
    copies = [len(worker.adopted) for worker in world.workers.values()]
    took_s = max(copies) * 0.05 + 0.2
    assert sum(copies) > 4 and world.scheduler.tick_s == pytest.approx(sum(copies) * 0.05 / 0.5 - took_s)


def test_a_migration_takes_what_was_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"))
    _take_per_round(world, 0.2, monkeypatch)
    for shift in (0, 1, 2, 3):
        for worker in world.workers.values():
            worker.move_s *= (1, 4, 0.1, 3)[shift]  # as beside a busy process: measured again before each decision
        for n, worker in world.workers.items():
            worker.odds_LE = odds_NLE[(n + shift) % 3]
        world.pass_s(200)
    made = [one for one in world.scheduler.history.decisions if one.made and one.outcome == "done"]
    took_s = [one.done_s - one.at_s for one in made if one.done_s is not None]
    assert len(made) >= 3  # the first by trial copies: its plan's links are five times as fast
    for one, seconds in zip(made, took_s, strict=True):
        assert seconds / 1.5 < one.foreseen_s < 1.5 * seconds


def test_a_migration_of_one_round_has_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    held = planned(odds_NLE)
    for n, places in held.items():  # a copy of each server gets lost
        others = set[Place]().union(*(held[m] for m in held if m != n))
        places.remove(max(places & others, key=odds_NLE[n].item))
    options = replace(OPTIONS, decide="always", share=0.1)  # a pause of nine times the transfer
    world = World(odds_NLE, held, options)
    _take_per_round(world, 0.2, monkeypatch)
    world.pass_s(61, tokens=6000)
    while world.scheduler.migrating:
        world.step()
    (made,) = world.scheduler.history.decisions
    copies = [len(worker.adopted) for worker in world.workers.values()]
    assert made.outcome == "done" and made.done_s is not None and sum(copies) > max(copies) > 0
    assert made.done_s - made.at_s - made.plan_s == pytest.approx(max(copies) * 0.05 + 0.2, rel=0.01)
    assert made.foreseen_s == pytest.approx(max(copies) * 0.05 + 0.2)
    assert made.cost_s == pytest.approx(sum(copies) * 0.05 + 0.2)


def test_migrations_that_overrun_their_trials_are_priced_by_what_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"))
    _take_per_round(world, 0.0, monkeypatch)
    for worker in world.workers.values():
        worker.trial_share = 0.4  # alone a copy is faster than beside calls
    for shift in range(6):
        for n, worker in world.workers.items():
            worker.odds_LE = odds_NLE[(n + shift) % 3]
        world.pass_s(200)
    made = [one for one in world.scheduler.history.decisions if one.made and one.outcome == "done"]
    overrun = [(one.done_s - one.at_s) / one.foreseen_s for one in made if one.done_s is not None]
    assert len(overrun) >= 4 and overrun[0] > 1.8
    assert all(1 / 1.3 < times < 1.3 for times in overrun[3:])


def test_each_fast_link_is_tried_before_a_decision() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE))
    held = dict(enumerate(world.table.held()))
    copies = trial_copies(world.scheduler.statistics, CLUSTER, held)
    assert {frozenset((server, source)) for server, _, source in copies} == {
        frozenset(pair) for pair in itertools.combinations(range(3), 2)
    }
    assert all(place in held[source] for _, place, source in copies)
    assert {server for server, *_ in copies} == {0, 1, 2}
    slow_links = make_cluster([[room] for room in SLOTS], link_bytes_s=1e4)  # 0.1 s a copy
    assert not trial_copies(world.scheduler.statistics, slow_links, held)
    world.pass_s(61)
    assert world.scheduler.history.decisions and not world.made
    assert trial_copies(world.scheduler.statistics, CLUSTER, held) == copies
    world.scheduler.statistics.moved(0, ArrivedExpert(source=1, bytes=1000, seconds=0.1))
    assert {(server, source) for server, _, source in trial_copies(world.scheduler.statistics, CLUSTER, held)} == {
        (server, source) for server, _, source in copies if {server, source} != {0, 1}
    }


def slow(world: "World") -> None:
    """Have moves take so long that a round has few."""
    world.scheduler.cluster = make_cluster([[room] for room in SLOTS], link_bytes_s=1e4)


def test_the_measured_rate_of_moves_is_used_next_time() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"))
    for worker in world.workers.values():
        worker.move_s = 3.0
    world.pass_s(61)
    while world.scheduler.migrating:
        world.step()
    measured = world.scheduler.statistics.measured(CLUSTER)
    assert measured.link(0, 1)[0] == pytest.approx(1000 / 3.0)


def test_a_worker_that_dies_ends_the_migration_and_the_next_starts_from_what_is_there() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"), slots=(40, 28, 40))
    slow(world)
    world.pass_s(61)
    for _ in range(3):
        world.step()
    assert world.scheduler.migrating
    lost = world.workers[1]
    lost.dead = True
    while world.scheduler.migrating:
        world.scheduler.tick(world.table, world.now_s)
        world.now_s += 1.0
    assert world.made[0].startswith("cancelled: server")
    world.lose(1)
    lost.dead = False
    lost.holders = None
    world.table.join(1)
    for worker in world.workers.values():
        assert set(world.table.held()[worker.server]) == worker.held
    world.pass_s(4 * 60)
    assert world.made[-1] == "done"
    world.local()
    world.pass_s(30)
    assert world.local() > 0.9


def test_a_move_that_fails_is_skipped_and_nothing_is_lost() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE, "uniform"))
    wanted = planned(odds_NLE)
    bad = sorted(wanted[0] - world.workers[0].held)[:3]
    world.workers[0].fails = dict.fromkeys(bad, 1)
    world.pass_s(61)
    while world.scheduler.migrating:
        world.step()
    assert world.made[0].startswith("done; ")
    assert not world.table.uncovered()
    assert [w.held for w in world.workers.values()] == world.table.held()


def test_a_server_that_is_away_is_waited_for_and_then_planned_without() -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE), slots=(40, 40, 28))
    world.pass_s(50)
    world.workers[2].dead = True
    gone = world.workers[2].held
    world.lose(2)
    assert gone
    world.pass_s(30)
    assert not world.scheduler.history.decisions  # within an interval of its last report
    world.pass_s(90)
    assert world.scheduler.history.decisions
    assert all(not one.outcome.startswith("no room") for one in world.scheduler.history.decisions)


def test_a_server_that_reports_while_it_leaves_holds_back_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    odds_NLE = odds(SPEC, 3)
    world = World(odds_NLE, planned(odds_NLE), slots=(40, 40, 28))
    world.pass_s(50)
    world.lose(2)
    stats = world.table.stats
    monkeypatch.setattr(world.table, "stats", lambda: [*stats()[:2], world.workers[2].stats()])
    world.pass_s(120)
    assert world.scheduler.history.decisions


def test_a_scheduler_that_is_started_again_goes_on_where_it_was(tmp_path: Path) -> None:
    odds_NLE = odds(SPEC, 3)
    state = tmp_path / "scheduler.json"
    world = World(odds_NLE, planned(odds_NLE, "uniform"), state=state)
    slow(world)
    world.pass_s(61)
    for _ in range(3):
        world.step()
    assert world.scheduler.migrating
    target = json.loads(state.read_text())["target"]
    tokens = world.scheduler.statistics.tokens_NLE
    world.scheduler.save()
    world.start()
    assert world.scheduler.in_force == world.table.held()
    np.testing.assert_allclose(world.scheduler.statistics.tokens_NLE, tokens, atol=1e-2)
    assert world.scheduler.migrating and len(world.scheduler.history.decisions) == 1
    while world.scheduler.migrating:
        world.step()
    assert world.made == ["done"]
    assert {str(n): sorted(map(list, w.held)) for n, w in world.workers.items()} == target
    decided = len(world.scheduler.history.decisions)
    world.start()
    world.step()
    assert len(world.scheduler.history.decisions) == decided  # the interval goes on, too


def test_an_error_that_stays_is_met_once_in_a_report() -> None:
    class Broken:
        def stats(self) -> Any:
            raise RuntimeError("a bug")

    scheduler = Scheduler(SPEC, CLUSTER, SchedulerOptions(poll_s=5.0))
    with pytest.raises(RuntimeError):
        scheduler.on_tick(Broken())  # type: ignore[arg-type]
    assert scheduler.tick_s == 5.0


def test_state_of_something_else_is_refused(tmp_path: Path) -> None:
    odds_NLE = odds(SPEC, 3)
    state = tmp_path / "scheduler.json"
    world = World(odds_NLE, planned(odds_NLE), state=state)
    world.pass_s(10)
    world.scheduler.save()
    values = json.loads(state.read_text())
    for damage in ({"revision": "0"}, {"servers": ["a"]}, {"kind": "plan"}, {"statistics": {}}):
        state.write_text(json.dumps({**values, **damage}))
        with pytest.raises(MismatchError, match=r"scheduler\.json"):
            world.start()
    state.write_text("{")
    with pytest.raises(MismatchError, match="is damaged"):
        world.start()


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_moves_keep_every_expert_and_every_room_whatever_the_order(spare: int) -> None:
    rng = np.random.default_rng(spare)
    reached = 0
    for _ in range(30):
        slots = tuple(int(n) for n in rng.integers(27, 32, 3))
        held, target = (random_holding(rng, tuple(room - spare for room in slots)) for _ in range(2))
        cluster = pooled(SPEC, CLUSTER, dict(enumerate(slots)))
        steps = steps_to(SPEC, cluster, held, target)
        replay(steps, held, slots)
        reached += bool(steps)
        if steps:
            assert held == target
    assert reached == 30


def random_holding(rng: np.random.Generator, slots: tuple[int, ...]) -> dict[int, set[Place]]:
    places = [(layer, expert) for layer in range(4) for expert in range(16)]
    held: dict[int, set[Place]] = {n: set() for n in range(len(slots))}
    for place in (places[i] for i in rng.permutation(len(places))):
        n = min((n for n in held if len(held[n]) < slots[n]), key=lambda n: rng.random())
        held[n].add(place)
    for n, room in enumerate(slots):
        others = [place for place in places if place not in held[n]]
        for i in rng.permutation(len(others))[: room - len(held[n])]:
            held[n].add(others[i])
    return held


def replay(steps: list[Move], held: dict[int, set[Place]], slots: tuple[int, ...]) -> None:
    everything = set(itertools.chain.from_iterable(held.values()))
    for step in steps:
        if step.kind == "copy":
            held[step.gpu].add(step.place)
        else:
            held[step.gpu].remove(step.place)
        assert set(itertools.chain.from_iterable(held.values())) == everything
        assert all(len(held[n]) <= room for n, room in enumerate(slots))


def test_arrays_and_places_are_the_same() -> None:
    held = [{(0, 3), (2, 1)}, set(), {(3, 15)}]
    assert [set(places_of(one)) for one in as_array(SPEC, held)] == held


def test_options_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"options": {"fill": True}},
        {"share": 0.0},
        {"interval_s": 0.0},
        {"decide": "eq5"},
        {"planner": "prsm"},
        {"half_life_s": -1.0},
    ):
        with pytest.raises(UsageError):
            SchedulerOptions(**wrong)


def test_a_round_is_what_can_be_made_together() -> None:
    def step(kind: str, expert: int, server: int) -> Move:
        return Move(kind=kind, layer=0, expert=expert, gpu=server, source=-1, bytes=1, seconds=0.2)

    held = {0: {(0, 0), (0, 1)}, 1: {(0, 1), (0, 2)}, 2: {(0, 3)}}
    slots = {0: 2, 1: 2, 2: 2}
    swap = [step("drop", 1, 0), step("copy", 2, 0), step("copy", 0, 2), step("drop", 0, 0), step("copy", 3, 0)]
    drops, copies, done, skipped = next_round(swap, held, slots, 64, 9.0)
    assert (drops, copies, done, skipped) == (swap[:1], swap[1:3], 3, 0)  # 0 of expert 0 has to be on server 2 first
    assert next_round(swap, held, slots, 1, 9.0) == (swap[:1], swap[1:2], 2, 0)
    assert next_round(swap, held, slots, 64, 0.1) == (swap[:1], swap[1:2], 2, 0)  # one always
    full = [step("copy", 2, 0), step("copy", 2, 2), step("copy", 3, 2)]
    assert next_round(full, held, slots, 64, 9.0) == ([], full[1:2], 3, 1)  # no room on 0, and 3 is on 2 already
    both = [step("drop", 1, 0), step("drop", 1, 1)]
    assert next_round(both, held, slots, 64, 9.0) == (both, [], 2, 0)  # the head refuses the second


def test_the_last_holders_drop_frees_no_room_for_later_rounds() -> None:
    def step(kind: str, expert: int, server: int) -> Move:
        return Move(kind=kind, layer=0, expert=expert, gpu=server, source=-1, bytes=1, seconds=0.6)

    held, slots = {0: {(0, 0)}, 1: set(), 2: {(0, 1), (0, 2)}}, {0: 1, 1: 2, 2: 2}
    steps = [step("drop", 0, 0), step("copy", 1, 1), step("copy", 1, 0), step("copy", 2, 1)]
    # The head refuses the drop, so server 0 has no room.
    assert round_transfers(steps, held, slots) == [{0: 0.0, 1: 0.6, 2: 0.0}] * 2
