"""Whether to place experts anew, and by which moves: the one re-placement decision.

`plan stream` and `plan migrate`, the simulator, the scheduler of an edge cluster and the head of expert-parallel ranks
all call `decide`. They differ in their observations and in how they carry a decision out.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from moetool.errors import CapacityError, MismatchError
from moetool.placement import _planner as planner
from moetool.placement._demand import Demand
from moetool.placement._latency import Latency, layers_s, unit_latency
from moetool.placement._migration import order_moves, windows
from moetool.placement._placement_plan import MigrationPlan, Move, PlacementPlan
from moetool.placement._planner import Problem
from moetool.placement._scoring import remote_call_s, remote_calls
from moetool.types import Cluster, ModelSpec

_LOG = logging.getLogger(__name__)

SEES: Mapping[str, str] = {
    "vanilla": "nothing",
    "offline": "nothing",
    "reactive": "past",
    "proactive": "queue",
    "predicted": "prediction",
}
"""DIRECTOR's modes (§ III, § VIII-B), and whose requests each places for while serving: nobody's, those that were
served last, those that wait, or what is predicted of these. vanilla begins uniform, the others from the history."""
_VALUE_BYTES = 2
"""Bytes of one number of a hidden state in transit, where a remote call was not measured."""
_SPARES = (0, 1)
"""Slots of each GPU that the planner leaves free: none, or one where experts else have no room on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The requests that a decision is made from.

    Attributes:
        tokens_GLE: tokens that start on GPU g and use expert e of layer l, as they were served or are expected.
        held_out: the same in parts: what a placement is made from, and what it is judged by, without a request in
            common. Empty: it is judged by what it is made from.
        horizon_tokens: tokens of the whole cluster that the next placement is expected to serve.
        source: whose requests, for people.
    """

    tokens_GLE: np.ndarray
    held_out: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    horizon_tokens: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """The placement in force, and the machines that it is on, with the memory that placements may fill."""

    spec: ModelSpec
    cluster: Cluster
    placed_GLE: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementCosts:
    """Measured costs, in seconds.

    Attributes:
        latency: of computing and sending.
        call_s: of a remote call (None: from the cluster's links).
        move_control_s: that a copy takes beside those of its bytes.
        move_bytes_s: rate at which experts come to each GPU where all receive at once.
        added_byte_s: seconds that serving lately took longer for each byte of experts on the move.
        free_s: compute phases before the new placement is needed, in which such moves cost nothing.
        plan_s: of these, what predicting and planning are expected to take.
    """

    latency: Latency
    call_s: float | None = None
    move_control_s: float = 0.0
    move_bytes_s: float = float("inf")
    added_byte_s: float = 0.0
    free_s: float = 0.0
    plan_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanner:
    """The planner that proposes a placement, and the test that accepts it.

    Attributes:
        planner: its name, with its options and the seed of its random choices.
        weighs: `calls`: remote calls saved over the horizon against moves one after the other (Prism, Eq. 4).
            `latency`: T_comp + T_comm saved on what was observed (DIRECTOR, Eq. 5) against moves to all GPUs at once,
            into a double buffer (DIRECTOR § V-B).
        always: accept whatever that says.
    """

    planner: str
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    weighs: str = "calls"
    always: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision.

    Attributes:
        placed_GLE: the placement proposed.
        migration: ordered moves to it, none where it is in force, and both sides of Prism's Eq. 4.
        gain_s: the side of the inequality that speaks for moving, and
        cost_s: the other (`Replanner.weighs`).
        made: whether experts are to move.
        reason: for people.
        saw: whose requests.
        predict_s, plan_s: that predicting and planning took, where the caller has measured them.
    """

    placed_GLE: np.ndarray = field(repr=False)
    migration: MigrationPlan
    gain_s: float
    cost_s: float
    made: bool
    reason: str
    saw: str
    predict_s: float = 0.0
    plan_s: float = 0.0

    @property
    def moves(self) -> tuple[Move, ...]:
        """In order."""
        return self.migration.moves

    @property
    def copies(self) -> int:
        """Experts that a GPU gets anew."""
        return sum(move.kind == "copy" for move in self.moves)

    @property
    def bytes(self) -> int:
        """Bytes of the moves."""
        return self.migration.bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON object, without the placement and the moves."""
        names = ("saw", "predict_s", "plan_s", "gain_s", "cost_s", "copies", "bytes", "made")
        return {name: getattr(self, name) for name in names}


def decide(
    observed: Observed,
    in_force: InForce,
    costs: ReplacementCosts,
    replanner: Replanner,
    target_GLE: np.ndarray | None = None,
) -> Decision:
    """Propose a placement for what was observed, and weigh it against the one in force. Pure: no I/O and no clock.

    Args:
        target_GLE: a proposal that was made already; the planner is not asked.

    Raises:
        UsageError: nothing was observed, or an unknown planner or option.
        MismatchError: the time of a remote call is neither measured nor known from the links.
        CapacityError: no placement fits, or none can be reached: neither a GPU nor a host has room on the way.
    """
    spec, cluster, old_GLE = in_force.spec, in_force.cluster, in_force.placed_GLE
    batched = replanner.weighs == "latency"

    def propose(tokens_GLE: np.ndarray, spare: int) -> np.ndarray:
        demand = Demand(
            spec=spec, cluster=planner.leaving_free(cluster, spare * spec.slot_bytes), tokens_GLE=tokens_GLE
        )
        problem = Problem(demand=demand, latency=costs.latency, seed=replanner.seed, start_GLE=old_GLE)
        return planner.place(replanner.planner, problem, dict(replanner.options))

    stuck: CapacityError | None = None
    for spare in _SPARES:
        try:
            new_GLE = propose(observed.tokens_GLE, spare) if target_GLE is None else target_GLE
            moves = order_moves(spec, cluster, old_GLE, new_GLE, buffered=batched)
            break
        except CapacityError as error:
            stuck = stuck or error
    else:
        assert stuck is not None
        raise stuck
    judged = [(judge_GLE, propose(made_GLE, spare)) for made_GLE, judge_GLE in observed.held_out if moves]
    plan = _eq4(in_force, new_GLE, moves, judged or [(observed.tokens_GLE, new_GLE)], observed.horizon_tokens, costs)
    gain_s, cost_s = plan.saved_s, max(plan.eq3_s, plan.seconds)
    if batched:
        gain_s, cost_s = _batch_sides(observed, in_force, new_GLE, costs)
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
    )


def _eq4(
    in_force: InForce,
    new_GLE: np.ndarray,
    moves: Sequence[Move],
    judged: Sequence[tuple[np.ndarray, np.ndarray]],
    horizon_tokens: float,
    costs: ReplacementCosts,
) -> MigrationPlan:
    """Both sides of Prism's Eq. 4, and whether it holds.

    Args:
        judged: requests, and the new placement as it is made without them.

    Source: Prism § III-C3, Eqs. 3 and 4. Repairs:
        - Eq. 3 charges additions only; as printed, dropping an expert would cost as much as loading it.
        - Eq. 4 compares a number of calls with seconds. Here both sides are seconds: the calls saved over the horizon,
          each as long as a remote call takes, against Eq. 3 or, if they take longer, against all moves one after the
          other, with what each was measured to take beside its bytes: Eq. 3 loads every expert at the GPU's own
          rate, also one that comes over a slow link.
        - Calls are counted on requests that the placement was not made from, where there are any.
    """
    spec, cluster, old_GLE = in_force.spec, in_force.cluster, in_force.placed_GLE
    calls = horizon_tokens * sum(spec.top_k_L) / sum(float(judge_GLE.sum()) for judge_GLE, _ in judged)
    before = calls * sum(remote_calls(cluster, judge_GLE, old_GLE) for judge_GLE, _ in judged)
    after = calls * sum(remote_calls(cluster, judge_GLE, other_GLE) for judge_GLE, other_GLE in judged)
    call_s = costs.call_s
    if call_s is None:
        if spec.hidden_size <= 0:
            raise MismatchError(
                f"the hidden size of {spec.name} is not known, so the cost of a remote call is unknown; measure "
                f"one and give --call-ms"
            )
        call_s = remote_call_s(cluster, _VALUE_BYTES * spec.hidden_size)
    loads_s = _added_bytes(in_force, new_GLE) / np.array([gpu.host_to_device_bytes_s for gpu in cluster.gpus])
    saved_s, eq3_s = (before - after) * call_s, float(loads_s.sum())
    bytes_s, copies = sum(move.seconds for move in moves), sum(move.kind == "copy" for move in moves)
    moves_s = bytes_s + copies * costs.move_control_s
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
    )


def _batch_sides(
    observed: Observed, in_force: InForce, new_GLE: np.ndarray, costs: ReplacementCosts
) -> tuple[float, float]:
    """Gain of DIRECTOR's Eq. 5 on the observed requests, and cost of moving: seconds beyond the compute phases left,
    or as long as moving lately took."""
    spent_s = [
        layers_s(costs.latency, in_force.cluster, observed.tokens_GLE, placed_GLE)
        for placed_GLE in (in_force.placed_GLE, new_GLE)
    ]
    bytes_G = _added_bytes(in_force, new_GLE)
    beyond_s = float(bytes_G.max()) / costs.move_bytes_s - max(0.0, costs.free_s - costs.plan_s)
    return spent_s[0] - spent_s[1], max(0.0, beyond_s, float(bytes_G.sum()) * costs.added_byte_s)


def _added_bytes(in_force: InForce, new_GLE: np.ndarray) -> np.ndarray:
    """Bytes of experts that each GPU gets anew."""
    copies_GL = (new_GLE & ~in_force.placed_GLE).sum(axis=2)
    return copies_GL @ np.array(in_force.spec.expert_bytes_L)


def plan_migration(
    old: PlacementPlan,
    new: PlacementPlan,
    demand: Demand,
    *,
    horizon_tokens: float,
    call_s: float | None = None,
    window_s: float | None = None,
) -> MigrationPlan:
    """Plan the way from one saved plan to another of the same model and cluster, and say whether it pays.

    Args:
        demand: the calls of both placements are counted on it.
        window_s: length of the compute phases that the moves are fitted into (DIRECTOR § V-B).

    Raises:
        MismatchError: the plans are of different models or clusters; else as `decide`.
        CapacityError: as `decide`.
    """
    new.spec.require_same(old.spec, "the new plan", "the old plan")
    if old.cluster != new.cluster:
        raise MismatchError("the two plans are for different clusters; plan both for one with: moetool plan placement")
    demand.spec.require_same(new.spec, "the trace", "the plan")
    observed = Observed(tokens_GLE=demand.tokens_GLE, horizon_tokens=horizon_tokens)
    in_force = InForce(spec=new.spec, cluster=new.cluster, placed_GLE=old.placed_GLE)
    costs = ReplacementCosts(latency=unit_latency(new.cluster), call_s=call_s)
    plan = decide(observed, in_force, costs, Replanner(planner=new.planner), new.placed_GLE).migration
    if window_s is None:
        return plan
    return replace(plan, windows=windows([move.seconds for move in plan.moves], window_s), window_s=window_s)
