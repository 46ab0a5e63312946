"""Simulation of a mode's request latencies from traces and a cluster."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from moetool.base import config
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster, Gpu, ModelSpec, Server
from moetool.costing.costs import CostProfile
from moetool.placement import planner
from moetool.placement.decide import InForce, ReplacementCosts, Replanner
from moetool.placement.demand import Batch, Demand, held_out, one_model, planned_share, read_demand
from moetool.placement.modes import Predict, calibrated
from moetool.placement.plan import PlacementPlan
from moetool.placement.planner import Problem
from moetool.placement.recall import Recall
from moetool.placement.scoring import remote_call_s
from moetool.prediction.predictor import Predictor
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.event_loop import EventLoop, LoopOptions, SimulatedMachines
from moetool.simulation.lockstep import RankMachines
from moetool.simulation.lockstep_serving import LockstepServing, ServingOptions
from moetool.simulation.placement_control import PlacementDecisions, SimulatedReplacement, find_mode
from moetool.simulation.rank_seconds import RankSeconds, mean_row_s, rank_seconds
from moetool.simulation.replica_choice import Routing
from moetool.simulation.simulated_costs import (
    AssumedCosts,
    GpuSeconds,
    assumed,
    make_network,
    planning_latency,
    profiled,
    token_bytes,
)
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated, collect, collect_ranks
from moetool.simulation.workload import RequestSource, Route, SimulatedRequest, draw_requests, read_source
from moetool.trace.expert_counts import count_experts
from moetool.trace.reader import Trace

_LOG = logging.getLogger(__name__)


def read_settings(values: Mapping[str, Any]) -> tuple[SimulationOptions, AssumedCosts, dict[str, Any]]:
    """Split `--set` into options of the run, of its costs, and of planners."""
    left = dict(values)

    def take(kind: type) -> dict[str, Any]:
        return {f.name: left.pop(f.name) for f in fields(kind) if f.name in left}

    options = config.parse(SimulationOptions, take(SimulationOptions), "--set")
    return options, config.parse(AssumedCosts, take(AssumedCosts), "--set"), left


@dataclass(frozen=True, kw_only=True)
class SimulationInputs:
    """The cluster and the requests shared by runs.

    Attributes:
        history: requests for placements.
        later: sources of the second half of the requests, if the data changes during the run.
    """

    spec: ModelSpec
    cluster: Cluster
    sources: Mapping[int, RequestSource]
    history: Demand
    history_sources: Mapping[int, RequestSource]
    later: Mapping[int, RequestSource] | None = None


def open_sources(given: Sequence[str]) -> dict[str, Trace]:
    """Open traces from `SERVER=DIR`.

    Raises:
        UsageError: a value has no `=`, a server is named twice, or there is no such folder.
        MismatchError: a trace is damaged, or holds only counts of experts.
    """
    from moetool.placement.planning import open_traces
    from moetool.trace.reader import Trace

    traces = {}
    for server, trace in open_traces(given).items():
        if not isinstance(trace, Trace):
            raise MismatchError(
                f"{trace.path} holds counts of experts, expected routes of single tokens; make a trace with: "
                f"moetool capture"
            )
        traces[server] = trace
    return traces


def read_world(
    traces: Mapping[str, Trace], cluster: Cluster, options: SimulationOptions, predictor: Predictor | None = None
) -> SimulationInputs:
    """Read the traces of a cluster's servers.

    Args:
        predictor: no request that it was trained on, by its card, is drawn.

    Raises:
        UsageError: no trace, an unknown server, or no request left to draw.
        MismatchError: the traces are of different models.
        CapacityError: the experts do not fit.
    """
    spec = sized(one_model(traces, cluster), options)
    planner.require_room(spec, cluster)
    uses = planned_share(options.split)
    drawn = held_out(uses) if options.split < 1 else uses
    card = predictor.card if predictor is not None else None
    if card:
        from moetool.prediction import unseen_requests
    # Copies of a server share a trace: it is read once, and its demand is counted once per number of GPUs.
    known: dict[tuple[int, bool], RequestSource] = {}
    counted: dict[tuple[int, int], np.ndarray] = {}
    sources: dict[int, RequestSource] = {}
    history_sources: dict[int, RequestSource] = {}
    tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
    first = 0
    for n, server in enumerate(cluster.servers):
        trace = traces.get(server.name)
        if trace is not None:
            for past, picks, into in ((False, drawn, sources), (True, uses, history_sources)):
                if (id(trace), past) not in known:
                    unseen = unseen_requests.held_out(card, trace) if card and not past else None
                    known[id(trace), past] = read_source(
                        trace,
                        lambda place, picks=picks: picks("", place),  # type: ignore[misc]
                        options.prompt_tokens,
                        options.decode_tokens,
                        unseen,
                    )
                into[n] = known[id(trace), past]
            like = (id(trace), len(server.gpus))
            if like not in counted:
                # Placements are made from requests as served, with cut prompts.
                counted[like] = (
                    _served(spec, len(server.gpus), history_sources[n])
                    if options.prompt_tokens
                    else read_demand({server.name: trace}, Cluster(servers=(server,)), uses).tokens_GLE
                )
            tokens_GLE[first : first + len(server.gpus)] = counted[like]
        first += len(server.gpus)
    return SimulationInputs(
        spec=spec,
        cluster=cluster,
        sources=sources,
        history=Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE),
        history_sources=history_sources,
    )


def sized(spec: ModelSpec, options: SimulationOptions) -> ModelSpec:
    """Return the model with experts of `expert_bytes`, if the options set it."""
    return replace(spec, expert_bytes_L=(options.expert_bytes,) * spec.num_layers) if options.expert_bytes else spec


def _served(spec: ModelSpec, num_gpus: int, source: RequestSource) -> np.ndarray:
    """Return the tokens [G, L, E] of a source's requests, assigned to the GPUs in turn."""
    tokens_GLE = np.zeros((num_gpus, spec.num_layers, spec.num_experts))
    for number, parts in enumerate(zip(source.prompts, source.replies, strict=True)):
        tokens_GLE[number % num_gpus] += count_experts(spec, np.concatenate(parts))
    return tokens_GLE


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeInputs:
    """Inputs of a mode.

    Attributes:
        options: planner options by name; a planner's name holds options for that planner only.
        plan: initial placement (default: by the mode's planner from the history).
        predictor: predictor for `lookahead` = `predicted` (default: recall of the history).
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    plan: PlacementPlan | None = None
    predictor: Predictor | None = None


def simulate(
    world: SimulationInputs,
    mode: str,
    arrivals: str,
    requests: int,
    options: SimulationOptions | None = None,
    *,
    costs: AssumedCosts | CostProfile | RankSeconds | None = None,
    inputs: ModeInputs | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Simulated:
    """Simulate a mode.

    Source: Prism § IV-C (`moetool.simulation.event_loop.EventLoop`) and DIRECTOR § VIII-B
    (`moetool.simulation.lockstep_serving.LockstepServing`), with their deviations.

    Args:
        arrivals: as in `moetool.simulation.arrivals.read_arrivals`.
        costs: measured profile, or assumed costs, or those of ranks.
        on_progress: called with the activity, the amount done and the total.

    Raises:
        UsageError: an unknown mode, or invalid arrivals.
        MismatchError: plan, profile or predictor belong to another model or cluster.
    """
    options, inputs, spec, cluster = options or SimulationOptions(), inputs or ModeInputs(), world.spec, world.cluster
    chosen = find_mode(mode)
    own_options = _options_of(chosen.planner, inputs.options)
    assert requests >= 1
    rng = np.random.default_rng(options.seed)
    coming = read_arrivals(arrivals, sorted(world.sources), requests, rng, options.pace)
    change = len(coming) if world.later is None else len(coming) // 2
    drawn: list[SimulatedRequest] = []
    for sources, part in ((world.sources, coming[:change]), (world.later or {}, coming[change:])):
        drawn += draw_requests(
            spec,
            cluster,
            sources,
            part,
            rng,
            decode_tokens=options.decode_tokens,
            most_tokens=options.prompt_tokens,
            first_number=len(drawn),
        )
    size = token_bytes(spec, options.value_bytes, options.token_bytes)
    machines: RankMachines | SimulatedMachines
    if options.in_lockstep(chosen.batches):
        seconds = rank_seconds(costs, spec)
        machines = RankMachines(
            spec=spec, cluster=cluster, seconds=seconds, token_bytes=size, exchange=options.exchange
        )
        batch = drawn[: options.seats * len(cluster.gpus)]
        latency = planning_latency(cluster, mean_row_s(seconds, [one.route for one in batch]), size, seconds.name)
    else:
        options.require_edge()
        computing = _edge_costs(spec, costs, drawn)
        machines = SimulatedMachines(
            spec=spec,
            cluster=cluster,
            network=make_network(cluster, size, options.links),
            computing=computing,
            bytes_per_token=size,
        )
        latency = planning_latency(cluster, computing.expert[1], size, computing.name)

    def placing(done: int, total: int) -> None:
        on_progress(f"{mode}: placing", done, total)

    placing(0, 1)
    if inputs.plan is None:
        problem = Problem(demand=world.history, latency=latency, seed=options.seed, on_progress=placing)
        placed_GLE = planner.place(chosen.planner, problem, own_options)
    else:
        spec.require_same(inputs.plan.spec, "the traces", "the plan")
        inputs.plan.require_cluster(cluster, "the plan")
        placed_GLE = inputs.plan.placed_GLE
    placing(1, 1)
    decisions = PlacementDecisions(
        chosen.sees,
        InForce(spec=spec, cluster=cluster, placed_GLE=placed_GLE),
        ReplacementCosts(latency=latency, call_s=remote_call_s(cluster, size)),
        Replanner(
            planner=chosen.planner,
            options={**(planner.quick_options(chosen.planner) if chosen.batches else {}), **own_options},
            seed=options.seed,
            weighs="printed" if options.decide == "printed" else "latency" if chosen.batches else "calls",
            always=chosen.batches if options.decide == "auto" else options.decide == "always",
        ),
        options,
        _prediction(world, inputs.predictor) if options.lookahead == "predicted" else None,
    )

    def served(count: int) -> None:
        on_progress(f"{mode}: serving requests", count, len(drawn))

    _LOG.info("%s: %d requests on %d GPUs, %s", mode, len(drawn), len(cluster.gpus), latency.name)
    if isinstance(machines, RankMachines):
        rounds = chosen.batches if options.admission == "auto" else options.admission == "rounds"
        serving = LockstepServing(
            machines,
            drawn,
            decisions,
            ServingOptions(
                seats=options.seats,
                static=rounds,
                chunk_tokens=options.chunk_tokens,
                window_s=options.window_s,
                on_finished=served,
            ),
        )
        serving.run()
        return collect_ranks(serving, mode, options.seed)
    engine = EventLoop(
        machines,
        Routing(cluster, machines.network, placed_GLE),
        drawn,
        SimulatedReplacement(decisions),
        LoopOptions(
            seats=options.seats,
            tick_s=options.replan_s if chosen.sees != "nothing" else 0.0,
            window_s=options.window_s,
            on_finished=served,
        ),
    )
    engine.run()
    return collect(engine, mode, options.seed, decisions.records)


def _edge_costs(
    spec: ModelSpec, costs: AssumedCosts | CostProfile | RankSeconds | None, drawn: Sequence[SimulatedRequest]
) -> GpuSeconds:
    longest = max(request.route.prompt_tokens for request in drawn)
    if isinstance(costs, CostProfile):
        context = int(np.mean([request.route.prompt_tokens for request in drawn]))
        return profiled(costs, spec, longest, context)
    if costs is not None and not isinstance(costs, AssumedCosts):
        raise UsageError(f"{costs.name} are costs of ranks in lockstep; set mode=ep")
    return assumed(costs or AssumedCosts(), longest)


def _options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a planner's options among the given ones."""
    for_all = {option: value for option, value in given.items() if not isinstance(value, dict)}
    return {**for_all, **given.get(name, {})}


def _prediction(world: SimulationInputs, predictor: Predictor | None) -> Callable[[Route], np.ndarray]:
    """Return a function for the expected expert calls of a request: the prompt's prediction, extended to new tokens.

    A predictor of prompts sees only the prompt's tokens, as for waiting requests, and replies have the history's mean
    length. Others get the first MoE layer's experts, and the reply's length.

    Source: DIRECTOR § V-A.
    """
    # Servers may share a source: each of its requests counts once, else a token's nearest neighbours are its copies.
    sources = {id(source): source for source in world.history_sources.values()}.values()
    if predictor is not None:
        world.spec.require_same(predictor.spec, "the traces", "the predictor")
        if predictor.predicts_prompts:
            replies = [len(reply_TS) for source in sources for reply_TS in source.replies]
            new_tokens = round(float(np.mean(replies)))
            return lambda route: predictor.workload(route.token_id_T.tolist(), new_tokens)
    history = [_batch(world.spec, [prompt for source in sources for prompt in source.prompts])]
    predict: Predict = Recall(history) if predictor is None else calibrated(predictor, history)

    def expected(route: Route) -> np.ndarray:
        guess_LE = predict(_batch(world.spec, [route.prompt_TS])).tokens_GLE[0]
        return guess_LE * (1 + route.new_tokens / route.prompt_tokens)

    return expected


def _batch(spec: ModelSpec, prompts: Sequence[np.ndarray]) -> Batch:
    """Return prompts in the form for batch predictors: one per GPU."""
    apart = Cluster(servers=(Server(name="queue", gpus=(Gpu(memory_bytes=1),) * len(prompts)),))
    tokens_GLE = np.stack([count_experts(spec, rows_TS) for rows_TS in prompts])
    return Demand(spec=spec, cluster=apart, tokens_GLE=tokens_GLE), tuple(("", rows_TS) for rows_TS in prompts)
