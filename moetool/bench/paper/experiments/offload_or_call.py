"""Expert offloading on each server against calls between servers: Prism's Table I.

Offloading is replayed on the assumed machine; requests queue for their server, or for the first free one. Calls are
simulated at the same compute costs, on the same requests.
"""

from dataclasses import dataclass, replace

import numpy as np

from moetool.base import config
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.experiments.edge_servers import EdgeOptions, edge_cluster
from moetool.bench.paper.named_machine import changed, simulated_costs
from moetool.bench.paper.queueing import mean_by_server, serve_in_turn
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench, requests_of
from moetool.placement.demand import held_out, planned_share
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.simulate import read_world, simulate, sized
from moetool.simulation.simulation_options import SimulationOptions
from moetool.trace.reader import Trace

ALONE, BALANCED, TOGETHER = "offloading", "offloading, redirected", "calling each other"

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EdgeOptions):
    """Options of the experiment; arrivals follow from `load`.

    Attributes:
        load: mean utilization of servers that offload alone; it sets the mean gap of Poisson arrivals.
        warm: uncounted first requests of each server, which fill an offloading server's pool.
    """

    memory: float = 0.7
    load: float = 0.35
    warm: int = 3


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Measure the mean latency of the same held-out requests in the three modes.

    Source: Prism § II-B, Table I. An offloading server has the memory of all its GPUs and serves one request at a time,
    as MoE-Infinity does. For exponential service times and one request per 10 s, the paper's latencies imply
    utilizations of 48, 32 and 24 %, which `load` averages.

    Raises:
        CannotTestError: a server's trace has no request after the warm-up.
    """
    costs = simulated_costs(changed(bench.machine, options.costs))
    mbps = bench.machine.links * options.mbps
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    samples = Samples(bench)
    gaps_s = []
    for seed in bench.seeds:
        traces = bench.by_server(tuple(options.servers), seed)
        names, spec = list(traces), sized(samples.use(*traces.values()).spec, base)
        cluster = edge_cluster(spec, names, options.servers, options.memory, mbps)
        seconds = [
            _offloaded(bench, traces[server.name], options, min(1.0, options.memory * len(server.gpus)), base.split)
            for server in cluster.servers
        ]
        gaps_s.append(float(np.mean([np.mean(each) for each in seconds])) / options.load)
        arrivals = f"poisson:{gaps_s[-1]:.6f}s"
        first = options.warm * len(names)
        count = first + max(1, round(options.requests * bench.sizes.requests))
        rng = np.random.default_rng(seed)
        coming = read_arrivals(arrivals, list(range(len(names))), count, rng)
        work = [(one.at_s, one.server, float(rng.choice(seconds[one.server]))) for one in coming]
        for way, redirect in ((ALONE, False), (BALANCED, True)):
            served = serve_in_turn(work, len(names), redirect=redirect)
            samples.add(way, mean_by_server(served[first:])[-1])
        world = read_world(traces, cluster, replace(base, seed=seed))
        together = simulate(world, "redundant", arrivals, count, replace(base, seed=seed), costs=costs)
        samples.add(TOGETHER, np.mean([one.latency_s for one in together.served[first:]]))
    on = f"one request per {np.mean(gaps_s):.2g} s and server, without the first {options.warm}; on the assumed machine"
    return samples.found("mean latency per request", "s", on, traces=samples.independent)


def _offloaded(bench: Workbench, trace: Trace, options: Options, share: float, split: float) -> list[float]:
    """Seconds of each held-out request on a server that runs the trace, without the warm-up."""
    budget = int(share * trace.spec.total_experts) * trace.spec.slot_bytes
    row = bench.replayed(trace, "moe_infinity", budget, frozenset(requests_of(trace)))
    drawn = held_out(planned_share(split))
    numbers = [number for number in trace.requests["request"].to_pylist() if number in row.timing.request_s]
    kept = [
        sum(row.timing.request_s[n]) for place, n in enumerate(numbers) if place >= options.warm and drawn("", place)
    ]
    if not kept:
        raise CannotTestError(
            f"{trace.path} has {len(numbers)} requests, too few to leave out {options.warm} and hold out some"
        )
    return kept
