"""Batches on a cluster in expert parallelism, under DIRECTOR's modes: its testbed, simulated in rounds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from moetool.base import config
from moetool.base.errors import UsageError
from moetool.base.types import Cluster, Gpu, Server
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.named_machine import MachineChoice, simulated_costs
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.costing.machines import NamedMachine, NamedModel
from moetool.placement.planner import quick_options
from moetool.simulation.placement_control import find_mode
from moetool.simulation.simulate import ModeInputs, SimulationInputs, read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated
from moetool.trace.reader import Trace

_WHAT = {
    "latency": "mean latency per request",
    "throughput": "served",
    "unevenness": "standard deviation of the latency of rounds",
}
_LATENCY_S = 5e-6  # of a link between nodes

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """A line of the comparison.

    Attributes:
        mode: placement mode.
        options: options of the mode's planner, in addition to those for planning between rounds.
        lookahead, migrate, planning: as in `moetool simulate`.
    """

    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lookahead: str = "true"
    migrate: str = "overlap"
    planning: str = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed; given traces replace them.
        machine, model: from `recipes/machines` and `recipes/models`: costs of compute, links and moves.
        batch: number of identically routed requests that each simulated one represents.
        gpus: sizes of the cluster; a node has as many as the machine.
        room: capacity of all GPUs, as a multiple of the experts.
        runs: lines by name.
        ways: by name, rates in bytes per second at which a GPU receives experts; 0: over the GPUs' links, shared with
            tokens.
        plan_s: seconds per planning, if a run charges it (0: measured CPU time).
        arrivals: see `moetool simulate`.
        measure: mean `latency`, `throughput` in tokens per second, `unevenness`, the standard deviation of the latency
            of rounds.
        rounds: rounds of one request per GPU; 0: as many as the sizes' requests allow.
        simulation: see `moetool simulate`.
    """

    data: tuple[str, ...]
    machine: str
    model: str
    batch: int = 16
    gpus: tuple[int, ...] = (8,)
    room: float = 1.25
    runs: Mapping[str, ModeRun]
    ways: Mapping[str, float] = field(default_factory=lambda: {"GPU links": 0.0})
    plan_s: tuple[float, ...] = (0.0,)
    arrivals: str = "every:100us"
    measure: Literal["latency", "throughput", "unevenness"] = "latency"
    rounds: int = 0
    simulation: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A point of the sweep: `words` name it, `x` is its abscissa."""

    gpus: int
    way_bytes_s: float
    plan_s: float
    words: str
    x: float


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Serve rounds of one request per GPU in every mode, with another trace per seed and offline placement from others.

    Source: DIRECTOR § VIII-B and -C. All modes but uniform use one planner with the same effort.

    Raises:
        UsageError: an unknown machine or model, or GPUs without links.
    """
    choice = MachineChoice(machine=options.machine, model=options.model)
    machine, model = choice.read()
    machine = machine.linked(bench.machine.links)
    costs = simulated_costs(choice.assumed(), options.batch)
    samples = Samples(bench)
    cases = list(_cases(options, model, bench.machine.links))
    swept = len(cases) > 1
    for seed in bench.seeds:
        trace, learned = bench.trace(options.data, fold=seed), bench.others(options.data, seed)
        samples.use(trace)
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            base = _simulation(options, model, case, seed)
            cluster = _cluster(trace, machine, model, options, case)
            world = _world(trace, learned, cluster, base)
            count = options.rounds * case.gpus or max(case.gpus, bench.sizes.requests // case.gpus * case.gpus)
            for label, one in options.runs.items():
                chosen = replace(base, lookahead=one.lookahead, migrate=one.migrate, planning=one.planning)
                make = partial(
                    simulate,
                    world,
                    one.mode,
                    options.arrivals,
                    count,
                    chosen,
                    costs=costs,
                    inputs=ModeInputs(options={**quick_options(find_mode(one.mode).planner), **one.options}),
                )
                same = replace(options, measure="latency", runs={}, gpus=(), ways={}, plan_s=())
                found = bench.once(
                    f"rounds {same} {case.gpus} {case.way_bytes_s} {trace.path} {count} {one} {chosen}", make
                )
                value = _measure(found, options.measure)
                samples.add(label + case.words, value)
                lines.setdefault(label, []).append((case.x, value))
                if not swept:
                    ends = sorted(_rounds(found))
                    samples.draw(label, range(1, len(ends) + 1), (1e3 * seconds for _, seconds in ends))
        if swept:
            for label, points in lines.items():
                samples.draw(label, *zip(*sorted(points), strict=True))
    on = f"rounds of one request per GPU, with costs of {model.name} on {machine.name}"
    what, unit = _WHAT[options.measure], "tokens/s" if options.measure == "throughput" else "ms"
    axes = ("round", "latency of the round, ms")
    if swept:
        along = "migration time per expert, µs" if len(options.ways) > 1 else "planning time, ms"
        axes = ("GPUs" if len(options.gpus) > 1 else along, f"{what}, {unit}")
    return samples.found(what, unit, on, axes=axes)


def _cases(options: Options, model: NamedModel, links: float) -> Iterator[_Case]:
    """All sizes, paths and planning times; the abscissa is the first that varies.

    Args:
        links: rates of links, as a multiple of the machine's.
    """
    choice = MachineChoice(machine=options.machine, model=options.model)
    for gpus in options.gpus:
        for way, rate in options.ways.items():
            for plan_s in options.plan_s:
                words = f", {gpus} GPUs" if len(options.gpus) > 1 else ""
                words += f", {way}" if len(options.ways) > 1 else ""
                words += f", {1e3 * plan_s:g} ms" if len(options.plan_s) > 1 else ""
                link = links * (rate or choice.gpu_link_bytes_s())
                x = 1e6 * model.expert_bytes / link if len(options.ways) > 1 else 1e3 * plan_s
                yield _Case(
                    gpus=gpus,
                    way_bytes_s=links * rate,
                    plan_s=plan_s,
                    words=words,
                    x=float(gpus) if len(options.gpus) > 1 else x,
                )


def _simulation(options: Options, model: NamedModel, case: _Case, seed: int) -> SimulationOptions:
    return config.parse(
        SimulationOptions,
        {
            "token_bytes": round(2 * model.hidden * options.batch),
            "expert_bytes": model.expert_bytes,
            **options.simulation,
            "copies": "host" if case.way_bytes_s else "links",
            "plan_s": case.plan_s,
            "mode": "ep",
            "admission": "rounds",
            "split": 1.0,
            "seed": seed,
        },
        "simulation",
    )


def _world(trace: Trace, learned: Trace | None, cluster: Cluster, base: SimulationOptions) -> SimulationInputs:
    """Requests of one trace, placements from another, or from every other request where there is none."""
    names = [server.name for server in cluster.servers]
    if learned is None:
        return read_world(dict.fromkeys(names, trace), cluster, replace(base, split=0.5))
    past = read_world(dict.fromkeys(names, learned), cluster, base)
    world = read_world(dict.fromkeys(names, trace), cluster, base)
    return replace(world, history=past.history, history_sources=past.history_sources)


def _cluster(trace: Trace, machine: NamedMachine, model: NamedModel, options: Options, case: _Case) -> Cluster:
    """Nodes of equal GPUs; the last may have fewer."""
    size, share = case.gpus, MachineChoice().link_share
    if size < 2:
        raise UsageError(f"{size} GPU, expected two or more")
    slots = int(np.ceil(options.room * trace.spec.total_experts / size))
    gpu = Gpu(
        memory_bytes=slots * model.expert_bytes,
        host_to_device_bytes_s=case.way_bytes_s or share * machine.host_bytes_s,
    )
    servers = tuple(
        Server(
            name=f"node{n}",
            gpus=(gpu,) * min(machine.gpus, size - first),
            gpu_link_bytes_s=share * machine.gpu_link_bytes_s,
        )
        for n, first in enumerate(range(0, size, machine.gpus))
    )
    return Cluster(servers=servers, link_bytes_s=share * machine.node_link_bytes_s, link_latency_s=_LATENCY_S)


def _rounds(found: Simulated) -> list[tuple[float, float]]:
    """Start and longest latency of each round in which all GPUs have a request.

    The first request does not wait for others, so the first round has one request, and the last round the rest.
    """
    ends: dict[float, list[float]] = {}
    for one in found.served:
        ends.setdefault(one.started_s, []).append(one.finished_s)
    whole = len(found.utilisation_G)
    return [(began, max(end) - began) for began, end in ends.items() if len(end) == whole]


def _measure(found: Simulated, measure: str) -> float:
    """Tokens per second, or milliseconds."""
    if measure == "latency":
        return 1e3 * found.mean_s
    if measure == "throughput":
        return found.tokens_per_s
    rounds = sorted(_rounds(found))
    whole = [seconds for _, seconds in rounds[1:]]  # the first follows a round of one request
    if len(whole) < 2:
        raise CannotTestError(f"rounds with a request for every GPU: {len(rounds)}, expected three or more")
    return 1e3 * float(np.std(whole))
