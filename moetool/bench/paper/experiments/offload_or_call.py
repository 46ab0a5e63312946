"""One server that loads what it lacks, against servers that call each other's experts: Prism's Table I.

Offloading is replayed on the assumed machine, and the requests queue for their server, or for the one that is free
first; calling is simulated with the same arithmetic. The two share arrivals, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moetool import config
from moetool.bench.paper.experiments.edge_servers import edge_cluster
from moetool.bench.paper.queueing import mean_by_server, serve_in_turn
from moetool.bench.paper.verdict import Found
from moetool.bench.paper.workbench import Workbench, requests_of
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.simulate import read_world, simulate
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.simulation_options import SimulationOptions
from moetool.trace.reader import Trace

ALONE, BALANCED, TOGETHER = "offloading", "offloading, redirected", "calling each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment; fields of the same name are those of `moetool.bench.paper.experiments.edge_servers`.

    Attributes:
        policy: how a server offloads.
        placement: where experts are when servers call each other.
    """

    servers: Mapping[str, int]
    memory: float = 0.7
    mbps: float = 500.0
    policy: str = "moe_infinity"
    placement: str = "redundant"
    arrivals: str = "poisson:10s"
    requests: float = 1.0
    simulation: Mapping[str, Any] = field(default_factory=dict)


def run(stage: Workbench, options: Options) -> Found:
    """Mean latency of all requests in the three ways.

    Source: Prism § II-B, Table I. Each server has one GPU's worth of memory a GPU for offloading too, but serves one
    request at a time, as MoE-Infinity does.
    """
    traces = stage.by_server(tuple(options.servers))
    names = list(traces)
    spec = traces[names[0]].spec
    cluster = edge_cluster(spec, names, options.servers, options.memory, options.mbps)
    budgets = [min(1.0, options.memory * len(server.gpus)) for server in cluster.servers]
    machine = stage.machine
    costs = AssumedCosts(
        dense_s=machine.dense_s,
        dense_token_s=machine.dense_token_s,
        expert_s=machine.expert_s,
        expert_token_s=machine.expert_token_s,
    )
    seconds = [
        _offloaded(stage, traces[name], options.policy, share) for name, share in zip(names, budgets, strict=True)
    ]
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    count = max(1, round(options.requests * stage.sizes.requests))
    values: dict[str, list[float]] = {ALONE: [], BALANCED: [], TOGETHER: []}
    for seed in stage.seeds:
        rng = np.random.default_rng(seed)
        coming = read_arrivals(options.arrivals, list(range(len(names))), count, rng)
        work = [(one.at_s, one.server, float(rng.choice(seconds[one.server]))) for one in coming]
        for way, redirect in ((ALONE, False), (BALANCED, True)):
            served = serve_in_turn(work, len(names), redirect=redirect)
            values[way].append(mean_by_server(served)[-1])
        world = read_world(traces, cluster, replace(base, seed=seed))
        together = simulate(world, options.placement, options.arrivals, count, replace(base, seed=seed), costs=costs)
        values[TOGETHER].append(together.mean_s)
    return Found(
        values=values,
        what="mean latency of a request",
        unit="s",
        on=f"{stage.on(list(traces.values()))}; offloading on the assumed machine, calls simulated on it",
    )


def _offloaded(stage: Workbench, trace: Trace, policy: str, share: float) -> list[float]:
    """Seconds of each request on a server that goes through the trace."""
    budget = int(share * trace.spec.total_experts) * trace.spec.slot_bytes
    row = stage.replayed(trace, policy, budget, frozenset(requests_of(trace)))
    return [sum(seconds) for seconds in row.timing.request_s.values()]
