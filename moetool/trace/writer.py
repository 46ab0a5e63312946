"""Writer of a trace."""

import json
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool import __version__
from moetool.base import durable
from moetool.base.errors import MoetoolError, UsageError, first_line
from moetool.base.types import ModelSpec
from moetool.trace.dataset_card import CARD, card
from moetool.trace.rows import ALWAYS, COLUMNS, EXTRA, KEEP, SIGNALS, TokenBatch
from moetool.trace.schemas import REQUESTS, VOCABULARY, embedding_schema, to_array, token_schema
from moetool.trace.version import SCHEMA_VERSION

ROW_GROUP_TOKENS = 8192
PART_TOKENS = 1 << 20
"""Rows per file."""


def token_columns(keep: Collection[str], *, weights: bool = True) -> list[str]:
    """Return the columns of tokens/ for the kept signals.

    Args:
        weights: whether the weights of the experts are known.

    Raises:
        UsageError: `keep` has a name that is not in `KEEP` or `EXTRA`.
    """
    if unknown := set(keep) - {*KEEP, *EXTRA}:
        raise UsageError(f"cannot keep {', '.join(sorted(unknown))}: known are {', '.join((*KEEP, *EXTRA))}")
    return [*ALWAYS, *(["weights"] if weights else []), *(column for column in SIGNALS if column in keep)]


def speller(tokenizer: Any) -> Callable[[int], str]:
    """Return a function from a token to its text; parts of characters become U+FFFD."""
    return lambda token: str(tokenizer.decode([token], clean_up_tokenization_spaces=False))


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """Return the options of `pyarrow.parquet` for a trace's files."""
    # Dictionaries and statistics of floating-point lists take most of the time and save no bytes.
    plain = [field.name for field in schema if not pa.types.is_fixed_size_list(field.type)]
    return {
        "compression": "zstd",
        "write_page_checksum": True,
        "use_dictionary": [*plain, *(f"{name}.list.element" for name in schema.names if name == "experts")],
        "write_statistics": plain,
    }


def to_table(pending: Sequence[Mapping[str, np.ndarray]], schema: pa.Schema) -> pa.Table:
    """Return several pieces of rows as one table."""
    values = {name: np.concatenate([columns[name] for columns in pending]) for name in schema.names}
    return pa.Table.from_arrays([to_array(values[field.name], field.type) for field in schema], schema=schema)


def file_facts(file: Path) -> dict[str, Any]:
    """Return the manifest's entry of a file."""
    return {"bytes": file.stat().st_size, "sha256": durable.sha256_file(file)}


def write_manifest(
    folder: Path, spec: ModelSpec, contents: Mapping[str, Any], *, closed: bool = True, running: Sequence[int] = ()
) -> None:
    """Replace the manifest of a trace atomically; a closed trace also gets its dataset card.

    Args:
        contents: columns, ahead, resident, composition, requests, tokens, provenance and files.
        closed: whether the trace is complete.
        running: requests still running after the last row.

    Raises:
        OSError: the write failed; the old manifest is unchanged.
    """
    manifest = {
        "kind": "trace",
        "schema_version": SCHEMA_VERSION,
        "moetool_version": __version__,
        "closed": closed,
        "running": list(running),
        "spec": spec.to_json(),
        **contents,
    }
    if closed:
        durable.write_text(folder / CARD, card(spec, contents, SCHEMA_VERSION))
    durable.write_text(folder / "manifest.json", json.dumps(manifest, indent=1) + "\n")


class TraceWriter:
    """Writes a trace into a folder, on its own thread, so that the model need not wait for the disk.

    Args:
        folder: an empty folder; a `durable.staged_directory`, so that a killed run leaves no trace.
        keep: names of `KEEP` and `EXTRA` to record; `topk` is always recorded.
        ahead: number of layers that the column `ahead` looks ahead, if kept.
        weights: whether the weights of the experts are known.
        resident: share of a layer's experts that the column `resident` assumes to be resident, if kept.

    Effects: starts one thread; `finish` or `abort` ends it.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        keep: Iterable[str],
        ahead: int = 3,
        *,
        weights: bool = True,
        resident: float = 0.5,
    ) -> None:
        self.keep = frozenset(keep) | {"topk"}
        self.columns = token_columns(self.keep, weights=weights)
        self.ahead = ahead if "ahead" in self.keep else 0
        self.resident = resident if "resident" in self.keep else 0.0
        self._folder = folder
        self._spec = spec
        self._tokens_parts = _Parts(folder / "tokens", token_schema(spec, self.columns, self.ahead))
        self._iterations = _Parts(folder / "iterations", embedding_schema(spec)) if "embeddings" in self.keep else None
        self._token_ids: set[int] = set()  # only if `text` is kept
        self._requests: list[tuple[int, str, str, str, int, int, str, str]] = []
        self._rows_of: dict[int, int] = {}
        self._tokens = 0
        self._queue: queue.Queue[tuple[_Parts, dict[str, np.ndarray]] | None] = queue.Queue(maxsize=64)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._write, name="trace-writer", daemon=True)
        self._thread.start()

    def add_request(
        self,
        request: int,
        *,
        dataset: str,
        task: str,
        prompt_id: str,
        prompt_tokens: int,
        new_tokens: int,
        label: str = "",
        pair: str = "",
    ) -> None:
        """Record one request; its rows in tokens/ may come before or after."""
        self._requests.append((request, dataset, task, prompt_id, prompt_tokens, new_tokens, label, pair))

    def add_embedding(self, request: int, iteration: int, embedding_D: np.ndarray) -> None:
        """Record the mean output of the embedding layer over one iteration of a request, if embeddings are kept."""
        self.add_embeddings(np.array([request]), np.array([iteration]), embedding_D[None])

    def add_embeddings(self, request_N: np.ndarray, iteration_N: np.ndarray, embedding_ND: np.ndarray) -> None:
        """Record the embeddings of several iterations; see `add_embedding`."""
        self._check()
        if self._iterations is None:
            return
        columns: dict[str, np.ndarray] = {
            "request": request_N.astype(np.int32),
            "iteration": iteration_N.astype(np.int32),
            "embedding": embedding_ND.astype(np.float16),
        }
        self._queue.put((self._iterations, columns))

    def append(self, batch: TokenBatch) -> None:
        """Queue the rows of one forward. Raises: MoetoolError: the writer thread failed, for example on a full disk."""
        self._check()
        for request, rows in zip(*np.unique(batch.request_T, return_counts=True), strict=True):
            self._rows_of[int(request)] = self._rows_of.get(int(request), 0) + int(rows)
        self._tokens += len(batch)
        if "text" in self.keep:
            self._token_ids.update(np.unique(batch.token_id_T[batch.token_id_T >= 0]).tolist())
        columns = {name: getattr(batch, COLUMNS[name]) for name in self._tokens_parts.schema.names}
        self._queue.put((self._tokens_parts, columns))

    def finish(
        self, *, composition: dict[str, Any], provenance: dict[str, Any], spell: Callable[[int], str] | None = None
    ) -> None:
        """Write the queued rows, the requests and the manifest.

        Args:
            composition: composition of batches: `{"kind": "sequential"}`, `{"kind": "batch", "size": 8}` (batches by
                prompt index) or `{"kind": "log"}` (as requests came).
            provenance: model, data, versions and options, for people and for checks.
            spell: function from a token to its text; required if `text` is kept.

        Raises:
            MoetoolError: a write failed.
        """
        self._queue.put(None)
        self._thread.join()
        self._check()
        self._requests.sort(key=lambda row: row[0])
        rows_of = [self._rows_of.get(row[0], 0) for row in self._requests]
        columns = [*zip(*self._requests, strict=True), rows_of] if rows_of else [[]] * len(REQUESTS)
        try:
            pq.write_table(
                pa.table([pa.array(c, f.type) for c, f in zip(columns, REQUESTS, strict=True)], schema=REQUESTS),
                self._folder / "requests.parquet",
                **parquet_options(REQUESTS),
            )
            if spell is not None and "text" in self.keep:
                ids = sorted(self._token_ids)
                pq.write_table(
                    pa.table([pa.array(ids, pa.int32()), pa.array(map(spell, ids), pa.string())], schema=VOCABULARY),
                    self._folder / "vocabulary.parquet",
                    **parquet_options(VOCABULARY),
                )
            files = {
                str(file.relative_to(self._folder)): file_facts(file)
                for file in sorted(self._folder.rglob("*.parquet"))
            }
            write_manifest(
                self._folder,
                self._spec,
                {
                    "columns": [*self.columns, *(name for name in ("embeddings", "text") if name in self.keep)],
                    "ahead": self.ahead,
                    "resident": self.resident,
                    "composition": composition,
                    "requests": len(self._requests),
                    "tokens": self._tokens,
                    "provenance": provenance,
                    "files": files,
                },
            )
        except (pa.ArrowException, OSError) as error:
            raise MoetoolError(f"cannot write the trace to {self._folder}: {first_line(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Stop the thread and drop the queue; without effect after `finish`."""
        if self._thread.is_alive():
            self._error = self._error or MoetoolError("the trace was abandoned")
            self._queue.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise MoetoolError(f"cannot write the trace to {self._folder}: {first_line(self._error)}") from self._error

    def _write(self) -> None:
        item: tuple[_Parts, dict[str, np.ndarray]] | None = None
        folders = [parts for parts in (self._tokens_parts, self._iterations) if parts is not None]
        try:
            while (item := self._queue.get()) is not None:
                if self._error is None:
                    item[0].add(item[1])
            if self._error is None:
                for parts in folders:
                    parts.flush()
        except BaseException as error:  # passed to the appending thread; the queue is drained so that it never blocks
            self._error = error
            while item is not None:
                item = self._queue.get()
        finally:
            for parts in folders:
                try:
                    parts.close()
                except Exception as error:  # not all of Arrow's errors are OSErrors
                    self._error = self._error or error


class _Parts:
    """A folder of Parquet files of one schema, written a row group at a time. Effects: creates the folder."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._folder = folder
        self._writer: pq.ParquetWriter | None = None
        self._pending: list[dict[str, np.ndarray]] = []
        self._pending_rows = self._part = self._part_rows = 0
        folder.mkdir()

    def add(self, columns: dict[str, np.ndarray]) -> None:
        """Add rows; write them when they fill a row group."""
        self._pending.append(columns)
        self._pending_rows += len(columns[self.schema.names[0]])
        if self._pending_rows >= ROW_GROUP_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting rows."""
        if not self._pending:
            return
        if self._writer is None:
            path = self._folder / f"part-{self._part:05d}.parquet"
            self._writer = pq.ParquetWriter(path, self.schema, **parquet_options(self.schema))
        self._writer.write_table(to_table(self._pending, self.schema))
        self._part_rows += self._pending_rows
        self._pending, self._pending_rows = [], 0
        if self._part_rows >= PART_TOKENS:
            self.close()
            self._part, self._part_rows = self._part + 1, 0

    def close(self) -> None:
        """Close the current file; waiting rows are dropped."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
