"""The simulated cluster against queueing theory, hand computation, brute force and the scores of placements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster, Gpu, Link, ModelSpec, Server
from moetool.placement.demand import Demand
from moetool.placement.latency import unit_latency
from moetool.placement.migration import order_moves
from moetool.placement.planner import Problem
from moetool.placement.scoring import score
from moetool.simulation.arrivals import read_arrivals
from moetool.simulation.event_loop import EventLoop, LoopOptions, SimulatedMachines
from moetool.simulation.migration_traffic import Moving
from moetool.simulation.replica_choice import Routing
from moetool.simulation.simulated_costs import GpuSeconds, make_network
from moetool.simulation.workload import SimulatedRequest
from tests.clusters import make_cluster
from tests.refusals import refused
from tests.synthetic import make_spec
from tests.synthetic_routes import route_of

BYTES = 1000


def _engine(
    spec: ModelSpec,
    cluster: Cluster,
    placed_GLE: np.ndarray,
    requests: Sequence[SimulatedRequest],
    *,
    dense_s: float = 0.0,
    expert_s: float = 1.0,
    **options: Any,
) -> EventLoop:
    """An engine that has run; dense layers and experts take as long whatever their tokens."""
    network = make_network(cluster, BYTES)
    computing = GpuSeconds(name="test", dense=[0.0] + [dense_s] * 64, expert=[0.0] + [expert_s] * 64)
    machines = SimulatedMachines(
        spec=spec, cluster=cluster, network=network, computing=computing, bytes_per_token=BYTES
    )
    engine = EventLoop(machines, Routing(cluster, network, placed_GLE), requests, options=LoopOptions(**options))
    engine.run()
    return engine


def _request(
    spec: ModelSpec, number: int, gpu: int, arrived_s: float, prompt: int, new: int, seed: int
) -> SimulatedRequest:
    rng = np.random.default_rng([seed, number])
    rows_TS = np.stack(
        [np.concatenate([rng.permutation(spec.num_experts)[:k] for k in spec.top_k_L]) for _ in range(prompt + new)]
    )
    route = route_of(spec, rows_TS[:prompt], rows_TS[prompt:])
    return SimulatedRequest(number=number, gpu=gpu, route=route, arrived_s=arrived_s)


def _random_placement(spec: ModelSpec, num_gpus: int, seed: int, copies: float = 0.2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    placed_GLE = rng.random((num_gpus, spec.num_layers, spec.num_experts)) < copies
    owner_LE = rng.integers(num_gpus, size=(spec.num_layers, spec.num_experts))
    np.put_along_axis(placed_GLE, owner_LE[None], True, axis=0)
    return placed_GLE


@pytest.mark.parametrize("queue", ["seat", "gpu", "link"])
def test_a_single_queue_waits_as_m_d_1_does(queue: str) -> None:
    """Mean wait rho * s / (2 (1 - rho)), at a seat of a GPU, in the queue of a GPU, and in that of a link."""
    spec, load, service_s, count = make_spec(1, 1, 1), 0.7, 2.0, 16_000
    gap_s = service_s / load
    times = np.cumsum(np.random.default_rng(1).exponential(gap_s, count)).tolist()
    route = route_of(spec, np.zeros((1, 1), np.int64), np.zeros((0, 1), np.int64))
    requests = [SimulatedRequest(number=i, gpu=0, route=route, arrived_s=at_s) for i, at_s in enumerate(times)]
    placed_GLE = np.zeros((2, 1, 1), bool)
    placed_GLE[1 if queue == "link" else 0] = True
    cluster = make_cluster([[1], [1]], link_bytes_s=BYTES / service_s)
    _engine(
        spec,
        cluster,
        placed_GLE,
        requests,
        dense_s=0.5 if queue == "seat" else 0.0,
        expert_s={"seat": service_s - 0.5, "gpu": service_s, "link": 0.0}[queue],
        seats=1 if queue == "seat" else count,
    )
    alone_s = 2 * service_s if queue == "link" else service_s  # the way back is never queued for
    waits = np.array([r.finished_s - r.arrived_s - alone_s for r in requests])
    expected_s = load * service_s / (2 * (1 - load))
    batches = waits.reshape(40, -1).mean(axis=1)  # long enough to be nearly independent
    error_s = batches.std(ddof=1) / len(batches) ** 0.5
    assert error_s < 0.08 * expected_s
    assert abs(waits.mean() - expected_s) < 2.58 * error_s  # its 99 % confidence interval


def test_a_layer_by_hand() -> None:
    spec = make_spec(1, 3, 3)
    cluster = Cluster(
        servers=(
            Server(name="a", gpus=(Gpu(memory_bytes=1),)),
            Server(name="b", gpus=(Gpu(memory_bytes=1, speed=2.0), Gpu(memory_bytes=1))),
        ),
        link_bytes_s=500.0,  # 2 s a token
        link_latency_s=0.25,
    )
    placed_GLE = np.zeros((3, 1, 3), bool)
    placed_GLE[[0, 1, 2], 0, [0, 1, 2]] = True
    rows_TS = np.array([[0, 1, 2]])
    request = SimulatedRequest(number=0, gpu=0, route=route_of(spec, rows_TS, rows_TS), arrived_s=5.0)
    engine = _engine(spec, cluster, placed_GLE, [request], dense_s=3.0, expert_s=4.0)
    # 3 s dense; to b's first GPU 2 s, to its second 2 s more on the same link, each + 0.25; there 2 s and 4 s; back.
    # The first is back at 3 + 2.25 + 2 + 2.25 = 9.5, the second at 3 + 4.25 + 4 + 2.25 = 13.5; its own expert at 7.
    assert request.first_s == 5 + 13.5
    assert request.finished_s == 5 + 2 * 13.5
    assert engine.busy_G == [14.0, 4.0, 8.0]
    assert dict(zip(engine.network.names, engine.sent_Q, strict=True)) == {
        "a -> b": 4 * BYTES,
        "b -> a": 4 * BYTES,
        **{f"{name} inside, GPU {g}": 0 for name, g in (("a", 0), ("b", 1), ("b", 2))},
    }


def test_a_request_alone_takes_its_layers_slowest_ways() -> None:
    """Against a loop over the steps: alone, only messages of one step wait for each other."""
    spec = make_spec(3, 8, 2)
    cluster = make_cluster([[8], [8], [8]], link_bytes_s=1e4, link_latency_s=0.3)
    placed_GLE = _random_placement(spec, 3, 0, copies=0)
    request = _request(spec, 0, 1, 0.0, 5, 4, 0)
    _engine(spec, cluster, placed_GLE, [request], dense_s=0.7, expert_s=1.1)
    now = 0.0
    for number, step in enumerate(request.route.steps):
        owner_E = placed_GLE[:, number % 3].argmax(axis=0)
        now += 0.7
        backs = [now]
        for g in range(3):
            mine = [tokens for expert, tokens in step if owner_E[expert] == g]
            sent_s = 0.0 if g == 1 else sum(mine) * BYTES / 1e4 + 0.3
            backs.append(now + 2 * sent_s + 1.1 * len(mine) if mine else now)
        now = max(backs)
    assert request.finished_s == pytest.approx(now)


def test_many_requests_use_what_the_score_of_the_placement_says() -> None:
    """Expert calls that are local, bytes and busy seconds, however the queues interleave."""
    spec = make_spec(3, 8, 2)
    cluster = make_cluster([[8], [8, 8], [8]], link_bytes_s=1e4)
    placed_GLE = _random_placement(spec, 4, 1)
    requests = [_request(spec, i, i % 4, 0.1 * i, 3, 3, 1) for i in range(40)]
    engine = _engine(spec, cluster, placed_GLE, requests, expert_s=0.2, seats=3)
    tokens_GLE = np.zeros((4, 3, 8))
    for request in requests:
        tokens_GLE[request.gpu] += request.route.calls_LE
    demand = Demand(spec=spec, cluster=cluster, tokens_GLE=tokens_GLE)
    found = score(Problem(demand=demand, latency=unit_latency(cluster)), placed_GLE, bounds=False)
    assert engine.calls == tokens_GLE.sum()
    assert engine.local_calls / engine.calls == pytest.approx(found.local)
    between = sum(s for n, s in zip(engine.network.names, engine.sent_Q, strict=True) if "->" in n)
    assert between == 2 * BYTES * round(found.remote_calls)
    assert sum(engine.busy_G) == pytest.approx(0.2 * sum(len(step) for r in requests for step in r.route.steps))
    assert all(r.arrived_s <= r.started_s <= r.first_s <= r.finished_s for r in requests)


@pytest.mark.parametrize("seed", range(8))
def test_half_the_bandwidth_is_not_faster(seed: int) -> None:
    """Of networks of queues in general it is not true that slower links never pay; of these it has to be."""
    rng = np.random.default_rng(seed)
    spec = make_spec(2, 8, 2)
    placed_GLE = _random_placement(spec, 4, seed)
    arrived = np.cumsum(rng.exponential(rng.uniform(0.5, 5.0), 40)).tolist()

    def mean_s(bytes_s: float) -> float:
        cluster = make_cluster([[8], [8, 8], [8]], link_bytes_s=bytes_s, link_latency_s=0.01)
        requests = [_request(spec, i, i % 4, at_s, 4, 3, seed) for i, at_s in enumerate(arrived)]
        _engine(spec, cluster, placed_GLE, requests, dense_s=0.05, expert_s=0.1)
        return float(np.mean([r.finished_s - r.arrived_s for r in requests]))

    means = [mean_s(4e4 / 2**halved) for halved in range(3)]
    assert means == sorted(means)


def test_of_equally_near_copies_the_idlest_is_taken_and_of_unequal_ones_the_nearest() -> None:
    spec = make_spec(1, 1, 1)
    placed_GLE = np.array([False, True, True])[:, None, None]
    rows_TS, none_TS = np.zeros((1, 1), np.int64), np.zeros((0, 1), np.int64)

    def run(*links: Link) -> list[float]:
        cluster = make_cluster([[1], [1], [1]], link_bytes_s=1e9, links=links)
        requests = [
            SimulatedRequest(number=i, gpu=0, route=route_of(spec, rows_TS, none_TS), arrived_s=0.1 * i)
            for i in range(2)
        ]
        return _engine(spec, cluster, placed_GLE, requests, expert_s=4.0, seats=2).busy_G

    assert run() == [0, 4, 4]
    assert run(Link(between=("s0", "s1"), bytes_s=1e6)) == [0, 0, 8]


def test_experts_on_the_move_end_in_the_new_placement_and_use_the_links() -> None:
    spec = make_spec(2, 8, 2)
    cluster = make_cluster([[12], [6, 6], [12]], link_bytes_s=1e5)
    old_GLE, new_GLE = (np.zeros((4, 2, 8), bool) for _ in range(2))
    for placed_GLE, seed in ((old_GLE, 0), (new_GLE, 1)):
        owner_LE = np.random.default_rng(seed).permuted(np.tile(np.arange(4), 4)).reshape(2, 8)
        np.put_along_axis(placed_GLE, owner_LE[None], True, axis=0)
    network = make_network(cluster, BYTES)
    routing = Routing(cluster, network, old_GLE)
    requests = [_request(spec, i, i % 4, 0.01 * i, 3, 3, 2) for i in range(12)]
    computing = GpuSeconds(name="test", dense=[0.0] + [0.01] * 9, expert=[0.0] + [0.01] * 9)
    machines = SimulatedMachines(spec=spec, cluster=cluster, network=network, computing=computing, bytes_per_token=1)
    engine = EventLoop(machines, routing, requests)
    moves, ended = order_moves(spec, cluster, old_GLE, new_GLE), []
    Moving(engine, moves, 300, ended.append)
    engine.run()
    assert len(ended) == 1
    assert routing.near == Routing(cluster, network, new_GLE).near
    server_G = cluster.server_G
    far = [m for m in moves if m.kind == "copy" and m.source >= 0 and server_G[m.source] != server_G[m.gpu]]
    assert far
    sent = sum(s for n, s in zip(network.names, engine.sent_Q, strict=True) if "->" in n)
    assert sent >= sum(m.bytes for m in far)
    slowest = max(sum(m.bytes for m in far if m.gpu == g) for g in range(4)) / 1e5
    assert ended[0] >= slowest / 3  # three links lead to a GPU's server at most
    assert len(engine.finished) == 12


def test_arrivals(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    poisson = read_arrivals("poisson:10s", [0, 2], 4000, rng)
    assert poisson[-1].at_s / 4000 == pytest.approx(5, rel=0.05)  # 10 s at each of two
    assert {a.server for a in poisson} == {0, 2}
    assert np.mean([a.server == 2 for a in poisson]) == pytest.approx(0.5, abs=0.03)
    gaps = np.diff([a.at_s for a in poisson])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert [(a.at_s, a.server) for a in read_arrivals("every:2s", [1, 3], 3, rng)] == [(0, 1), (0, 3), (2, 1)]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.4799600,3180,8\n"
    )
    found = read_arrivals(str(azure), [0], 5, rng)
    assert [(a.at_s, a.prompt_tokens, a.new_tokens) for a in found] == [(0, 4808, 10), (pytest.approx(0.5), 3180, 8)]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text('{"timestamp": 40, "input_length": 7, "output_length": 3, "hash_ids": [0]}\n' * 2)
    assert [a.new_tokens for a in read_arrivals(str(mooncake), [0], 1, rng)] == [3]
    mooncake.write_text('{"timestamp": 40}\n')
    with refused(MismatchError, "TIMESTAMP"):
        read_arrivals(str(mooncake), [0], 1, rng)
    with refused(UsageError, "not a file"):
        read_arrivals("possion:10s", [0], 1, rng)
