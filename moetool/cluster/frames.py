"""Messages over one TCP connection, encrypted by TLS, whose both ends have certificates of the cluster.

A message is a short JSON head and raw bytes after it. Nothing is ever unpickled, and no size is believed before it is
checked.
"""

import contextlib
import errno
import json
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moetool.cluster.certificates import role_of
from moetool.errors import MoetoolError

_Done = TypeVar("_Done")
_FRAME = struct.Struct("!4sIQ")  # magic, bytes of the head, bytes of all parts
_MAGIC = b"moe1"
HELLO = b"moetool-peer-2\n"
"""First bytes from the called side, once it has accepted the caller."""
_HEAD_BYTES = 2**20  # at most
_JOINED_BYTES = 2**18  # messages up to here are sent by one call; larger ones by calls of that size


class LinkError(MoetoolError):
    """A peer cannot be reached, is not of the cluster, broke off or did not answer in time."""


class Lost(LinkError):
    """The connection ended: the peer may have ended, and a new connection may reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message.

    Attributes:
        head: plain JSON values.
        parts: raw bytes; their meaning is the head's to say.
    """

    head: Mapping[str, Any]
    parts: Sequence[Any] = ()


class FrameConnection:
    """One end of a connection; at a time one thread may send and one receive.

    TLS keeps one state for both directions, so a lock is held around each operation of the socket, none of which waits.

    Args:
        limit_bytes: larger messages are refused before memory is taken for them.

    Effects: owns the socket, which waits for nothing itself: the two directions have deadlines of their own.
    """

    def __init__(self, sock: socket.socket, limit_bytes: int) -> None:
        self._sock = sock
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices an idle peer whose machine is down
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, data: bytes, parts: Sequence[Any], by: float) -> None:
        """Send what `pack` has made, and the parts after it.

        Args:
            by: deadline of the sending, on the clock of `time.monotonic`.

        Raises:
            Lost: the peer has ended.
            LinkError: not in time.
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
            raise Lost(f"the connection broke ({_reason(error)})") from None

    def receive(self, by: float | None, rest_s: float = 10.0) -> Frame:
        """The next message; its parts are slices of one buffer.

        Args:
            by: when it must be here; None waits for its beginning for as long as it takes, and `rest_s` for the rest.

        Raises:
            Lost: the connection ended.
            LinkError: not in time, too large, or no message.
        """
        frame = bytearray(_FRAME.size)
        self._fill(memoryview(frame)[:1], by)
        by = time.monotonic() + rest_s if by is None else by
        self._fill(memoryview(frame)[1:], by)
        magic, head_bytes, body_bytes = _FRAME.unpack(frame)
        if magic != _MAGIC:
            raise LinkError("the peer sent something other than a message")
        if head_bytes > _HEAD_BYTES or body_bytes > self._limit_bytes:
            raise LinkError(
                f"the peer sent a message of {head_bytes:,} and {body_bytes:,} bytes, expected at most {_HEAD_BYTES:,} "
                f"and {self._limit_bytes:,}"
            )
        head, body = bytearray(head_bytes), bytearray(body_bytes)
        self._fill(memoryview(head), by)
        self._fill(memoryview(body), by)
        return _unpack(head, memoryview(body))

    def close(self) -> None:
        """End the connection; a thread that waits on it gets `Lost`."""
        with self._lock:
            with contextlib.suppress(OSError):  # it has ended by itself
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()

    @property
    def is_open(self) -> bool:
        """Whether the other end has not ended the connection, as far as is known here (Linux; elsewhere: true)."""
        if (number := self._sock.fileno()) < 0:
            return False
        poll = select.poll()
        poll.register(number, getattr(select, "POLLRDHUP", 0))
        return not poll.poll(0)

    def call(self, context: ssl.SSLContext, name: str, by: float) -> None:
        """Encrypt and authenticate the connection, as the caller.

        Args:
            context: of `Identity.calling`.
            name: of the process that is meant to answer.

        Raises:
            LinkError: another answers, it does not accept this process's certificate, or not in time.
        """
        try:
            self._shake_hands(context, by, name)
            hello = bytearray(len(HELLO))
            try:
                self._fill(memoryview(hello), by)
            except Lost as error:  # in TLS 1.3 the caller hears of it only after the handshake
                raise LinkError(f"the peer does not accept this process ({error})") from None
        except ssl.SSLCertVerificationError as error:
            raise LinkError(f"the peer is not {name} of this cluster ({_reason(error)})") from None
        except TimeoutError:
            raise LinkError("the peer did not answer in time") from None
        except OSError as error:
            raise LinkError(f"no TLS connection with the peer ({_reason(error)})") from None
        if hello != HELLO:
            raise LinkError("the peer runs another version of moetool")

    def answer(self, context: ssl.SSLContext, roles: Collection[str], by: float) -> str:
        """Encrypt and authenticate the connection, as the called side; `welcome` is to follow.

        Args:
            context: of `Identity.answering`.
            roles: of processes that may call (`role_of`).

        Returns:
            The caller's name.

        Raises:
            LinkError: it has no certificate of the cluster, or another role; not in time.
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
        return name

    def welcome(self, by: float) -> None:
        """Tell a caller that it is accepted. Raises: as `send`."""
        self.send(HELLO, (), by)

    def _shake_hands(self, context: ssl.SSLContext, by: float, name: str = "") -> Mapping[str, Any]:
        """The other end's certificate. Raises: OSError; TimeoutError."""
        with self._lock:
            self._require_open()
            self._sock = secured = context.wrap_socket(
                self._sock, server_side=not name, do_handshake_on_connect=False, server_hostname=name or None
            )
        self._do(select.POLLIN, by, secured.do_handshake)
        return self._do(select.POLLIN, by, secured.getpeercert) or {}

    def _fill(self, view: memoryview, by: float | None) -> None:
        try:
            while view:
                count = self._do(select.POLLIN, by, self._sock.recv_into, view)
                if not count:
                    raise Lost("the peer ended the connection")
                view = view[count:]
        except TimeoutError:
            raise LinkError("the peer did not answer in time") from None
        except OSError as error:
            raise Lost(f"the connection broke ({_reason(error)})") from None

    def _do(self, event: int, by: float | None, operation: Callable[..., _Done], *args: Any) -> _Done:
        """Do something with the socket as soon as it can be done. Raises: TimeoutError, OSError."""
        while True:
            if by is not None:
                _left(by)
            try:
                with self._lock:
                    self._require_open()  # a TLS socket that was closed would fail in other ways
                    return operation(*args)
            except BlockingIOError:
                self._wait(event, by)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, by)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, by)

    def _require_open(self) -> int:
        """The socket's number. Raises: OSError: it was closed."""
        if (number := self._sock.fileno()) < 0:
            raise OSError(errno.EBADF, "closed")
        return number

    def _wait(self, event: int, by: float | None) -> None:
        """Wait until the socket is ready. Raises: TimeoutError; OSError where it was closed meanwhile."""
        poll = select.poll()
        poll.register(self._require_open(), event)
        if not poll.poll(None if by is None else 1e3 * _left(by)):
            raise TimeoutError


def dial(address: tuple[str, int], context: ssl.SSLContext, name: str, by: float, limit_bytes: int) -> FrameConnection:
    """A connection to a process of the cluster, as the caller.

    Args:
        context, name: as of `FrameConnection.call`.

    Raises:
        LinkError: it does not answer at that address, or not in time.
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


def pack(head: Mapping[str, Any], parts: Sequence[Any]) -> bytes:
    """A message up to its parts, which are buffers of bytes."""
    sizes = [len(part) for part in parts]
    text = json.dumps({**head, "parts": sizes}, separators=(",", ":")).encode()
    assert len(text) <= _HEAD_BYTES
    return _FRAME.pack(_MAGIC, len(text), sum(sizes)) + text


def _unpack(head: bytearray, body: memoryview) -> Frame:
    try:
        values = json.loads(head)
        sizes = values.pop("parts")
        whole = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
        if not whole or sum(sizes) != len(body):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise LinkError("the peer sent a message that cannot be read") from None
    parts, start = [], 0
    for size in sizes:
        parts.append(body[start : start + size])
        start += size
    return Frame(head=values, parts=parts)


def _reason(error: OSError) -> str:
    """OpenSSL's words without the place in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(error.verify_message)
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).replace("_", " ").lower()
    return str(error.strerror or error)


def _left(by: float) -> float:
    if (left := by - time.monotonic()) <= 0:
        raise TimeoutError
    return left
