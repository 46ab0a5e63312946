"""Expert offloading on each server against calls between servers: Prism's Table I.

Offloading servers run on the assumed machine, each with its own pool; requests queue for their server, or for the first
free one. Calls are simulated at the same compute costs, on the same requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from moetool.base import config
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.assumed_machine import AssumedMachine
from moetool.bench.paper.experiments.edge_servers import EdgeOptions, edge_cluster
from moetool.bench.paper.experiments.policies import SYNCHRONOUS
from moetool.bench.paper.named_machine import changed, simulated_costs
from moetool.bench.paper.queueing import mean_by_server, serve_in_turn
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from moetool.costing.pricing import Prices
from moetool.costing.timeline import Timeline
from moetool.placement.demand import held_out, planned_share
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.simulate import read_world, simulate, sized
from moetool.simulation.simulation_options import SimulationOptions
from moetool.trace.reader import Trace

ALONE, BALANCED, TOGETHER = "offloading", "offloading, redirected", "calling each other"
POLICY = "moe_infinity"

LINKS = True

Forwards = Sequence[tuple[ForwardInfo, Sequence[GateEvent]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EdgeOptions):
    """Options of the experiment; arrivals follow from `load`.

    Attributes:
        load: mean utilization of servers that offload alone; it sets the mean gap of Poisson arrivals.
        warm: first requests of each server's trace, which fill an offloading server's pool before the measurement.
    """

    memory: float = 0.7
    load: float = 0.35
    warm: int = 3


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Measure the mean latency of the same held-out requests in the three modes.

    Source: Prism § II-B, Table I. An offloading server has the memory of all its GPUs and serves one request at a time,
    as MoE-Infinity does; a redirected request meets the pool of the server that computes it. For exponential service
    times and one request per 10 s, the paper's latencies imply utilizations of 48, 32 and 24 %, which `load` averages.

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
        requests = [read_requests(traces[name], options.warm, base.split) for name in names]
        count = max(1, round(options.requests * bench.sizes.requests))
        rng = np.random.default_rng(seed)
        work = [
            (one.at_s, one.server, requests[one.server][1][rng.integers(len(requests[one.server][1]))])
            for one in read_arrivals("poisson:1s", list(range(len(names))), count, rng)
        ]
        machine = changed(bench.machine, options.costs)
        alone, redirected = (
            [OffloadingServer(spec, min(1.0, options.memory * len(one.gpus)), machine) for one in cluster.servers]
            for _ in range(2)
        )
        for servers in (alone, redirected):
            for server, (first, _) in zip(servers, requests, strict=True):
                for forwards in first:
                    server.serve(forwards)
        taken = [alone[server].serve(forwards) for _, server, forwards in work]
        gaps_s.append(float(np.mean(taken)) / options.load)
        arrivals = f"poisson:{gaps_s[-1]:.6f}s"
        own = [(gaps_s[-1] * at_s, server, seconds) for (at_s, server, _), seconds in zip(work, taken, strict=True)]
        served = serve_in_turn(own, len(names), lambda _, seconds: seconds)
        samples.add(ALONE, mean_by_server(served)[-1])
        work = [(gaps_s[-1] * at_s, server, forwards) for at_s, server, forwards in work]
        served = serve_in_turn(work, len(names), partial(_serve_on, redirected), redirect=True)
        samples.add(BALANCED, mean_by_server(served)[-1])
        world = read_world(traces, cluster, replace(base, seed=seed))
        calling = simulate(world, "redundant", arrivals, count, replace(base, seed=seed), costs=costs)
        samples.add(TOGETHER, np.mean([one.latency_s for one in calling.served]))
    on = f"one request per {np.mean(gaps_s):.2g} s and server; on the assumed machine"
    return samples.found("mean latency per request", "s", on, traces=samples.independent)


class OffloadingServer:
    """A server that offloads experts, with a pool of its own, whichever requests it serves.

    Args:
        share: experts that its pool holds, as a share of all.
    """

    def __init__(self, spec: ModelSpec, share: float, machine: AssumedMachine) -> None:
        policy = build_policy(POLICY, spec, {}, int(share * spec.total_experts))
        profile, options = machine.profile(spec)
        prices = Prices(profile, spec, replace(options, synchronous=POLICY in SYNCHRONOUS))
        self._residency, self._timeline = Residency(policy), Timeline(prices, policy=policy)
        self._served = 0

    def serve(self, forwards: Forwards) -> float:
        """Return the seconds of a request."""
        began, request = self._timeline.now, self._served
        self._served += 1
        for recorded, events in forwards:
            info = replace(recorded, request_T=(request,) * len(recorded.request_T))
            self._timeline.begin_forward(info, self._residency.begin_forward(info))
            for event in events:
                own = replace(event, forward=info)
                self._timeline.event(own, self._residency.event(own))
            self._residency.end_forward(info)
            self._timeline.end_forward(info)
        self._residency.end_request(request)
        return (self._timeline.now - began) / 1e9


def _serve_on(servers: Sequence[OffloadingServer], server: int, forwards: Forwards) -> float:
    return servers[server].serve(forwards)


def read_requests(trace: Trace, warm: int, split: float) -> tuple[list[Forwards], list[Forwards]]:
    """Return the forwards of each of the first requests, and of each later held-out one.

    Raises:
        CannotTestError: there is none.
    """
    drawn, requests = held_out(planned_share(split)), dict[int, list[tuple[ForwardInfo, Sequence[GateEvent]]]]()
    for info, events in trace.forwards(sequential=True):
        requests.setdefault(info.request_T[0], []).append((info, events))
    kept: list[Forwards] = [each for place, each in enumerate(requests.values()) if place >= warm and drawn("", place)]
    if not kept:
        raise CannotTestError(
            f"{trace.path} has {len(requests)} requests, too few to leave out {warm} and hold out some"
        )
    return list[Forwards](requests.values())[:warm], kept
