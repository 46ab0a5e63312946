"""The one re-placement decision: whether to migrate, and by which moves.

`plan migrate`, the simulator, the scheduler of an edge cluster and the head of expert-parallel ranks all call
`decide`. They differ in their observations and in the execution of a decision.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, MismatchError
from moetool.base.types import Cluster, ModelSpec
from moetool.placement import planner
from moetool.placement.demand import Demand
from moetool.placement.latency import VALUE_BYTES, Latency, layers_s, unit_latency
from moetool.placement.migration import order_moves, windows
from moetool.placement.plan import MigrationPlan, Move, PlacementPlan
from moetool.placement.planner import Problem
from moetool.placement.scoring import remote_call_s, remote_calls

_LOG = logging.getLogger(__name__)

SEES: Mapping[str, str] = {
    "vanilla": "nothing",
    "offline": "nothing",
    "reactive": "past",
    "proactive": "queue",
    "predicted": "prediction",
}
"""DIRECTOR's modes (§ III, § VIII-B), and the requests that each plans for: none, the last served ones, the waiting
ones, or predictions for the waiting ones. vanilla starts uniform, the others from the history."""
_CALLS, _STEPS = "remote calls", "T_comp + T_comm"
_FREE_SLOTS = (0, 1)
"""Slots per GPU that the planner leaves free, in the order of tries: one only if moves otherwise have no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The observed requests behind a decision.

    Attributes:
        tokens_GLE: served or expected tokens that start on GPU g and use expert e of layer l.
        held_out: the same in disjoint parts: requests to plan on, and requests to judge by. Empty: both are all
            requests.
        horizon_tokens: expected tokens of the whole cluster under the next placement.
        source: description of the requests.
    """

    tokens_GLE: np.ndarray
    held_out: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    horizon_tokens: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The current placement and its cluster, with the memory for placements."""

    spec: ModelSpec
    cluster: Cluster
    placed_GLE: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementCosts:
    """Measured costs, in seconds.

    Attributes:
        latency: costs of computing and sending.
        routing: choice of the copy for a token (`moetool.placement.latency.flows`).
        call_s: seconds of a remote call (None: from the cluster's links).
        control_s: returns the seconds of moves in addition to those of their bytes.
        move_bytes_s: rate of experts to each GPU when all receive at once.
        added_byte_s: recently measured slowdown of serving per byte of moved experts.
        free_s: seconds of compute phases before the new placement is needed, in which moves are free.
        plan_s: expected seconds of `free_s` that prediction and planning take.
    """

    latency: Latency
    routing: str = "nearest"
    call_s: float | None = None
    control_s: Callable[[Sequence[Move]], float] = lambda moves: 0.0
    move_bytes_s: float = float("inf")
    added_byte_s: float = 0.0
    free_s: float = 0.0
    plan_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanner:
    """The planner that proposes a placement, and the test that accepts it.

    Attributes:
        planner: name, with options and seed.
        weighs: `calls`: remote calls saved over the horizon against moves in sequence (Prism, Eq. 4, repaired).
            `printed`: the same against Eq. 3 as printed, which divides by the GPUs' own rates. `steps`: T_comp + T_comm
            saved over the horizon, in seconds, against moves in sequence. `latency`: T_comp + T_comm saved on the
            observed requests (DIRECTOR, Eq. 5) against concurrent moves to all GPUs, into a double buffer (DIRECTOR
            § V-B).
        always: accept every proposal.
    """

    planner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    weighs: str = "calls"
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A re-placement decision.

    Attributes:
        placed_GLE: the proposed placement.
        migration: ordered moves to it (none if it is the current one), both sides of Prism's Eq. 4, and T_comp
            + T_comm over the horizon, if costs are in seconds and `latency` does not decide.
        gain_s: gain of moving (`Replanner.weighs`).
        gain_of: what the gain counts: `remote calls`, or `T_comp + T_comm` where their costs are measured.
        cost_s: cost of moving.
        made: whether to migrate.
        reason: explanation for users.
        saw: description of the requests.
        predict_s, plan_s: seconds of prediction and planning, if measured by the caller.
    """

    placed_GLE: np.ndarray = field(repr=False)
    migration: MigrationPlan
    gain_s: float
    cost_s: float
    made: bool
    reason: str
    saw: str
    gain_of: str = _CALLS
    predict_s: float = 0.0
    plan_s: float = 0.0

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.migration.moves

    @property
    def copies(self) -> int:
        """Return the number of copied experts."""
        return sum(move.kind == "copy" for move in self.moves)

    @property
    def bytes(self) -> int:
        return self.migration.bytes

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, without the placement and the moves."""
        names = ("saw", "predict_s", "plan_s", "gain_s", "cost_s", "copies", "bytes", "made")
        return {name: getattr(self, name) for name in names}


def decide(
    observed: Observed,
    in_force: InForce,
    costs: ReplacementCosts,
    replanner: Replanner,
    target_GLE: np.ndarray | None = None,
) -> Decision:
    """Propose a placement for the observed requests, and weigh it against the current one. Pure: no I/O and no clock.

    Args:
        target_GLE: a given proposal, instead of the planner's.

    Raises:
        UsageError: nothing was observed, or the planner or an option is unknown.
        MismatchError: the time of a remote call is neither measured nor given by the links.
        CapacityError: no placement fits, or moves have no room on a GPU or host.
    """
    spec, cluster, old_GLE = in_force.spec, in_force.cluster, in_force.placed_GLE
    batched = replanner.weighs == "latency"

    def propose(tokens_GLE: np.ndarray, free_slots: int) -> np.ndarray:
        demand = Demand(
            spec=spec, cluster=planner.with_reserved(cluster, free_slots * spec.slot_bytes), tokens_GLE=tokens_GLE
        )
        problem = Problem(demand=demand, latency=costs.latency, seed=replanner.seed, start_GLE=old_GLE)
        return planner.place(replanner.planner, problem, dict(replanner.options))

    stuck: CapacityError | None = None
    for free_slots in _FREE_SLOTS:
        try:
            new_GLE = propose(observed.tokens_GLE, free_slots) if target_GLE is None else target_GLE
            moves = order_moves(spec, cluster, old_GLE, new_GLE, buffered=batched)
            break
        except CapacityError as error:
            stuck = stuck or error
    else:
        assert stuck is not None
        raise stuck
    judged = [(judge_GLE, propose(made_GLE, free_slots)) for made_GLE, judge_GLE in observed.held_out if moves]
    judged = judged or [(observed.tokens_GLE, new_GLE)]
    priced = costs.latency.unit == "s" and not batched
    plan = _eq4(in_force, new_GLE, moves, judged, observed.horizon_tokens, costs, priced=priced)
    gain_s, cost_s, gain_of = plan.saved_s, max(plan.eq3_s, plan.seconds), _CALLS
    if replanner.weighs == "steps" and plan.step_saved_s is not None:
        gain_s, gain_of = plan.step_saved_s, _STEPS
    if replanner.weighs == "printed":
        cost_s = plan.printed_s
    if batched:
        gain_s, cost_s = _batch_sides(observed, in_force, new_GLE, costs)
        gain_of = _STEPS
    pays = gain_s > cost_s
    _LOG.debug(
        "%s by %s: %d moves, gain %.4g s, cost %.4g s; Eq. 4: %.0f to %.0f remote calls of %.3g s, %.4g s of moves",
        *(replanner.planner, replanner.weighs, len(moves), gain_s, cost_s),
        *(plan.calls_before, plan.calls_after, plan.call_s, plan.seconds),
    )
    return Decision(
        placed_GLE=new_GLE,
        migration=plan,
        gain_s=gain_s,
        cost_s=cost_s,
        made=bool(moves) and (pays or replanner.always),
        reason=("worth it" if pays else "not worth it") if moves else "the current placement is the best known",
        saw=observed.source,
        gain_of=gain_of,
    )


def _eq4(
    in_force: InForce,
    new_GLE: np.ndarray,
    moves: Sequence[Move],
    judged: Sequence[tuple[np.ndarray, np.ndarray]],
    horizon_tokens: float,
    costs: ReplacementCosts,
    *,
    priced: bool,
) -> MigrationPlan:
    """Return both sides of Prism's Eq. 4, and whether it holds.

    Args:
        judged: requests, and the new placement made without them.
        priced: whether to add T_comp + T_comm over the horizon.

    Source: Prism § III-C3, Eqs. 3 and 4. Repairs:
        - Eq. 3 charges additions only; as printed, dropping an expert would cost as much as loading it.
        - Eq. 4 compares a number of calls with seconds. Here both sides are seconds: the calls saved over the horizon
          times the seconds of a remote call, against the larger of Eq. 3 and all moves in sequence with their measured
          overhead. Eq. 3 alone loads every expert at the GPU's own rate, even over a slow link.
        - Calls are counted on held-out requests, where there are any.
    """
    spec, cluster, old_GLE = in_force.spec, in_force.cluster, in_force.placed_GLE
    scale = horizon_tokens * sum(spec.top_k_L) / sum(float(judge_GLE.sum()) for judge_GLE, _ in judged)
    sides = [(judge_GLE, old_GLE) for judge_GLE, _ in judged], judged
    before, after = (scale * sum(remote_calls(cluster, *pair) for pair in side) for side in sides)
    steps_s: tuple[float | None, ...] = None, None
    if priced:
        steps_s = tuple(
            scale * sum(layers_s(costs.latency, cluster, *pair, costs.routing) for pair in side) for side in sides
        )
    call_s = costs.call_s
    if call_s is None:
        if spec.hidden_size <= 0:
            raise MismatchError(
                f"the hidden size of {spec.name} is unknown, and so is the cost of a remote call; measure "
                f"one and give --call-ms"
            )
        call_s = remote_call_s(cluster, VALUE_BYTES * spec.hidden_size)
    loads_s = _added_bytes(in_force, new_GLE) / np.array([gpu.host_to_device_bytes_s for gpu in cluster.gpus])
    saved_s, eq3_s = (before - after) * call_s, float(loads_s.sum())
    moves_s = sum(move.seconds for move in moves) + costs.control_s(moves)
    return MigrationPlan(
        spec=spec,
        cluster=cluster,
        moves=tuple(moves),
        bytes=sum(move.bytes for move in moves),
        seconds=moves_s,
        eq3_s=eq3_s,
        calls_before=before,
        calls_after=after,
        call_s=call_s,
        saved_s=saved_s,
        horizon_tokens=horizon_tokens,
        worth_it=saved_s > max(eq3_s, moves_s),
        step_before_s=steps_s[0],
        step_after_s=steps_s[1],
    )


def _batch_sides(
    observed: Observed, in_force: InForce, new_GLE: np.ndarray, costs: ReplacementCosts
) -> tuple[float, float]:
    """Return DIRECTOR's Eq. 5 gain on the observed requests, and the cost of moving.

    The cost is the seconds beyond the remaining compute phases, or the recently measured slowdown.
    """
    spent_s = [
        layers_s(costs.latency, in_force.cluster, observed.tokens_GLE, placed_GLE)
        for placed_GLE in (in_force.placed_GLE, new_GLE)
    ]
    bytes_G = _added_bytes(in_force, new_GLE)
    beyond_s = float(bytes_G.max()) / costs.move_bytes_s - max(0.0, costs.free_s - costs.plan_s)
    return spent_s[0] - spent_s[1], max(0.0, beyond_s, float(bytes_G.sum()) * costs.added_byte_s)


def _added_bytes(in_force: InForce, new_GLE: np.ndarray) -> np.ndarray:
    """Return the bytes of experts that each GPU receives."""
    copies_GL = (new_GLE & ~in_force.placed_GLE).sum(axis=2)
    return copies_GL @ np.array(in_force.spec.expert_bytes_L)


def _without_memory(cluster: Cluster) -> Cluster:
    servers = [
        replace(server, gpus=tuple(replace(gpu, memory_bytes=1, reserved_bytes=0) for gpu in server.gpus))
        for server in cluster.servers
    ]
    return replace(cluster, servers=tuple(servers))


def plan_migration(
    old: PlacementPlan,
    new: PlacementPlan,
    demand: Demand,
    *,
    horizon_tokens: float | None = None,
    call_s: float | None = None,
    window_s: float | None = None,
    latency: Latency | None = None,
    routing: str = "nearest",
) -> MigrationPlan:
    """Plan the migration between two saved plans of one model and cluster, and whether it pays.

    With costs in seconds, it pays if the T_comp + T_comm saved over the horizon exceed the moves with all GPUs at once
    (DIRECTOR, Eq. 5). With unit costs, only calls between servers are priced (Prism, Eq. 4).

    Args:
        demand: requests on which both placements are judged.
        horizon_tokens: tokens to serve until the next migration (None: those of `demand`).
        window_s: length of the compute phases for the moves (DIRECTOR § V-B).
        latency: costs of computing and sending (None: unit costs).
        routing: choice of the copy for a token (`moetool.placement.latency.flows`).

    Raises:
        MismatchError: the plans are of different models or clusters; else as `decide`.
        CapacityError: as `decide`.
    """
    new.spec.require_same(old.spec, "the new plan", "the old plan")
    if old.cluster != new.cluster:
        slots = [min(one.cluster.slots_G(one.spec.slot_bytes)) // one.spec.num_layers for one in (old, new)]
        if _without_memory(old.cluster) == _without_memory(new.cluster) and slots[0] != slots[1]:
            raise MismatchError(
                f"the old plan has {slots[0]} slots of each layer on a GPU, the new one {slots[1]}; plan both with "
                f"--slots-per-gpu {slots[0]}"
            )
        raise MismatchError("the two plans are for different clusters; plan both for one with: moetool plan placement")
    demand.spec.require_same(new.spec, "the trace", "the plan")
    latency = latency or unit_latency(new.cluster)
    priced = latency.unit == "s"
    tokens = float(demand.tokens_GLE.sum()) / sum(new.spec.top_k_L)
    horizon_tokens = tokens if horizon_tokens is None else horizon_tokens
    observed = Observed(tokens_GLE=demand.tokens_GLE, horizon_tokens=horizon_tokens)
    in_force = InForce(spec=new.spec, cluster=new.cluster, placed_GLE=old.placed_GLE)
    if call_s is None and new.spec.hidden_size <= 0 and (priced or len(new.cluster.servers) < 2):
        call_s = 0.0
    costs = ReplacementCosts(latency=latency, routing=routing, call_s=call_s)
    plan = decide(observed, in_force, costs, Replanner(planner=new.planner), new.placed_GLE).migration
    plan = replace(plan, parallel_s=_parallel_s(plan.moves, len(new.cluster.gpus)))
    if plan.step_saved_s is not None:
        plan = replace(plan, worth_it=plan.step_saved_s > plan.parallel_s)
    if window_s is None:
        return plan
    return replace(plan, windows=windows([move.seconds for move in plan.moves], window_s), window_s=window_s)


def _parallel_s(moves: Sequence[Move], num_gpus: int) -> float:
    """Return the seconds of moves with all GPUs at once: those of the GPU that receives or sends longest."""
    to_G, from_G = np.zeros(num_gpus), np.zeros(num_gpus)
    for move in moves:
        to_G[move.gpu] += move.seconds
        if move.source >= 0:
            from_G[move.source] += move.seconds
    return float(max(to_G.max(), from_G.max()))
