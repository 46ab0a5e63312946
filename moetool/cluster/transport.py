"""Point-to-point calls between the servers of a cluster.

Connections use mutual TLS 1.3 with certificates of the cluster's authority (`moetool.cluster.certificates`).
Strangers cannot call or impersonate a server, nor read or change messages.

Every call has a deadline. Calls are idempotent, so they may be repeated. Each answer carries its call's number.
"""

import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from moetool.base.errors import MoetoolError, first_line
from moetool.cluster.certificates import Identity
from moetool.cluster.frames import ConnectionLost, DeadlineExceeded, Frame, FrameConnection, LinkError, dial, pack
from moetool.cluster.links import Links
from moetool.cluster.listener import HANDSHAKE_S, Acceptor

_LOG = logging.getLogger(__name__)

_AT_ONCE_BYTES = 2**18
"""Largest direct call (assumed), since encrypting takes the calling thread's time."""


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
            _LOG.exception("a call from server %d failed", message.sender)
            answer = Frame(head={"error": f"{type(error).__name__}: {first_line(error)}"})
        data = pack(answer.head, answer.parts, call=message.call)
        by = time.monotonic() + self._rest_s
        if message.sender >= 0:
            self._links.sending(message.sender, len(data) + sum(map(len, answer.parts)), by)
        connection.send(data, answer.parts, by)


class CallAnswer:
    """The answer to a call. If the calling thread sent the call itself, that thread receives the answer in `result`.

    It offers less than a future: `result`, `done` and `add_done_callback`. `concurrent.futures.wait` and cancelling are
    not supported.

    Args:
        number: the call's number on its channel.
        data: the message without its parts.
        by: deadline of the call, on the clock of `time.monotonic`.
        receive: receives the answer on the calling thread, for at most this many seconds.
        leave: hands the answer over to the channel's thread.
    """

    def __init__(
        self,
        number: int,
        data: bytes,
        parts: Sequence[Any],
        by: float,
        receive: "Callable[[CallAnswer, float | None], None]",
        leave: "Callable[[CallAnswer], None]",
    ) -> None:
        self.number, self.data, self.parts, self.by = number, data, parts, by
        self.sent = 0  # bytes of `data`
        self.is_left = False  # whether the channel's thread is to receive it
        self._outcome: Frame | Exception | None = None
        self._future: Future[Frame] | None = None  # made where a thread waits for another one's receipt
        self._lock = threading.Lock()
        self._receive, self._leave = receive, leave

    def result(self, timeout: float | None = None) -> Frame:
        """See `Channel.call`. Raises: TimeoutError; the call's error."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._outcome is None:
            self._receive(self, timeout)
        if (outcome := self._outcome) is None:
            return self._waited().result(None if until is None else max(0.0, until - time.monotonic()))
        if isinstance(outcome, Frame):
            return outcome
        raise outcome

    def done(self) -> bool:
        """Whether the call has ended. If not, the channel's thread receives the answer from now on."""
        if self._outcome is None:
            self._leave(self)
        return self._outcome is not None

    def add_done_callback(self, fn: Callable[[Future[Frame]], object]) -> None:
        """Call `fn` with a finished future once the call ends. The channel's thread receives the answer from now on."""
        self._waited().add_done_callback(fn)
        self._leave(self)

    def end(self, outcome: Frame | Exception) -> None:
        """Set the answer or the error; for the channel only."""
        with self._lock:
            self._outcome, future = outcome, self._future
        if future is not None:
            _fulfil(future, outcome)

    def _waited(self) -> Future[Frame]:
        with self._lock:
            future, outcome = self._future, self._outcome
            if future is None:
                future = self._future = Future()
                if outcome is not None:
                    _fulfil(future, outcome)
        return future


def _fulfil(future: Future[Frame], outcome: Frame | Exception) -> None:
    if isinstance(outcome, Frame):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)


Answer = CallAnswer | Future[Frame]
"""The answer to a call, or to one that was not sent."""


class Channel:
    """Calls one server, one call at a time, over one connection. Any thread may call.

    If the channel is connected and idle, the calling thread sends a short call and receives its answer, since a
    handover to another thread costs more than the call. The channel's own thread connects, sends what would block, and
    receives abandoned answers.

    Args:
        server: number of the called server.
        address: the called server's `Listener.address`.
        identity: the caller's key and certificate.
        links: the caller's outgoing links, which delay calls.
        limit_bytes: largest answer accepted.
        poll_s: see `FrameConnection.receive`; for answers to short calls.

    Effects: connects at the first call, and again after a failure. Starts a thread, which `close` ends.
    """

    def __init__(
        self,
        server: int,
        address: tuple[str, int],
        identity: Identity,
        *,
        links: Links | None = None,
        limit_bytes: int = 2**30,
        poll_s: float = 0.0,
    ) -> None:
        self.address = address
        self._server, self._context = server, identity.calling()
        self._links = links or Links()
        self._limit_bytes, self._poll_s = limit_bytes, poll_s
        self._connection: FrameConnection | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: deque[CallAnswer] = deque()  # for the thread; the first may be partly or wholly sent
        self._numbers = itertools.count(1)
        self._direct: CallAnswer | None = None  # sent by its caller's thread, which uses the connection alone
        self._busy = False  # whether a thread is sending `_direct` or receiving its answer; no other may take it then
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"call-{server}", daemon=True)
        self._thread.start()

    def call(self, head: Mapping[str, Any], parts: Sequence[Any] = (), *, timeout_s: float) -> CallAnswer:
        """Send a request.

        Raises (`CallAnswer.result`):
            CallRefused: the peer answered with an error.
            LinkError: the peer cannot be reached or did not answer in time.
        """
        by = time.monotonic() + timeout_s
        number = next(self._numbers)
        data = pack(head, parts, call=number)
        answer = CallAnswer(number, data, parts, by, self._receive, self._leave)
        connection = None
        with self._lock:
            if self._closed:
                answer.end(self._closing())
            elif self._may_send_at_once(answer):
                self._direct, self._busy, connection = answer, True, self._connection
            else:
                if self._direct is not None and not self._busy:
                    self._return()
                self._jobs.append(answer)
                self._changed.notify()
        if connection is not None:
            self._send_at_once(answer, connection)
        return answer

    def close(self) -> None:
        """Close the connection and end the thread, without waiting for it; pending calls fail."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        if (connection := self._connection) is not None:
            connection.close()

    def _may_send_at_once(self, answer: CallAnswer) -> bool:
        return (
            self._connection is not None
            and self._direct is None
            and not self._jobs
            and len(answer.data) + sum(map(len, answer.parts)) <= _AT_ONCE_BYTES
            and not self._links.is_emulated(self._server)
        )

    def _send_at_once(self, answer: CallAnswer, connection: FrameConnection) -> None:
        answer.data, answer.parts = b"".join([answer.data, *answer.parts]), ()
        try:
            self._links.sending(self._server, len(answer.data), answer.by)
            answer.sent = connection.send_at_once(answer.data)
        except ConnectionLost:
            self._end_direct(answer)
        except BaseException:  # part of the message may have been sent
            self._end_direct(answer, LinkError("sending was interrupted"))
            raise
        else:
            self._release(answer, leave=answer.sent < len(answer.data))

    def _receive(self, answer: CallAnswer, timeout: float | None) -> None:
        """Receive the answer of the direct call on this thread, for at most `timeout` seconds."""
        with self._lock:
            if self._direct is not answer:
                return
            if self._busy:  # another thread receives it, and may give up earlier
                answer.is_left = True
                return
            self._busy = True
            connection = self._connection
        try:
            if connection is None:
                raise ConnectionLost("the connection is closed")
            by = answer.by if timeout is None else min(answer.by, time.monotonic() + timeout)
            frame = self._numbered(answer, connection.receive(by, poll_s=self._poll_s))
        except DeadlineExceeded as error:
            if time.monotonic() < answer.by:
                self._release(answer)
            else:
                self._end_direct(answer, error)
        except ConnectionLost:
            self._end_direct(answer)
        except LinkError as error:
            self._end_direct(answer, error)
        except BaseException:  # part of the answer may be lost
            self._end_direct(answer)
            raise
        else:
            with self._lock:
                self._direct, self._busy = None, False
                if self._jobs:  # waking the thread costs half as much as a call
                    self._changed.notify()
            self._complete(answer, frame)

    def _leave(self, answer: CallAnswer) -> None:
        """Hand the direct call over to the channel's thread, at once or when no thread uses it."""
        with self._lock:
            answer.is_left = True
            if self._direct is answer and not self._busy:
                self._return()

    def _release(self, answer: CallAnswer, *, leave: bool = False) -> None:
        """End this thread's use of the direct call; the channel's thread takes it if others wait or it was left."""
        with self._lock:
            self._busy = False
            if not self._closed:
                if leave or answer.is_left or self._jobs:
                    self._return()
                return
            self._direct = None  # the channel's thread may have ended
        answer.end(self._closing())

    def _return(self) -> None:
        """Queue the direct call before all others. The caller holds the lock."""
        assert self._direct is not None
        self._jobs.appendleft(self._direct)
        self._direct, self._busy = None, False
        self._changed.notify()

    def _end_direct(self, answer: CallAnswer, error: LinkError | None = None) -> None:
        """Close the connection and end the direct call with an error; without one, repeat the call."""
        with self._lock:
            if self._closed:
                error = LinkError("the connection is closed")
            self._disconnect()
            if error is None:
                answer.sent = 0
                self._return()
                return
            self._direct, self._busy = None, False
            self._changed.notify()
        self._fail(answer, error)

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closed and (self._direct is not None or not self._jobs):
                    self._changed.wait()
                if self._closed:
                    break
                answer = self._jobs[0]  # stays queued until it ends, so that no direct call begins
            try:
                frame = self._call(answer)
            except LinkError as error:
                self._done()
                self._fail(answer, error)
            except Exception as error:  # a bug; the caller must not wait forever
                self._disconnect()  # the rest of this answer must not become the next one's
                self._done()
                answer.end(error)
            else:
                self._done()
                self._complete(answer, frame)
        self._disconnect()
        with self._lock:
            if self._direct is not None and not self._busy:
                self._return()
            left = list(self._jobs)
            self._jobs.clear()
        for answer in left:
            answer.end(self._closing())

    def _done(self) -> None:
        with self._lock:
            self._jobs.popleft()

    def _complete(self, answer: CallAnswer, frame: Frame) -> None:
        if (reason := frame.head.get("error")) is not None:
            answer.end(CallRefused(f"server {self._server}: {reason}"))
        else:
            answer.end(frame)

    def _fail(self, answer: CallAnswer, error: LinkError) -> None:
        _LOG.info("server %d at %s:%d gave no answer: %s", self._server, *self.address, error)
        answer.end(LinkError(f"server {self._server}: {error}"))

    def _closing(self) -> LinkError:
        return LinkError(f"the channel to server {self._server} is closed")

    def _numbered(self, answer: CallAnswer, frame: Frame) -> Frame:
        """Check the number. Raises: LinkError: the frame answers another call."""
        if frame.call != answer.number:
            raise LinkError(f"the peer answered call {frame.call}, expected {answer.number}")
        return frame

    def _call(self, answer: CallAnswer) -> Frame:
        try:
            fresh = self._connection is None
            if not answer.sent:
                size = len(answer.data) + sum(map(len, answer.parts))
                self._links.sending(self._server, size, answer.by)
            try:
                return self._exchange(answer)
            except ConnectionLost as error:
                if fresh or self._closed:
                    raise
                _LOG.info("server %d: %s; connecting again", self._server, error)
                self._disconnect()  # the peer may have restarted since the last call
                answer.sent = 0
                return self._exchange(answer)
        except LinkError:
            self._disconnect()
            raise

    def _exchange(self, answer: CallAnswer) -> Frame:
        if self._closed:
            raise LinkError("the connection is closed")
        connection = self._connection or self._connect(answer.by)
        if answer.sent < len(answer.data):
            connection.send(answer.data[answer.sent :], answer.parts, answer.by)
        answer.sent = len(answer.data)
        return self._numbered(answer, connection.receive(answer.by))

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


def url_for_others(url: str, host: str, toward: str) -> str:
    """Return the URL by which other machines reach a server on every address of this one; else the same URL."""
    if not toward or host not in ("0.0.0.0", "::"):
        return url
    address = own_address(toward)
    return f"{url.partition(':')[0]}://{f'[{address}]' if ':' in address else address}:{url.rpartition(':')[2]}"


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
