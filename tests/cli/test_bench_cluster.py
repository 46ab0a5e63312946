"""`moetool bench cluster`: a quick run in one process, and errors."""

import json
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import UsageError
from moetool.bench.bench_result import draw, recorded, show
from moetool.bench.live_cluster.bench_options import ALONE, PLACEMENTS, REDIRECTED, ClusterBenchOptions, parse_lines
from moetool.bench.live_cluster.cluster_results import line_row, mean_s
from tests.command_line import Run

COMMAND = ("bench", "cluster", "reference")


@pytest.mark.slow
def test_a_quick_run_has_tables_results_and_figures(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "bench"
    code, printed, said = run(
        *("--quick", "--planner", "alone,redirected,redundant,prism_exact", "--set", "bench.where=threads"),
        *("--set", "bench.prompt_tokens=6", "--out", out),
    )
    assert code == 0, said
    for words in ("Table I", "Table II", "by traces", "prism_exact", "alone, redirected"):
        assert words in printed
    found = json.loads((out / "cluster.json").read_text())
    rows = {row["line"]: row for row in found["rows"]}
    assert list(rows) == ["alone", "alone, redirected", "redundant", "prism_exact"]
    assert all(row["failed"] == 0 and len(row["servers_s"]) == 3 for row in rows.values())
    for name in ("redundant", "prism_exact"):
        assert rows[name]["local"] == pytest.approx(rows[name]["expected_local"], abs=0.01)
    assert rows["prism_exact"]["local"] > rows["redundant"]["local"]
    assert found["facts"]["slots"] == [76, 76, 153] and found["facts"]["expert_s"] == pytest.approx(2e-4)
    assert (out / "local.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--planner", "prsm"], "prism"),
        (["--set", "bench.where=cloud"], "processes"),
        (["--set", "bench.rounds=0"], "at least 1"),
        (["--set", "rounds=3"], "bench.NAME"),
        (["--set", "bench.gap_s=0"], "above 0"),
        (["--data", "arithmetic,code"], "2 sets of prompts for 3 servers"),
        (["--data", "arithmetic,arithmetic,code"], "one set per server"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments: list[str], says: str, run: Run) -> None:
    code, _, said = run(*arguments)
    assert code == 2 and says in said and "\n" not in said.strip()


@pytest.mark.follows("moetool.bench.live_cluster.namespaces require_namespaces")
@pytest.mark.parametrize(("user", "tool", "says"), [(1000, "/sbin", "only root can"), (0, None, "need ip of iproute2")])
def test_hosts_in_namespaces_need_root_and_iproute2(
    user: int, tool: str | None, says: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: user)
    monkeypatch.setattr("shutil.which", lambda name: tool)
    one_set = ("--data", "arithmetic")
    code, _, said = run("--set", "bench.where=namespaces", *one_set)
    assert code == 2 and says in said and "bench.where=processes" in said and "\n" not in said.strip()
    assert "1 set of prompts for 3 servers" in run("--set", "bench.where=processes", *one_set)[2]


def test_lines_by_name() -> None:
    assert parse_lines([]) == (ALONE, REDIRECTED, *PLACEMENTS)
    assert parse_lines(["prism,alone", "redirected", "prism"]) == ("prism", ALONE, REDIRECTED)
    with pytest.raises(UsageError, match="unknown --planner 'on_demand'") as refused:
        parse_lines(["on_demand"])
    known = str(refused.value).partition("known: ")[2].split(", ")
    assert {"alone", "redirected", *PLACEMENTS} <= set(known)
    with pytest.raises(UsageError, match="did you mean 'redirected'"):
        parse_lines(["redirect"])


def test_rows_are_medians_of_rounds_and_ratios_are_within_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recorded("cluster", ClusterBenchOptions()) as made:
        made.facts = {
            **{"model": "m", "tasks": ("a", "b"), "slots": [1, 2], "total_experts": 3},
            **{"expert_s": 1e-4, "even_bytes_s": 1e6},
        }
        rounds = {line: list(map(line_run, means)) for line, means in (("uniform", (2, 9, 4)), ("prism", (1, 3, 4)))}
        for line, runs in rounds.items():
            made.add(**line_row(line, runs, rounds["prism"]))
        shifted = line_run(1.0) | {"changed_s": 4.0}
        for _ in range(2):
            made.add(**line_row("prism", [shifted], [], shift=True))
    assert mean_s(shifted, 0.0, 4.0) == 0.0 and mean_s(shifted, 4.0) == 2.0
    row = made.rows[0]
    assert (row["mean_s"], row["means_s"]) == (4.0, [2.0, 9.0, 4.0])
    assert row["ratios"] == [2.0, 3.0, 1.0]
    assert row["servers_s"] == [3.0, 5.0]
    assert row["local"] == 0.75
    show(made)
    printed = capsys.readouterr().out
    assert "tasks change servers, without: mean 1 s (0 s before, 2 s after)" in printed
    assert "2 to 9" in printed and "2.000 (1.00 to 3.00)" in printed
    assert [path.name for path in draw(made, tmp_path)] == ["local.svg", "shift.svg"]
    made.rows.pop()  # killed between the two changes of tasks
    show(made)
    assert len(draw(made, tmp_path)) == 2


def line_run(mean_s: float) -> dict[str, Any]:
    """Two servers, one a second slower and one a second quicker than the mean; 3 of 4 calls at home."""
    return {
        "latencies": [[mean_s - 1], [mean_s + 1]],
        "arrived_s": [[1.0], [5.0]],
        **{"failed": 0, "redirected": 0, "other_texts": 0, "local": 0.75, "began_s": 100.0, "decisions": []},
        "windows": [{"until_s": 105.0, "local": [2, 1], "remote": [1, 0]}],
    }
