"""Placement plans from traces or counts, a cluster and costs, and their scores."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import config, durable
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.types import Cluster, ModelSpec
from moetool.costing.costs import CostProfile
from moetool.costing.machine_profile import machine_profile
from moetool.costing.machines import read_named_machine
from moetool.placement import engine_slots, planner
from moetool.placement.demand import WHOLE, Demand, held_out, one_model, planned_share, read_demand
from moetool.placement.engine_slots import SlotChoice
from moetool.placement.latency import VALUE_BYTES, Latency, profiled_latency, unit_latency
from moetool.placement.plan import PlacementPlan, TraceReference, experts_of
from moetool.placement.planner import Problem
from moetool.placement.scoring import FORWARD_TOKENS, PlacementScore, score
from moetool.trace.expert_counts import ExpertCounts, open_workload
from moetool.trace.reader import Trace

Workload = Trace | ExpertCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of plans and scores, in addition to the traces.

    Attributes:
        seed: seed of every random choice.
        starts: choice of the GPU of its server where a request's tokens start (`moetool.placement.demand.STARTS`).
        sides: sides of Eq. 4, `both` or `send` (`moetool.placement.latency.Latency`).
        routing: choice of the copy for a token when plans are scored (`moetool.placement.latency.ROUTINGS`); empty: the
            engine's, else `nearest`.
        value_bytes: bytes of one number of a hidden state in transit.
        engine: engine that a plan is for (`moetool.placement.engine_slots.ENGINES`): every GPU gets equal slots of each
            layer.
        slots_per_gpu: slots of each layer on every GPU (None: by `redundant`; for an engine, the fewest with nearly
            the best balance, else as memory allows).
        redundant: the same as slots of a layer beyond one for each expert, on all GPUs together.
        profile: file of measured costs; without these and a machine, unit costs.
        machine: name of a machine with vendors' figures.

    Raises:
        UsageError: the seed is below 0, value_bytes is not above 0, or both costs are given.
    """

    seed: int = 0
    starts: str = "round_robin"
    sides: str = "both"
    routing: str = ""
    value_bytes: int = VALUE_BYTES
    engine: str | None = None
    slots_per_gpu: int | None = None
    redundant: int | None = None
    profile: Path | None = None
    machine: str | None = None

    def __post_init__(self) -> None:
        config.require_within(self, "--set ", seed=config.Span(0), value_bytes=config.Span(1))
        if self.profile is not None and self.machine is not None:
            raise UsageError("--profile and --machine both give costs, expected one of them")

    @property
    def copies(self) -> str:
        """Return the choice of the copy for a token."""
        return self.routing or engine_slots.ROUTING.get(self.engine or "", "nearest")

    @property
    def costs(self) -> str:
        """Describe the costs, for tables."""
        if self.machine is not None:
            return f"machine {self.machine}"
        return "unit costs, no profile" if self.profile is None else f"profile {self.profile}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRow:
    """A planner on some requests.

    Attributes:
        requests: `planned on`, `held out` or `unseen task`; for a saved plan `planned on`, `partly planned on` or
            `other`, by the share of these requests that it was made from.
        planning_s: seconds of planning.
    """

    planner: str
    requests: str
    score: PlacementScore
    planning_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "planner": self.planner,
            "requests": self.requests,
            "planning_s": self.planning_s,
            **self.score.to_json(),
        }


def open_traces(given: Sequence[str], *, whole: bool = False) -> dict[str, Workload]:
    """Open traces or counts from `SERVER=DIR`.

    Args:
        whole: whether `DIR` alone is allowed, of the whole cluster.

    Raises:
        UsageError: a value has no `=`, a server is named twice, or there is no such folder.
        MismatchError: a trace is damaged.
    """
    traces: dict[str, Workload] = {}
    for text in given:
        server, equals, path = text.partition("=")
        if whole and Path(text).is_dir():
            server, path = WHOLE, text
        elif not equals or not server or not path:
            neither, alone = (" and is no directory", ", or DIR of the whole cluster") if whole else ("", "")
            raise UsageError(f"--trace {text!r} names no server{neither}; write --trace SERVER=DIR{alone}")
        if server in traces:
            raise UsageError(f"--trace names {server or 'the whole cluster'} twice; give each one trace")
        traces[server] = open_workload(Path(path))
    return traces


def latency_of(cluster: Cluster, spec: ModelSpec, setting: Setting) -> Latency:
    """Return the costs of a profile or a named machine, or unit costs without either.

    Raises:
        UsageError: the machine is unknown, or lacks figures.
        MismatchError: the profile is of another model, or the model's sizes are unknown.
    """
    if setting.machine is not None:
        profile = machine_profile(read_named_machine(setting.machine), spec)
    elif setting.profile is not None:
        profile = CostProfile.load(setting.profile)
    else:
        return unit_latency(cluster, sides=setting.sides)
    latency = profiled_latency(cluster, spec, profile, sides=setting.sides, value_bytes=setting.value_bytes)
    return latency if setting.machine is None else replace(latency, name=setting.costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningInputs:
    """Inputs that all planners of a cluster share.

    Attributes:
        cluster: with the memory that a placement may use.
        demands: by kind of requests, `planned on` and `held out`.
        uses: whether a request is planned on.
        routing: choice of the copy for a token.
        slots: slots of each layer on every GPU; 0: as memory allows.
        choices: balance against memory, if it decided the slots.
    """

    spec: ModelSpec
    cluster: Cluster
    latency: Latency
    demands: dict[str, Demand]
    uses: Callable[[str, int], bool]
    routing: str
    slots: int = 0
    choices: tuple[SlotChoice, ...] = field(default=())

    def problem(self, seed: int) -> Problem:
        """Return the problem of the requests to plan on."""
        return Problem(
            demand=self.demands["planned on"],
            latency=self.latency,
            seed=seed,
            equal_slots=self.slots,
            routing=self.routing,
        )

    def place(self, name: str, options: Any, seed: int) -> tuple[np.ndarray, float]:
        """Return a planner's placement in these slots, and its planning seconds."""
        problem = self.problem(seed)
        placed_GLE, seconds = timed(name, problem, options)
        return planner.filled(problem, placed_GLE, self.slots, name) if self.slots else placed_GLE, seconds


def planning_inputs(
    traces: Mapping[str, Workload], cluster: Cluster, split: float, setting: Setting, limit: int = 0
) -> PlanningInputs:
    """Read the requests of a cluster, and divide its memory into slots.

    Args:
        limit: slots of each layer on a GPU by a planner's options (0: none).

    Raises: as `plan_placement`.
    """
    spec = one_model(traces, cluster)
    num_gpus = len(cluster.gpus)
    uses = planned_share(split, traces)
    demands = _split_demands(traces, cluster, uses, split, setting)
    wanted = engine_slots.wanted_slots(spec, num_gpus, setting.slots_per_gpu, setting.redundant)
    slots, choices = 0, []
    if setting.engine is not None or wanted:
        whole, slots = engine_slots.equal_slots(cluster, spec, setting.engine, wanted or limit)
        if wanted > slots:
            raise CapacityError(
                f"{wanted} slots of each layer on a GPU need {wanted * spec.num_layers * spec.slot_bytes:,} bytes, but "
                f"the smallest GPU has room for {slots}; lower --slots-per-gpu or --redundant"
            )
        if not wanted and not limit:
            choices = engine_slots.slot_choices(spec, num_gpus, slots, demands["planned on"].tokens_LE)
            whole, slots = engine_slots.equal_slots(cluster, spec, setting.engine, engine_slots.knee(choices))
        cluster = whole
        demands = {name: replace(demand, cluster=cluster) for name, demand in demands.items()}
    planner.require_room(spec, cluster)
    return PlanningInputs(
        spec=spec,
        cluster=cluster,
        latency=latency_of(cluster, spec, setting),
        demands=demands,
        uses=uses,
        routing=setting.copies,
        slots=slots,
        choices=tuple(choices),
    )


def plan_placement(
    traces: Mapping[str, Workload],
    cluster: Cluster,
    name: str,
    options: Mapping[str, Any],
    *,
    split: float = 1.0,
    setting: Setting | None = None,
    inputs: PlanningInputs | None = None,
) -> tuple[PlacementPlan, list[PlannerRow]]:
    """Plan on a share of the requests; return the plan, and its scores on those requests and on the rest.

    Args:
        inputs: `planning_inputs` of these arguments, if made already.

    Raises:
        UsageError: the planner, an option or a server is unknown, or there is no token to plan from.
        MismatchError: traces or profile are of different models, or the planner cannot place for `setting.engine`.
        CapacityError: the experts do not fit, or the engine's equal slots do not hold them.
    """
    setting = setting or Setting()
    chosen = config.parse(planner.find(name).Options, options, f"planner {name}")
    c_max = int(getattr(chosen, "c_max", 0))
    inputs = inputs or planning_inputs(traces, cluster, split, setting, slot_limit(name, options))
    placed_GLE, seconds = inputs.place(name, chosen, setting.seed)
    rows = [
        PlannerRow(
            planner=name,
            requests=requests,
            score=_score(demand, inputs.latency, placed_GLE, setting, c_max, inputs.slots),
            planning_s=seconds,
        )
        for requests, demand in inputs.demands.items()
    ]
    return plan_of(inputs, traces, (name, chosen), placed_GLE, (rows[0], split, setting)), rows


def slot_limit(name: str, options: Mapping[str, Any]) -> int:
    """Return the slots of each layer on a GPU by a planner's options; 0 without a limit."""
    chosen = config.parse(planner.find(name).Options, options, f"planner {name}")
    return int(getattr(chosen, "c_max", 0)) or int(getattr(chosen, "slots_per_gpu", 0))


def plan_of(
    inputs: PlanningInputs,
    traces: Mapping[str, Workload],
    planned: tuple[str, Any],
    placed_GLE: np.ndarray,
    scored: tuple[PlannerRow, float, Setting],
) -> PlacementPlan:
    """Return a placement as a plan.

    Args:
        planned: the planner and its options.
        scored: its score on the requests that it was planned on, their share, and the settings.
    """
    (name, options), (row, split, setting) = planned, scored
    first, latency = row.score, inputs.latency
    by_latency = ("T_comp + T_comm (DIRECTOR, Eq. 5)", first.latency, first.memory_bound)
    objective, value, bound = {
        "remote": ("remote calls (Prism, Eq. 2)", first.remote_calls, first.remote_bound),
        "messages": (f"messages per layer and forward of {FORWARD_TOKENS} tokens", first.messages, None),
    }.get(getattr(options, "objective", getattr(planner.find(name), "OBJECTIVE", "")), by_latency)
    plan = PlacementPlan(
        spec=inputs.spec,
        cluster=inputs.cluster,
        planner=name,
        options=asdict(options),
        seed=setting.seed,
        experts_LG=experts_of(placed_GLE),
        starts=setting.starts,
        costs=f"{latency.name}; in {latency.unit}" + ("" if setting.sides == "both" else f"; sides={setting.sides}"),
        objective=objective,
        value=value,
        lower_bound=bound,
        traces=tuple(
            TraceReference(
                server=server,
                path=str(trace.path),
                sha256=trace.sha256,
                requests=sum(inputs.uses(server, place) for place in range(len(trace.requests))),
            )
            for server, trace in traces.items()
        ),
        profile_sha256=None if setting.profile is None else durable.sha256_file(setting.profile),
        planning_s=row.planning_s,
        split=split,
    )
    plan.check(inputs.spec)
    return plan


def timed(name: str, problem: Problem, options: Any) -> tuple[np.ndarray, float]:
    """Return a placement and its planning seconds."""
    began = time.perf_counter()
    placed_GLE = planner.place(name, problem, options)
    return placed_GLE, time.perf_counter() - began


def score_plan(plan: PlacementPlan, traces: Mapping[str, Workload], *, setting: Setting | None = None) -> PlannerRow:
    """Score a plan on whole traces.

    Args:
        setting: settings of the score (default: tokens start as in the plan).

    Raises:
        MismatchError: a trace is of another model than the plan.
        UsageError: an unknown server, or no token.
    """
    setting = setting or Setting(starts=plan.starts, seed=plan.seed)
    spec = one_model(traces, plan.cluster)
    spec.require_same(plan.spec, "the trace", "the plan")
    latency = latency_of(plan.cluster, spec, setting)
    demand = read_demand(traces, plan.cluster, starts=setting.starts, seed=setting.seed)
    c_max = int(plan.options.get("c_max", 0))
    found = _score(demand, latency, plan.placed_GLE, setting, c_max)
    return PlannerRow(planner=plan.planner, requests=_seen(plan, traces), score=found, planning_s=plan.planning_s)


def _seen(plan: PlacementPlan, traces: Mapping[str, Workload]) -> str:
    """Describe whether a plan was made from these traces (`PlannerRow.requests`)."""
    planned = {reference.sha256: reference.requests for reference in plan.traces}
    used = [planned.get(trace.sha256, 0) for trace in traces.values()]
    if not any(used):
        return "other"
    whole = all(count >= len(trace.requests) for count, trace in zip(used, traces.values(), strict=True))
    return "planned on" if whole else "partly planned on"


def _split_demands(
    traces: Mapping[str, Workload], cluster: Cluster, uses: Callable[[str, int], bool], split: float, setting: Setting
) -> dict[str, Demand]:
    how: dict[str, Any] = {"starts": setting.starts, "seed": setting.seed}
    sides = {"planned on": uses, **({"held out": held_out(uses)} if split < 1 else {})}
    for name, chosen in sides.items():
        if not any(chosen(server, place) for server, trace in traces.items() for place in range(len(trace.requests))):
            raise UsageError(f"--split {split} leaves no request {name}; give another --split, or longer traces")
    return {name: read_demand(traces, cluster, chosen, **how) for name, chosen in sides.items()}


def _score(
    demand: Demand, latency: Latency, placed_GLE: np.ndarray, setting: Setting, c_max: int, slots: int = 0
) -> PlacementScore:
    if demand.tokens_GLE.shape != placed_GLE.shape:
        raise MismatchError("the plan and the requests have different shapes; plan again for this cluster")
    return score(
        Problem(demand=demand, latency=latency, equal_slots=slots),
        placed_GLE,
        routing=setting.copies,
        value_bytes=setting.value_bytes,
        c_max=c_max,
    )
