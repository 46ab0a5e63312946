"""`moetool data`, and what `--data`, `--data-dir` and `--set data.…` refuse."""

import json
import sys
from pathlib import Path

import pytest

from moetool import cli, dataset_recipe, prompts


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["moetool", *map(str, args)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    captured = capsys.readouterr()
    code = exit.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_the_sets_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(monkeypatch, capsys, "data", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["name"] for row in rows] == prompts.names() + dataset_recipe.names()
    lmsys = next(row for row in rows if row["name"] == "lmsys_chat_1m")
    assert (lmsys["hub"], lmsys["gated"], lmsys["output"]) == ("lmsys/lmsys-chat-1m", True, 127)
    code, out, _ = run(monkeypatch, capsys, "data")
    assert code == 0
    assert all(row["name"] in out for row in rows)
    assert "CC BY-NC 4.0" in out


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--data", "mmlu_por"], 2, ("did you mean 'mmlu_pro'",)),
        (["--data", "race", "--data-dir", "none"], 2, ("no folder at none", "ehovy/race")),
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, out, err = run(monkeypatch, capsys, "capture", "reference", *arguments, "--out", tmp_path / "t")
    assert (found, out, len(err.strip().splitlines())) == (code, "", 1), err
    assert [part for part in parts if part not in err] == []
    assert not (tmp_path / "t").exists()
