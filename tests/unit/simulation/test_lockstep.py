"""A step of ranks in lockstep: by hand, by brute force, and as the planners' cost of a batch."""

from dataclasses import replace

import numpy as np
import pytest

from moetool.base.types import Cluster, Gpu, Link, Server
from moetool.placement.latency import flows, linear_latency
from moetool.placement.replica_routing import destinations
from moetool.simulation import lockstep
from moetool.simulation.lockstep import LockstepRanks, RankMachines
from moetool.simulation.rank_seconds import AssumedRank, RankWork
from moetool.simulation.simulated_costs import AssumedCosts
from tests.clusters import make_cluster
from tests.synthetic import make_spec

COSTS = AssumedCosts(dense_s=3.0, dense_token_s=0.5, expert_s=4.0, expert_token_s=0.25)


def work_of(gpu_T: np.ndarray, num_ranks: int) -> list[RankWork]:
    return [RankWork(prompt_tokens=n) for n in np.bincount(gpu_T, minlength=num_ranks).tolist()]


def test_a_layer_by_hand() -> None:
    """Three ranks; the second is twice as fast. Rows of both requests for an expert are one product."""
    spec = make_spec(1, 3, 2)
    servers = (
        Server(name="a", gpus=(Gpu(memory_bytes=1), Gpu(memory_bytes=1, speed=2.0)), gpu_link_bytes_s=100.0),
        Server(name="b", gpus=(Gpu(memory_bytes=1),)),
    )
    cluster = Cluster(servers=servers, link_bytes_s=50.0, link_latency_s=7.0)
    placed_GLE = np.eye(3, dtype=bool)[:, None, :]
    machines = RankMachines(spec=spec, cluster=cluster, seconds=AssumedRank(costs=COSTS), token_bytes=100)
    ranks = LockstepRanks(machines, placed_GLE)
    gpu_T = np.array([0, 0, 1])
    step = ranks.step(gpu_T, np.array([[0, 1], [0, 1], [0, 2]]), work_of(gpu_T, 3))
    assert step.dense == 3.5  # two tokens of rank 0; one of rank 1 takes 1.5 s
    # Expert 0 has 3 rows: 4 + 2 x 0.25; expert 1 has 2 rows on the fast rank; expert 2 has one.
    assert step.experts == 4.5
    assert ranks.busy_G == pytest.approx([3.5 + 4.5, 1.5 + 4.25 / 2, 4.0])
    # Rank 0 sends 2 tokens to rank 1, 2 s; rank 1 one to rank 0, 1 s, and one to rank 2, 7 + 2 s: 10 s, and back.
    assert step.exchange == 20.0
    assert ranks.sent_GG.tolist() == [[0, 300, 0], [300, 0, 100], [0, 100, 0]]
    assert (ranks.calls, ranks.local_calls) == (6, 5)
    assert ranks.rows_GL[:, 0].tolist() == [3, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_layers_counted_in_parts_are_those_of_a_loop(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    spec = make_spec(3, 8, 2)
    cluster = make_cluster([[8], [8, 8], [8]], link_bytes_s=1e4, links=(Link(between=("s0", "s1"), bytes_s=500.0),))
    placed_GLE = rng.random((4, 3, 8)) < 0.3
    np.put_along_axis(placed_GLE, rng.integers(4, size=(3, 8))[None], True, axis=0)
    gpu_T = np.sort(rng.integers(4, size=30))
    rows_TS = np.stack([np.concatenate([rng.permutation(8)[:2] for _ in range(3)]) for _ in gpu_T])
    machines = RankMachines(spec=spec, cluster=cluster, seconds=AssumedRank(costs=COSTS), token_bytes=10)
    to_GLE = destinations(placed_GLE, cluster.server_G)
    expert_s = exchange_s = 0.0
    for layer in range(3):
        rows_GE, bytes_GG = np.zeros((4, 8)), np.zeros((4, 4))
        for g, row in zip(gpu_T, rows_TS, strict=True):
            for expert in row[2 * layer : 2 * layer + 2]:
                rows_GE[to_GLE[g, layer, expert], expert] += 1
                bytes_GG[g, to_GLE[g, layer, expert]] += 10
        expert_s += max(sum(4 + 0.25 * (n - 1) for n in rows if n) for rows in rows_GE)
        took_GG = np.zeros((4, 4))
        for g, h in np.argwhere(bytes_GG).tolist():
            if g != h:
                rate, latency = cluster.link(cluster.server_G[g], cluster.server_G[h])
                took_GG[g, h] = latency + bytes_GG[g, h] / rate
        exchange_s += 2 * max(took_GG.sum(axis=0).max(), took_GG.sum(axis=1).max())
    for bins in (1, 1 << 22):
        monkeypatch.setattr(lockstep, "MOST_COUNTERS", bins)
        step = LockstepRanks(machines, placed_GLE).step(gpu_T, rows_TS, work_of(gpu_T, 4))
        assert (step.experts, step.exchange) == (pytest.approx(expert_s), pytest.approx(exchange_s))


def test_costs_through_zero_are_those_that_planners_weigh() -> None:
    """T_comp + T_comm of Eqs. 1 to 4 (`moetool.placement.latency`), for one copy of each expert."""
    rng = np.random.default_rng(1)
    spec, cluster = make_spec(1, 8, 2), make_cluster([[8, 8], [8, 8]], link_bytes_s=1e3)
    placed_GLE = np.zeros((4, 1, 8), bool)
    placed_GLE[rng.integers(4, size=8), 0, np.arange(8)] = True
    gpu_T = np.sort(rng.integers(4, size=40))
    rows_TS = np.stack([rng.permutation(8)[:2] for _ in gpu_T])
    straight = AssumedRank(costs=replace(COSTS, dense_s=0, dense_token_s=0, expert_s=0.25))
    machines = RankMachines(spec=spec, cluster=cluster, seconds=straight, token_bytes=10)
    step = LockstepRanks(machines, placed_GLE).step(gpu_T, rows_TS, work_of(gpu_T, 4))
    byte_s_GG = [[1 / cluster.link(a, b)[0] for b in cluster.server_G] for a in cluster.server_G]
    latency = linear_latency(cluster, 0.25, np.array(byte_s_GG), 10.0, "test")
    tokens_GE = np.zeros((4, 8))
    np.add.at(tokens_GE, (np.repeat(gpu_T, 2), rows_TS.ravel()), 1)
    assert latency.layer(flows(cluster, tokens_GE, placed_GLE[:, 0])) == pytest.approx((step.experts, step.exchange))


def test_gathering_sends_every_token_to_every_rank() -> None:
    spec, cluster = make_spec(2, 4, 2), make_cluster([[4], [4], [4]], link_bytes_s=1e3, link_latency_s=1.0)
    placed_GLE = np.zeros((3, 2, 4), bool)
    placed_GLE[0] = True  # no row has to leave its rank
    machines = RankMachines(
        spec=spec, cluster=cluster, seconds=AssumedRank(costs=COSTS), token_bytes=100, exchange="gather"
    )
    ranks = LockstepRanks(machines, placed_GLE)
    gpu_T = np.array([0, 0, 0, 1])
    step = ranks.step(gpu_T, np.tile([0, 1, 2, 3], (4, 1)), work_of(gpu_T, 3))
    assert step.exchange == pytest.approx(2 * 2 * 2 * (1 + 0.3))  # two layers, two ways, two peers of rank 0
    assert ranks.sent_GG[0].tolist() == [0, 2 * 400, 2 * 300]
