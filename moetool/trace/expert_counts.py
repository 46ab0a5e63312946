"""Counts of tokens per expert, as a folder: the records of engines that keep no routes.

    manifest.json     kind `counts`, schema version, ModelSpec, provenance, sha256 of the other file
    counts.parquet    one row per pass (one or more forwards, counted together by the engine): `pass`; and `tokens`, the
                      number of tokens that used each expert, as a list of L * E, layer-major

Counts suffice to plan and score a placement, with a pass in place of a request. Replay, cache plans and predictors
refuse them, since they need the experts of each token in order.
"""

import io
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moetool import __version__
from moetool.base import durable
from moetool.base.bounded_read import require_itself, require_regular
from moetool.base.errors import MismatchError, UsageError, first_line
from moetool.base.json_files import read_json
from moetool.base.types import ModelSpec
from moetool.trace.reader import Trace

KIND, SCHEMA_VERSION = "counts", 1
MANIFEST, FILE = "manifest.json", "counts.parquet"
_MAX_BYTES = 2**33
"""Byte limit of counts in memory: a million passes of a thousand experts. A small file of zeros can hold more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Counts of foreign files.

    Attributes:
        counts_WLE: tokens of pass w that used expert e of layer l (int64); 0 beyond a layer's experts.
        notes: one sentence for each fact that the files lack or that was changed.

    Raises:
        MismatchError: a count is below 0, or all counts, or those of a layer, are 0.
    """

    spec: ModelSpec
    counts_WLE: np.ndarray
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts_WLE = self.counts_WLE
        assert counts_WLE.shape[1:] == (self.spec.num_layers, self.spec.num_experts)
        if (counts_WLE < 0).any():
            raise MismatchError(
                f"a count of tokens is {counts_WLE.min()}, expected 0 or more; download the files again"
            )
        if not counts_WLE.any():
            raise MismatchError("no pass has any tokens: the recorder was off; record again")
        if len(idle := np.flatnonzero(~counts_WLE.any(axis=(0, 2)))):
            raise MismatchError(
                f"layer {self.spec.layer_ids_L[idle[0]]} is all zero, expected tokens: "
                f"{unrecorded(self.spec.layer_ids_L, idle)}"
            )


def unrecorded(layer_ids_L: Sequence[int], idle: Collection[int]) -> str:
    """Return the reasons why some layers are all zero, and the remedy.

    Args:
        idle: their positions in `layer_ids_L`.
    """
    layers = [layer for i, layer in enumerate(layer_ids_L) if i not in idle]
    run = layers == list(range(layers[0], layers[-1] + 1))
    names = f"{layers[0]}..{layers[-1]}" if run else ",".join(map(str, layers))
    return (
        "it has no router (hash layers choose by token), no experts, or the recorder was off; import the layers that "
        f"were recorded with --set moe_layers={names}, without first_k_dense, or record again"
    )


class ExpertCounts:
    """Counts of tokens per expert on disk.

    Args:
        path: folder of the counts.

    Attributes:
        manifest: manifest.json.
        spec: the model that was counted.
        counts_WLE: as in `Counted`.
        num_tokens: counted tokens; a fraction where an engine lost some.

    Raises:
        UsageError: there is no such folder.
        MismatchError: it is incomplete, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        self.manifest = _manifest(path)
        kind, version = self.manifest.get("kind"), self.manifest.get("schema_version")
        if (kind, version) != (KIND, SCHEMA_VERSION):
            raise MismatchError(
                f"{path} holds {kind or 'something else'} of schema version {version}, expected {KIND} of version "
                f"{SCHEMA_VERSION}; import them again with: moetool trace import"
            )
        file = path / FILE
        require_itself(file)
        try:
            self.spec = ModelSpec.from_json(self.manifest["spec"])
            require_regular(file)
            if durable.sha256_file(file) != self.manifest["files"][FILE]["sha256"]:
                raise ValueError("its sha256 is not the manifest's")
            shape = self.spec.num_layers, self.spec.num_experts
            expected = pa.list_(pa.int64(), shape[0] * shape[1])
            with pq.ParquetFile(file) as parquet:
                found = parquet.schema_arrow.field("tokens").type
                if found != expected:
                    raise ValueError(f"its counts are {found}, expected {expected}: {shape[0]} layers x {shape[1]}")
                if (num_bytes := parquet.metadata.num_rows * shape[0] * shape[1] * 8) > _MAX_BYTES:
                    raise ValueError(f"its counts take {num_bytes:,} bytes, expected at most {_MAX_BYTES:,}")
                column = parquet.read(columns=["tokens"])["tokens"].combine_chunks()
            flat = column.flatten()
            if column.null_count or flat.null_count:
                raise ValueError("some counts are missing")
            self.counts_WLE: np.ndarray = flat.to_numpy(zero_copy_only=False).reshape(-1, *shape)
            Counted(spec=self.spec, counts_WLE=self.counts_WLE)  # refuses impossible counts
            if not isinstance(self.manifest["provenance"], dict):
                raise ValueError("its provenance is not an object")
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError, AttributeError, MismatchError) as error:
            raise MismatchError(f"{file} is damaged ({first_line(error)}); import it again") from None

    @property
    def sha256(self) -> str:
        """Return the identity of the content: the sha256 of the manifest, which holds that of the counts."""
        return durable.sha256_file(self.path / MANIFEST)

    @property
    def requests(self) -> range:
        """Return the numbers of the passes, in place of a trace's requests."""
        return range(len(self.counts_WLE))

    @property
    def num_tokens(self) -> float:
        return float(self.counts_WLE.sum() / sum(self.spec.top_k_L))

    def describe(self) -> dict[str, Any]:
        """Return a summary of the folder, as a JSON object."""
        return {
            "path": str(self.path),
            "sha256": self.sha256,
            "spec": self.spec.to_json(),
            "passes": len(self.counts_WLE),
            "tokens": self.num_tokens,
            "bytes": (self.path / FILE).stat().st_size,
            "provenance": self.manifest["provenance"],
        }


def write_counts(folder: Path, counted: Counted, provenance: dict[str, Any]) -> None:
    """Write counts into an empty folder, a `durable.staged_directory`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    counts_WLE = np.ascontiguousarray(counted.counts_WLE, np.int64)
    width = counted.spec.num_layers * counted.spec.num_experts
    table = pa.table(
        {
            "pass": pa.array(np.arange(len(counts_WLE)), pa.int32()),
            "tokens": pa.FixedSizeListArray.from_arrays(pa.array(counts_WLE.reshape(-1)), width),
        }
    )
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    (folder / FILE).write_bytes(buffer.getvalue())
    manifest = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "moetool_version": __version__,
        "spec": counted.spec.to_json(),
        "provenance": provenance,
        "files": {FILE: {"bytes": buffer.tell(), "sha256": durable.sha256_file(folder / FILE)}},
    }
    durable.write_text(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def holds_counts(path: Path) -> bool:
    """Return whether a folder holds counts instead of a trace, by its manifest."""
    return path.is_dir() and (path / MANIFEST).is_file() and _manifest(path).get("kind") == KIND


def open_workload(path: Path) -> "Trace | ExpertCounts":
    """Open a trace or counts, whichever the folder holds.

    Raises:
        UsageError: there is no such folder.
        MismatchError: it is neither, or damaged.
    """
    from moetool.trace.reader import Trace

    return ExpertCounts(path) if holds_counts(path) else Trace(path)


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UsageError(f"no counts at {path}; make them with: moetool trace import FILE --out {path}")
    try:
        return read_json(path / MANIFEST, advice="import or capture again")
    except OSError as error:
        raise MismatchError(f"{path}/{MANIFEST} is damaged ({first_line(error)}); import or capture again") from None


def count_experts(spec: ModelSpec, experts_TS: np.ndarray) -> np.ndarray:
    """Return the tokens [L, E] that use each expert, from rows of a trace."""
    tokens_LE = np.zeros((spec.num_layers, spec.num_experts))
    start = 0
    for layer, top_k in enumerate(spec.top_k_L):
        chosen = experts_TS[:, start : start + top_k].ravel()
        tokens_LE[layer] = np.bincount(chosen, minlength=spec.num_experts)
        start += top_k
    return tokens_LE
