"""Decisions for other engines: counts and profiles without a cluster, and placements that engines can take."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moetool.base import plugins
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import Cluster, Gpu, Server
from moetool.cli.main import app
from moetool.placement.demand import read_demand
from moetool.placement.latency import unit_latency
from moetool.placement.planner import Problem, filled, place
from moetool.placement.planning import Setting, plan_placement
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import synthetic_routes
from tests.clusters import make_cluster
from tests.plans import fixed_parts
from tests.refusals import refused


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("decisions") / "t"
    synthetic_routes.write_trace(path, synthetic_routes.make_spec(4, 16, 2), num_requests=6)
    return Trace(path)


def counts_of(trace: Trace, *, decode: bool = False) -> np.ndarray:
    rows = TokenBatch.concatenate(list(trace.batches()))
    experts = rows.experts_TS[rows.phase_T == 1] if decode else rows.experts_TS
    spec = trace.spec
    layers = experts.reshape(len(experts), spec.num_layers, -1)
    return np.stack([np.bincount(layers[:, i].ravel(), minlength=spec.num_experts) for i in range(spec.num_layers)])


def hot(profile: Path, slots: int) -> dict[int, list[int]]:
    """The experts of each layer that a fork with `--moe-cache-slots` keeps: its reading of a profile, in Python."""
    freq: dict[int, Counter[int]] = {}
    for line in profile.read_text().splitlines():
        pos, layer, *ids = map(int, line.split(","))
        if pos >= 0:
            freq.setdefault(layer, Counter()).update(ids)
    return {
        layer: [e for _, e in sorted((-count, expert) for expert, count in counts.items())][:slots]
        for layer, counts in freq.items()
    }


def hottest(counts_LE: np.ndarray, layers: tuple[int, ...], slots: int) -> dict[int, list[int]]:
    order = np.argsort(-counts_LE, axis=1, kind="stable")
    return {layer: [int(e) for e in order[i][:slots] if counts_LE[i, e]] for i, layer in enumerate(layers)}


def test_a_cache_profile_keeps_the_hottest_experts(trace: Trace, tmp_path: Path) -> None:
    export_trace(trace.path, "llamacpp_moe_profile", tmp_path / "p.csv")
    layers = trace.spec.layer_ids_L
    assert hot(tmp_path / "p.csv", 5) == hottest(counts_of(trace, decode=True), layers, 5)
    # of counts, by rank
    export_trace(trace.path, "sglang_stat", tmp_path / "x.pt")
    import_trace([tmp_path / "x.pt"], None, tmp_path / "c", settings={"model": str(trace.path)})
    export_trace(tmp_path / "c", "llamacpp_moe_profile", tmp_path / "q.csv")
    assert hot(tmp_path / "q.csv", 16) == hottest(counts_of(trace), layers, 16)
    assert all(
        len(set(line.split(",")[2:])) == len(line.split(",")[2:])
        for line in (tmp_path / "q.csv").read_text().splitlines()
    )


def test_ktransformers_gets_counts_without_a_plan(trace: Trace, tmp_path: Path) -> None:
    export_trace(trace.path, "ktransformers", tmp_path / "k.pt", num_hidden_layers=5)
    table = torch.load(tmp_path / "k.pt", weights_only=True)["logical_count"]
    assert table.shape == (5, 16) and not table[4].any()
    assert (table[:4].numpy() == counts_of(trace)).all()


def cluster(*memories: int) -> Cluster:
    return Cluster(servers=tuple(Server(name=f"s{i}", gpus=(Gpu(memory_bytes=m),)) for i, m in enumerate(memories)))


@pytest.mark.parametrize("planner", ["eplb", "director", "uniform"])
@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm", "vllm_ascend"])
def test_a_plan_for_an_engine_can_be_exported(trace: Trace, tmp_path: Path, planner: str, engine: str) -> None:
    size = trace.spec.slot_bytes
    unequal = cluster(4 * 6 * size, 4 * 7 * size + 3, 4 * 6 * size + size)  # 6 slots of each layer on the smallest
    plan, _ = plan_placement({"s0": trace}, unequal, planner, {}, setting=Setting(engine=engine))
    assert {len(set(experts)) for gpus in plan.experts_LG for experts in gpus} == {6}
    plugins.load("export", engine).write_plan(plan, tmp_path / "out", None)


def test_what_an_engine_cannot_take_is_refused_while_planning(trace: Trace) -> None:
    size = trace.spec.slot_bytes
    with refused(CapacityError, 5, 4, 15, 16):
        plan_placement({"s0": trace}, cluster(*[23 * size] * 3), "eplb", {}, setting=Setting(engine="sglang"))
    with refused(UsageError, "sglang"):
        plan_placement({"s0": trace}, cluster(*[32 * size] * 3), "eplb", {}, setting=Setting(engine="sglan"))
    machines = cluster(*[32 * size] * 2)  # 8 slots of each layer
    problem = Problem(demand=read_demand({"s0": trace}, machines), latency=unit_latency(machines))
    placed_GLE = place("uniform", problem)
    assert (filled(problem, placed_GLE, 9, "uniform").sum(axis=2) == 9).all()
    with refused(MismatchError, 8, "layer 0", "GPU 0", 7):
        filled(problem, placed_GLE, 7, "uniform")


def test_sglangs_own_loader_reads_its_file(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sglang.srt.eplb.expert_location` itself, where the package is installed; its dispatch is `nearest`."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        pytest.skip("sglang is not installed")
    source = Path(package.submodule_search_locations[0]) / "srt" / "eplb" / "expert_location.py"
    machines = make_cluster([[4 * 3] * 2] * 4, slot_bytes=trace.spec.slot_bytes)  # 3 slots of each layer
    plan, _ = plan_placement({"s0": trace}, machines, "eplb", {}, setting=Setting(engine="sglang", slots_per_gpu=3))
    plugins.load("export", "sglang").write_plan(plan, tmp_path / "s.json", 6)
    runtime = ModuleType("sglang.srt.runtime_context")
    moe = SimpleNamespace(
        init_expert_location=str(tmp_path / "s.json"),
        ep_num_redundant_experts=8,
        ep_dispatch_algorithm="static",
        ep_join_mode=None,
        moe_a2a_backend="deepep",
    )
    parallel = SimpleNamespace(ep_size=8, nnodes=4, elastic_ep_initial_size=None)
    for name, value in (("exec", SimpleNamespace(moe=moe)), ("parallel", parallel), ("resources", None)):
        setattr(runtime, f"get_{name}", lambda value=value: value)
    elastic = ModuleType("sglang.srt.elastic_ep.elastic_ep")
    elastic.elastic_expanded_world_enabled = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, elastic.__name__, elastic)
    runtime.get_device = lambda: SimpleNamespace(device="cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", runtime)
    spec = importlib.util.spec_from_file_location("expert_location", source)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "expert_location", theirs)
    spec.loader.exec_module(theirs)
    shape = theirs.ModelConfigForExpertLocation(num_layers=6, num_logical_experts=16)
    monkeypatch.setattr(theirs.ModelConfigForExpertLocation, "from_model_config", staticmethod(lambda config: shape))
    placed_GLE, server_G = plan.placed_GLE, np.array(plan.cluster.server_G)
    for rank in range(8):
        read = theirs.compute_initial_expert_location_metadata(None, rank)
        held_LGS = read.physical_to_logical_map.numpy()[: trace.spec.num_layers].reshape(4, 8, 3)
        assert [[tuple(sorted(gpu)) for gpu in layer.tolist()] for layer in held_LGS] == [
            [tuple(gpu) for gpu in layer] for layer in plan.experts_LG
        ]
        to_LE = read.logical_to_rank_dispatch_physical_map.numpy()[: trace.spec.num_layers] // 3
        for (layer, expert), gpu in np.ndenumerate(to_LE):
            near_G = placed_GLE[:, layer, expert] & (server_G == server_G[rank])
            assert placed_GLE[gpu, layer, expert]
            assert gpu == rank if placed_GLE[rank, layer, expert] else near_G[gpu] or not near_G.any()


@pytest.mark.parametrize(("planner", "option"), [("eplb", "slots_per_gpu"), ("director", "c_max")])
def test_an_engine_gets_as_many_slots_as_the_planner_is_told(trace: Trace, planner: str, option: str) -> None:
    machines = cluster(*[4 * 8 * trace.spec.slot_bytes] * 3)  # room for 8 slots of each layer
    plan, _ = plan_placement({"s0": trace}, machines, planner, {option: 6}, setting=Setting(engine="sglang"))
    assert {len(set(experts)) for gpus in plan.experts_LG for experts in gpus} == {6}
    with refused(CapacityError, 5, 15, 16, 6):
        plan_placement({"s0": trace}, machines, planner, {option: 5}, setting=Setting(engine="sglang"))
    with refused(CapacityError, "slots_per_gpu", 9, 8):
        plan_placement({"s0": trace}, machines, "eplb", {"slots_per_gpu": 9}, setting=Setting(engine="sglang"))


def test_vllm_is_refused_with_the_reason(trace: Trace, tmp_path: Path) -> None:
    plan, _ = plan_placement(
        {"s0": trace}, cluster(*[32 * trace.spec.slot_bytes] * 2), "eplb", {}, setting=Setting(engine="vllm")
    )
    plan.save(tmp_path / "plan.json")
    run = CliRunner().invoke(
        app, ["plan", "export", str(tmp_path / "plan.json"), "--format", "vllm", "--out", str(tmp_path / "x")]
    )
    assert isinstance(run.exception, MismatchError) and "reads no initial expert map" in str(run.exception)
    assert not (tmp_path / "x").exists()


def test_override_tensor_moves_whole_layers(trace: Trace, tmp_path: Path) -> None:
    from moetool.tuning.cache_planning import plan_cache

    layer = 16 * trace.spec.slot_bytes

    def plan(num_bytes: int) -> str:
        plan_cache(trace, fixed_parts(trace.spec, num_bytes)).save(tmp_path / "plan.json")
        out = tmp_path / "ot"
        run = CliRunner().invoke(
            app,
            [
                "plan",
                "export",
                str(tmp_path / "plan.json"),
                "--format",
                "llamacpp_override_tensor",
                "--overwrite",
                "--out",
                str(out),
            ],
        )
        if run.exception is not None and not isinstance(run.exception, SystemExit):
            raise run.exception
        return out.read_text()

    assert plan(2 * layer + 1) == "-ngl 99 -ot 'blk\\.(2|3)\\.ffn_.*_exps\\.=CPU'\n"
    with refused(CapacityError, "whole", "layer"):
        plan(layer // 2)
