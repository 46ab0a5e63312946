"""A re-placement decision and its outcome, for simulations and schedulers."""

from dataclasses import dataclass

from moetool.base.json_files import JsonRecord
from moetool.placement.decide import Decision


@dataclass(slots=True, kw_only=True)
class ReplacementRecord(JsonRecord):
    """One re-placement decision; zeros where no decision was possible or nothing changes.

    Attributes:
        at_s: time of the decision.
        local_before: local compute share of the current placement on the observed requests.
        local_after: the same under the new placement.
        calls_before: remote calls over the horizon under the current placement (`moetool.placement.decide.Observed`).
        calls_after: the same under the new placement.
        horizon_tokens: expected tokens until the next change.
        call_s: seconds of a remote call.
        measured: whether `call_s` was measured, or comes from the plan's links.
        saved_s: one side of Eq. 4: (calls_before - calls_after) * call_s.
        eq3_s: Eq. 3, additions only.
        printed_s: Eq. 3 as printed; Eq. 4 as printed holds if saved_s is more.
        moves_s: seconds of all moves in sequence.
        foreseen_s: expected seconds of the migration, with pauses that leave links to users.
        cost_s: the other side of Eq. 4: the larger of eq3_s and moves_s.
        step_before_s: T_comp + T_comm over the horizon under the current placement; None without measured costs.
        step_after_s: the same under the new placement.
        worth_it: whether Eq. 4 holds: saved_s > cost_s.
        made: whether experts moved.
        copies: number of copied experts.
        plan_s: seconds of planning, trials of links included; of a simulation if charged.
        waited_s: seconds that a round of requests waited for the plan and, if it waits for them, for the moves.
        done_s: time of the last move's end.
        skipped: moves that failed or became unnecessary or harmful.
        outcome: description for users.
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
    printed_s: float = 0.0
    moves_s: float = 0.0
    foreseen_s: float = 0.0
    cost_s: float = 0.0
    step_before_s: float | None = None
    step_after_s: float | None = None
    worth_it: bool = False
    made: bool = False
    copies: int = 0
    bytes: int = 0
    plan_s: float = 0.0
    waited_s: float = 0.0
    done_s: float | None = None
    skipped: int = 0
    outcome: str = ""

    def take(self, decision: Decision) -> None:
        self.outcome, self.made = decision.reason, decision.made
        if not decision.moves:
            return
        plan = decision.migration
        shared = "calls_before calls_after call_s saved_s eq3_s printed_s step_before_s step_after_s worth_it bytes"
        for name in shared.split():
            setattr(self, name, getattr(plan, name))
        self.moves_s, self.cost_s, self.copies = plan.seconds, decision.cost_s, decision.copies
