"""TCP listener for peer connections."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection

from moetool.base.errors import MoetoolError
from moetool.cluster.certificates import Identity
from moetool.cluster.frames import ConnectionLost, FrameConnection, LinkError

_LOG = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
_STRANGERS = 64
"""Limit of pending handshakes; a new connection drops the oldest."""
_REFUSAL_S = 1.0
"""Least seconds between log lines about refused connections."""


class Acceptor:
    """Accepts connections from processes of the cluster, each served in its own thread.

    Args:
        sock: a bound, listening socket.
        identity: this process's key and certificate.
        roles: accepted roles of callers.
        serve: called with each connection, which ends when it returns or raises `LinkError`.
        limit_bytes: largest message accepted.
        most: limit of open connections, besides pending handshakes; others are closed at once.
        rest_s: total seconds that `close` waits for running calls.

    Effects: owns the socket; starts threads, which `close` ends.
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
        """Stop accepting, close all connections, and wait up to `rest_s` for their threads."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes up `accept`
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
                time.sleep(0.05)  # e.g. out of file descriptors
                continue
            try:
                self._take(FrameConnection(sock, self._limit_bytes), str(caller[0]))
            except (OSError, RuntimeError):  # the connection has ended, or no thread can start; keep accepting
                sock.close()

    def _take(self, connection: FrameConnection, caller: str) -> None:
        """Serve a connection in its own thread. Raises: RuntimeError: no thread can start."""
        with self._lock:
            if self._closed:
                connection.close()
                return
            if len(self._strangers) >= _STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.close()
            thread = threading.Thread(target=self._serve, args=(connection, caller), name="peer-call", daemon=True)
            thread.start()  # the thread waits for this lock before it removes itself from the list
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
        except ConnectionLost as error:
            _LOG.debug("a peer on port %d has disconnected: %s", self.address[1], error)
        except LinkError as error:
            _LOG.warning("ended the connection of peer %d on port %d: %s", connection.number, self.address[1], error)
        finally:
            with self._lock:
                self._open.pop(connection, None)
                self._strangers.pop(connection, None)
            connection.close()

    def _admit(self, connection: FrameConnection) -> bool:
        """Register an authenticated connection if the limit allows."""
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
    """Open a socket for an `Acceptor`; port 0 takes any free one. Raises: MoetoolError: the address cannot be used."""
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
