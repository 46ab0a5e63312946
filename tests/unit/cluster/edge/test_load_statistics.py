"""Live statistics and what is shown of them, by hand."""

import json
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError
from moetool.cluster.edge.history import ReportHistory
from moetool.cluster.edge.load_statistics import Statistics
from moetool.cluster.edge.protocol import ArrivedExpert, WorkerStats
from moetool.placement.replacement_record import ReplacementRecord
from tests.clusters import make_cluster
from tests.refusals import refused
from tests.traces import SPEC


def report(server: int, tokens: float, **fields: Any) -> WorkerStats:
    """All pairs on expert 1 of the first layer."""
    tokens_LE = np.zeros((SPEC.num_layers, SPEC.num_experts))
    tokens_LE[0, 1] = tokens
    made: dict[str, Any] = {"seconds": 1.0, "local_pairs": 0, "remote_pairs": 0, "expert_s": 0.0, "expert_pairs": 0}
    return WorkerStats(server=server, tokens_LE=tokens_LE, **{**made, **fields})


def test_old_tokens_count_half_after_a_half_life() -> None:
    statistics = Statistics(SPEC, 2, half_life_s=10.0)
    statistics.add(report(0, 8), 100.0)
    statistics.add(report(0, 1), 110.0)
    statistics.add(report(1, 2), 110.0)
    assert statistics.tokens_NLE[:, 0, 1].tolist() == [5.0, 2.0]
    for_ever = Statistics(SPEC, 2, half_life_s=0.0)
    for_ever.add(report(0, 8), 100.0)
    for_ever.add(report(0, 1), 1e6)
    assert for_ever.tokens_NLE[0, 0, 1] == 9.0


def test_decisions_without_a_migration_forget_that_one_overran() -> None:
    statistics, cluster = Statistics(SPEC, 2, half_life_s=10.0), make_cluster([[1], [1]])
    statistics.moved(0, ArrivedExpert(source=1, bytes=1000, seconds=1.0))
    statistics.migrated(2, 0.4)
    statistics.overran(9.0)
    assert statistics.measured(cluster).link(0, 1)[0] == pytest.approx(1000 / 4)  # four times, at most
    for _ in range(20):
        statistics.stayed()
    assert 1000 / 1.2 < statistics.measured(cluster).link(0, 1)[0] < 1000
    assert statistics.round_s == pytest.approx(0.2)  # as measured in the migration itself


def test_tokens_a_second_are_right_whatever_is_forgotten() -> None:
    for half_life_s in (0.0, 30.0):
        statistics = Statistics(SPEC, 1, half_life_s=half_life_s)
        for second in range(200):
            statistics.add(report(0, 14 if second else 0), float(second))  # 7 pairs a token: 2 tokens a second
        assert statistics.tokens_s == pytest.approx(2.0, rel=0.02)


def test_a_placement_is_judged_by_times_that_it_was_not_made_from() -> None:
    statistics = Statistics(SPEC, 2, half_life_s=0.0, block_s=1.0)
    for second, tokens in enumerate((1, 10, 100, 1000, 10_000)):
        statistics.add(report(0, tokens), float(second))
        if second == 0:
            assert statistics.folds((0, 1)) == []
    folds = [[half_NLE[0, 0, 1] for half_NLE in fold] for fold in statistics.folds((0, 1))]
    assert folds == [[1110, 10_001], [11_101, 10], [11_011, 100], [10_111, 1000]]
    assert statistics.tokens_of((0, 1))[0, 0, 1] == 11_111
    assert not statistics.tokens_of((1,)).any()


def test_a_call_costs_what_it_takes_beyond_computing() -> None:
    statistics = Statistics(SPEC, 2, half_life_s=0.0)
    assert statistics.call_s is None and statistics.expert_s is None
    statistics.add(report(0, 1, expert_s=2.0, expert_pairs=10, call_s={1: 5.0}, calls={1: 2}, call_pairs={1: 10}), 0.0)
    assert statistics.expert_s == pytest.approx(0.2)
    assert statistics.call_s == pytest.approx(0.3)
    statistics.changed(1.0)
    assert statistics.call_s == pytest.approx(0.3)  # until it is known again
    statistics.add(report(0, 1, call_s={1: 4.0}, calls={1: 1}, call_pairs={1: 5}), 2.0)
    assert statistics.call_s == pytest.approx(0.6)


def test_computing_is_renewed_every_thirty_seconds() -> None:
    statistics = Statistics(SPEC, 1, compute_s=30.0)
    seen = []
    for second in range(0, 70, 10):
        statistics.add(report(0, 1, expert_s=float(second + 1), expert_pairs=1), float(second))
        seen.append(statistics.expert_s)
    assert seen == [1.0, 1.0, 1.0, 21.0, 21.0, 21.0, 51.0]


def test_links_have_the_rate_that_experts_came_at() -> None:
    cluster = make_cluster([[20], [20], [20]], link_bytes_s=1e6)
    statistics = Statistics(SPEC, 3)
    assert statistics.measured(cluster) == cluster
    statistics.moved(2, ArrivedExpert(source=0, bytes=1000, seconds=2.0))
    statistics.moved(1, ArrivedExpert(source=-1, bytes=1000, seconds=9.0))  # from disk, over no link
    measured = statistics.measured(cluster)
    assert measured.link(0, 2)[0] == measured.link(2, 0)[0] == pytest.approx(500.0)
    assert measured.link(0, 1)[0] == 1e6
    statistics.moved(0, ArrivedExpert(source=2, bytes=1000, seconds=1.0))
    assert statistics.measured(cluster).link(0, 2)[0] == pytest.approx(2000 / 3)


def test_statistics_come_back_as_they_were_and_another_cluster_is_refused() -> None:
    statistics = Statistics(SPEC, 2)
    statistics.add(report(1, 7, expert_s=1.0, expert_pairs=4, call_s={0: 1.0}, call_pairs={0: 2}), 5.0)
    statistics.moved(1, ArrivedExpert(source=0, bytes=10, seconds=1.0))
    kept = json.loads(json.dumps(statistics.to_json(), allow_nan=False))
    again = Statistics(SPEC, 2)
    again.restore(kept)
    assert again.to_json() == statistics.to_json()
    statistics.add(report(1, 7), 15.0)
    again.restore(json.loads(json.dumps(statistics.to_json())))
    rate = again.tokens_s
    again.add(report(1, 0), 615.0)  # ten minutes later, two half-lives, in which nobody counted
    assert again.tokens_s == pytest.approx(rate)
    assert again.tokens_NLE.sum() == pytest.approx(statistics.tokens_NLE.sum() / 4, rel=1e-3)
    with refused(MismatchError, "another file"):
        Statistics(SPEC, 3).restore(kept)
    with refused(MismatchError, "plan's model"):
        again.add(WorkerStats(**{**_fields(report(0, 1)), "tokens_LE": np.zeros((1, 1))}), 6.0)


def _fields(stats: WorkerStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in WorkerStats.__dataclass_fields__}


def test_the_chronicle_keeps_its_sums_when_windows_are_joined() -> None:
    history = ReportHistory(2, 1.0)
    for second in range(1000):
        history.add(
            report(second % 2, 1, local_pairs=3, remote_pairs=1, bytes_out={1 - second % 2: 10}, request_s=(0.5,)),
            float(second),
        )
    shown = history.to_json()
    assert len(shown["windows"]) <= 240
    assert sum(sum(window["local"]) for window in shown["windows"]) == 3000
    assert [window["until_s"] for window in shown["windows"]] == sorted(w["until_s"] for w in shown["windows"])
    assert history.local == 0.75 and shown["bytes"] == [[0, 5000], [5000, 0]]
    assert shown["latency"][0] == {"requests": 500, "failed": 0, "p50_s": 0.5, "p95_s": 0.5}
    again = ReportHistory(2)
    history.decisions.append(ReplacementRecord(at_s=3.0, planner="prism", copies=7, outcome="done"))
    again.restore(json.loads(json.dumps(history.decisions_json(), allow_nan=False)))
    assert again.decisions == history.decisions
