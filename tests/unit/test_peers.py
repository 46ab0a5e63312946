"""Whom to ask among the servers that have an expert."""

import pytest

from moetool.cluster.edge.peers import Peers
from moetool.cluster.frames import LinkError
from tests.clusters import make_cluster

ADDRESSES = [None, ("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3)]


class _Clock:
    now = 0.0


def _peers(distance: tuple[float, ...] = (0.0, 1.0, 1.0, 2.0)) -> tuple[Peers, _Clock]:
    clock = _Clock()
    peers = Peers(0, b"t", distance, clock=lambda: clock.now)
    peers.update(ADDRESSES)
    return peers, clock


def test_the_nearest_and_then_the_least_loaded() -> None:
    peers, _ = _peers()
    assert peers.choose([3], 1) == 3
    assert peers.choose([1, 2, 3], 1) == 1  # none has been measured: the first
    peers.answered(1, 10, 1.0)
    peers.answered(2, 10, 0.5)
    assert peers.choose([1, 2, 3], 1) == 2  # equally near, and faster
    peers.expect(2, 5)
    assert peers.choose([1, 2, 3], 1) == 1  # six pairs of 0.05 s there, one of 0.1 s here
    peers.expect(2, -5)
    assert peers.choose([1, 2, 3], 1) == 2
    assert peers.choose([1, 2, 3], 1, tried=[1, 2]) == 3
    assert peers.choose([0, 3], 1, tried=[3]) is None  # 0 is this server


def test_who_failed_is_left_alone_for_longer_each_time() -> None:
    peers, clock = _peers()
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        peers.failed(1)
        clock.now += seconds - 0.01
        assert peers.choose([1], 1) is None and peers.choose([1, 3], 1) == 3
        clock.now += 0.01
        assert peers.choose([1], 1) == 1
    peers.answered(1, 1, 0.1)
    peers.failed(1)
    clock.now += 1.0
    assert peers.choose([1], 1) == 1
    peers.failed(1)
    peers.update(ADDRESSES)  # nothing is new
    assert peers.choose([1], 1) is None
    peers.update([None, ("127.0.0.1", 9), *ADDRESSES[2:]])  # it started anew
    assert peers.choose([1], 1) == 1


def test_who_is_gone_is_not_asked() -> None:
    peers, _ = _peers()
    peers.update([None, None, ("127.0.0.1", 2)])
    assert peers.choose([1, 3], 1) is None
    with pytest.raises(LinkError, match="server 1 is not there just now"):
        peers.call(1, {}, (), timeout_s=1).result(1)


def test_distance_is_that_of_the_links() -> None:
    cluster = make_cluster([[1], [1]], link_bytes_s=100.0, link_latency_s=0.25)
    assert cluster.round_trip_s(0, 1, 50) == 2 * (0.25 + 0.5)
