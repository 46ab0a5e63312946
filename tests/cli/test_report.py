"""`moetool report`: its files, output and errors."""

import json
from pathlib import Path

import pytest

from tests import synthetic
from tests.command_line import exit_code


def _run(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    return exit_code(monkeypatch, "report", *args)


def test_the_page_is_written_and_its_sentences_printed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "new" / "report.html"
    poor = synthetic.write_trace(tmp_path / "poor", synthetic.make_spec(layers=1, experts=16)).path
    assert _run(monkeypatch, poor, "--out", page, "--policy", "lru", "--budget", "25%") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{page}: synthetic, ")
    assert "  Which cache policy? " in printed
    small = ("--policy", "lru", "--budget", "25%", "--set", "report.uses=2000")
    assert _run(monkeypatch, trace, "--out", page, *small) == 2
    assert "exists already" in capsys.readouterr().err
    assert _run(monkeypatch, trace, "--out", page, *small, "--json", "--overwrite") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert len(numbers["affinity"]["lift_EE"]) == 3
    assert [row["policy"] for row in numbers["replay"]] == ["lru", "belady"]
    text = page.read_text(encoding="utf-8")
    assert "Expert affinity" in text and "Entropy of the routers&#39; own probabilities" in text
    style, body = text.split("</style>")
    assert "prefers-color-scheme: dark" in style and "#0072b2" in style and "#0072b2" not in body
    assert '<td class="text">foresight hits' in body  # sentences are wrapped, not cut off


def test_invalid_options_are_refused_before_measuring(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert _run(monkeypatch, tmp_path / "none", "--out", page) == 2
    assert "no trace at" in capsys.readouterr().err
    assert _run(monkeypatch, trace, "--out", tmp_path) == 2
    assert "is a directory" in capsys.readouterr().err
    assert _run(monkeypatch, trace, "--out", page, "--set", "report.use=3") == 2
    assert "did you mean 'uses'" in capsys.readouterr().err
    assert _run(monkeypatch, trace, "--out", page, "--policy", "expert_mlp") == 2
    assert not page.exists()
    assert _run(monkeypatch, trace, "--out", page.with_suffix(".pdf")) == 2
    said = capsys.readouterr().err
    assert ".pdf" in said and ".html" in said and not page.with_suffix(".pdf").exists()
