"""The trace: what a model's routers did, token by token, as a folder of Parquet files.

    manifest.json           schema version, ModelSpec, how batches were composed, provenance, sha256 of each file
    requests.parquet        one row a request
    tokens/*.parquet        one row a forwarded token, in the order of the forwards
    iterations/*.parquet    one row an iteration of a request: the mean output of the embedding layer; in the log of a
                            server one row for each forward that an iteration took

Per-layer columns are fixed-size lists, layer-major: `experts` and `weights` hold the K of layer 0, then those of
layer 1 and so on; `logits` the E of each layer; `hidden` the D that each router saw; `ahead` what the routers of the
next A MoE layers say of those D, A times E of the widest layer (0 beyond a layer's experts and beyond the last layer);
`resident` what the next one's router would say if only resident and shared experts had been computed, E of the widest
layer (0 likewise).
The offsets are in the schema metadata. Readers stream and name the columns that they need. `weights` is missing where a
trace was made from the records of an engine that keeps only the experts. How versions of this schema follow one another
is said in `moetool.trace.version`: traces of an older minor version are read, those of a newer version refused.
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool import durable
from moetool.errors import MismatchError, UsageError, first_line
from moetool.trace.events import to_events
from moetool.trace.rows import (
    ALWAYS,
    COLUMNS,
    KEEP,
    REQUESTS,
    TokenBatch,
    embedding_schema,
    to_token_batch,
    token_schema,
)
from moetool.trace.version import upgrade
from moetool.types import ForwardInfo, GateEvent, ModelSpec

MANIFEST = "manifest.json"
BATCH_TOKENS = 8192


class Trace:
    """A trace on disk, read as a stream.

    Args:
        path: the folder.

    Attributes:
        manifest: manifest.json, as this version writes it.
        spec: the model that was traced.
        columns: what was recorded: `experts` and perhaps `weights`, `SIGNALS`, `embeddings`.
        ahead: for how many layers the column `ahead` looks ahead; 0 without it.
        resident: share of a layer's experts that the column `resident` takes to be resident; 0 without it.
        num_tokens: rows of tokens/.
        requests: requests.parquet, in the order of the requests.

    Raises:
        UsageError: there is no such folder.
        MismatchError: it is not a whole trace, or not of a schema version that can be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise UsageError(f"no trace at {path}; make one with: moetool capture MODEL --data NAME --out {path}")
        try:
            self.manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MismatchError(
                f"{path} is not a whole trace: it has no manifest.json (a capture that was stopped leaves none); "
                f"capture again"
            ) from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise MismatchError(f"{path}/manifest.json is damaged ({error}); capture again") from None
        if not isinstance(self.manifest, dict):
            raise MismatchError(f"{path}/manifest.json is damaged (not an object); capture again")
        self.manifest = upgrade(self.manifest, path)
        try:
            facts = self.manifest["files"].items()
            self._files = {str(name): (int(fact["bytes"]), str(fact["sha256"])) for name, fact in facts}
            self.spec = ModelSpec.from_json(self.manifest["spec"])
            self.columns = frozenset(self.manifest["columns"])
            self.num_tokens = int(self.manifest["tokens"])
            self.ahead = int(self.manifest["ahead"])
            self.resident = float(self.manifest["resident"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise MismatchError(f"{path}/manifest.json is damaged ({error!r}); capture again") from None
        for name, (expected, _) in self._files.items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                raise MismatchError(
                    f"{file} is {'missing' if size is None else f'{size:,} bytes long'}, expected "
                    f"{expected:,} bytes; copy the trace again or capture again"
                )
        self._intact: set[str] = set()
        self.requests = self._read("requests.parquet", REQUESTS)

    @property
    def sha256(self) -> str:
        """Identifies the content: sha256 of the manifest, which holds that of every file."""
        return durable.sha256_file(self.path / "manifest.json")

    def require(self, columns: Iterable[str], user: str) -> None:
        """Raises: MismatchError if a column that `user` needs was not recorded."""
        if missing := sorted(set(columns) - self.columns):
            flags = ",".join(["topk", *(c for c in missing if c in KEEP)])
            raise MismatchError(
                f"{user} needs {', '.join(missing)}, but {self.path} holds {', '.join(sorted(self.columns))}; "
                f"capture with --keep {flags}"
            )

    def require_ahead(self, distance: int, user: str) -> None:
        """Raises: MismatchError if the column `ahead` looks less far than `user` does."""
        if self.ahead < distance:
            raise MismatchError(
                f"{user} looks {distance} layers ahead, and {self.path} holds {self.ahead}; capture with --keep "
                f"topk,ahead --ahead {distance}"
            )

    def describe(self) -> dict[str, Any]:
        """What is in the trace, counted, as a JSON object."""
        totals: dict[tuple[str, str], list[int]] = {}
        for row in self.requests.to_pylist():
            total = totals.setdefault((row["dataset"], row["task"]), [0, 0, 0])
            for i, number in enumerate((1, row["prompt_tokens"], row["new_tokens"])):
                total[i] += number
        counted = ("requests", "prompt_tokens", "new_tokens")
        composition = self.manifest["composition"]
        return {
            "path": str(self.path),
            "sha256": self.sha256,
            "spec": self.spec.to_json(),
            "columns": sorted(self.columns),
            "composition": " ".join(str(value) for value in composition.values()),
            "tokens": self.num_tokens,
            "bytes": sum(size for size, _ in self._files.values()),
            **{name: sum(total[i] for total in totals.values()) for i, name in enumerate(counted)},
            "tasks": [
                {"dataset": dataset, "task": task, **dict(zip(counted, total, strict=True))}
                for (dataset, task), total in sorted(totals.items())
            ],
            "provenance": self.manifest["provenance"],
        }

    def verify(self) -> None:
        """Raises: MismatchError if any file's sha256 is not the manifest's."""
        for name in self._files:
            self._verify(name)

    def _verify(self, name: str) -> Path:
        """The path of a file whose bytes are the manifest's; they are compared the first time that it is read."""
        file = self.path / name
        if name not in self._intact and durable.sha256_file(file) != self._files[name][1]:
            raise MismatchError(f"{file} is damaged: its sha256 is not the manifest's; capture again")
        self._intact.add(name)
        return file

    def batches(self, columns: Iterable[str] = ()) -> Iterator[TokenBatch]:
        """Stream the rows of tokens/ in the order of the forwards, some thousands at a time.

        Args:
            columns: any of `weights` and `SIGNALS`, besides those that always come.

        Raises:
            MismatchError: a column was not recorded, or a file is damaged.
        """
        wanted = set(columns)
        self.require(wanted, "this reader")
        names = [c for c in COLUMNS if c in ALWAYS or c in wanted]
        for part in self._names("tokens"):
            file = self._verify(part)
            try:
                with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                    _require_schema(file, token_schema(self.spec, names, self.ahead), parquet.schema_arrow)
                    for record in parquet.iter_batches(BATCH_TOKENS, columns=names):
                        yield to_token_batch(record)
            except (pa.ArrowException, OSError) as error:
                raise MismatchError(f"{file} is damaged ({first_line(error)}); capture again") from error

    def embeddings(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """(request, iteration, embedding_D float16) of every iteration."""
        self.require(["embeddings"], "this reader")
        for part in self._names("iterations"):
            table = self._read(part, embedding_schema(self.spec))
            values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            rows = values.reshape(-1, self.spec.hidden_size)
            yield from zip(table["request"].to_pylist(), table["iteration"].to_pylist(), rows, strict=True)

    def forwards(
        self, *, sequential: bool, columns: Iterable[str] = (), requests: frozenset[int] | None = None
    ) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
        """Stream the trace as forwards with their gate events, layer by layer.

        Args:
            sequential: one request after the other, each prompt in one forward; otherwise the forwards as they
                were recorded.
            columns: `weights` and `SIGNALS` fill the fields of the events, `embeddings` that of the forwards: the mean
                over an iteration, which is all that a trace holds.
            requests: only these requests (all by default).
        """
        columns = set(columns)
        embeddings = _Embeddings(self, requests) if "embeddings" in columns else None
        columns.discard("embeddings")
        groups = self._by_request(columns) if sequential else self.recorded_forwards(columns)
        forward_id = 0
        for rows in groups:
            if requests is not None:
                rows = rows.select(np.isin(rows.request_T, list(requests)))
                if not len(rows):
                    continue
            embedding_TD = None if embeddings is None else embeddings.of(rows)
            yield to_events(self.spec, rows, forward_id, embedding_TD=embedding_TD)
            forward_id += 1

    def token_rows(self, columns: Iterable[str] = ()) -> Iterator[tuple[TokenBatch, np.ndarray | None]]:
        """Stream the rows of tokens/ in the order of the forwards, with embedding_TD float32 where it is asked for.

        Args:
            columns: as in `forwards`. With `embeddings` the pieces are forwards, otherwise larger.
        """
        columns = set(columns)
        self.require(columns, "this reader")
        if "embeddings" not in columns:
            for rows in self.batches(columns):
                yield rows, None
            return
        embeddings = _Embeddings(self)
        for rows in self.recorded_forwards(columns - {"embeddings"}):
            yield rows, embeddings.of(rows)

    def recorded_forwards(self, columns: Iterable[str]) -> Iterator[TokenBatch]:
        """The rows of each forward, as they were recorded; arguments and errors are those of `batches`."""
        held: TokenBatch | None = None
        for batch in self.batches(columns):
            rows = batch if held is None else TokenBatch.concatenate([held, batch])
            cuts = np.flatnonzero(np.diff(rows.forward_T)) + 1
            starts = [0, *cuts.tolist()]
            for start, end in itertools.pairwise(starts):
                yield rows.select(slice(start, end))
            held = rows.select(slice(starts[-1], None))
        if held is not None and len(held):
            yield held

    def whole_requests(self, columns: Iterable[str] = ()) -> Iterator[TokenBatch]:
        """The rows of each request that has any, in the order of `requests`; arguments and errors as of `batches`.

        Requests that ran at the same time are held back until their turn.
        """
        order = self.requests["request"].to_pylist()
        total = dict(zip(order, self.requests["tokens"].to_pylist(), strict=True))
        held: dict[int, list[TokenBatch]] = {}
        seen: dict[int, int] = {}
        nxt = 0
        for batch in self.batches(columns):
            for request in np.unique(batch.request_T).tolist():
                rows = batch.select(batch.request_T == request)
                held.setdefault(request, []).append(rows)
                seen[request] = seen.get(request, 0) + len(rows)
            while nxt < len(order) and seen.get(order[nxt], 0) == total[order[nxt]]:
                if total[order[nxt]]:
                    yield TokenBatch.concatenate(held.pop(order[nxt]))
                nxt += 1
        if nxt < len(order):
            raise MismatchError(
                f"{self.path} holds {seen.get(order[nxt], 0)} of the {total[order[nxt]]} tokens of request "
                f"{order[nxt]}; capture again"
            )

    def _by_request(self, columns: Iterable[str]) -> Iterator[TokenBatch]:
        for whole in self.whole_requests(columns):
            cuts = np.flatnonzero(np.diff(whole.iteration_T)) + 1
            starts = [0, *cuts.tolist(), len(whole)]
            for start, end in itertools.pairwise(starts):
                yield whole.select(slice(start, end))

    def _names(self, folder: str) -> list[str]:
        """The files of a folder that the manifest knows; whatever else lies there is not of this trace."""
        return [name for name in sorted(self._files) if name.startswith(f"{folder}/")]

    def _read(self, name: str, schema: pa.Schema) -> pa.Table:
        file = self._verify(name)
        try:
            table = pq.read_table(file, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise MismatchError(f"{file} is damaged ({first_line(error)}); capture again") from error
        _require_schema(file, schema, table.schema)
        return table


def _require_schema(file: Path, expected: pa.Schema, found: pa.Schema) -> None:
    wrong = [f.name for f in expected if f.name not in found.names or found.field(f.name).type != f.type]
    if wrong:
        raise MismatchError(f"{file} does not fit its manifest (column {', '.join(wrong)}); capture again")


class _Embeddings:
    """The embeddings of a trace, looked up by the rows of a forward while both are read in about the same order."""

    def __init__(self, trace: Trace, requests: frozenset[int] | None = None) -> None:
        self._rows = (row for row in trace.embeddings() if requests is None or row[0] in requests)
        self._log = trace.manifest["composition"]["kind"] == "log"  # one row a forward instead of one an iteration
        self._read: dict[tuple[int, int], list[np.ndarray]] = {}
        self._last: dict[int, tuple[int, np.ndarray]] = {}  # of each request: its iteration, and the mean over it
        self._path = trace.path

    def of(self, rows: TokenBatch) -> np.ndarray:
        """embedding_TD float32: each token's request's mean, over as much of its iteration as the rows hold."""
        embedding_TD: np.ndarray | None = None
        for request in np.unique(rows.request_T).tolist():
            mine = rows.request_T == request
            _, tokens = np.unique(rows.forward_T[mine], return_counts=True)
            mean_D = self._of(request, int(rows.iteration_T[int(np.argmax(mine))]), tokens)
            if embedding_TD is None:
                embedding_TD = np.empty((len(rows), len(mean_D)), np.float32)
            embedding_TD[mine] = mean_D
        assert embedding_TD is not None
        return embedding_TD

    def _of(self, request: int, iteration: int, tokens: np.ndarray) -> np.ndarray:
        """The mean over the forwards of one iteration that are asked for, each of so many tokens."""
        last = self._last.get(request)
        if last is not None and last[0] == iteration and not self._log:
            return last[1]  # an iteration that came in several forwards
        if self._log and len(tokens) > 1:
            parts = np.stack([self._next(request, iteration).astype(np.float32) for _ in tokens])
            mean: np.ndarray = (parts * tokens[:, None]).sum(axis=0) / tokens.sum()
            return mean.astype(np.float32)
        embedding_D = self._next(request, iteration).astype(np.float32)
        self._last[request] = (iteration, embedding_D)
        return embedding_D

    def _next(self, request: int, iteration: int) -> np.ndarray:
        key = (request, iteration)
        while not self._read.get(key):
            row = next(self._rows, None)
            if row is None:
                raise MismatchError(
                    f"{self._path} has no embedding of iteration {iteration} of request {request}; capture again"
                )
            self._read.setdefault(row[:2], []).append(row[2])
        embedding_D = self._read[key].pop(0)
        if not self._read[key]:
            del self._read[key]
        return embedding_D
