"""Whether to place experts anew, and by which moves: Prism's Eq. 4, in seconds and on requests not planned from."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from moetool import planner
from moetool.cluster.statistics import Statistics
from moetool.costing.latency import unit_latency
from moetool.errors import CapacityError
from moetool.placement_plan import MigrationPlan, Move, bare_plan
from moetool.planner import Problem
from moetool.planning.demand import Demand
from moetool.planning.migration import plan_migration, remote_calls
from moetool.types import Cluster, Gpu, ModelSpec, Server

Place = tuple[int, int]
"""MoE layer and expert."""

_SPARES = (0, 1)


@dataclass(slots=True, kw_only=True)
class Decision:
    """One time that the scheduler thought about the placement.

    Attributes:
        at_s: when, in seconds since 1970.
        planner: that was asked.
        local_before: share of the expert calls that the placement in force computes at home, on what was seen.
        local_after: the same under the new placement.
        calls_before: remote calls over the horizon under the placement in force, and
        calls_after: under a new one, each counted on requests that the new one was not made from.
        horizon_tokens: tokens that are expected until the next change.
        call_s: seconds that a remote call costs.
        measured: whether they were measured, or come from the plan's links.
        saved_s: one side of Eq. 4: (calls_before - calls_after) * call_s.
        eq3_s: Eq. 3, additions only.
        moves_s: all moves one after the other over the links as they were last seen.
        cost_s: the other side of Eq. 4: the larger of the two.
        worth_it: saved_s > cost_s.
        made: whether experts moved.
        copies: experts that a server gets anew.
        bytes: that move.
        done_s: when the last move was done.
        skipped: moves that failed or had become needless or harmful.
        outcome: for people.
    """

    at_s: float
    planner: str
    local_before: float = 0.0
    local_after: float = 0.0
    calls_before: float = 0.0
    calls_after: float = 0.0
    horizon_tokens: float = 0.0
    call_s: float = 0.0
    measured: bool = False
    saved_s: float = 0.0
    eq3_s: float = 0.0
    moves_s: float = 0.0
    cost_s: float = 0.0
    worth_it: bool = False
    made: bool = False
    copies: int = 0
    bytes: int = 0
    done_s: float | None = None
    skipped: int = 0
    outcome: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A move, by servers.

    Attributes:
        kind: `copy` (to `server`) or `drop` (from it).
        seconds: that it is expected to take.
    """

    kind: str
    place: Place
    server: int
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """A decision, and what would be done.

    Attributes:
        steps: in an order that keeps every expert held and every server within its room.
        target: what each server then holds.
    """

    decision: Decision
    steps: tuple[Step, ...] = ()
    target: Mapping[int, frozenset[Place]] = field(default_factory=dict)


def pooled(spec: ModelSpec, cluster: Cluster, slots: Mapping[int, int]) -> Cluster:
    """The servers that are there, as planners see them: one GPU each.

    A worker has one pool. Its host memory does not count: a worker computes what is in its pool and nothing else, so
    an expert cannot step aside there.

    Args:
        slots: experts that each server has room for, by its number.
    """
    return replace(
        cluster,
        servers=tuple(
            Server(
                name=cluster.servers[n].name,
                gpus=(
                    Gpu(
                        memory_bytes=slots[n] * spec.slot_bytes,
                        host_to_device_bytes_s=min(gpu.host_to_device_bytes_s for gpu in cluster.servers[n].gpus),
                        speed=sum(gpu.speed for gpu in cluster.servers[n].gpus),
                    ),
                ),
                host_memory_bytes=0,
                disk_bytes_s=cluster.servers[n].disk_bytes_s,
            )
            for n in sorted(slots)
        ),
        links=tuple(
            link
            for link in cluster.links
            if {*link.between} <= {cluster.servers[n].name for n in slots}  # of servers that are there
        ),
    )


def think(
    statistics: Statistics,
    cluster: Cluster,
    held: Mapping[int, Set[Place]],
    slots: Mapping[int, int],
    now_s: float,
    *,
    name: str,
    options: Mapping[str, Any],
    horizon_s: float,
    seed: int = 0,
) -> Thought:
    """Place anew from what was seen, and weigh it against the placement in force.

    Both sides of the gain are counted by parts: what was seen in each is judged by a placement made from the others.
    The placement that would come into force is made from all.

    Args:
        cluster: the plan's.
        held: what each server that is there holds; together they hold every expert.
        slots: experts that it has room for.
        name: of the planner.
        options: the planner's.

    Source: Prism § III-C3, Eqs. 3 and 4, with the repairs of `moetool.planning.migration`.
    """
    # A slot has the size of the largest expert, whatever is in it.
    spec = replace(statistics.spec, expert_bytes_L=(statistics.spec.slot_bytes,) * statistics.spec.num_layers)
    servers = tuple(sorted(slots))
    decision = Decision(at_s=now_s, planner=name)
    machines = pooled(spec, statistics.measured(cluster, tuple(range(len(cluster.servers)))), slots)
    demand = statistics.demand(machines, servers)
    folds = statistics.folds(machines, servers)
    if demand is None or not folds or not statistics.tokens_s:
        decision.outcome = "too little seen"
        return Thought(decision=decision)
    placed_NLE = as_array(spec, [held[n] for n in servers])
    pairs = float(demand.tokens_GLE.sum())
    decision.local_before = 1 - remote_calls(demand, placed_NLE) / pairs
    decision.horizon_tokens = statistics.tokens_s * horizon_s
    calls = decision.horizon_tokens * sum(spec.top_k_L)
    measured_s = statistics.call_s
    migration: MigrationPlan | None = None
    for spare in _SPARES:
        try:
            new_NLE = _place(name, demand, machines, options, seed, spare)
            early, migration = _migration(spec, machines, placed_NLE, new_NLE, demand, decision, measured_s)
        except CapacityError as error:
            decision.outcome = f"no room: {error}"
            continue
        decision.local_after = 1 - remote_calls(demand, new_NLE) / pairs
        if not migration.moves and not early:
            decision.outcome = "the placement in force is the best known"
            decision.local_after = decision.local_before
            return Thought(decision=decision)
        shares = [
            (remote_calls(judge, placed_NLE), remote_calls(judge, _place(name, made, machines, options, seed, spare)))
            for made, judge in folds
        ]
        judged = sum(float(judge.tokens_GLE.sum()) for _, judge in folds)
        decision.calls_before = sum(before for before, _ in shares) / judged * calls
        decision.calls_after = sum(after for _, after in shares) / judged * calls
        break
    if migration is None:
        return Thought(decision=decision)
    decision.call_s, decision.measured = migration.call_s, measured_s is not None
    decision.saved_s = (decision.calls_before - decision.calls_after) * decision.call_s
    decision.eq3_s, decision.moves_s = migration.eq3_s, migration.seconds
    decision.cost_s = max(migration.eq3_s, migration.seconds)
    decision.worth_it = decision.saved_s > decision.cost_s
    decision.bytes = migration.bytes
    steps = [_step(move, servers) for move in (*early, *migration.moves)]
    decision.copies = sum(step.kind == "copy" for step in steps)
    decision.outcome = "worth it" if decision.worth_it else "not worth it"
    target = {n: frozenset(places_of(new_NLE[i])) for i, n in enumerate(servers)}
    return Thought(decision=decision, steps=tuple(steps), target=target)


def steps_to(
    spec: ModelSpec, cluster: Cluster, held: Mapping[int, Set[Place]], target: Mapping[int, Set[Place]]
) -> list[Step]:
    """The moves that lead to a target that was decided on before; none if there is no room for them.

    Args:
        cluster: as `pooled`, of the servers in `target`.
    """
    spec = replace(spec, expert_bytes_L=(spec.slot_bytes,) * spec.num_layers)
    servers = tuple(sorted(target))
    old_NLE, new_NLE = (as_array(spec, [places.get(n, set()) for n in servers]) for places in (held, target))
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=np.ones(old_NLE.shape))
    try:
        early, migration = _migration(spec, cluster, old_NLE, new_NLE, demand, Decision(at_s=0.0, planner=""), 0.0)
    except CapacityError:
        return []
    return [_step(move, servers) for move in (*early, *migration.moves)]


def as_array(spec: ModelSpec, held: Sequence[Set[Place]]) -> np.ndarray:
    """placed_NLE from places."""
    placed_NLE = np.zeros((len(held), spec.num_layers, spec.num_experts), bool)
    for n, places in enumerate(held):
        for layer, expert in places:
            placed_NLE[n, layer, expert] = True
    return placed_NLE


def places_of(placed_LE: np.ndarray) -> list[Place]:
    """Places from an array."""
    return [(layer, expert) for layer, expert in np.argwhere(placed_LE).tolist()]


def _place(
    name: str, demand: Demand, machines: Cluster, options: Mapping[str, Any], seed: int, spare: int
) -> np.ndarray:
    """A placement that leaves `spare` slots of each server free."""
    room = machines
    if spare:
        gpus = [server.gpus[0] for server in machines.servers]
        slot_bytes = demand.spec.slot_bytes
        room = replace(
            machines,
            servers=tuple(
                replace(server, gpus=(replace(gpu, memory_bytes=max(0, gpu.memory_bytes - spare * slot_bytes)),))
                for server, gpu in zip(machines.servers, gpus, strict=True)
            ),
        )
    problem = Problem(demand=replace(demand, cluster=room), latency=unit_latency(room), seed=seed)
    return planner.place(name, problem, dict(options))


def _migration(
    spec: ModelSpec,
    machines: Cluster,
    old_NLE: np.ndarray,
    new_NLE: np.ndarray,
    demand: Demand,
    decision: Decision,
    call_s: float | None,
) -> tuple[list[Move], MigrationPlan]:
    """Moves; where they do not fit as the servers are, copies that nobody wants and others have go first.

    Raises: CapacityError if they do not fit then.
    """
    new = bare_plan(spec, machines, new_NLE, decision.planner)
    for early, start_NLE in (([], old_NLE), _thinned(old_NLE, new_NLE)):
        try:
            return early, plan_migration(
                bare_plan(spec, machines, start_NLE, decision.planner),
                new,
                demand,
                horizon_tokens=decision.horizon_tokens,
                call_s=call_s,
            )
        except CapacityError as error:
            stuck = error
    raise stuck


def _thinned(old_NLE: np.ndarray, new_NLE: np.ndarray) -> tuple[list[Move], np.ndarray]:
    """The placement without copies that the new one does not want, as far as another server has them; and the drops."""
    left_NLE, drops = old_NLE.copy(), []
    for n, layer, expert in np.argwhere(old_NLE & ~new_NLE).tolist():
        if left_NLE[:, layer, expert].sum() > 1:
            left_NLE[n, layer, expert] = False
            drops.append(Move(kind="drop", layer=layer, expert=expert, gpu=n, source=-1, bytes=0, seconds=0.0))
    return drops, left_NLE


def _step(move: Move, servers: Sequence[int]) -> Step:
    assert move.kind in ("copy", "drop"), "without host memory nothing steps aside there"
    return Step(
        kind=move.kind,
        place=(move.layer, move.expert),
        server=servers[move.gpu],
        bytes=move.bytes,
        seconds=move.seconds,
    )
