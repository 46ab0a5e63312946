"""Point-to-point calls between the servers of a cluster.

Connections use mutual TLS 1.3 with certificates of the cluster's authority (`moetool.cluster.certificates`), so a
stranger can neither call a server, nor impersonate one, nor read or change messages.

Every call has a deadline. Calls are idempotent, so they may be repeated.
"""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import Frame, FrameConnection, LinkError, Lost, dial, pack
from moetool.cluster.links import Links
from moetool.cluster.listener import HANDSHAKE_S, Acceptor
from moetool.errors import MoetoolError, first_line

_LOG = logging.getLogger(__name__)


class CallRefused(MoetoolError):
    """The peer answered with a refusal."""


class Listener:
    """Answers the calls of peers, each connection in its own thread.

    Args:
        sock: a bound, listening socket.
        identity: this server's key and certificate.
        handle: returns the answer to a message; its errors are sent to the caller.
        links: this server's outgoing links, which delay answers.
        limit_bytes: largest message accepted.
        rest_s: seconds to receive the rest of a message after its first byte, and to send an answer.

    Effects: owns the socket; starts threads, which `close` ends.
    """

    def __init__(
        self,
        sock: socket.socket,
        identity: Identity,
        handle: Callable[[Frame], Frame],
        *,
        links: Links | None = None,
        limit_bytes: int = 2**30,
        rest_s: float = 10.0,
    ) -> None:
        self._handle, self._links, self._rest_s = handle, links or Links(), rest_s
        self._acceptor = Acceptor(sock, identity, ("server",), self._serve, limit_bytes=limit_bytes, rest_s=rest_s)

    @property
    def address(self) -> tuple[str, int]:
        """Address that peers connect to."""
        return self._acceptor.address

    def close(self) -> None:
        """Stop accepting calls and close all connections; calls in progress finish, but their answers are lost."""
        self._acceptor.close()

    def _serve(self, connection: FrameConnection) -> None:
        while True:
            self._answer(connection, connection.receive(None, self._rest_s))

    def _answer(self, connection: FrameConnection, message: Frame) -> None:
        try:
            answer = self._handle(message)
        except MoetoolError as error:
            answer = Frame(head={"error": first_line(error)})
        except Exception as error:  # report it to the caller and serve the next call
            _LOG.exception("a call from %s failed", message.head.get("from"))
            answer = Frame(head={"error": f"{type(error).__name__}: {first_line(error)}"})
        data = pack(answer.head, answer.parts)
        by = time.monotonic() + self._rest_s
        caller = message.head.get("from")
        if isinstance(caller, int):
            self._links.sending(caller, len(data) + sum(map(len, answer.parts)), by)
        connection.send(data, answer.parts, by)


class Channel:
    """Calls one server, one call at a time, over one connection in its own thread.

    Args:
        server: number of the called server.
        address: the called server's `Listener.address`.
        identity: the caller's key and certificate.
        caller: number of the calling server.
        links: the caller's outgoing links, which delay calls.
        limit_bytes: largest answer accepted.

    Effects: connects at the first call, and again after a failure. Starts a thread, which `close` ends.
    """

    def __init__(
        self,
        server: int,
        address: tuple[str, int],
        identity: Identity,
        *,
        caller: int,
        links: Links | None = None,
        limit_bytes: int = 2**30,
    ) -> None:
        self.address = address
        self._server, self._caller, self._context = server, caller, identity.calling()
        self._links = links or Links()
        self._limit_bytes = limit_bytes
        self._connection: FrameConnection | None = None
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[Frame, float, Future[Frame]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"call-{server}", daemon=True)
        self._thread.start()

    def call(self, head: Mapping[str, Any], parts: Sequence[Any] = (), *, timeout_s: float) -> "Future[Frame]":
        """Send a request; the future receives the answer.

        Raises (the future):
            CallRefused: the peer answered with an error.
            LinkError: the peer cannot be reached or did not answer in time.
        """
        answer: Future[Frame] = Future()
        message = Frame(head={**head, "from": self._caller}, parts=parts)
        with self._lock:
            if self._closed:
                answer.set_exception(LinkError(f"the channel to server {self._server} is closed"))
            else:
                self._jobs.put((message, time.monotonic() + timeout_s, answer))
        return answer

    def close(self) -> None:
        """Close the connection and end the thread, without waiting for it; pending calls fail."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if (connection := self._connection) is not None:
            connection.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            message, by, answer = job
            try:
                answer.set_result(self._call(message, by))
            except MoetoolError as error:
                answer.set_exception(error)
            except Exception as error:  # a bug; the caller must not wait forever
                answer.set_exception(error)
        self._disconnect()
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job[2].set_exception(LinkError(f"the channel to server {self._server} is closed"))

    def _call(self, message: Frame, by: float) -> Frame:
        data = pack(message.head, message.parts)
        try:
            self._links.sending(self._server, len(data) + sum(map(len, message.parts)), by)
            fresh = self._connection is None
            try:
                answer = self._exchange(data, message.parts, by)
            except Lost as error:
                if fresh or self._closed:
                    raise
                _LOG.info("server %d: %s; connecting again", self._server, error)
                self._disconnect()  # the peer may have restarted since the last call
                answer = self._exchange(data, message.parts, by)
        except LinkError as error:
            self._disconnect()
            _LOG.info("server %d at %s:%d gave no answer: %s", self._server, *self.address, error)
            raise LinkError(f"server {self._server}: {error}") from None
        if (reason := answer.head.get("error")) is not None:
            raise CallRefused(f"server {self._server}: {reason}")
        return answer

    def _exchange(self, data: bytes, parts: Sequence[Any], by: float) -> Frame:
        if self._closed:
            raise LinkError("the connection is closed")
        connection = self._connection or self._connect(by)
        connection.send(data, parts, by)
        return connection.receive(by)

    def _connect(self, by: float) -> FrameConnection:
        if by <= time.monotonic():
            raise LinkError("the deadline passed before connecting")
        by = min(by, time.monotonic() + HANDSHAKE_S)
        self._connection = dial(self.address, self._context, f"server-{self._server}", by, self._limit_bytes)
        _LOG.debug("connected to server %d at %s:%d", self._server, *self.address)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def own_address(toward: str) -> str:
    """Return the address of this machine's interface toward another machine (`host:port` or `host`).

    Raises:
        MoetoolError: the host is unknown or unreachable.
    """
    before, _, port = toward.rpartition(":")
    has_port = port.isdecimal() and (":" not in before or before.endswith("]"))
    host = (before if has_port else toward).strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # UDP: looks up the route without sending
            return str(sock.getsockname()[0])
    except OSError as error:
        raise MoetoolError(f"no route to {host} ({error.strerror or error})") from None
