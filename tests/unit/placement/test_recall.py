"""Predicting a batch by recall of tokens that were served, on routes made by hand."""

import numpy as np

from moetool.base.types import ModelSpec
from moetool.placement.demand import Batch, Demand
from moetool.placement.recall import Recall
from moetool.trace.expert_counts import count_experts
from tests.clusters import make_cluster
from tests.regression import regressed
from tests.synthetic import make_spec

SPEC = make_spec(2, 8)


def _batch(spec: ModelSpec, *pieces: list[list[int]]) -> Batch:
    """A batch of requests, one a GPU, each of rows of a trace."""
    cluster = make_cluster([[16] * len(pieces)])
    routes = tuple(("", np.array(rows)) for rows in pieces)
    tokens_GLE = np.stack([count_experts(spec, rows_TS) for _, rows_TS in routes])
    return Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE), routes


def _route(first: tuple[int, int], second: tuple[int, int]) -> list[int]:
    return [*first, *second]


def test_what_was_served_is_recalled_and_a_prediction_has_as_many_calls() -> None:
    assert SPEC.top_k_L == (2, 2)
    history = _batch(SPEC, [_route((0, 1), (2, 3))] * 4, [_route((4, 5), (6, 7))] * 4)
    again = Recall([history], neighbours=1)(history)
    assert np.allclose(again.tokens_GLE, history[0].tokens_GLE)
    new = _batch(SPEC, [_route((0, 1), (4, 5))] * 3, [_route((2, 6), (0, 1))] * 5)
    guess = Recall([history])(new).tokens_GLE
    assert (guess[:, 0] == new[0].tokens_GLE[:, 0]).all()  # the first layer is known
    assert np.allclose(guess[0, 1], [0, 0, 3, 3, 0, 0, 0, 0], atol=0.01)  # like the first request, wrongly
    assert np.allclose(guess.sum(axis=2), new[0].tokens_GLE.sum(axis=2))


def test_what_comes_is_learned() -> None:
    history = _batch(SPEC, [_route((0, 1), (2, 3))] * 4, [_route((4, 5), (6, 7))] * 4)
    new = _batch(SPEC, [_route((0, 5), (0, 1))] * 3, [_route((2, 6), (4, 5))] * 5)
    predict = Recall([history], neighbours=3)
    assert np.abs(predict(new).tokens_GLE - new[0].tokens_GLE).sum() > 8
    predict.learn(new)
    assert np.allclose(predict(new).tokens_GLE, new[0].tokens_GLE, atol=0.01)


def test_experts_that_come_together_say_what_each_alone_does_not() -> None:
    """The next layer depends on whether both of a pair are from the same half, which no linear rule can tell."""
    rng = np.random.default_rng(0)

    def rows(count: int) -> list[list[int]]:
        a, b = rng.integers(0, 2, count), rng.integers(2, 4, count)
        return [_route((int(x), int(y)), (4, 5) if (x + y) % 2 else (6, 7)) for x, y in zip(a, b, strict=True)]

    history = [_batch(SPEC, rows(64), rows(64)) for _ in range(4)]
    # A request of one pair alone, as far as a linear rule sees the mean of all.
    coming = _batch(SPEC, [_route((0, 2), (6, 7))] * 6 + [_route((1, 3), (6, 7))] * 6, rows(12))
    wrong = [
        np.abs(p(coming).tokens_GLE - coming[0].tokens_GLE)[0, 1].sum() for p in (Recall(history), regressed(history))
    ]
    assert wrong[0] < 1 < 10 < wrong[1]
