"""Routes of real models go through the engines' formats and come back, and replay the same."""

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moetool.trace.edit import head
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.tuning.replay import replay
from tests.published_routes import DEEPSEEK, QWEN, SHARED, needs_routes

pytestmark = needs_routes


def rows_of(trace: Trace) -> TokenBatch:
    return TokenBatch.concatenate(list(trace.batches(trace.columns & {"weights"})))


def test_deepseek_v2_lite_goes_through_vllm_and_replays_the_same(tmp_path: Path) -> None:
    import_trace([DEEPSEEK / "law.parquet"], "topk_parquet", tmp_path / "law")
    trace = head(Trace(tmp_path / "law"), tmp_path / "some", requests=2)
    assert trace.spec.layer_ids_L == tuple(range(1, 27))  # layer 0 has no experts
    export_trace(trace.path, "vllm_routed_experts", tmp_path / "v.jsonl")
    said = {"first_k_dense": 1, "num_experts": 64, "expert_bytes": trace.spec.slot_bytes}
    import_trace([tmp_path / "v.jsonl"], "vllm_routed_experts", tmp_path / "v", settings=said)
    again = Trace(tmp_path / "v")
    assert again.spec.layer_ids_L == trace.spec.layer_ids_L
    assert np.array_equal(rows_of(again).experts_TS, rows_of(trace).experts_TS)
    budgets = [400 * trace.spec.slot_bytes]
    before, after = (replay(one, ["lru"], budgets)[0] for one in (trace, again))
    assert before.counts == after.counts and before.counts.hit_rate > 0


@pytest.mark.parametrize("file", sorted(SHARED.glob("data/routes/*/*.parquet")), ids=lambda file: file.stem)
def test_published_files_come_back_as_they_are(file: Path, tmp_path: Path) -> None:
    assert import_trace([file], None, tmp_path / "t").format == "topk_parquet"
    export_trace(tmp_path / "t", "topk_parquet", tmp_path / "out.parquet")
    given, made = pq.read_table(file), pq.read_table(tmp_path / "out.parquet")
    assert given["position"].to_pylist() == made["position"].to_pylist()
    for name in ("expert_ids", "weights"):
        mine, theirs = (table[name].combine_chunks().flatten().to_numpy() for table in (made, given))
        assert np.array_equal(mine, theirs)
    for fact in (b"task", b"num_experts"):
        assert made.schema.metadata[fact] == given.schema.metadata[fact]
    sequences = Counter(given["sequence"].to_pylist())
    assert Counter(made["sequence"].to_pylist()) == sequences
    trace = Trace(tmp_path / "t")
    assert len(trace.requests) == len(sequences) and trace.num_tokens == len(given)
    listed = file.with_name("requests.csv")
    if listed.is_file():  # the published size of each request
        with listed.open(newline="") as text:
            rows = {int(row["sequence_in_file"]): row for row in csv.DictReader(text) if row["dataset"] == file.stem}
        assert sequences == {number: int(row["rows"]) for number, row in rows.items()}


def test_qwen3_comes_back_row_by_row(tmp_path: Path) -> None:
    file = QWEN
    import_trace([file], "route_csv", tmp_path / "t")
    export_trace(tmp_path / "t", "route_csv", tmp_path / "out.csv")

    def rows(path: Path) -> dict[tuple[str, ...], float]:
        lines = [line.split(",") for line in path.read_text().splitlines() if line[:1].isdigit()]
        return {tuple(line[:6]): float(line[6]) for line in lines}

    given, made = rows(file), rows(tmp_path / "out.csv")
    assert given.keys() == made.keys()
    assert max(abs(given[key] - made[key]) for key in given) < 5e-4  # weights are float16 in a trace
    import_trace([tmp_path / "out.csv"], "route_csv", tmp_path / "again")
    budgets = [500 << 20]
    before, after = (replay(Trace(tmp_path / name), ["lru"], budgets)[0] for name in ("t", "again"))
    assert before.counts == after.counts
