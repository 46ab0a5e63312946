"""A connection between two processes of a group of ranks: messages with raw bytes, both ways."""

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
"""Seconds in which a peer must accept a message, and least rate for longer ones."""


class RankChannel:
    """One end of a connection; `send` from any thread, `receive` from one.

    Mutual TLS (`moetool.cluster.frames`).
    """

    def __init__(self, connection: FrameConnection) -> None:
        self.connection = connection
        self._sending = threading.Lock()

    @property
    def gpu(self) -> int:
        """The calling rank's number, by its certificate."""
        return self.connection.number

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Send a message. Raises: LinkError: the peer does not accept it in time; this closes the connection."""
        text = json.dumps(message, separators=(",", ":")).encode()  # a part, since it may be longer than a head
        with self._sending:
            try:
                by = time.monotonic() + TAKEN_S + (len(text) + len(data)) / LEAST_BYTES_S
                self.connection.send(pack({}, [text, data]), [text, data], by)
            except LinkError:
                self.close()  # a partial message may have been sent, and the receiving thread must notice
                raise

    def receive(self, into: memoryview | None = None, timeout_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Receive the next message and its bytes.

        Args:
            into: buffer for the bytes if they fit; then none are returned.
            timeout_s: time limit (default: none).

        Raises:
            LinkError: the connection ended, the time limit passed, or the message is malformed or too large.
        """
        found = self.connection.receive(None if timeout_s is None else time.monotonic() + timeout_s)
        try:
            text, data = found.parts
            message: dict[str, Any] = json.loads(bytes(text))
            if not isinstance(message, dict):
                raise ValueError
        except (ValueError, RecursionError):
            raise LinkError("the other end sent a message that cannot be read") from None
        if into is not None and len(data) <= len(into):
            into[: len(data)] = data
            return message, b""
        return message, bytes(data)

    def close(self) -> None:
        """Close the connection; a receiving thread gets `LinkError`."""
        self.connection.close()


def connect(address: tuple[str, int], identity: Identity, name: str) -> RankChannel:
    """Connect to a process by address and certificate name. Raises: LinkError: no answer, or another process."""
    return RankChannel(dial(address, identity.calling(), name, time.monotonic() + HANDSHAKE_S, _MOST_BYTES))


def open_listener(host: str, identity: Identity, on_channel: Callable[[RankChannel], None]) -> Acceptor:
    """Accept connections of ranks on a free port; `on_channel` is called with each in its own thread."""

    def serve(connection: FrameConnection) -> None:
        on_channel(RankChannel(connection))

    return Acceptor(listen(host), identity, ("rank",), serve, limit_bytes=_MOST_BYTES, most=_MOST_PEERS)
