"""Placement plans from traces, a cluster and costs, and comparison of planners on held-out requests."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base import config, durable, plugins
from moetool.base.errors import MismatchError, UsageError
from moetool.base.tables import percent
from moetool.base.types import Cluster, ModelSpec
from moetool.costing.costs import CostProfile
from moetool.placement import planner
from moetool.placement.demand import Demand, held_out, one_model, planned_share, read_demand, spread
from moetool.placement.engine_slots import equal_slots, filled
from moetool.placement.latency import VALUE_BYTES, Latency, profiled_latency, unit_latency
from moetool.placement.plan import PlacementPlan, TraceReference, experts_of
from moetool.placement.planner import Problem
from moetool.placement.scoring import (
    FORWARD_TOKENS,
    PlacementScore,
    latency_bound,
    remote_bound,
    score,
    work_bound,
)
from moetool.trace.expert_counts import ExpertCounts, open_workload
from moetool.trace.reader import Trace

Workload = Trace | ExpertCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a score, in addition to the traces.

    Attributes:
        seed: seed of every random choice.
        starts: choice of the GPU of its server where a request's tokens start (`moetool.placement.demand.STARTS`).
        sides: sides of Eq. 4, `both` or `send` (`moetool.placement.latency.Latency`).
        routing: choice of the copy for a token when plans are scored (`moetool.placement.latency.ROUTINGS`).
        value_bytes: bytes of one number of a hidden state in transit.
        engine: engine that a plan is for (`moetool.placement.engine_slots.ENGINES`): every GPU gets equal slots of each
            layer.

    Raises:
        UsageError: the seed is below 0, or value_bytes is not above 0.
    """

    seed: int = 0
    starts: str = "round_robin"
    sides: str = "both"
    routing: str = "nearest"
    value_bytes: int = VALUE_BYTES
    engine: str | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UsageError(f"--set seed: found {self.seed}, expected a whole number, 0 or more")
        if self.value_bytes < 1:
            raise UsageError(f"--set value_bytes: found {self.value_bytes}, expected a whole number above 0")


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
    planning_s: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "planner": self.planner,
            "requests": self.requests,
            "planning_s": self.planning_s,
            **self.score.to_json(),
        }


def open_traces(given: Sequence[str]) -> dict[str, Workload]:
    """Open traces or counts from `SERVER=DIR`.

    Raises:
        UsageError: a value has no `=`, a server is named twice, or there is no such folder.
        MismatchError: a trace is damaged.
    """
    traces: dict[str, Workload] = {}
    for text in given:
        server, equals, path = text.partition("=")
        if not equals or not server or not path:
            raise UsageError(f"--trace {text!r} names no server; write --trace SERVER=DIR")
        if server in traces:
            raise UsageError(f"--trace names the server {server!r} twice; give each one trace")
        traces[server] = open_workload(Path(path))
    return traces


def latency_of(cluster: Cluster, spec: ModelSpec, profile: CostProfile | None, setting: Setting) -> Latency:
    """Return the profile's costs, or unit costs without one."""
    if profile is None:
        return unit_latency(cluster, sides=setting.sides)
    return profiled_latency(cluster, spec, profile, sides=setting.sides, value_bytes=setting.value_bytes)


def plan_placement(
    traces: Mapping[str, Workload],
    cluster: Cluster,
    name: str,
    options: Mapping[str, Any],
    *,
    profile: Path | None = None,
    split: float = 1.0,
    setting: Setting | None = None,
) -> tuple[PlacementPlan, list[PlannerRow]]:
    """Plan on a share of the requests; return the plan, and its scores on those requests and on the rest.

    Raises:
        UsageError: the planner, an option or a server is unknown, or there is no token to plan from.
        MismatchError: traces or profile are of different models, or the planner cannot place for `setting.engine`.
        CapacityError: the experts do not fit, or the engine's equal slots do not hold them.
    """
    setting = setting or Setting()
    spec = one_model(traces, cluster)
    module = planner.find(name)
    chosen = config.parse(module.Options, options, f"planner {name}")
    c_max = int(getattr(chosen, "c_max", 0))
    slots = 0
    if setting.engine is not None:
        cluster, slots = equal_slots(cluster, spec, setting.engine, c_max or int(getattr(chosen, "slots_per_gpu", 0)))
    planner.require_room(spec, cluster)
    known = CostProfile.load(profile) if profile is not None else None
    latency = latency_of(cluster, spec, known, setting)
    uses = planned_share(split)
    demands = _split_demands(traces, cluster, uses, split, setting)
    problem = Problem(demand=demands["planned on"], latency=latency, seed=setting.seed)
    placed_GLE, seconds = timed(name, problem, chosen)
    if setting.engine is not None:
        placed_GLE = filled(problem, placed_GLE, slots, name)
    rows = [
        PlannerRow(
            planner=name,
            requests=requests,
            score=_score(demand, latency, placed_GLE, setting, c_max),
            planning_s=seconds,
        )
        for requests, demand in demands.items()
    ]
    first = rows[0].score
    by_latency = ("T_comp + T_comm (DIRECTOR, Eq. 5)", first.latency, first.work_bound)
    objective, value, bound = {
        "remote": ("remote calls (Prism, Eq. 2)", first.remote_calls, first.remote_bound),
        "messages": (f"messages per layer and forward of {FORWARD_TOKENS} tokens", first.messages, None),
    }.get(getattr(chosen, "objective", getattr(module, "OBJECTIVE", "")), by_latency)
    plan = PlacementPlan(
        spec=spec,
        cluster=cluster,
        planner=name,
        options=asdict(chosen),
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
                requests=sum(uses(server, place) for place in range(len(trace.requests))),
            )
            for server, trace in traces.items()
        ),
        profile_sha256=None if profile is None else durable.sha256_file(profile),
        planning_s=seconds,
        split=split,
    )
    plan.check(spec)
    return plan, rows


def timed(name: str, problem: Problem, options: Any) -> tuple[np.ndarray, float]:
    """Return a placement and its planning seconds."""
    began = time.perf_counter()
    placed_GLE = planner.place(name, problem, options)
    return placed_GLE, time.perf_counter() - began


def score_plan(
    plan: PlacementPlan, traces: Mapping[str, Workload], *, profile: Path | None = None, setting: Setting | None = None
) -> PlannerRow:
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
    known = CostProfile.load(profile) if profile is not None else None
    latency = latency_of(plan.cluster, spec, known, setting)
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


def comparable() -> list[str]:
    """Return every planner except `exhaustive`, which is for tiny cases."""
    return [name for name in plugins.names("planner") if name != "exhaustive"]


def compare(
    traces: Mapping[str, Workload],
    cluster: Cluster,
    names: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    profile: Path | None = None,
    split: float = 0.5,
    unseen: Trace | None = None,
    setting: Setting | None = None,
) -> list[PlannerRow]:
    """Compare planners on the requests that they plan on, on held-out ones, and on an unseen task.

    Args:
        options: planners' options, by name.
        split: share of each trace's requests to plan on.
        unseen: trace of an unseen task, whose requests come to all servers equally.

    Raises:
        UsageError: `unseen` is one of `traces`, or there is no planner; else as `plan_placement`.
        MismatchError, CapacityError: as `plan_placement`.
    """
    setting = setting or Setting()
    if not names:
        raise UsageError(f"no planner to compare, expected some of {', '.join(plugins.names('planner'))}")
    spec = one_model(traces, cluster)
    planner.require_room(spec, cluster)
    latency = latency_of(cluster, spec, CostProfile.load(profile) if profile is not None else None, setting)
    demands = _split_demands(traces, cluster, planned_share(split), split, setting)
    if unseen is not None:
        spec.require_same(unseen.spec, "the traces", "the unseen task")
        if planned := [server for server, trace in traces.items() if trace.sha256 == unseen.sha256]:
            raise UsageError(f"{unseen.path} is the trace of server {planned[0]}, expected one of an unseen task")
        alone = Cluster(servers=(cluster.servers[0],))
        tokens_LE = read_demand({cluster.servers[0].name: unseen}, alone).tokens_LE
        demands["unseen task"] = spread(spec, cluster, np.repeat(tokens_LE[None], len(cluster.servers), axis=0))
    problem = Problem(demand=demands["planned on"], latency=latency, seed=setting.seed)
    made, limits = {}, []
    for name in names:
        chosen = config.parse(planner.find(name).Options, (options or {}).get(name, {}), f"planner {name}")
        made[name] = timed(name, problem, chosen)
        limits.append(int(getattr(chosen, "c_max", 0)))
    placed = [placed_GLE for placed_GLE, _ in made.values()]
    rows: dict[tuple[str, str], PlannerRow] = {}
    for requests, demand in demands.items():
        asked = Problem(demand=demand, latency=latency)
        bounds: dict[str, Any] = {
            "remote_bound": remote_bound(asked),
            "work_bound": work_bound(asked),
            "latency_bound": latency_bound(asked, *placed, c_max=0 if 0 in limits else max(limits)),
        }
        for name, (placed_GLE, seconds) in made.items():
            found = score(asked, placed_GLE, bounds=False, routing=setting.routing, value_bytes=setting.value_bytes)
            rows[name, requests] = PlannerRow(
                planner=name, requests=requests, score=replace(found, **bounds), planning_s=seconds
            )
    return [rows[name, requests] for name in made for requests in demands]


def verdict(rows: Sequence[PlannerRow]) -> list[str]:
    """Return, per kind of requests, the planners of least T_comp + T_comm, most local calls and fewest messages."""
    lines = []
    for requests in dict.fromkeys(row.requests for row in rows):
        mine = sorted((row for row in rows if row.requests == requests), key=lambda row: row.score.latency)
        best, local = mine[0], max(mine, key=lambda row: row.score.local)
        fewest = min(mine, key=lambda row: row.score.messages)
        line = f"{requests}: {best.planner} has the least T_comp + T_comm"
        if len(mine) > 1 and best.score.latency > 0:
            more = mine[1].score.latency / best.score.latency - 1
            line += f" ({mine[1].planner} {percent(more)} more)"
        if best.score.latency_gap is not None:
            line += f", at most {percent(best.score.latency_gap)} above the bound"
        line += f"; {local.planner} computes the most calls locally ({percent(local.score.local)})"
        lines.append(f"{line}; {fewest.planner} sends the fewest messages ({fewest.score.messages:.2f})")
    return lines


def _split_demands(
    traces: Mapping[str, Workload], cluster: Cluster, uses: Callable[[str, int], bool], split: float, setting: Setting
) -> dict[str, Demand]:
    how: dict[str, Any] = {"starts": setting.starts, "seed": setting.seed}
    demands = {"planned on": read_demand(traces, cluster, uses, **how)}
    if split < 1:
        try:
            demands["held out"] = read_demand(traces, cluster, held_out(uses), **how)
        except UsageError:
            raise UsageError(f"--split {split} leaves no request with tokens to hold out; give longer traces") from None
    return demands


def _score(demand: Demand, latency: Latency, placed_GLE: np.ndarray, setting: Setting, c_max: int) -> PlacementScore:
    if demand.tokens_GLE.shape != placed_GLE.shape:
        raise MismatchError("the plan and the requests have different shapes; plan again for this cluster")
    return score(
        Problem(demand=demand, latency=latency),
        placed_GLE,
        routing=setting.routing,
        value_bytes=setting.value_bytes,
        c_max=c_max,
    )
