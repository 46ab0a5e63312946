"""Connections among the ranks of a generation, each with every other, and swaps of messages over them."""

import threading
import time
from collections.abc import Sequence
from typing import Any

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import FrameConnection, LinkError, pack
from moetool.cluster.parallel.channel import connect

_POLL_S = 0.005
"""Seconds of polling for a message before the thread sleeps: waking it on an idle core can take longer than a swap."""

_AT_ONCE_BYTES = 2**17
"""Largest message that is copied and sent by the thread that receives the others' (assumed)."""

Parts = Sequence[Any]
"""Buffers of one message."""


class Arrivals:
    """Connections of other ranks that join a generation, until this rank takes them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[tuple[int, int], FrameConnection] = {}  # by generation and GPU
        self._newest, self._closed = 0, False

    def keep(self, connection: FrameConnection, generation: int, gpu: int) -> None:
        """Keep a connection, on the thread of its listener, until its generation is over."""
        with self._changed:
            self._kept[generation, gpu] = connection
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._newest > generation)
            self._kept.pop((generation, gpu), None)

    def take(self, generation: int, gpus: Sequence[int], by: float) -> list[FrameConnection]:
        """Wait for the connections of these ranks; those of earlier generations end.

        Raises:
            LinkError: one has not arrived by this time of `time.monotonic`.
        """
        wanted = [(generation, gpu) for gpu in gpus]
        with self._changed:
            self._newest = max(self._newest, generation)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._kept.keys() >= set(wanted), max(0.0, by - time.monotonic())):
                late = [gpu for at, gpu in wanted if (at, gpu) not in self._kept]
                raise LinkError(f"GPU {late[0]} did not connect in time")
            return [self._kept[at] for at in wanted]

    def close(self) -> None:
        """End all connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Mesh:
    """Connections of one rank to all others of a generation, over mutual TLS.

    Ranks swap messages in lockstep: each sends one to every other and receives one from it. Messages that fit in the
    connections' buffers are sent by the calling thread alone.

    Args:
        generation: number of the group. Ranks of different generations never meet.
        rank: 0 to the number of ranks - 1 in this generation.
        members: GPU and address of each rank.
        identity: this rank's key and certificate.
        arrivals: connections from ranks with higher numbers.
        timeout_s: time limit of a swap in seconds, and of connecting.
        limit_bytes: largest message accepted.

    Effects: waits until all ranks have connected. `close` ends the connections.

    Raises:
        LinkError: a rank has not connected in time.
    """

    def __init__(
        self,
        generation: int,
        rank: int,
        members: Sequence[tuple[int, tuple[str, int]]],
        *,
        identity: Identity,
        arrivals: Arrivals,
        timeout_s: float = 5.0,
        limit_bytes: int = 2**30,
    ) -> None:
        self.generation, self.rank, self.size, self.timeout_s = generation, rank, len(members), timeout_s
        self._swaps = 0
        self._connections: dict[int, FrameConnection] = {}
        by = time.monotonic() + timeout_s
        try:
            for other, (gpu, address) in enumerate(members[:rank]):
                channel = connect(address, identity, f"rank-{gpu}")
                self._connections[other] = channel.connection
                channel.send({"generation": generation})
            higher = range(rank + 1, self.size)
            arrived = arrivals.take(generation, [members[other][0] for other in higher], by)
            self._connections |= dict(zip(higher, arrived, strict=True))
        except BaseException:
            self.close()
            raise
        for connection in self._connections.values():
            connection.limit_bytes = limit_bytes

    def swap(self, messages: Sequence[Parts]) -> list[Parts]:
        """Send a message to each rank and receive one from each; this rank's own message is returned as it is.

        Raises:
            LinkError: a rank was lost, or the time limit passed.
        """
        by = time.monotonic() + self.timeout_s
        self._swaps += 1
        unsent: list[tuple[FrameConnection, bytes, Parts]] = []
        failures: list[LinkError] = []
        sending: threading.Thread | None = None
        received = list(messages)
        try:
            for step in range(1, self.size):
                other = (self.rank + step) % self.size
                connection, parts = self._connections[other], messages[other]
                data = pack({}, parts, call=self._swaps)
                if sum(map(len, parts)) > _AT_ONCE_BYTES:
                    unsent.append((connection, data, parts))
                    continue
                data = b"".join((data, *parts))
                if (sent := connection.send_at_once(data)) < len(data):
                    unsent.append((connection, data[sent:], ()))
            if unsent:  # others may not receive before they have sent
                sending = threading.Thread(target=self._send, args=(unsent, by, failures), name="swap", daemon=True)
                sending.start()
            for step in range(1, self.size):  # senders and receivers take turns alike, so none waits in a circle
                other = (self.rank - step) % self.size
                frame = self._connections[other].receive(by, poll_s=_POLL_S)
                if frame.call != self._swaps:
                    raise LinkError(f"rank {other} is at swap {frame.call}, expected {self._swaps}")
                received[other] = frame.parts
        except LinkError:
            self.close()  # ends the sending thread and the other ranks' swaps too
            raise
        finally:
            if sending is not None:
                sending.join()
                if failures:
                    raise failures[0]
        return received

    def close(self) -> None:
        """End the connections, from any thread; a running swap fails here and at the other ranks."""
        for connection in list(self._connections.values()):
            connection.close()

    def _send(
        self, unsent: Sequence[tuple[FrameConnection, bytes, Parts]], by: float, failures: list[LinkError]
    ) -> None:
        try:
            for connection, data, parts in unsent:
                connection.send(data, parts, by)
        except LinkError as error:
            failures.append(error)
            self.close()  # ends the receiving thread too
