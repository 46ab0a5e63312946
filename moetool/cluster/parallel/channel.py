"""A connection between two processes of a group of ranks: messages either way, with bytes after them."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import FrameConnection, LinkError, dial, pack
from moetool.cluster.listener import HANDSHAKE_S, Acceptor, listen

_MOST_BYTES = 64 * 2**20
_MOST_PEERS = 4096
TAKEN_S, LEAST_BYTES_S = 5.0, 1e6
"""A peer that takes nothing of a message for so long, or takes it slower, is given up."""


class RankChannel:
    """One end of a connection. `send` from any thread, `receive` from one.

    TLS with certificates of both ends (`moetool.cluster.frames`).
    """

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Raises: LinkError, also where the other end takes nothing for five seconds: then the connection is ended."""
        text = json.dumps(message, separators=(",", ":")).encode()  # a part, since it may be longer than a head
        with self._sending:
            try:
                by = time.monotonic() + TAKEN_S + (len(text) + len(data)) / LEAST_BYTES_S
                self._connection.send(pack({}, [text, data]), [text, data], by)
            except LinkError:
                self.close()  # half a message may be on its way, and the receiving thread must know
                raise

    def receive(self, into: memoryview | None = None, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """The next message and its bytes.

        Args:
            into: where the bytes go if they fit; then none are returned.
            timeout_s: how long to wait; for ever without.

        Raises:
            LinkError: there is none, or not in time; it is no message, or too large for one.
        """
        found = self._connection.receive(None if timeout_s is None else time.monotonic() + timeout_s)
        try:
            text, data = found.parts
            message: dict[str, Any] = json.loads(bytes(text))
        except ValueError:
            raise LinkError("the other end sent a message that cannot be read") from None
        if into is not None and len(data) <= len(into):
            into[: len(data)] = data
            return message, b""
        return message, bytes(data)

    def close(self) -> None:
        """End it; a thread that receives gets `LinkError`."""
        self._connection.close()


def connect(address: tuple[str, int], identity: Identity, name: str) -> RankChannel:
    """Raises: LinkError: the process of that name does not answer there, or not with a certificate of the cluster."""
    return RankChannel(dial(address, identity.calling(), name, time.monotonic() + HANDSHAKE_S, _MOST_BYTES))


def open_listener(host: str, identity: Identity, on_channel: Callable[[RankChannel], None]) -> Acceptor:
    """Take connections of ranks on a free port, and have `on_channel` called with each, on a thread of its own."""

    def serve(connection: FrameConnection) -> None:
        on_channel(RankChannel(connection))

    return Acceptor(listen(host), identity, ("rank",), serve, limit_bytes=_MOST_BYTES, most=_MOST_PEERS)
