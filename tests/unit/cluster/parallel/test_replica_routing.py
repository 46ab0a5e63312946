"""Routing between ranks, stages of a migration, compute phases and channels, without a model."""

import contextlib
import socket
import threading
import time
from dataclasses import asdict

import numpy as np
import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.cluster.frames import LinkError
from moetool.cluster.parallel.channel import RankChannel, connect, open_listener
from moetool.cluster.parallel.compute_windows import EmulatedMachine, Windows
from moetool.cluster.parallel.rank_options import RankOptions
from moetool.cluster.parallel.replica_routing import destinations, holders_of, placed_of, without
from moetool.cluster.parallel.staged_migration import MigrationStage, plan_stages
from moetool.placement.latency import flows
from tests.clusters import make_cluster
from tests.identities import identity
from tests.refusals import refused


def random_placement(rng: np.random.Generator, gpus: int, layers: int, experts: int, slots: int) -> np.ndarray:
    """Every expert somewhere, and copies as far as the slots go."""
    placed_GLE = np.zeros((gpus, layers, experts), bool)
    for layer in range(layers):
        for expert in range(experts):
            free = np.flatnonzero(placed_GLE.sum(axis=(1, 2)) < slots)
            placed_GLE[rng.choice(free), layer, expert] = True
    for g in range(gpus):
        for layer, expert in rng.permutation(np.argwhere(~placed_GLE[g]))[: slots - placed_GLE[g].sum()]:
            placed_GLE[g, layer, expert] = rng.random() < 0.5
    return placed_GLE


def test_rows_go_to_the_nearest_holder_and_evenly_as_planners_reckon() -> None:
    rng = np.random.default_rng(0)
    placed_GLE = random_placement(rng, 4, 3, 8, 9)
    server_G = (0, 0, 1, 1)
    to_GLE = destinations(placed_GLE, server_G)
    for g, layer, expert in np.ndindex(to_GLE.shape):
        holders = np.flatnonzero(placed_GLE[:, layer, expert]).tolist()
        near = [h for h in holders if server_G[h] == server_G[g]] or holders
        assert to_GLE[g, layer, expert] in ([g] if g in holders else near)
    cluster = make_cluster([[9, 9], [9, 9]])
    for layer in range(3):
        tokens_GE = rng.random((4, 8))
        single_E = placed_GLE[:, layer].sum(axis=0) == 1  # where there is a choice, sources take turns
        flow_GG = flows(cluster, tokens_GE * single_E, placed_GLE[:, layer])
        mine_GG = np.zeros((4, 4))
        for g in range(4):
            for expert in np.flatnonzero(single_E):
                mine_GG[g, to_GLE[g, layer, expert]] += tokens_GE[g, expert]
        assert mine_GG == pytest.approx(flow_GG)


def test_sources_take_turns_among_holders() -> None:
    placed_GLE = np.zeros((6, 1, 6), bool)
    placed_GLE[:2] = True  # every expert on the first two of six
    to_GLE = destinations(placed_GLE, range(6))
    assert np.bincount(to_GLE[2:].ravel()).tolist() == [12, 12]


def test_without_a_gpu_its_experts_are_shared_out_and_nothing_else_moves() -> None:
    placed_GLE = random_placement(np.random.default_rng(1), 4, 2, 8, 5)
    left_GLE = without(placed_GLE, np.ones((2, 8), bool), [0, 1, 3])
    assert left_GLE.any(axis=0).all()
    assert not left_GLE[2].any()
    assert (left_GLE[[0, 1, 3]] >= placed_GLE[[0, 1, 3]]).all()
    assert left_GLE.sum() == placed_GLE[[0, 1, 3]].sum() + (~placed_GLE[[0, 1, 3]].any(axis=0)).sum()


def peak(old_GLE: np.ndarray, stages: list[MigrationStage]) -> np.ndarray:
    """The most experts [G] that each GPU holds on the way, what arrives before a switch counted."""
    now_GLE = old_GLE.copy()
    peak_G = now_GLE.sum(axis=(1, 2))
    for stage in stages:
        arrived_G = now_GLE.sum(axis=(1, 2))
        for _, _, g, _ in stage.copies:
            arrived_G[g] += 1
        peak_G = np.maximum(peak_G, arrived_G)
        stage.apply(now_GLE)
    return peak_G


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spare", [1, 3, 100])
def test_stages_keep_every_expert_and_end_at_the_new_placement(seed: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    old_GLE, new_GLE = random_placement(rng, 4, 3, 8, 8), random_placement(rng, 4, 3, 8, 8)
    slots_G = (8 + spare,) * 4
    stages = plan_stages(old_GLE, new_GLE, slots_G, version=5, server_G=(0, 0, 1, 1))
    assert [stage.version for stage in stages] == list(range(5, 5 + len(stages)))
    assert [stage.at_batch for stage in stages] == [False] * (len(stages) - 1) + [True]
    now_GLE = old_GLE.copy()
    for stage in stages:
        assert MigrationStage.from_json(asdict(stage)) == stage
        for layer, expert, gpu, source in stage.copies:
            assert now_GLE[source, layer, expert] and not now_GLE[gpu, layer, expert]
        stage.apply(now_GLE)
        assert now_GLE.any(axis=0).all()
    assert (now_GLE == new_GLE).all()
    assert sum(len(stage.copies) for stage in stages) == (new_GLE & ~old_GLE).sum()
    if spare == 100:
        assert len(stages) == 1
    if spare == 3:  # fits; where it could not, one more than fits would be held
        assert (peak(old_GLE, stages) <= 11).all()
    assert (peak(old_GLE, stages) <= 8 + spare + 1).all()


def test_a_placement_survives_its_lists() -> None:
    placed_GLE = random_placement(np.random.default_rng(3), 3, 2, 6, 6)
    assert (placed_of(holders_of(placed_GLE), 3) == placed_GLE).all()


def test_pieces_go_in_compute_phases_only() -> None:
    windows = Windows()
    windows.open(10.0)
    assert 9 < (windows.hold(0.0) or 0.0) <= 10
    closed = threading.Thread(target=windows.close, args=(60.0,))
    closed.start()
    time.sleep(0.02)
    assert closed.is_alive() and not windows.exchanging  # the all-to-all waits for the piece
    assert not windows.try_hold()  # and lets no other begin
    windows.release()
    closed.join(1.0)
    assert windows.exchanging and windows.exchanges == 1 and windows.waited_s > 0
    assert windows.hold(0.01) is None
    windows.open(0.0)
    assert windows.hold(0.0) == 0.0  # the first piece of a phase may always go, lest none ever does
    windows.release()
    assert windows.hold(0.01) is None  # the next has no time left


def test_a_pipelined_migration_heeds_no_phases() -> None:
    windows = Windows(strict=False)
    windows.close(0.0)
    assert windows.hold(0.0) == float("inf") and windows.try_hold() and windows.exchanging
    windows.close(0.0)  # waits for nobody


def test_a_piece_that_never_arrives_keeps_no_rank_from_its_all_to_all_for_ever() -> None:
    windows = Windows()
    windows.open(10.0)
    assert windows.try_hold()
    began = time.perf_counter()
    with refused(MoetoolError, "0.05 s"):
        windows.close(0.05)
    assert time.perf_counter() - began < 5 and windows.waited_s >= 0.05 and not windows.exchanging
    windows.release()
    windows.close(0.05)
    assert windows.exchanging


def test_an_emulated_link_queues() -> None:
    link = EmulatedMachine(1e6)
    began = time.perf_counter()
    threads = [threading.Thread(target=link.send, args=(20_000,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - began >= 0.06


def test_channels_carry_frames_between_ranks_only() -> None:
    def echo(channel: RankChannel) -> None:
        while True:
            message, data = channel.receive()
            channel.send(message, data)

    listener = open_listener("127.0.0.1", identity("rank-1"), echo)
    try:
        channel = connect(listener.address, identity("rank-0"), "rank-1")
        channel.send({"a": [1, "x"]}, b"bytes")
        assert channel.receive() == ({"a": [1, "x"]}, b"bytes")
        room = bytearray(5)
        channel.send({}, memoryview(b"12345"))
        assert channel.receive(memoryview(room)) == ({}, b"") and room == b"12345"
        with pytest.raises(LinkError, match=r"head-x may not call|does not accept this process"):
            connect(listener.address, identity("head-x"), "rank-1")
        with refused(LinkError, "rank-2"):
            connect(listener.address, identity("rank-0"), "rank-2")
        with socket.create_connection(listener.address, timeout=10.0) as raw:
            raw.sendall(b"\0" * 64)
            with contextlib.suppress(ConnectionResetError):
                while raw.recv(1000):  # an alert, then the end
                    pass
        channel.send({"still": "there"})
        assert channel.receive()[0] == {"still": "there"}
    finally:
        listener.close()
    with pytest.raises(LinkError):
        channel.receive()


def test_both_ends_may_send_at_once_more_than_either_takes_in() -> None:
    """Each end's thread that hears goes on while its other thread waits for the peer to take a message."""
    there: list[int] = []

    def take(channel: RankChannel) -> None:
        sender = threading.Thread(target=channel.send, args=({}, bytes(8 * 2**20)), daemon=True)
        sender.start()
        there.append(len(channel.receive()[1]))
        sender.join(30.0)
        channel.send({"done": True})
        channel.receive()

    listener = open_listener("127.0.0.1", identity("rank-1"), take)
    channel = connect(listener.address, identity("rank-0"), "rank-1")
    sender = threading.Thread(target=channel.send, args=({}, bytes(8 * 2**20)), daemon=True)
    sender.start()
    assert len(channel.receive(timeout_s=30.0)[1]) == 8 * 2**20
    assert channel.receive(timeout_s=30.0)[0] == {"done": True} and there == [8 * 2**20]
    with refused(LinkError, "time"):
        channel.receive(timeout_s=0.01)
    sender.join(30.0)
    channel.close()
    listener.close()


def test_options_of_ranks_are_checked() -> None:
    with refused(UsageError, "did you mean"):
        RankOptions(migrate="overlapp")
    with pytest.raises(UsageError):
        RankOptions(seats=0)
