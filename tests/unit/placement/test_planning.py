"""Plans from counts: where tokens start, which windows are planned on, and how many slots an engine gets."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moetool.base import durable
from moetool.base.errors import CapacityError, UsageError
from moetool.base.types import Cluster
from moetool.placement.bounds import memory_bound, work_bound
from moetool.placement.comparison import CURRENT, compare, migration_lines
from moetool.placement.demand import WHOLE, planned_share, read_demand
from moetool.placement.engine_slots import initial_map, knee, slot_choices, wanted_slots
from moetool.placement.latency import unit_latency
from moetool.placement.planner import Problem, filled, place
from moetool.placement.planning import Setting, Workload, open_traces, plan_placement
from moetool.placement.scoring import score
from moetool.trace.expert_counts import Counted, ExpertCounts, write_counts
from tests.clusters import make_cluster, make_problem
from tests.refusals import refused
from tests.synthetic import make_spec

SPEC = make_spec(2, 16)
BYTES = SPEC.slot_bytes


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> ExpertCounts:
    """Eight windows; in the last two, other experts are hot."""
    rng = np.random.default_rng(0)
    counts_WLE = rng.integers(1, 20, (8, 2, 16))
    counts_WLE[:6, :, :2] += 200
    counts_WLE[6:, :, 2:4] += 200
    path = tmp_path_factory.mktemp("planning") / "counts"
    with durable.staged_directory(path) as folder:
        write_counts(folder, Counted(spec=SPEC, counts_WLE=counts_WLE), {})
    return ExpertCounts(path)


def _machines(slots: int, servers: int = 2, gpus: int = 4) -> Cluster:
    return make_cluster([[slots * SPEC.num_layers] * gpus] * servers, slot_bytes=BYTES)


def test_tokens_of_counts_start_evenly(counts: ExpertCounts) -> None:
    cluster = _machines(4)
    tokens_LE = counts.counts_WLE.sum(axis=0)
    whole: dict[str, Workload] = {WHOLE: counts}
    assert read_demand(whole, cluster).tokens_GLE == pytest.approx(np.tile(tokens_LE / 8, (8, 1, 1)))
    one = read_demand({"s1": counts}, cluster).tokens_GLE
    assert not one[:4].any() and one[4:] == pytest.approx(np.tile(tokens_LE / 4, (4, 1, 1)))
    assert (read_demand({"s1": counts}, cluster, starts="first").tokens_GLE[4] == tokens_LE).all()
    assert open_traces([str(counts.path)], whole=True).keys() == {WHOLE}
    with refused(UsageError, "--trace", "whole cluster"):
        read_demand({WHOLE: counts, "s0": counts}, cluster)


def test_counts_are_planned_on_the_past_and_judged_on_the_future(counts: ExpertCounts) -> None:
    uses = planned_share(0.75, {"s0": counts})
    assert [uses("s0", place) for place in range(8)] == [True] * 6 + [False] * 2
    assert sum(map(planned_share(0.01, {"s0": counts}), ["s0"] * 8, range(8))) == 1
    assert sum(map(planned_share(0.99, {"s0": counts}), ["s0"] * 8, range(8))) == 7
    plan, rows = plan_placement({WHOLE: counts}, _machines(3), "eplb", {}, split=0.75)
    assert plan.traces[0].requests == 6
    past, future = (row.score.balancedness["sglang"] for row in rows)
    assert past > future + 0.1  # other experts are hot


def test_slots_that_are_no_multiple_of_the_layers(counts: ExpertCounts) -> None:
    cluster = make_cluster([[9] * 2] * 2, slot_bytes=BYTES)  # of the two layers, a GPU has five and four slots
    found = compare({WHOLE: counts}, cluster, ["director", "eplb"], options={"eplb": {"slots_per_gpu": 5}})
    assert {row.planner for row in found.rows} == {"director"}
    assert len(found.left_out) == 1 and "slots_per_gpu" in found.left_out[0]


def test_one_window_cannot_be_split(counts: ExpertCounts, tmp_path: Path) -> None:
    with durable.staged_directory(tmp_path / "one") as folder:
        write_counts(folder, Counted(spec=SPEC, counts_WLE=counts.counts_WLE[:1]), {})
    with refused(UsageError, tmp_path / "one", "one window", "--split 1"):
        plan_placement({WHOLE: ExpertCounts(tmp_path / "one")}, _machines(4), "eplb", {}, split=0.5)


def test_an_engine_gets_the_slots_at_the_knee_and_its_own_routing(counts: ExpertCounts) -> None:
    machines = _machines(16)  # room for every expert on every GPU
    plan, rows = plan_placement({WHOLE: counts}, machines, "eplb", {}, setting=Setting(engine="vllm"))
    slots = {len(experts) for gpus in plan.experts_LG for experts in gpus}
    choices = slot_choices(SPEC, 8, 16, counts.counts_WLE.sum(axis=0))
    assert slots == {knee(choices)} and 2 <= knee(choices) < 16
    best = max(choice.balance for choice in choices)
    assert all(choice.balance < 0.95 * best for choice in choices if choice.slots < knee(choices))
    assert rows[0].score.balancedness["sglang"] == pytest.approx(rows[0].score.even_balancedness)
    assert (Setting(engine="sglang").copies, Setting(engine="sglang", routing="even").copies) == ("nearest", "even")
    asked, _ = plan_placement({WHOLE: counts}, machines, "eplb", {}, setting=Setting(slots_per_gpu=3))
    redundant, _ = plan_placement({WHOLE: counts}, machines, "eplb", {}, setting=Setting(redundant=8))
    assert asked.experts_LG == redundant.experts_LG
    assert {len(experts) for gpus in asked.experts_LG for experts in gpus} == {3}


def test_slots_that_do_not_fit_are_refused(counts: ExpertCounts) -> None:
    with refused(CapacityError, 5, 4, "--slots-per-gpu"):
        plan_placement({WHOLE: counts}, _machines(4), "eplb", {}, setting=Setting(slots_per_gpu=5))
    with refused(UsageError, "--redundant", 3, 8, 16):
        wanted_slots(SPEC, 8, None, 3)
    with refused(UsageError, "--slots-per-gpu", 17, 16):
        wanted_slots(SPEC, 8, 17, None)
    with refused(UsageError, "--slots-per-gpu", "--redundant"):
        wanted_slots(SPEC, 8, 2, 0)
    with refused(UsageError, "--profile", "--machine"):
        Setting(profile=Path("p.json"), machine="h100-node")


def test_a_comparison_prices_the_migration_from_the_engines_map(counts: ExpertCounts, tmp_path: Path) -> None:
    with durable.staged_directory(tmp_path / "six") as folder:
        write_counts(folder, Counted(spec=SPEC, counts_WLE=counts.counts_WLE[:6]), {})
    counts = ExpertCounts(tmp_path / "six")  # the same experts stay hot
    names = ["uniform", "eplb_global", "eplb_hierarchical", "prism_exact", "director", "redundant"]
    setting = Setting(engine="sglang", slots_per_gpu=3, machine="h100-node")
    found = compare({WHOLE: counts}, _machines(4, 1, 8), names, split=0.5, setting=setting)
    rows = {row.planner: row.score for row in found.rows if row.requests == "held out"}
    assert list(rows) == [CURRENT, *names[:-1]] and "redundant" in found.left_out[0]
    assert len({score.latency_bound for score in rows.values()}) == 1
    assert found.best == min(rows, key=lambda name: rows[name].latency)
    assert found.plan is not None and found.migration is not None
    old_GLE, new_GLE = initial_map(SPEC, 8, 3), found.plan.placed_GLE
    assert sum(move.kind == "copy" for move in found.migration.moves) >= int((new_GLE & ~old_GLE).sum())
    before, after = rows[CURRENT].latency, rows[found.best].latency
    assert (found.migration.step_before_s, found.migration.step_after_s) == (
        pytest.approx(before),
        pytest.approx(after),
    )
    pays = found.migration.pays_after_tokens
    assert pays is not None
    assert pays == pytest.approx(found.migration.parallel_s / (before - after) * found.migration.horizon_tokens)
    assert f"{pays:,.0f} tokens" in " ".join(migration_lines(found.migration, found.window_tokens))
    again = compare({WHOLE: counts}, _machines(4, 1, 8), ["uniform"], split=0.5, current=found.plan, setting=setting)
    assert again.best == CURRENT and again.plan is None and again.migration is None
    setting = Setting(engine="sglang", machine="h100-node")  # the slots are those of the plan in force
    again = compare({WHOLE: counts}, _machines(6, 1, 8), ["uniform"], split=0.5, current=found.plan, setting=setting)
    assert again.inputs.slots == 3


@pytest.mark.parametrize("routing", ["nearest", "even"])
def test_director_with_copies_is_no_worse_than_its_starts(counts: ExpertCounts, routing: str) -> None:
    machines = _machines(3, 4, 4)
    demand = read_demand({WHOLE: counts}, machines)
    spec = make_spec(10, 32)
    rng = np.random.default_rng(1)
    cluster = make_cluster([[30] * 4] * 4, slot_bytes=spec.slot_bytes, link_bytes_s=1e9)
    tokens_GLE = np.tile(rng.gamma(1.0, 1.0, (10, 32)) * 100, (16, 1, 1))
    assert demand.tokens_GLE.size <= 4096 < tokens_GLE.size  # both ways through director
    one = make_spec(1, 64)
    narrow = make_cluster([[5] * 8] * 2, slot_bytes=one.slot_bytes, link_bytes_s=1e9)
    engine = make_problem(one, narrow, tokens_GLE=np.tile(rng.gamma(0.5, 1.0, (1, 64)) * 100, (16, 1, 1)))
    for problem in (
        Problem(demand=demand, latency=unit_latency(machines), equal_slots=3, routing=routing),
        make_problem(spec, cluster, tokens_GLE=tokens_GLE),
        replace(engine, equal_slots=5, routing=routing),  # director leaves slots free, which the engine fills
    ):
        found = {}
        for name in ("director", "eplb_global", "prism_exact"):
            placed_GLE, slots = place(name, problem), problem.equal_slots
            placed_GLE = filled(problem, placed_GLE, slots, name) if slots else placed_GLE
            found[name] = score(problem, placed_GLE, bounds=False, routing=problem.routing)
        assert found["director"].latency <= min(each.latency for each in found.values()) * (1 + 1e-9)


def test_director_copies_everything_where_memory_allows() -> None:
    """Copies one at a time do not lower the larger of two equal directions of traffic."""
    problem = make_problem(SPEC, make_cluster([[32], [32]], slot_bytes=BYTES))
    found, whole = (
        score(problem, placed_GLE, bounds=False)
        for placed_GLE in (place("director", problem), np.ones((2, 2, 16), bool))
    )
    assert found.latency <= whole.latency * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_no_placement_in_memory_is_below_its_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = make_spec(1, 4)
    cluster = make_cluster([[2, 2], [3]], link_bytes_s=1e8)
    problem = make_problem(spec, cluster, seed=seed)
    bound = memory_bound(problem)
    assert work_bound(problem) < bound
    for _ in range(200):
        placed_GLE = np.zeros((3, 1, 4), bool)
        for g, room in enumerate((2, 2, 3)):
            placed_GLE[g, 0, rng.permutation(4)[:room]] = True
        if placed_GLE.any(axis=0).all():
            for routing in ("nearest", "even"):
                assert score(problem, placed_GLE, bounds=False, routing=routing).latency >= bound - 1e-9


def test_equal_use_of_servers_needs_no_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, cluster = make_spec(2, 8), make_cluster([[6], [6], [6]])
    tokens_GLE = np.tile(np.random.default_rng(0).random((2, 8)) * 100, (3, 1, 1))
    nearly_GLE = tokens_GLE * np.array([1.0, 1.0, 1.0 + 1e-9])[:, None, None]  # by the programme
    exact = score(
        make_problem(spec, cluster, tokens_GLE=nearly_GLE), np.ones((3, 2, 8), bool), bounds=True
    ).remote_bound
    monkeypatch.setattr("moetool.placement.least_remote.minimise", None)
    problem = make_problem(spec, cluster, tokens_GLE=tokens_GLE)
    found = score(problem, place("prism_exact", problem), bounds=True)
    assert found.remote_calls == pytest.approx(found.remote_bound) and found.remote_bound == pytest.approx(exact)
