"""Stages of a migration, compute phases and channels of ranks, without a model."""

import contextlib
import socket
import threading
import time
from dataclasses import asdict

import numpy as np
import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.cluster.frames import LinkError
from moetool.cluster.links import Bucket
from moetool.cluster.parallel.channel import RankChannel, connect, open_listener
from moetool.cluster.parallel.compute_windows import Windows
from moetool.cluster.parallel.rank_options import RankOptions
from moetool.cluster.parallel.staged_migration import MigrationStage, plan_stages
from tests.identities import identity
from tests.placements import random_placement
from tests.refusals import refused
from tests.servers import PATIENCE_S


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
    closed.join(PATIENCE_S)
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
    link = Bucket(1e6)
    began = time.perf_counter()
    threads = [threading.Thread(target=link.take, args=(20_000,)) for _ in range(3)]
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
        with socket.create_connection(listener.address, timeout=PATIENCE_S) as raw:
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
