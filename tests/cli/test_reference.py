"""`moetool reference train` at the command line: what it prints, and what it refuses in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetool import assets
from moetool.reference.data import SEPARATOR
from tests.command_line import exit_code

RECIPE = assets.path("recipes", "reference", "model.toml")
SMALL = [
    *("--set", "model.hidden_size=16", "--set", "model.num_layers=2", "--set", "model.expert_width=8"),
    *("--set", "fit.max_steps=2", "--set", "fit.batch_size=64", "--set", "fit.sequence_length=8"),
    *("--set", "data.held_out_tokens=64"),
]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Any]:
    """Run the command on a text folder; gives exit code, stdout and stderr."""

    def call(data: Path, *args: str, recipe: Path = RECIPE) -> tuple[int, str, str]:
        line = ("reference", "train", "--recipe", recipe, "--data", data, "--out", tmp_path / "model", *args)
        code = exit_code(monkeypatch, *line)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Less of it than one batch holds."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "law.txt").write_text("".join(f"The court closes at {i}.\n{SEPARATOR}\n" for i in range(12)))
    return folder


def test_text_smaller_than_a_batch_is_gone_through_again(train: Any, text: Path, tmp_path: Path) -> None:
    code, out, err = train(text, *SMALL)
    assert code == 0, err
    assert "2 steps, 1,024 tokens" in out and "law" in out and "routing differs by 0.000 bits between domains" in out
    assert err == ""
    code, out, err = train(text, *SMALL)
    assert code == 2 and "exists already" in err
    code, out, err = train(text, *SMALL, "--overwrite", "--json")
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "model" / "training.json").read_text())


def test_what_cannot_be_trained_is_said_in_one_line(train: Any, text: Path, tmp_path: Path) -> None:
    def refused(code: int, *parts: str, data: Path = text, args: tuple[str, ...] = (), recipe: Path = RECIPE) -> None:
        found, out, err = train(data, *args, recipe=recipe)
        assert (found, out) == (code, ""), err
        assert len(err.splitlines()) == 1 and all(part in err for part in parts), err

    (tmp_path / "empty").mkdir()
    refused(2, "holds no .txt file", data=tmp_path / "empty")
    refused(2, "no directory", data=tmp_path / "absent")
    refused(2, "did you mean 'max_steps'", args=("--set", "fit.max_step=3"))
    refused(2, "law has", "tokens to train on", "--set fit.sequence_length=")
    refused(2, "cannot read the recipe", recipe=tmp_path / "absent.toml")
    refused(2, "nothing to resume", args=("--resume",))
    refused(2, "no model at", args=("--from", str(tmp_path / "absent")))
    refused(3, "hidden_size 192", args=("--from", "reference", "--set", "model.hidden_size=96"))
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[fitt]\nmax_steps = 3\n")
    refused(2, "did you mean 'fit'", recipe=wrong)
    assert not (tmp_path / "model").exists() and not (tmp_path / "model.training").exists()
