"""Latency by the share of remote experts: Prism's Figure 5, simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moetool.base import config
from moetool.base.tables import percent
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.named_machine import changed, simulated_costs
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.placement.plan import PlacementPlan, bare_plan
from moetool.simulation.simulate import ModeInputs, read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions

LINKS = True
_ARRIVALS = "every:60s"  # so far apart that no request waits for another


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        remote: shares of every layer's experts that only the other server has.
        mbps: megabits per second of the link.
        simulation, costs: see `moetool.bench.paper.experiments.edge_servers`.
    """

    remote: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    mbps: float = 500.0
    simulation: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Two servers of one GPU; requests come to the first, and the experts that it lacks are drawn by the seed.

    Source: Prism, Figure 5; the paper gives only its caption.
    """
    spec = bench.trace(ALL).spec
    gpu = Gpu(memory_bytes=spec.total_experts * spec.slot_bytes)
    servers = tuple(Server(name=name, gpus=(gpu,)) for name in ("here", "there"))
    cluster = Cluster(servers=servers, link_bytes_s=bench.machine.links * options.mbps * 1e6 / 8, link_latency_s=0.0005)
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    costs = simulated_costs(changed(bench.machine, options.costs))
    samples = Samples(bench)
    for seed in bench.seeds:
        trace = samples.use(bench.trace(ALL, fold=seed))
        chosen = replace(base, seed=seed)
        world = read_world({"here": trace}, cluster, chosen)
        for share in options.remote:
            inputs = ModeInputs(plan=_plan(spec, cluster, share, seed))
            count = max(1, bench.sizes.requests // 4)
            found = simulate(world, "uniform", _ARRIVALS, count, chosen, costs=costs, inputs=inputs)
            samples.add(f"{percent(share, '.0f')} remote", found.mean_s)
    shares = [100 * share for share in options.remote]
    samples.sweep("all requests", shares, samples.values.values(), scale=1e3)
    on = "two servers, simulated at assumed costs, without queueing"
    axes = ("experts on the other server, %", "mean latency, ms")
    return samples.found("mean latency per request", "s", on, axes=axes)


def _plan(spec: ModelSpec, cluster: Cluster, share: float, seed: int) -> PlacementPlan:
    """Each layer's experts on the first server, except a share that only the second has."""
    rng = np.random.default_rng(seed)
    placed_GLE = np.zeros((2, spec.num_layers, spec.num_experts), bool)
    for layer, num_experts in enumerate(spec.num_experts_L):
        away = rng.permutation(num_experts)[: round(share * num_experts)]
        placed_GLE[0, layer, :num_experts] = True
        placed_GLE[0, layer, away] = False
        placed_GLE[1, layer, away] = True
    return replace(bare_plan(spec, cluster, placed_GLE, "remote_share", seed), options={"share": share})
