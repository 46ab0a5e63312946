"""`moetool verify` at the terminal: the table, the verdict, the exit code and the report."""

import json
from pathlib import Path

import pytest

from moetool.models.experts.expert_files import ExpertFiles
from tests.command_line import Run


def test_the_verdict_is_printed_and_the_report_saved(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    code, text, err = run("verify", "reference", "--policy", "lru", "--prompts", 2, "--tokens", 2, "--out", out)
    assert code == 0, err
    assert "reference-moe: exact: every answer equals that of plain transformers" in text
    assert "256 experts in a slot" in text and f"{out}: the report" in text
    assert "the same tokens but at ties" in " ".join(text.split())
    assert out.read_text().startswith("# moetool verify\n\n**reference-moe: exact")


def test_the_promise_is_that_of_the_data_type(run: Run, tmp_path: Path) -> None:
    given = ("verify", "reference", "--policy", "lru", "--prompts", 1, "--tokens", 1, "--dtype", "bfloat16")
    _, text, _ = run(*given, "--out", tmp_path / "report.md")
    promise = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| promise"))
    assert "one batch composition" in promise and "tokens may differ" in promise
    assert "the same tokens" not in " ".join(text.split())


def test_what_differs_ends_with_exit_code_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertFiles, "read_stored", _negated(ExpertFiles.read_stored))
    out = tmp_path / "report.json"
    arguments = ("verify", "reference", "--policy", "lru", "--prompts", 1, "--tokens", 1, "--json", "--out", out)
    code, text, _ = run(*arguments)
    assert code == 1
    found = json.loads(text)
    assert found == json.loads(out.read_text())
    assert found["verdict"] == "differs" and found["first"].startswith("layer 0: the slots of experts 0, 1, ")


def test_a_report_of_another_kind_is_refused_before_anything_runs(run: Run, tmp_path: Path) -> None:
    code, _, err = run("verify", "reference", "--out", tmp_path / "report.txt")
    assert code == 2 and "ends in '.txt', expected .md or .json" in err


def _negated(read: object) -> object:
    def read_stored(self: ExpertFiles, key: int, memory: object) -> int:
        done: int = read(self, key, memory)  # type: ignore[operator]
        memory[1::2] ^= 128  # type: ignore[index]
        return done

    return read_stored
