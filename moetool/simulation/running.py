"""From traces, a cluster and a mode to what its requests would take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool import config, planner
from moetool.costing.costs import CostProfile
from moetool.errors import MismatchError, UsageError, unknown_name
from moetool.placement_plan import PlacementPlan
from moetool.planner import Problem
from moetool.planning.demand import Batch, Demand, count_experts, held_out, one_model, planned_share, read_demand
from moetool.planning.modes import Predict, calibrated
from moetool.planning.recall import Recall
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.control import DECISIONS, LOOKAHEADS, MIGRATIONS, Control, find_mode
from moetool.simulation.costs import LINKS, AssumedCosts, assumed, make_network, planning_latency, profiled, token_bytes
from moetool.simulation.engine import ADMISSIONS, Engine
from moetool.simulation.results import Simulated, collect
from moetool.simulation.routing import Routing
from moetool.simulation.workload import Route, Source, draw_requests, read_source
from moetool.types import Cluster, Gpu, ModelSpec, Server

if TYPE_CHECKING:
    from moetool.predictor import Predictor
    from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a simulation is run with.

    Attributes:
        seed: of arrivals, of the requests drawn, and of planners.
        split: share of each trace's requests that placements are made from; the others are drawn.
        prompt_tokens: the most that are taken of a prompt (0: all of it), also of those that placements are made from.
        decode_tokens: the most that a request decodes.
        pace: gaps between arrivals are divided by this.
        seats: requests that a GPU has under way at a time.
        admission: `seats` or `rounds` (`moetool.simulation.engine.Engine`); `auto`: rounds for DIRECTOR's modes.
        replan_s: how often modes that place anew do so where requests don't come in rounds (0: never).
        decay: of past statistics at each of these times.
        decide: `eq4`: migrate if Prism's Eq. 4 says so; `always`; `auto`: always for DIRECTOR's modes.
        migrate: how experts move (`moetool.simulation.control.Control`).
        piece_bytes: that an expert on the move puts into a link's queue at a time.
        lookahead: what a mode that sees the queue knows of it: `true` routing, of decoded tokens too, or `predicted`
            from the first MoE layer of each prompt; tokens to be decoded are then taken to be like the prompt's.
        links: `pair` or `server` (`moetool.simulation.costs.make_network`).
        window_s: of the local compute ratio over time.
        value_bytes: bytes of one number of a hidden state.
        token_bytes: bytes of a hidden state, where the trace does not tell the model's hidden size.

    Raises:
        UsageError: a value that makes no sense.
    """

    seed: int = 0
    split: float = 0.5
    prompt_tokens: int = 0
    decode_tokens: int = 20
    pace: float = 1.0
    seats: int = 1
    admission: str = "auto"
    replan_s: float = 300.0
    decay: float = 0.5
    decide: str = "auto"
    migrate: str = "overlap"
    piece_bytes: int = 1 << 16
    lookahead: str = "true"
    links: str = "pair"
    window_s: float = 60.0
    value_bytes: int = 2
    token_bytes: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("admission", ("auto", *ADMISSIONS)),
            ("decide", DECISIONS),
            ("migrate", MIGRATIONS),
            ("lookahead", LOOKAHEADS),
            ("links", LINKS),
        ):
            if getattr(self, name) not in known:
                raise unknown_name(f"--set {name}", getattr(self, name), known)
        for name, least in (("seed", 0), ("prompt_tokens", 0), ("replan_s", 0), ("token_bytes", 0)):
            if not getattr(self, name) >= least:
                raise UsageError(f"--set {name}: found {getattr(self, name)}, expected {least} or more")
        for name in ("decode_tokens", "seats", "piece_bytes", "value_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"--set {name}: found {getattr(self, name)}, expected 1 or more")
        for name in ("pace", "window_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"--set {name}: found {getattr(self, name)}, expected a number above 0")
        if not 0 <= self.decay <= 1:
            raise UsageError(f"--set decay: found {self.decay}, expected 0 to 1")


def read_settings(values: Mapping[str, Any]) -> tuple[Options, AssumedCosts, dict[str, Any]]:
    """What of `--set` is about the run and its costs, and what is left for the planner."""
    left = dict(values)

    def take(kind: type) -> dict[str, Any]:
        return {f.name: left.pop(f.name) for f in fields(kind) if f.name in left}

    options = config.parse(Options, take(Options), "--set")
    return options, config.parse(AssumedCosts, take(AssumedCosts), "--set"), left


@dataclass(frozen=True, kw_only=True)
class World:
    """What runs on one cluster have in common.

    Attributes:
        sources: what the requests of each server are drawn from, by its number.
        history: what placements are made from.
    """

    spec: ModelSpec
    cluster: Cluster
    sources: Mapping[int, Source]
    history: Demand
    history_sources: Mapping[int, Source]


def open_sources(given: Sequence[str]) -> dict[str, "Trace"]:
    """Traces from `SERVER=DIR`, token by token.

    Raises:
        UsageError: one has no `=`, a server comes twice, or there is no such folder.
        MismatchError: one is damaged, or holds nothing but counts of experts.
    """
    from moetool.planning.placing import open_traces
    from moetool.trace.reader import Trace

    traces = {}
    for server, trace in open_traces(given).items():
        if not isinstance(trace, Trace):
            raise MismatchError(
                f"{trace.path} holds counts of experts, and requests are drawn token by token; make a trace with: "
                f"moetool capture"
            )
        traces[server] = trace
    return traces


def read_world(traces: Mapping[str, "Trace"], cluster: Cluster, options: Options) -> World:
    """Read the traces of a cluster's servers.

    Raises:
        UsageError: no trace, an unknown server, or no request left to draw.
        MismatchError: the traces are of different models.
        CapacityError: the experts do not fit.
    """
    spec = one_model(traces, cluster)
    planner.require_room(spec, cluster)
    uses = planned_share(options.split)
    drawn = held_out(uses) if options.split < 1 else uses
    # Copies of a server share a trace: each is read once, as is its demand on so many GPUs.
    known: dict[tuple[int, bool], Source] = {}
    counted: dict[tuple[int, int], np.ndarray] = {}
    sources: dict[int, Source] = {}
    history_sources: dict[int, Source] = {}
    tokens_GLE = np.zeros((len(cluster.gpus), spec.num_layers, spec.num_experts))
    first = 0
    for n, server in enumerate(cluster.servers):
        trace = traces.get(server.name)
        if trace is not None:
            for past, picks, into in ((False, drawn, sources), (True, uses, history_sources)):
                if (id(trace), past) not in known:
                    known[id(trace), past] = read_source(
                        trace,
                        lambda place, picks=picks: picks("", place),  # type: ignore[misc]
                        options.prompt_tokens,
                        options.decode_tokens,
                    )
                into[n] = known[id(trace), past]
            like = (id(trace), len(server.gpus))
            if like not in counted:
                # Where prompts are cut, placements are made from such requests as are served, not from whole ones.
                counted[like] = (
                    _served(spec, len(server.gpus), history_sources[n])
                    if options.prompt_tokens
                    else read_demand({server.name: trace}, Cluster(servers=(server,)), uses).tokens_GLE
                )
            tokens_GLE[first : first + len(server.gpus)] = counted[like]
        first += len(server.gpus)
    return World(
        spec=spec,
        cluster=cluster,
        sources=sources,
        history=Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE),
        history_sources=history_sources,
    )


def _served(spec: ModelSpec, num_gpus: int, source: Source) -> np.ndarray:
    """The tokens [G, L, E] of a source's requests, each on a GPU in turn."""
    tokens_GLE = np.zeros((num_gpus, spec.num_layers, spec.num_experts))
    for number, parts in enumerate(zip(source.prompts, source.replies, strict=True)):
        tokens_GLE[number % num_gpus] += count_experts(spec, np.concatenate(parts))
    return tokens_GLE


def simulate(
    world: World,
    mode: str,
    arrivals: str,
    requests: int,
    options: Options | None = None,
    *,
    costs: AssumedCosts | None = None,
    planner_options: Mapping[str, Any] | None = None,
    plan: PlacementPlan | None = None,
    profile: CostProfile | None = None,
    predictor: "Predictor | None" = None,
) -> Simulated:
    """Simulate a mode.

    Source: Prism § IV-C and DIRECTOR § VIII-B; deviations at `moetool.simulation.engine.Engine` and
    `moetool.simulation.control.Control`.

    Args:
        arrivals: as of `moetool.simulation.arrivals.read_arrivals`.
        requests: how many arrive.
        planner_options: by name; under a planner's name those for it alone.
        plan: the placement at the beginning; by default the mode's planner places from the history.
        profile: measured costs; assumed ones without.
        predictor: for `lookahead` = `predicted`; recall of the history without one.

    Raises:
        UsageError: an unknown mode, or arrivals that are none.
        MismatchError: plan, profile or predictor are of another model or cluster.
    """
    options, spec, cluster = options or Options(), world.spec, world.cluster
    chosen = find_mode(mode)
    own_options = _options_of(chosen.planner, planner_options or {})
    if requests < 1:
        raise UsageError(f"--requests is {requests}, expected 1 or more")
    rng = np.random.default_rng(options.seed)
    coming = read_arrivals(arrivals, sorted(world.sources), requests, rng, options.pace)
    drawn = draw_requests(
        spec,
        cluster,
        world.sources,
        coming,
        rng,
        decode_tokens=options.decode_tokens,
        most_tokens=options.prompt_tokens,
    )
    longest = max(request.route.prompt_tokens for request in drawn)
    context = int(np.mean([request.route.prompt_tokens for request in drawn]))
    size = token_bytes(spec, options.value_bytes, options.token_bytes)
    computing = (
        assumed(costs or AssumedCosts(), longest) if profile is None else profiled(profile, spec, longest, context)
    )
    latency = planning_latency(cluster, computing, size)
    if plan is None:
        problem = Problem(demand=world.history, latency=latency, seed=options.seed)
        placed_GLE = planner.place(chosen.planner, problem, own_options)
    else:
        spec.require_same(plan.spec, "the traces", "the plan")
        if plan.cluster != cluster:
            raise MismatchError("the plan is for another cluster; plan for this one with: moetool plan placement")
        placed_GLE = plan.placed_GLE
    network = make_network(cluster, size, options.links)
    ways = network.distance_NN[~np.eye(len(cluster.servers), dtype=bool)]
    control = Control(
        chosen,
        spec,
        cluster,
        latency,
        placed_GLE,
        call_s=2 * float(ways.mean()) if len(ways) else 0.0,
        seed=options.seed,
        options=own_options,
        always=not chosen.pays if options.decide == "auto" else options.decide == "always",
        migrate=options.migrate,
        decay=options.decay,
        piece_bytes=options.piece_bytes,
        predict=_prediction(world, predictor) if options.lookahead == "predicted" else None,
    )
    rounds = chosen.rounds if options.admission == "auto" else options.admission == "rounds"
    engine = Engine(
        spec,
        cluster,
        network,
        computing,
        Routing(cluster, network, placed_GLE),
        drawn,
        control,
        bytes_per_token=size,
        seats=options.seats,
        admission="rounds" if rounds else "seats",
        tick_s=options.replan_s if chosen.sees != "nothing" and not rounds else 0.0,
        window_s=options.window_s,
    )
    engine.run()
    return collect(engine, mode, options.seed, control.migrations)


def _options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of the given options a planner gets."""
    for_all = {option: value for option, value in given.items() if not isinstance(value, dict)}
    return {**for_all, **given.get(name, {})}


def _prediction(world: World, predictor: "Predictor | None") -> Callable[[Route], np.ndarray]:
    """Expected expert calls of a request: its prompt's as predicted, and as many a token for the rest of it."""
    prompts = [prompt for source in world.history_sources.values() for prompt in source.prompts]
    history = [_batch(world.spec, prompts)]
    if predictor is not None:
        world.spec.require_same(predictor.spec, "the traces", "the predictor")
    predict: Predict = Recall(history) if predictor is None else calibrated(predictor, history)

    def expected(route: Route) -> np.ndarray:
        guess_LE = predict(_batch(world.spec, [route.prompt_TS])).tokens_GLE[0]
        scaled: np.ndarray = guess_LE * (1 + route.new_tokens / route.prompt_tokens)
        return scaled

    return expected


def _batch(spec: ModelSpec, prompts: Sequence[np.ndarray]) -> Batch:
    """Prompts as predictors of batches take them: each on a GPU of its own."""
    apart = Cluster(servers=(Server(name="queue", gpus=(Gpu(memory_bytes=1),) * len(prompts)),))
    tokens_GLE = np.stack([count_experts(spec, rows_TS) for rows_TS in prompts])
    return Demand(spec=spec, cluster=apart, tokens_GLE=tokens_GLE), tuple(("", rows_TS) for rows_TS in prompts)
