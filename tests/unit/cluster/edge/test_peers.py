"""Whom to ask among the servers that have an expert."""

from concurrent.futures import Future

import pytest

from moetool.cluster.edge.peers import Peers
from moetool.cluster.frames import Frame, LinkError
from tests.clusters import make_cluster
from tests.identities import identity
from tests.refusals import refused

ADDRESSES = [None, ("127.0.0.1", 1), ("127.0.0.1", 2), ("127.0.0.1", 3)]


class _Clock:
    now = 0.0


def _peers(distance: tuple[float, ...] = (0.0, 1.0, 1.0, 2.0)) -> tuple[Peers, _Clock]:
    clock = _Clock()
    peers = Peers(0, identity("server-0"), distance, clock=lambda: clock.now)
    peers.update(ADDRESSES)
    return peers, clock


def test_the_nearest_and_then_the_least_loaded() -> None:
    peers, _ = _peers()
    assert peers.choose([3], 1) == 3
    assert peers.choose([1, 2, 3], 1) == 1  # none has been measured: the first
    peers.answered(1, 10, 1.0)
    peers.answered(2, 10, 0.5)
    assert peers.choose([1, 2, 3], 1) == 2  # equally near, and faster
    for _ in range(200):
        peers.answered(1, 1, 0.1)
        peers.answered(2, 1, 0.05)
    assert peers.choose([1, 2, 3], 1) == 2
    peers.expect(2, 5)
    assert peers.choose([1, 2, 3], 1) == 1  # six pairs of about 0.05 s there, one of 0.1 s here
    peers.expect(2, -5)
    assert peers.choose([1, 2, 3], 1) == 2
    assert peers.choose([1, 2, 3], 1, tried=[1, 2]) == 3
    assert peers.choose([0, 3], 1, tried=[3]) is None  # 0 is this server


def test_a_server_that_is_called_anyway_takes_few_more_pairs() -> None:
    peers, _ = _peers()
    for pairs in (4, 8, 12, 16) * 50:
        for server in (1, 2):
            peers.answered(server, pairs, 0.002 + 1e-4 * pairs)  # 2 ms per call, 0.1 ms per pair
    peers.expect(1, 10)
    assert peers.choose([1, 2], 4) == 2  # neither is called yet: the one without pairs
    assert peers.choose([1, 2], 4, called=[1]) == 1  # 1.4 ms there, 2.4 ms with another call
    peers.expect(1, 20)
    assert peers.choose([1, 2], 4, called=[1]) == 2  # 3.4 ms there: both compute at the same time
    assert peers.choose([1, 2], 4, called=[1, 2]) == 2
    assert peers.choose([1, 2], 4, tried=[2], called=[2]) == 1


def test_servers_begin_with_different_ones_of_equals() -> None:
    first = []
    for server in range(3):
        peers = Peers(server, identity(f"server-{server}"), (1.0,) * 3)
        peers.update([("127.0.0.1", 1 + n) for n in range(3)])
        first.append(peers.choose([n for n in range(3) if n != server], 1))
    assert first == [1, 2, 0]


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


def test_how_long_calls_usually_take() -> None:
    peers, clock = _peers()
    assert peers.usual_s(1, 10) is None
    for _ in range(200):
        peers.answered(1, 10, 0.1)
    assert peers.usual_s(1, 10) == pytest.approx(0.2) and peers.usual_s(1, 100) == pytest.approx(2.0)
    assert peers.usual_s(2, 10) == pytest.approx(0.2)  # which has not been called
    peers.answered(1, 10, 0.6)  # half a second more than usual
    clock.now = 31.0
    for _ in range(200):
        peers.answered(1, 10, 0.1)
    assert peers.usual_s(1, 10) == pytest.approx(2 * (0.1 + 0.3))  # it was not long ago, and counts in part
    clock.now = 61.0
    peers.answered(1, 10, 0.1)
    assert peers.usual_s(1, 10) == pytest.approx(0.2)


def test_stalls_do_not_make_callers_wait_ever_longer() -> None:
    peers, _ = _peers()
    for _ in range(20):
        peers.answered(1, 4, 0.004)
    for stall_s in (0.5, 1.0, 2.0, 4.0, 8.0):
        peers.answered(1, 4, stall_s)
        for _ in range(5):
            peers.answered(1, 4, 0.004)
    usual_s = peers.usual_s(1, 4)
    assert usual_s is not None and usual_s < 0.7
    for _ in range(20):
        peers.answered(1, 4, 2.0)  # but one that has become slow is given the time
    usual_s = peers.usual_s(1, 4)
    assert usual_s is not None and usual_s > 4.0


def test_who_owes_an_answer_is_asked_by_those_only_who_have_nobody_else() -> None:
    peers, clock = _peers()
    peers.answered(1, 1, 0.1)
    late: Future[Frame] = Future()
    peers.overdue(1, 1, 0.5, late)
    assert peers.choose([1], 1) is None and peers.choose([1], 1, wait=True) == 1
    assert peers.choose([1, 3], 1) == peers.choose([1, 3], 1, wait=True) == 3
    late.set_result(Frame(head={}))
    assert peers.choose([1, 3], 1) == 1
    usual_s = peers.usual_s(1, 1)
    assert usual_s is not None and 0.6 < usual_s < 1.0  # more than before, and not twice what was waited
    broken: Future[Frame] = Future()
    peers.overdue(1, 1, 0.5, broken)
    broken.set_exception(LinkError("server 1: the peer did not answer in time"))
    assert peers.choose([1], 1, wait=True) is None  # it has failed
    clock.now += 1.0
    assert peers.choose([1], 1) == 1


def test_who_is_gone_is_not_asked() -> None:
    peers, _ = _peers()
    peers.update([None, None, ("127.0.0.1", 2)])
    assert peers.choose([1, 3], 1) is None
    with refused(LinkError, "server 1"):
        peers.call(1, {}, (), timeout_s=1).result(1)


def test_distance_is_that_of_the_links() -> None:
    cluster = make_cluster([[1], [1]], link_bytes_s=100.0, link_latency_s=0.25)
    assert cluster.round_trip_s(0, 1, 50) == 2 * (0.25 + 0.5)
