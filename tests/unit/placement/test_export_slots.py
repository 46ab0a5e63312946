"""Decisions for other engines: counts and profiles without a cluster, and placements that engines can take."""

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from pydantic import BaseModel
from typer.testing import CliRunner

from moetool.base import plugins
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import Cluster, Gpu, Server
from moetool.cli.main import app
from moetool.placement.demand import read_demand
from moetool.placement.latency import unit_latency
from moetool.placement.plan import PlacementPlan
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


def engine_source(package: str, release: str, path: str) -> Path:
    """A file of an engine's package, whose dependencies need not be installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"no {package} on PYTHONPATH: unpack {release} of PyPI there, without dependencies")
    return Path(found.submodule_search_locations[0]) / path


def engine_module(source: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, source.stem, module)
    spec.loader.exec_module(module)
    return module


def exported(trace: Trace, engine: str, out: Path) -> PlacementPlan:
    """A plan of three slots of each layer on eight GPUs, and its file."""
    machines = make_cluster([[4 * 3] * 2] * 4, slot_bytes=trace.spec.slot_bytes)
    plan, _ = plan_placement({"s0": trace}, machines, "eplb", {}, setting=Setting(engine=engine, slots_per_gpu=3))
    plugins.load("export", engine).write_plan(plan, out, 6)
    return plan


def test_sglangs_own_loader_reads_its_file(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sglang.srt.eplb.expert_location` itself; its dispatch is `nearest`."""
    source = engine_source("sglang", "sglang==0.5.23", "srt/eplb/expert_location.py")
    plan = exported(trace, "sglang", tmp_path / "s.json")
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
    theirs = engine_module(source, monkeypatch)
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


def test_vllm_ascends_own_loader_reads_its_file(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`vllm_ascend.eplb.core.eplb_utils` itself, with each rank's map of experts on the CPU."""
    source = engine_source("vllm_ascend", "vllm-ascend==0.23.0.post1", "eplb/core/eplb_utils.py")
    plan = exported(trace, "vllm_ascend", tmp_path / "a.json")
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    manager, log = ModuleType("vllm.model_executor.layers.fused_moe.expert_map_manager"), ModuleType("vllm.logger")
    manager.determine_expert_map = log.logger = None  # type: ignore[attr-defined]  # of models without a map
    monkeypatch.setitem(sys.modules, manager.__name__, manager)
    monkeypatch.setitem(sys.modules, log.__name__, log)
    monkeypatch.setattr(torch.Tensor, "npu", lambda tensor: tensor, raising=False)
    theirs = engine_module(source, monkeypatch)
    config = SimpleNamespace(expert_map_path=str(tmp_path / "a.json"), dynamic_eplb=False, num_redundant_experts=8)
    for layer, gpus in enumerate(plan.experts_LG):
        for rank, experts in enumerate(gpus):
            moe = SimpleNamespace(num_experts=16, ep_size=8, ep_rank=rank)
            _, local_E, slot_E, redundant = theirs.init_eplb_config(config, layer, moe)
            assert redundant == 8
            assert {expert for expert in range(16) if local_E[expert] >= 0} == set(experts)
            assert all(expert in gpus[int(slot_E[expert]) // 3] for expert in range(16))


def test_tensorrt_llms_file_has_the_schema_of_its_source(trace: Trace, tmp_path: Path) -> None:
    """`MoeLoadBalancerConfig` of tensorrt_llm/llmapi/llm_args.py (0004396) and its checks."""

    class MoeLoadBalancerConfig(BaseModel, extra="forbid"):
        num_slots: int | None = None
        initial_global_assignments: dict[int, list[int]] | None = None
        layer_updates_per_iter: int = 0

    plan = exported(trace, "tensorrt_llm", tmp_path / "t.yaml")
    config = MoeLoadBalancerConfig(**yaml.safe_load((tmp_path / "t.yaml").read_text()))
    assert config.num_slots == 24 and config.layer_updates_per_iter == 0
    assert config.initial_global_assignments is not None
    assert list(config.initial_global_assignments) == list(trace.spec.layer_ids_L)
    for gpus, slots in zip(plan.experts_LG, config.initial_global_assignments.values(), strict=True):
        assert [tuple(sorted(slots[start : start + 3])) for start in range(0, config.num_slots, 3)] == list(gpus)
        assert set(slots) == set(range(16))


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
