"""The tables of an evaluation."""

import dataclasses

import pytest

from moetool.training.evaluate import Evaluation, evaluate
from moetool.training.match_tables import by_task, overview, print_evaluations, tables_of, verdicts
from moetool.training.training import train
from tests.synthetic_routes import make_spec, write_trace


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Evaluation]:
    folder = tmp_path_factory.mktemp("evaluation")
    spec = make_spec(num_layers=30)
    trace = write_trace(folder / "trace", spec, num_requests=8)
    unseen = write_trace(folder / "unseen", spec, num_requests=3, seed=1, first_prompt=100)
    train("affinity", trace, folder / "affinity")
    return evaluate([folder / "affinity"], trace, unseen)


def test_rows_match_their_headings_and_measures(rows: list[Evaluation]) -> None:
    known, unseen = by_task(rows)
    tables = tables_of(known)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    right = tables[0]
    assert [row[0] for row in right.rows] == ["affinity", "popularity"]
    score = known[0].overall()[1]
    assert right.rows[0][1:5] == [f"{x:.3f}" for x in (score.match, score.exact, score.at_least_one, score.recall[-1])]
    assert right.notes == ("popularity counted on the same 6 training requests",)
    assert any("of an unseen task" in table.title for table in tables_of(unseen))
    told = next(table for table in tables if table.title.startswith("predictions for the prompts of 1 pending"))
    assert [row[0] for row in told.rows] == ["popularity"]
    costs = tables[-1]
    assert costs.columns.count("of a step") == 0
    assert costs.rows[0][-2:] == ["120", "75 %"] and costs.rows[1][-3:] == ["-", "-", "-"]


def test_many_layers_are_averaged(rows: list[Evaluation]) -> None:
    table = next(table for table in tables_of(rows[:2]) if table.title.startswith("match by MoE layer"))
    assert table.columns == (
        "predictor",
        "1-3",
        "4-6",
        "7-9",
        "10-12",
        "13-15",
        "16-18",
        "19-21",
        "22-24",
        "25-27",
        "28-29",
    )
    match = [s.match for s in rows[0].scores if s.phase == "all" and s.layer in (28, 29) and s.distance == 1]
    assert table.rows[0][-1] == f"{sum(match) / 2:.3f}"


def test_a_profile_adds_shares_of_a_step(rows: list[Evaluation]) -> None:
    weighed = [dataclasses.replace(row, decode_step_ms=20.0, step_ms=0.5, prompt_ms=41.0) for row in rows[:2]]
    costs = tables_of(weighed)[-1]
    assert costs.columns.count("of a step") == 2
    assert [costs.rows[0][i] for i in (4, 5, 6, 7)] == ["0.5", "2.5 %", "41", "205 %"]
    assert costs.notes == ("a decode step takes 20 ms with every expert in memory, by the profile",)


def test_the_overview_has_both_tasks(rows: list[Evaluation]) -> None:
    table = overview([dataclasses.replace(row, decode_step_ms=20.0, step_ms=0.5) for row in rows])
    assert [row[0] for row in table.rows] == ["affinity", "popularity"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.columns[1:5] == ("prompts", "new tokens", "unseen\nprompts", "unseen\nnew tokens")
    known, unseen = by_task(rows)
    by_hand = [
        " ".join(f"{100 * group[0].overall(phase)[d].match:2.0f}" for d in (1, 3, 6))
        for group in (known, unseen)
        for phase in ("prefill", "decode")
    ]
    assert table.rows[0][1:5] == by_hand
    assert table.rows[0][table.columns.index("of step")] == "2.5 %"
    assert "1 request held out, 20 tokens; 3 requests of an unseen task, 60" in table.title
    alone = overview([row for row in rows if row.unseen_task])
    assert alone.columns[1:3] == ("unseen\nprompts", "unseen\nnew tokens") and "of step" not in alone.columns
    near = dataclasses.replace(rows[0], scores=tuple(s for s in rows[0].scores if s.distance < 3))
    assert overview([near]).rows[0][1].endswith(" -  -")


def test_tables_are_printed(rows: list[Evaluation], capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluations(rows)
    printed = capsys.readouterr().out
    assert printed.startswith("prompts on held-out requests: affinity") and "\nOverview" in printed
    assert "next layer's experts on 1 request held out, 20 tokens\n" in printed
    assert "  popularity counted on the same 6 training requests" in printed
    assert "next layer's experts on 3 requests of an unseen task, 60 tokens" in printed


def test_a_verdict_for_each_scope_names_the_best_beside_a_baseline(rows: list[Evaluation]) -> None:
    lines = verdicts(rows)
    assert any("held-out" in line for line in lines) and any("unseen task" in line for line in lines)
    for line in lines:
        assert "affinity predicts" in line and "the baseline popularity" in line
    known = [row for row in rows if not row.unseen_task]
    trained, counted = (next(row for row in known if (row.baseline is None) is own) for own in (True, False))
    phase = "decode" if trained.overall("decode") else "prefill"
    more = trained.overall(phase)[1].match > counted.overall(phase)[1].match
    assert any(("no more than" not in line) is more for line in lines if "held-out" in line)
