"""Batches on a cluster in expert parallelism, under DIRECTOR's modes: its testbed, simulated in lockstep."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import Cluster, Gpu, Server
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.named_machine import MachineChoice, simulated_costs
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.costing.machines import NamedMachine, NamedModel
from moetool.models.checkpoint import Checkpoint
from moetool.placement import planner
from moetool.placement.decide import InForce, ReplacementCosts, Replanner
from moetool.placement.demand import Demand
from moetool.placement.planner import Problem
from moetool.prompts import gather
from moetool.simulation.lockstep import RankMachines
from moetool.simulation.lockstep_serving import LockstepServing, ServingOptions
from moetool.simulation.placement_control import PlacementDecisions, find_mode
from moetool.simulation.rank_seconds import AssumedRank, mean_row_s
from moetool.simulation.simulated_costs import planning_latency
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.workload import RequestSource, Route, SimulatedRequest, read_source
from moetool.trace.reader import Trace
from moetool.training.predictor import Predictor, load_predictor
from moetool.training.quantize.calibration import from_prompts
from moetool.training.quantize.replica import make_replica
from moetool.training.quantize.replica_layers import ReplicaOptions

_WHAT = {
    "latency": "mean latency of a batch",
    "prefill": "mean latency of a batch's steps with prompt tokens",
    "throughput": "served",
    "unevenness": "standard deviation of the latency of batches",
}
_LATENCY_S = 5e-6  # of a link between nodes

LINKS = DESCRIBES_COSTS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """A line of the comparison.

    Attributes:
        options: options of the mode's planner, in addition to those for planning between batches.
        predictor: predictor of the queue's routing from its prompts, trained on other requests; empty: the true one.
        migrate, planning: as in `moetool simulate`.
    """

    mode: str
    options: Mapping[str, Any] = field(default_factory=dict)
    predictor: str = ""
    migrate: str = "overlap"
    planning: str = "free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment. The defaults are its base cell.

    Attributes:
        data: prompt sets, each a task; given traces replace them.
        machine, model: from `recipes/machines` and `recipes/models`: costs of compute, links and moves.
        compositions: tasks of a batch: `mixed`, drawn for each request; `one task`, another for each batch; `drift`,
            from the first task to the last over the run.
        seats: requests of a batch per GPU.
        batches: batches of a run; the first does not count.
        new_tokens: most decoded tokens of a request.
        prompt_tokens: most tokens of a prompt (0: no limit).
        roofline: reads of weights and arithmetic overlap.
        grouped: an expert reads its weights once for all tokens of a step; else each token costs as much as the first.
        gpus: sizes of the cluster; a node has as many as the machine.
        room: capacity of all GPUs, as a multiple of the experts; 1: no replicas.
        runs: lines by name.
        ways: by name, rates in bytes per second at which a GPU receives experts; 0: over the GPUs' links, shared with
            tokens.
        plan_s: seconds per planning, if a run charges it (0: measured CPU time).
        predict_share: share of a batch's seconds for a prediction, if a run charges planning.
        measure: milliseconds of a batch (`latency`) or of its steps with prompt tokens (`prefill`), `throughput` in
            tokens per second, `unevenness`, the standard deviation of the batches' latency.
    """

    data: tuple[str, ...]
    machine: str
    model: str
    compositions: tuple[Literal["mixed", "one task", "drift"], ...] = ("mixed",)
    seats: int = 4
    batches: int = 9
    new_tokens: int = 64
    prompt_tokens: int = 0
    roofline: bool = False
    grouped: bool = True
    gpus: tuple[int, ...] = (8,)
    room: float = 1.0
    runs: Mapping[str, ModeRun]
    ways: Mapping[str, float] = field(default_factory=lambda: {"GPU links": 0.0})
    plan_s: tuple[float, ...] = (0.0,)
    predict_share: float = 0.0
    measure: Literal["latency", "prefill", "throughput", "unevenness"] = "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A point of the sweep: `words` name it, `x` is its abscissa."""

    composition: str
    gpus: int
    way_bytes_s: float
    plan_s: float
    words: str
    x: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRoutes:
    """Routes of a seed: of each task those that are served, and the other requests of all tasks, for placements."""

    traces: list[Trace]
    served: list[list[Route]]
    history: list[Route]


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Serve batches from a full queue in every mode, with other requests for each seed than placements are made from.

    Source: DIRECTOR § VIII-B and -C. The paper's offline baseline places as MoETuner does (planner `moetuner`).
    Offline, reactive and proactive placement by one planner with the same effort differ in the requests that they see.

    Raises:
        UsageError: an unknown machine or model, or GPUs without links.
        CannotTestError: no request has as many tokens to decode.
    """
    choice = MachineChoice(machine=options.machine, model=options.model)
    machine, model = choice.read()
    machine = machine.linked(bench.machine.links)
    compute = simulated_costs(choice.assumed())
    if not options.grouped:
        compute = replace(compute, expert_token_s=compute.expert_s)
    costs = AssumedRank(costs=compute, roofline=options.roofline, name=machine.name)
    samples = Samples(bench)
    cases = list(_cases(options, model, bench.machine.links))
    for seed in bench.seeds:
        key = f"tasks {options.data} {options.new_tokens} {options.prompt_tokens} {seed}"
        tasks: TaskRoutes = bench.once(key, partial(tasks_of, bench, options, seed))
        samples.use(*tasks.traces)
        lines: dict[str, list[tuple[float, float]]] = {}
        for case in cases:
            cluster = _cluster(tasks.traces[0], machine, model, options, case)
            queue = draw_queue(tasks.served, options, case.composition, case.gpus, seed)
            for label, one in options.runs.items():
                same = replace(options, measure="latency", runs={}, compositions=(), gpus=(), ways={}, plan_s=())
                key = f"lockstep {same} {replace(case, words='', x=0.0)} {seed} {one}"
                setting = _Setting(cluster, costs, model, tasks, queue, seed)
                serving: LockstepServing = bench.once(key, partial(_serve, bench, options, one, case, setting))
                value = _measure(serving, options.measure)
                samples.add(label + case.words, value)
                line = f"{label}, {case.composition}" if len(options.compositions) > 1 else label
                lines.setdefault(line, []).append((case.x, value))
                if len(cases) == 1:
                    seconds = [1e3 * batch.seconds for batch in serving.batches]
                    samples.draw(label, range(1, len(seconds) + 1), seconds)
        if len(cases) > 1:
            for label, points in lines.items():
                samples.draw(label, *zip(*sorted(points), strict=True))
    on = f"batches of {options.seats} requests per GPU in lockstep, with costs of {model.name} on {machine.name}"
    what, unit = _WHAT[options.measure], "tokens/s" if options.measure == "throughput" else "ms"
    axes = ("batch", "latency of the batch, ms")
    if len(cases) > 1:
        along = "migration time per expert, µs" if len(options.ways) > 1 else "planning time, ms"
        axes = ("GPUs" if len(options.gpus) > 1 else along, f"{what}, {unit}")
    return samples.found(what, unit, on, axes=axes, traces=len(bench.seeds))


@dataclass(frozen=True, slots=True)
class _Setting:
    cluster: Cluster
    costs: AssumedRank
    model: NamedModel
    tasks: TaskRoutes
    queue: list[Route]
    seed: int


def _cases(options: Options, model: NamedModel, links: float) -> Iterator[_Case]:
    """All sizes, paths and planning times; the abscissa is the first that varies.

    Args:
        links: rates of links, as a multiple of the machine's.
    """
    choice = MachineChoice(machine=options.machine, model=options.model)
    swept = product(options.compositions, options.gpus, options.ways.items(), options.plan_s)
    for composition, gpus, (way, rate), plan_s in swept:
        words = f", {composition}" if len(options.compositions) > 1 else ""
        words += f", {gpus} GPUs" if len(options.gpus) > 1 else ""
        words += f", {way}" if len(options.ways) > 1 else ""
        words += f", {1e3 * plan_s:g} ms" if len(options.plan_s) > 1 else ""
        link = links * (rate or choice.gpu_link_bytes_s())
        x = 1e6 * model.expert_bytes / link if len(options.ways) > 1 else 1e3 * plan_s
        yield _Case(
            composition=composition,
            gpus=gpus,
            way_bytes_s=links * rate,
            plan_s=plan_s,
            words=words,
            x=float(gpus) if len(options.gpus) > 1 else x,
        )


def tasks_of(bench: Workbench, options: Options, seed: int) -> TaskRoutes:
    """Parts of the requests of each task: one is served, placements are made from the others."""
    parts = len(bench.seeds)
    model = MachineChoice(machine=options.machine, model=options.model).read()[1]
    traces, served, history = [], [], []

    def read(trace: Trace, part: int | None) -> list[Route]:
        sizes = (model.expert_bytes,) * trace.spec.num_layers
        spec = replace(trace.spec, expert_bytes_L=sizes, hidden_size=model.hidden)

        def uses(place: int) -> bool:
            return part is None or (place % parts == part)

        source = read_source(trace, uses, options.prompt_tokens, max(1, options.new_tokens))
        return _routes(spec, source, options.new_tokens)

    if bench.given:
        for trace in bench.by_server(()).values():
            traces.append(trace)
            served.append(read(trace, seed))
            history += [route for part in range(parts) if part != seed for route in read(trace, part)]
    else:
        for name in options.data:
            each = [bench.trace((name,), fold=part, new_tokens=max(1, options.new_tokens)) for part in range(parts)]
            traces.append(each[seed])
            served.append(read(each[seed], None))
            history += [route for part, trace in enumerate(each) if part != seed for route in read(trace, None)]
    longest = max(route.new_tokens for routes in served for route in routes)
    if longest < options.new_tokens // 2:
        raise CannotTestError(f"requests decode {longest} tokens at most, expected {options.new_tokens}")
    return TaskRoutes(traces=traces, served=served, history=history or [route for routes in served for route in routes])


def _routes(spec: Any, source: RequestSource, new_tokens: int) -> list[Route]:
    return [
        Route(spec=spec, prompt_TS=prompt_TS, reply_TS=reply_TS[:new_tokens], token_id_T=ids_T)
        for prompt_TS, reply_TS, ids_T in zip(source.prompts, source.replies, source.token_ids, strict=True)
    ]


def draw_queue(
    served: Sequence[Sequence[Route]], options: Options, composition: str, gpus: int, seed: int
) -> list[Route]:
    """Draw the requests of all batches, with replacement."""
    rng = np.random.default_rng(seed)
    size, last = options.seats * gpus, len(served) - 1
    turns = rng.permutation(len(served))
    queue = []
    for batch in range(options.batches):
        at = batch / max(1, options.batches - 1) * last
        for _ in range(size):
            task = int(rng.integers(len(served)))
            if composition == "one task":
                task = int(turns[batch % len(turns)])
            elif composition == "drift":
                task = min(last, int(at) + int(rng.random() < at - int(at)))
            queue.append(served[task][int(rng.integers(len(served[task])))])
    return queue


def _serve(bench: Workbench, options: Options, one: ModeRun, case: _Case, setting: _Setting) -> LockstepServing:
    mode, cluster, spec = find_mode(one.mode), setting.cluster, setting.queue[0].spec
    size = 2 * setting.model.hidden
    batch = setting.queue[: options.seats * case.gpus]
    latency = planning_latency(cluster, mean_row_s(setting.costs, batch), size, setting.costs.name)
    own = {**planner.quick_options(mode.planner), **one.options}
    if "seconds" in planner.find(mode.planner).Options.__slots__:
        own["seconds"] = 0.0  # a limit would make placements depend on the machine's load
    tokens_GLE = np.zeros((case.gpus, spec.num_layers, spec.num_experts))
    for number, route in enumerate(setting.tasks.history):
        tokens_GLE[number % case.gpus] += route.calls_LE
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
    placed_GLE = planner.place(mode.planner, Problem(demand=demand, latency=latency, seed=setting.seed), own)
    simulated = SimulationOptions(
        migrate=one.migrate,
        planning=one.planning,
        plan_s=case.plan_s,
        predict_share=options.predict_share,
        copies="host" if case.way_bytes_s else "links",
    )
    predict = None
    if one.predictor:
        predictor = _predictor(bench, options, one.predictor, setting)
        predict = lambda route: predictor.workload(route.token_id_T.tolist(), options.new_tokens)  # noqa: E731
    decisions = PlacementDecisions(
        mode.sees,
        InForce(spec=spec, cluster=cluster, placed_GLE=placed_GLE),
        ReplacementCosts(latency=latency),
        Replanner(planner=mode.planner, options=own, seed=setting.seed, weighs="latency", always=True),
        simulated,
        predict,
    )
    requests = [
        SimulatedRequest(number=number, gpu=0, route=route, arrived_s=0.0) for number, route in enumerate(setting.queue)
    ]
    machines = RankMachines(spec=spec, cluster=cluster, seconds=setting.costs, token_bytes=size)
    serving = LockstepServing(machines, requests, decisions, ServingOptions(seats=options.seats, static=True))
    serving.run()
    return serving


def _predictor(bench: Workbench, options: Options, name: str, setting: _Setting) -> Predictor:
    """Return a predictor of pending requests, trained on the other parts of their prompt sets.

    A 4-bit replica of the embedded model is calibrated on the prompt sets that are not served.

    Raises:
        CannotTestError: only traces were given, and a replica needs the model.
    """
    if name != "awq_replica":
        return bench.predictor(name, bench.others(options.data, setting.seed) or setting.tasks.traces[0])
    if bench.given:
        raise CannotTestError("a replica needs the model, but only traces were given")

    def make() -> Predictor:
        texts = [one for data in ALL if data not in options.data for one in gather.load([data])[: bench.sizes.prompts]]
        checkpoint, folder = Checkpoint.open(MODEL), bench.folder("replica")
        calibration = from_prompts(
            texts, checkpoint.tokenizer, checkpoint.vocab_size, length=128, max_tokens=4096, seed=0
        )
        make_replica(checkpoint, folder, calibration, ReplicaOptions(grid=6))
        return load_predictor(folder)

    return bench.once(f"replica without {options.data}", make)


def _cluster(trace: Trace, machine: NamedMachine, model: NamedModel, options: Options, case: _Case) -> Cluster:
    """Nodes of equal GPUs; the last may have fewer. Each GPU has its share of the node's network."""
    size, share = case.gpus, MachineChoice().link_share
    if size < 2:
        raise UsageError(f"{size} GPU, expected two or more")
    slots = int(np.ceil(options.room * trace.spec.total_experts / size))
    gpu = Gpu(
        memory_bytes=slots * model.expert_bytes, host_to_device_bytes_s=case.way_bytes_s or share * machine.host_bytes_s
    )
    servers = tuple(
        Server(
            name=f"node{n}",
            gpus=(gpu,) * min(machine.gpus, size - first),
            gpu_link_bytes_s=share * machine.gpu_link_bytes_s,
        )
        for n, first in enumerate(range(0, size, machine.gpus))
    )
    rate = share * machine.node_link_bytes_s / machine.gpus
    return Cluster(servers=servers, link_bytes_s=rate, link_latency_s=_LATENCY_S)


def _measure(serving: LockstepServing, measure: str) -> float:
    """Tokens per second, or milliseconds; without the first batch, for which nothing could be placed ahead."""
    batches = serving.batches[1:]
    if measure == "prefill":
        return 1e3 * float(np.mean([batch.prompts for batch in batches]))
    seconds = [batch.seconds for batch in batches]
    waited = [b.began_s - a.began_s - a.seconds for a, b in zip(serving.batches, batches, strict=False)]
    whole = np.array(seconds) + waited
    if measure == "throughput":
        tokens = sum(one.route.prompt_tokens + one.route.new_tokens for one in serving.requests)
        return tokens * len(batches) / len(serving.batches) / float(whole.sum())
    return 1e3 * float(np.std(whole) if measure == "unevenness" else np.mean(whole))
