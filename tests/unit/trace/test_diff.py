"""Comparing two traces of the same tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moetool.base.errors import MismatchError
from moetool.cli.main import app
from moetool.trace.diff import diff, divergence
from moetool.trace.foreign.importing import import_trace
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
    run = CliRunner().invoke(app, ["trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"])
    assert json.loads(run.stdout)["equal_share"] == found.equal_share == pytest.approx(1 - changed / (3 * num))


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


Text = tuple[list[int], list[int]]  # prompt, answer


def rollouts(folder: Path, texts: list[Text], task: str, ids: bool = True, shift: int = 0) -> Trace:
    """Two layers; the experts of a token follow from its id, those of layer 1 moved by `shift`."""
    rows = []
    for prompt, answer in texts:
        held = {"prompt_ids": prompt, "response_ids": answer}
        sizes = {"prompt_length": len(prompt), "response_length": len(answer)}
        experts = [[[t % 8], [(t + shift) % 8]] for t in (prompt + answer)[:-1]]
        rows.append({"routed_experts": experts, **(held if ids else sizes)})
    folder.mkdir()
    (folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"num_experts": 8, "expert_bytes": 10, "task": task}
    import_trace([folder / "f.jsonl"], None, folder / "t", settings=settings)
    return Trace(folder / "t")


def test_traces_without_a_common_name_are_paired_by_their_tokens(tmp_path: Path) -> None:
    texts: list[Text] = [([1, 2], [3, 4, 5]), ([1, 2, 3], [9, 9]), ([6], [7, 0]), ([6], [7, 0])]
    a = rollouts(tmp_path / "a", texts, "served")
    # another order, one answer goes on, one is not in a, and prompts end elsewhere
    other: list[Text] = [([5], [5, 5]), ([6, 7], [0]), ([1], [2, 3, 4, 5, 6, 7]), ([6], [7, 0]), ([1, 2, 3, 9], [9])]
    found = diff(a, rollouts(tmp_path / "b", other, "rl"))
    assert (found.requests, found.tokens, found.left_out) == (4, a.num_tokens, 0)
    assert (found.only_a, found.only_b, found.equal_share) == (0, 1, 1)
    # an equal text comes before one that begins it, and another text may lie between them in their order
    c = rollouts(tmp_path / "e", [([1, 2], [0]), ([1, 2, 3], [0]), ([5, 6, 7, 8], [0])], "served")
    found = diff(c, rollouts(tmp_path / "f", [([1], [0]), ([1, 2], [0]), ([5, 6], [0]), ([5, 6, 7, 1], [0])], "rl"))
    assert (found.requests, found.tokens, found.only_a, found.only_b) == (3, 2 + 1 + 2, 0, 1)
    moved = diff(a, rollouts(tmp_path / "c", other, "rl", shift=1))
    assert [layer.changed for layer in moved.layers] == [0, 1] and moved.equal_share == 0.5
    with refused(MismatchError, "no prompt in common"):
        diff(a, rollouts(tmp_path / "d", [([1, 2], [9, 9])], "rl"))


def test_prompts_are_compared_where_one_trace_withholds_its_ids(tmp_path: Path) -> None:
    texts: list[Text] = [([1, 2], [3, 4, 5]), ([1, 2, 3], [9, 9])]
    a, b = (rollouts(tmp_path / str(ids), texts, "rl", ids) for ids in (True, False))
    for found in (diff(a, b), diff(b, a)):
        assert (found.requests, found.tokens, found.left_out) == (2, 5, 3)


def test_divergence_is_that_of_its_definition() -> None:
    assert divergence(np.array([1.0, 0]), np.array([0, 1.0])) == 1
    p, q = np.array([0.5, 0.5]), np.array([0.9, 0.1])
    mean = (p + q) / 2
    expected = ((p * np.log2(p / mean)).sum() + (q * np.log2(q / mean)).sum()) / 2
    assert divergence(p, q) == pytest.approx(expected)
