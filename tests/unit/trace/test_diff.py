"""Comparing two traces of the same tokens."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moetool.base.errors import MismatchError
from moetool.cli.main import app
from moetool.trace.diff import diff, divergence
from moetool.trace.reader import Trace
from tests import synthetic_routes, traces
from tests.refusals import refused

LENGTHS = [(5, 4), (3, 6), (4, 2)]


def test_a_trace_is_no_different_from_itself(tmp_path: Path) -> None:
    trace = traces.write(tmp_path / "a", traces.alone(LENGTHS), LENGTHS)
    found = diff(trace, trace)
    assert (found.flip_rate, found.tokens, found.left_out, found.only_a, found.only_b) == (0, trace.num_tokens, 0, 0, 0)
    assert all(one.use_bits == 0 and one.score_bits == 0 and one.flipped_margin is None for one in found.layers)
    assert all(one.margin is not None and one.margin >= 0 for one in found.layers)


def test_flips_are_counted_by_layer(tmp_path: Path) -> None:
    forwards = traces.alone(LENGTHS)
    a = traces.write(tmp_path / "a", forwards, LENGTHS)
    changed, num = 0, 0
    for rows in forwards:  # one expert of layer 1 (columns 2, 3) becomes the lowest that the token does not use
        rows.experts_TS = rows.experts_TS.copy()
        for experts in rows.experts_TS[::2]:
            experts[2] = min(set(range(8)) - set(experts[2:4].tolist()))
            changed += 1
        num += len(rows)
    b = traces.write(tmp_path / "b", forwards, LENGTHS)
    found = diff(a, b)
    assert [one.flip_rate for one in found.layers] == [0, changed / (2 * num), 0]
    assert [one.changed for one in found.layers] == [0, changed / num, 0]
    uses = [
        np.bincount(np.concatenate([r.experts_TS[:, 2:4] for r in t.batches()]).ravel(), minlength=8) for t in (a, b)
    ]
    assert found.layers[1].use_bits == pytest.approx(float(divergence(*uses))) and found.layers[1].flipped_margin
    assert all(one.score_bits == 0 for one in found.layers)
    run = CliRunner().invoke(app, ["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert run.exit_code == 0 and "mean flip rate" in run.stdout


def test_tokens_after_the_first_other_one_are_left_out(tmp_path: Path) -> None:
    forwards = traces.alone(LENGTHS)
    a = traces.write(tmp_path / "a", forwards, LENGTHS)
    last = next(rows for rows in forwards if rows.request_T[0] == 0 and rows.iteration_T[0] == 2)
    last.token_id_T = last.token_id_T + 1
    b = traces.write(tmp_path / "b", forwards, LENGTHS)
    found = diff(a, b)
    assert found.left_out == 2 and found.tokens == a.num_tokens - 2


def test_other_models_and_prompts_are_refused(tmp_path: Path) -> None:
    a = traces.write(tmp_path / "a", traces.alone(LENGTHS), LENGTHS)
    other = Trace(synthetic_routes.write_trace(tmp_path / "b", num_requests=2))
    with refused(MismatchError, "two", "traces", "model"):
        diff(a, other)


def test_divergence_is_that_of_its_definition() -> None:
    assert divergence(np.array([1.0, 0]), np.array([0, 1.0])) == 1
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    mean = (p + q) / 2
    expected = ((p * np.log2(p / mean)).sum() + (q * np.log2(q / mean)).sum()) / 2
    assert divergence(p, q) == pytest.approx(expected)
