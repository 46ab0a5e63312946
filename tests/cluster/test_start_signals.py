"""A cluster that is ended while it starts leaves no process and no folder, and one that fails leaves its logs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.edge_process import write_plan
from tests.servers import PATIENCE_S, eventually, has_ended

pytestmark = pytest.mark.ray


def _serve(tmp_path: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A head of three processes, and the file of what it says."""
    plan, said = write_plan(tmp_path / "placement.json"), tmp_path / "said"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "MOETOOL_LOG": "info"}
    command = [sys.executable, "-m", "moetool.cli.main", "serve", "reference", "--plan", str(plan), "--port", "0"]
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a child inherits nohup's
    try:
        with said.open("wb") as stderr:
            served = subprocess.Popen(
                [*command, "--cluster", "local:3", *arguments], stderr=stderr, env=environment, start_new_session=True
            )
    finally:
        signal.signal(signal.SIGHUP, ignored)
    return served, said


@pytest.mark.parametrize(("mode", "number"), [("edge", signal.SIGTERM), ("ep", signal.SIGTERM), ("ep", signal.SIGHUP)])
def test_a_signal_during_the_start_ends_all_in_order(mode: str, number: signal.Signals, tmp_path: Path) -> None:
    served, said = _serve(tmp_path, "--mode", mode)
    try:
        eventually(lambda: "moetool: starting 3" in said.read_text() or served.poll() is not None)
        eventually(lambda: len(psutil.Process(served.pid).children(recursive=True)) == 4)  # and what forks them
        processes = psutil.Process(served.pid).children(recursive=True)
        served.send_signal(number)
        assert served.wait(PATIENCE_S) in (0, 130), said.read_text()
        lines = [line for line in said.read_text().splitlines() if line.startswith("moetool:")]
        assert "Traceback" not in said.read_text() and (mode == "edge" or lines[-1] == "moetool: stopped")
        soon_s = PATIENCE_S / 4  # a process without a head waits longer for one
        eventually(lambda: all(map(has_ended, processes)), within_s=soon_s)
        assert not list((tmp_path / "cache" / "moetool" / "clusters").iterdir())
    finally:
        served.kill()
        served.wait()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the start fails for lack of a GPU")
def test_logs_of_a_start_that_fails_stay_and_are_named(tmp_path: Path) -> None:
    served, said = _serve(tmp_path, "--mode", "ep", "--set", "device=cuda")
    assert served.wait(2 * PATIENCE_S) not in (0, -9)
    folder = next((tmp_path / "cache" / "moetool" / "clusters").iterdir())
    logs = sorted(folder.iterdir())
    assert logs and all(path.suffix == ".log" and path.stat().st_size for path in logs)
    assert f"moetool: logs of the ranks: {' '.join(map(str, logs))}" in said.read_text()
    assert f"moetool: starting 3 ranks; their logs: {folder}/*.log" in said.read_text()
