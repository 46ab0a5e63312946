"""Ranks in lockstep that serve requests: against a measured run, and by hand."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moetool.base.types import Cluster, Gpu, Server
from moetool.placement.decide import InForce, ReplacementCosts, Replanner
from moetool.placement.latency import unit_latency
from moetool.placement.plan import Move
from moetool.simulation.lockstep import RankMachines
from moetool.simulation.lockstep_serving import LockstepServing, ServingOptions, transfer_seconds
from moetool.simulation.placement_control import PlacementDecisions
from moetool.simulation.rank_seconds import AssumedRank
from moetool.simulation.simulated_costs import AssumedCosts
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import collect_ranks
from moetool.simulation.workload import SimulatedRequest
from tests.clusters import make_cluster
from tests.published_routes import SHARED
from tests.rank_cost_tables import MeasuredRank
from tests.simulated import static
from tests.synthetic import make_spec
from tests.synthetic_routes import route_of

GOLDEN = SHARED / "data" / "costs" / "llmservingsim"
QUANTILES = (50, 90, 95, 99)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="shared/data/costs is not here")
def test_a_run_of_vllm_with_expert_parallelism() -> None:
    """300 requests of Qwen3-30B-A3B on two GPUs, from tables of its parts; no constant is fitted to the run.

    Routes are uniform: none of this model with eight experts a token are published.
    """
    said = json.loads((GOLDEN / "config.json").read_text())
    engine = json.loads((GOLDEN / "meta.json").read_text())["engine_kwargs"]
    rows = [json.loads(line) for line in (GOLDEN / "requests.jsonl").read_text().splitlines()]
    spec = replace(make_spec(48, 128, 8), hidden_size=2048)
    gpu = Gpu(memory_bytes=spec.total_experts * spec.slot_bytes)
    # A link between two servers, since links within a server have no latency.
    servers = tuple(Server(name=f"rank{g}", gpus=(gpu,)) for g in range(2))
    cluster = Cluster(servers=servers, link_bytes_s=said["link_bw"] * 1e9, link_latency_s=said["link_latency"] * 1e-9)
    rng = np.random.default_rng(0)
    routes = [rng.permuted(np.tile(np.arange(128), (5400, 1)), axis=1)[:, :8].astype(np.int16) for _ in range(12)]
    requests = []
    for number, row in enumerate(rows):
        pick = rng.integers(len(routes), size=48)
        prompt, new = row["input_toks"], row["output_toks"] - 1
        rows_TS = np.concatenate([routes[i][: prompt + new] for i in pick], axis=1)
        route = route_of(spec, rows_TS[:prompt], rows_TS[prompt:])
        at_s = row["arrival_time"] - rows[0]["arrival_time"]
        requests.append(SimulatedRequest(number=number, gpu=0, route=route, arrived_s=at_s))
    machines = RankMachines(
        spec=spec, cluster=cluster, seconds=MeasuredRank(GOLDEN, 8), token_bytes=2 * 2048, exchange="gather"
    )
    placed_GLE = np.zeros((2, 48, 128), bool)
    placed_GLE[0, :, :64] = placed_GLE[1, :, 64:] = True
    options = ServingOptions(seats=engine["max_num_seqs"], chunk_tokens=engine["max_num_batched_tokens"])
    serving = LockstepServing(machines, requests, static(spec, cluster, placed_GLE), options)
    serving.run()
    measured = {
        "TTFT": [1e3 * (row["first_token_ts"] - row["queued_ts"]) for row in rows],
        "TPOT": [1e3 * (row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1) for row in rows],
        "latency": [1e3 * (row["last_token_ts"] - row["queued_ts"]) for row in rows],
    }
    found = {
        "TTFT": [1e3 * (one.first_s - one.arrived_s) for one in requests],
        "TPOT": [1e3 * (one.finished_s - one.first_s) / one.route.new_tokens for one in requests],
        "latency": [1e3 * (one.finished_s - one.arrived_s) for one in requests],
    }
    for name, theirs in measured.items():
        ours = found[name]
        pairs = [("mean", np.mean(theirs), np.mean(ours))]
        pairs += [(f"p{q}", np.percentile(theirs, q), np.percentile(ours, q)) for q in QUANTILES]
        print(name, ", ".join(f"{what} {a:.1f} ms, here {b:.1f} ({b / a - 1:+.1%})" for what, a, b in pairs))
    assert np.mean(found["TPOT"]) == pytest.approx(np.mean(measured["TPOT"]), rel=0.05)
    assert np.mean(found["TTFT"]) == pytest.approx(np.mean(measured["TTFT"]), rel=0.2)


SPEC = make_spec(2, 4, 1, expert_bytes=(1000, 1000))
ROW = AssumedRank(costs=AssumedCosts(dense_s=1.0, dense_token_s=0.0, expert_s=1.0, expert_token_s=1.0))
"""A second for the dense part of a layer, and one for each row."""
NODE = make_cluster([[8, 8]], slot_bytes=1000)


def request(number: int, arrived_s: float, prompt: int, new: int, expert: int = 0) -> SimulatedRequest:
    """All tokens use one expert in both layers."""
    rows_TS = np.full((prompt + new, 2), expert)
    return SimulatedRequest(
        number=number, gpu=0, route=route_of(SPEC, rows_TS[:prompt], rows_TS[prompt:]), arrived_s=arrived_s
    )


def serve(requests: Sequence[SimulatedRequest], decisions: PlacementDecisions, **options: Any) -> LockstepServing:
    fast = replace(NODE, servers=(replace(NODE.servers[0], gpu_link_bytes_s=1e30),))
    machines = RankMachines(spec=SPEC, cluster=fast, seconds=ROW, token_bytes=1)
    serving = LockstepServing(machines, requests, decisions, ServingOptions(**options))
    serving.run()
    return serving


def everywhere() -> np.ndarray:
    return np.ones((2, 2, 4), bool)


def test_static_batches_begin_together_and_last_as_long_as_their_longest_request() -> None:
    """Each rank has every expert; a step of two layers takes 2 s and the rows of the fuller rank."""
    requests = [request(n, 0.0, 1, n) for n in range(5)]
    serving = serve(requests, static(SPEC, NODE, everywhere()), static=True)
    assert [one.started_s for one in requests] == [0, 0, 8, 8, 24]
    assert [one.finished_s for one in requests] == [4, 8, 20, 24, 44]  # 4 s a step
    assert [(batch.requests, batch.steps, batch.seconds) for batch in serving.batches] == [
        (2, 2, 8.0),
        (2, 4, 16.0),
        (1, 5, 20.0),
    ]
    assert [batch.prompts for batch in serving.batches] == [4.0, 4.0, 4.0]


def test_requests_join_before_a_step_and_long_prompts_take_several() -> None:
    """Chunks of four: a decoded token comes first, so that a prompt beside it advances by three."""
    requests = [request(0, 0.0, 2, 4), request(1, 0.0, 4, 1), request(2, 5.0, 7, 0)]
    serve(requests, static(SPEC, NODE, everywhere()), seats=2, chunk_tokens=4)
    # Steps: prompts of 2 and 4 (2 + 2 x 4 = 10 s); three requests, one rank has two: 1 + 3 rows (10 s) ...
    assert requests[0].first_s == requests[1].first_s == 10.0
    assert requests[2].started_s == 10.0 and requests[2].gpu == 0
    assert requests[2].first_s == 10 + 10 + 10 + 6  # 3 + 3 + 1 tokens of its prompt, each beside a decoded one
    assert requests[1].finished_s == 20.0


SLOW = Gpu(memory_bytes=4000, host_to_device_bytes_s=250.0)
ONE_NODE = replace(NODE, servers=(replace(NODE.servers[0], gpus=(SLOW, SLOW)),))
TWO_NODES = Cluster(servers=tuple(Server(name=name, gpus=(SLOW,)) for name in "ab"), link_bytes_s=100.0)


def replaced(
    sees: str, cluster: Cluster, num_requests: int, static: bool = True, new: int = 4, **options: Any
) -> LockstepServing:
    """Serve batches of two requests that use experts 0 and 1, then 2 and 3, and so on; each rank owns two at first."""
    placed_GLE = np.stack([[[e < 2 for e in range(4)]] * 2, [[e >= 2 for e in range(4)]] * 2])
    decisions = PlacementDecisions(
        sees,
        InForce(spec=SPEC, cluster=cluster, placed_GLE=placed_GLE),
        ReplacementCosts(latency=unit_latency(cluster)),
        Replanner(planner="director", options={"replicas": False}, weighs="latency", always=True),
        SimulationOptions(**options),
    )
    machines = RankMachines(spec=SPEC, cluster=cluster, seconds=ROW, token_bytes=1)
    requests = [request(n, 0.0, 1, new, expert=n % 4) for n in range(num_requests)]
    serving = LockstepServing(machines, requests, decisions, ServingOptions(static=static))
    serving.run()
    return serving


@pytest.mark.parametrize("migrate", ["free", "overlap", "pipelined", "stop"])
def test_experts_move_during_the_batch_before_the_one_that_they_are_for(migrate: str) -> None:
    """The queue's second batch uses expert 3, of which rank 0 makes a copy or becomes the owner."""
    serving = replaced("queue", ONE_NODE, 4, migrate=migrate)
    (*_, moved) = (one for one in serving.decisions.records if one.made)
    last = serving.batches[-1]
    # Two experts to each rank over 250 bytes/s: 8 s, hidden in the first batch of five steps unless all stop.
    assert last.seconds == pytest.approx(5 * 4, rel=1e-6)  # balanced: one row a rank and layer
    assert moved.at_s < last.began_s
    waited = last.began_s - serving.batches[-2].began_s - serving.batches[-2].seconds
    assert waited == pytest.approx(moved.waited_s) and (waited > 0) == (migrate == "stop")
    assert moved.done_s is not None and moved.done_s <= last.began_s
    assert (serving.moved_GG.sum() > 0) == (migrate != "free")


@pytest.mark.parametrize("plan_s", [10.0, 1000.0])
def test_nothing_moves_before_its_plan_is_ready(plan_s: float) -> None:
    """Steps of a batch end before the plan of the last one is ready; a plan later than the run changes nothing."""
    serving = replaced("past", ONE_NODE, 12, migrate="overlap", planning="beside", plan_s=plan_s)
    moved = [one for one in serving.decisions.records if one.made]
    assert moved and all(one.done_s is not None and one.done_s >= one.at_s + plan_s + 8.0 for one in moved)
    if plan_s == 1000.0:
        still = replaced("nothing", ONE_NODE, 12)
        assert len(moved) == 1 and serving.now_s == still.now_s


@pytest.mark.parametrize("migrate", ["overlap", "pipelined"])
@pytest.mark.parametrize(("static", "planning", "new"), [(True, "wait", 4), (False, "free", 130)])
def test_a_full_queue_is_placed_for_before_each_batch(migrate: str, static: bool, planning: str, new: int) -> None:
    """Batches that wait for planning, and batches that requests join, cannot be placed for during the last one."""
    serving = replaced("queue", ONE_NODE, 12, static, new, migrate=migrate, planning=planning, plan_s=0.5)
    began = {batch.began_s for batch in serving.batches}
    placed = {one.at_s + one.waited_s for one in serving.decisions.records}
    assert len(serving.batches) >= 6 and len(placed & began) >= len(began) // 2


def test_copies_from_another_server_share_its_link_with_tokens() -> None:
    """As with `copies=links`; within a server, `copies=host` leaves the links to tokens."""
    free, host, links = (
        replaced("queue", TWO_NODES, 12, migrate=migrate, copies=copies)
        for migrate, copies in (("overlap", "host"), ("pipelined", "host"), ("pipelined", "links"))
    )
    assert host.moved_GG[0, 1] > 0
    assert host.now_s == links.now_s > free.now_s
    inside = [replaced("queue", ONE_NODE, 12, migrate=migrate).now_s for migrate in ("overlap", "pipelined")]
    assert inside[0] == inside[1]


def test_a_server_sends_one_copy_after_the_other() -> None:
    """Three servers receive 1,000 bytes each from the first, which sends 3,000."""
    cluster = Cluster(servers=tuple(Server(name=name, gpus=(SLOW,)) for name in "abcd"), link_bytes_s=100.0)
    moves = [Move(kind="copy", layer=0, expert=g, gpu=g, source=0, bytes=1000) for g in (1, 2, 3)]
    assert transfer_seconds(moves, cluster, host=True) == (30.0, 30.0)


def test_links_of_several_gpus_are_busy_for_at_most_the_whole_time() -> None:
    """Four GPUs send to four of another server at once, each at the link's rate."""
    gpu = Gpu(memory_bytes=4000)
    cluster = Cluster(servers=tuple(Server(name=name, gpus=(gpu,) * 4) for name in "ab"), link_bytes_s=1.0)
    placed_GLE = np.zeros((8, 2, 4), bool)
    placed_GLE[4:] = np.eye(4, dtype=bool)[:, None]
    quick = AssumedRank(costs=AssumedCosts(dense_s=1e-3, dense_token_s=0.0, expert_s=1e-3, expert_token_s=0.0))
    machines = RankMachines(spec=SPEC, cluster=cluster, seconds=quick, token_bytes=100)
    requests = [request(n, 0.0, 8, 8, expert=n % 4) for n in range(8)]
    serving = LockstepServing(machines, requests, static(SPEC, cluster, placed_GLE), ServingOptions(static=True))
    serving.run()
    busy = {name: share for name, _, share in collect_ranks(serving, "uniform", 0).links}
    assert busy["a -> b"] == busy["b -> a"] == pytest.approx(0.5, abs=0.01)  # half of the time in each direction
