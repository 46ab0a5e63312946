"""Offline, reactive and proactive placement on batches that change."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moetool.base.errors import UsageError
from moetool.placement.demand import Demand, planned_share, read_batches
from moetool.placement.latency import unit_latency
from moetool.placement.modes import Batch, calibrated, modes
from moetool.placement.planner import Problem
from moetool.trace.expert_counts import count_experts
from moetool.training import predictor
from moetool.training.tokens import Tokens
from tests.clusters import make_cluster, make_problem
from tests.refusals import refused
from tests.regression import regressed
from tests.synthetic import make_spec, write_trace


def test_each_mode_places_from_the_batches_that_it_may_see() -> None:
    spec, cluster = make_spec(1, 4), make_cluster([[2, 2]])
    latency = unit_latency(cluster, sides="send")

    def batch(*pairs: tuple[int, int]) -> tuple[Demand, tuple[()]]:
        tokens_GLE = np.zeros((2, 1, 4))
        for g, experts in enumerate(pairs):
            tokens_GLE[g, 0, list(experts)] = 10
        return make_problem(spec, cluster, tokens_GLE=tokens_GLE).demand, ()

    odd, even = batch((0, 2), (1, 3)), batch((0, 1), (2, 3))
    rows = {row.mode: row for row in modes([odd, even, odd, even], [odd[0]], "director", {}, latency)}
    # Whoever places for the batch itself sends nothing and computes 20; for the other one, half of it is sent.
    assert rows["proactive"].latency == 20
    assert rows["vanilla"].latency == rows["offline"].latency == 25  # right for every other batch
    assert rows["reactive"].latency == pytest.approx((20 + 3 * 30) / 4)
    assert rows["offline"].moved == 0
    assert rows["proactive"].moved > 0
    assert (rows["vanilla"].share_of_truth, rows["proactive"].share_of_truth) == (0, 1)
    assert rows["reactive"].share_of_truth < 0


def test_a_stream_is_made_of_held_out_requests(tmp_path: Path) -> None:
    spec, cluster = make_spec(), make_cluster([[12, 12]])
    trace = write_trace(tmp_path / "t", spec, num_requests=12)
    uses = planned_share(0.5)
    history = list(read_batches([trace], cluster, 4, 0, uses))
    coming = list(read_batches([trace], cluster, 4, 0, lambda s, p: not uses(s, p)))
    assert all(len(parts) == 2 and all(len(rows) <= 4 for _, rows in parts) for _, parts in history + coming)
    affinity = predictor.build("affinity", spec)
    routes = np.concatenate([rows.reshape(len(rows), 3, 2) for _, parts in history for _, rows in parts])
    affinity.count(Tokens(experts_TPK=torch.from_numpy(routes.astype(np.int16))))
    past = [demand for demand, _ in history]
    rows = modes(coming[:3], past, "smartmoe", {}, unit_latency(cluster), calibrated(affinity, history))
    assert [row.mode for row in rows] == ["vanilla", "offline", "reactive", "proactive", "predicted"]
    guess = calibrated(affinity, history)(coming[0])
    assert (guess.tokens_GLE[:, 0] == coming[0][0].tokens_GLE[:, 0]).all()
    assert guess.tokens_GLE.sum() == pytest.approx(coming[0][0].tokens_GLE.sum(), rel=0.3)
    Problem(demand=replace(guess), latency=unit_latency(cluster))
    with refused(UsageError, "2 GPUs"):
        next(read_batches([trace], cluster, 400, 0, lambda server, place: place == 0))


def test_a_regression_learns_what_follows_from_the_first_layer() -> None:
    spec, cluster = make_spec(2, 4, top_k=1), make_cluster([[4, 4]])

    def batch(seed: int) -> Batch:
        first_GT = np.random.default_rng(seed).integers(4, size=(2, 50))
        parts = tuple(("task", np.stack([first_T, (first_T + 1) % 4], axis=1)) for first_T in first_GT)
        tokens_GLE = np.stack([count_experts(spec, rows) for _, rows in parts])
        return make_problem(spec, cluster, tokens_GLE=tokens_GLE).demand, parts

    guess = regressed([batch(seed) for seed in range(20)], penalty=1e-6)(batch(99))
    assert np.abs(guess.tokens_GLE - batch(99)[0].tokens_GLE).max() < 1e-3
