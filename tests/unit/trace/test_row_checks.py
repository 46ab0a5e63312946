"""Rows of a trace that cannot be are refused while they are read, though every checksum is right."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.trace.expert_counts import FILE, Counted, ExpertCounts, write_counts
from moetool.trace.reader import Trace
from moetool.trace.rows import SIGNALS, TokenBatch
from moetool.tuning.replay import replay
from tests import traces
from tests.refusals import refused
from tests.synthetic import make_spec

LENGTHS = [(3, 3), (2, 4)]
EVERY = ("weights", *SIGNALS)


def corrupted(out: Path, change: Callable[[TokenBatch], None], forwards: Sequence[TokenBatch] | None = None) -> Trace:
    """A trace whose second forward was changed before it was written."""
    rows = list(forwards or traces.together(LENGTHS))
    rows[1] = replace(rows[1], **{name: getattr(rows[1], name).copy() for name in TokenBatch.__slots__})
    change(rows[1])
    return traces.write(out, rows, LENGTHS, composition={"kind": "batch"})


def setting(name: str, index: Any, value: Any) -> Callable[[TokenBatch], None]:
    def change(rows: TokenBatch) -> None:
        getattr(rows, name)[index] = value

    return change


@pytest.mark.parametrize(
    ("name", "index", "value", "says"),
    [
        ("phase_T", 0, 2, r"the phase of request \d at position \d is 2, expected 0 \(prefill\) or 1 \(decode\)"),
        ("experts_TS", (0, 0), 8, r"uses expert 8 of MoE layer 0 at position \d, expected 0 to 7"),
        ("experts_TS", (0, 6), 6, "uses expert 6 of MoE layer 2 .* expected 0 to 5"),
        (
            "weights_TS",
            (0, 1),
            np.nan,
            "the column weights holds nan for request .* expected a finite number of 0 or more",
        ),
        ("weights_TS", (0, 1), -0.5, "weights holds -0.5 for .* expected a finite number"),
        ("weights_TS", (0, 1), np.inf, "weights holds inf for .* expected a finite number"),
        ("logits_TF", (0, 3), np.nan, "the column logits holds nan for .* expected a finite number"),
        ("logits_TF", (0, 3), np.inf, "logits holds inf"),
        ("hidden_TH", (0, 0), -np.nan, "the column hidden holds nan"),
        ("ahead_TR", (0, 0), np.nan, "the column ahead holds nan"),
        ("resident_TW", (0, 0), np.nan, "the column resident holds nan"),
        ("logits32_TF", (0, 3), np.nan, "the column logits32 holds nan"),
        ("norms_TS", (0, 0), np.inf, "the column norms holds inf"),
        ("hidden_TH", (0, 0), -np.inf, "the column hidden holds -inf"),
        ("scores_TF", (0, 0), -np.inf, "the column scores holds -inf"),
        ("norms_TS", (0, 0), -np.inf, "the column norms holds -inf"),
        ("logits_TF", (0, slice(16, 22)), -np.inf, "logits masks every expert of a layer for request 0 at position 3"),
        ("logits32_TF", (0, slice(8)), -np.inf, "logits32 masks every expert"),
        ("ahead_TR", (0, slice(8, 16)), -np.inf, "ahead masks every expert"),
        ("resident_TW", (0, slice(8)), -np.inf, "resident masks every expert"),
        ("position_T", 0, 0, "positions of request 0 go from 2 to 0, expected them to rise"),
        ("iteration_T", slice(None), -1, r"iterations of request \d go from 0 to -1"),
        ("token_id_T", 0, -2, "the token id of request 0 .* is -2, expected -1 or more"),
        ("forward_T", slice(None), -1, "forwards go back"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, name: str, index: Any, value: Any, says: str) -> None:
    trace = corrupted(tmp_path / "t", setting(name, index, value))
    with pytest.raises(MismatchError, match=f"{says}.*again") as caught:
        list(trace.batches(EVERY))
    assert str(trace.path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_masked_logits_and_negative_zeros_are_read(tmp_path: Path) -> None:
    def change(rows: TokenBatch) -> None:
        for logits in (rows.logits_TF, rows.logits32_TF, rows.ahead_TR, rows.resident_TW):
            logits[0, 1:8] = logits[0, 8:15] = -np.inf  # all but one expert of two layers
        rows.weights_TS[0, 0] = -0.0

    assert sum(map(len, corrupted(tmp_path / "t", change).batches(EVERY))) == 10


def test_shuffled_rows_are_refused_though_their_hashes_are_right(tmp_path: Path) -> None:
    forwards = traces.together(LENGTHS)
    trace = traces.write(tmp_path / "t", forwards[::-1], LENGTHS, composition={"kind": "batch"})
    trace.verify()
    with refused(MismatchError, "forwards", "back"):
        list(trace.batches())


def test_a_replay_of_experts_that_are_not_there_is_refused(tmp_path: Path) -> None:
    trace = corrupted(tmp_path / "t", setting("experts_TS", (0, 0), 60_000))
    with refused(MismatchError, 60000):
        replay(trace, ["lru"], [500])


def test_an_expert_twice_is_found_by_the_whole_check(tmp_path: Path) -> None:
    trace = corrupted(tmp_path / "t", lambda rows: rows.experts_TS.__setitem__((0, 1), rows.experts_TS[0, 0]))
    assert sum(map(len, trace.batches(EVERY))) == 10
    with refused(MismatchError, "layer 0", "MoE"):
        trace.check()
    traces.write(tmp_path / "good", traces.together(LENGTHS), LENGTHS).check()


def test_counts_that_disagree_are_refused(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.alone(LENGTHS), LENGTHS)
    file = trace.path / "manifest.json"
    whole = json.loads(file.read_text())

    def refuses(*facts: object, **changes: Any) -> None:
        file.write_text(json.dumps({**whole, **changes}))
        with refused(MismatchError, trace.path, *facts):
            Trace(trace.path)

    refuses(10, "1,000,000,000,000,000", tokens=10**15)
    refuses("tokens", -1, tokens=-1)
    refuses(3, 10, requests=3)
    refuses("ahead", -1, 0, ahead=-1)
    refuses("ahead", "1,000,000,000", ahead=10**9)
    refuses("resident", 1.5, "0 to 1", resident=1.5)
    refuses("columns", "colour", columns=[*whole["columns"], "colour"])
    refuses("columns", "experts", columns=["request"])
    refuses("composition.kind", None, composition={})
    refuses("files", "x.parquet", files={**whole["files"], "../x.parquet": {"bytes": 1, "sha256": ""}})
    refuses("spec.top_k_L.0", 0, spec={**whole["spec"], "top_k_L": [0, 2, 3]})
    refuses("num_experts_L", spec={**whole["spec"], "num_experts_L": "eight"})
    table = pq.read_table(trace.path / "requests.parquet")
    tokens = table["tokens"].to_pylist()
    moved = table.set_column(8, "tokens", pa.array([tokens[0] + 1, tokens[1] - 1], pa.int32()))
    _replace(trace.path, "requests.parquet", moved, whole)
    with refused(MismatchError, 5, 6, "request 0"):
        list(Trace(trace.path).batches())
    twice = table.set_column(0, "request", pa.array([0, 0], pa.int32()))
    _replace(trace.path, "requests.parquet", twice, whole)
    with refused(MismatchError, "order", "repeated"):
        Trace(trace.path)
    other = table.set_column(0, "request", pa.array([0, 9], pa.int32()))
    _replace(trace.path, "requests.parquet", other, whole)
    with refused(MismatchError, "request 1"):
        list(Trace(trace.path).batches())
    empty = table.set_column(1, "dataset", pa.array(["d", None], pa.string()))
    _replace(trace.path, "requests.parquet", empty, whole)
    with refused(MismatchError, "dataset"):
        Trace(trace.path)


def _replace(folder: Path, name: str, table: pa.Table, manifest: dict[str, Any]) -> None:
    """Write a file of a trace anew, and its size and checksum into the manifest."""
    pq.write_table(table, folder / name)
    fact = {"bytes": (folder / name).stat().st_size, "sha256": durable.sha256_file(folder / name)}
    changed = {**manifest, "files": {**manifest["files"], name: fact}}
    (folder / "manifest.json").write_text(json.dumps(changed))


def test_rows_without_values_are_refused(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.alone(LENGTHS), LENGTHS)
    name = next(name for name in trace.manifest["files"] if name.startswith("tokens/"))
    table = pq.read_table(trace.path / name)
    values = table["experts"].to_pylist()
    values[0] = None
    table = table.set_column(table.schema.names.index("experts"), "experts", pa.array(values, table["experts"].type))
    _replace(trace.path, name, table, trace.manifest)
    with pytest.raises(MismatchError, match=r"column experts lacks values|is damaged \(Expected all lists"):
        list(Trace(trace.path).batches())


def test_pipes_in_the_place_of_files_are_refused(tmp_path: Path) -> None:
    for name in ("manifest.json", "requests.parquet"):
        trace = traces.write(tmp_path / name, traces.alone(LENGTHS), LENGTHS)
        (trace.path / name).unlink()
        os.mkfifo(trace.path / name)
        with pytest.raises(MismatchError, match="again"):
            Trace(trace.path)


def test_counts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    spec = make_spec()

    def written(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        write_counts(folder, Counted(spec=spec, counts_WLE=np.ones((2, 3, 8), np.int64)), {})
        if changes:
            manifest = json.loads((folder / "manifest.json").read_text())
            (folder / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        return folder

    assert ExpertCounts(written("good")).num_tokens == 8
    for name, changes, says in (
        ("spec", {"spec": {**spec.to_json(), "top_k_L": [0, 0, 0]}}, "spec.top_k_L.0: found 0"),
        ("layers", {"spec": make_spec(layers=10).to_json()}, "expected .* 10 layers x 8"),
        ("huge", {"spec": {**spec.to_json(), "num_experts_L": [10**9] * 3}}, "expected at most 65,536"),
        ("files", {"files": 3}, "damaged"),
        ("provenance", {"provenance": 3}, "provenance"),
    ):
        with pytest.raises(MismatchError, match=says) as caught:
            ExpertCounts(written(name, **changes))
        assert "import it again" in str(caught.value)
    folder = written("negative")
    table = pq.read_table(folder / FILE)
    values = [[-1] * 24, [1] * 24]
    table = table.set_column(1, "tokens", pa.array(values, table["tokens"].type))
    _replace(folder, FILE, table, json.loads((folder / "manifest.json").read_text()))
    with refused(MismatchError, -1):
        ExpertCounts(folder)
    (folder / FILE).unlink()
    os.mkfifo(folder / FILE)
    with refused(MismatchError, "named pipe"):
        ExpertCounts(folder)
    with refused(UsageError, "no counts"):
        ExpertCounts(tmp_path / "none")
