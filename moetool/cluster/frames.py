"""Messages over one TCP connection with mutual TLS by the cluster's certificates.

A message is a fixed header, the sizes of its parts, an optional JSON head, and the parts as raw bytes. Nothing is
unpickled, and sizes are checked before memory is allocated.
"""

import contextlib
import errno
import json
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moetool.base.errors import MoetoolError
from moetool.cluster.certificates import number_of, role_of

_Done = TypeVar("_Done")
_FRAME = struct.Struct("!4sIHQ")  # magic, bytes of the head, number of parts, call
_SIZES = tuple(struct.Struct(f"!{number}Q") for number in range(9))  # bytes of each part, by the number of parts
_MAGIC = b"moe2"
HELLO = b"moetool-peer-6\n"
"""First bytes from the called side, once it has accepted the caller."""
_HEAD_BYTES = 2**20  # limit
_JOINED_BYTES = 2**18  # messages up to this size take one send; larger ones are sent in pieces of it
BUSY_S = 2e-5  # least seconds that a yield takes if another thread runs meanwhile (assumed)
_READ_BYTES = 2**14  # largest TLS record, which one read returns


class LinkError(MoetoolError):
    """A peer is unreachable, not part of the cluster, disconnected or too late."""


class ConnectionLost(LinkError):
    """The connection ended; the peer may have restarted, so a new connection may succeed."""


class DeadlineExceeded(LinkError):
    """A message did not arrive completely by its deadline. Call `FrameConnection.receive` again to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message.

    Attributes:
        head: plain JSON values; empty for messages whose parts describe themselves.
        parts: raw bytes, at most eight; of a received message, each in its own memory.
        sender: number in the caller's certificate (`FrameConnection.number`).
        call: number of the call or of the answered call.
    """

    head: Mapping[str, Any]
    parts: Sequence[Any] = ()
    sender: int = -1
    call: int = 0


class FrameConnection:
    """One end of a connection; one thread may send while another receives.

    TLS keeps one state for both directions, so a lock guards every operation on the socket; none of them blocks.

    Args:
        sock: a connected TCP socket.
        limit_bytes: larger messages are refused before memory is allocated for them.

    Attributes:
        limit_bytes: this limit; it may be changed.
        number: number in the certificate of an accepted caller, e.g. 2 of `server-2`; -1: none.

    Effects: owns the socket and makes it non-blocking; each direction has its own deadline.
    """

    def __init__(self, sock: socket.socket, limit_bytes: int) -> None:
        self._sock = sock
        self.limit_bytes = limit_bytes
        self.number = -1
        self._lock = threading.Lock()
        self._ahead = bytearray(_READ_BYTES)  # bytes read ahead, from `_start` to `_end`
        self._start = self._end = 0
        self._begun: tuple[int, list[bytearray]] | None = None  # message in transit: call, head and parts
        self._whole = self._filled = 0  # its complete buffers, and bytes of the next one
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices an idle peer whose machine is down
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, data: bytes, parts: Sequence[Any], by: float) -> None:
        """Send a head from `pack`, then its parts.

        Args:
            by: deadline on the clock of `time.monotonic`.

        Raises:
            Lost: the connection ended.
            LinkError: the deadline passed.
        """
        if sum(map(len, parts)) <= _JOINED_BYTES:
            data, parts = b"".join([data, *parts]), ()
        try:
            for piece in (data, *parts):
                view = memoryview(piece).cast("B")
                while view:
                    piece = view[:_JOINED_BYTES]
                    view = view[self._do(select.POLLOUT, by, self._sock.send, piece) :]
        except TimeoutError:
            raise LinkError("the peer did not take a message in time") from None
        except OSError as error:
            raise ConnectionLost(f"the connection broke ({_reason(error)})") from None

    def send_at_once(self, data: bytes) -> int:
        """Send as many of these bytes as possible without blocking; `send` must send the rest.

        Returns:
            Bytes sent.

        Raises:
            Lost: the peer has ended.
        """
        view = memoryview(data)
        try:
            while view:
                with self._lock:
                    self._require_open()
                    # As in `send`: OpenSSL refuses to go on with a shorter piece than it began with.
                    view = view[self._sock.send(view[:_JOINED_BYTES]) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            raise ConnectionLost(f"the connection broke ({_reason(error)})") from None
        return len(data) - len(view)

    def receive(self, by: float | None, rest_s: float = 10.0, poll_s: float = 0.0) -> Frame:
        """Receive the next message.

        Args:
            by: deadline; None waits without limit for the first byte, then `rest_s` seconds for the rest.
            poll_s: seconds of polling for the first byte before the thread sleeps; other threads and processes run
                between polls.

        Raises:
            Lost: the connection ended.
            Late: the deadline passed; the next call continues with the bytes received so far.
            LinkError: the message is too large or malformed.
        """
        if self._begun is None:
            if self._start == self._end:
                self._read_ahead(by, poll_s)
            by = time.monotonic() + rest_s if by is None else by
            self._begin_message(by)
        by = time.monotonic() + rest_s if by is None else by
        assert self._begun is not None
        call, buffers = self._begun
        while self._whole < len(buffers):
            buffer = buffers[self._whole]
            while self._filled < len(buffer):
                self._filled += self._take(memoryview(buffer)[self._filled :], by)
            self._whole, self._filled = self._whole + 1, 0
        self._begun = None
        return Frame(head=_values(buffers[0]) if buffers[0] else {}, parts=buffers[1:], sender=self.number, call=call)

    def _begin_message(self, by: float) -> None:
        """Receive a message's header and sizes, and allocate it. Raises: as `receive`."""
        while self._end - self._start < _FRAME.size:
            self._read_ahead(by)
        magic, head_bytes, num_parts, call = _FRAME.unpack_from(self._ahead, self._start)
        if magic != _MAGIC or num_parts >= len(_SIZES):
            raise LinkError("the peer sent something other than a message")
        while self._end - self._start < _FRAME.size + _SIZES[num_parts].size:
            self._read_ahead(by)
        sizes = _SIZES[num_parts].unpack_from(self._ahead, self._start + _FRAME.size)
        if head_bytes > _HEAD_BYTES or sum(sizes) > self.limit_bytes:
            raise LinkError(
                f"the peer sent a message of {head_bytes:,} and {sum(sizes):,} bytes, expected at most {_HEAD_BYTES:,} "
                f"and {self.limit_bytes:,}"
            )
        self._start += _FRAME.size + _SIZES[num_parts].size
        self._begun = call, [bytearray(head_bytes), *map(bytearray, sizes)]
        self._whole = self._filled = 0

    def close(self) -> None:
        """Close the connection; a thread that waits on it gets `ConnectionLost`."""
        with self._lock:
            with contextlib.suppress(OSError):  # the peer has closed it
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    @property
    def is_open(self) -> bool:
        """False if the peer is known to have closed the connection (Linux only; elsewhere true until `close`)."""
        if (number := self._sock.fileno()) < 0:
            return False
        poll = select.poll()
        poll.register(number, getattr(select, "POLLRDHUP", 0))
        return not poll.poll(0)

    def call(self, context: ssl.SSLContext, name: str, by: float) -> None:
        """Encrypt and authenticate the connection, as the caller.

        Args:
            context: from `Identity.calling`.
            name: certificate name of the expected peer.

        Raises:
            LinkError: another process answers, the peer rejects this certificate, or the deadline passed.
        """
        try:
            self._shake_hands(context, by, name)
            hello = bytearray(len(HELLO))
            view = memoryview(hello)
            try:
                while view:
                    view = view[self._take(view, by) :]
            except ConnectionLost as error:  # TLS 1.3 reports a rejection only after the handshake
                raise LinkError(f"the peer does not accept this process ({error})") from None
        except ssl.SSLCertVerificationError as error:
            raise LinkError(f"the peer is not {name} of this cluster ({_reason(error)})") from None
        except TimeoutError:
            raise LinkError("the peer did not answer in time") from None
        except OSError as error:
            raise LinkError(f"no TLS connection with the peer ({_reason(error)})") from None
        if hello != HELLO:
            raise LinkError("the peer runs another version of moetool")

    def answer(self, context: ssl.SSLContext, roles: Collection[str], by: float) -> None:
        """Encrypt and authenticate the connection, as the called side; call `welcome` next.

        Args:
            context: from `Identity.answering`.
            roles: accepted roles of callers (`role_of`).

        Raises:
            LinkError: the caller has no certificate of the cluster or another role, or the deadline passed.
        """
        try:
            certificate = self._shake_hands(context, by)
        except TimeoutError:
            raise LinkError("the caller did not finish its handshake in time") from None
        except OSError as error:
            raise LinkError(_reason(error)) from None
        name = next((str(one) for kind, one in certificate.get("subjectAltName", ()) if kind == "DNS"), "")
        if role_of(name) not in roles:
            raise LinkError(f"{name or 'a caller without a name'} may not call here, expected {' or '.join(roles)}")
        self.number = number_of(name)

    def welcome(self, by: float) -> None:
        """Tell a caller that it is accepted. Raises like `send`."""
        self.send(HELLO, (), by)

    def _shake_hands(self, context: ssl.SSLContext, by: float, name: str = "") -> Mapping[str, Any]:
        """Do the TLS handshake; return the peer's certificate. Raises: OSError; TimeoutError."""
        with self._lock:
            self._require_open()
            self._sock = secured = context.wrap_socket(
                self._sock, server_side=not name, do_handshake_on_connect=False, server_hostname=name or None
            )
        self._do(select.POLLIN, by, secured.do_handshake)
        return self._do(select.POLLIN, by, secured.getpeercert) or {}

    def _take(self, view: memoryview, by: float | None) -> int:
        """Receive at least one byte into a buffer; returns the number of bytes."""
        if self._start == self._end:
            if len(view) >= _READ_BYTES:
                return self._read(view, by)
            self._read_ahead(by)
        count = min(len(view), self._end - self._start)
        view[:count] = memoryview(self._ahead)[self._start : self._start + count]
        self._start += count
        return count

    def _read_ahead(self, by: float | None, poll_s: float = 0.0) -> None:
        """Read at least one byte into the read-ahead buffer, so that a short message takes one read."""
        kept = self._end - self._start
        self._ahead[:kept] = self._ahead[self._start : self._end]
        self._start, self._end = 0, kept
        self._end += self._read(memoryview(self._ahead)[kept:], by, poll_s)

    def _read(self, view: memoryview, by: float | None, poll_s: float = 0.0) -> int:
        """Read at least one byte. Raises: Late, Lost."""
        try:
            if not self._pending():
                self._wait(select.POLLIN, by, poll_s)  # usually nothing has arrived, and a failed read costs more
            count = self._do(select.POLLIN, by, self._sock.recv_into, view)
        except TimeoutError:
            raise DeadlineExceeded("the peer did not answer in time") from None
        except OSError as error:
            raise ConnectionLost(f"the connection broke ({_reason(error)})") from None
        if not count:
            raise ConnectionLost("the peer ended the connection")
        return count

    def _pending(self) -> int:
        """Bytes that TLS has decrypted but not returned."""
        with self._lock:
            self._require_open()
            return self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0

    def _do(self, event: int, by: float | None, operation: Callable[..., _Done], *args: Any) -> _Done:
        """Run an operation on the socket once it is ready. Raises: TimeoutError, OSError."""
        while True:
            if by is not None:
                _left(by)
            try:
                with self._lock:
                    self._require_open()  # a closed TLS socket would raise other errors
                    return operation(*args)
            except BlockingIOError:
                self._wait(event, by)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, by)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, by)

    def _require_open(self) -> int:
        """Return the socket's file descriptor. Raises: OSError: it is closed."""
        if (number := self._sock.fileno()) < 0:
            raise OSError(errno.EBADF, "closed")
        return number

    def _wait(self, event: int, by: float | None, poll_s: float = 0.0) -> None:
        """Wait until the socket is ready. Raises: TimeoutError; OSError if it was closed meanwhile."""
        poll = select.poll()
        poll.register(self._require_open(), event)
        if poll_s and hasattr(os, "sched_yield"):
            until = time.monotonic() + poll_s
            if by is not None:
                until = min(until, by)
            while (now := time.monotonic()) < until:
                if poll.poll(0):
                    return
                os.sched_yield()
                if time.monotonic() - now > BUSY_S:
                    break  # others need the core: sleeping is as fast and takes no time from them
        if not poll.poll(None if by is None else 1e3 * _left(by)):
            raise TimeoutError


def dial(address: tuple[str, int], context: ssl.SSLContext, name: str, by: float, limit_bytes: int) -> FrameConnection:
    """Connect to a process of the cluster, as the caller.

    Args:
        context, name, by: as for `FrameConnection.call`.
        limit_bytes: as for `FrameConnection`.

    Raises:
        LinkError: no answer at that address, or the deadline passed.
    """
    try:
        sock = socket.create_connection(address, timeout=_left(by))
    except OSError as error:
        raise LinkError(f"no answer from {address[0]}:{address[1]} ({error})") from None
    connection = FrameConnection(sock, limit_bytes)
    try:
        connection.call(context, name, by)
    except BaseException:
        connection.close()
        raise
    return connection


def pack(head: Mapping[str, Any], parts: Sequence[Any], *, call: int = 0) -> bytes:
    """Encode a message up to its parts, which are buffers of bytes. Args: attributes of `Frame`."""
    text = json.dumps(head, separators=(",", ":")).encode() if head else b""
    assert len(text) <= _HEAD_BYTES
    sizes = _SIZES[len(parts)].pack(*map(len, parts))
    return b"".join((_FRAME.pack(_MAGIC, len(text), len(parts), call), sizes, text))


def _values(head: bytearray) -> Mapping[str, Any]:
    """Decode a JSON head. Raises: LinkError: it is no JSON object."""
    try:
        values = json.loads(head)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise LinkError("the peer sent a message that cannot be read")
    return values


def _reason(error: OSError) -> str:
    """Return OpenSSL's message without its source location."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).replace("_", " ").lower()
    return str(error.strerror or error)


def _left(by: float) -> float:
    if (left := by - time.monotonic()) <= 0:
        raise TimeoutError
    return left
