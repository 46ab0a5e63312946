"""Tokens out of a trace: whole, small, cut as they are known, and finite."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base import durable
from moetool.base.errors import MismatchError
from moetool.trace.reader import Trace
from moetool.trace.rows import KEEP
from moetool.trace.writer import TraceWriter
from moetool.training import tokens
from moetool.training.tokens import FIELDS, Picker, Tokens, num_tokens, read, stream
from tests.synthetic_routes import make_rows, make_spec, write_trace


def test_read_holds_the_requests_asked_for_as_the_events_show_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "IN_MEMORY", 0)  # everything wide goes to a file
    trace = Trace(write_trace(tmp_path / "trace", num_requests=4, keep=KEEP))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    held = read(trace, FIELDS, [1, 3], scratch)
    assert list(scratch.iterdir()) == []
    assert held.hidden_TPD is not None and held.hidden_TPD.dtype == torch.float16
    done = 0
    for info, events in trace.forwards(sequential=True, columns=FIELDS, requests=frozenset({1, 3})):
        part = held.take(slice(done, done + len(info.request_T)))
        done += len(part)
        assert part.request_T is not None and part.request_T.tolist() == list(info.request_T)
        assert part.token_id_T is not None and part.token_id_T.tolist() == list(info.token_id_T)
        np.testing.assert_array_equal(part.embedding_TD, info.embedding_TD)
        for event in events:
            assert part.experts_TPK[:, event.layer].tolist() == [list(row) for row in event.experts_TK]
            np.testing.assert_array_equal(part.hidden_TPD[:, event.layer], event.hidden_TD)
            np.testing.assert_allclose(part.scores_TPE[:, event.layer], event.scores_TE, rtol=1e-3, atol=1e-6)
            ahead_TAE = part.ahead_TPAE[:, event.layer]
            count = len(event.ahead_ATE)
            np.testing.assert_allclose(ahead_TAE[:, :count].transpose(0, 1), event.ahead_ATE, rtol=1e-3, atol=1e-6)
            assert not ahead_TAE[:, count:].any()
            assert part.resident_TPE is not None
            np.testing.assert_allclose(part.resident_TPE[:, event.layer], event.resident_TE, rtol=1e-3, atol=1e-6)
    assert done == len(held) == 40


def test_before_cuts_every_field_by_layer(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", num_requests=1, keep=KEEP))
    part = next(p for p in stream(trace, FIELDS, [0]) if len(p))
    cut = part.before(2)
    assert cut.num_layers == 2
    for name in ("experts_TPK", "weights_TPK", "scores_TPE", "hidden_TPD", "ahead_TPAE", "resident_TPE"):
        assert torch.equal(getattr(cut, name), getattr(part, name)[:, :2])
    assert cut.embedding_TD is part.embedding_TD and cut.request_T is part.request_T


@pytest.mark.parametrize(
    ("column", "name"),
    [("logits_TF", "logits"), ("hidden_TH", "hidden"), ("ahead_TR", "ahead"), ("resident_TW", "resident")],
)
def test_what_is_not_finite_is_refused(tmp_path: Path, column: str, name: str) -> None:
    spec = make_spec()
    with durable.staged_directory(tmp_path / "trace") as staged:
        writer = TraceWriter(staged, spec, ["topk", name], 3)
        rows = make_rows(spec, 2, 2, request=0, first_forward=0, rng=np.random.default_rng(0))
        getattr(rows, column)[1, 3] = np.nan
        writer.add_request(0, dataset="d", task="t", prompt_id="0", prompt_tokens=2, new_tokens=2)
        writer.append(rows)
        writer.finish(composition={"kind": "sequential"}, provenance={})
    with pytest.raises(MismatchError, match=f"the column {name} holds nan .* expected a finite number"):
        read(Trace(tmp_path / "trace"), [name], [0], tmp_path)


def test_a_part_of_a_request_is_a_range_of_its_tokens(tmp_path: Path) -> None:
    trace = Trace(write_trace(tmp_path / "trace", num_requests=3, prompt_tokens=4, new_tokens=4))
    part = {0: range(2, 5), 2: range(6, 8)}
    assert num_tokens(trace, part) == 5 and num_tokens(trace, [1, 2]) == 16
    for most in (1, 3, 1024):
        found = [(r, i) for p in stream(trace, {"experts"}, part, most) for r, i in zip(*_places(p), strict=True)]
        assert found == [(0, 0), (0, 0), (0, 1), (2, 3), (2, 4)]
    assert len(read(trace, {"experts"}, part, tmp_path)) == 5
    picker = Picker(part)  # in pieces, requests mixed
    pieces = [[0, 2, 0], [2, 2, 1, 2, 0], [2, 2, 0, 2], [2, 0]]
    assert [picker.mask(np.array(piece)).tolist() for piece in pieces] == [
        [False, False, False],
        [False, False, False, False, True],
        [False, False, True, True],
        [True, True],
    ]


def _places(part: Tokens) -> tuple[list[int], list[int]]:
    assert part.request_T is not None and part.iteration_T is not None
    return part.request_T.tolist(), part.iteration_T.tolist()
