"""Workers as processes of this machine, with workers that cost nothing to build."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError
from moetool.cluster.certificates import Authority, self_signed
from moetool.cluster.cluster_folder import ClusterFolder
from moetool.cluster.fork_server import ForkServer
from moetool.cluster.launch import ClusterAddress, Detached, ThisMachine, Workers
from moetool.cluster.worker_link import WorkerDied, WorkerLink, serves
from moetool.cluster.worker_process import ProcessOrder, ProcessRecord, end_process, lives, start_process
from tests.identities import identity
from tests.launched import build
from tests.refusals import refused
from tests.servers import PATIENCE_S, eventually, has_ended

pytestmark = pytest.mark.ray
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers(ClusterAddress(count=2), build, [{"name": "a"}, {"name": "b"}], NAMES, threads=1)
    yield made
    made.close()


def _lives(pid: int) -> bool:
    try:
        return not has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def test_calls_and_what_they_raise(workers: Workers) -> None:
    assert workers.call(0, "say", "hello") == "a: hello"
    assert workers.call(1, "say", word="you") == "b: you"
    with refused(MismatchError, "x"):
        workers.call(1, "fail")
    with refused(MoetoolError, "TypeError", "words"):
        workers.call(1, "say", words="you")
    with refused(MoetoolError, "first", "sleep", "0.1 s"):
        workers.call(0, "sleep", 1.0, timeout_s=0.1)
    assert workers.call(0, "say", "hello") == "a: hello"  # which waits for nobody else's call


def test_a_death_is_told_once_and_a_worker_started_anew(workers: Workers) -> None:
    died: list[int] = []
    told = threading.Event()
    for n in range(2):
        workers.watch(n, lambda n: (died.append(n), told.set()))
    before = workers.pid(1)
    with refused(WorkerDied, "second"):
        workers.call(1, "end")
    assert told.wait(PATIENCE_S)
    workers.restart(1, {"name": "c"})
    workers.watch(1, lambda n: died.append(n + 10))
    assert workers.call(1, "say", "hello") == "c: hello" and workers.pid(1) != before
    workers.kill(1)  # asked for, so nobody is told
    with refused(WorkerDied, "second", "killed"):
        workers.call(1, "say", "hello")
    workers.restart(1, {"name": "d"})
    assert workers.call(1, "say", "hello") == "d: hello"
    assert died == [1]


def test_a_death_that_nobody_watched_is_told_to_who_asks_later(workers: Workers) -> None:
    told = threading.Event()
    psutil.Process(workers.pid(1)).kill()
    with pytest.raises(WorkerDied):
        workers.call(1, "say", "hello")
    workers.watch(1, lambda n: told.set())
    assert told.wait(PATIENCE_S)
    workers.restart(1, {"name": "e"})
    assert workers.call(1, "say", "hello") == "e: hello"


def test_a_worker_that_cannot_be_built_says_why(workers: Workers) -> None:
    workers.restart(1, {"name": "wrong"})
    with pytest.raises(WorkerDied, match=r"server second has ended \(.*found a, expected b; do c\)$"):
        workers.call(1, "say", "hello")
    pid = workers.pid(1)
    eventually(lambda: not _lives(pid))
    workers.restart(1, {"name": "e"})
    eventually(lambda: workers.call(1, "say", "hello") == "e: hello")


def test_a_worker_that_hangs_does_not_keep_its_head_from_closing() -> None:
    made = Workers(ClusterAddress(count=1), build, [{"name": "a"}], ["first"])
    pid = made.pid(0)
    assert made.call(0, "say", "hello") == "a: hello"
    psutil.Process(pid).suspend()
    with refused(MoetoolError, "say", "0.2 s"):
        made.call(0, "say", "hello", timeout_s=0.2)
    began = time.monotonic()
    made.kill(0)
    made.close()
    assert time.monotonic() - began < 10 and not _lives(pid)


def _head(folder: Path, orphan_s: float, *, detached: bool = True) -> "subprocess.Popen[str]":
    """A head with two workers in a process of its own, which has written that they are there."""
    made = f"Detached(folder=ClusterFolder('c', Path({str(folder)!r})), orphan_s={orphan_s})" if detached else "None"
    program = (
        "import time; from pathlib import Path; from moetool.cluster.cluster_folder import ClusterFolder; "
        "from moetool.cluster.launch import Detached, ClusterAddress, Workers; from tests.launched import build; "
        f"made = Workers(ClusterAddress(count=2), build, [{{'name': 'a'}}, {{'name': 'b'}}], {NAMES}, "
        f"detached={made}); "
        "[made.call(n, 'say', 'x') for n in range(2)]; print(made.pid(0), made.pid(1), flush=True); time.sleep(600)"
    )
    return _process(program)


def _process(program: str) -> "subprocess.Popen[str]":
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)


def _killed(head: "subprocess.Popen[str]", after_s: float = 0.0) -> list[int]:
    """The workers of a head that has been killed since."""
    assert head.stdout is not None
    pids = [int(pid) for pid in head.stdout.readline().split()]
    time.sleep(after_s)
    head.kill()
    head.communicate()
    return pids


def test_nothing_is_left_of_a_head_that_is_killed(tmp_path: Path) -> None:
    for options in ({"orphan_s": 1.0}, {"orphan_s": 0.0, "detached": False}):
        pids = _killed(_head(tmp_path, **options))  # type: ignore[arg-type]
        assert len(pids) == 2
        eventually(lambda pids=pids: not any(map(_lives, pids)))  # type: ignore[misc]
        eventually(lambda: not list(tmp_path.iterdir()))  # nor of its folder


def test_the_next_head_takes_over_those_that_live(tmp_path: Path) -> None:
    first, second = _killed(_head(tmp_path, 60.0))
    psutil.Process(second).kill()
    folder = ClusterFolder("c", tmp_path)
    with refused(UsageError, "cluster c"):
        ClusterFolder("c", tmp_path)
    living = folder.living()
    assert list(living) == ["first"] and living["first"].pid == first
    detached = Detached(folder=folder, living=living, orphan_s=1.0)
    made = Workers(ClusterAddress(count=2), build, [{"name": "c"}, {"name": "d"}], NAMES, detached=detached)
    assert made.taken_over == [0] and made.pid(0) == first
    assert made.call(0, "say", "hello") == "a: hello" and made.call(1, "say", "hello") == "d: hello"
    told = threading.Event()
    made.watch(0, lambda n: told.set())
    psutil.Process(first).kill()
    assert told.wait(PATIENCE_S)
    made.restart(0)
    assert made.call(0, "say", "hello") == "c: hello"
    made.close()
    folder.close()
    assert not list(tmp_path.iterdir())


def test_a_worker_that_does_not_start_ends_none_that_was_taken_over(tmp_path: Path) -> None:
    first, second = _killed(_head(tmp_path, 60.0))
    psutil.Process(second).kill()
    folder = ClusterFolder("c", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] - 1
        detached = Detached(folder=folder, living=folder.living(), orphan_s=1.0, port=port)
        arguments = [{"name": "c"}, {"name": "d"}]
        made = Workers(ClusterAddress(count=2), build, arguments, NAMES, detached=detached)
        assert made.is_started(0) and not made.is_started(1) and made.pid(0) == first
        with refused(MoetoolError, port + 1):
            made.restart(1)
    made.restart(1)
    assert [made.call(n, "say", "hello") for n in range(2)] == ["a: hello", "d: hello"]
    made.close()
    folder.close()


def test_only_a_head_of_the_cluster_calls_a_process(tmp_path: Path) -> None:
    folder = ClusterFolder("c", tmp_path)
    head = folder.identity("head")
    assert head == folder.identity("head") and head.name == "head"
    made = Workers(ClusterAddress(count=1), build, [{"name": "a"}], ["first"], detached=Detached(folder=folder))
    assert made.call(0, "say", "x") == "a: x"
    (record,) = folder.living().values()
    assert serves(record, head)
    for stranger in (folder.identity("server-0"), Authority.new().issue("head")):
        assert not serves(record, stranger)
    other = self_signed(record.mark, head.authority)
    assert not serves(replace(record, certificate=other.certificate), head)  # another process at the same address
    link = WorkerLink("first", record, head, None)
    assert link.call("say", ("x",), {}, PATIENCE_S) == "a: x"
    link.close("it was killed")  # whether or not its machine could be reached
    with refused(WorkerDied, "killed"):
        link.call("say", ("x",), {}, PATIENCE_S)
    made.close()
    folder.close()


def test_a_call_that_hangs_keeps_no_orphan_alive(tmp_path: Path) -> None:
    program = (
        "import os, threading, time; from pathlib import Path; "
        "from moetool.cluster.cluster_folder import ClusterFolder; "
        "from moetool.cluster.launch import Detached, ClusterAddress, Workers; from tests.launched import build; "
        f"detached = Detached(folder=ClusterFolder('c', Path({str(tmp_path)!r})), orphan_s=1.0); "
        "made = Workers(ClusterAddress(count=1), build, [{'name': 'a'}], ['first'], detached=detached); "
        "made.call(0, 'say', 'x'); print(made.pid(0), flush=True); made.call(0, 'sleep', 600.0, timeout_s=600.0)"
    )
    (pid,) = _killed(_process(program), after_s=1.0)
    eventually(lambda: not _lives(pid))


def test_a_forked_process_outlives_its_fork_server_and_is_known_by_its_start(tmp_path: Path) -> None:
    head, fork_server = identity("head"), ForkServer("tests.launched")
    orders = [ProcessOrder(mark=f"moetool-worker-{n}", authority=head.authority, orphan_s=600.0) for n in range(2)]
    first, second = (fork_server.start(order, tmp_path / "log") for order in orders)
    fork_server.close()
    fork_server.close()
    assert lives(first.pid, first.started) and not lives(first.pid, first.started + 1)
    link = WorkerLink(
        "first", first, head, {"do": "build", "build": "tests.launched:build", "arguments": {"name": "a"}}
    )
    assert link.call("say", ("x",), {}, PATIENCE_S) == "a: x"
    link.end(PATIENCE_S)
    eventually(lambda: not lives(first.pid, first.started))
    end_process(second.pid, second.started + 1)  # another process of that number
    assert lives(second.pid, second.started)
    end_process(second.pid, second.started)
    assert not lives(second.pid, second.started)
    with refused(MoetoolError, "fork", "server", "ended"):
        fork_server.start(orders[0], tmp_path / "log")


def test_a_fork_server_tells_what_failed_and_is_started_again_once_it_has_died(tmp_path: Path) -> None:
    head = identity("head")
    order = ProcessOrder(mark="moetool-worker-0", authority=head.authority, orphan_s=600.0)
    with contextlib.closing(ForkServer("tests.launched")) as fork_server:
        with refused(MoetoolError, "No such file"):
            fork_server.start(order, tmp_path / "missing" / "log")
        first = fork_server.start(order, tmp_path / "log")
        parent = psutil.Process(first.pid).parent()
        assert parent is not None
        parent.kill()
        eventually(lambda: not _lives(parent.pid))
        second = fork_server.start(order, tmp_path / "log")
    for one in (first, second):
        assert lives(one.pid, one.started)
        end_process(one.pid, one.started)


def test_a_process_that_is_asked_to_end_drains_and_waits_for_its_head(tmp_path: Path) -> None:
    head = identity("head")
    order = {"do": "build", "build": "tests.launched:build", "arguments": {"name": "a"}}

    def start(name: str) -> tuple["subprocess.Popen[bytes]", WorkerLink]:
        mark = f"moetool-worker-{name}"
        record, popen = start_process(ProcessOrder(mark=mark, authority=head.authority, orphan_s=600.0))
        link = WorkerLink(name, record, head, {**order, "arguments": {"name": name}})
        assert link.call("say", ("x",), {}, PATIENCE_S) == f"{name}: x"
        popen.terminate()
        return popen, link

    popen, link = start("led")
    time.sleep(1.0)  # several of its ticks
    assert popen.poll() is None and link.call("say", ("x",), {}, PATIENCE_S) == "led: x"
    link.end(PATIENCE_S)
    assert popen.wait(PATIENCE_S) == 0
    popen, link = start("alone")
    link.close("its head has ended")
    assert popen.wait(PATIENCE_S) == 0
    popen, link = start("busy")
    time.sleep(1.0)
    assert popen.poll() is None
    popen.terminate()  # a second one does not wait
    assert popen.wait(PATIENCE_S) == -signal.SIGTERM
    link.close("it has ended")


def test_a_process_that_is_asked_to_end_before_its_worker_is_built_ends_at_once(tmp_path: Path) -> None:
    head, begun = identity("head"), tmp_path / "begun"
    record, popen = start_process(ProcessOrder(mark="m", authority=head.authority, orphan_s=600.0))
    order = {"do": "build", "build": "tests.launched:build", "arguments": {"name": str(begun)}}
    link = WorkerLink("first", record, head, order)
    eventually(begun.exists)
    popen.terminate()
    assert popen.wait(PATIENCE_S) == -signal.SIGTERM
    link.close("it has ended")


def test_a_release_spares_the_process_that_was_started_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Workers(ClusterAddress(count=1), build, [{"name": "a"}], ["first"])
    before = made.pid(0)
    monkeypatch.setattr(ThisMachine, "release", lambda self, n: made.restart(n))
    made.release(0)
    assert made.pid(0) != before and made.call(0, "say", "x") == "a: x" and not _lives(before)
    made.close()


def test_a_worker_that_is_released_starts_no_more_on_its_machine() -> None:
    made = Workers(ClusterAddress(count=1), build, [{"name": "a"}], ["first"])
    pid, died = made.pid(0), list[int]()
    made.watch(0, died.append)
    made.release(0)
    assert not _lives(pid) and not died
    with refused(CapacityError, "drained", "next head"):
        made.restart(0)
    made.close()


def test_a_process_without_a_worker_waits_for_no_second_head(tmp_path: Path) -> None:
    head = identity("head")
    record, popen = start_process(ProcessOrder(mark="m", authority=head.authority, orphan_s=600.0))
    assert not serves(record, head)
    assert popen.wait(PATIENCE_S) == 0


def test_a_folder_that_is_damaged_or_open_to_others_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.mkdir(mode=0o700)
    damaged = ('{"certificate": "xyz", "key": "xyz"}', '{"certificate": 7, "key": 7}', "[]")
    whole = [f'{{"authority": {one}, "identities": {{}}, "settings": ""}}' for one in damaged]
    for damage in ("{}", "[1]", '{"authority": "', *whole):
        (path / "cluster.json").write_text(damage)
        with refused(MismatchError, "cluster.json"):
            ClusterFolder("c", tmp_path)
    path.chmod(0o750)
    with refused(UsageError, 750, 700):
        ClusterFolder("c", tmp_path)
    (path / "cluster.json").unlink()
    path.chmod(0o700)
    ClusterFolder("c", tmp_path).close()  # the lock is free again after each


def test_servers_with_other_settings_are_not_taken_over(tmp_path: Path) -> None:
    folder = ClusterFolder("c", tmp_path)
    folder.require_same([{"a": 1}], {})
    folder.require_same([{"a": 2}], {})  # none lives
    folder.require_same([{"a": 2}], _living())
    with refused(MismatchError, "7", "127.0.0.1"):
        folder.require_same([{"a": 3}], _living())
    folder.close()
    for name in ("", "a/b", "..", "x" * 65):
        with refused(UsageError, "cluster.name"):
            ClusterFolder(name, tmp_path)


def _living() -> Any:
    return {"first": ProcessRecord(host="127.0.0.1", port=1, pid=7, mark="m", started=1, certificate="")}
