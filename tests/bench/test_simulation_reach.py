"""The simulator's reach, and the papers' figures in it: trends and orders over five seeds; seconds are never asserted.

python -m pytest tests/bench/test_simulation_reach.py -m '' -s
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from moetool.formats._import import import_trace
from moetool.simulation.simulate import ModeInputs, read_world, simulate
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.sweep import resize, sweep
from moetool.trace.reader import Trace
from moetool.types import Cluster, Gpu, ModelSpec, Server
from tests.published_routes import DEEPSEEK, TASKS, by_task, needs_routes

SEEDS = range(5)
T_95 = 2.776  # Student's t, four degrees of freedom

pytestmark = needs_routes


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    return by_task(tmp_path_factory.mktemp("routes"))


def _edge(spec: ModelSpec, bits_s: float = 500e6) -> Cluster:
    """Prism § IV-A: three servers of 1, 1 and 2 GPUs, each with 30 % of the experts' memory."""
    gpu = Gpu(memory_bytes=round(0.3 * spec.total_experts) * spec.slot_bytes)
    servers = tuple(Server(name=task, gpus=(gpu,) * count) for task, count in zip(TASKS, (1, 1, 2), strict=True))
    return Cluster(servers=servers, link_bytes_s=bits_s / 8, link_latency_s=0.0005)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half of its 95 % confidence interval."""
    return float(np.mean(values)), T_95 * float(np.std(values, ddof=1)) / len(values) ** 0.5


@pytest.mark.parametrize("mode", ["uniform", "prism"])
def test_ten_thousand_requests_on_256_gpus(traces: dict[str, Trace], mode: str) -> None:
    large = resize(_edge(traces["law"].spec), 256)
    named = {server.name: traces[server.name.partition("#")[0]] for server in large.servers}
    wall, cpu = time.perf_counter(), time.process_time()
    found = simulate(read_world(named, large, SimulationOptions()), mode, "poisson:10s", 10_000, SimulationOptions())
    print(
        f"{mode}: {time.perf_counter() - wall:.1f} s ({time.process_time() - cpu:.1f} CPU), mean latency "
        f"{found.mean_s:.3f} s, {found.local:.1%} local"
    )
    assert len(found.served) == 10_000
    assert sum(one.new_tokens == 20 for one in found.served) > 9_000


def test_methods_as_in_prism_table_2(traces: dict[str, Trace]) -> None:
    modes = ["uniform", "redundant", "smartmoe", "eplb", "prism", "prism_exact"]
    swept = {"planner": modes, "seed": [str(seed) for seed in SEEDS]}
    runs = sweep(traces, _edge(traces["law"].spec), swept, "uniform", "poisson:10s", 100)
    means = {mode: [found.mean_s for at, found in runs if at["planner"] == mode] for mode in modes}
    for mode in modes:
        print(f"{mode}: mean latency {_interval(means[mode])[0]:.3f} ± {_interval(means[mode])[1]:.3f} s")
    for worse in ("uniform", "redundant", "smartmoe", "eplb"):
        gain, half = _interval(np.subtract(means[worse], means["prism"]).tolist())
        assert gain > half, worse  # paired by seed: the same requests at the same times


def test_trends_of_prism_figure_8a(traces: dict[str, Trace]) -> None:
    """Latency falls as GPUs are added; more so where requests come faster. Prism prints 9 % (15 s) to 19 % (8 s)."""
    swept = {"gpus": ["4", "32"], "gap": ["8s", "15s"], "seed": [str(seed) for seed in SEEDS]}
    runs = sweep(traces, _edge(traces["law"].spec), swept, "prism", "poisson:10s", 80)
    found = {(at["gpus"], at["gap"], at["seed"]): run.mean_s for at, run in runs}
    falls = {}
    for gap in swept["gap"]:
        for gpus in swept["gpus"]:
            mean, half = _interval([found[gpus, gap, seed] for seed in swept["seed"]])
            print(f"gap {gap}, {gpus} GPUs: mean latency {mean:.3f} ± {half:.3f} s")
        falls[gap] = [1 - found["32", gap, seed] / found["4", gap, seed] for seed in swept["seed"]]
        mean, half = _interval(falls[gap])
        print(f"gap {gap}: from 4 to 32 GPUs {mean:.1%} ± {half:.1%} less")
        assert mean > half
    assert np.mean(falls["8s"]) > np.mean(falls["15s"])


def test_trends_of_prism_figure_8b(traces: dict[str, Trace]) -> None:
    """Latency falls with bandwidth; less so with more GPUs. Prism prints 55 % at 4 GPUs and 35 % at 256."""
    rates, seeds = ["100Mbps", "500Mbps", "1000Mbps"], [str(seed) for seed in SEEDS]
    swept = {"gpus": ["4", "32"], "bandwidth": rates, "seed": seeds}
    runs = sweep(traces, _edge(traces["law"].spec), swept, "prism", "poisson:15s", 40)
    found = {(at["gpus"], at["bandwidth"], at["seed"]): run.mean_s for at, run in runs}
    falls = {}
    for gpus in swept["gpus"]:
        for slow, fast in pairwise(rates):
            gain, half = _interval([found[gpus, slow, seed] - found[gpus, fast, seed] for seed in seeds])
            print(f"{gpus} GPUs: {slow} -> {fast}: {gain:.3f} ± {half:.3f} s less")
            assert gain > half
        falls[gpus] = [1 - found[gpus, rates[-1], seed] / found[gpus, rates[0], seed] for seed in seeds]
        print(f"{gpus} GPUs: {_interval(falls[gpus])[0]:.1%} ± {_interval(falls[gpus])[1]:.1%} less in all")
    gain, half = _interval(np.subtract(falls["4"], falls["32"]).tolist())
    assert gain > half


def test_migration_as_in_prism_figure_7(traces: dict[str, Trace]) -> None:
    """From a placement made for other tasks than those that come, migrating beats staying."""
    spec = traces["law"].spec
    cluster = _edge(spec)
    turned = dict(zip(TASKS, (traces[task] for task in (*TASKS[1:], TASKS[0])), strict=True))
    local, latency = {}, {}
    for replan_s in (0.0, 300.0):
        runs = []
        for seed in SEEDS:
            options = SimulationOptions(seed=seed, replan_s=replan_s)
            here, other = (read_world(given, cluster, options) for given in (traces, turned))
            runs.append(simulate(replace(here, history=other.history), "prism", "poisson:7s", 400, options))
        local[replan_s] = [run.local for run in runs]
        latency[replan_s] = [run.mean_s for run in runs]
        print(
            f"every {replan_s} s: {_interval(local[replan_s])[0]:.1%} local, mean latency "
            f"{_interval(latency[replan_s])[0]:.3f} ± {_interval(latency[replan_s])[1]:.3f} s; first decisions "
            f"{[(round(m.saved_s), round(m.cost_s), m.made) for m in runs[0].migrations[:3]]}"
        )
    gain, half = _interval(np.subtract(latency[0.0], latency[300.0]).tolist())
    assert gain > half


@pytest.mark.parametrize("lookahead", ["true", "predicted"])
def test_the_order_of_modes_in_director_figure_7(tmp_path: Path, lookahead: str) -> None:
    """Rounds of one request a GPU, tasks mixed, on eight GPUs of one node; no copies, computing dominates.

    A GPU has eight experts of each layer, and room for half as many more while they move. Proactive is below offline,
    offline below reactive, and that below uniform, whether migration is free or overlaps with serving.
    """
    files = [DEEPSEEK / f"{task}.parquet" for task in TASKS]
    trace = Trace(import_trace(files, "topk_parquet", tmp_path / "mixed", tokens_as="prefill").out)
    gpu = Gpu(memory_bytes=12 * trace.spec.num_layers * trace.spec.slot_bytes, host_to_device_bytes_s=400e9)
    node = Cluster(servers=(Server(name="node", gpus=(gpu,) * 8, gpu_link_bytes_s=200e9),))
    costs = AssumedCosts(dense_s=60e-6, dense_token_s=0.5e-6, expert_s=15e-6, expert_token_s=8e-6)
    quick = {"kicks": 0, "relaxation": 0, "c_max": 8, "replicas": False}
    runs = [("uniform", "free"), ("director-offline", "free")]
    runs += [(f"director-{mode}", how) for how in ("free", "pipelined") for mode in ("reactive", "proactive")]
    means: dict[tuple[str, str], list[float]] = {run: [] for run in runs}
    for seed in SEEDS:
        options = SimulationOptions(
            seed=seed, admission="rounds", prompt_tokens=64, decode_tokens=8, lookahead=lookahead
        )
        world = read_world({"node": trace}, node, options)
        for mode, how in runs:
            given = {} if mode == "uniform" else quick
            chosen = replace(options, migrate=how)
            found = simulate(world, mode, "every:100us", 64, chosen, costs=costs, inputs=ModeInputs(options=given))
            means[mode, how].append(found.mean_s)
    for run in runs:
        gains = [1 - a / b for a, b in zip(means[run], means[runs[0]], strict=True)]
        print(
            f"{lookahead}: {' '.join(run)}: mean latency {_interval(means[run])[0] * 1e3:.1f} ± "
            f"{_interval(means[run])[1] * 1e3:.1f} ms, {_interval(gains)[0]:.1%} ± {_interval(gains)[1]:.1%} less than "
            f"uniform"
        )
    uniform, offline = runs[:2]
    for how in ("free", "pipelined"):
        order = [("director-proactive", how), offline, ("director-reactive", how), uniform]
        for better, worse in pairwise(order if lookahead == "true" else order[1:]):
            gain, half = _interval(np.subtract(means[worse], means[better]).tolist())
            assert gain > half, (better, worse)
