"""`moetool bench policies`: every policy on several traces, from an empty pool."""

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import t as student_t

from moetool.base.errors import UsageError
from moetool.bench.policy_table import BY_LAYER, PolicyTableOptions, bench_policies, choose_requests
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay
from tests.command_line import exit_code
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("traces")
    return [write_trace(root / name, make_spec(4, 8, 2), num_requests=12, seed=i) for i, name in enumerate("ab")]


def _setup(requests: Iterable[int], **more: Any) -> ReplaySetup:
    return ReplaySetup(requests=frozenset(requests), pool_unit="slots", **more)


def test_rows_equal_replays(folders: list[Path]) -> None:
    made = bench_policies(folders, PolicyTableOptions(shares=(0.25, 0.5), tokens=10_000, starts=("cold",)))
    rows = {(row["trace"], row["policy"], row["share"]): row for row in made.rows}
    assert len(rows) == len(made.rows)
    assert {trace for trace, _, _ in rows} == {"a", "b"}
    trace = Trace(folders[1])
    counted = frozenset(choose_requests(trace, 10_000).counted)
    for pool, name in (("one", "lru"), ("layer", "lru by layer")):
        (found,) = replay(trace, ["lru"], [16 * trace.spec.slot_bytes], _setup(counted, pool=pool))
        row, counts = rows["b", name, 0.5], found.counts
        assert (row["slots"], row["needed"], row["hit_rate"]) == (16, counts.needed, counts.hit_rate)
        assert row["loaded"] == counts.loads / counts.needed
    names = {policy for _, policy, _ in rows}
    assert {
        "foresight",
        "lfu",
        "moe_infinity",
        "belady",
        *(f"{name} by layer" for name in BY_LAYER),
    } <= names
    for trace_name, share in (("a", 0.25), ("b", 0.5)):
        on_demand = [
            r for (t, p, s), r in rows.items() if (t, s) == (trace_name, share) and p.startswith(("lru", "lfu"))
        ]
        assert rows[trace_name, "belady", share]["loaded"] <= min(row["loaded"] for row in on_demand)
    few = bench_policies(folders[:1], PolicyTableOptions(shares=(0.5,), tokens=1, starts=("cold",))).rows[0]
    assert few["needed"] < rows["a", few["policy"], 0.5]["needed"]


def test_a_killed_run_keeps_its_rows(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(number: int) -> None:
        raise KeyboardInterrupt

    file = tmp_path / "policies.json"
    with pytest.raises(KeyboardInterrupt):
        bench_policies(folders, PolicyTableOptions(shares=(0.5,), tokens=40), stop, file)
    assert exit_code(monkeypatch, "bench", "show", file) == 0
    printed = capsys.readouterr().out
    assert "a: loads per needed expert" in printed and "b: loads" not in printed


def test_warm_tokens_count_in_no_row(folders: list[Path]) -> None:
    trace = Trace(folders[0])
    budget, setup = [16 * trace.spec.slot_bytes], ReplaySetup(pool_unit="slots")
    (whole,), (part,) = (replay(trace, ["lru"], budget, s) for s in (setup, replace(setup, warm_tokens=30)))
    assert whole.digest == part.digest and 0 < part.counts.needed < whole.counts.needed
    assert part.loaded_bytes == part.counts.loads * trace.spec.slot_bytes
    with refused(UsageError, "nothing", "count"):
        replay(trace, ["lru"], budget, replace(setup, warm_tokens=10**6))


def test_the_same_requests_count_from_every_start(folders: list[Path]) -> None:
    """Counts of each request are those of replays that end before it and with it."""
    trace = Trace(folders[0])
    chosen = choose_requests(trace, 10_000)
    task = {row["request"]: row["task"] for row in trace.requests.to_pylist()}
    assert {task[request] for request in (*chosen.counted, *chosen.before["task"])} == {chosen.task}
    assert chosen.task not in {task[request] for request in chosen.before["others"]}
    assert max(*chosen.before["task"], *chosen.before["others"]) < min(chosen.counted)
    made = bench_policies(folders[:1], PolicyTableOptions(shares=(0.5,), tokens=10_000))
    budget = [16 * trace.spec.slot_bytes]
    assert {row["start"] for row in made.of(policy="layerwise")} == {"cold"}
    needed = {row["needed"] for row in made.of(policy="lru")}
    assert len(needed) == 1
    for start, before in chosen.before.items():
        (with_them,) = replay(trace, ["lru"], budget, _setup((*before, *chosen.counted)))
        (row,) = made.of(policy="lru", start=start)
        loads = with_them.counts.loads - sum(each.loads for each in with_them.requests[: len(before)])
        assert row["loaded"] == loads / row["needed"]
        (alone,) = replay(trace, ["lru"], budget, _setup(before)) if before else (None,)
        assert alone is None or alone.requests == with_them.requests[: len(before)]


def test_the_interval_is_that_of_a_ratio_over_requests(tmp_path: Path) -> None:
    """By the jackknife over requests, which needs no formula of a variance."""
    path = write_trace(tmp_path / "c", make_spec(4, 8, 2), num_requests=24, new_tokens=3)
    options = PolicyTableOptions(shares=(0.25,), tokens=10_000, starts=("cold",), task="arithmetic")
    (row,) = bench_policies([path], options).of(policy="lru")
    trace = Trace(path)
    counted = choose_requests(trace, 10_000, "arithmetic").counted
    counts = replay(trace, ["lru"], [8 * trace.spec.slot_bytes], _setup(counted))[0].requests
    assert len(counts) == len(counted) == 4

    def ratio(left_out: int | None) -> float:
        kept = [one for number, one in enumerate(counts) if number != left_out]
        return sum(one.loads for one in kept) / sum(one.needed for one in kept)

    others = np.array([ratio(number) for number in range(len(counts))])
    spread = math.sqrt((len(others) - 1) / len(others) * float(((others - others.mean()) ** 2).sum()))
    assert row["loaded"] == ratio(None)
    assert row["within"] == pytest.approx(float(student_t.ppf(0.975, len(counts) - 1)) * spread, rel=0.05)


def test_refusals(folders: list[Path]) -> None:
    with refused(UsageError, "shares"):
        PolicyTableOptions(shares=(0.0,), tokens=9)
    with refused(UsageError, "start", "warm"):
        PolicyTableOptions(shares=(0.5,), tokens=9, starts=("cold", "warm"))
    with refused(UsageError, "task", "poetry"):
        bench_policies(folders[:1], PolicyTableOptions(shares=(0.5,), tokens=9, task="poetry"))
    with refused(UsageError, "same directory"):
        bench_policies([folders[0], folders[0]], PolicyTableOptions(shares=(0.5,), tokens=9))


def test_the_command_writes_and_prints_the_table(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("bench", "policies", "--trace", folders[0], "--trace", folders[1], "--tokens", 40, "--start", "cold,task")
    given = (*given, "--out", tmp_path)
    assert exit_code(monkeypatch, *given) == 0
    printed = capsys.readouterr().out
    assert "a: loads per needed expert" in printed and "belady" in printed and "12.5 %" in printed
    kept = json.loads((tmp_path / "policies.json").read_text())
    assert {row["share"] for row in kept["rows"]} == {0.125, 0.25, 0.5}
    assert (kept["options"]["tokens"], kept["options"]["starts"]) == (40, ["cold", "task"])
    assert {row["start"] for row in kept["rows"]} == {"cold", "task"}
    assert (tmp_path / "policies-a-task.svg").read_text().count("foresight")
