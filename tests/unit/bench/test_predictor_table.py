"""`moetool bench predictors`: trained under several seeds, scored on unseen requests and another task."""

import json
from pathlib import Path

import pytest

from moetool.base import plugins
from moetool.base.errors import UsageError
from moetool.bench import predictor_table
from moetool.bench.predictor_table import PredictorTableOptions, bench_predictors, figures, tables
from moetool.trace.reader import Trace
from moetool.training.evaluate import evaluate
from moetool.training.fit_options import FitOptions
from moetool.training.training import train
from tests.command_line import exit_code
from tests.refusals import refused
from tests.synthetic_routes import TASKS, write_trace


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("traces") / "routes")


def test_rows_are_evaluations_of_each_seed(routes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(routes)
    fit = FitOptions(max_epochs=1)
    names = ("affinity", "path_mlp", "expert_map", "promoe")
    options = PredictorTableOptions(
        predictors=names, seeds=2, tokens=10**6, options={"path_mlp": {"hidden": 4}}, fit=fit
    )
    made = bench_predictors([routes], options, tmp_path / "work")
    task = {row["request"]: row["task"] for row in trace.requests.to_pylist()}
    last = list(task.values())[-1]
    assert set(task.values()) == set(TASKS)
    (known,) = (part for part in _parts(tmp_path) if last not in part.requests["task"].to_pylist())
    (other,) = (part for part in _parts(tmp_path) if set(part.requests["task"].to_pylist()) == {last})
    assert len(known.requests) == sum(one != last for one in task.values())
    train("affinity", known.path, tmp_path / "affinity", seed=1)
    alone = evaluate([tmp_path / "affinity"], known.path, other.path)
    scores = {score.unseen_task: score for score in alone if score.baseline is None}
    for where, unseen in (("known", False), ("other", True)):
        (row,) = made.of(predictor="affinity", seed=1, task=where)
        near = scores[unseen].overall()
        assert (row["match"], row["farther"]) == (near[1].match, near[3].match)
        assert row["requests"] == scores[unseen].num_requests
    assert {row["epochs"] for row in made.of(predictor="path_mlp")} == {1}
    assert {row["why"] for row in made.of(predictor="promoe")} == {"the trace lacks hidden"}
    found = list(tables(made))
    assert found[0].rows[0][0] == max(
        names[:3], key=lambda name: sum(row["match"] for row in made.of(predictor=name, task="known"))
    )
    assert "promoe on routes" in found[1] and "hidden" in found[1]
    figure = figures(made)["predictors-routes-other"]
    assert set(figure.values) == {*names[:3]}
    assert figure.values["path_mlp"] == [row["match"] for row in made.of(predictor="path_mlp", task="other")]
    (row,) = made.of(predictor="path_mlp", seed=0, task="known")
    made.rows.append({**row, "seed": 2, "epochs": 7})
    assert any("1, 1, 7" in cells for cells in next(tables(made)).rows)  # every seed's, where they differ
    del made.rows[-1]

    def again(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(predictor_table, "train", again)
    repeated = bench_predictors([routes], options, tmp_path / "work")
    assert [row["match"] for row in repeated.rows if "seed" in row] == [
        row["match"] for row in made.rows if "seed" in row
    ]


def test_a_changed_predictor_of_a_file_is_trained_again_in_the_work_folder(routes: Path, tmp_path: Path) -> None:
    file = tmp_path / "lab" / "mine.py"
    file.parent.mkdir()
    work = tmp_path / "work"
    for remark in ("", "# changed\n"):
        file.write_text(f"{remark}from predictors.affinity import *\n")
        plugins.allow("predictor", str(file))
        options = PredictorTableOptions(predictors=(str(file),), seeds=1)
        bench_predictors([routes], options, work)
    assert len(list(work.glob("mine.py-*"))) == 2
    assert not [path for path in file.parent.iterdir() if path.name.startswith("mine.py-")]


def _parts(folder: Path) -> list[Trace]:
    return [Trace(path) for path in sorted((folder / "work" / "routes").iterdir())]


def test_refusals(routes: Path, tmp_path: Path) -> None:
    with refused(UsageError, "awq_replica", "trace"):
        PredictorTableOptions(predictors=("awq_replica",))
    with refused(UsageError, "seeds", 0):
        PredictorTableOptions(seeds=0)
    with refused(UsageError, "lstm", "affinity"):
        PredictorTableOptions(options={"lstm": {"hidden": 4}})
    with refused(UsageError, "same directory"):
        bench_predictors([routes, routes], PredictorTableOptions(), tmp_path)


def test_the_command_prints_the_table(
    routes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("bench", "predictors", "--trace", routes, "--predictor", "affinity", "--seeds", 1, "--out", tmp_path)
    assert exit_code(monkeypatch, *given) == 0
    assert "routes: match of the top-k" in capsys.readouterr().out
    assert {row["task"] for row in json.loads((tmp_path / "predictors.json").read_text())["rows"]} == {"known", "other"}
