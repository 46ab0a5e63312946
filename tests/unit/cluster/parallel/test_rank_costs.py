"""Costs in decisions of expert parallelism (given, measured or by a profile), and the ranks where requests start."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Link
from moetool.cluster.parallel.batch_placement import BatchCosts, measured_latency
from moetool.cluster.parallel.batch_records import BatchRecord, slope
from moetool.cluster.parallel.rank_costs import Costs
from moetool.costing.costs import CostProfile, Curve
from moetool.placement.request_ranks import RankAssignment
from tests.clusters import make_cluster
from tests.profiles import make_profile
from tests.refusals import refused
from tests.synthetic import make_spec

SPEC = make_spec(1, 4)
CLUSTER = make_cluster([[3], [3]], slot_bytes=SPEC.slot_bytes, link_bytes_s=1e8)
NOW = {"elapsed_s": None, "within_s": 0.0, "overlaps": True}


def record(**values: Any) -> BatchRecord:
    """A batch of two ranks: a second, half of it computing; 100 rows in 0.2 s on each."""
    whole = {"number": 0, "requests": 2, "seconds": 1.0, "ready_s": 0.0, "waited_s": 0.0, "steps": 1, "hottest": 50}
    none = np.zeros((2, 2), np.int64)
    moved = {"moved_bytes": 0, "moved_experts": 0, "moved_during_exchange": 0, "from_disk": 0, "held": 2, "version": 1}
    seconds = {"expert_s": 0.2, "dense_s": 0.3, "exchange_s": 0.5}
    return BatchRecord(**{**whole, **moved, **seconds, "rows": 100, "sent_GG": none, "tokens_GLE": none, **values})


def profile_of(**compute: Any) -> CostProfile:
    """An expert takes 10 ms, and 1 ms more a row."""
    made = make_profile(SPEC)
    expert = Curve(x=(1.0, 101.0), y=(0.011, 0.111))
    return replace(made, compute=tuple(replace(costs, expert=expert, **compute) for costs in made.compute))


def comp_s(costs: BatchCosts, rows: float = 1.0) -> float:
    """Of so many rows, where a source has 10 rows of one expert and 30 of another."""
    tokens_GLE = np.zeros((2, 1, 4))
    tokens_GLE[0, 0, 0], tokens_GLE[1, 0, 2] = 10, 30
    return float(measured_latency(CLUSTER, SPEC, tokens_GLE, costs).comp(rows))


def test_a_row_costs_what_is_measured_or_what_the_profile_has() -> None:
    profile = profile_of()
    by_profile = Costs(SPEC, CLUSTER, profile=profile)
    assert comp_s(by_profile.expected(**NOW)) == pytest.approx((0.020 + 0.040) / 40)  # a product for each source
    by_profile.note(record(), 0.0, 2)
    assert comp_s(by_profile.expected(**NOW)) == pytest.approx(0.2 * 2 / 100)
    by_profile.note(record(expert_s=0.4), 0.0, 2)
    assert comp_s(by_profile.expected(**NOW)) == pytest.approx(0.006)  # half of it is the newest batch's
    assert comp_s(Costs(SPEC, CLUSTER).expected(**NOW)) == pytest.approx(1e-6)


def test_links_cost_what_is_measured_or_what_the_cluster_has() -> None:
    costs = Costs(SPEC, CLUSTER)
    assert costs.expected(**NOW).byte_s_GG == pytest.approx(np.array([[0, 1e-8], [1e-8, 0]]))
    assert costs.expected(**NOW).move_bytes_s == pytest.approx(1e8)
    costs.note(record(byte_s=5e-6), 0.0, 2)  # a rank that waits for a busy one: no measure of experts' transfers
    assert costs.expected(**NOW).move_bytes_s == pytest.approx(1e8)
    costs = Costs(SPEC, CLUSTER)
    costs.note(record(byte_s=5e-8, moved_bytes=300), 0.1, 2)
    assert costs.expected(**NOW).byte_s_GG == pytest.approx(np.array([[0, 5e-8], [5e-8, 0]]))
    assert costs.expected(**NOW).move_bytes_s == pytest.approx(3000)
    costs.note(record(moved_bytes=3), 0.01, 2)  # the last piece of a transfer, which mostly waits
    assert costs.expected(**NOW).move_bytes_s == pytest.approx((300 / 2 + 3) / (0.1 / 2 + 0.01))
    profiled = Costs(SPEC, CLUSTER, profile=replace(profile_of(), link=Curve(x=(0.0, 1e6), y=(0.5, 2.5))))
    assert profiled.expected(**NOW).byte_s_GG == pytest.approx(np.array([[0, 2e-6], [2e-6, 0]]))


def test_links_that_differ_keep_their_ratios_when_they_are_measured() -> None:
    cluster = make_cluster(
        [[3], [3], [3]], link_bytes_s=1e8, links=(Link(between=("s0", "s1"), bytes_s=1e6, latency_s=0.0),)
    )
    costs = Costs(SPEC, cluster)
    before = costs.expected(**NOW).byte_s_GG
    costs.note(record(byte_s=1e-5), 0.0, 3)
    after = costs.expected(**NOW).byte_s_GG
    assert isinstance(before, np.ndarray) and isinstance(after, np.ndarray)
    assert after[0, 1] / after[0, 2] == pytest.approx(before[0, 1] / before[0, 2]) == pytest.approx(100)
    assert after[~np.eye(3, dtype=bool)].mean() == pytest.approx(1e-5)


def test_experts_move_for_nothing_in_what_is_left_of_the_compute_phases() -> None:
    costs = Costs(SPEC, CLUSTER)
    assert costs.expected(0.2, 3.0, overlaps=True).free_s == 0.0  # nothing tells how long a batch takes
    costs.note(record(), 0.0, 2)
    known = costs.expected(0.2, 3.0, overlaps=True)
    assert known.free_s == pytest.approx(0.8 * 0.5) and known.within_s == pytest.approx(3.8)
    assert costs.expected(0.2, 3.0, overlaps=False).free_s == 0.0
    assert costs.expected(5.0, 3.0, overlaps=True).free_s == 0.0


def test_what_batches_have_waited_for_experts_is_what_moving_costs_until_that_is_forgotten() -> None:
    costs = Costs(SPEC, CLUSTER)
    costs.note(record(moved_bytes=1000, ready_s=0.3, waited_s=0.1), 0.1, 2)
    assert costs.expected(**NOW).added_byte_s == pytest.approx(4e-4)
    costs.note(record(moved_bytes=500, ready_s=0.0), 0.1, 2)
    assert costs.expected(**NOW).added_byte_s == pytest.approx(0.2 / 1000)
    for _ in range(10):
        costs.note(record(), 0.0, 2)
    assert costs.expected(**NOW).added_byte_s == pytest.approx(0.2 / 1000 * 0.9**10)


def test_a_profile_of_another_data_type_is_refused() -> None:
    with refused(MismatchError, "float64"):
        Costs(SPEC, CLUSTER, profile=profile_of(), dtype="float64")


def test_the_slope_of_an_all_to_all_is_without_what_it_takes_besides() -> None:
    x = np.array([0.0, 1e3, 5e3, 5e4])
    y = 0.004 + 2e-7 * x
    assert slope(np.array([len(x), x.sum(), y.sum(), (x * x).sum(), (x * y).sum()])) == pytest.approx(2e-7)
    assert slope(np.array([3, 3e3, 0.1, 3e6, 100.0])) == 0.0  # always as many bytes
    assert slope(np.zeros(5)) == 0.0


def test_requests_start_where_the_plan_says() -> None:
    four = (0, 0, 1, 1)
    turns = RankAssignment(server_G=four)
    assert turns.deal(range(20), [0, 1, 2, 3], 2) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert turns.deal([5, 6, 7], [0, 3], 1) == [0, 3]
    first = RankAssignment(server_G=four, starts="first")
    assert first.deal(range(9), [0, 1, 2, 3], 2) == [0, 2, 0, 2]
    assert first.deal(range(9), [1, 2, 3], 1) == [1, 2]  # the first that is there
    drawn = RankAssignment(server_G=four, starts="random", seed=3)
    dealt = drawn.deal(range(8), [0, 1, 2, 3], 2)
    assert sorted(dealt) == [0, 0, 1, 1, 2, 2, 3, 3] and dealt != sorted(dealt)
    assert drawn.deal(range(5), [0, 1, 2, 3], 2) == dealt[:5]  # whoever comes later changes nothing
    many = [gpu for start in range(0, 4000, 4) for gpu in drawn.deal(range(start, start + 4), [0, 1, 2, 3], 4)]
    assert np.bincount(many).tolist() == pytest.approx([1000] * 4, rel=0.1)
    assert turns.deal([5, 6, 7], [0, 1], 2, {0: 2, 1: 0}) == [1, 1]  # beside what runs
    assert turns.deal([5, 6, 7], [0, 1], 2, {0: 1}) == [1, 0, 1]
    with refused(UsageError, "first"):
        RankAssignment(server_G=four, starts="frist")
