"""One history, four callers: the stream, the simulator, the edge scheduler and the head of ranks decide alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from moetool.base.errors import CapacityError
from moetool.cluster.edge.protocol import WorkerStats
from moetool.cluster.edge.replacement import as_array, places_of
from moetool.cluster.edge.scheduler import Scheduler, SchedulerOptions
from moetool.cluster.parallel.batch_placement import BatchCosts, BatchReplacement
from moetool.placement.decide import (
    Decision,
    InForce,
    Observed,
    ReplacementCosts,
    Replanner,
    decide,
    plan_migration,
)
from moetool.placement.demand import Demand
from moetool.placement.latency import linear_latency, unit_latency
from moetool.placement.modes import follow
from moetool.placement.replacement_record import ReplacementRecord
from moetool.placement.scoring import remote_call_s
from moetool.simulation.event_loop import EventLoop, SimulatedMachines
from moetool.simulation.placement_control import PlacementDecisions, SimulatedReplacement
from moetool.simulation.replica_choice import Routing
from moetool.simulation.simulated_costs import GpuSeconds, make_network
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.workload import SimulatedRequest
from tests.clusters import make_cluster, make_plan
from tests.edge_workers import DrawnWorker, Table
from tests.refusals import refused
from tests.synthetic import make_spec
from tests.synthetic_routes import route_of

SPEC = make_spec(2, 8, 2)
SERVERS, ROOM, TOKENS = 3, 9, 40
CLUSTER = make_cluster([[ROOM]] * SERVERS, slot_bytes=SPEC.slot_bytes, link_bytes_s=1e5)
INTERVAL_S = 60.0
PLANNERS = ("prism_exact", "smartmoe", "eplb")
CALL_S = (remote_call_s(CLUSTER, 2 * SPEC.hidden_size), 1.0)
"""As the links have it, which pays for no migration of so few tokens, and so slow that it does."""
PAIR_S = (0.5, 0.01, 0.01)
MEAN_S = sum(PAIR_S) / SERVERS


def routes(server: int) -> np.ndarray:
    """The tokens [T, S] of a server's users, who want different experts than those of the others."""
    rng = np.random.default_rng([5, server])
    odds_E = rng.random(SPEC.num_experts) ** 4 + 1e-3
    chosen = [rng.choice(SPEC.num_experts, 2, replace=False, p=odds_E / odds_E.sum()) for _ in range(2 * TOKENS)]
    return np.array(chosen).reshape(TOKENS, 4)


def served() -> np.ndarray:
    """The same as counts [G, L, E]."""
    tokens_GLE = np.zeros((SERVERS, SPEC.num_layers, SPEC.num_experts))
    for server in range(SERVERS):
        for token in routes(server):
            for layer in range(SPEC.num_layers):
                tokens_GLE[server, layer, token[2 * layer : 2 * layer + 2]] += 1
    return tokens_GLE


def begun() -> np.ndarray:
    """The placement in force: expert e on server e modulo their number."""
    placed_GLE = np.zeros((SERVERS, SPEC.num_layers, SPEC.num_experts), bool)
    for expert in range(SPEC.num_experts):
        placed_GLE[expert % SERVERS, :, expert] = True
    return placed_GLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Eq4:
    """A caller's decision, in the fields that all callers share.

    Attributes:
        moves: (kind, layer, expert, server), in any order.
        numbers: remote calls before and after, seconds of one, seconds saved, and Eq. 3.
        pays: whether Eq. 4 holds.
    """

    moves: set[tuple[str, int, int, int]]
    numbers: tuple[float, ...]
    pays: bool


def of_decision(decision: Decision) -> Eq4:
    plan = decision.migration
    return Eq4(
        moves={(move.kind, *move.place, move.gpu) for move in decision.moves},
        numbers=(plan.calls_before, plan.calls_after, plan.call_s, plan.saved_s, plan.eq3_s),
        pays=plan.worth_it,
    )


def of_record(record: ReplacementRecord, old_GLE: np.ndarray, new_GLE: np.ndarray, scale: float = 1.0) -> Eq4:
    """From a record of a decision, and what was really held before and after.

    Args:
        scale: of the horizon.
    """
    kinds = (("copy", new_GLE & ~old_GLE), ("drop", old_GLE & ~new_GLE))
    calls = (record.calls_before * scale, record.calls_after * scale)
    return Eq4(
        moves={(kind, layer, expert, g) for kind, which in kinds for g, layer, expert in np.argwhere(which).tolist()},
        numbers=(*calls, record.call_s, record.saved_s * scale, record.eq3_s),
        pays=record.worth_it,
    )


def by_stream(planner: str, call_s: float) -> Eq4:
    """A reactive stream, before its second batch."""
    batch = (Demand(spec=SPEC, cluster=CLUSTER, tokens_GLE=served()), ())
    costs = ReplacementCosts(latency=unit_latency(CLUSTER), call_s=call_s)
    replanner = Replanner(planner=planner, always=True)
    (_, first), (placed_GLE, decision) = follow("past", [batch, batch], begun(), costs, replanner)
    assert first is None and decision is not None and (placed_GLE == decision.placed_GLE).all()
    return of_decision(decision)


def by_simulator(planner: str, call_s: float) -> Eq4:
    """A tick after each server has served one request."""
    network = make_network(CLUSTER, SPEC.hidden_size * 2)
    machines = SimulatedMachines(
        spec=SPEC,
        cluster=CLUSTER,
        network=network,
        computing=GpuSeconds(name="test", dense=[0.0] * 99, expert=[0.0] * 99),
        bytes_per_token=SPEC.hidden_size * 2,
    )
    decisions = PlacementDecisions(
        "past",
        InForce(spec=SPEC, cluster=CLUSTER, placed_GLE=begun()),
        ReplacementCosts(latency=unit_latency(CLUSTER), call_s=call_s),
        Replanner(planner=planner, always=True),
        SimulationOptions(),
    )
    control = SimulatedReplacement(decisions)
    engine = EventLoop(machines, Routing(CLUSTER, network, begun()), [])
    for server in range(SERVERS):
        rows_TS = routes(server)
        route = route_of(SPEC, rows_TS[: TOKENS // 2], rows_TS[TOKENS // 2 :])
        control.on_finished(SimulatedRequest(number=server, gpu=server, route=route, arrived_s=0.0))
    before = holdings(engine.routing)
    control.on_tick(engine)
    engine.run()
    (record,) = decisions.records
    return of_record(record, before, holdings(engine.routing))


def holdings(routing: Routing) -> np.ndarray:
    """The experts that each GPU computes for its own tokens."""
    placed_GLE = np.zeros((SERVERS, SPEC.num_layers, SPEC.num_experts), bool)
    for g in range(SERVERS):
        for layer in range(SPEC.num_layers):
            placed_GLE[g, layer] = [routing.near[g][layer][expert] == g for expert in range(SPEC.num_experts)]
    return placed_GLE


class Reporting(DrawnWorker):
    """Counts the history evenly over the interval, so that every part of it is like the whole."""

    pair_s = 0.0

    def stats(self) -> WorkerStats:
        return WorkerStats(
            server=self.server,
            seconds=INTERVAL_S / 4,
            tokens_LE=served()[self.server] / 4,
            local_pairs=1,
            remote_pairs=1,
            expert_s=self.pair_s,
            expert_pairs=int(self.pair_s > 0),
            call_s={0: self.call_s + MEAN_S * (self.pair_s > 0)},
            calls={0: 1},
            call_pairs={0: 1},
        )


def first_decision(
    planner: str, call_s: float, decide: str, pair_s: Sequence[float] = (0.0,) * SERVERS
) -> tuple[ReplacementRecord, np.ndarray, list[str]]:
    """The scheduler's first decision, carried out by workers; the placement after it, and its narration.

    Args:
        pair_s: seconds of computing a pair on each server.
    """
    workers: dict[int, DrawnWorker] = {}
    odds_LE = np.ones((SPEC.num_layers, SPEC.num_experts))
    for n in range(SERVERS):
        worker = Reporting(n, SPEC, set(places_of(begun()[n])), ROOM, odds_LE, workers, call_s=call_s)
        worker.pair_s = pair_s[n]
    table = Table(SPEC, workers)
    options = SchedulerOptions(
        planner=planner, decide=decide, interval_s=INTERVAL_S, poll_s=INTERVAL_S / 4, half_life_s=0.0
    )
    said: list[str] = []
    scheduler = Scheduler(SPEC, CLUSTER, options, narrate=said.append)
    now_s = 0.0
    while not scheduler.history.decisions or scheduler.migrating:
        now_s += max(1e-3, scheduler.tick(table, now_s))
    return scheduler.history.decisions[0], as_array(SPEC, table.held()), said


def by_edge(planner: str, call_s: float) -> Eq4:
    """The first decision of an edge cluster's scheduler."""
    record, held_GLE, _ = first_decision(planner, call_s, "always")
    # The scheduler extrapolates the rate that it saw to its own horizon; the others count what they saw.
    return of_record(record, begun(), held_GLE, SERVERS * TOKENS / record.horizon_tokens)


def by_ranks(planner: str, call_s: float) -> Eq4:
    """The head of ranks between two batches."""
    control = BatchReplacement("reactive", SPEC, CLUSTER, planner_name=planner, always=True)
    control.saw(served())
    byte_s = call_s / (2 * 2 * SPEC.hidden_size)
    costs = BatchCosts(row_s=1.0, byte_s_GG=byte_s, row_bytes=2.0 * SPEC.hidden_size, move_bytes_s=1e5)
    decision = control.decide([], begun(), costs)
    assert decision is not None
    return of_decision(decision)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("call_s", CALL_S)
@pytest.mark.parametrize("caller", [by_simulator, by_edge, by_ranks])
def test_all_callers_decide_alike(planner: str, call_s: float, caller: Callable[[str, float], Eq4]) -> None:
    expected, found = by_stream(planner, call_s), caller(planner, call_s)
    assert expected.moves and found.moves == expected.moves
    assert found.numbers == pytest.approx(expected.numbers, rel=1e-9)
    assert found.pays == expected.pays
    if planner == "prism_exact":  # the optimum of Eq. 2
        assert expected.pays == (call_s == 1.0)


@pytest.mark.parametrize("call_s", CALL_S)
@pytest.mark.parametrize("decide", ["eq4", "latency", "always"])
def test_edge_servers_price_computing_as_plan_migrate_does(call_s: float, decide: str) -> None:
    record, held_GLE, said = first_decision("prism_exact", call_s, decide, PAIR_S)
    best_GLE = first_decision("prism_exact", call_s, "always", PAIR_S)[1]
    demand = Demand(spec=SPEC, cluster=CLUSTER, tokens_GLE=served())
    measured = linear_latency(CLUSTER, MEAN_S, call_s / 2, 1.0, "by hand")  # to another server and back
    measured = replace(measured, speed_G=tuple(MEAN_S / own_s for own_s in PAIR_S))
    old, new = (make_plan(SPEC, CLUSTER, placed_GLE) for placed_GLE in (begun(), best_GLE))
    horizon = record.horizon_tokens
    planned = plan_migration(old, new, demand, horizon_tokens=horizon, call_s=call_s, latency=measured)
    both = planned.step_before_s, planned.step_after_s
    assert (record.step_before_s, record.step_after_s) == pytest.approx(both) and min(both) > 0
    pays = {"eq4": record.saved_s > record.cost_s, "latency": both[0] - both[1] > record.cost_s, "always": True}
    assert record.made == pays[decide] == (held_GLE != begun()).any()
    assert pays["latency"] != pays["eq4"] or call_s == 1.0  # with cheap calls the slow server alone is worth it
    told = f"T_comp + T_comm {both[0]:,.1f} s before, {both[1]:,.1f} s after"
    calls, steps = f"{record.saved_s:,.1f} s of remote calls", f"{both[0] - both[1]:,.1f} s of T_comp"
    gain = steps if decide == "latency" else calls
    assert any(told in line and gain in line for line in said) == record.made


def test_edge_servers_decide_by_calls_until_computing_is_measured() -> None:
    record, _, said = first_decision("prism_exact", 1.0, "latency")
    assert record.made and record.step_before_s is None
    assert any(f"{record.saved_s:,.1f} s of remote calls saved" in line and "unknown" in line for line in said)


def test_computing_and_calls_by_hand() -> None:
    """Two servers, the first of half the speed: each expert where its users are, instead of where they are not."""
    spec = make_spec(1, 4, 1)
    cluster = make_cluster([[3], [3]], slot_bytes=spec.slot_bytes, link_bytes_s=1e5)
    tokens_GLE = np.array([[[10.0, 0.0, 30.0, 0.0]], [[0.0, 20.0, 0.0, 5.0]]])
    old_GLE = np.array([[[True, True, False, False]], [[False, False, True, True]]])
    new_GLE = np.array([[[True, False, True, False]], [[False, True, False, True]]])
    latency = replace(linear_latency(cluster, 0.5, 0.25, 1.0, "by hand"), speed_G=(0.5, 1.0))
    decision = decide(
        Observed(tokens_GLE=tokens_GLE, horizon_tokens=2 * tokens_GLE.sum()),
        InForce(spec=spec, cluster=cluster, placed_GLE=old_GLE),
        ReplacementCosts(latency=latency, call_s=0.5),
        Replanner(planner="prism_exact", weighs="steps"),
        new_GLE,
    )
    # Before: 10 + 20 tokens at 1 s on the first, 30 + 5 at 0.5 s on the second; 30 and 20 tokens go there and back.
    before_s = 30 * 1.0 + 2 * 30 * 0.25
    after_s = 40 * 1.0  # the first computes 10 + 30, and nothing is sent
    plan = decision.migration
    assert (plan.step_before_s, plan.step_after_s) == (2 * before_s, 2 * after_s)
    assert (decision.gain_s, decision.gain_of) == (2 * (before_s - after_s), "T_comp + T_comm")
    assert plan.saved_s == 2 * 0.5 * 50  # Eq. 4 counts the calls of both


@pytest.mark.parametrize("planner", PLANNERS)
def test_eq_4_by_hand(planner: str) -> None:
    """Remote calls counted token by token, and both sides multiplied out."""
    costs = ReplacementCosts(latency=unit_latency(CLUSTER), call_s=0.25)
    observed = Observed(tokens_GLE=served(), horizon_tokens=2.0 * SERVERS * TOKENS)
    decision = decide(
        observed, InForce(spec=SPEC, cluster=CLUSTER, placed_GLE=begun()), costs, Replanner(planner=planner)
    )

    def calls(placed_GLE: np.ndarray) -> int:
        return sum(
            not placed_GLE[server, layer, expert]
            for server in range(SERVERS)
            for token in routes(server)
            for layer in range(SPEC.num_layers)
            for expert in token[2 * layer : 2 * layer + 2]
        )

    plan, new_GLE = decision.migration, decision.placed_GLE
    assert (plan.calls_before, plan.calls_after) == pytest.approx((2 * calls(begun()), 2 * calls(new_GLE)))
    assert decision.gain_s == pytest.approx(2 * 0.25 * (calls(begun()) - calls(new_GLE)))
    # Every expert comes over a link of 100 kB/s, one after the other; Eq. 3 has the GPUs' own rate of 12 GB/s.
    assert decision.cost_s == pytest.approx(decision.copies * SPEC.slot_bytes / 1e5)
    assert plan.eq3_s == pytest.approx(decision.copies * SPEC.slot_bytes / 12e9)
    assert decision.made == plan.worth_it == (decision.gain_s > decision.cost_s)
    printed = decide(
        observed,
        InForce(spec=SPEC, cluster=CLUSTER, placed_GLE=begun()),
        costs,
        Replanner(planner=planner, weighs="printed"),
    )
    changed = int((begun() ^ new_GLE).sum())  # Eq. 3 charges dropped experts too
    assert printed.cost_s == plan.printed_s == pytest.approx(changed * SPEC.slot_bytes / 12e9)
    assert printed.made == (decision.gain_s > plan.printed_s)


def test_a_full_cluster_says_that_experts_have_no_room_on_their_way() -> None:
    """Two servers swap experts; without a free slot and without memory of hosts neither can begin."""
    spec = make_spec(1, 4, 1)
    old_GLE = np.array([[[True, True, False, False]], [[False, False, True, True]]])
    tokens_GLE = np.where(old_GLE, 0.0, 10.0)  # each wants what the other has

    def reach(room: int) -> Decision:
        cluster = make_cluster([[room], [room]], slot_bytes=spec.slot_bytes)
        bare = replace(cluster, servers=tuple(replace(one, host_memory_bytes=0) for one in cluster.servers))
        in_force = InForce(spec=spec, cluster=bare, placed_GLE=old_GLE)
        costs = ReplacementCosts(latency=unit_latency(bare), call_s=1.0)
        return decide(
            Observed(tokens_GLE=tokens_GLE, horizon_tokens=100.0), in_force, costs, Replanner(planner="prism_exact")
        )

    with refused(CapacityError, "stage", "expert"):
        reach(2)
    decision = reach(3)
    held_GLE = old_GLE.copy()
    for move in decision.moves:
        held_GLE[move.gpu, *move.place] = move.kind == "copy"
        assert held_GLE.any(axis=0).all() and (held_GLE.sum(axis=(1, 2)) <= 3).all()
    assert (held_GLE == decision.placed_GLE).all() and decision.made
    assert (decision.placed_GLE >= ~old_GLE).all()  # what each wants


def test_a_stream_stays_with_what_is_in_force_where_a_decision_is_against_moving() -> None:
    batch = (Demand(spec=SPEC, cluster=CLUSTER, tokens_GLE=served()), ())
    costs = ReplacementCosts(latency=unit_latency(CLUSTER), call_s=0.0)
    for placed_GLE, decision in follow("queue", [batch, batch], begun(), costs, Replanner(planner="prism_exact")):
        assert decision is not None and decision.moves and not decision.made
        assert (placed_GLE == begun()).all()
