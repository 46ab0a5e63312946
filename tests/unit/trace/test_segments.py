"""A trace that can be read while it grows: always a prefix of the rows, whatever fails and whenever it is killed."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from moetool.base.errors import MismatchError, MoetoolError
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP, TokenBatch
from moetool.trace.segments import SegmentLimits, SegmentWriter
from tests import traces
from tests.refusals import refused
from tests.servers import eventually
from tests.traces import SPEC

LENGTHS = [(20, 10), (5, 8), (30, 3), (2, 12)]
FORWARDS = traces.together(LENGTHS)
SMALL = SegmentLimits(rows=8, seconds=60.0)
COLUMNS = ("weights", "logits", "hidden", "ahead")
KEPT = tuple(name for name in KEEP if name != "resident")


def write(folder: Path, forwards: Sequence[TokenBatch], limits: SegmentLimits = SMALL, **more: Any) -> SegmentWriter:
    """A writer that was given so many forwards, and the beginnings and ends of their requests."""
    folder.mkdir(exist_ok=True)
    writer = SegmentWriter(folder, SPEC, KEPT, traces.AHEAD, provenance={"model": "tiny"}, limits=limits, **more)
    give(writer, forwards)
    return writer


def give(writer: SegmentWriter, forwards: Sequence[TokenBatch]) -> None:
    for rows in forwards:
        forward = int(rows.forward_T[0])
        if forward < len(LENGTHS):
            writer.add_request(forward, LENGTHS[forward][0])
        requests = np.unique(rows.request_T)
        means_ND = np.stack([np.full(SPEC.hidden_size, request + forward / 8, np.float32) for request in requests])
        iterations = forward - requests
        writer.append(rows, (requests, iterations, means_ND), {"forward": forward})
        for request in requests.tolist():
            if forward - request == LENGTHS[request][1] - 1:
                writer.end_request(request)


def is_prefix(trace: Trace) -> int:
    """A trace holds the first forwards, whole, with all that belongs to them; gives how many."""
    trace.verify()
    found = list(trace.recorded_forwards(COLUMNS))
    for rows, expected in zip(found, FORWARDS, strict=False):
        for name in ("request", "forward", "phase", "position", "token_id", "experts", *COLUMNS):
            column = next(
                c for c in (f"{name}_T", f"{name}_TS", f"{name}_TF", f"{name}_TH", f"{name}_TR") if hasattr(rows, c)
            )
            assert np.array_equal(getattr(rows, column), getattr(expected, column)), name
    ran = TokenBatch.concatenate(FORWARDS[: len(found)]) if found else None
    for row in trace.requests.to_pylist():
        mine = np.zeros(0, bool) if ran is None else ran.request_T == row["request"]
        assert row["tokens"] == mine.sum() and row["prompt_tokens"] == LENGTHS[row["request"]][0]
        assert row["new_tokens"] == (0 if ran is None else ran.phase_T[mine].sum())
        left = row["request"] + LENGTHS[row["request"]][1] - len(found)
        if left:  # one that ends with the last forward may be said to run or not
            assert (row["request"] in trace.running) == (left > 0)
    assert trace.manifest["provenance"].get("forward", -1) == len(found) - 1
    assert sum(len(set(rows.request_T.tolist())) for rows in found) == len(list(trace.embeddings()))
    return len(found)


def test_a_trace_is_read_while_it_grows_and_its_segments_are_joined_at_its_end(tmp_path: Path) -> None:
    writer = write(tmp_path / "t", [])
    assert is_prefix(Trace(tmp_path / "t")) == 0
    seen = set()
    for rows in FORWARDS:
        give(writer, [rows])
        eventually(lambda: writer.status().waiting < SMALL.rows)
        trace = Trace(tmp_path / "t")
        assert not trace.closed
        seen.add(is_prefix(trace))
    assert len(seen) > 3
    early = Trace(tmp_path / "t")
    writer.close({"forward": len(FORWARDS) - 1})
    trace = Trace(tmp_path / "t")
    assert trace.closed and not trace.running and is_prefix(trace) == len(FORWARDS)
    assert writer.status().written == trace.num_tokens == sum(map(len, FORWARDS))
    files = {str(file.relative_to(trace.path)) for file in trace.path.rglob("*.*")}
    assert files == {*trace.manifest["files"], "manifest.json", "README.md"}
    with refused(MismatchError, "closed", "during", "read"):
        early.verify()


def test_many_small_segments_become_few(tmp_path: Path) -> None:
    writer = write(tmp_path / "t", [], SegmentLimits(rows=64, seconds=0.001))
    for number, rows in enumerate(FORWARDS):
        give(writer, [rows])
        eventually(lambda: not writer.status().waiting)
        assert len(list((tmp_path / "t" / "tokens").iterdir())) == number + 1
    writer.close({"forward": len(FORWARDS) - 1})
    assert is_prefix(Trace(tmp_path / "t")) == len(FORWARDS)
    assert len(list((tmp_path / "t" / "tokens").iterdir())) == 2


def test_rows_are_closed_into_a_segment_when_nothing_more_comes(tmp_path: Path) -> None:
    writer = write(tmp_path / "t", FORWARDS[:3], SegmentLimits(seconds=0.05))
    eventually(lambda: Trace(tmp_path / "t").num_tokens == sum(map(len, FORWARDS[:3])))
    writer.close({"forward": 2})


def test_a_log_of_many_bytes_a_row_is_closed_by_bytes(tmp_path: Path) -> None:
    writer = write(tmp_path / "t", FORWARDS[:1], SegmentLimits(bytes=100, seconds=60.0))
    eventually(lambda: Trace(tmp_path / "t").num_tokens == len(FORWARDS[0]))
    writer.close({"forward": 0})


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that is full while the event is set."""
    event, real = threading.Event(), pq.write_table

    def write_table(table: Any, where: Any, **options: Any) -> None:
        real(table, where, **options)  # as much as fits
        if event.is_set():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", write_table)
    yield event


def test_a_disk_that_was_full_for_a_while_costs_nothing(
    tmp_path: Path, full: threading.Event, logged: list[str]
) -> None:
    writer = write(tmp_path / "t", FORWARDS[:4], SegmentLimits(rows=16, seconds=0.05))
    eventually(lambda: not writer.status().waiting)
    full.set()
    give(writer, FORWARDS[4:8])
    eventually(lambda: writer.status().error)
    status = writer.status()
    assert (status.error, status.lost, status.waiting) == ("No space left on device", 0, sum(map(len, FORWARDS[4:8])))
    assert is_prefix(Trace(tmp_path / "t")) == 4
    time.sleep(0.2)  # it is tried again, and said once
    assert [line.partition(" (")[0] for line in logged] == [f"cannot write the gate log {tmp_path / 't'}"]
    full.clear()
    eventually(lambda: not writer.status().waiting)
    assert is_prefix(Trace(tmp_path / "t")) == 8 and not writer.status().error
    assert logged[1:] == [f"writing of the gate log {tmp_path / 't'} works again; no row is missing"]
    give(writer, FORWARDS[8:])
    writer.close({"forward": len(FORWARDS) - 1})
    assert is_prefix(Trace(tmp_path / "t")) == len(FORWARDS)


def test_a_disk_that_stays_full_ends_the_trace_and_not_who_writes_it(
    tmp_path: Path, full: threading.Event, logged: list[str]
) -> None:
    limits = SegmentLimits(rows=8, seconds=0.01, waiting_bytes=20_000)
    writer = write(tmp_path / "t", FORWARDS[:2], limits)
    eventually(lambda: not writer.status().waiting)
    full.set()
    give(writer, FORWARDS[2:3])
    eventually(lambda: writer.status().error)
    for rows in FORWARDS[3:] * 20:
        writer.append(rows)
    status = writer.status()
    assert status.lost and not status.waiting and status.written == sum(map(len, FORWARDS[:2]))
    full.clear()  # too late: there is to be no gap
    writer.append(FORWARDS[3])
    with refused(MoetoolError, "No space left"):
        writer.close({})
    assert len(logged) == 2 and "ends after" in logged[1]
    trace = Trace(tmp_path / "t")
    assert is_prefix(trace) == 2 and not trace.closed


def test_a_disk_that_is_full_at_the_end_keeps_what_was_written(tmp_path: Path, full: threading.Event) -> None:
    writer = write(tmp_path / "t", FORWARDS[:6], SegmentLimits(rows=8, seconds=60.0))
    eventually(lambda: writer.status().waiting < 8)
    full.set()
    with refused(MoetoolError, "No space left"):
        writer.close({})
    assert is_prefix(Trace(tmp_path / "t")) in (5, 6)


def test_a_disk_that_is_full_once_all_is_written_says_so(tmp_path: Path, full: threading.Event) -> None:
    writer = write(tmp_path / "t", FORWARDS[:6], SegmentLimits(rows=1, seconds=60.0))
    eventually(lambda: writer.status().waiting == 0)
    full.set()
    with refused(MoetoolError, "No space left"):
        writer.close({})
    trace = Trace(tmp_path / "t")
    assert is_prefix(trace) == 6 and not trace.closed


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path, full: threading.Event) -> None:
    full.set()
    with refused(MoetoolError, "No space left"):
        write(tmp_path / "t", [])


@pytest.mark.slow
def test_at_every_operation_a_fault_costs_nothing_and_a_kill_leaves_a_prefix(tmp_path: Path) -> None:
    """Each of the writer's operations on the disk fails once, or (every other one) is where the process ends."""
    command = [sys.executable, "-c", _RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], timeout=300)
    assert done.returncode == 0, done.stderr
    lengths: dict[int, set[int]] = {0: set(), 1: set()}
    for folder in tmp_path.iterdir():
        if (folder / "manifest.json").exists():
            lengths[int(folder.name) % 2].add(is_prefix(Trace(folder)))
    assert lengths == {0: {0, 1, 2}, 1: {2}}


_RUN = """
import os, sys
from pathlib import Path
import pytest
from tests import faults
from tests.unit import test_segments as t
from moetool.trace.segments import SegmentLimits
from moetool.base.errors import MoetoolError

os.fsync = lambda descriptor: None  # counted, and not waited for
number = 0
while True:
    child = os.fork()
    if not child:
        strike = faults.disk_full if number % 2 else lambda: os._exit(9)
        with pytest.MonkeyPatch.context() as patch, faults.fault_at(number, patch, strike) as struck:
            try:
                writer = t.write(Path(sys.argv[1]) / str(number), [], SegmentLimits(rows=30, seconds=0.01))
                for rows in t.FORWARDS[:2]:
                    t.give(writer, [rows])
                    t.eventually(lambda: not writer.status().waiting)
                writer.close({"forward": 1})
            except (MoetoolError, OSError):
                assert struck()
            os._exit(0 if struck() else 3)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3:
        break
    assert code == (0 if number % 2 else 9), code
    number += 1
"""
