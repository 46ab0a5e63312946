"""Medians, ratios and bounds of a serving bench."""

import pytest

from moetool.bench.serving_results import summarize
from moetool.bench.serving_runs import PhaseTimes, ServingRun
from moetool.caching._residency import Counts


def _phase(*seconds: float, read: float = 0.0, ahead: float = 0.0) -> PhaseTimes:
    return PhaseTimes(seconds=seconds, bytes_read=read, ahead_bytes=ahead, stall_s=1.0, booking_s=0.1)


def _run(decode: PhaseTimes) -> ServingRun:
    counts = Counts(kept=2, prefetched=1, missed=1)
    return ServingRun(prefill=_phase(9.0, read=90.0), decode=decode, prefill_counts=counts, decode_counts=counts)


RESIDENT = [_run(_phase(1.0, 3.0)), _run(_phase(2.0, 2.0)), _run(_phase(4.0, 4.0))]  # means 2, 2, 4
RATES = [10.0, 20.0, 10.0]


def test_on_demand_lines_are_bounded_by_the_sum() -> None:
    runs = [_run(_phase(4.0, 6.0, read=40.0)), _run(_phase(8.0, 8.0, read=40.0)), _run(_phase(9.0, 15.0, read=40.0))]
    line = summarize("lru", runs, RESIDENT, RATES, budget_bytes=1, slots=2)
    assert (line.tpot_p50_s, line.tpot_mean_s) == (8.0, 8.0)  # means and medians of the rounds: 5, 8, 12
    assert line.tpot_p95_s == pytest.approx(8.0)  # 5.9, 8, 14.7
    assert line.hit_rate == 0.75
    assert line.bytes_per_token == 20.0
    assert line.stall_share == pytest.approx(1 / 16)
    assert line.booking_share == pytest.approx(0.1 / 16)
    bound = line.decode
    assert bound is not None and not bound.reads_ahead
    assert (bound.compute_s, bound.io_s) == (2.0, 2.0)  # 2, 2, 4 and 2, 1, 2
    assert (bound.sum_s, bound.larger_s) == (4.0, 2.0)  # 4, 3, 6 and 2, 2, 4
    assert bound.x_resident == 3.0  # 5/2, 8/2, 12/4: of one round each
    assert bound.x_bound == 2.0  # 5/4, 8/3, 12/6
    assert line.prefill is not None and line.prefill.sum_s == 18.0  # 9 of compute and 9, 4.5, 9 of reading


def test_prefetching_lines_are_bounded_by_the_maximum() -> None:
    runs = [_run(_phase(5.0, 5.0, read=40.0, ahead=1.0)) for _ in RATES]
    bound = summarize("duoserve", runs, RESIDENT, RATES, budget_bytes=1, slots=2).decode
    assert bound is not None and bound.reads_ahead
    assert bound.x_bound == 2.5  # 5/2, 5/2, 5/4


def test_without_a_resident_line_there_are_no_bounds() -> None:
    line = summarize("lru", RESIDENT, None, RATES, budget_bytes=1, slots=2)
    assert line.prefill is None and line.decode is None
    assert line.tpot_mean_s == 2.0
