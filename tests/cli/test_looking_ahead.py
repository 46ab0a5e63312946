"""From a capture that looks ahead to a table of predictors, on the command line."""

import json
from pathlib import Path
from typing import Any

from moetool.trace.reader import Trace
from tests.command_line import Run


def test_a_capture_that_looks_ahead_judges_gate_ahead_by_distance(run: Run, tmp_path: Path) -> None:
    def printed(*args: Any) -> str:
        code, out, err = run(*args)
        assert code == 0, err
        return out

    wanted = ("--max-prompts", 3, "--max-new-tokens", 3, "--keep", "topk,ahead", "--ahead", 2, "--threads", 1)
    for name in ("arithmetic", "chat"):
        printed("capture", "reference", "--data", name, *wanted, "--out", tmp_path / name)
    assert Trace(tmp_path / "chat").ahead == 2
    printed("train", "gate_ahead", "--trace", tmp_path / "arithmetic", "--out", tmp_path / "gate_ahead")
    judge = (
        "evaluate",
        tmp_path / "gate_ahead",
        "--trace",
        tmp_path / "arithmetic",
        "--unseen-task",
        tmp_path / "chat",
    )
    rows = json.loads(printed(*judge, "--json"))
    assert [(row["predictor"], row["unseen_task"]) for row in rows][::3] == [
        ("gate_ahead", False),
        ("gate_ahead", True),
    ]
    assert {score["distance"] for score in rows[0]["scores"]} == {1, 2}
    table = printed(*judge)
    assert "match in decode by distance" in table and "of an unseen task" in table
