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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moetool import durable
from moetool.errors import MismatchError, UsageError, first_line
from moetool.trace.version import SCHEMA_VERSION, upgrade
from moetool.types import ForwardInfo, GateEvent, ModelSpec

MANIFEST = "manifest.json"
KEEP = ("topk", "logits", "embeddings", "hidden", "ahead", "resident")
SIGNALS = ("logits", "hidden", "ahead", "resident")
"""Columns of tokens/ beside the routes, which a trace may hold."""
BATCH_TOKENS = 8192

REQUESTS = pa.schema(
    [
        ("request", pa.int32()),
        ("dataset", pa.string()),
        ("task", pa.string()),
        ("prompt_id", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("new_tokens", pa.int32()),
        ("tokens", pa.int32()),  # rows of this request in tokens/
    ]
)


@dataclass(slots=True, kw_only=True)
class TokenBatch:
    """Rows of tokens/, as arrays.

    Shapes:
        request_T, forward_T, iteration_T, position_T, token_id_T int32; phase_T uint8 (`Phase`);
        experts_TS uint16 and weights_TS float16 with S = sum of top_k_L; logits_TF float16 with F = sum of
        num_experts_L; hidden_TH float16 with H = L * D; ahead_TR float16 with R = L * A * E; resident_TW float16 with
        W = L * E. `None` where not recorded or not asked for.
        A token id of -1 was withheld.
    """

    request_T: np.ndarray
    forward_T: np.ndarray
    phase_T: np.ndarray
    iteration_T: np.ndarray
    position_T: np.ndarray
    token_id_T: np.ndarray
    experts_TS: np.ndarray
    weights_TS: np.ndarray | None = None
    logits_TF: np.ndarray | None = None
    hidden_TH: np.ndarray | None = None
    ahead_TR: np.ndarray | None = None
    resident_TW: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.request_T)

    def select(self, index: Any) -> "TokenBatch":
        """The rows that `index` (a slice, a mask or an index array) picks."""
        picked: dict[str, Any] = {
            f.name: None if (column := getattr(self, f.name)) is None else column[index] for f in fields(self)
        }
        return TokenBatch(**picked)

    @staticmethod
    def concatenate(batches: Sequence["TokenBatch"]) -> "TokenBatch":
        """The rows of several batches, one after the other. All must have the same columns."""
        joined: dict[str, Any] = {}
        for f in fields(TokenBatch):
            parts = [getattr(batch, f.name) for batch in batches]
            joined[f.name] = None if parts[0] is None else np.concatenate(parts)
        return TokenBatch(**joined)


COLUMNS = {
    "request": "request_T",
    "forward": "forward_T",
    "phase": "phase_T",
    "iteration": "iteration_T",
    "position": "position_T",
    "token_id": "token_id_T",
    "experts": "experts_TS",
    "weights": "weights_TS",
    "logits": "logits_TF",
    "hidden": "hidden_TH",
    "ahead": "ahead_TR",
    "resident": "resident_TW",
}
ALWAYS = ("request", "forward", "phase", "iteration", "position", "token_id", "experts")


def _widths(spec: ModelSpec, ahead: int) -> dict[str, int]:
    return {
        "experts": sum(spec.top_k_L),
        "weights": sum(spec.top_k_L),
        "logits": sum(spec.num_experts_L),
        "hidden": spec.num_layers * spec.hidden_size,
        "ahead": spec.num_layers * ahead * spec.num_experts,
        "resident": spec.num_layers * spec.num_experts,
    }


def token_schema(spec: ModelSpec, columns: Iterable[str], ahead: int) -> pa.Schema:
    """The schema of tokens/. `ahead`: for how many layers the column of that name looks ahead."""
    widths = _widths(spec, ahead)
    types: dict[str, pa.DataType] = {
        **dict.fromkeys(("request", "forward", "iteration", "position", "token_id"), pa.int32()),
        "phase": pa.uint8(),
        "experts": pa.list_(pa.uint16(), widths["experts"]),
        **{name: pa.list_(pa.float16(), widths[name]) for name in ("weights", *SIGNALS)},
    }
    offsets = {
        "moetool.top_k_offsets": [0, *np.cumsum(spec.top_k_L).tolist()],
        "moetool.expert_offsets": [0, *np.cumsum(spec.num_experts_L).tolist()],
    }
    return pa.schema(
        [(name, types[name]) for name in COLUMNS if name in columns],
        metadata={"moetool.schema_version": SCHEMA_VERSION, **{k: json.dumps(v) for k, v in offsets.items()}},
    )


def to_token_batch(record: pa.RecordBatch) -> TokenBatch:
    """Rows of tokens/ from Arrow, which they share memory with."""
    columns: dict[str, Any] = {}
    for name in record.schema.names:
        values = record[name]
        if pa.types.is_fixed_size_list(values.type):
            flat = values.flatten().to_numpy(zero_copy_only=False)
            columns[COLUMNS[name]] = flat.reshape(-1, values.type.list_size)
        else:
            columns[COLUMNS[name]] = values.to_numpy(zero_copy_only=False)
    return TokenBatch(**columns)


def to_record_batch(rows: TokenBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of a schema from rows of tokens/."""
    arrays = [to_array(getattr(rows, COLUMNS[field.name]), field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_array(values: np.ndarray, kind: pa.DataType) -> pa.Array:
    """A column of one type; of a matrix, fixed-size lists."""
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, type=kind)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), type=kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)


def embedding_schema(spec: ModelSpec) -> pa.Schema:
    vector = pa.list_(pa.float16(), spec.hidden_size)
    return pa.schema([("request", pa.int32()), ("iteration", pa.int32()), ("embedding", vector)])


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


def to_events(
    spec: ModelSpec, rows: TokenBatch, forward_id: int, *, embedding_TD: np.ndarray | None = None
) -> tuple[ForwardInfo, list[GateEvent]]:
    """The rows of one forward as a ForwardInfo and its gate events, one a layer."""
    info = ForwardInfo(
        forward_id=forward_id,
        request_T=tuple(rows.request_T.tolist()),
        phase_T=tuple(rows.phase_T.tolist()),
        position_T=tuple(rows.position_T.tolist()),
        embedding_TD=embedding_TD,
        token_id_T=tuple(rows.token_id_T.tolist()),
    )
    events = []
    top = np.concatenate([[0], np.cumsum(spec.top_k_L)])
    wide = np.concatenate([[0], np.cumsum(spec.num_experts_L)])
    for layer in range(spec.num_layers):
        span = slice(top[layer], top[layer + 1])
        weights = None if rows.weights_TS is None else rows.weights_TS[:, span].astype(np.float32)
        scores = None
        if rows.logits_TF is not None:
            logits = rows.logits_TF[:, wide[layer] : wide[layer + 1]].astype(np.float32)
            scores = router_scores(logits, spec.score_function)
        hidden = ahead = resident = None
        if rows.hidden_TH is not None:
            width = spec.hidden_size
            hidden = rows.hidden_TH[:, layer * width : (layer + 1) * width].astype(np.float32)
        if rows.ahead_TR is not None:
            looked = rows.ahead_TR.reshape(len(rows), spec.num_layers, -1, spec.num_experts)[:, layer]
            ahead = ahead_scores(spec, layer, looked.transpose(1, 0, 2))
        if rows.resident_TW is not None:
            said = rows.resident_TW.reshape(len(rows), spec.num_layers, -1)[:, layer]
            resident = next_scores(spec, layer, said)
        events.append(
            GateEvent(
                forward=info,
                layer=layer,
                experts_TK=tuple(map(tuple, rows.experts_TS[:, span].tolist())),
                weights_TK=weights,
                scores_TE=scores,
                hidden_TD=hidden,
                ahead_ATE=ahead,
                resident_TE=resident,
            )
        )
    return info, events


def router_scores(logits_TE: np.ndarray, score_function: str) -> np.ndarray:
    """Scores of a router from its logits: float32 [T, E], by `ModelSpec.score_function`."""
    if score_function == "sigmoid":
        return 1.0 / (1.0 + np.exp(-logits_TE))
    if score_function == "sqrtsoftplus":
        return np.sqrt(np.logaddexp(0.0, logits_TE))
    shifted = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def ahead_scores(spec: ModelSpec, layer: int, logits_ATE: np.ndarray) -> np.ndarray:
    """Scores [A, T, E] float32 of the routers after `layer` from their logits; layers beyond the last are left out."""
    following = spec.num_layers - 1 - layer
    scores_ATE = np.zeros((min(len(logits_ATE), following), *logits_ATE.shape[1:]), np.float32)
    for a in range(len(scores_ATE)):
        num_experts = spec.num_experts_L[layer + 1 + a]
        logits_TE = logits_ATE[a, :, :num_experts].astype(np.float32)
        scores_ATE[a, :, :num_experts] = router_scores(logits_TE, spec.score_function)
    return scores_ATE


def next_scores(spec: ModelSpec, layer: int, logits_TE: np.ndarray) -> np.ndarray:
    """Scores [T, E] float32 of the router after `layer` from its logits; 0 after the last layer."""
    ahead_ATE = ahead_scores(spec, layer, logits_TE[None])
    return ahead_ATE[0] if len(ahead_ATE) else np.zeros(logits_TE.shape, np.float32)
