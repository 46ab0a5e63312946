"""The trace: a model's routing, token by token, as a folder of Parquet files.

    manifest.json           schema version, ModelSpec, batch composition, provenance, sha256 of each file, and whether
                            the trace is closed; the log of a running server is open
    requests.parquet        one row per request; prompt_tokens is 0 where the recording holds new tokens only
    tokens/*.parquet        one row per forwarded token, in the order of the forwards
    iterations/*.parquet    one row per iteration of a request: the mean output of the embedding layer; in the log of a
                            server, one row per forward of the iteration

Per-layer columns are fixed-size lists, layer-major. `experts` and `weights` hold K numbers for each layer, `logits` E,
and `hidden` the D of each router's input. `ahead` holds the logits of the next A MoE layers' routers on that input: A
times E of the widest layer, 0 beyond a layer's experts and beyond the last layer. `resident` holds the next router's
logits if only resident and shared experts were computed: E of the widest layer, 0 likewise. The offsets are in the
schema metadata. Readers stream and name the columns that they need. `weights` is missing if the recording engine keeps
only the experts. Traces of an older minor version are read; those of a newer version are refused
(`moetool.trace.version`).
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool.base import config, durable
from moetool.base import validation as check
from moetool.base.artefact import kind_of
from moetool.base.bounded_read import require_itself
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.base.json_files import decode_json, read_bounded
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.trace.arrays import by_layer, long_table, require_layers
from moetool.trace.events import gate_events, to_forward
from moetool.trace.row_checks import RowChecks, check_whole
from moetool.trace.rows import ALWAYS, COLUMNS, KEEP, SIGNALS, TokenBatch
from moetool.trace.schemas import (
    REQUESTS,
    SINCE_1_4,
    VOCABULARY,
    embedding_schema,
    require_values,
    to_token_batch,
    token_schema,
)
from moetool.trace.version import upgrade

MANIFEST = "manifest.json"
BATCH_TOKENS = 8192
COMPOSITIONS = ("sequential", "batch", "log", "mixed")
_REQUESTS = "requests.parquet"
_VOCABULARY = "vocabulary.parquet"
_OTHERS = {"card.json": "a predictor", "config.json": "a model"}
"""A file in the directory of something that is no trace."""
_ROWS_A_BYTE = 64
"""Maximum rows per byte of Parquet: files with more are made to exhaust memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """Types of a manifest's entries, except the model's."""

    files: dict[str, _File]
    columns: list[str]
    tokens: int
    requests: int
    ahead: int
    resident: float
    composition: dict[str, Any]
    provenance: dict[str, Any]
    closed: bool
    running: list[int]

    @property
    def requests_file(self) -> str:
        """Return the file of the requests: the latest one of an open log."""
        if self.closed:
            return _REQUESTS
        return max((name for name in self.files if name.startswith("requests-")), default=_REQUESTS)

    def validate(self) -> None:
        """Raise MismatchError with the first invalid field."""
        for name, file in self.files.items():
            known = re.fullmatch(r"(requests|requests-\d+|vocabulary|(tokens|iterations)/[\w-]+)\.parquet", name)
            check.require(bool(known), "files", name, f"{_REQUESTS}, tokens/… or iterations/…")
            check.require_whole(f"files.{name}.bytes", file.bytes, 0)
        check.require(self.requests_file in self.files, "files", "others", _REQUESTS)
        unknown = sorted(set(self.columns) - {*COLUMNS, "embeddings", "text"})
        check.require(not unknown, "columns", ", ".join(unknown), "columns of traces")
        missing = sorted(set(ALWAYS) - set(self.columns))
        check.require(not missing, "columns", f"no {', '.join(missing)}", "these columns in every trace")
        check.require_whole("tokens", self.tokens, 0)
        check.require_whole("requests", self.requests, 0)
        check.require_whole("ahead", self.ahead, 0, check.MAX_LAYERS)
        check.require_number("resident", self.resident, 0, 1)
        check.require_one_of("composition.kind", str(self.composition.get("kind")), COMPOSITIONS)


class Trace:
    """A trace on disk, read as a stream.

    Args:
        path: folder of the trace.

    Attributes:
        manifest: manifest.json, as this version writes it.
        spec: the model that was traced.
        columns: the recorded columns: `experts` and optionally `weights`, `SIGNALS`, `embeddings`.
        ahead: number of layers that the column `ahead` looks ahead; 0 without it.
        resident: share of a layer's experts that the column `resident` takes to be resident; 0 without it.
        num_tokens: rows of tokens/.
        requests: requests.parquet, in the order of the requests.
        closed: whether the trace is complete. The log of a running or killed server is open, and is read up to its end
            at the time of opening.
        running: requests still running after the last row.
        sha256: identity of the content: digest of the manifest, which holds the digest of every file.

    Raises:
        UsageError: there is no such folder.
        MismatchError: the trace is incomplete, or its schema version cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path)
        if kind := kind_of(path):
            raise UsageError(f"{path} is of kind {kind}, expected a trace; give the directory of one")
        if path.is_file():
            raise UsageError(f"{path} is one file, not a trace; make one with: moetool trace import {path} --out DIR")
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is neither a file nor a directory, expected a trace; give the directory of one")
        if not path.is_dir():
            raise UsageError(f"no trace at {path}; make one with: moetool capture MODEL --data NAME --out {path}")
        while True:
            found = self._read_manifest()
            try:
                self._open(found)
                return
            except MismatchError:
                if self._read_manifest() == found:  # otherwise the log has grown meanwhile
                    raise

    def _read_manifest(self) -> bytes:
        try:
            return read_bounded(self.path / MANIFEST, advice="capture again")
        except FileNotFoundError:
            if (self.path.parent / MANIFEST).is_file():
                raise UsageError(f"{self.path} is a part of a trace; give the trace: {self.path.parent}") from None
            if kind := next((kind for file, kind in _OTHERS.items() if (self.path / file).is_file()), None):
                raise UsageError(f"{self.path} is {kind}, expected a trace; give the directory of one") from None
            raise MismatchError(
                f"{self.path} is incomplete: it has no manifest.json (an interrupted capture leaves none); capture "
                f"again"
            ) from None
        except IsADirectoryError as error:
            raise MismatchError(f"{self.path}/manifest.json is damaged ({first_line(error)}); capture again") from None

    def _open(self, manifest: bytes) -> None:
        path = self.path
        self.sha256 = hashlib.sha256(manifest).hexdigest()
        self.manifest: dict[str, Any] = decode_json(path / MANIFEST, manifest, advice="capture again")
        self.manifest = upgrade(self.manifest, path)
        try:
            facts = config.parse(_Manifest, {name: self.manifest[name] for name in _Manifest.__slots__}, "manifest")
            facts.validate()
            self.spec = ModelSpec.from_json(self.manifest["spec"])
        except KeyError as error:
            raise MismatchError(f"{path}/manifest.json is damaged (it has no {error}); capture again") from None
        except MoetoolError as error:
            raise MismatchError(f"{path}/manifest.json is damaged ({first_line(error)}); capture again") from None
        self._files = {name: (fact.bytes, fact.sha256) for name, fact in facts.files.items()}
        self.columns = frozenset(facts.columns)
        self.num_tokens, self.ahead, self.resident = facts.tokens, facts.ahead, facts.resident
        self.closed, self.running = facts.closed, frozenset(facts.running)
        for name, (expected, _) in self._files.items():
            file = path / name
            size = file.stat().st_size if file.is_file() else None
            if size != expected:
                require_itself(file)
                raise MismatchError(
                    f"{file} is {'missing' if size is None else f'{size:,} bytes long'}, expected "
                    f"{expected:,} bytes; copy the trace again or capture again"
                )
        self._intact: set[str] = set()
        self._requests_file = facts.requests_file
        self.requests = self._read(self._requests_file, REQUESTS, empty=SINCE_1_4)
        self._validate_requests(facts.requests)

    def _validate_requests(self, expected: int) -> None:
        """Raise MismatchError if requests.parquet contradicts itself or the manifest."""
        file = self.path / self._requests_file
        found = {name: self.requests[name].to_numpy() for name in ("request", "prompt_tokens", "new_tokens", "tokens")}
        for name, values_R in found.items():
            if len(values_R) and int(values_R.min()) < 0:
                raise MismatchError(f"{file}: a {name} is {values_R.min()}, expected 0 or more; capture again")
        if (np.diff(found["request"]) <= 0).any():
            raise MismatchError(f"{file}: the requests are out of order or repeated; capture again")
        tokens = int(found["tokens"].sum(dtype=np.int64))
        if (len(self.requests), tokens) != (expected, self.num_tokens):
            raise MismatchError(
                f"{file} has {len(self.requests):,} requests of {tokens:,} tokens, but the manifest says {expected:,} "
                f"and {self.num_tokens:,}; capture again"
            )

    @property
    def unrecorded_prompts(self) -> int:
        """Return the number of requests with new tokens only, whose prompts the recording program left out."""
        found = self.requests.select(["prompt_tokens", "tokens"]).to_pydict()
        return sum(tokens > 0 and not prompt for prompt, tokens in zip(*found.values(), strict=True))

    def require(self, columns: Iterable[str], user: str) -> None:
        """Raise MismatchError if a column that `user` needs was not recorded."""
        if missing := sorted(set(columns) - self.columns):
            flags = ",".join(["topk", *(c for c in missing if c in KEEP)])
            raise MismatchError(
                f"{user} needs {', '.join(missing)}, but {self.path} holds {', '.join(sorted(self.columns))}; "
                f"capture with --keep {flags}"
            )

    def require_ahead(self, distance: int, user: str) -> None:
        """Raise MismatchError if the column `ahead` covers fewer layers than `user` needs."""
        if self.ahead < distance:
            raise MismatchError(
                f"{user} looks {distance} layers ahead, and {self.path} holds {self.ahead}; capture with --keep "
                f"topk,ahead --ahead {distance}"
            )

    def describe(self) -> dict[str, Any]:
        """Return a summary of the trace, as a JSON object."""
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
            "closed": self.closed,
            "tokens": self.num_tokens,
            "unrecorded_prompts": self.unrecorded_prompts,
            "bytes": sum(size for size, _ in self._files.values()),
            **{name: sum(total[i] for total in totals.values()) for i, name in enumerate(counted)},
            "tasks": [
                {"dataset": dataset, "task": task, **dict(zip(counted, total, strict=True))}
                for (dataset, task), total in sorted(totals.items())
            ],
            "provenance": self.manifest["provenance"],
        }

    def verify(self) -> None:
        """Raise MismatchError if any file's sha256 is not the manifest's."""
        for name in self._files:
            self._verify(name)

    def check(self) -> None:
        """Read every row and column, with more checks than other readers do.

        Raises:
            MismatchError: a file is damaged, or a row is invalid.
        """
        self.verify()
        for rows in self.batches(self.columns & {"weights", *SIGNALS}):
            check_whole(self.spec, rows, self.path)
        if "embeddings" in self.columns:
            for _ in self.embeddings():
                pass

    def _verify(self, name: str) -> Path:
        """Return the path of a file; the first read compares its digest with the manifest's."""
        file = self.path / name
        if not self.closed and not file.exists():
            raise MismatchError(f"{file} is gone: the log was closed during the read; run the command again")
        if name not in self._intact and durable.sha256_file(file) != self._files[name][1]:
            raise MismatchError(f"{file} is damaged: its sha256 is not the manifest's; capture again")
        self._intact.add(name)
        return file

    def batches(self, columns: Iterable[str] = ()) -> Iterator[TokenBatch]:
        """Stream the rows of tokens/ in the order of the forwards, thousands at a time.

        Args:
            columns: any of `weights` and `SIGNALS`, in addition to those always read.

        Raises:
            MismatchError: a column was not recorded, a file is damaged, or a row is invalid (`RowChecks`).
        """
        wanted = set(columns)
        self.require(wanted, "this reader")
        names = [c for c in COLUMNS if c in ALWAYS or c in wanted]
        checks = RowChecks(
            self.path, self.spec, self.requests["request"].to_numpy(), self.requests["tokens"].to_numpy()
        )
        for part in self._names("tokens/"):
            file = self._verify(part)
            try:
                with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                    _require_schema(file, token_schema(self.spec, names, self.ahead), parquet.schema_arrow)
                    for record in parquet.iter_batches(BATCH_TOKENS, columns=names):
                        rows = to_token_batch(record)
                        checks.check(rows)
                        yield rows
            except (pa.ArrowException, OSError) as error:
                raise MismatchError(f"{file} is damaged ({first_line(error)}); capture again") from error
        checks.finish()

    def by_layer(self, column: str = "experts") -> np.ndarray:
        """Return all tokens of `experts` or `weights` as [T, L, K], or of `logits` as [T, L, E].

        Raises:
            MismatchError: the column was not recorded, or the layers differ in width.
        """
        require_layers(self.spec, column)
        return by_layer(self.spec, column, self.batches(() if column == "experts" else [column]))

    @property
    def vocabulary(self) -> dict[int, str]:
        """Return the text of each token that occurs, where `text` was kept; else empty."""
        if "text" not in self.columns:
            return {}
        table = self._read(_VOCABULARY, VOCABULARY)
        return dict(zip(table["token_id"].to_pylist(), table["text"].to_pylist(), strict=True))

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for each expert that a token uses in a layer.

        Columns: those of `moetool.trace.arrays.long_table`, and the token's text where `text` was kept.
        """
        weights = self.columns & {"weights"}
        table = long_table(self.spec, self.requests, self.batches(weights)).to_pandas()
        if spelled := self.vocabulary:
            table.insert(table.columns.get_loc("token_id") + 1, "text", table["token_id"].map(spelled))
        return table

    def embeddings(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (request, iteration, embedding_D float16) of every iteration."""
        self.require(["embeddings"], "this reader")
        for part in self._names("iterations/"):
            table = self._read(part, embedding_schema(self.spec))
            values = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            rows = values.reshape(len(table), self.spec.hidden_size)
            if not np.isfinite(rows).all():
                raise MismatchError(
                    f"{self.path / part}: the column embeddings holds numbers that are not finite; capture again"
                )
            yield from zip(table["request"].to_pylist(), table["iteration"].to_pylist(), rows, strict=True)

    def forwards(
        self, *, sequential: bool, columns: Iterable[str] = (), requests: frozenset[int] | None = None
    ) -> Iterator[tuple[ForwardInfo, list[GateEvent]]]:
        """Stream the trace as forwards with their gate events, layer by layer.

        Args:
            sequential: one request after the other, each prompt in one forward; otherwise the recorded forwards.
            columns: `weights` and `SIGNALS` fill the fields of the events, `embeddings` that of the forwards (the mean
                over an iteration).
            requests: requests to include (default: all).
        """
        for info, rows in self.forward_rows(sequential=sequential, columns=columns, requests=requests):
            yield info, gate_events(self.spec, rows, info)

    def forward_rows(
        self, *, sequential: bool, columns: Iterable[str] = (), requests: frozenset[int] | None = None
    ) -> Iterator[tuple[ForwardInfo, TokenBatch]]:
        """Stream the trace as forwards with their rows; arguments as for `forwards`."""
        columns = set(columns)
        embeddings = _Embeddings(self, requests) if "embeddings" in columns else None
        columns.discard("embeddings")
        groups = self._by_request(columns, requests) if sequential else self.recorded_forwards(columns)
        forward_id = 0
        for rows in groups:
            if requests is not None and not sequential:
                rows = rows.select(np.isin(rows.request_T, list(requests)))
                if not len(rows):
                    continue
            embedding_TD = None if embeddings is None else embeddings.of(rows)
            yield to_forward(rows, forward_id, embedding_TD=embedding_TD), rows
            forward_id += 1

    def token_rows(self, columns: Iterable[str] = ()) -> Iterator[tuple[TokenBatch, np.ndarray | None]]:
        """Stream the rows of tokens/ in the order of the forwards, with embedding_TD float32 on request.

        Args:
            columns: as in `forwards`. With `embeddings` each piece is one forward, otherwise larger.
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
        """Yield the recorded rows of each forward; arguments and errors as in `batches`."""
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
        """Yield the rows of each request that has tokens, in the order of `requests`.

        Arguments and errors as in `batches`. Concurrent requests are buffered until their turn.
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

    def _by_request(self, columns: Iterable[str], requests: frozenset[int] | None) -> Iterator[TokenBatch]:
        for whole in self.whole_requests(columns):
            if requests is not None and int(whole.request_T[0]) not in requests:
                continue
            cuts = np.flatnonzero(np.diff(whole.iteration_T)) + 1
            starts = [0, *cuts.tolist(), len(whole)]
            for start, end in itertools.pairwise(starts):
                yield whole.select(slice(start, end))

    def _names(self, prefix: str) -> list[str]:
        """Return the files of a folder that the manifest lists; other files are not part of the trace."""
        return [name for name in sorted(self._files) if name.startswith(prefix)]

    def _read(self, name: str, schema: pa.Schema, empty: Sequence[str] = ()) -> pa.Table:
        """Read a small file. `empty`: text columns that are filled with empty texts if missing."""
        file, whole = self._verify(name), schema
        try:
            with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
                there = parquet.schema_arrow.names
                schema = pa.schema([field for field in whole if field.name in there or field.name not in empty])
                _require_schema(file, schema, parquet.schema_arrow)
                if parquet.metadata.num_rows > _ROWS_A_BYTE * self._files[name][0]:
                    raise pa.ArrowInvalid(f"{parquet.metadata.num_rows:,} rows in {self._files[name][0]:,} bytes")
                table = parquet.read(columns=schema.names)
            for field in schema:
                column = table[field.name].combine_chunks()
                flat = column.flatten() if pa.types.is_fixed_size_list(field.type) else column
                require_values(field.name, column, flat)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise MismatchError(f"{file} is damaged ({first_line(error)}); capture again") from error
        for at, field in enumerate(whole):
            if field.name not in schema.names:
                table = table.add_column(at, field, pa.array([""] * len(table), field.type))
        return table


def _require_schema(file: Path, expected: pa.Schema, found: pa.Schema) -> None:
    wrong = [f.name for f in expected if found.names.count(f.name) != 1 or found.field(f.name).type != f.type]
    if wrong:
        raise MismatchError(f"{file} does not fit its manifest (column {', '.join(wrong)}); capture again")


class _Embeddings:
    """The embeddings of a trace, looked up by the rows of a forward. Both are in nearly the same order."""

    def __init__(self, trace: Trace, requests: frozenset[int] | None = None) -> None:
        self._rows = (row for row in trace.embeddings() if requests is None or row[0] in requests)
        self._log = trace.manifest["composition"]["kind"] == "log"  # one row per forward, not per iteration
        self._read: dict[tuple[int, int], list[np.ndarray]] = {}
        self._last: dict[int, tuple[int, np.ndarray]] = {}  # by request: iteration, and its mean
        self._path = trace.path

    def of(self, rows: TokenBatch) -> np.ndarray:
        """Return embedding_TD float32: the mean of each token's request over its rows of the iteration."""
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
        """Return the mean over some forwards of one iteration, weighted by their tokens."""
        last = self._last.get(request)
        if last is not None and last[0] == iteration and not self._log:
            return last[1]  # an iteration of several forwards
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
