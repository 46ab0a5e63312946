"""Logs: levels by MOETOOL_LOG and by flags, on stderr alone, in processes that moetool starts too."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetool.base import logs, tables
from moetool.base.errors import UsageError
from tests.command_line import exit_code
from tests.refusals import refused
from tests.servers import eventually

LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR) moetool[.\w]*\[\d+\] .+")


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(logs.VARIABLE, "")
    yield
    logs.configure("")


@pytest.mark.parametrize(
    ("levels", "shown"),
    [
        ("", {"a": "WARNING", "a.b": "WARNING"}),
        ("error", {"a": "ERROR", "a.b": "ERROR"}),
        ("debug", {"a": "DEBUG", "a.b": "DEBUG"}),
        ("info,a.b=debug", {"a": "INFO", "a.b": "DEBUG", "c": "INFO"}),
        (" moetool.a = Debug , ERROR", {"a": "DEBUG", "a.b": "DEBUG", "c": "ERROR"}),
    ],
)
def test_levels(levels: str, shown: dict[str, str]) -> None:
    logs.configure("debug,a=error,c=error")  # nothing of it stays
    logs.configure(levels)
    found = {name: logging.getLevelName(logging.getLogger(f"moetool.{name}").getEffectiveLevel()) for name in shown}
    assert found == shown


@pytest.mark.parametrize("levels", ["loud", "info,a=loud", "info,=debug", "a="])
def test_what_cannot_be_read_is_refused_and_changes_nothing(levels: str) -> None:
    logs.configure("error")
    with refused(UsageError, "MOETOOL_LOG"):
        logs.configure(levels)
    assert not logs.narrates()


def test_a_line_has_time_level_logger_and_process(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info")
    logging.getLogger("moetool.a").info("%d bytes", 5)
    logging.getLogger("moetool.a").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert LINE.fullmatch(err.strip()) and err.strip().endswith(f"moetool.a[{os.getpid()}] 5 bytes")


def test_only_errors_when_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tables.narrate("one")
    logs.set_verbosity(quiet=True)
    tables.narrate("two")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with tables.progress("title", 3) as on_progress:
        on_progress(1)
    tables.complain("three")
    assert capsys.readouterr().err.split() == ["one", "three"]


@pytest.mark.parametrize(
    ("flags", "level"), [(["-v"], "info"), (["-vv"], "debug"), (["-v", "-v"], "debug"), (["--quiet"], "error")]
)
@pytest.mark.parametrize("behind", [False, True])
def test_flags_before_and_behind_the_command(
    flags: list[str], level: str, behind: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.VARIABLE, "warning,a.b=error")
    assert exit_code(monkeypatch, *(["models", *flags] if behind else [*flags, "models"])) == 0
    assert os.environ[logs.VARIABLE] == f"{level},a.b=error"
    assert logging.getLogger("moetool.a").getEffectiveLevel() == getattr(logging, level.upper())
    assert logging.getLogger("moetool.a.b").getEffectiveLevel() == logging.ERROR
    assert logs.environment() == {logs.VARIABLE: f"{level},a.b=error"}


@pytest.mark.parametrize(
    ("arguments", "levels", "message"),
    [
        (["-v", "-q", "models"], "", "-v and -q contradict each other"),
        (["models"], "inf", "unknown level 'inf' of MOETOOL_LOG=inf: did you mean 'info'"),
    ],
)
def test_wrong_flags(
    arguments: list[str],
    levels: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(logs.VARIABLE, levels)
    assert exit_code(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1


def test_a_process_logs_as_the_one_that_started_it(tmp_path: Path) -> None:
    code = "import moetool, logging; logging.getLogger('moetool.runtime.loop.engine').debug('here')"
    for levels, shown in (("runtime=debug", True), ("debug,runtime=info", False), ("what?", False)):
        ran = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, logs.VARIABLE: levels}, capture_output=True, text=True
        )
        assert ran.returncode == 0 and ran.stdout == ""
        assert bool(LINE.fullmatch(ran.stderr.strip())) is shown and bool(ran.stderr) is shown


def test_a_line_stands_above_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    logs.configure("info")
    with tables.progress("title", 3) as on_progress:
        on_progress(1)
        logging.getLogger("moetool.a").info("a line")
        on_progress(2)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").splitlines()
    (line,) = [line for line in lines if "a line" in line]
    assert LINE.fullmatch(line.strip())


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LINE_S", 0.01)
    monkeypatch.setattr(tables, "time", SimpleNamespace(monotonic=float))  # the clock stands at 0
    with tables.progress("reading", 2000) as on_progress:
        on_progress(1000)
        eventually(lambda: "moetool: reading: 1,000 of 2,000, 0 s, 0 s left\n" in capsys.readouterr().err)
    with tables.stages() as on_stage:
        on_stage("planning", 1, 1)
        eventually(lambda: "moetool: planning: 1 of 1, 0 s, 0 s left\n" in capsys.readouterr().err)
    logs.set_verbosity(quiet=True)
    with tables.progress("reading"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
