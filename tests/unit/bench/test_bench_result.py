"""Results of benches: medians, ratios and bounds of serving, and the rows, tables and files of all."""

import importlib
import json
from pathlib import Path

import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.bench.bench_result import (
    BENCHES,
    BenchResult,
    Columns,
    Row,
    draw,
    in_rounds,
    read_result,
    recorded,
    show,
    table,
)
from moetool.bench.policy_table import PolicyTableOptions
from moetool.bench.serving_results import serving_row
from moetool.bench.serving_runs import phase_row, run_row
from moetool.caching.policy import build_policy
from moetool.caching.residency import Residency
from tests.artefacts import BENCH_RESULTS
from tests.command_line import exit_code
from tests.refusals import refused
from tests.synthetic_routes import make_spec


def _phase(*seconds: float, read: float = 0.0, ahead: float = 0.0) -> Row:
    return phase_row(seconds, bytes_read=read, ahead_bytes=ahead, stall_s=1.0, booking_s=0.1)


def _run(decode: Row) -> Row:
    residency = Residency(build_policy("lru", make_spec(), {}, 2))
    return {**run_row(_phase(9.0, read=90.0), decode, residency), "hit_rate": 0.75}


RESIDENT = [_run(_phase(1.0, 3.0)), _run(_phase(2.0, 2.0)), _run(_phase(4.0, 4.0))]  # means 2, 2, 4
RATES = [10.0, 20.0, 10.0]
OPTIONS = PolicyTableOptions(shares=(0.25,), tokens=100)


def test_on_demand_lines_are_bounded_by_the_sum() -> None:
    runs = [_run(_phase(4.0, 6.0, read=40.0)), _run(_phase(8.0, 8.0, read=40.0)), _run(_phase(9.0, 15.0, read=40.0))]
    row = serving_row("lru", runs, RESIDENT, RATES, budget_bytes=1, slots=2)
    assert (row["tpot_p50_s"], row["tpot_mean_s"]) == (8.0, 8.0)  # means and medians of the rounds: 5, 8, 12
    assert row["tpot_p95_s"] == pytest.approx(8.0)  # 5.9, 8, 14.7
    assert row["hit_rate"] == 0.75
    assert row["bytes_per_token"] == 20.0
    assert row["stall_share"] == pytest.approx(1 / 16)
    assert row["booking_share"] == pytest.approx(0.1 / 16)
    bound = row["decode"]
    assert not bound["reads_ahead"]
    assert (bound["compute_s"], bound["io_s"]) == (2.0, 2.0)  # 2, 2, 4 and 2, 1, 2
    assert (bound["sum_s"], bound["larger_s"]) == (4.0, 2.0)  # 4, 3, 6 and 2, 2, 4
    assert bound["x_resident"] == 3.0  # 5/2, 8/2, 12/4: of one round each
    assert bound["x_bound"] == 2.0  # 5/4, 8/3, 12/6
    assert row["prefill"]["sum_s"] == 18.0  # 9 of compute and 9, 4.5, 9 of reading


def test_prefetching_lines_are_bounded_by_the_maximum() -> None:
    runs = [_run(_phase(5.0, 5.0, read=40.0, ahead=1.0)) for _ in RATES]
    bound = serving_row("duoserve", runs, RESIDENT, RATES, budget_bytes=1, slots=2)["decode"]
    assert bound["reads_ahead"]
    assert bound["x_bound"] == 2.5  # 5/2, 5/2, 5/4


def test_without_a_resident_line_there_are_no_bounds() -> None:
    row = serving_row("lru", RESIDENT, None, RATES, budget_bytes=1, slots=2)
    assert row["prefill"] is None and row["decode"] is None
    assert row["tpot_mean_s"] == 2.0


def _made(file: Path | None = None) -> BenchResult:
    with recorded("policies", OPTIONS, file) as made:
        made.add(trace="law", policy="lru", share=0.25, hit_rate=0.75, loaded=0.5, hosted=0.0)
    return made


def test_rows_are_kept_while_a_bench_runs_and_shown_from_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "policies.json"
    with pytest.raises(KeyboardInterrupt), recorded("policies", OPTIONS, file) as made:
        made.add(trace="law", policy="lru")
        raise KeyboardInterrupt
    assert read_result(file).rows == [{"trace": "law", "policy": "lru"}]
    show(_made(file))
    shown = capsys.readouterr().out
    assert "law" in shown and "0.500" in shown and "cores, load" in shown
    show(read_result(file))
    assert capsys.readouterr().out == shown
    kept = json.loads(file.read_text())
    assert kept["schema_version"] == 1 and len(kept["load"]) == 2 and kept["machine"]["cores"] >= 1
    assert draw(read_result(file), tmp_path) == [tmp_path / "policies-law-cold.svg"]


def test_files_of_other_versions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    for values, says in (
        ({"lines": [], "command": "moetool bench serve x"}, "has schema_version None .* with: moetool bench serve x"),
        ({**_made().to_json(), "schema_version": 99}, "has schema_version 99 of a bench, expected 1"),
        ({**_made().to_json(), "bench": "none"}, "has results of bench 'none', expected one of: serve"),
        ({**_made().to_json(), "bench": []}, r"has results of bench '\[\]'"),
        ({**_made().to_json(), "rows": 7}, "rows is 7: .* measure again"),
        ({**_made().to_json(), "rows": [{"slots": 10**400}]}, r"rows.0.slots is 10+\.\.\., .* 64 bits; measure again"),
    ):
        file.write_text(json.dumps(values))
        with pytest.raises(MismatchError, match=says):
            read_result(file)
    made = _made()
    made.options = {}
    with refused(MismatchError, "results", "damaged"):
        show(made)
    with refused(UsageError, "no results"):
        read_result(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"machine": {}}, "KeyError: 'gpu'"),
        ({"rows": [{"policy": "lru", "rounds": [], "decode": "x"}]}, "AttributeError"),
        ({"rows": [{"policy": "lru", "rounds": [], "ttft_s": "x", "decode": None}]}, "TypeError"),
        ({"rows": [{"policy": "lru", "rounds": [], "slots": "x", "decode": None}]}, "ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_values_are_refused_in_one_line(
    values: Row, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({**BENCH_RESULTS()["serve"], **values}))
    assert exit_code(monkeypatch, "bench", "show", file) == 3
    said = capsys.readouterr().err
    assert f"the results are damaged ({says}" in said and said.count("\n") == 1


def test_figures_of_damaged_results_are_refused(tmp_path: Path) -> None:
    made = _made()
    made.bench = "cluster"  # its figures need more values
    with refused(MismatchError, "results", "damaged"):
        draw(made, tmp_path)


def test_example_files_are_shown(tmp_path: Path) -> None:
    for bench, values in BENCH_RESULTS().items():
        file = tmp_path / f"{bench}.json"
        file.write_text(json.dumps(values))
        show(read_result(file))


def test_another_line_begins_each_round() -> None:
    told: list[int] = []
    ran: list[tuple[int, str]] = []

    def run(line: str, number: int) -> Row | None:
        ran.append((number, line))
        return {"n": number} if line != "c" else None

    def rows(measured: list[tuple[str, list[Row]]]) -> list[Row]:
        return [{"line": line, "rounds": list(runs)} for line, runs in measured]

    made = BenchResult(bench="policies", options={}, command="", machine={}, load=[], rows=[{"line": "earlier"}])
    in_rounds(made, "abc", 2, run, rows, told.append)
    assert ran == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]
    assert told == [16, 33, 50, 66, 83, 100]
    both = [{"n": 0}, {"n": 1}]
    assert made.rows == [{"line": "earlier"}, {"line": "a", "rounds": both}, {"line": "b", "rounds": both}]


def test_runs_are_kept_after_each_and_shown_as_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "policies.json"

    def run(line: str, number: int) -> Row:
        if (number, line) == (1, "lfu"):
            raise KeyboardInterrupt
        return {"share": 0.25, "hit_rate": 0.75, "loaded": 0.25 * (number + 1), "hosted": 0.0}

    def rows(measured: list[tuple[str, list[Row]]]) -> list[Row]:
        return [{"trace": "law", "policy": line, **runs[-1]} for line, runs in measured]

    with pytest.raises(KeyboardInterrupt), recorded("policies", OPTIONS, file) as made:
        in_rounds(made, ["lru", "lfu"], 2, run, rows)
    assert [(row["policy"], row["loaded"]) for row in read_result(file).rows] == [("lru", 0.25), ("lfu", 0.25)]
    show(read_result(file))
    assert "cut short" in capsys.readouterr().out


def test_cells_show_units_and_what_is_missing() -> None:
    rows: list[Row] = [{"a": {"b": 0.0123}, "share": 0.125, "ratios": [1.0, 3.0, 2.0]}, {"a": None}]
    columns: Columns = {
        "time": ("a.b", "ms"),
        "share": ("share", ".1%"),
        "x": ("ratios", "ratios"),
        "sum": (lambda row: row.get("share"), ".3f"),
    }
    assert table("", rows, columns).rows == [["12.3", "12.5 %", "2.000 (1.00 to 3.00)", "0.125"], ["-"] * 4]


@pytest.mark.parametrize("bench", BENCHES)
def test_every_bench_has_a_module_that_shows_its_results(bench: str) -> None:
    assert callable(importlib.import_module(f"moetool.bench.{BENCHES[bench]}").tables)
