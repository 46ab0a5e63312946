"""Comparison of planners on held-out requests, and what it takes to migrate to the best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from moetool.base import config, plugins
from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.base.tables import count, percent
from moetool.base.types import Cluster
from moetool.placement import planner
from moetool.placement.bounds import latency_bound, memory_bound, remote_bound
from moetool.placement.decide import plan_migration
from moetool.placement.demand import Demand, read_demand, spread
from moetool.placement.engine_slots import initial_map
from moetool.placement.plan import MigrationPlan, PlacementPlan, bare_plan
from moetool.placement.planner import Problem
from moetool.placement.planning import PlannerRow, PlanningInputs, Setting, Workload, plan_of, planning_inputs
from moetool.placement.scoring import score
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.reader import Trace

CURRENT = "current"
"""Name of the row of the placement in force."""
_BASELINES = ("annealing", "director_rounding", "exhaustive", "moetuner")


def comparable() -> list[str]:
    """Return the planners to compare unless told otherwise: all but slow baselines of DIRECTOR's experiments."""
    return [name for name in plugins.names("planner") if name not in _BASELINES]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planners on the same requests.

    Attributes:
        rows: planner by planner, for each kind of requests.
        best: the planner with the least T_comp + T_comm on the requests that count: held-out ones, if there are any.
        migration: moves from the placement in force to it; None if that is unknown, or best.
        left_out: why planners that cannot place here are left out.
        inputs: requests, memory and costs of all planners.
        window_tokens: mean tokens of a window of counts; None without counts.
    """

    rows: tuple[PlannerRow, ...]
    best: str
    plan: PlacementPlan | None
    migration: MigrationPlan | None
    left_out: tuple[str, ...]
    inputs: PlanningInputs
    window_tokens: float | None


def compare(
    traces: Mapping[str, Workload],
    cluster: Cluster,
    names: Sequence[str],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    split: float = 0.5,
    unseen: Trace | None = None,
    current: PlacementPlan | None = None,
    setting: Setting | None = None,
) -> Comparison:
    """Compare planners on the requests that they plan on, on held-out ones, and on an unseen task.

    Args:
        options: planners' options, by name.
        split: share of each trace's requests to plan on; of counts, the first windows.
        unseen: trace of an unseen task, whose requests come to all servers equally.
        current: the placement in force (None: an engine's initial map, with `setting.engine`). For an engine, new plans
            have its slots unless the setting has others.

    Raises:
        UsageError: `unseen` is one of `traces`, or there is no planner; else as `plan_placement`.
        MismatchError, CapacityError: as `plan_placement`.
    """
    setting = setting or Setting()
    if not names:
        raise UsageError(f"no planner to compare, expected some of {', '.join(plugins.names('planner'))}")
    if current is not None and setting.engine is not None and setting.slots_per_gpu is setting.redundant is None:
        setting = replace(setting, slots_per_gpu=int(current.placed_GLE.sum(axis=2).max()))
    inputs = planning_inputs(traces, cluster, split, setting)
    demands = dict(inputs.demands)
    if unseen is not None:
        demands["unseen task"] = _unseen(inputs, traces, unseen)
    made: dict[str, tuple[np.ndarray, float]] = {}
    chosen = {
        name: config.parse(planner.find(name).Options, (options or {}).get(name, {}), f"planner {name}")
        for name in names
    }
    left_out: list[MoetoolError] = []
    for name in names:
        try:
            made[name] = inputs.place(name, chosen[name], setting.seed)
        except (MismatchError, CapacityError) as error:
            left_out.append(error)
    if not made:
        raise left_out[0]
    in_force = _in_force(inputs, current, setting)
    placed = {name: placed_GLE for name, (placed_GLE, _) in made.items()}
    if in_force is not None:
        placed = {CURRENT: in_force, **placed}
    limits = [int(getattr(chosen[name], "c_max", 0)) for name in made]
    rows = _rows(inputs, demands, placed, 0 if 0 in limits else max(limits), setting)
    rows = [replace(row, planning_s=made[row.planner][1]) if row.planner in made else row for row in rows]
    judged = "held out" if "held out" in inputs.demands else "planned on"
    best = min((row for row in rows if row.requests == judged), key=lambda row: row.score.latency)
    plan, migration = None, None
    if best.planner != CURRENT:
        planned_on = next(row for row in rows if row.planner == best.planner and row.requests == "planned on")
        planned = (best.planner, chosen[best.planner])
        plan = plan_of(inputs, traces, planned, placed[best.planner], (planned_on, split, setting))
        if in_force is not None:
            old = bare_plan(inputs.spec, inputs.cluster, in_force, CURRENT)
            migration = plan_migration(
                old, plan, inputs.demands[judged], call_s=0.0, latency=inputs.latency, routing=setting.copies
            )
    counted = [trace for trace in traces.values() if isinstance(trace, ExpertCounts)]
    return Comparison(
        rows=tuple(rows),
        best=best.planner,
        plan=plan,
        migration=migration,
        left_out=tuple(f"left out: {error}" for error in left_out),
        inputs=inputs,
        window_tokens=sum(trace.num_tokens / len(trace.requests) for trace in counted) if counted else None,
    )


def _unseen(inputs: PlanningInputs, traces: Mapping[str, Workload], unseen: Trace) -> Demand:
    inputs.spec.require_same(unseen.spec, "the traces", "the unseen task")
    if planned := [server for server, trace in traces.items() if trace.sha256 == unseen.sha256]:
        raise UsageError(f"{unseen.path} is the trace of server {planned[0]}, expected one of an unseen task")
    servers = inputs.cluster.servers
    tokens_LE = read_demand({servers[0].name: unseen}, Cluster(servers=servers[:1])).tokens_LE
    return spread(inputs.spec, inputs.cluster, np.repeat(tokens_LE[None], len(servers), axis=0))


def _in_force(inputs: PlanningInputs, current: PlacementPlan | None, setting: Setting) -> np.ndarray | None:
    """Return the placement in force; None if it is unknown."""
    if current is None:
        return None if setting.engine is None else initial_map(inputs.spec, len(inputs.cluster.gpus), inputs.slots)
    current.spec.require_same(inputs.spec, "the current plan", "the traces")
    if len(current.cluster.gpus) != len(inputs.cluster.gpus):
        raise MismatchError(
            f"the current plan is for {len(current.cluster.gpus)} GPUs, but --cluster has {len(inputs.cluster.gpus)}; "
            f"give that of the plan"
        )
    if (short := current.placed_GLE.sum(axis=(1, 2)) > inputs.problem(0).slots_G).any():
        raise CapacityError(
            f"the current plan holds {int(current.placed_GLE[short][0].sum()):,} experts on GPU {int(short.argmax())}, "
            f"more than the {int(inputs.problem(0).slots_G[short][0]):,} of the new plans; give --slots-per-gpu"
        )
    return current.placed_GLE


def _rows(
    inputs: PlanningInputs,
    demands: Mapping[str, Demand],
    placed: Mapping[str, np.ndarray],
    c_max: int,
    setting: Setting,
) -> list[PlannerRow]:
    """Score placements on each kind of requests, with one bound for all."""
    rows: dict[tuple[str, str], PlannerRow] = {}
    for requests, demand in demands.items():
        asked = Problem(demand=demand, latency=inputs.latency, equal_slots=inputs.slots)
        bounds: dict[str, Any] = {
            "remote_bound": remote_bound(asked),
            "memory_bound": memory_bound(asked),
            "latency_bound": latency_bound(asked, *placed.values(), c_max=c_max),
        }
        for name, placed_GLE in placed.items():
            found = score(asked, placed_GLE, bounds=False, routing=setting.copies, value_bytes=setting.value_bytes)
            rows[name, requests] = PlannerRow(planner=name, requests=requests, score=replace(found, **bounds))
    return [rows[name, requests] for name in placed for requests in demands]


def verdict(rows: Sequence[PlannerRow]) -> list[str]:
    """Return, per kind of requests, the planners of least T_comp + T_comm, most local calls and fewest messages.

    Local calls and messages are left out where all planners have the same.
    """
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
        if local.score.local > min(row.score.local for row in mine):
            line += f"; {local.planner} computes the most calls locally ({percent(local.score.local)})"
        if fewest.score.messages < max(row.score.messages for row in mine):
            line += f"; {fewest.planner} sends the fewest messages ({fewest.score.messages:.2f})"
        lines.append(line)
    return lines


def migration_lines(migration: MigrationPlan, window_tokens: float | None = None) -> list[str]:
    """Return what a migration costs, and when it pays.

    Args:
        window_tokens: mean tokens of a window of counts, to say it in windows too.
    """
    if not migration.moves:
        return ["migration: nothing moves"]
    copies = sum(move.kind == "copy" for move in migration.moves)
    moved = (
        f"migration: {copies:,} copies, {count(migration.bytes, 'B')}, {migration.parallel_s:,.3g} s with all GPUs at "
        f"once, {migration.seconds:,.3g} s one by one"
    )
    if migration.step_before_s is None or migration.step_after_s is None:
        return [moved, "when it pays is not known with unit costs; give --machine NAME or --profile FILE"]
    saved = 1 - migration.step_after_s / migration.step_before_s
    saved_s = migration.step_before_s - migration.step_after_s
    pays = migration.pays_after_tokens
    if pays is None:
        return [moved, f"it does not pay: T_comp + T_comm grows by {percent(-saved)}"]
    told = f"it pays after {pays:,.0f} tokens"
    if window_tokens:
        told += f" ({pays / window_tokens:,.3g} windows)"
    per = saved_s / migration.horizon_tokens * 1e6
    return [moved, f"{told}: T_comp + T_comm falls by {percent(saved)}, {per:,.3g} s for each million tokens"]
