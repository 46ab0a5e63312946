"""Importing published routes: what the files say arrives, what they lack is said, what is wrong is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import UNKNOWN_BYTES, Phase
from moetool.trace.foreign.importing import formats_with, import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from moetool.tuning.replay import replay
from tests.refusals import refused
from tests.synthetic import make_spec, random_experts

LAYERS, EXPERTS, TOP_K, PROMPT, TOKENS = 3, 8, 2, 4, 7
SIZES = (300, 200, 300)
ROUTES = random_experts(make_spec(LAYERS, EXPERTS, TOP_K), TOKENS, np.random.default_rng(0))
META = {
    "model": "lab/tiny",
    "moe_layers": "1..3 (layer 0 is dense)",
    "num_experts": str(EXPERTS),
    "top_k": str(TOP_K),
    "layout": "expert_ids and weights are [layer, k] flattened row-major",
    "task": "law",
    "expert_bytes": "1000",
}
HEADER = [
    "# route_trace v1",
    f"# model=/a path/Tiny-Q4.gguf arch=tiny n_layer=4 n_expert={EXPERTS} n_expert_used={TOP_K}",
    "# layer=0 expert_bytes=0 dense_bytes=7",
    *(f"# layer={layer} expert_bytes={size} dense_bytes=7" for layer, size in enumerate(SIZES, 1)),
    "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
]


def csv_rows(turn: int = 0) -> list[str]:
    """A prompt of which only the last token has experts in the last layer, then new tokens."""
    return [
        f"{turn},{int(token >= PROMPT)},{token},{layer + 1},{slot},{ROUTES[token, layer, slot]},{0.75 - slot / 2},1,0"
        for token in range(TOKENS)
        for layer in range(LAYERS - (token < PROMPT - 1))
        for slot in range(TOP_K)
    ]


def write_csv(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def parquet_columns() -> dict[str, pa.Array]:
    """Two sequences, of 4 and 3 tokens."""
    flat = ROUTES.reshape(-1)
    weights = np.tile(np.array([0.1, 0.5], np.float16), TOKENS * LAYERS)
    width = LAYERS * TOP_K
    return {
        "sequence": pa.array([0] * 4 + [5] * 3, pa.int32()),
        "position": pa.array([0, 1, 2, 3, 0, 1, 2], pa.int32()),
        "expert_ids": pa.FixedSizeListArray.from_arrays(pa.array(flat.astype(np.int16)), width),
        "weights": pa.FixedSizeListArray.from_arrays(pa.array(weights), width),
    }


def write_parquet(path: Path, columns: dict[str, pa.Array] | None = None, **metadata: str | None) -> Path:
    meta = {key: value for key, value in {**META, **metadata}.items() if value is not None}
    pq.write_table(pa.table(columns or parquet_columns()).replace_schema_metadata(meta), path)
    return path


def rows_of(trace: Trace) -> TokenBatch:
    return TokenBatch.concatenate(list(trace.batches(["weights"])))


def test_a_route_csv_becomes_a_prompt_and_a_forward_for_each_new_token(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "r.csv", HEADER + csv_rows())
    made = import_trace([file], "route_csv", tmp_path / "t")
    trace = Trace(tmp_path / "t")
    trace.verify()
    spec = trace.spec
    assert (spec.name, spec.layer_ids_L, spec.expert_bytes_L) == ("Tiny-Q4", (1, 2, 3), SIZES)
    assert (spec.num_experts, spec.top_k_L, spec.has_logits_L) == (EXPERTS, (TOP_K,) * 3, (False,) * 3)
    assert spec.renormalize
    assert (made.requests, made.tokens, made.tasks) == (1, TOKENS, ["conversation"])
    rows = rows_of(trace)
    assert rows.phase_T.tolist() == [Phase.PREFILL] * PROMPT + [Phase.DECODE] * 3
    assert rows.iteration_T.tolist() == rows.forward_T.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert set(rows.token_id_T.tolist()) == {-1}
    experts = rows.experts_TS.reshape(TOKENS, LAYERS, TOP_K)
    assert (experts[:, :-1] == ROUTES[:, :-1]).all()
    assert (experts[PROMPT - 1 :, -1] == ROUTES[PROMPT - 1 :, -1]).all()
    assert (experts[:PROMPT, -1] == ROUTES[PROMPT - 1, -1]).all()  # the union of the prompt is the recorded one
    assert rows.weights_TS is not None
    weights = rows.weights_TS.reshape(TOKENS, LAYERS, TOP_K)
    assert not weights[: PROMPT - 1, -1].any()
    assert (weights[:, :-1] == [0.75, 0.25]).all()
    imported = trace.manifest["provenance"]["imported"]
    assert imported["files"][0]["sha256"] == durable.sha256_file(file)
    assert (imported["format"], imported["as"]) == ("route_csv", None)
    assert any("3 of 4 prompt tokens have no experts in layer 3" in note for note in imported["notes"])


def test_each_turn_is_a_request(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "r.csv", HEADER + csv_rows() + csv_rows(1))
    import_trace([file], "route_csv", tmp_path / "t")
    trace = Trace(tmp_path / "t")
    assert trace.requests["prompt_id"].to_pylist() == ["conversation/0", "conversation/1"]
    assert trace.requests["prompt_tokens"].to_pylist() == [PROMPT, PROMPT]


@pytest.mark.parametrize("tokens_as", [None, "decode", "prefill"])
def test_top_k_parquet_keeps_order_and_weights(tmp_path: Path, tokens_as: str | None) -> None:
    import_trace([write_parquet(tmp_path / "law.parquet")], "topk_parquet", tmp_path / "t", tokens_as=tokens_as)
    trace = Trace(tmp_path / "t")
    rows = rows_of(trace)
    assert (rows.experts_TS.reshape(ROUTES.shape) == ROUTES).all()
    assert rows.weights_TS is not None
    assert (rows.weights_TS.reshape(-1, TOP_K) == np.array([0.1, 0.5], np.float16)).all()
    assert not trace.spec.renormalize
    assert trace.requests["prompt_id"].to_pylist() == ["law/0", "law/5"]
    assert rows.position_T.tolist() == [0, 1, 2, 3, 0, 1, 2]
    if tokens_as == "prefill":
        assert trace.requests["prompt_tokens"].to_pylist() == [4, 3]
        assert rows.forward_T.tolist() == [0] * 4 + [1] * 3
    else:
        assert trace.requests["new_tokens"].to_pylist() == [3, 2]
        assert rows.forward_T.tolist() == list(range(TOKENS))
    (row,) = replay(trace, ["lru"], [6000])
    assert row.decode_tokens == (0 if tokens_as == "prefill" else 5)


def test_several_files_of_one_model_are_tasks_of_one_trace(tmp_path: Path) -> None:
    law, code = write_parquet(tmp_path / "a.parquet"), write_parquet(tmp_path / "b.parquet", task="code")
    made = import_trace([law, code], "topk_parquet", tmp_path / "t")
    assert made.tasks == ["law", "code"]
    assert [task["task"] for task in Trace(tmp_path / "t").describe()["tasks"]] == ["code", "law"]
    alone = import_trace([code], "topk_parquet", tmp_path / "u")
    assert made.revision == alone.revision
    with refused(UsageError, "law"):
        import_trace([law, law], "topk_parquet", tmp_path / "v")
    other = write_parquet(tmp_path / "c.parquet", task="chat", model="lab/other")
    with refused(MismatchError, "lab/other"):
        import_trace([law, other], "topk_parquet", tmp_path / "v")


def test_experts_of_a_known_model_have_their_size(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", model="deepseek-ai/DeepSeek-V2-Lite", expert_bytes=None)
    import_trace([file], "topk_parquet", tmp_path / "t")
    assert Trace(tmp_path / "t").spec.slot_bytes == 17_301_504


@pytest.mark.parametrize("model", ["lab/other", "deepseek-ai/DeepSeek-V2-Lite"])
def test_a_given_size_of_experts_counts(tmp_path: Path, model: str) -> None:
    file = write_parquet(tmp_path / "a.parquet", model=model, expert_bytes=None)
    made = import_trace([file], "topk_parquet", tmp_path / "t", settings={"expert_bytes": 4096})
    assert Trace(tmp_path / "t").spec.slot_bytes == 4096
    assert not any("published config, in" in note or "size of an expert is unknown" in note for note in made.notes)


def test_an_unknown_size_of_experts_is_noted(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", model="lab/other", expert_bytes=None)
    made = import_trace([file], "topk_parquet", tmp_path / "t")
    assert Trace(tmp_path / "t").spec.slot_bytes == UNKNOWN_BYTES
    assert any("size of an expert is unknown" in note for note in made.notes)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    routes, law = write_csv(tmp_path / "r.csv", HEADER + csv_rows()), write_parquet(tmp_path / "law.parquet")
    out = tmp_path / "t"
    assert {"route_csv", "topk_parquet"} <= set(formats_with("read_routes"))
    with refused(UsageError, "route_csv"):
        import_trace([routes], "routes_csv", out)
    with refused(UsageError, "--as"):
        import_trace([routes], "route_csv", out, tokens_as="decode")
    with refused(UsageError, "decode"):
        import_trace([law], "topk_parquet", out, tokens_as="decod")
    with refused(UsageError, "no file"):
        import_trace([tmp_path / "none.csv"], "route_csv", out)
    with refused(MismatchError, "complete", "Parquet", "file"):
        import_trace([routes], "topk_parquet", out)
    with refused(MismatchError, "not text"):
        import_trace([law], "route_csv", out)
    assert not out.exists()
    import_trace([law], "topk_parquet", out)
    with refused(UsageError, "--overwrite"):
        import_trace([law], "topk_parquet", out)
    import_trace([routes], "route_csv", out, overwrite=True)
    assert json.loads((out / "manifest.json").read_text())["provenance"]["model"] == "Tiny-Q4"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("t")] == ["t"]


def _without(line: int) -> Callable[[list[str]], list[str]]:
    return lambda lines: lines[:line] + lines[line + 1 :]


def _replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda lines: [line.replace(old, new) for line in lines]


_FIRST = f"0,0,0,1,0,{ROUTES[0, 0, 0]},"
_SECOND = f"0,0,0,1,1,{ROUTES[0, 0, 1]},"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(0), "begins with '# model=.* expected '# route_trace v1'"),
        (_without(1), "has no line '# model="),
        (_replaced(" expert_bytes=", " x="), "expert_bytes for 0 layers"),
        (_replaced("slot,expert", "slot,colour"), "has the columns .*colour.*, expected turn, phase"),
        (_replaced("residency", "residency,more"), "has the columns .*more"),
        (lambda lines: lines[: len(HEADER)], "has no rows"),
        (lambda lines: lines[:-1], "turn 0, step 6, layer 3 has 1 rows, expected one for each of 2 slots"),
        (lambda lines: [*lines[:-1], lines[-1][:12]], r"line \d+: .* cut off or damaged"),
        (lambda lines: [*lines, lines[-1]], "step 6, layer 3 has 3 rows"),
        (lambda lines: lines[: len(HEADER)] + lines[len(HEADER) + 2 :], "step 0, layer 1 has 0 rows"),
        (lambda lines: [line for line in lines if not line.startswith("0,0,2,")], "has no step 2"),
        (_replaced("0,0,1,", "0,1,1,"), r"new tokens \(phase 1\) before"),
        (_replaced(_FIRST, "0,0,0,1,0,8,"), "layer 1 uses expert 8, expected 0 to 7"),
        (_replaced(_FIRST, "0,0,0,1,0,65536,"), "uses expert 65536"),
        (_replaced(_FIRST, f"0,0,0,1,0,{'9' * 30},"), "cut off or damaged"),
        (_replaced(_SECOND, f"0,0,0,1,1,{ROUTES[0, 0, 0]},"), "expected 2 different ones"),
        (_replaced(_FIRST, f"0,0,0,9,0,{ROUTES[0, 0, 0]},"), "has layer 9"),
        (_replaced(",0.75,", ",nan,"), "weights below 0 or not finite"),
    ],
)
def test_a_wrong_route_csv_is_refused(tmp_path: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    file = write_csv(tmp_path / "r.csv", change(HEADER + csv_rows()))
    with pytest.raises(MismatchError, match=message) as refusal:
        import_trace([file], "route_csv", tmp_path / "t")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "t").exists()


def _lists(values: np.ndarray, width: int = LAYERS * TOP_K) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)


def _zeroed(values: np.ndarray) -> np.ndarray:
    changed = values.copy()
    changed[:, 1] = 0
    return changed


_IDS = ROUTES.astype(np.int16)
_WEIGHTS = np.full(ROUTES.shape, 0.25, np.float16)


@pytest.mark.parametrize(
    ("columns", "metadata", "message"),
    [
        ({}, {"model": None}, "has no model in its schema metadata"),
        ({}, {"layout": "[k, layer]"}, r"expected \[layer, k\]"),
        ({}, {"moe_layers": "all"}, "expected a range such as '1..26'"),
        ({}, {"num_experts": "many"}, "num_experts 'many'"),
        ({}, {"top_k": "9"}, "top_k 9 of num_experts 8"),
        ({}, {"top_k": "3"}, "expert_ids of type .*6.* expected .*9"),
        ({}, {"expert_bytes": "few"}, "expert_bytes 'few'"),
        ({"more": pa.array(range(TOKENS))}, {}, "has the columns .*more, expected sequence"),
        ({"position": pa.array([0, 1, 3, 2, 0, 1, 2], pa.int32())}, {}, "sequence 0: position 3, expected 2"),
        ({"sequence": pa.array([0, 0, 0, 0, 1, 1, 0], pa.int32())}, {}, "row 6 begins it again"),
        ({"position": pa.array([0, 1, 2, 3, 0, None, 2], pa.int32())}, {}, "empty cells in position"),
        ({"position": pa.array([0, 1, 2, 3, 0, 1, 2], pa.int64())}, {}, "position of type int64"),
        ({"expert_ids": _lists(_IDS + 1)}, {}, "uses expert 8"),
        ({"expert_ids": _lists(_IDS * 0 + 3)}, {}, "expected 2 different ones"),
        ({"expert_ids": _lists(_zeroed(_IDS)), "weights": _lists(_zeroed(_WEIGHTS))}, {}, "layer 2 is all zero"),
        ({"weights": _lists(_zeroed(_WEIGHTS))}, {}, "layer 2 has no weight above 0"),
        ({"weights": _lists(-_WEIGHTS)}, {}, "weights below 0"),
    ],
)
def test_a_wrong_top_k_parquet_is_refused(
    tmp_path: Path, columns: dict[str, pa.Array], metadata: dict[str, str | None], message: str
) -> None:
    file = write_parquet(tmp_path / "r.parquet", {**parquet_columns(), **columns}, **metadata)
    with pytest.raises(MismatchError, match=message) as refusal:
        import_trace([file], "topk_parquet", tmp_path / "t")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "t").exists()


def test_a_damaged_parquet_is_refused(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "r.parquet")
    whole = file.read_bytes()
    for damaged in (whole[:-20], whole[20:], whole[:200] + bytes(200) + whole[400:], b""):
        file.write_bytes(damaged)
        with pytest.raises(MismatchError):
            import_trace([file], "topk_parquet", tmp_path / "t")
    empty = {name: column.slice(0, 0) for name, column in parquet_columns().items()}
    with refused(MismatchError, "no rows"):
        import_trace([write_parquet(file, empty)], "topk_parquet", tmp_path / "t")
