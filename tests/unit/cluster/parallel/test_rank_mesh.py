"""Swaps of messages among the ranks of a generation."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from moetool.cluster.certificates import Authority
from moetool.cluster.frames import FrameConnection, LinkError
from moetool.cluster.listener import Acceptor
from moetool.cluster.parallel.channel import RankChannel, open_listener
from moetool.cluster.parallel.process_group import Group, GroupBroken
from moetool.cluster.parallel.rank_mesh import Arrivals, Mesh
from moetool.cluster.parallel.rank_options import RankOptions
from tests.identities import identity
from tests.refusals import refused
from tests.servers import PATIENCE_S

RANKS = 3


def in_threads(run: Callable[[int], Any], ranks: Sequence[int] = range(RANKS)) -> list[Any]:
    """Return the result or the error of each rank."""
    results: dict[int, Any] = {}

    def keep(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=keep, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return [results[rank] for rank in ranks]


@contextmanager
def listening(number: int = RANKS) -> Iterator[tuple[list[Acceptor], list[Arrivals]]]:
    """Listeners of ranks, and what arrives at each."""
    arrivals = [Arrivals() for _ in range(number)]

    def serve(rank: int) -> Callable[[RankChannel], None]:
        def keep(channel: RankChannel) -> None:
            joins, _ = channel.receive()
            arrivals[rank].keep(channel.connection, joins["generation"], channel.gpu)

        return keep

    with ExitStack() as stack:
        listeners = []
        for rank in range(number):
            listeners.append(open_listener("127.0.0.1", identity(f"rank-{rank}"), serve(rank)))
            stack.callback(listeners[-1].close)
            stack.callback(arrivals[rank].close)
        yield listeners, arrivals


@contextmanager
def meshes(generation: int = 1) -> Iterator[list[Mesh]]:
    with listening() as (listeners, arrivals):
        members = [(rank, listener.address) for rank, listener in enumerate(listeners)]

        def join(rank: int) -> Mesh:
            return Mesh(
                generation,
                rank,
                members,
                identity=identity(f"rank-{rank}"),
                arrivals=arrivals[rank],
                timeout_s=PATIENCE_S,
            )

        joined = in_threads(join)
        try:
            yield joined
        finally:
            for mesh in joined:
                mesh.close()


@pytest.mark.parametrize("num_bytes", [0, 3, 2**23], ids=["empty", "short", "beyond the sockets' buffers"])
def test_each_rank_gets_each_ones_message(num_bytes: int) -> None:
    with meshes() as joined:
        for _ in range(2):
            told = in_threads(
                lambda rank: joined[rank].swap([[bytes([rank, to]), bytes([to]) * num_bytes] for to in range(RANKS)])
            )
            for rank, messages in enumerate(told):
                expected = [[bytes([by, rank]), bytes([rank]) * num_bytes] for by in range(RANKS)]
                assert [[bytes(part) for part in message] for message in messages] == expected


def test_rows_and_counts_arrive_by_rank() -> None:
    counts_RRE = np.array([[[1, 0], [0, 2], [0, 0]], [[0, 0], [1, 1], [3, 0]], [[0, 1], [0, 0], [1, 0]]])
    rows = [torch.arange(float(3 * counts.sum())).view(-1, 3) + 100 * rank for rank, counts in enumerate(counts_RRE)]
    with meshes() as joined:
        groups = [Group(mesh) for mesh in joined]
        few = in_threads(lambda rank: groups[rank].exchange_few(rows[rank], counts_RRE[rank], 4))
        for rank, (got_YD, theirs_RE) in enumerate(few):
            assert theirs_RE.tolist() == counts_RRE[:, rank].tolist()
            parts = [rows[by].split(counts_RRE[by].sum(axis=1).tolist())[rank] for by in range(RANKS)]
            assert torch.equal(got_YD, torch.cat(parts))
        back = in_threads(
            lambda rank: groups[rank].exchange(
                few[rank][0], counts_RRE[:, rank].sum(axis=1).tolist(), counts_RRE[rank].sum(axis=1).tolist()
            )
        )
        assert all(torch.equal(mine, sent) for mine, sent in zip(back, rows, strict=True))
        assert in_threads(lambda rank: groups[rank].gather([rank, -1])) == [[[0, -1], [1, -1], [2, -1]]] * RANKS


def test_a_lost_rank_ends_the_swap_of_all() -> None:
    with meshes() as joined:
        groups = [Group(mesh) for mesh in joined]
        waiting = threading.Timer(0.2, groups[2].abort)
        waiting.start()
        first, second = in_threads(lambda rank: groups[rank].gather([1]), [0, 1])
        assert isinstance(first, GroupBroken) and isinstance(second, GroupBroken)
        with refused(GroupBroken, "aborted"):
            groups[2].gather([1])


def test_begun_exchanges_arrive_in_order_and_end_with_the_group() -> None:
    rows = [torch.full((RANKS, 4), float(rank)) for rank in range(RANKS)]
    with meshes() as joined:
        groups = [Group(mesh) for mesh in joined]

        def both(rank: int) -> list[torch.Tensor]:
            one = [1] * RANKS
            begun = [groups[rank].begin_exchange(rows[rank] + 10 * n, one, one) for n in range(2)]
            return [arrived() for arrived in begun]

        for first, second in in_threads(both):
            assert first[:, 0].tolist() == [0, 1, 2] and second[:, 0].tolist() == [10, 11, 12]
        waiting = groups[0].begin_exchange(rows[0], [1] * RANKS, [1] * RANKS)
        groups[2].abort()
        with pytest.raises(GroupBroken):
            waiting()
        with pytest.raises(GroupBroken, match="is over"):
            groups[2].begin_exchange(rows[2], [1] * RANKS, [1] * RANKS)


def test_micro_batches_need_time_that_is_idle() -> None:
    for options, on_one_machine, expected in (
        (RankOptions(), True, False),
        (RankOptions(), False, True),
        (RankOptions(link_bytes_s=1e6), True, True),
        (RankOptions(device="cuda"), False, False),
        (RankOptions(device="cuda", micro_batches=2), True, True),
        (RankOptions(micro_batches=1), False, False),
    ):
        assert options.in_halves(on_one_machine) == expected


def test_a_silent_rank_is_noticed_in_time() -> None:
    with meshes() as joined:
        for mesh in joined:
            mesh.timeout_s = 0.3
        first, second = in_threads(lambda rank: joined[rank].swap([[b""]] * RANKS), [0, 1])
        assert isinstance(first, LinkError) and isinstance(second, LinkError)


def test_another_number_of_rows_than_told_ends_the_generation() -> None:
    with meshes() as joined:
        groups = [Group(mesh) for mesh in joined]
        rows = torch.zeros(3, 4)
        results = in_threads(lambda rank: groups[rank].exchange(rows, [1, 1, 1], [1, 1, 1 + (rank == 0)]))
        assert isinstance(results[0], GroupBroken) and "another number of rows" in str(results[0])


def test_a_rank_that_does_not_join_is_named() -> None:
    with listening(2) as (listeners, arrivals):
        members = [(rank, listener.address) for rank, listener in enumerate(listeners)]
        with refused(LinkError, "GPU 1"):
            Mesh(3, 0, members, identity=identity("rank-0"), arrivals=arrivals[0], timeout_s=0.2)


def test_a_rank_of_another_authority_cannot_join() -> None:
    with listening(2) as (listeners, arrivals):
        members = [(rank, listener.address) for rank, listener in enumerate(listeners)]
        with pytest.raises(LinkError):
            Mesh(1, 1, members, identity=Authority.new().issue("rank-1"), arrivals=arrivals[1], timeout_s=1.0)


def test_a_link_that_fails_while_sending_ends_the_swap_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    send, failing = FrameConnection.send_at_once, set()

    def fails(connection: FrameConnection, data: bytes) -> int:
        if threading.get_ident() in failing:
            raise LinkError("lost")
        return send(connection, data)

    def swap(rank: int) -> Any:
        if rank == 0:
            failing.add(threading.get_ident())
        return joined[rank].swap([[b"x"]] * RANKS)

    monkeypatch.setattr(FrameConnection, "send_at_once", fails)
    with meshes() as joined:
        began = time.monotonic()
        assert all(isinstance(result, LinkError) for result in in_threads(swap))
        assert time.monotonic() - began < 30


@pytest.mark.parametrize("message", [[b"x" * 8, b""], [b"x" * 7], []], ids=["two parts", "too short", "none"])
def test_a_message_of_another_form_ends_the_generation(message: list[bytes]) -> None:
    with meshes() as joined:
        groups = [Group(mesh) for mesh in joined]
        results = in_threads(lambda rank: groups[rank].gather([1]) if rank else joined[0].swap([message] * RANKS))
        assert all(isinstance(result, GroupBroken) and "of another form" in str(result) for result in results[1:])
        with pytest.raises(GroupBroken, match="is over"):
            groups[1].gather([1])
