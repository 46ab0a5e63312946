"""Ctrl-C while a command starts: exit code 130 and one line, never a traceback."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import child_environment

INTERRUPTED = """
import os, signal, sys
from moetool.__main__ import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGINT))
signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop(1)))
main()
"""
"""The command line, interrupted so many seconds after the console entry was imported."""
IMPORTING = """
import signal, sys, time
from moetool.cli import interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.ends_process()
interrupt.raises()
try:
    import slow
    time.sleep(60)
except KeyboardInterrupt:
    print(slow.whole)
"""
SLOW = """
import os, signal, time

for _ in range({times}):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
whole = True
"""
"""A module whose import is interrupted."""
IGNORED = """
import os, signal, time
from moetool.cli import interrupt

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
interrupt.ends_process()
interrupt.raises()
try:
    Interrupted()
    time.sleep(60)
except KeyboardInterrupt:
    print("heard")
"""
AT_EXIT = (-signal.SIGINT, -signal.SIGALRM)
"""After all output, when the interpreter has restored its handlers."""


@pytest.mark.parametrize(
    ("command", "delays_s"),
    [
        (["--help"], (0.001, 0.03, 0.07, 0.14, 0.2)),
        (["models"], (0.001, 0.03, 0.1, 0.17, 0.3)),
        (["serve", "reference", "--port", "0"], (0.001, 0.03, 0.07, 0.1, 0.14, 0.17, 0.2, 0.25, 0.3, 0.5, 0.9)),
        (["nonsense"], (0.001, 0.03, 0.17, 0.25)),
    ],
)
def test_the_first_moments(command: list[str], delays_s: tuple[float, ...]) -> None:
    codes = []
    for delay_s in delays_s:
        process = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, str(delay_s), *command],
            capture_output=True,
            text=True,
            env=child_environment(),
            timeout=120,
        )
        codes.append(process.returncode)
        assert process.returncode in (0, 2, 130, *AT_EXIT), process.stderr
        assert "Traceback" not in process.stderr and "ignored in" not in process.stderr
        if process.returncode == 130:
            refused = "moetool: no such command 'nonsense' (see moetool --help)\n" if command == ["nonsense"] else ""
            said = process.stderr.replace("moetool: starting\n", "")  # after ten seconds, on a busy machine
            assert said.removeprefix(refused) == "moetool: stopped\n"
    assert codes[:2] == [130, 130]  # later ones may wait for imports longer than the rest of the command takes


def test_nothing_else_is_imported_before_the_handler() -> None:
    """Each module is a moment in which Ctrl-C shows as a traceback."""
    command = "import os, sys; old = {*sys.modules}; import moetool.cli.interrupt; print(*{*sys.modules} - old)"
    environment = child_environment()
    environment.pop("MOETOOL_LOG", None)
    found = subprocess.run([sys.executable, "-S", "-c", command], capture_output=True, text=True, env=environment)
    ours = {"moetool", "moetool.cli", "moetool.cli.interrupt"}
    assert ours <= {*found.stdout.split()} <= ours | {"_signal", "time"}, found


@pytest.mark.parametrize(("times", "code", "said"), [(1, 0, "True\n"), (2, 130, "")])
def test_an_import_is_finished_first(times: int, code: int, said: str, tmp_path: Path) -> None:
    """A second Ctrl-C ends it at once."""
    (tmp_path / "slow.py").write_text(SLOW.format(times=times))
    command = [sys.executable, "-c", IMPORTING]
    found = subprocess.run(command, capture_output=True, text=True, env=child_environment(tmp_path))
    assert (found.returncode, found.stdout) == (code, said), found.stderr
    assert found.stderr == ("moetool: stopped\n" if code else "")


def test_an_interrupt_that_a_destructor_swallows_is_raised_again() -> None:
    found = subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, text=True, env=child_environment())
    assert (found.returncode, found.stdout, found.stderr) == (0, "heard\n", "")
