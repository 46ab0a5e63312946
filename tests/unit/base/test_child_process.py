"""Processes end with the one that started them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import eventually

SCRIPT = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from moetool.base.child_process import end_with_parent

def work(path):
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool:
        pool.submit(work, sys.argv[2]).result()
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_ends_when_its_parent_is_killed(method: str, tmp_path: Path) -> None:
    script, written = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(SCRIPT)
    parent = subprocess.Popen([sys.executable, str(script), method, str(written)])
    try:
        eventually(lambda: written.exists() and written.read_text())
    finally:
        parent.kill()
        parent.wait()
    worker = int(written.read_text())

    def gone() -> bool:
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z"

    try:
        eventually(gone)
    finally:
        if not gone():
            os.kill(worker, signal.SIGKILL)
