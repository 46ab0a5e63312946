"""Writing traces: a writer that fails, is abandoned or is killed leaves nothing, says so, and never hangs."""

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base import durable
from moetool.base.errors import MoetoolError, UsageError
from moetool.trace import writer as trace_writer
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.trace.writer import TraceWriter
from tests import traces
from tests.refusals import refused
from tests.traces import SPEC

LENGTHS = [(20, 10), (5, 8), (30, 3)]
FORWARDS = traces.together(LENGTHS)
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_writer, "ROW_GROUP_TOKENS", 8)
    monkeypatch.setattr(trace_writer, "PART_TOKENS", 24)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    return made


def in_time(action: Callable[[], object], seconds: float = 20) -> BaseException | None:
    """Return the action's error; fail where a deadlock would hang the tests."""
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            action()
        except BaseException as error:
            raised[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "deadlock"
    return raised[0]


def disk_full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failure(out: Path) -> str:
    """The one line of the MoetoolError that writing a trace to `out` raises; its thread ends and nothing is left."""
    error = in_time(lambda: traces.write(out, FORWARDS, LENGTHS))
    assert type(error) is MoetoolError
    assert "\n" not in str(error)
    assert list(out.parent.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "trace-writer"]
    return str(error)


def test_what_cannot_be_kept_is_refused(folder: Path) -> None:
    with refused(UsageError, "logit", "topk, logits"):
        TraceWriter(folder, SPEC, ["logit"])


def calls(patch: pytest.MonkeyPatch, owner: object, name: str, fail_at: int | None, error: Exception) -> list[None]:
    """Counts the calls of a method and lets the one with number `fail_at` raise."""
    real = getattr(owner, name)
    made: list[None] = []

    def call(*args: object, **kwargs: object) -> object:
        made.append(None)
        if len(made) - 1 == fail_at:
            raise error
        return real(*args, **kwargs)

    patch.setattr(owner, name, call)
    return made


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), pa.ArrowInvalid("No space left")])
@pytest.mark.parametrize("operation", ["write_table", "close"])
def test_a_writer_thread_that_fails_anywhere_is_noticed(tmp_path: Path, operation: str, error: Exception) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = calls(patch, pq.ParquetWriter, operation, None, error)
        traces.write(tmp_path / "counted" / "t", FORWARDS, LENGTHS)
        total = len(made)
    assert total > 2
    for at in range(total):
        out = tmp_path / str(at) / "t"
        out.parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            calls(patch, pq.ParquetWriter, operation, at, error)
            assert "No space left" in failure(out)


def test_finish_that_fails_anywhere_is_noticed(tmp_path: Path) -> None:
    out = tmp_path / "t"
    for owner, name in ((pq, "write_table"), (durable, "sha256_file"), (durable, "write_text")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, disk_full)
            assert "No space left" in failure(out)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond `size` bytes: a disk that is full for real."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("share", [0, 0.001, 0.25, 0.5, 0.75, 0.99])
def test_a_full_disk_is_noticed(tmp_path: Path, share: float) -> None:
    whole = traces.write(tmp_path / "whole" / "t", FORWARDS, LENGTHS)
    largest = max(file.stat().st_size for file in whole.path.rglob("*.*"))
    out = tmp_path / "full" / "t"
    out.parent.mkdir()
    with largest_file(int(largest * share)):
        error = failure(out)
    assert "cannot write the trace" in error


def test_append_never_blocks_on_the_full_queue_of_a_dead_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = threading.Event()

    def wait_and_fail(*args: object, **kwargs: object) -> None:
        full.wait()
        disk_full()

    monkeypatch.setattr(pq.ParquetWriter, "write_table", wait_and_fail)
    writer = TraceWriter(folder, SPEC, KEEP, traces.AHEAD)

    threading.Timer(0.5, full.set).start()  # many times what it takes to fill the queue

    def append_for_ever() -> None:
        while True:
            writer.append(FORWARDS[0])

    error = in_time(append_for_ever)
    assert isinstance(error, MoetoolError)
    assert "No space left" in str(error)
    for action in (lambda: writer.append(FORWARDS[0]), lambda: writer.finish(composition={}, provenance={})):
        assert isinstance(in_time(action), MoetoolError)
    assert in_time(writer.abort) is None


def test_a_batch_that_lacks_a_column_is_noticed(folder: Path) -> None:
    writer = TraceWriter(folder, SPEC, ["topk", "logits"])
    forward = FORWARDS[0].select(slice(None))
    forward.logits_TF = None
    writer.append(forward)
    assert isinstance(in_time(lambda: writer.finish(composition={}, provenance={})), MoetoolError)


@pytest.mark.parametrize("appended", [0, 1, len(FORWARDS)])
def test_an_abandoned_writer_leaves_nothing_that_is_a_trace(folder: Path, appended: int) -> None:
    writer = TraceWriter(folder, SPEC, KEEP, traces.AHEAD)
    for forward in FORWARDS[:appended]:
        writer.append(forward)
    assert in_time(writer.abort) is None
    assert in_time(writer.abort) is None
    with refused(MoetoolError, "manifest.json"):
        Trace(folder)
    with refused(MoetoolError, "abandoned"):
        writer.append(FORWARDS[0])


def test_abort_after_finish_changes_nothing(folder: Path) -> None:
    writer = TraceWriter(folder, SPEC, KEEP, traces.AHEAD)
    traces.fill(writer, FORWARDS, LENGTHS, traces.SEQUENTIAL)
    assert in_time(writer.abort) is None
    Trace(folder).verify()


WRITE_HALF = """
import signal, sys, time
from pathlib import Path
from moetool.base import durable
from moetool.trace import reader as trace
from moetool.trace import writer as trace_writer
from tests import traces
trace_writer.ROW_GROUP_TOKENS, trace_writer.PART_TOKENS = 8, 24
with durable.staged_directory(Path(sys.argv[1])) as folder:
    writer = trace_writer.TraceWriter(folder, traces.SPEC, trace.KEEP, traces.AHEAD)
    for forward in range(20):
        writer.append(traces.rows(0, forward, 0, range(8)))
    while len(list((folder / "tokens").iterdir())) < 3:
        time.sleep(0.01)
    print("half way", flush=True)
    signal.pause()
"""


def test_a_killed_writer_leaves_nothing_that_is_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "t"
    command = [sys.executable, "-c", WRITE_HALF, str(out)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half way\n"
        child.kill()
    partial = out.with_name("t" + durable.PARTIAL)
    assert not out.exists()
    assert any((partial / "tokens").iterdir())
    with refused(MoetoolError, "manifest.json"):
        Trace(partial)
    traces.write(out, FORWARDS, LENGTHS).verify()
    assert not partial.exists()
