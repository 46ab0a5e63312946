"""Messages over one TCP connection, and how both ends of it prove that they know the cluster's token.

A message is a short JSON head and raw bytes after it. Nothing is ever unpickled, and no size is believed before it is
checked.
"""

import contextlib
import errno
import hmac
import json
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moetool.errors import MoetoolError

_FRAME = struct.Struct("!4sIQ")  # magic, bytes of the head, bytes of all parts
_MAGIC = b"moe1"
HELLO = b"moetool-peer-1\n\0"
_NONCE_BYTES = 32
_HEAD_BYTES = 2**20  # at most
_JOINED_BYTES = 2**18  # messages up to here are sent by one call


class LinkError(MoetoolError):
    """A peer cannot be reached, does not know the token, broke off or did not answer in time."""


class Lost(LinkError):
    """The connection ended: the peer may have gone, and another connection may find it."""


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

    Args:
        limit_bytes: larger messages are refused before memory is taken for them.

    Effects: owns the socket, which waits for nothing itself: the two directions have deadlines of their own.
    """

    def __init__(self, sock: socket.socket, limit_bytes: int) -> None:
        self._sock = sock
        self._limit_bytes = limit_bytes
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # an idle peer whose machine has gone is noticed
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, data: bytes, parts: Sequence[Any], by: float) -> None:
        """Send what `pack` has made, and the parts after it.

        Args:
            by: when it must have gone, on the clock of `time.monotonic`.

        Raises:
            Lost: the peer has gone.
            LinkError: not in time.
        """
        if sum(map(len, parts)) <= _JOINED_BYTES:
            data, parts = b"".join([data, *parts]), ()
        try:
            for piece in (data, *parts):
                view = memoryview(piece).cast("B")
                while view:
                    _left(by)
                    try:
                        view = view[self._sock.send(view) :]
                    except BlockingIOError:
                        self._wait(select.POLLOUT, by)
        except TimeoutError:
            raise LinkError("the peer did not take a message in time") from None
        except OSError as error:
            raise Lost(f"the connection broke ({error.strerror or error})") from None

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
            raise LinkError("the peer sent something that is no message")
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

    def prove(self, token: bytes, by: float) -> None:
        """Authenticate both sides by the token, as the caller.

        Both sides give a random number that nobody has seen before, so that nothing that was overheard helps later,
        and the two proofs differ, so that neither can be sent back as the other.

        Raises:
            LinkError: the peer does not know the token, or not in time.
        """
        theirs = bytes(self._take(len(HELLO) + _NONCE_BYTES, by))
        if not theirs.startswith(HELLO):
            raise LinkError("there is no moetool server at this address")
        nonces = theirs[len(HELLO) :] + secrets.token_bytes(_NONCE_BYTES)
        self.send(nonces[_NONCE_BYTES:] + proof_of(token, b"caller", nonces), (), by)
        try:
            answer = bytes(self._take(_NONCE_BYTES, by))
        except Lost:
            raise LinkError("the peer does not accept this cluster's token") from None
        if not hmac.compare_digest(answer, proof_of(token, b"called", nonces)):
            raise LinkError("the peer does not know this cluster's token")

    def demand_proof(self, token: bytes, by: float) -> None:
        """Authenticate both sides by the token, as the called side of `prove`. Raises: LinkError."""
        mine = secrets.token_bytes(_NONCE_BYTES)
        self.send(HELLO + mine, (), by)
        answer = bytes(self._take(2 * _NONCE_BYTES, by))
        nonces = mine + answer[:_NONCE_BYTES]
        if not hmac.compare_digest(answer[_NONCE_BYTES:], proof_of(token, b"caller", nonces)):
            raise LinkError("a caller did not know this cluster's token")
        self.send(proof_of(token, b"called", nonces), (), by)

    def _take(self, num_bytes: int, by: float) -> bytearray:
        data = bytearray(num_bytes)
        self._fill(memoryview(data), by)
        return data

    def _fill(self, view: memoryview, by: float | None) -> None:
        try:
            while view:
                if by is not None:
                    _left(by)
                try:
                    count = self._sock.recv_into(view)
                except BlockingIOError:
                    self._wait(select.POLLIN, by)
                    continue
                if not count:
                    raise Lost("the peer ended the connection")
                view = view[count:]
        except TimeoutError:
            raise LinkError("the peer did not answer in time") from None
        except OSError as error:
            raise Lost(f"the connection broke ({error.strerror or error})") from None

    def _wait(self, event: int, by: float | None) -> None:
        """Wait until the socket is ready. Raises: TimeoutError; OSError where it was closed meanwhile."""
        if (number := self._sock.fileno()) < 0:
            raise OSError(errno.EBADF, "closed")
        poll = select.poll()
        poll.register(number, event)
        if not poll.poll(None if by is None else 1e3 * _left(by)):
            raise TimeoutError


def dial(address: tuple[str, int], token: bytes, by: float, limit_bytes: int) -> FrameConnection:
    """A connection to who listens at an address and knows the token, as the caller.

    Raises:
        LinkError: nobody does, or not in time.
    """
    try:
        sock = socket.create_connection(address, timeout=_left(by))
    except OSError as error:
        raise LinkError(f"no answer from {address[0]}:{address[1]} ({error})") from None
    connection = FrameConnection(sock, limit_bytes)
    try:
        connection.prove(token, by)
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


def proof_of(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, "sha256")


def _left(by: float) -> float:
    if (left := by - time.monotonic()) <= 0:
        raise TimeoutError
    return left
