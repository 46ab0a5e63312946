"""`moetool bench policies`: every policy on several traces, from an empty pool."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetool.base.errors import UsageError
from moetool.bench.policy_table import BY_LAYER, PolicyTableOptions, bench_policies
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, replay
from tests.command_line import exit_code
from tests.refusals import refused
from tests.synthetic_routes import make_spec, write_trace


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("traces")
    return [write_trace(root / name, make_spec(4, 8, 2), num_requests=6, seed=i) for i, name in enumerate("ab")]


def test_rows_equal_replays(folders: list[Path]) -> None:
    made = bench_policies(folders, PolicyTableOptions(shares=(0.25, 0.5), tokens=10_000))
    rows = {(row["trace"], row["policy"], row["share"]): row for row in made.rows}
    assert len(rows) == len(made.rows)
    assert {trace for trace, _, _ in rows} == {"a", "b"}
    trace = Trace(folders[1])
    for pool, name in (("one", "lru"), ("layer", "lru by layer")):
        (found,) = replay(trace, ["lru"], [16 * trace.spec.slot_bytes], ReplaySetup(pool=pool, pool_unit="slots"))
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
    few = bench_policies(folders[:1], PolicyTableOptions(shares=(0.5,), tokens=1)).rows[0]
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
    made = bench_policies(folders[:1], PolicyTableOptions(shares=(0.5,), tokens=10_000, warm=0.5))
    total = sum(row["tokens"] for row in trace.requests.to_pylist())
    (half,) = replay(trace, ["lru"], budget, replace(setup, warm_tokens=round(total / 2)))
    (row,) = made.of(policy="lru")
    assert (row["needed"], row["loaded"]) == (half.counts.needed, half.counts.loads / half.counts.needed)
    assert half.loaded_bytes == half.counts.loads * trace.spec.slot_bytes
    with refused(UsageError, "nothing", "count"):
        replay(trace, ["lru"], budget, replace(setup, warm_tokens=10**6))


def test_refusals(folders: list[Path]) -> None:
    with refused(UsageError, "shares"):
        PolicyTableOptions(shares=(0.0,), tokens=9)
    with refused(UsageError, "warm", 1.0):
        PolicyTableOptions(shares=(0.5,), tokens=9, warm=1.0)
    with refused(UsageError, "same directory"):
        bench_policies([folders[0], folders[0]], PolicyTableOptions(shares=(0.5,), tokens=9))


def test_the_command_writes_and_prints_the_table(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("bench", "policies", "--trace", folders[0], "--trace", folders[1], "--tokens", 40, "--warm", "25%")
    given = (*given, "--out", tmp_path)
    assert exit_code(monkeypatch, *given) == 0
    printed = capsys.readouterr().out
    assert "a: loads per needed expert" in printed and "belady" in printed and "12.5 %" in printed
    kept = json.loads((tmp_path / "policies.json").read_text())
    assert {row["share"] for row in kept["rows"]} == {0.125, 0.25, 0.5}
    assert (kept["options"]["tokens"], kept["options"]["warm"]) == (40, 0.25)
