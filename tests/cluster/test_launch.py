"""Workers as Ray actors, with workers that cost nothing to build."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moetool.cluster.launch import Where, WorkerDied, Workers
from moetool.cluster.ray_reaper import processes_of
from moetool.errors import MismatchError, MoetoolError
from tests.launched import build
from tests.servers import PATIENCE_S, eventually

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
BEFORE = signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers(Where(count=2), build, [{"name": "a"}, {"name": "b"}], ["first", "second"], threads=1)
    yield made
    made.close()


def test_a_sigterm_does_what_it_did_before_ray(workers: Workers) -> None:
    assert signal.getsignal(signal.SIGTERM) is BEFORE
    found = re.search(r"SigCgt:\s*(\w+)", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None and len(workers) == 2
    is_caught = int(found[1], 16) >> (signal.SIGTERM - 1) & 1  # as the kernel has it: Ray's handler is none of Python's
    assert bool(is_caught) == callable(BEFORE)


def test_calls_and_what_they_raise(workers: Workers) -> None:
    assert workers.call(0, "say", "hello") == "a: hello"
    assert workers.call(1, "say", word="you") == "b: you"
    with pytest.raises(MismatchError, match="found x"):
        workers.call(1, "fail")
    with pytest.raises(MoetoolError, match=r"server first did not answer sleep in 0.1 s"):
        workers.call(0, "sleep", 1.0, timeout_s=0.1)


def test_a_death_is_told_once_and_a_worker_started_anew(workers: Workers) -> None:
    died: list[int] = []
    told = threading.Event()
    for n in range(2):
        workers.watch(n, lambda n: (died.append(n), told.set()))
    before = workers.pid(1)
    with pytest.raises(WorkerDied, match="server second has ended"):
        workers.call(1, "end")
    assert told.wait(PATIENCE_S)
    workers.restart(1, {"name": "c"})
    workers.watch(1, lambda n: died.append(n + 10))
    assert workers.call(1, "say", "hello") == "c: hello" and workers.pid(1) != before
    workers.kill(1)  # asked for, so nobody is told
    with pytest.raises(WorkerDied, match=r"server second has ended \(it was killed\)"):
        workers.call(1, "say", "hello")
    workers.restart(1, {"name": "d"})
    assert workers.call(1, "say", "hello") == "d: hello"
    assert died == [1]


def test_a_worker_that_cannot_be_built_says_why(workers: Workers) -> None:
    workers.restart(1, {"name": "wrong"})
    with pytest.raises(WorkerDied, match=r"server second has ended \(.*found a, expected b; do c\)$"):
        workers.call(1, "say", "hello")
    workers.restart(1, {"name": "e"})
    eventually(lambda: workers.call(1, "say", "hello") == "e: hello")


def test_nothing_is_left_of_a_head_that_is_killed() -> None:
    program = (
        "import os, time; from moetool.cluster.launch import Where, Workers; from tests.launched import build; "
        "made = Workers(Where(count=1), build, [{'name': 'a'}], ['first']); "
        "import ray; print(ray.get_runtime_context().gcs_address, made.pid(0), flush=True); time.sleep(600)"
    )
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        given = {**os.environ, "PYTHONPATH": path, "TMPDIR": folder}
        head = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=given)
        try:
            assert head.stdout is not None and head.stdout.readline()
            (session,) = Path(folder).glob("moetool-ray-*")
            started = psutil.Process(head.pid).children(recursive=True)
            found = {process.pid for process in started} & set(processes_of(session, head.pid))
            assert len(found) >= 5  # Ray's daemons, the agents and a worker among them
        finally:
            head.kill()
            head.communicate()
        eventually(lambda: not any(one.is_running() and one.status() != "zombie" for one in started))
        eventually(lambda: not list(Path(folder).iterdir()))
    assert session.parent == Path(folder)
