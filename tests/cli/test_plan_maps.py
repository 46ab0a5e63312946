"""`moetool plan maps`: what it prints, and what it refuses."""

import json
from pathlib import Path

import pytest

from tests.command_line import exit_code


def test_what_likeness_is_worth_is_printed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    maps = tmp_path / "maps"
    arguments = ("plan", "maps", "--trace", trace, "--out", maps, "--set", "source=topk")
    assert exit_code(monkeypatch, *arguments, "--capacity", "2LJ") == 0
    printed = capsys.readouterr().out
    assert "expert maps of at most 512" in printed  # 2 * 8 * 32
    assert "Pearson" in printed and "more than K in" in printed
    assert exit_code(monkeypatch, *arguments, "--overwrite", "--capacity", "40", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["maps"] == 40
    assert -1 <= made["path"]["pearson"] <= 1
    assert (maps / "card.json").is_file()


def test_refusals_say_what_to_do(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("plan", "maps", "--trace", trace, "--out", tmp_path / "maps")
    assert exit_code(monkeypatch, *arguments) == 3
    assert "need embeddings, but" in (error := capsys.readouterr().err)
    assert "--keep topk,logits,embeddings" in error and "source=topk" in error
    assert exit_code(monkeypatch, *arguments, "--set", "source=topk", "--capacity", "0") == 2
    assert "a store of 0 expert maps" in capsys.readouterr().err
    assert exit_code(monkeypatch, *arguments, "--set", "source=topk", "--capacity", "many") == 2
    assert "capacity" in capsys.readouterr().err
    assert not (tmp_path / "maps").exists()
