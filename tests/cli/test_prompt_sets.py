"""`moetool data`, and what `--data`, `--data-dir` and `--set data.…` refuse."""

import json
from pathlib import Path

import pytest

from moetool.prompts import dataset_recipe
from moetool.prompts import gather as prompts
from tests.command_line import Run


def test_the_sets_are_listed(run: Run) -> None:
    code, out, _ = run("data", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == prompts.names() + dataset_recipe.names()
    lmsys = next(row for row in rows if row["name"] == "lmsys_chat_1m")
    assert (lmsys["hub"], lmsys["gated"], lmsys["output"]) == ("lmsys/lmsys-chat-1m", True, 127)
    code, out, _ = run("data")
    assert code == 0
    assert all(row["name"] in out for row in rows)
    assert "CC BY-NC 4.0" in out


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--data", "mmlu_por"], 2, ("did you mean 'mmlu_pro'",)),
        (["--data", "race", "--data-dir", "none"], 2, ("no directory at none", "ehovy/race")),
        (["--data", "race", "--set", "data.sed=1"], 2, ("'sed'", "did you mean 'seed'")),
        (["--data", "race", "--set", "data=3"], 2, ("data is 3",)),
        (["--data", "race", "--set", "seed=3"], 2, ("'seed'", "data.seed=1")),
        (["--data", "race", "--set", "data.duplicates=maybe"], 2, ("data: duplicates",)),
        (["--data", "chat", "--set", "data.split=test"], 2, ("public data sets",)),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    arguments: list[str],
    code: int,
    parts: tuple[str, ...],
    tmp_path: Path,
    run: Run,
) -> None:
    found, out, err = run("capture", "reference", *arguments, "--out", tmp_path / "t")
    assert (found, out, len(err.strip().splitlines())) == (code, "", 1), err
    assert [part for part in parts if part not in err] == []
    assert not (tmp_path / "t").exists()


def test_malformed_rows_are_listed_and_the_others_captured(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "12 + 7 ="}\n{"text": 1}\n{"prompt": "One, two,"}\n{oops\n')
    code, out, err = run(
        "capture", "reference", "--data", file, "--out", tmp_path / "t", "--max-new-tokens", "1", "--json"
    )
    made = json.loads(out)
    assert (code, made["requests"], made["skipped"], len(made["refused"])) == (3, 2, 2, 2)
    assert all(err.count(place) > 0 for place in (f"{file}:2", f"{file}:4")) and "Traceback" not in err
