"""Gain of migration when the data changes under way: Prism's Figure 7, simulated."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from moetool.base import config
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.experiments.edge_servers import EdgeOptions, edge_cluster, over_time, simulated
from moetool.bench.paper.named_machine import changed, simulated_costs
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.simulation.simulate import read_world, simulate, sized
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated

WAYS = ("with migration", "without")
BEFORE, AFTER = "before the change", "after it"

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EdgeOptions):
    """Options of the experiment.

    Attributes:
        before: prompt sets, one per server, of the first half of the requests; `servers` has those of the second half.
            With given traces, each server first serves the trace of the next one.
        replan_s: seconds between decisions to migrate.
        measure: `latency`, `local`, or `migrations`, their numbers before and after the change.
    """

    before: tuple[str, ...]
    initial: tuple[str, ...] = ALL
    replan_s: float = 300.0
    measure: Literal["latency", "local", "migrations"] = "latency"


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Serve the same requests once with migration and once without; the data changes half-way.

    Source: Prism § IV-B, Figure 7: 200 MultiData requests per server, then 200 BIG-bench ones, from a placement for
    other data.
    """
    base = config.parse(SimulationOptions, options.simulation, "simulation")
    costs = simulated_costs(changed(bench.machine, options.costs))
    count = max(2, round(options.requests * bench.sizes.requests))
    samples = Samples(bench)
    for seed in bench.seeds:
        later = bench.by_server(tuple(options.servers), seed)
        names = list(later)
        if bench.given:
            first = {name: later[names[(place + 1) % len(names)]] for place, name in enumerate(names)}
        else:
            first = dict(zip(names, bench.by_server(options.before, seed).values(), strict=True))
        samples.use(*first.values(), *later.values())
        initial = dict.fromkeys(names, bench.trace(options.initial, fold=seed))
        spec, mbps = sized(later[names[0]].spec, base), bench.machine.links * options.mbps
        cluster = edge_cluster(spec, names, options.servers, options.memory, mbps)
        for way, replan_s in zip(WAYS, (options.replan_s, 0.0), strict=True):
            chosen = replace(base, seed=seed, replan_s=replan_s)
            world = replace(
                read_world(first, cluster, chosen),
                later=read_world(later, cluster, chosen).sources,
                history=read_world(initial, cluster, chosen).history,
            )
            make = partial(simulate, world, "prism", options.arrivals, count, chosen, costs=costs)
            found = bench.once(f"migration {replace(options, measure='latency')} {seed} {way}", make)
            samples.draw(way, *over_time(found))
            if options.measure == "migrations":
                if replan_s:
                    for when, number in zip((BEFORE, AFTER), _migrations(found, count // 2), strict=True):
                        samples.add(when, number)
            else:
                samples.add(way, found.mean_s if options.measure == "latency" else found.local)
    return simulated(options.measure, samples)


def _migrations(found: Simulated, change: int) -> tuple[float, float]:
    """Number of migrations that begin before the request of this number, and after it."""
    change_s = found.served[change].arrived_s
    begun = [record.at_s for record in found.migrations if record.made]
    before = sum(at_s < change_s for at_s in begun)
    return float(before), float(len(begun) - before)
