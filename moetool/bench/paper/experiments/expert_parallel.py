"""Batches on a cluster in expert parallelism, under DIRECTOR's modes: its testbed, simulated in rounds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from moetool import config
from moetool.bench.paper.verdict import CannotTestError, Curve, Found
from moetool.bench.paper.workbench import Workbench
from moetool.errors import UsageError
from moetool.placement._planner import quick_options
from moetool.simulation.simulate import ModeInputs, read_world, simulate
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated
from moetool.trace.reader import Trace
from moetool.types import Cluster, Gpu, Server

_WHAT = {
    "latency": "mean latency of a request",
    "throughput": "served",
    "unevenness": "standard deviation of the latency of rounds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """A line of the comparison.

    Attributes:
        mode: who places.
        lookahead, migrate: as of `moetool simulate`.
    """

    mode: str
    lookahead: str = "true"
    migrate: str = "overlap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets that come mixed; the given trace takes their place.
        gpus: sizes of the cluster.
        node: GPUs of a node.
        room: of all GPUs together, as a multiple of the experts.
        gpu_link, node_link: bytes a second between GPUs of a node and between nodes.
        move_s: to move an expert to a GPU, beside what its link takes; 0: no time.
        runs: by name.
        arrivals: as of `moetool simulate`.
        measure: mean `latency`, `throughput` in tokens a second, or `unevenness`, the standard deviation of the
            latency of rounds.
        rounds: of requests, one for each GPU; 0: as many as fit into the sizes' requests.
        simulation, costs: as in `moetool.bench.paper.experiments.edge_servers`.
    """

    data: tuple[str, ...]
    gpus: tuple[int, ...] = (8,)
    node: int = 8
    room: float = 1.25
    gpu_link: float = 200e9
    node_link: float = 25e9
    move_s: float = 0.0
    runs: Mapping[str, ModeRun]
    arrivals: str = "every:100us"
    measure: Literal["latency", "throughput", "unevenness"] = "latency"
    rounds: int = 0
    simulation: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)


def run(stage: Workbench, options: Options) -> Found:
    """Serve rounds of one request a GPU in every mode, over the seeds.

    Source: DIRECTOR § VIII-B and -C. All modes but uniform use one planner with the same effort.
    """
    trace = stage.trace(options.data)
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    costs = config.parse(AssumedCosts, options.costs, "costs")
    values: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    for size in options.gpus:
        cluster = _cluster(trace, size, options)
        count = options.rounds * size or max(size, stage.sizes.requests // size * size)
        names = [server.name for server in cluster.servers]
        for seed in stage.seeds:
            world = read_world(dict.fromkeys(names, trace), cluster, replace(base, seed=seed, admission="rounds"))
            for label, one in options.runs.items():
                make = partial(
                    simulate,
                    world,
                    one.mode,
                    options.arrivals,
                    count,
                    replace(base, seed=seed, admission="rounds", lookahead=one.lookahead, migrate=one.migrate),
                    costs=costs,
                    inputs=ModeInputs(options=quick_options("director") if one.mode.startswith("director") else {}),
                )
                same = replace(options, measure="latency", runs={}, gpus=())
                found = stage.once(f"rounds {same} {size} {seed} {count} {one}", make)
                name = f"{label}, {size} GPUs" if len(options.gpus) > 1 else label
                values.setdefault(name, []).append(_measure(found, options.measure))
                if len(options.gpus) == 1:
                    ends = sorted(_rounds(found))
                    each_ms = tuple(1e3 * seconds for _, seconds in ends)
                    curves.setdefault(name, []).append((tuple(range(1, len(ends) + 1)), each_ms))
    return Found(
        values=values,
        what=_WHAT[options.measure],
        unit="tokens/s" if options.measure == "throughput" else "s",
        on=f"{stage.on([trace])}; rounds of a request a GPU, simulated at assumed costs",
        curves=curves,
        axes=("round", "latency of the round, ms"),
    )


def _cluster(trace: Trace, size: int, options: Options) -> Cluster:
    """Nodes of equal GPUs; the last may have fewer."""
    if size < 2 or options.node < 1:
        raise UsageError(f"{size} GPUs in nodes of {options.node}, expected two GPUs or more in nodes of one or more")
    spec = trace.spec
    slots = int(np.ceil(options.room * spec.total_experts / size))
    move_bytes_s = spec.slot_bytes / options.move_s if options.move_s else 400e9
    gpu = Gpu(memory_bytes=slots * spec.slot_bytes, host_to_device_bytes_s=move_bytes_s)
    servers = tuple(
        Server(name=f"node{n}", gpus=(gpu,) * min(options.node, size - first), gpu_link_bytes_s=options.gpu_link)
        for n, first in enumerate(range(0, size, options.node))
    )
    return Cluster(servers=servers, link_bytes_s=options.node_link, link_latency_s=5e-6)


def _rounds(found: Simulated) -> list[tuple[float, float]]:
    """Start and longest latency of each round in which all GPUs have a request.

    The first to come does not wait for others, so the first round has one request, and the last what is left.
    """
    ends: dict[float, list[float]] = {}
    for one in found.served:
        ends.setdefault(one.started_s, []).append(one.finished_s)
    whole = len(found.utilisation_G)
    return [(began, max(end) - began) for began, end in ends.items() if len(end) == whole]


def _measure(found: Simulated, measure: str) -> float:
    if measure == "latency":
        return found.mean_s
    if measure == "throughput":
        return found.tokens_per_s
    whole = [seconds for _, seconds in _rounds(found)]
    if len(whole) < 2:
        raise CannotTestError(f"{len(whole)} rounds had a request for every GPU, expected two to tell them apart")
    return float(np.std(whole))
