"""Writer of a trace that can be read while it grows and after a kill: closed segments, and their manifest."""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool.base import durable
from moetool.base.errors import MoetoolError, first_line
from moetool.base.types import ModelSpec
from moetool.trace.rows import COLUMNS, TokenBatch
from moetool.trace.schemas import REQUESTS, embedding_schema, token_schema
from moetool.trace.writer import ROW_GROUP_TOKENS, file_facts, parquet_options, to_table, token_columns, write_manifest

_LOG = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""Seconds that `append` waits for a disk that hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentLimits:
    """Limits of an open segment, and of rows waiting to be written.

    Attributes:
        rows, bytes, seconds: limits of a segment: its rows, bytes in memory, and seconds since its first row. A failed
            write is retried after `seconds`.
        waiting_bytes: limit of rows in memory. The trace ends if more wait and no write succeeds.
    """

    rows: int = ROW_GROUP_TOKENS
    bytes: int = 64 << 20
    seconds: float = 10.0
    waiting_bytes: int = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStatus:
    """State of the rows.

    Attributes:
        written: rows in closed segments.
        waiting: rows in memory.
        lost: rows that will never be written.
        error: reason why writing fails now; empty if it works.
    """

    written: int
    waiting: int
    lost: int
    error: str


@dataclass(slots=True)
class _Counts:
    """Counters of a running request."""

    prompt_tokens: int
    new_tokens: int = 0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class _Segment:
    """A closed file."""

    name: str
    rows: int
    memory_bytes: int
    facts: dict[str, Any]


class SegmentWriter:
    """Writes the log of a server into a folder that is a complete trace at any time.

    The manifest names closed segments only and is replaced last. Readers therefore see all rows up to the newest closed
    segment, also after a kill, with the provenance of its last forward. A failed write leaves the folder unchanged and
    is retried, while rows wait in memory. If too many wait, the trace ends, so that it never has a gap. `close` joins
    small segments.

    Call the methods from one thread, and `status` from any.

    Args:
        folder: an empty folder.
        keep, ahead: as for `moetool.trace.writer.TraceWriter`.
        provenance: constant part of the provenance; `append` and `close` add to it.

    Effects: writes the manifest of an empty trace; starts a thread, which `close` ends.

    Raises:
        MoetoolError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        keep: Collection[str],
        ahead: int = 1,
        *,
        provenance: Mapping[str, Any],
        limits: SegmentLimits | None = None,
    ) -> None:
        self._folder, self._spec = folder, spec
        self._limits = limits or SegmentLimits()
        self._columns = token_columns(keep)
        self._ahead = ahead if "ahead" in keep else 0
        self._tokens = _Kind("tokens", token_schema(spec, self._columns, self._ahead))
        self._iterations = _Kind("iterations", embedding_schema(spec)) if "embeddings" in keep else None
        self._kinds = [self._tokens, *([self._iterations] if self._iterations is not None else [])]
        self._provenance = dict(provenance)
        self._running: dict[int, _Counts] = {}
        self._ended: list[tuple[int, _Counts]] = []  # since the last segment
        self._past = _request_table([])  # requests that ended in earlier segments
        self._requests_file: str | None = None
        self._number = 0
        self._first_s: float | None = None  # arrival of the oldest waiting row
        self._again_s = 0.0  # earliest time of the next try
        self._changed = threading.Condition()
        self._events: list[Callable[[], None]] = []
        self._waiting_bytes = self._rows = self._written = 0
        self._error = ""
        self._given_up = self._closing = False
        try:
            for kind in self._kinds:
                (folder / kind.name).mkdir()
            self._commit(closed=False)
        except (pa.ArrowException, OSError) as error:
            raise MoetoolError(f"cannot write the trace to {folder}: {first_line(error)}") from error
        self._number = 1
        self._thread = threading.Thread(target=self._run, name="segment-writer", daemon=True)
        self._thread.start()

    def add_request(self, request: int, prompt_tokens: int) -> None:
        """Record the begin of a request."""
        self._post(lambda: self._running.update({request: _Counts(prompt_tokens)}))

    def append(
        self,
        rows: TokenBatch,
        embeddings: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Append the rows of one forward.

        Args:
            embeddings: request_N, iteration_N and embedding_ND of its requests.
            provenance: provenance of a trace that ends with this forward.
        """
        columns = {name: getattr(rows, COLUMNS[name]) for name in self._tokens.schema.names}
        means: dict[str, np.ndarray] | None = None
        if embeddings is not None and self._iterations is not None:
            request_N, iteration_N, embedding_ND = embeddings
            means = {
                "request": request_N.astype(np.int32),
                "iteration": iteration_N.astype(np.int32),
                "embedding": embedding_ND.astype(np.float16),
            }
        size = sum(column.nbytes for column in (*columns.values(), *(means or {}).values()))
        with self._changed:
            self._rows += len(rows)
            self._await_room(size)
            if self._given_up:
                return
            self._waiting_bytes += size
            self._events.append(lambda: self._take(columns, means, provenance or {}))
            self._changed.notify_all()

    def end_request(self, request: int) -> None:
        self._post(lambda: self._end(request))

    def status(self) -> SegmentStatus:
        """Return the state of the rows."""
        with self._changed:
            left = self._rows - self._written
            return SegmentStatus(
                written=self._written,
                waiting=0 if self._given_up else left,
                lost=left if self._given_up else 0,
                error=self._error,
            )

    def close(self, provenance: Mapping[str, Any]) -> None:
        """Write the waiting rows, join small segments, and close the trace.

        Raises:
            MoetoolError: some rows could not be written; earlier rows are safe.
        """
        self._post(lambda: self._provenance.update(provenance))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        if not self._error:
            return
        if self._written == self._rows:
            raise MoetoolError(f"{self._folder} holds all {self._rows:,} rows, but could not be closed ({self._error})")
        raise MoetoolError(
            f"{self._folder} holds the first {self._written:,} of {self._rows:,} rows: the rest could not be "
            f"written ({self._error}); the written rows can be read"
        )

    def _post(self, event: Callable[[], None]) -> None:
        with self._changed:
            if not self._given_up:
                self._events.append(event)
                self._changed.notify_all()

    def _await_room(self, size: int) -> None:
        """Wait while too many rows are in memory; end the trace if writing fails. The caller holds the lock."""

        def full() -> bool:
            return bool(self._waiting_bytes) and self._waiting_bytes + size > self._limits.waiting_bytes

        if not self._given_up and full():
            self._changed.wait_for(lambda: not full() or self._error, _PATIENCE_S)
            if full():
                self._give_up(self._error or f"no write succeeded for {_PATIENCE_S:g} s")

    def _give_up(self, reason: str) -> None:
        self._given_up, self._error = True, reason
        self._events.clear()
        self._changed.notify_all()
        _LOG.warning("the gate log %s ends after %d rows: %s; serving continues", self._folder, self._written, reason)

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            with self._changed:
                self._give_up(_reason(error))
        finally:
            for kind in self._kinds:
                kind.clear()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closing or self._given_up, self._wait_s())
                if self._given_up:
                    return
                events, self._events = self._events, []
                closing = self._closing
            for event in events:
                event()
                if self._tokens.rows >= self._limits.rows or self._tokens.bytes >= self._limits.bytes:
                    self._try()
            if closing:
                if self._try(at_once=True):
                    self._finish()
                return
            if self._wait_s() == 0.0:
                self._try()

    def _wait_s(self) -> float | None:
        """Return the seconds until a segment must be closed; None if no row waits."""
        if self._first_s is None:
            return None
        return max(0.0, max(self._first_s + self._limits.seconds, self._again_s) - time.monotonic())

    def _take(
        self, columns: dict[str, np.ndarray], means: dict[str, np.ndarray] | None, provenance: Mapping[str, Any]
    ) -> None:
        if self._first_s is None:
            self._first_s = time.monotonic()
        self._tokens.add(columns)
        if means is not None and self._iterations is not None:
            self._iterations.add(means)
        self._provenance.update(provenance)
        for request, phase in zip(columns["request"].tolist(), columns["phase"].tolist(), strict=True):
            counts = self._running.setdefault(request, _Counts(0))
            counts.rows += 1
            counts.new_tokens += phase

    def _end(self, request: int) -> None:
        if (counts := self._running.pop(request, None)) is not None:
            self._ended.append((request, counts))

    def _try(self, *, at_once: bool = False) -> bool:
        """Close a segment if it is due; return whether no row waits."""
        if not self._tokens.pending:
            return True
        if not at_once and time.monotonic() < self._again_s:
            return False
        before = [list(kind.segments) for kind in self._kinds]
        try:
            for kind in self._kinds:
                if kind.pending:
                    kind.segments.append(kind.write(self._folder, self._number))
            self._commit(closed=False)
        except Exception as error:  # not all of Arrow's errors are OSErrors; serving must continue
            self._restore(before)
            self._failed(_reason(error))
            return False
        self._succeeded()
        return True

    def _restore(self, segments: list[list[_Segment]]) -> None:
        """Reset the segments of each kind to these, and remove later files."""
        for kind, those in zip(self._kinds, segments, strict=True):
            for segment in kind.segments:
                if segment not in those:
                    (self._folder / segment.name).unlink(missing_ok=True)
            kind.segments = those

    def _failed(self, reason: str) -> None:
        with self._changed:
            first, self._error = not self._error, reason
            self._again_s = time.monotonic() + self._limits.seconds
            self._changed.notify_all()
        if first and not self._closing:
            _LOG.warning(
                "cannot write the gate log %s (%s); serving continues; writing is retried every %g s",
                *(self._folder, reason, self._limits.seconds),
            )

    def _succeeded(self) -> None:
        self._number += 1
        self._first_s = None
        size = sum(kind.bytes for kind in self._kinds)
        with self._changed:
            self._written += self._tokens.rows
            self._waiting_bytes -= size
            again, self._error = bool(self._error), ""
            self._changed.notify_all()
        for kind in self._kinds:
            kind.clear()
        if again:
            _LOG.warning("writing of the gate log %s works again; no row is missing", self._folder)

    def _commit(self, *, closed: bool) -> None:
        """Replace the requests and the manifest, so that the trace includes all segments."""
        ended = _request_table(self._ended)
        past = pa.concat_tables([self._past, ended]).combine_chunks() if self._ended else self._past
        table = pa.concat_tables([past, _request_table(list(self._running.items()))]).sort_by("request")
        name = "requests.parquet" if closed else f"requests-{self._number:08d}.parquet"
        try:
            with durable.staged_file(self._folder / name) as partial:
                pq.write_table(table, partial, **parquet_options(REQUESTS))
            files = {name: file_facts(self._folder / name)}
            files.update({segment.name: segment.facts for kind in self._kinds for segment in kind.segments})
            write_manifest(
                self._folder,
                self._spec,
                {
                    "columns": [*self._columns, *(["embeddings"] if self._iterations is not None else [])],
                    "ahead": self._ahead,
                    "resident": 0.0,
                    "composition": {"kind": "log"},
                    "requests": len(table),
                    "tokens": sum(segment.rows for segment in self._tokens.segments),
                    "provenance": self._provenance,
                    "files": files,
                },
                closed=closed,
                running=sorted(self._running),
            )
        except BaseException:
            if name != self._requests_file:
                (self._folder / name).unlink(missing_ok=True)
            raise
        if self._requests_file not in (None, name):
            (self._folder / str(self._requests_file)).unlink(missing_ok=True)
        self._past, self._ended, self._requests_file = past, [], name

    def _finish(self) -> None:
        """Close the trace; join small segments if the disk has room."""
        before = [list(kind.segments) for kind in self._kinds]
        old: list[_Segment] = []
        try:
            for kind in self._kinds:
                old += kind.join(self._folder, self._limits)
            self._commit(closed=True)
        except Exception as error:
            self._restore(before)
            old = []
            try:  # joining may have run out of room
                self._commit(closed=True)
            except Exception:
                self._error = self._error or _reason(error)
        for segment in old:
            (self._folder / segment.name).unlink(missing_ok=True)


class _Kind:
    """A folder of segments of one schema, and the rows waiting for the next."""

    def __init__(self, name: str, schema: pa.Schema) -> None:
        self.name, self.schema = name, schema
        self.pending: list[dict[str, np.ndarray]] = []
        self.rows = self.bytes = 0
        self.segments: list[_Segment] = []

    def add(self, columns: dict[str, np.ndarray]) -> None:
        self.pending.append(columns)
        self.rows += len(columns[self.schema.names[0]])
        self.bytes += sum(column.nbytes for column in columns.values())

    def clear(self) -> None:
        self.pending, self.rows, self.bytes = [], 0, 0

    def write(self, folder: Path, number: int) -> _Segment:
        """Write the waiting rows as a segment, and keep them in memory."""
        return self._write(folder, f"part-{number:08d}", to_table(self.pending, self.schema), self.bytes)

    def join(self, folder: Path, limits: SegmentLimits) -> list[_Segment]:
        """Replace consecutive small segments by larger ones; return the small ones."""
        groups: list[list[_Segment]] = []
        for segment in self.segments:
            group = [*groups[-1], segment] if groups else []
            if (
                group
                and sum(s.rows for s in group) <= limits.rows
                and sum(s.memory_bytes for s in group) <= limits.bytes
            ):
                groups[-1] = group
            else:
                groups.append([segment])
        before, self.segments = self.segments, [segment for group in groups for segment in group]
        for group in groups:
            if len(group) > 1:
                table = pa.concat_tables([pq.read_table(folder / segment.name) for segment in group])
                stem = f"{Path(group[0].name).stem}-{Path(group[-1].name).stem.removeprefix('part-')}"
                whole = self._write(folder, stem, table, sum(segment.memory_bytes for segment in group))
                place = self.segments.index(group[0])
                self.segments[place : place + len(group)] = [whole]
        return [segment for segment in before if segment not in self.segments]

    def _write(self, folder: Path, stem: str, table: pa.Table, memory_bytes: int) -> _Segment:
        name = f"{self.name}/{stem}.parquet"
        with durable.staged_file(folder / name) as partial:
            pq.write_table(table, partial, **parquet_options(self.schema))
        return _Segment(name, len(table), memory_bytes, file_facts(folder / name))


def _reason(error: BaseException) -> str:
    """Return the reason of a failed write, without the path."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else first_line(error)


def _request_table(requests: list[tuple[int, _Counts]]) -> pa.Table:
    rows = [
        (request, "serve", "", str(request), counts.prompt_tokens, counts.new_tokens, "", "", counts.rows)
        for request, counts in requests
    ]
    return pa.Table.from_pylist([dict(zip(REQUESTS.names, row, strict=True)) for row in rows], schema=REQUESTS)
