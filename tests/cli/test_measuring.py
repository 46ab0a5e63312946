"""`moetool profile` and `moetool doctor` at the terminal: tables, JSON, and the peer of a link."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moetool.costing.costs import CostProfile
from tests.command_line import exit_code
from tests.servers import PATIENCE_S


def _run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    assert exit_code(monkeypatch, *args) == 0


def test_a_profile_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "profile.json"
    _run(monkeypatch, "profile", "reference", "--seconds", 0, "--dtype", "float32", "--out", out)
    printed = capsys.readouterr().out
    assert "milliseconds by tokens" in printed
    assert "disk, 8 at a time" in printed
    assert "one token on cpu in float32" in printed
    made = CostProfile.load(out)
    _run(monkeypatch, "profile", "reference", "--seconds", 0, "--dtype", "float32", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values["spec"] == made.spec.to_json()


def test_doctor_prints_ten_lines_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    _run(monkeypatch, "doctor")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("processor ")
    _run(monkeypatch, "doctor", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert [line[: len(row["name"])] for line, row in zip(lines, rows, strict=True)] == [r["name"] for r in rows]


def test_a_peer_listens_on_this_machine_until_interrupted() -> None:
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a background job ignores it
    run = "import runpy; runpy.run_module('moetool.cli.main', run_name='__main__')"
    command = [sys.executable, "-c", f"{heard}; {run}", "profile", "--listen", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listening on 127.0.0.1:" in line
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 0
        assert process.stderr.read() == ""
