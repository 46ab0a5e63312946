"""Routes of real models go through the engines' formats and come back, and replay the same."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from moetool.trace.edit import head
from moetool.trace.foreign.exporting import export_trace
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.tuning.replay import replay
from tests.published_routes import DEEPSEEK, QWEN, needs_routes

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


def test_deepseek_v2_lite_comes_back_as_published(tmp_path: Path) -> None:
    file = DEEPSEEK / "translation.parquet"
    import_trace([file], "topk_parquet", tmp_path / "t")
    export_trace(tmp_path / "t", "topk_parquet", tmp_path / "out.parquet")
    given, made = pq.read_table(file), pq.read_table(tmp_path / "out.parquet")
    for name in ("position", "expert_ids", "weights"):
        assert given[name].to_pylist() == made[name].to_pylist()
    assert (made.schema.metadata[b"task"], made.schema.metadata[b"num_experts"]) == (b"translation", b"64")


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
