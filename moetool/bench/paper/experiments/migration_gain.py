"""Gain of migration when the workload changes: Prism's Figure 7, simulated."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from moetool import config
from moetool.bench.paper.experiments.edge_servers import edge_cluster, over_time, simulated
from moetool.bench.paper.verdict import Curve, Found
from moetool.bench.paper.workbench import Workbench
from moetool.simulation.simulate import read_world, simulate
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.simulation_options import SimulationOptions

WAYS = ("with migration", "without")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment; fields of the same name are those of `moetool.bench.paper.experiments.edge_servers`.

    Attributes:
        mode: who places.
        before: prompt sets, one a server, that the first placement is made from.
        servers: those that come; of given traces each server gets the next one's before.
        replan_s: how often it may migrate.
    """

    servers: Mapping[str, int]
    before: tuple[str, ...]
    memory: float = 0.3
    mbps: float = 500.0
    mode: str = "prism"
    arrivals: str = "poisson:10s"
    replan_s: float = 300.0
    measure: Literal["latency", "local"] = "latency"
    requests: float = 1.0
    simulation: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)


def run(stage: Workbench, options: Options) -> Found:
    """Serve the same requests from the same placement, once with re-placing and once without.

    Source: Prism § IV-B, Figure 7. The paper goes from MultiData to BIG-bench under way; here the placement that is in
    force at the beginning is the one made for the other requests, and one kind comes.
    """
    traces = stage.by_server(tuple(options.servers))
    names = list(traces)
    if stage.given:
        before = {name: traces[names[(place + 1) % len(names)]] for place, name in enumerate(names)}
    else:
        before = dict(zip(names, stage.by_server(options.before).values(), strict=True))
    cluster = edge_cluster(traces[names[0]].spec, names, options.servers, options.memory, options.mbps)
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    costs = config.parse(AssumedCosts, options.costs, "costs")
    count = max(1, round(options.requests * stage.sizes.requests))
    values: dict[str, list[float]] = {way: [] for way in WAYS}
    curves: dict[str, list[Curve]] = {way: [] for way in WAYS}
    for seed in stage.seeds:
        for way, replan_s in zip(WAYS, (options.replan_s, 0.0), strict=True):
            chosen = replace(base, seed=seed, replan_s=replan_s)
            world = replace(read_world(traces, cluster, chosen), history=read_world(before, cluster, chosen).history)
            make = partial(simulate, world, options.mode, options.arrivals, count, chosen, costs=costs)
            found = stage.once(f"migration {replace(options, measure='latency')} {seed} {way}", make)
            values[way].append(found.mean_s if options.measure == "latency" else found.local)
            curves[way].append(over_time(found))
    return simulated(options.measure, values, curves, stage.on(list(traces.values())), len(cluster.servers))
