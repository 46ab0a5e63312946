"""The connections of a server: their number, their time limits, and answers to refused ones.

uvicorn itself waits for a request's head without limit.
"""

import asyncio
import contextlib
import json
import re
import resource
import socket
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from moetool.serving.http_errors import MAX_SKIPPED_BYTES, error_object
from moetool.serving.server_options import ServerOptions

MAX_HEAD_BYTES = 16 * 2**10
ACCEPTED_AT_ONCE = 128
"""Connections accepted from the system in one turn."""

_OTHER_FILES = 256
"""Descriptors for other files of the process: shards, logs, and closing connections."""
NEW_S = 1.0
"""Seconds that a new connection without a request counts as one whose request is arriving."""
_LINGER_S = 1.0
"""Seconds to keep reading a dismissed client: closing at once would discard its unread answer."""
_MAX_LINGERING = 128
_UNREAD_BYTES = 32 * 2**10
"""Size of a connection's buffer of unread bytes, and of the system's (Linux doubles it)."""

_CHUNK_SIZE = re.compile(rb"\r?\n?(?P<size>[0-9A-Fa-f]+)[^\r\n]*(?P<cr>\r[^\n])?")
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\n[ \t]")


def affordable_connections(most: int) -> int:
    """Return the number of connections that this process can open, at most `most`.

    Effects: raises the process's limit of open files as far as permitted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + ACCEPTED_AT_ONCE + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, soft - ACCEPTED_AT_ONCE - _OTHER_FILES))


class Connections:
    """Shared state of a server's connections; used on its event loop only.

    Attributes:
        options: their limits.
        most: limit of concurrent connections.
        unread: number of connections that were cut because their clients did not read.
        crowded: whether requests wait, so that one that nobody reads is cut sooner.
    """

    def __init__(self, options: ServerOptions, most: int | None = None) -> None:
        self.options = options
        self.most = options.max_connections if most is None else most
        self._open: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, float] = {}  # connections without a request, and since when; longest first
        self._lingering = 0
        self._refused = self._displaced = 0
        self.unread = 0
        self.crowded: Callable[[], bool] = bool

    def counts(self) -> dict[str, int]:
        """Return open connections, and those answered with 503, closed to make room, or cut as unread, for /stats."""
        return {
            "connections_open": len(self._open),
            "connections_refused": self._refused,
            "connections_displaced": self._displaced,
            "connections_unread": self.unread,
        }

    def admit(self, connection: "HttpConnection") -> bool:
        """Admit a new connection, if necessary in place of an idle one; return whether it was admitted."""
        if len(self._open) >= self.most:
            oldest = next(iter(self._waiting), None)
            if oldest is None or time.monotonic() - self._waiting[oldest] < NEW_S:
                self._refused += 1
                return False
            self._displaced += 1
            self.leave(oldest)
            oldest.close_idle()
        self._open.add(connection)
        self.mark_idle(connection)
        return True

    def mark_idle(self, connection: "HttpConnection") -> None:
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = time.monotonic()

    def mark_busy(self, connection: "HttpConnection") -> None:
        self._waiting.pop(connection, None)

    def leave(self, connection: "HttpConnection") -> None:
        """Stop counting a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def linger(self, transport: asyncio.Transport) -> None:
        """Close a connection after its client's time to read, or at once if many wait."""
        if self._lingering >= _MAX_LINGERING:
            transport.abort()
            return
        self._lingering += 1

        def over() -> None:
            self._lingering -= 1
            transport.abort()

        asyncio.get_running_loop().call_later(_LINGER_S, over)


class _Http1(h11.Connection):
    """h11's side of a connection, which refuses requests that h11 would forgive.

    Where h11 and a proxy in front of it read the same bytes differently, a client can hide a request in another one's
    body. So each of these ends the connection: a length beside a transfer coding, a transfer coding in HTTP/1.0, a bare
    line feed or carriage return, and a folded line. A body or chunk that is too large is refused when it is announced.

    Source: RFC 9112, sections 2.2, 5.2, 6.1 and 7.1.

    Args:
        most_bytes: limit of an announced body or chunk.
    """

    def __init__(self, most_bytes: int) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._most_bytes = most_bytes
        self._chunked = False
        self._size_is_next = False  # the end of the previous chunk may come before it

    def next_event(self) -> Any:
        before, _ = self.trailing_data
        if self._size_is_next and (size := _CHUNK_SIZE.match(before)) is not None:
            self._require_size(int(size["size"], 16))
            if size["cr"]:
                raise h11.RemoteProtocolError("bare carriage return in a chunk's extension")
        event = super().next_event()
        parsed = before[: len(before) - len(self.trailing_data[0])]
        if isinstance(event, h11.Request):
            _require_lines(parsed)
            self._require_framing(event)
            self._chunked = self._size_is_next = any(name == b"transfer-encoding" for name, _ in event.headers)
        elif isinstance(event, h11.Data):
            self._size_is_next = event.chunk_end
        elif isinstance(event, h11.EndOfMessage) and self._chunked:
            # h11 may have parsed the first byte of the chunk's end before.
            _require_lines(parsed.removeprefix(b"\n") if self._size_is_next else parsed)
            self._chunked = self._size_is_next = False
        elif event is h11.NEED_DATA and parsed.strip():
            self._size_is_next = False  # parsed, but its chunk has not come
        return event

    def _require_framing(self, request: h11.Request) -> None:
        if request.http_version not in (b"1.0", b"1.1"):
            version = request.http_version.decode("ascii")
            raise h11.RemoteProtocolError(f"this server speaks HTTP/1.1, not HTTP/{version}", error_status_hint=505)
        framing = {name: value for name, value in request.headers if name in (b"content-length", b"transfer-encoding")}
        if len(framing) > 1:
            raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        if b"transfer-encoding" in framing and request.http_version == b"1.0":
            raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0")
        self._require_size(int(framing.get(b"content-length", 0)))

    def _require_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise h11.RemoteProtocolError(f"a body of {size} bytes", error_status_hint=413)


def _require_lines(section: bytes) -> None:
    """Raises: h11.RemoteProtocolError: lines of a header or trailer do not end in CRLF, or are folded."""
    if _BARE_LINE_FEED.search(section):
        raise h11.RemoteProtocolError("bare line feed in the header or trailer")
    if _FOLD.search(section):
        raise h11.RemoteProtocolError("folded line in the header or trailer")


class HttpConnection(H11Protocol):
    """uvicorn's connection with time limits, and with every answer in OpenAI's form."""

    def __init__(self, connections: Connections, **rest: Any) -> None:
        super().__init__(**rest)
        # A client that has announced less is read to its end, so that it reads the refusal.
        self.conn = _Http1(max(connections.options.max_body_bytes, MAX_SKIPPED_BYTES))
        self.shared = connections
        self._dismissed = False
        self._head_timer: asyncio.TimerHandle | None = None
        self.send_timer: asyncio.TimerHandle | None = None

    @property
    def _busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Large buffers would take a whole answer, so that nobody notices that it is not read.
        transport.set_write_buffer_limits(high=_UNREAD_BYTES)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        if not self.shared.admit(self):
            message = f"this server has {self.shared.most} connections, its limit; try again soon"
            self._dismiss(503, message, "Retry-After: 1")
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.leave(self)
        self._clear_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._dismissed:
            return  # read on, otherwise the system discards the answer together with unread bytes
        # In pieces, because h11 accepts a head of any size that arrives whole.
        for start in range(0, len(data), MAX_HEAD_BYTES):
            super().data_received(data[start : start + MAX_HEAD_BYTES])
            if self._dismissed:
                return
        self._update_busy()
        if not self._busy and self._head_timer is None:
            # Bytes without a request yet, or the rest of an unwanted body.
            self._head_timer = self.loop.call_later(self.shared.options.head_timeout_s, self._head_is_late)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            # The client must read the last bytes in time, whether the connection is kept or closed.
            self._watch_reader()
        self._update_busy()
        if not self._busy:
            self.shared.mark_idle(self)

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 cannot parse; called in its exception handler."""
        error = sys.exc_info()[1]
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # during an answer, or after it
            return
        if self._busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        match getattr(error, "error_status_hint", 400):
            case 413:
                self._dismiss(413, f"the body is larger than {self.shared.options.max_body_bytes} bytes")
            case 431:
                self._dismiss(431, f"the request header is larger than {MAX_HEAD_BYTES} bytes")
            case 505:
                self._dismiss(505, str(error))
            case _:
                self._dismiss(400, f"not an HTTP/1.1 request: {_readable(error)}")

    def timeout_keep_alive_handler(self) -> None:
        self.close_idle()

    def shutdown(self) -> None:
        with contextlib.suppress(h11.LocalProtocolError):  # a dismissed connection has no answer to finish
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.send_timer is not None:  # the client reads
            self.send_timer.cancel()
            self.send_timer = None

    def close_idle(self) -> None:
        """Close a connection that has no request."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait for a client that does not read
        else:
            self.transport.close()

    def _update_busy(self) -> None:
        if self._busy:
            self.shared.mark_busy(self)
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.our_state is h11.IDLE:
            self._dismiss(408, f"the request header did not arrive within {self.shared.options.head_timeout_s:g} s")
        else:
            self.close_idle()

    def _watch_reader(self) -> None:
        if self.send_timer is not None:
            return
        options = self.shared.options
        period_s = min(options.unread_timeout_s, options.send_timeout_s)
        before, cycle, unread_s = self.transport.get_write_buffer_size(), self.cycle, 0.0

        def check_reader() -> None:
            nonlocal unread_s
            self.send_timer = None
            left = self.transport.get_write_buffer_size()
            if left < before or self.cycle is not cycle:  # another answer may have grown the buffer
                if left:
                    self._watch_reader()
                return
            unread_s += period_s
            if unread_s >= options.send_timeout_s or self.shared.crowded():
                self.shared.unread += 1
                self.transport.abort()
            else:
                self.send_timer = self.loop.call_later(period_s, check_reader)

        self.send_timer = self.loop.call_later(period_s, check_reader)

    def _dismiss(self, status: int, message: str, *headers: str) -> None:
        """Answer invalid bytes, and close."""
        self._dismissed = True
        self.shared.leave(self)
        self._clear_timers()
        body = json.dumps(error_object(message, status)).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *headers,
        ]
        self.transport.write("\r\n".join([*lines, "\r\n"]).encode() + body)
        if self.transport.can_write_eof():  # TLS has no half-closed connections
            self.transport.write_eof()
        self.flow.resume_reading()
        self.shared.linger(self.transport)

    def _clear_timers(self) -> None:
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self.send_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self.send_timer = None


def _readable(error: BaseException | None) -> str:
    """Return h11's reason with readable bytes."""
    return re.sub(r"bytearray\(b(['\"].*?['\"])\)", r"\1", str(error))[:200]
