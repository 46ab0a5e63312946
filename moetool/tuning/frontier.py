"""Memory against latency: the best cache policy for each budget, and the least budget that is fast enough."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from moetool.base.errors import CapacityError
from moetool.base.json_files import JsonRecord
from moetool.tuning.candidates import Candidates, touched_bytes, tpot_s
from moetool.tuning.replay import ReplayRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(JsonRecord):
    """The best policy for one budget.

    Attributes:
        device_memory_bytes: device memory for the whole model.
        policy: best candidate on the choosing requests.
        slots: slots of its pool.
        tpot_used_s: mean time per output token on those requests; None without a profile.
        tpot_held_out_s: the same on held-out requests.
        bytes_used: bytes per decode token, loaded or read by host compute, on the choosing requests.
        bytes_held_out: the same on held-out requests.
        chosen: whether it is the plan's budget.
    """

    device_memory_bytes: int
    policy: str
    slots: int
    tpot_used_s: float | None
    tpot_held_out_s: float | None
    bytes_used: float
    bytes_held_out: float
    chosen: bool = False


def budgets_between(least_bytes: int, most_bytes: int, slot_bytes: int, count: int) -> list[int]:
    """Return budgets from the least to the most, evenly spaced in whole slots; none for 0, the first for 1."""
    spread = (most_bytes - least_bytes) // slot_bytes
    steps = range(count) if spread > 0 else range(min(count, 1))
    return [least_bytes + spread * i // max(count - 1, 1) * slot_bytes for i in steps]


def frontier(candidates: Candidates, budgets: Iterable[int], chosen: int, chosen_held_out: ReplayRow) -> list[Point]:
    """Return the best policy for each budget and the chosen one, with its cost on held-out requests.

    Args:
        chosen_held_out: held-out row of the chosen budget.
        budgets: device memory for the whole model; those without a fitting candidate are left out.
    """
    winners = candidates.winners([*budgets, chosen])
    by_policy: dict[str, list[int]] = {}
    for budget, row in winners.items():
        if budget != chosen:
            by_policy.setdefault(row.policy, []).append(budget)
    shown = {chosen: chosen_held_out}
    for policy, won in by_policy.items():
        rooms = [candidates.for_experts(policy, budget) for budget in won]
        shown |= zip(won, candidates.replay([policy], rooms, candidates.held_out), strict=True)
    return [
        Point(
            device_memory_bytes=budget,
            policy=row.policy,
            slots=row.slots,
            tpot_used_s=tpot_s(row),
            tpot_held_out_s=tpot_s(shown[budget]),
            bytes_used=touched_bytes(row),
            bytes_held_out=touched_bytes(shown[budget]),
            chosen=budget == chosen,
        )
        for budget, row in winners.items()
    ]


def least_budget(
    candidates: Candidates, smallest: int, most_bytes: int, slot_bytes: int, target_s: float, budgets: Iterable[int]
) -> int:
    """Return the least budget whose best policy reaches a time per token, on the choosing requests.

    It is found by bisection over slots, between the last of `budgets` that is too slow and the first that is not. The
    search assumes that more slots are not slower, which prefetching policies do not guarantee. The budget found is fast
    enough, and one slot less is not, but a still smaller one could be.

    Args:
        smallest, most_bytes: smallest and largest budget.
        slot_bytes: step of the search.
        budgets: budgets to try first, in one pass over the trace.

    Raises:
        CapacityError: no budget is fast enough.
    """
    tried = sorted({smallest, most_bytes, *(budget for budget in budgets if smallest < budget < most_bytes)})
    winners = candidates.winners(tried)
    seconds = {budget: candidates.require_decoding(row) for budget, row in winners.items()}
    first = next((budget for budget in tried if seconds.get(budget, target_s + 1) <= target_s), None)
    if first is None:
        budget = min(seconds, key=lambda budget: (seconds[budget], budget))
        raise CapacityError(
            f"no policy brings a token to {target_s * 1e3:,.4g} ms in {most_bytes:,} bytes of device "
            f"memory; the best is {seconds[budget] * 1e3:,.4g} ms, by {winners[budget].policy} with "
            f"{winners[budget].slots} slots ({budget:,} bytes); allow that, or raise --device-memory"
        )
    if first == smallest:
        return first
    slow = tried[tried.index(first) - 1]

    def fast_enough(budget: int) -> bool:
        row = candidates.winners([budget]).get(budget)
        return row is not None and candidates.require_decoding(row) <= target_s

    between = range(slow + slot_bytes, first, slot_bytes)
    at = bisect_left(between, True, key=fast_enough)
    return between[at] if at < len(between) else first
