"""Reading traces: every column comes back, in both orders, and damage is refused in one line."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from moetool.base.artefact import KINDS
from moetool.base.errors import MismatchError, MoetoolError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.plan import CachePlan
from moetool.costing.costs import CostProfile
from moetool.placement.plan import MigrationPlan, PlacementPlan
from moetool.trace import reader as trace_module
from moetool.trace import writer as trace_writer
from moetool.trace.events import router_scores
from moetool.trace.reader import Trace
from moetool.trace.rows import SIGNALS, TokenBatch
from tests import traces
from tests.traces import SPEC

LENGTHS = [(20, 10), (5, 8), (1, 1), (30, 3)]
COLUMNS = ("weights", *SIGNALS)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several row groups a part and several parts a trace."""
    monkeypatch.setattr(trace_module, "BATCH_TOKENS", 8)
    monkeypatch.setattr(trace_writer, "ROW_GROUP_TOKENS", 8)
    monkeypatch.setattr(trace_writer, "PART_TOKENS", 24)


@pytest.fixture
def batched(tmp_path: Path) -> Trace:
    return traces.write(tmp_path / "batched", traces.together(LENGTHS), LENGTHS, composition={"kind": "log"})


@pytest.fixture
def sequential(tmp_path: Path) -> Trace:
    return traces.write(tmp_path / "sequential", traces.alone(LENGTHS), LENGTHS)


def same(a: TokenBatch, b: TokenBatch) -> bool:
    columns = [(getattr(a, name), getattr(b, name)) for name in a.__slots__]
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in columns)


def refused(action: Callable[[], object], *parts: str, kind: type[MoetoolError] = MismatchError) -> None:
    """The action raises `kind`, whose message is one line with all `parts`."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert [part for part in parts if part not in message] == [], message


def read_everything(path: Path) -> None:
    trace = Trace(path)
    for order in (True, False):
        list(trace.forwards(sequential=order, columns=["weights", "logits"]))
    list(trace.batches(COLUMNS))
    list(trace.embeddings())


def test_every_column_comes_back(batched: Trace) -> None:
    assert len(list((batched.path / "tokens").iterdir())) > 1
    assert pq.ParquetFile(batched.path / "tokens" / "part-00000.parquet").num_row_groups > 1
    read = TokenBatch.concatenate(list(batched.batches(COLUMNS)))
    assert same(read, TokenBatch.concatenate(traces.together(LENGTHS)))
    assert len(read) == batched.num_tokens
    assert batched.columns == {*trace_module.ALWAYS, "weights", *traces.EVERY} - {"topk"}


def test_columns_that_were_not_asked_for_are_none(batched: Trace) -> None:
    for batch in batched.batches(["logits"]):
        assert batch.logits_TF is not None
        assert batch.weights_TS is None
        assert batch.hidden_TH is None


def test_requests_and_embeddings_come_back(batched: Trace) -> None:
    assert batched.requests.to_pylist() == [
        {
            "request": i,
            "dataset": "d",
            "task": f"t{i}",
            "prompt_id": str(i),
            "prompt_tokens": prompt,
            "new_tokens": new,
            "label": "",
            "pair": "",
            "tokens": prompt + new - 1,
        }
        for i, (prompt, new) in enumerate(LENGTHS)
    ]
    embeddings = list(batched.embeddings())
    assert [(r, i) for r, i, _ in embeddings] == [(r, i) for r, (_, new) in enumerate(LENGTHS) for i in range(new)]
    assert all(np.array_equal(e, np.full(SPEC.hidden_size, r + i / 8, np.float16)) for r, i, e in embeddings)


def test_layers_have_their_offsets_in_the_schema(batched: Trace) -> None:
    metadata = pq.read_schema(batched.path / "tokens" / "part-00000.parquet").metadata
    assert json.loads(metadata[b"moetool.top_k_offsets"]) == [0, 2, 4, 7]
    assert json.loads(metadata[b"moetool.expert_offsets"]) == [0, 8, 16, 22]


def test_the_manifest_accounts_for_the_files(batched: Trace) -> None:
    written = {f.relative_to(batched.path).as_posix() for f in batched.path.rglob("*.parquet")}
    assert set(batched.manifest["files"]) == written
    assert batched.manifest["provenance"] == {"made by": "a test"}
    assert batched.spec == SPEC
    batched.verify()


def check_forward(info: ForwardInfo, events: list[GateEvent], expected: TokenBatch) -> None:
    assert info.request_T == tuple(expected.request_T)
    assert info.position_T == tuple(expected.position_T)
    assert info.phase_T == tuple(expected.phase_T)
    assert [event.layer for event in events] == [0, 1, 2]
    top, wide = [0, 2, 4, 7], [0, 8, 16, 22]
    assert expected.weights_TS is not None
    assert expected.logits_TF is not None
    for layer, event in enumerate(events):
        experts = expected.experts_TS[:, top[layer] : top[layer + 1]]
        logits = expected.logits_TF[:, wide[layer] : wide[layer + 1]].astype(np.float32)
        assert event.experts_TK == tuple(map(tuple, experts.tolist()))
        assert event.needed == tuple(np.unique(experts))
        assert event.weights_TK is not None
        assert event.weights_TK.dtype == np.float32
        assert np.array_equal(event.weights_TK, expected.weights_TS[:, top[layer] : top[layer + 1]])
        assert event.scores_TE is not None
        assert np.array_equal(event.scores_TE, router_scores(logits, "softmax"))


def test_forwards_as_they_were_recorded(batched: Trace) -> None:
    forwards = list(batched.forwards(sequential=False, columns=["weights", "logits"]))
    expected = traces.together(LENGTHS)
    assert [info.forward_id for info, _ in forwards] == list(range(len(expected)))
    for (info, events), rows in zip(forwards, expected, strict=True):
        check_forward(info, events, rows)


def test_a_batch_read_sequentially_is_each_request_alone(batched: Trace) -> None:
    forwards = list(batched.forwards(sequential=True, columns=["weights", "logits"]))
    recorded = TokenBatch.concatenate(traces.together(LENGTHS))
    expected = []
    for request, (_, new) in enumerate(LENGTHS):
        mine = recorded.select(recorded.request_T == request)
        expected += [mine.select(mine.iteration_T == iteration) for iteration in range(new)]
    assert [info.forward_id for info, _ in forwards] == list(range(len(expected)))
    for (info, events), rows in zip(forwards, expected, strict=True):
        check_forward(info, events, rows)
        assert info.prefill == (rows.phase_T[0] == Phase.PREFILL)


def test_a_sequential_trace_reads_the_same_in_both_orders(sequential: Trace) -> None:
    recorded = [(info, [e.experts_TK for e in events]) for info, events in sequential.forwards(sequential=False)]
    alone = [(info, [e.experts_TK for e in events]) for info, events in sequential.forwards(sequential=True)]
    assert recorded == alone


def test_a_prompt_that_came_in_chunks_is_one_forward_when_read_sequentially(tmp_path: Path) -> None:
    chunks = [traces.rows(0, 0, 0, range(6)), traces.rows(0, 1, 0, range(6, 10)), traces.rows(0, 2, 1, [10])]
    trace = traces.write(tmp_path / "t", chunks, [(10, 2)])
    assert [len(info.request_T) for info, _ in trace.forwards(sequential=True)] == [10, 1]
    assert [len(info.request_T) for info, _ in trace.forwards(sequential=False)] == [6, 4, 1]


@pytest.mark.parametrize("order", [True, False])
def test_only_some_requests(batched: Trace, order: bool) -> None:
    forwards = list(batched.forwards(sequential=order, requests=frozenset({1, 3})))
    assert {request for info, _ in forwards for request in info.request_T} == {1, 3}
    assert [info.forward_id for info, _ in forwards] == list(range(len(forwards)))
    assert sum(len(info.request_T) for info, _ in forwards) == 5 + 7 + 30 + 2


def test_an_empty_trace(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", [], [])
    assert trace.num_tokens == 0
    assert list(trace.forwards(sequential=True)) == list(trace.forwards(sequential=False)) == []
    assert list(trace.embeddings()) == []


def test_require_names_the_flag(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.alone([(4, 2)]), [(4, 2)], keep=["topk"])
    trace.require(["experts", "weights"], "anyone")
    refused(lambda: trace.require(["logits"], "finemoe"), "finemoe needs logits", "--keep topk,logits")
    refused(lambda: trace.require(["hidden", "embeddings"], "x"), "needs embeddings, hidden", "topk,embeddings,hidden")
    refused(lambda: list(trace.batches(["hidden"])), "--keep topk,hidden")
    refused(lambda: list(trace.embeddings()), "--keep topk,embeddings")


def test_scores() -> None:
    logits = np.array([[0.0, 1.0, -500.0]], np.float32)
    assert np.allclose(router_scores(logits, "softmax"), [[0.26894142, 0.73105858, 0]])
    assert np.allclose(router_scores(logits[:, :2], "sigmoid"), [[0.5, 0.73105858]])


def test_no_trace_is_refused(tmp_path: Path) -> None:
    refused(lambda: Trace(tmp_path / "absent"), "no trace at", "moetool capture", kind=UsageError)
    refused(lambda: Trace(tmp_path), "no manifest.json", "capture again")


@pytest.mark.parametrize("name", ["requests.parquet", "tokens/part-00001.parquet", "iterations/part-00000.parquet"])
def test_missing_and_truncated_files_are_refused(batched: Trace, name: str) -> None:
    file = batched.path / name
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size // 2)
    refused(lambda: Trace(batched.path), str(file), f"{size // 2:,} bytes long", f"expected {size:,}", "again")
    file.unlink()
    refused(lambda: Trace(batched.path), str(file), "is missing", "again")


@pytest.mark.parametrize("name", ["requests.parquet", "tokens/part-00001.parquet", "iterations/part-00000.parquet"])
def test_a_flipped_bit_anywhere_is_refused(batched: Trace, name: str) -> None:
    file = batched.path / name
    whole = file.read_bytes()
    draw = random.Random(0)
    for at in (4, len(whole) // 3, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(20))):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        refused(lambda: read_everything(batched.path), str(file), "capture again")
        refused(lambda: Trace(batched.path).verify(), str(file))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"schema_version": 2}, "version 2, expected a trace of version 1"),
        ({"kind": "plan"}, "holds plan"),
        ({"files": None}, "damaged"),
        ({"spec": {"name": "x"}}, "model spec"),
        ({"spec": SPEC.to_json() | {"hidden_size": 8}}, "column hidden"),
        ({"spec": SPEC.to_json() | {"top_k_L": [2, 2, 2]}}, "column experts"),
    ],
)
def test_a_manifest_of_something_else_is_refused(batched: Trace, change: dict, found: str) -> None:
    file = batched.path / "manifest.json"
    file.write_text(json.dumps(batched.manifest | change))
    refused(lambda: read_everything(batched.path), found)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "\xff"])
def test_a_damaged_manifest_is_refused(batched: Trace, text: str) -> None:
    (batched.path / "manifest.json").write_bytes(text.encode("latin-1"))
    refused(lambda: Trace(batched.path), str(batched.path), "again")


def test_files_that_the_manifest_does_not_know_are_ignored(batched: Trace) -> None:
    shutil.copy(batched.path / "tokens" / "part-00000.parquet", batched.path / "tokens" / "part-99999.parquet")
    assert sum(map(len, batched.batches())) == batched.num_tokens


def test_tokens_that_are_missing_are_noticed(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "t", traces.together(LENGTHS), LENGTHS)
    del trace.manifest["files"]["tokens/part-00001.parquet"]
    (trace.path / "manifest.json").write_text(json.dumps(trace.manifest))
    refused(lambda: list(Trace(trace.path).forwards(sequential=True)), "tokens of request", "capture again")


def test_every_kind_of_plan_or_profile_is_recognised_in_the_place_of_a_trace(tmp_path: Path) -> None:
    assert set(KINDS) == {artefact.KIND for artefact in (CachePlan, CostProfile, MigrationPlan, PlacementPlan)}
    for kind in KINDS:
        (tmp_path / kind).write_text(json.dumps({"kind": kind}))
        with pytest.raises(UsageError, match=f"is of kind {kind}, expected a trace"):
            Trace(tmp_path / kind)
