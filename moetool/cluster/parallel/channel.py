"""A connection between two processes of a cluster: frames of a JSON object and bytes, both ends knowing one token."""

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from moetool.errors import MismatchError, MoetoolError

_HEAD = struct.Struct("!II")
_MOST_JSON, _MOST_BYTES = 64 * 2**20, 64 * 2**20
_GREETING_S = 5.0
_TAKEN_S = 5.0
"""Whoever takes nothing of a message for so long has gone."""
_NONCE = 32


class Closed(MoetoolError):
    """The other end has closed the connection, or cannot be reached."""


class Channel:
    """One end of a connection. `send` from any thread, `receive` from one.

    Both ends prove that they know the token (HMAC-SHA256 over the other's random challenge and their own side) before
    anything else is read. What follows is neither encrypted nor authenticated frame by frame: for trusted networks.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of the system and not of Python, whose time limit would be that of `receive` too, which waits for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", *divmod(int(_TAKEN_S * 1e6), 10**6)))

    def send(self, message: dict[str, Any], data: bytes | memoryview = b"") -> None:
        """Raises: Closed, also where the other end takes nothing for five seconds: then it has ended the connection."""
        text = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            try:
                self._sock.sendall(_HEAD.pack(len(text), len(data)) + text)
                if data:
                    self._sock.sendall(data)
            except OSError as error:
                self.close()  # half a message may be on its way; and whoever receives here is to know
                raise Closed(f"the connection is gone ({error})") from None

    def receive(self, into: memoryview | None = None) -> tuple[dict[str, Any], bytes]:
        """The next frame.

        Args:
            into: where its bytes go if they fit; then none are returned.

        Raises:
            Closed: there is none.
            MismatchError: it is no frame, or too large for one.
        """
        text_bytes, data_bytes = _HEAD.unpack(self._read(_HEAD.size))
        if text_bytes > _MOST_JSON or data_bytes > _MOST_BYTES:
            raise MismatchError(f"a frame of {text_bytes:,} and {data_bytes:,} bytes, expected at most {_MOST_JSON:,}")
        try:
            message: dict[str, Any] = json.loads(self._read(text_bytes))
        except ValueError as error:
            raise MismatchError(f"a frame without a JSON object ({error})") from None
        if into is not None and data_bytes <= len(into):
            self._read_into(into[:data_bytes])
            return message, b""
        return message, self._read(data_bytes)

    def set_timeout(self, seconds: float | None) -> None:
        """How long `send` and `receive` may take; they end the connection after that."""
        self._sock.settimeout(seconds)

    def close(self) -> None:
        """End it; a thread that receives gets `Closed`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, view: memoryview) -> None:
        while view:
            try:
                got = self._sock.recv_into(view)
            except OSError as error:
                raise Closed(f"the connection is gone ({error})") from None
            if not got:
                raise Closed("the other end has closed the connection")
            view = view[got:]

    def _greet(self, token: bytes, mine: bytes, theirs: bytes) -> None:
        """Raises: MismatchError where the other end does not know the token."""
        self.set_timeout(_GREETING_S)
        nonce = secrets.token_bytes(_NONCE)
        try:
            self._sock.sendall(nonce)
            challenge = self._read(_NONCE)
            self._sock.sendall(hmac.digest(token, mine + challenge + nonce, hashlib.sha256))
            answer = self._read(hashlib.sha256().digest_size)
        except OSError as error:
            raise Closed(f"the connection is gone ({error})") from None
        if not hmac.compare_digest(answer, hmac.digest(token, theirs + nonce + challenge, hashlib.sha256)):
            self.close()
            raise MismatchError("the other end does not know the cluster's token")
        self.set_timeout(None)


def connect(address: tuple[str, int], token: bytes) -> Channel:
    """Raises: Closed where nobody listens; MismatchError where the token is another."""
    try:
        channel = Channel(socket.create_connection(address, timeout=_GREETING_S))
    except OSError as error:
        raise Closed(f"cannot reach {address[0]} port {address[1]} ({error})") from None
    channel._greet(token, b"caller", b"listener")
    return channel


class Listener:
    """Takes connections and has `on_channel` called with each, on a thread of its own.

    Attributes:
        address: where it listens.
    """

    def __init__(self, host: str, token: bytes, on_channel: Callable[[Channel], None]) -> None:
        self._sock = socket.create_server((host, 0))
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._token, self._on_channel = token, on_channel
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Take no more, and end those that were taken."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            channels = list(self._open)
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # no file descriptor is free, say
                continue
            threading.Thread(target=self._serve, args=(Channel(sock),), name="channel", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        with self._lock:
            self._open.add(channel)
        try:
            channel._greet(self._token, b"listener", b"caller")
            self._on_channel(channel)
        except (Closed, MismatchError):
            pass
        finally:
            channel.close()
            with self._lock:
                self._open.discard(channel)
