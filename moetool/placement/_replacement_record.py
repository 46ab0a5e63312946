"""A decision and its outcome, as simulations and schedulers keep it."""

from dataclasses import dataclass

from moetool.json_files import JsonRecord
from moetool.placement._decide import Decision


@dataclass(slots=True, kw_only=True)
class ReplacementRecord(JsonRecord):
    """One decision whether to place experts anew; zeros where nothing could be decided or nothing changes.

    Attributes:
        at_s: when.
        planner: that was asked.
        local_before: share of the expert calls that the placement in force computes at home, on what was seen.
        local_after: the same under the new placement.
        calls_before: remote calls over the horizon under the placement in force, and
        calls_after: under a new one (`moetool.placement._decide.Observed`).
        horizon_tokens: tokens that are expected until the next change.
        call_s: seconds that a remote call costs.
        measured: whether they were measured, or come from the plan's links.
        saved_s: one side of Eq. 4: (calls_before - calls_after) * call_s.
        eq3_s: Eq. 3, additions only.
        moves_s: all moves one after the other.
        foreseen_s: how long the migration is expected to take, with the pauses that leave links to users.
        cost_s: the other side of Eq. 4: the larger of the two.
        worth_it: saved_s > cost_s.
        made: whether experts moved.
        copies: experts that a GPU gets anew.
        bytes: that move.
        plan_s: that planning took, where it is charged, and
        waited_s: that a round of requests waited for the plan and, where it waits for them, for the moves.
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
    foreseen_s: float = 0.0
    cost_s: float = 0.0
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
        """Note a decision."""
        self.outcome, self.made = decision.reason, decision.made
        if not decision.moves:
            return
        plan = decision.migration
        for name in ("calls_before", "calls_after", "call_s", "saved_s", "eq3_s", "worth_it", "bytes"):
            setattr(self, name, getattr(plan, name))
        self.moves_s, self.cost_s, self.copies = plan.seconds, decision.cost_s, decision.copies
