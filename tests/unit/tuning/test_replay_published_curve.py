"""A published replay of a real model's routes, as an oracle from outside: imported and replayed as a user would.

The capacity is in bytes and the model has experts of two sizes; the whole prompt is one event a layer. Of Belady the
authors have the textbook's, which gives up nothing of an event before the event is over.
"""

import csv

import pytest

from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay
from tests.published_routes import QWEN, needs_routes

TOLERANCES = {"lru": 0.02, "lfu": 0.01, "belady": 0.001}  # points, of the 100 of a hit rate

pytestmark = needs_routes


@pytest.fixture(scope="module")
def published() -> dict[tuple[str, int], dict[str, str]]:
    with QWEN.with_name("qwen3_30b_a3b.curve.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] in TOLERANCES]
    return {(row["policy"], int(row["budget_mib"]) << 20): row for row in rows}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("published") / "trace"
    import_trace([QWEN], None, out)
    return Trace(out)


@pytest.mark.parametrize(
    "budgets_mib",
    [(500, 1000, 2000, 4000), pytest.param((250, 750, 1500, 2500, 3000, 6000, 8000), marks=pytest.mark.slow)],
)
def test_replay_reproduces_the_published_curve(
    trace: Trace, published: dict[tuple[str, int], dict[str, str]], budgets_mib: tuple[int, ...]
) -> None:
    budgets = [budget << 20 for budget in budgets_mib]
    rows = replay(trace, list(TOLERANCES), budgets, ReplaySetup(options={"belady": {"whole_events": True}}))
    for row in rows:
        theirs, tolerance = published[row.policy, row.budget_bytes], TOLERANCES[row.policy]
        assert 100 * row.decode.hit_rate == pytest.approx(float(theirs["hit_pct_decode"]), abs=tolerance), row
        assert 100 * row.counts.hit_rate == pytest.approx(float(theirs["hit_pct_cum"]), abs=tolerance), row


def test_our_belady_hits_more_than_the_published_one(
    trace: Trace, published: dict[tuple[str, int], dict[str, str]]
) -> None:
    for row in replay(trace, ["belady"], [500 << 20, 2000 << 20]):
        assert 100 * row.decode.hit_rate > float(published["belady", row.budget_bytes]["hit_pct_decode"])
