"""Clusters, placement plans, migrations and exports: saved, loaded, checked, refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import Cluster, Link
from moetool.placement.cluster_file import load_cluster
from moetool.placement.comparison import compare, verdict
from moetool.placement.decide import plan_migration
from moetool.placement.demand import planned_share, read_demand
from moetool.placement.engine_slots import equal_slots
from moetool.placement.exports import ktransformers, sglang, tensorrt_llm, vllm_ascend
from moetool.placement.migration import order_moves, windows
from moetool.placement.plan import MigrationPlan, Move, PlacementPlan, experts_of
from moetool.placement.planner import place
from moetool.placement.planners.director import Options
from moetool.placement.planning import Setting, open_traces, plan_placement, score_plan
from moetool.placement.scoring import remote_call_s
from moetool.trace.reader import Trace
from tests.clusters import make_cluster, make_problem
from tests.refusals import refused
from tests.synthetic import make_spec, write_trace

CLUSTER = """
link_bytes_s = "62.5MB"
link_latency_s = 0.001
[[servers]]
name = "clinic"
host_memory_bytes = "4GiB"
[[servers.gpus]]
memory_bytes = "13KB"
reserved_bytes = 4000
count = 2
[[servers]]
name = "lab"
[[servers.gpus]]
memory_bytes = 24000
[[links]]
between = ["lab", "clinic"]
bytes_s = 1e6
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return load_cluster(tmp_path / "cluster.toml")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    folder = tmp_path_factory.mktemp("traces")
    return {
        name: write_trace(folder / name, make_spec(), num_requests=6, seed=seed)
        for seed, name in enumerate(["clinic", "lab"])
    }


def test_a_cluster_is_read_with_units_counts_and_links(cluster: Cluster) -> None:
    assert cluster.slots_G(1000) == (9, 9, 24)
    assert cluster.server_G == (0, 0, 1)
    assert cluster.link(0, 1) == (1e6, 0.0)
    assert cluster.link(1, 0) == (1e6, 0.0)
    assert cluster.link(0, 0) == (20e9, 0.0)
    assert cluster.servers[0].host_memory_bytes == 4 << 30
    assert replace(cluster, links=()).link(0, 1) == (62.5e6, 0.001)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[[servers]]", "[[machines]]", "servers: Input should be a valid tuple"),
        ('memory_bytes = 24000', "", "servers.1.gpus.0.memory_bytes: Field required"),
        ('memory_bytes = 24000', "memory_bytes = -1", "gpus.0.memory_bytes: found -1, expected 1 or more"),
        ("reserved_bytes = 4000", "reserved_bytes = 40000", "found 40,000, expected at most 13,000"),
        ("[[servers.gpus]]\nmemory_bytes = 24000", "gpus = []", "gpus: found none of lab, expected at least one"),
        ('name = "lab"', 'name = "clinic"', "servers.name: found clinic twice"),
        ('"lab", "clinic"', '"lab", "moon"', "links.0.between: found moon, expected two of the servers clinic, lab"),
        ('"lab", "clinic"', '"lab", "lab"', "links.0.between: found lab twice"),
        ("bytes_s = 1e6", "bytes_s = nan", "links.0.bytes_s: found nan"),
        ("link_latency_s = 0.001", "link_latency_s = -1", "link_latency_s: found -1"),
        ('"62.5MB"', '"fast"', "link_bytes_s: 'fast' is not a speed"),
        ("count = 2", "count = 0", "count: found 0, expected 1 to"),
        ("count = 2", "count = ", "is not valid TOML"),
        ("reserved_bytes", "reserve_bytes", "reserve"),
    ],
)  # fmt: skip
def test_a_wrong_cluster_is_refused_by_field(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    assert old in CLUSTER
    path.write_text(CLUSTER.replace(old, new))
    with pytest.raises(UsageError, match=message) as caught:
        load_cluster(path)
    assert "\n" not in str(caught.value)


def test_all_wrong_fields_of_a_cluster_are_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = CLUSTER.replace('"62.5MB"', '"fast"').replace("count = 2", "count = 0").replace("24000", '"16 pounds"')
    path.write_text(text.replace("reserved_bytes", "reserve_bytes"))
    with refused(
        UsageError, "link_bytes_s: 'fast'", "servers.1.gpus.0.memory_bytes: '16 pounds'", "found 0", "reserve_bytes"
    ):
        load_cluster(path)


def test_a_number_of_gpus_and_their_memory_is_one_server() -> None:
    (server,) = load_cluster(Path("8x80GB")).servers
    assert [gpu.memory_bytes for gpu in server.gpus] == [80 * 10**9] * 8
    for wrong, field in (("0x80GB", "count: found 0"), ("8x80lb", "memory_bytes: '80lb'")):
        with refused(UsageError, wrong, field):
            load_cluster(Path(wrong))


def test_no_cluster_file_is_refused(tmp_path: Path) -> None:
    with refused(UsageError, "none.toml", "8x80GB"):
        load_cluster(tmp_path / "none.toml")
    (tmp_path / "empty.toml").write_text("servers = []")
    with refused(UsageError, "empty.toml", "servers", 0, 1):
        load_cluster(tmp_path / "empty.toml")


def test_a_plan_says_what_it_was_made_from_and_comes_back(
    cluster: Cluster, traces: dict[str, Trace], tmp_path: Path
) -> None:
    plan, rows = plan_placement(traces, cluster, "prism_exact", {}, split=0.5)
    assert [row.requests for row in rows] == ["planned on", "held out"]
    assert plan.lower_bound == pytest.approx(plan.value)
    assert [reference.requests for reference in plan.traces] == [3, 3]
    assert plan.split == 0.5
    assert plan.traces[0].sha256 == traces["clinic"].sha256
    plan.save(tmp_path / "plan.json")
    assert PlacementPlan.load(tmp_path / "plan.json") == plan
    assert (experts_of(plan.placed_GLE)) == plan.experts_LG
    row = score_plan(plan, traces)
    assert row.score.remote_calls > 0
    assert row.requests == "partly planned on"


def test_a_plan_holds_every_option_and_a_bound_of_all_placements(cluster: Cluster, traces: dict[str, Trace]) -> None:
    plan, _ = plan_placement(traces, cluster, "smartmoe", {})
    director, _ = plan_placement(traces, cluster, "director", {"kicks": 1})
    assert director.options == asdict(Options(kicks=1))
    assert plan.lower_bound is not None
    assert plan.lower_bound == director.lower_bound <= director.value < plan.value


def test_scores_are_of_the_requests_and_starts_that_they_say(
    cluster: Cluster, traces: dict[str, Trace], tmp_path: Path
) -> None:
    plan, rows = plan_placement(traces, cluster, "uniform", {}, setting=Setting(starts="first"))
    again = score_plan(plan, traces)
    assert again.requests == "planned on"
    assert again.score == rows[0].score != score_plan(plan, traces, setting=Setting()).score
    other = write_trace(tmp_path / "other", make_spec(), num_requests=6, seed=7)
    assert score_plan(plan, {"lab": other}).requests == "other"
    assert score_plan(plan, {**traces, "lab": other}).requests == "partly planned on"
    with refused(UsageError, "lab"):
        compare(traces, cluster, ["uniform"], unseen=traces["lab"])


def test_held_out_requests_are_the_others(cluster: Cluster, traces: dict[str, Trace]) -> None:
    uses = planned_share(0.5)
    assert [uses("", place) for place in range(6)] == [False, True] * 3
    halves = [read_demand(traces, cluster, how).tokens_GLE.sum() for how in (uses, lambda s, p: not uses(s, p))]
    assert sum(halves) == read_demand(traces, cluster).tokens_GLE.sum()
    with refused(UsageError, "share", "0", "1"):
        planned_share(0.0)


def test_tokens_start_where_they_are_told(cluster: Cluster, traces: dict[str, Trace]) -> None:
    first = read_demand(traces, cluster, starts="first").tokens_GLE
    assert first[0].any() and not first[1].any()
    chance = [read_demand(traces, cluster, starts="random", seed=3).tokens_GLE for _ in range(2)]
    assert (chance[0] == chance[1]).all()
    assert first[0].sum() == read_demand(traces, cluster).tokens_GLE[:2].sum()
    with refused(UsageError, "--set starts", "last"):
        read_demand(traces, cluster, starts="last")


def test_planners_side_by_side(cluster: Cluster, traces: dict[str, Trace], tmp_path: Path) -> None:
    unseen = write_trace(tmp_path / "unseen", make_spec(), num_requests=2, seed=9)
    rows = compare(traces, cluster, ["uniform", "prism_exact"], unseen=unseen, setting=Setting(routing="even")).rows
    assert [(row.planner, row.requests) for row in rows] == [
        (name, requests)
        for name in ("uniform", "prism_exact")
        for requests in ("planned on", "held out", "unseen task")
    ]
    assert rows[3].score.remote_calls <= rows[0].score.remote_calls
    for requests, line in zip(("planned on", "held out", "unseen task"), verdict(rows), strict=True):
        mine = {row.planner: row.score for row in rows if row.requests == requests}
        assert len({found.latency_bound for found in mine.values()}) == 1
        best, other = sorted(mine, key=lambda name: mine[name].latency)
        assert mine[best].latency_gap <= mine[other].latency_gap
        assert line.startswith(f"{requests}: {best} has the least T_comp + T_comm ({other} ")
        fewest = min(mine, key=lambda name: mine[name].messages)
        assert line.endswith(f"{fewest} sends the fewest messages ({mine[fewest].messages:.2f})")
    alike = [replace(row, score=replace(row.score, local=1.0, messages=0.0)) for row in rows]
    assert not any("locally" in line or "messages" in line for line in verdict(alike))
    assert json.dumps([row.to_json() for row in rows])


def test_wrong_traces_are_refused(cluster: Cluster, traces: dict[str, Trace], tmp_path: Path) -> None:
    other = write_trace(tmp_path / "other", make_spec(4), num_requests=2)
    with refused(MismatchError, "lab", "clinic", "synthetic"):
        plan_placement({**traces, "lab": other}, cluster, "uniform", {})
    with refused(UsageError, "moon", "--trace", "clinic, lab"):
        plan_placement({"moon": other}, cluster, "uniform", {})
    with refused(UsageError, "no trace"):
        plan_placement({}, cluster, "uniform", {})
    plan, _ = plan_placement(traces, cluster, "uniform", {})
    with refused(MismatchError, "synthetic"):
        score_plan(plan, {"lab": other})
    for given in ("lab", "=x", "lab="):
        with refused(UsageError, "--trace SERVER=DIR"):
            open_traces([given])
    with refused(UsageError, "lab"):
        open_traces([f"lab={other.path}", f"lab={other.path}"])


def test_damaged_plans_are_refused_in_one_line(cluster: Cluster, traces: dict[str, Trace], tmp_path: Path) -> None:
    plan, _ = plan_placement(traces, cluster, "uniform", {})
    values = json.loads(json.dumps(plan.to_json()))
    path = tmp_path / "plan.json"

    def refuses(error: type[Exception], *facts: object, **changes: Any) -> None:
        path.write_text(json.dumps({**values, **changes}))
        with refused(error, path, *facts):
            PlacementPlan.load(path)

    experts = values["experts_LG"]
    refuses(MismatchError, "cache_plan", "placement_plan", kind="cache_plan")
    refuses(MismatchError, "experts_LG", "2 layers", "3 layers", experts_LG=experts[:2])
    refuses(MismatchError, "experts_LG.0", "expert 0", experts_LG=[[[1], [2], [3]], *experts[1:]])
    refuses(MismatchError, "experts_LG.0", "0 to 7", experts_LG=[[[1, 1], [2], [3]], *experts[1:]])
    small = json.loads(json.dumps(values["cluster"]))
    small["servers"][1]["gpus"][0]["memory_bytes"] = 1000
    refuses(CapacityError, "GPU 2", "1,000", cluster=small)
    refuses(MismatchError, "seed", seed="x")
    spec = {**values["spec"], "expert_bytes_L": [1000, 1000]}
    refuses(MismatchError, "spec.expert_bytes_L", 2, 3, spec=spec)
    path.write_text("[]")
    with refused(MismatchError, path):
        PlacementPlan.load(path)
    with refused(UsageError, "no plan"):
        PlacementPlan.load(tmp_path / "none.json")


def _follow(plan: PlacementPlan, moves: list[Move] | tuple[Move, ...], old_GLE: np.ndarray) -> np.ndarray:
    """Carry moves out, checking coverage and memory after each."""
    held_GLE, staged = old_GLE.copy(), set()
    capacity_G = np.array([gpu.expert_bytes for gpu in plan.cluster.gpus])
    exists_LE = old_GLE.any(axis=0)
    for move in moves:
        place = (move.layer, move.expert)
        if move.kind == "copy":
            source_holds = place in staged if move.source < 0 else held_GLE[move.source][place]
            assert source_holds and not held_GLE[move.gpu][place]
            held_GLE[move.gpu][place] = True
        elif move.kind == "unstage":
            staged.remove(place)
        else:
            assert held_GLE[move.gpu][place]
            held_GLE[move.gpu][place] = False
            if move.kind == "stage":
                staged.add(place)
        covered_LE = held_GLE.any(axis=0)
        for layer, expert in staged:
            covered_LE[layer, expert] = True
        assert (covered_LE == exists_LE).all()
        assert (held_GLE.sum(axis=2) @ np.array(plan.spec.expert_bytes_L) <= capacity_G).all()
    assert not staged
    return held_GLE


@pytest.mark.parametrize("slots", [[[8, 8], [8]], [[9, 8], [8]], [[16], [12, 10]]])
@pytest.mark.parametrize("seed", range(3))
def test_moves_keep_coverage_and_memory_at_every_step(slots: list[list[int]], seed: int) -> None:
    spec = make_spec(3, 8)
    problem = make_problem(spec, make_cluster(slots), seed=seed)
    old_GLE, new_GLE = (place(name, problem) for name in ("redundant", "prism_exact"))
    plan = _plan(problem.spec, problem.cluster, new_GLE)
    for a, b in ((old_GLE, new_GLE), (new_GLE, old_GLE)):
        moves = order_moves(spec, problem.cluster, a, b)
        assert (_follow(plan, moves, a) == b).all()
        copies = sum(move.kind == "copy" for move in moves)
        assert copies >= (b & ~a).sum()


def test_a_full_cluster_without_host_memory_cannot_swap() -> None:
    spec, cluster = make_spec(1, 2), make_cluster([[1, 1]])
    old_GLE = np.array([[[True, False]], [[False, True]]])
    moves = order_moves(spec, cluster, old_GLE, old_GLE[::-1])
    assert [move.kind for move in moves].count("stage") == 1
    bare = replace(cluster, servers=(replace(cluster.servers[0], host_memory_bytes=0),))
    with refused(CapacityError, "s0", "1,000"):
        order_moves(spec, bare, old_GLE, old_GLE[::-1])


def test_any_host_with_memory_lets_a_full_cluster_swap() -> None:
    spec, cluster = make_spec(1, 2), make_cluster([[1], [1]])
    first, second = cluster.servers
    half = replace(cluster, servers=(replace(first, host_memory_bytes=0), second))
    old_GLE = np.array([[[True, False]], [[False, True]]])
    moves = order_moves(spec, half, old_GLE, old_GLE[::-1])
    assert (moves[0].kind, moves[0].gpu) == ("stage", 1)
    assert (_follow(_plan(spec, half, old_GLE), moves, old_GLE) == old_GLE[::-1]).all()


def _plan(spec: Any, cluster: Cluster, placed_GLE: np.ndarray) -> PlacementPlan:
    return PlacementPlan(
        spec=spec, cluster=cluster, planner="made_up", options={}, seed=0, experts_LG=experts_of(placed_GLE),
        starts="round_robin", costs="unit", objective="none", value=0.0, lower_bound=None, traces=(),
        profile_sha256=None, planning_s=0.0,
    )  # fmt: skip


def test_whether_a_migration_pays_is_decided_in_seconds(tmp_path: Path) -> None:
    spec = make_spec(1, 2, top_k=1)
    cluster = make_cluster([[2], [1]], link_bytes_s=1000.0, link_latency_s=0.5)
    tokens_GLE = np.array([[[6.0, 4.0]], [[0.0, 10.0]]])
    problem = make_problem(spec, cluster, tokens_GLE=tokens_GLE)
    old = _plan(spec, cluster, np.array([[[True, True]], [[True, False]]]))
    new = _plan(spec, cluster, np.array([[[True, True]], [[False, True]]]))
    assert remote_call_s(cluster, 2 * spec.hidden_size) == pytest.approx(2 * (0.5 + 8 / 1000))
    made = plan_migration(old, new, problem.demand, horizon_tokens=40, window_s=0.4)
    assert (made.calls_before, made.calls_after) == (20.0, 0.0)  # 10 of the 20 tokens counted, doubled
    assert made.saved_s == pytest.approx(20 * 1.016)
    assert made.eq3_s == pytest.approx(1000 / 12e9)  # one addition at the GPU's own rate
    assert made.seconds == pytest.approx(0.5 + 1000 / 1000)  # it really comes over the link
    assert made.windows == 4
    assert made.worth_it
    back = plan_migration(new, old, problem.demand, horizon_tokens=40)
    assert not back.worth_it
    made.save(tmp_path / "m.json")
    assert MigrationPlan.load(tmp_path / "m.json") == made
    made.check(spec)
    other = replace(new, cluster=replace(cluster, links=(Link(between=("s0", "s1"), bytes_s=1.0),)))
    with refused(MismatchError, "different", "clusters"):
        plan_migration(old, other, problem.demand, horizon_tokens=1)
    roomy = replace(cluster, servers=make_cluster([[9], [9]]).servers)
    old, new = (replace(new, cluster=equal_slots(roomy, spec, None, slots)[0]) for slots in (1, 2))
    with refused(MismatchError, "--slots-per-gpu 1", "2"):
        plan_migration(old, new, problem.demand)


def test_a_migration_over_a_slow_link_pays_only_if_it_saves_the_way_too() -> None:
    spec, cluster = make_spec(1, 2, top_k=1), make_cluster([[2], [1]], link_bytes_s=1000.0, link_latency_s=0.5)
    problem = make_problem(spec, cluster, tokens_GLE=np.array([[[6.0, 4.0]], [[0.0, 10.0]]]))
    old = _plan(spec, cluster, np.array([[[True, True]], [[True, False]]]))
    new = _plan(spec, cluster, np.array([[[True, True]], [[False, True]]]))
    made = plan_migration(old, new, problem.demand, horizon_tokens=2)
    assert made.eq3_s < made.saved_s < made.seconds  # 1.0 s saved, 1.5 s on the link
    assert not made.worth_it


def test_a_remote_call_of_a_model_of_unknown_width_must_be_measured() -> None:
    spec = replace(make_spec(1, 2, top_k=1), hidden_size=0)
    problem = make_problem(spec, make_cluster([[2], [2]]))
    plan = _plan(spec, problem.cluster, place("uniform", problem))
    with refused(MismatchError, "synthetic", "--call-ms"):
        plan_migration(plan, plan, problem.demand, horizon_tokens=1)
    assert plan_migration(plan, plan, problem.demand, horizon_tokens=1, call_s=0.01).call_s == 0.01


def test_moves_are_packed_into_compute_phases() -> None:
    assert windows([0.4, 0.0, 0.4, 0.3], 1.0) == 2
    assert windows([2.5, 0.4], 1.0) == 3
    assert windows([], 1.0) == 0


@pytest.fixture
def equal_plan(tmp_path: Path) -> PlacementPlan:
    spec = replace(make_spec(2, 4), layer_ids_L=(1, 3))
    problem = make_problem(spec, make_cluster([[6], [6]]))
    return _plan(spec, problem.cluster, place("eplb", problem))


def test_sglang_gets_every_hidden_layer_and_no_other_key(equal_plan: PlacementPlan, tmp_path: Path) -> None:
    lines = sglang.write_plan(equal_plan, tmp_path / "s.json", 5)
    values = json.loads((tmp_path / "s.json").read_text())
    assert set(values) == {"physical_to_logical_map"}
    rows = values["physical_to_logical_map"]
    assert [len(row) for row in rows] == [6] * 5
    assert all(set(row) == {0, 1, 2, 3} for row in rows)
    assert rows[0] == rows[2] == rows[4] == [0, 1, 2, 3, 0, 1]
    for row, gpus in zip((rows[1], rows[3]), equal_plan.experts_LG, strict=True):
        assert (tuple(row[:3]), tuple(row[3:])) == gpus
    assert "--ep-num-redundant-experts 2" in lines[0]
    assert json.loads((tmp_path / "s.json.about.json").read_text())["planner"] == "made_up"
    with refused(UsageError, "num_hidden_layers", 3):
        sglang.write_plan(equal_plan, tmp_path / "s.json", 3)


def test_tensorrt_llm_gets_absolute_layers(equal_plan: PlacementPlan, tmp_path: Path) -> None:
    tensorrt_llm.write_plan(equal_plan, tmp_path / "t.yaml")
    import yaml

    values = yaml.safe_load((tmp_path / "t.yaml").read_text())
    assert (values["num_slots"], values["layer_updates_per_iter"]) == (6, 0)
    flat = {layer: [*a, *b] for layer, (a, b) in zip((1, 3), equal_plan.experts_LG, strict=True)}
    assert values["initial_global_assignments"] == flat


def test_vllm_ascend_gets_moe_layers_with_equal_devices(equal_plan: PlacementPlan, tmp_path: Path) -> None:
    vllm_ascend.write_plan(equal_plan, tmp_path / "v.json")
    values = json.loads((tmp_path / "v.json").read_text())
    assert values["moe_layer_count"] == 2
    assert [layer["layer_id"] for layer in values["layer_list"]] == [0, 1]
    for layer in values["layer_list"]:
        assert layer["device_count"] == 2
        for device in layer["device_list"]:
            assert len(set(device["device_expert"])) == len(device["device_expert"]) == 3


def test_ktransformers_gets_the_counts_behind_the_plan(
    cluster: Cluster, traces: dict[str, Trace], tmp_path: Path
) -> None:
    import torch

    plan, _ = plan_placement(traces, cluster, "prism", {})
    ktransformers.write_plan(plan, tmp_path / "k.pt", 4)
    count_LE = torch.load(tmp_path / "k.pt", weights_only=True)["logical_count"]
    assert count_LE.shape == (4, 8)
    assert (count_LE[:3].numpy() == read_demand(traces, cluster).tokens_LE).all()
    assert not count_LE[3].any()
    half, _ = plan_placement(traces, cluster, "prism", {}, split=0.5)
    ktransformers.write_plan(half, tmp_path / "k.pt")
    count_LE = torch.load(tmp_path / "k.pt", weights_only=True)["logical_count"]
    assert (count_LE.numpy() == read_demand(traces, cluster, planned_share(0.5)).tokens_LE).all()
    with refused(MismatchError, 3, 6):
        ktransformers.write_plan(replace(half, split=1.0), tmp_path / "k.pt")
    with refused(MismatchError, "no trace"):
        ktransformers.write_plan(replace(plan, traces=()), tmp_path / "k.pt")


@pytest.mark.parametrize("writer", [sglang, tensorrt_llm, vllm_ascend])
def test_unequal_slots_are_refused_with_the_place(writer: Any, tmp_path: Path) -> None:
    problem = make_problem(make_spec(2, 4), make_cluster([[5], [6]]))
    plan = _plan(problem.spec, problem.cluster, place("prism_exact", problem))
    with refused(MismatchError, "equal", "slots", "rank"):
        writer.write_plan(plan, tmp_path / "x")
    assert not (tmp_path / "x").exists()
