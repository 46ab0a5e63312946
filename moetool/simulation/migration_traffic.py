"""Migration traffic while the cluster serves: moves take link time."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moetool.placement.plan import Move
from moetool.simulation.event_loop import CALL

if TYPE_CHECKING:
    from moetool.simulation.event_loop import EventLoop


class Moving:
    """The moves of one migration, each started after its dependencies.

    A move waits for the previous one on the same GPU, which frees memory. It also waits for the previous one of the
    same expert, which some GPU or host always holds. Other moves run concurrently. A copy between servers passes its
    link's queue in pieces, interleaved with messages of requests. A GPU uses an expert once it is complete. Copies
    within a server come from host memory at its rate, without a queue.

    Args:
        piece_bytes: bytes per entry in a link's queue.
        done: called with the end time of the last move.
    """

    def __init__(
        self, engine: "EventLoop", moves: Sequence[Move], piece_bytes: int, done: Callable[[float], None]
    ) -> None:
        self._moves, self._piece, self._done = moves, piece_bytes, done
        self._server_G, self._gpus = engine.cluster.server_G, engine.cluster.gpus
        self._left = len(moves)
        self._then: list[list[int]] = [[] for _ in moves]
        self._waits = [0] * len(moves)
        last: dict[tuple[int, ...], int] = {}
        for i, move in enumerate(moves):
            before = {last.get((move.gpu,)), last.get((move.layer, move.expert))} - {None}
            for j in before:
                self._then[j].append(i)  # type: ignore[index]
            self._waits[i] = len(before)
            last[move.gpu,] = last[move.layer, move.expert] = i
        for i, waits in enumerate(self._waits):
            if not waits:
                engine.at(engine.now_s, CALL, self._begin_of(i))
        engine.moving += bool(moves)
        if not moves:
            done(engine.now_s)

    def _begin_of(self, i: int) -> "Callable[[EventLoop, float], None]":
        def begin(engine: "EventLoop", now_s: float) -> None:
            move = self._moves[i]
            home = self._server_G[move.gpu]
            source = -1 if move.source < 0 else self._server_G[move.source]
            if move.kind == "copy" and source >= 0 and source != home:
                self._send(engine, i, engine.network.queue_GG[move.source][move.gpu], move.bytes)
            elif move.bytes:
                engine.at(now_s + move.seconds, CALL, self._end_of(i))
            else:
                self._end_of(i)(engine, now_s)

        return begin

    def _send(self, engine: "EventLoop", i: int, queue: int, left: int) -> None:
        """Queue the next piece; its successor follows after its transfer and load."""
        link = engine.link_Q[queue]
        began = max(engine.now_s, link[0])
        size = min(self._piece, left)
        sent = began + size * link[1]
        link[0] = sent
        engine.moved_Q[queue] += size
        loaded = max(sent, began + size / self._gpus[self._moves[i].gpu].host_to_device_bytes_s)
        if left > size:
            engine.at(loaded, CALL, lambda engine, now_s: self._send(engine, i, queue, left - size))
        else:
            engine.at(loaded + link[2], CALL, self._end_of(i))

    def _end_of(self, i: int) -> "Callable[[EventLoop, float], None]":
        def end(engine: "EventLoop", now_s: float) -> None:
            move = self._moves[i]
            if move.kind == "copy":
                engine.routing.add(move.layer, move.expert, move.gpu)
            elif move.kind in ("drop", "stage"):
                engine.routing.remove(move.layer, move.expert, move.gpu)
            self._left -= 1
            if not self._left:
                engine.moving -= 1
                self._done(now_s)
            for j in self._then[i]:
                self._waits[j] -= 1
                if not self._waits[j]:
                    self._begin_of(j)(engine, now_s)

        return end
