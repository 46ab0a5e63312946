"""Servers of an edge cluster, each with its own requests, under several placements: Prism's testbed, simulated."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from moetool.base import config
from moetool.base.errors import UsageError
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.bench.experiment_figure import Curve, ExperimentResult
from moetool.bench.paper.named_machine import changed, simulated_costs
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.shaped_routes import shaped
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.simulation.simulate import sized
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated
from moetool.simulation.sweep import sweep as run_grid

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeOptions:
    """Options of every experiment on edge servers.

    Attributes:
        servers: prompt sets, one per server, with the server's number of GPUs; given traces replace them.
        memory: memory of a GPU, as a share of all experts.
        mbps: megabits per second of a link.
        arrivals: see `moetool simulate`.
        initial: prompt sets, mixed, for the first placement (default: earlier requests of each server); with given
            traces, the first of them.
        requests: number of requests, as a multiple of the sizes'.
        simulation: options of the simulator.
        costs: compute costs that replace those of the recipe's machine, or another machine and model by name.
        shape: model of `recipes/models` whose experts per layer and top-k the routes get (default: the trace's).
    """

    servers: Mapping[str, int]
    memory: float = 0.3
    mbps: float = 500.0
    arrivals: str = "poisson:10s"
    initial: tuple[str, ...] = ()
    requests: float = 1.0
    simulation: Mapping[str, Any] = field(default_factory=dict)
    costs: Mapping[str, Any] = field(default_factory=dict)
    shape: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EdgeOptions):
    """Options of the experiment.

    Attributes:
        sweep: values of `gpus`, `bandwidth` and `gap`.
        measure: `latency` in seconds; `local`, local compute share; `phases`, local compute share before and after the
            first decision by Eq. 4.
    """

    modes: tuple[str, ...]
    sweep: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    measure: Literal["latency", "local", "phases"] = "latency"


Measure = Literal["latency", "local", "phases", "migrations"]
_SWEPT = {"gpus": "{} GPUs", "bandwidth": "{}", "gap": "gap {}"}
_AXES = {"gpus": "GPUs", "bandwidth": "link, Mbit/s", "gap": "gap between a server's requests, ms"}
_WHAT = {
    "latency": "mean latency per request",
    "local": "expert calls computed on the request's server",
    "phases": "expert calls computed on the request's server",
    "migrations": "migrations per run",
}
_UNITS = {"latency": "s", "local": "%", "phases": "%", "migrations": ""}


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Simulate every mode at every point of the grid, with other prompts and arrivals for each seed.

    Source: Prism § IV-A for the testbed, § IV-C for the simulator (`moetool.simulation.simulate.simulate`).
    """
    simulation = config.parse(SimulationOptions, options.simulation, "simulation")
    costs = simulated_costs(changed(bench.machine, options.costs))
    runs: list[tuple[dict[str, str], Simulated]] = []
    samples = Samples(bench)
    for seed in bench.seeds:
        given = bench.by_server(tuple(options.servers), seed)
        traces = {name: shaped(bench, trace, options.shape) for name, trace in given.items()}
        spec = sized(samples.use(*traces.values()).spec, simulation)
        mbps = bench.machine.links * options.mbps
        cluster = edge_cluster(spec, list(traces), options.servers, options.memory, mbps)
        make = partial(
            run_grid,
            traces,
            cluster,
            {**options.sweep, "planner": options.modes, "seed": [str(seed)]},
            options.modes[0],
            options.arrivals,
            max(1, round(options.requests * bench.sizes.requests)),
            simulation,
            history=dict.fromkeys(traces, shaped(bench, bench.trace(options.initial, fold=seed), options.shape))
            if options.initial
            else None,
            costs=costs,
        )
        runs += bench.once(f"edge {replace(options, measure='latency')} {seed}", make)
    for at, found in runs:
        name = label(at, options)
        if options.measure == "phases":
            for phase, share in zip(("before", "after"), around(found, simulation.replan_s), strict=True):
                samples.add(f"{name}, {phase}", share)
        else:
            samples.add(name, found.mean_s if options.measure == "latency" else found.local)
        if not options.sweep:
            samples.draw(name, *over_time(found))
    asked = [found.seconds // simulation.replan_s if simulation.replan_s else 0.0 for _, found in runs]
    on = f"Eq. 4 asked {min(asked):.0f} to {max(asked):.0f} times a run"
    if not options.sweep or options.measure == "phases":
        return simulated(options.measure, samples, on)
    along = max(options.sweep, key=lambda name: len(options.sweep[name]))
    _draw(samples, along, options)
    made = simulated(options.measure, samples, on)
    return replace(made, axes=(_AXES[along], f"{made.what}, {made.unit}"))


def _draw(samples: Samples, along: str, options: Options) -> None:
    """Draw curves over one option, one for each choice of the others."""
    others = [name for name in ("planner", *options.sweep) if name != along]
    grid = {"planner": options.modes, **options.sweep}
    x = [float(re.sub(r"[^0-9.]", "", value)) for value in grid[along]]
    for chosen in product(*(grid[name] for name in others)):
        at = dict(zip(others, chosen, strict=True))
        rows = [samples.values[label({**at, along: value}, options)] for value in grid[along]]
        words = [at["planner"]] if len(options.modes) > 1 else []
        words += [_SWEPT[one].format(at[one]) for one in others if one in _SWEPT]
        samples.sweep(", ".join(words) or at["planner"], x, rows, scale=100 if options.measure == "local" else 1)


def around(found: Simulated, tick_s: float) -> tuple[float, float]:
    """Shares of the calls that were computed locally before and after a time, by whole windows.

    Raises:
        CannotTestError: all requests ended before it.
    """
    parts = ([], [])  # type: tuple[list[tuple[int, float]], list[tuple[int, float]]]
    for window in found.windows:
        parts[window.until_s > tick_s + 1e-9].append((window.calls, window.calls * (window.local or 0.0)))
    sums = [(sum(calls for calls, _ in part), sum(local for _, local in part)) for part in parts]
    if not all(calls for calls, _ in sums):
        raise CannotTestError(
            f"all requests ended in {found.seconds:.3g} s, before the first decision by Eq. 4 at {tick_s:g} s"
        )
    before, after = (local / calls for calls, local in sums)
    return before, after


def simulated(measure: Measure, samples: Samples, on: str = "") -> ExperimentResult:
    """Return the results of simulations of edge servers.

    Args:
        samples: seconds, shares or numbers, with curves of the local compute share (`over_time`).
        on: added to the description of the traces.
    """
    on = f"{on}; simulated at assumed costs" if on else "simulated at assumed costs"
    axes = ("simulated seconds", "computed locally, %")
    return samples.found(_WHAT[measure], _UNITS[measure], on, axes=axes, traces=samples.independent)


def label(at: Mapping[str, str], options: Options) -> str:
    """Name of a point of the grid: the mode, if there are several, and the swept value."""
    words = [at["planner"]] if len(options.modes) > 1 else []
    return ", ".join([*words, *(_SWEPT[name].format(at[name]) for name in options.sweep)]) or at["planner"]


def over_time(found: Simulated) -> Curve:
    """Local compute share in percent, over windows with calls."""
    known = [window for window in found.windows if window.local is not None]
    return tuple(window.until_s for window in known), tuple(100 * (window.local or 0.0) for window in known)


def edge_cluster(spec: ModelSpec, names: Sequence[str], gpus: Mapping[str, int], memory: float, mbps: float) -> Cluster:
    """Servers with the numbers of GPUs in `gpus`; arguments as in `Options`.

    Raises:
        UsageError: there are no servers, or one has no GPU.
    """
    counts = list(gpus.values())
    if not counts or min(counts) < 1:
        raise UsageError(f"servers are {dict(gpus)}, expected some, each with a GPU or more")
    gpu = Gpu(memory_bytes=round(memory * spec.total_experts) * spec.slot_bytes)
    servers = tuple(Server(name=name, gpus=(gpu,) * counts[place % len(counts)]) for place, name in enumerate(names))
    return Cluster(servers=servers, link_bytes_s=mbps * 1e6 / 8, link_latency_s=0.0005)
