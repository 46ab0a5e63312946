"""TCP listener for peer connections."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import FrameConnection, LinkError
from moetool.errors import MoetoolError

_LOG = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
_STRANGERS = 64
"""Connections whose handshake has not ended; the oldest makes room for the next."""
_REFUSAL_S = 1.0
"""At most one refused connection is logged in so long."""


class Acceptor:
    """Takes connections from processes of the cluster, each served on a thread of its own.

    Args:
        sock: bound and listening.
        identity: of this process.
        roles: of processes that may call.
        serve: is given each connection; it ends when this returns or raises `LinkError`.
        limit_bytes: of a message.
        most: connections at a time, beside those whose handshake has not ended; others are closed at once.
        rest_s: that `close` waits for calls under way, all together.

    Effects: owns the socket; starts a thread. `close` ends all of them.
    """

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        roles: Collection[str],
        serve: Callable[[FrameConnection], None],
        *,
        limit_bytes: int,
        most: int = 256,
        rest_s: float = 10.0,
    ) -> None:
        self._sock, self._context, self._roles, self._serve_peer = sock, identity.answering(), roles, serve
        self._limit_bytes, self._most, self._rest_s = limit_bytes, most, rest_s
        host, port = sock.getsockname()[:2]
        self.address = (str(host), int(port))
        self._lock = threading.Lock()
        self._open: dict[FrameConnection, threading.Thread] = {}
        self._strangers: dict[FrameConnection, threading.Thread] = {}
        self._closed = False
        self._told_at = -_REFUSAL_S
        self._thread = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more, end all connections, and wait a while for their threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._sock.close()
        self._thread.join()
        with self._lock:
            left = self._open | self._strangers
        for connection in left:
            connection.close()
        by = time.monotonic() + self._rest_s
        for thread in left.values():
            thread.join(max(0.0, by - time.monotonic()))

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, caller = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                _LOG.warning("cannot accept peers on port %d: %s", self.address[1], error)
                time.sleep(0.05)  # no file descriptor is free, say
                continue
            try:
                self._take(FrameConnection(sock, self._limit_bytes), str(caller[0]))
            except (OSError, RuntimeError):  # it has ended already, or no thread can be started: others will come
                sock.close()

    def _take(self, connection: FrameConnection, caller: str) -> None:
        """Serve a connection on its own thread. Raises: RuntimeError: none can be started."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
            thread = threading.Thread(target=self._serve, args=(connection, caller), name="peer-call", daemon=True)
            thread.start()  # it waits for the lock before it takes itself off the list
            self._strangers[connection] = thread

    def _serve(self, connection: FrameConnection, caller: str) -> None:
        by = time.monotonic() + HANDSHAKE_S
        try:
            try:
                connection.answer(self._context, self._roles, by)
            except LinkError as error:
                self._tell(caller, error)
                return
            if self._admit(connection):
                connection.welcome(by)
                self._serve_peer(connection)
        except LinkError as error:  # the caller has ended, or was not a peer
            _LOG.debug("a peer on port %d has disconnected: %s", self.address[1], error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
                self._strangers.pop(connection, None)
            connection.close()

    def _admit(self, connection: FrameConnection) -> bool:
        """Count a connection from the cluster among those that are open, if there is room."""
        with self._lock:
            thread = self._strangers.pop(connection, None)
            if thread is None or self._closed:
                return False
            if len(self._open) >= self._most:
                _LOG.warning("refused a peer on port %d: %d are connected", self.address[1], len(self._open))
                return False
            self._open[connection] = thread
            return True

    def _tell(self, caller: str, error: LinkError) -> None:
        with self._lock:
            now = time.monotonic()
            if self._closed or now - self._told_at < _REFUSAL_S:
                return
            self._told_at = now
        _LOG.warning("refused a connection from %s on port %d: %s", caller, self.address[1], error)


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket for an `Acceptor`; port 0 takes any free one. Raises: MoetoolError where that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise MoetoolError(f"cannot listen for peers on {host} port {port} ({error.strerror or error})") from None
    return sock
