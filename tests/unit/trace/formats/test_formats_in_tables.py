"""policylang's Parquet and moe-cache-lab's JSONL: what they say arrives, what is wrong with them is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, MoetoolError
from moetool.trace.foreign.importing import import_trace
from moetool.trace.reader import Trace
from moetool.trace.rows import TokenBatch
from tests import foreign
from tests.foreign import EXPERTS, IDS, PROMPT, ROUTES

SAID = {"expert_bytes": 1000}


def rows_of(path: Path, columns: tuple[str, ...] = ()) -> list[TokenBatch]:
    trace = Trace(path)
    trace.verify()
    return list(trace.whole_requests(columns))


def refused(message: str, file: Path, format: str, said: dict[str, Any] = SAID) -> None:
    with pytest.raises(MoetoolError, match=message) as refusal:
        import_trace([file], format, file.parent / "refused", settings=said)
    assert "\n" not in str(refusal.value)
    assert not (file.parent / "refused").exists()


def test_policylang_brings_experts_weights_logits_ids_and_tasks(tmp_path: Path) -> None:
    file = foreign.write_policylang(tmp_path / "p.parquet")
    made = import_trace([file], "policylang", tmp_path / "t", settings=SAID)
    trace = Trace(tmp_path / "t")
    assert trace.spec.layer_ids_L == (1, 2, 3) and trace.spec.num_experts == EXPERTS and trace.spec.renormalize
    assert {"weights", "logits"} < trace.columns and trace.spec.has_logits_L == (True,) * 3
    # prompt 3 is request b, prompt 7 request a
    assert trace.requests["prompt_id"].to_pylist() == ["code/3", "law/7"]
    assert trace.requests["prompt_tokens"].to_pylist() == [PROMPT["b"], PROMPT["a"]]
    for name, rows in zip("ba", rows_of(tmp_path / "t", ("weights", "logits")), strict=True):
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.token_id_T.tolist() == IDS[name]
        assert rows.weights_TS is not None and rows.logits_TF is not None
        assert (rows.weights_TS.reshape(-1, 2) == [0.75, 0.25]).all()
        top = np.argsort(-rows.logits_TF.reshape(-1, 3, EXPERTS), axis=2, kind="stable")[..., :2]
        assert (top == ROUTES[name]).all()
    assert made.tasks == ["code", "law"]


def test_policylang_without_scores_or_phases(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("router_scores", "router_softmax", "router_logits", "phase", "token_id", "domain_tag"))
    file = foreign.write_policylang(tmp_path / "p.parquet", **nothing)
    refused("lacks num_experts", file, "policylang")
    import_trace([file], "policylang", tmp_path / "t", tokens_as="prefill", settings={**SAID, "num_experts": 8})
    trace = Trace(tmp_path / "t")
    assert not {"weights", "logits"} & trace.columns
    assert trace.requests["task"].to_pylist() == ["p", "p"]
    assert trace.requests["new_tokens"].to_pylist() == [0, 0]
    # scores of all experts and none of the selected: the weights are those of the selected
    only = {**dict.fromkeys(("router_scores", "router_logits"))}
    file = foreign.write_policylang(tmp_path / "q.parquet", **only)
    import_trace([file], "policylang", tmp_path / "u", settings=SAID)
    weights = rows_of(tmp_path / "u", ("weights",))[0].weights_TS
    assert weights is not None
    expected = np.exp([4.0, 3.0]) / np.exp(4.0)  # up to the common divisor
    ratios = weights.reshape(-1, 2).astype(np.float64)
    assert np.allclose(ratios[:, 1] / ratios[:, 0], expected[1] / expected[0], rtol=2e-3)


def _at(name: str, i: int, value: Any) -> dict[str, list[Any]]:
    column = list(foreign.policylang_columns()[name])
    column[i] = value
    return {name: column}


def _first(name: str, **where: int) -> int:
    columns = foreign.policylang_columns()
    return next(i for i in range(len(columns[name])) if all(columns[key][i] == v for key, v in where.items()))


_DROPPED = {name: column[1:] for name, column in foreign.policylang_columns().items()}
_TWICE = {name: [*column, column[0]] for name, column in foreign.policylang_columns().items()}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (_DROPPED, "lacks a layer near token"),
        (_TWICE, "lacks a layer near token .* or has it twice"),
        ({"prompt_id": None}, "no column prompt_id"),
        ({"selected_experts": None}, "no column selected_experts"),
        (_at("selected_experts", 4, [1]), "selected_experts of different lengths"),
        (_at("selected_experts", 4, None), "empty cells in selected_experts"),
        (_at("selected_experts", 4, [3, 3]), "expected 2 different ones"),
        (_at("selected_experts", 4, [-1, 3]), "expert -1"),
        (_at("selected_experts", 4, [8, 3]), "expert 8"),
        (_at("router_scores", 4, [float("nan"), 0.5]), "not finite"),
        (_at("router_scores", 4, [0.5]), "router_scores of different lengths"),
        (_at("router_logits", 4, [float("inf")] * 8), "router_logits that are not finite"),
        (_at("token_idx", 4, -1), "below 0"),
        (_at("token_idx", 4, 2**40), "token_idx of type int64"),
        (_at("phase", _first("phase", prompt_id=7, token_idx=0, layer_idx=1), "warmup"), "phase 'warmup'"),
        (
            _at("phase", _first("phase", prompt_id=7, token_idx=0, layer_idx=1), "decode"),
            "prompt rows after new tokens",
        ),
        (_at("domain_tag", _first("phase", prompt_id=7, token_idx=1, layer_idx=1), "chat"), "several domain tags"),
        ({name: [] for name in foreign.policylang_columns()}, "of type null|no rows"),
    ],
)
def test_a_wrong_policylang_file_is_refused(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    refused(message, foreign.write_policylang(tmp_path / "p.parquet", **columns), "policylang")


def test_a_damaged_policylang_file_is_refused(tmp_path: Path) -> None:
    file = foreign.write_policylang(tmp_path / "p.parquet")
    whole = file.read_bytes()
    for part in (whole[:-9], b"", b"not parquet at all"):
        file.write_bytes(part)
        refused("not a complete Parquet file", file, "policylang")


def test_moe_cache_lab_brings_experts_weights_and_ids(tmp_path: Path) -> None:
    files = [foreign.write_lines(tmp_path / f"{n}.jsonl", *foreign.moe_cache_lab_records(n)) for n in "ab"]
    import_trace(files, "moe_cache_lab", tmp_path / "t", settings=SAID)
    trace = Trace(tmp_path / "t")
    assert trace.spec.name == "lab/tiny" and trace.spec.layer_ids_L == (1, 2, 3)
    assert trace.requests["task"].to_pylist() == ["a", "b"]
    for name, rows in zip("ab", rows_of(tmp_path / "t", ("weights",)), strict=True):
        assert (rows.experts_TS.reshape(ROUTES[name].shape) == ROUTES[name]).all()
        assert rows.token_id_T.tolist() == IDS[name]
        assert rows.phase_T.tolist() == [int(t >= PROMPT[name]) for t in range(len(rows))]
        assert rows.weights_TS is not None and (rows.weights_TS.reshape(-1, 2) == [0.5, 0.25]).all()
    made = import_trace(files, "moe_cache_lab", tmp_path / "u", settings={**SAID, "task": "law", "drop_tokens": True})
    assert all(set(rows.token_id_T.tolist()) == {-1} for rows in rows_of(tmp_path / "u"))
    assert made.tasks == ["law"]
    assert Trace(tmp_path / "u").requests["prompt_id"].to_pylist() == ["law/a", "law/b"]


def test_moe_cache_lab_may_leave_out_what_is_optional(tmp_path: Path) -> None:
    records = foreign.moe_cache_lab_records()
    for name in ("num_experts", "experts_per_token"):
        del records[0][name]
    for event in records[1:]:
        del event["token_id"]
        event["selected_probabilities"] = []
    file = foreign.write_lines(tmp_path / "a.jsonl", *records)
    refused("lacks num_experts", file, "moe_cache_lab")
    import_trace([file], "moe_cache_lab", tmp_path / "t", settings={**SAID, "num_experts": 8})
    assert "weights" not in Trace(tmp_path / "t").columns
    assert set(rows_of(tmp_path / "t")[0].token_id_T.tolist()) == {-1}


Records = list[dict[str, Any]]


def _event(i: int, **values: Any) -> Callable[[Records], Any]:
    return lambda records: records[i].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop(0), "begins with .'routing_selection'"),
        (_event(0, format_version=2), "'moe-cache-lab.routing-jsonl', 2., expected"),
        (_event(0, model_id=""), "no model_id"),
        (_event(0, num_experts=0), "num_experts 0 in its metadata"),
        (_event(0, num_experts=4), "uses expert|expected 0 to 3"),
        (lambda r: r.__delitem__(slice(1, None)), "no routing_selection"),
        (lambda r: r.pop(3), "lacks layer 1 of the token at 2"),
        (lambda r: r.pop(), "lacks layer 3 of the token at 6"),
        (lambda r: r.insert(2, dict(r[1])), "line 3 is layer 1 of the token at 0 again"),
        (lambda r: r.insert(1, r.pop(2)), "line 3 is out of order"),
        (lambda r: r.insert(1, r.pop()), "is out of order"),
        (_event(2, selected_experts=[1]), "expected 2 different ones"),
        (_event(2, selected_experts=[1, 1]), "expected 2 different ones"),
        (_event(2, selected_experts=[-1, 1]), "expected numbers from 0"),
        (_event(2, selected_experts=[1, 8]), "uses expert 8"),
        (_event(2, selected_experts=[1, 2.0]), "expected numbers from 0"),
        (_event(2, selected_experts=[True, 2]), "expected numbers from 0"),
        (_event(2, layer="1"), "expected numbers from 0"),
        (_event(2, token_position=2**40), "expected numbers from 0"),
        (_event(2, selected_probabilities=[0.5]), "the probabilities .0.5., expected none or 2"),
        (_event(2, selected_probabilities=1.5), "the probabilities 1.5, expected none or 2"),
        (_event(2, selected_probabilities=[0.5, 1.5]), "expected numbers from 0 to 1"),
        (_event(2, selected_probabilities=[0.5, float("nan")]), "expected numbers from 0 to 1"),
        (_event(2, phase="warmup"), "of phase 'warmup'"),
        (_event(2, token_id=99), "several phases or token ids"),
        (_event(2, record_type="metadata"), "is a 'metadata'"),
    ],
)
def test_a_wrong_moe_cache_lab_file_is_refused(tmp_path: Path, change: Callable[[Records], Any], message: str) -> None:
    records = foreign.moe_cache_lab_records()
    change(records)
    refused(message, foreign.write_lines(tmp_path / "a.jsonl", *records), "moe_cache_lab")


def test_a_damaged_moe_cache_lab_file_is_refused(tmp_path: Path) -> None:
    file = foreign.write_lines(tmp_path / "a.jsonl", *foreign.moe_cache_lab_records())
    whole = file.read_bytes()
    line = json.dumps(foreign.moe_cache_lab_records()[1])
    for part, message in [
        (whole[:-30], "is not JSON"),
        (b"", "begins with"),
        (b"\xff" + whole, "is not text"),
        (whole + b"[1, 2]\n", "holds no JSON object"),
        (whole.replace(line.encode(), (line[:-1] + ', "layer": 1}').encode()), "'layer' twice"),
        (whole + b'{"a":' * 50_000, "nested deeper"),
    ]:
        file.write_bytes(part)
        refused(message, file, "moe_cache_lab")
    with pytest.raises(MismatchError):
        import_trace([file], "moe_cache_lab", tmp_path / "t", settings={**SAID, "task": "x"})
