"""Connections that do not behave, by raw sockets: idle, slow, garbled, too many; each is answered or closed."""

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from moetool.base.errors import UsageError
from moetool.serving import connections
from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import PATIENCE_S, connect, eventually, get, post, serving

ASK: dict[str, Any] = {"model": "reference", "prompt": "hello", "temperature": 0, "max_tokens": 20}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ServerOptions(
        max_connections=8, idle_timeout_s=4, head_timeout_s=0.6, body_timeout_s=0.6, max_body_bytes=2**16
    )
    with serving(ScriptedEngine(), options=options) as (url, _):
        yield url


def _open(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S)


def _all(sock: socket.socket) -> bytes:
    """Receive until the other end closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def _said(answer: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and the error's message of one answer that ends with its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(first.split()[1]), headers, json.loads(body)["error"]["message"]


def _server(url: str) -> dict[str, Any]:
    server: dict[str, Any] = json.loads(get(url, "/stats")[2])["server"]
    return server


def _body(**more: Any) -> bytes:
    return json.dumps({**ASK, **more}).encode()


def _request(body: bytes, *headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "\r\n"]).encode() + body


def test_a_flood_of_idle_connections_makes_room(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    admit, asked, idle = connections.Connections.admit, list[Any](), list[socket.socket]()
    monkeypatch.setattr(connections, "NEW_S", 0.1)
    monkeypatch.setattr(connections.Connections, "admit", lambda *of: asked.append(of) or admit(*of))
    for _ in range(4):  # more than there is room for, again and again, and every request is answered at once
        known = len(asked)
        idle += [_open(url) for _ in range(8)]
        eventually(lambda known=known: len(asked) == known + 8)
        time.sleep(0.2)
        assert post(url, "/v1/completions", ASK)[0] == 200
    assert _all(idle[0]) == b""  # the eldest was closed
    for sock in idle:
        sock.close()
    eventually(lambda: _server(url)["connections_open"] == 1)
    assert _server(url)["connections_displaced"] >= 24


def test_too_many_connections_at_work_are_told_so() -> None:
    engine = ScriptedEngine(reply="word " * 200, step_s=0.02)
    with serving(engine, options=ServerOptions(max_connections=2)) as (url, _):
        busy = [_open(url) for _ in range(2)]
        for sock in busy:
            sock.sendall(_request(_body(stream=True, max_tokens=200)))
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
        status, headers, message = _said(_all(_open(url)))
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert "2 connections" in message
        for sock in busy:
            sock.close()
        eventually(lambda: engine.num_live == 0)
        server = _server(url)
        assert (server["connections_open"], server["connections_refused"]) == (1, 1)


@pytest.mark.parametrize("prelude", [b"", HEALTH])
def test_a_head_that_trickles_is_cut_short(url: str, prelude: bytes) -> None:
    """Also where the connection has been good for a request before."""
    with _open(url) as sock:
        if prelude:
            sock.sendall(prelude)
            answer = b""
            while b'"ok"' not in answer:
                answer += sock.recv(65536)
        began = time.monotonic()
        for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.send(bytes([byte]))
            time.sleep(0.02)
        status, _, message = _said(_all(sock))
        assert (status, message) == (408, "the request header did not arrive within 0.6 s")
        assert time.monotonic() - began < 4


def test_a_body_that_trickles_is_cut_short(url: str) -> None:
    with _open(url) as sock:
        sock.sendall(_request(_body())[:-5])
        status, headers, message = _said(_all(sock))
        assert (status, headers["connection"]) == (408, "close") and "body did not arrive" in message


def test_an_idle_connection_is_closed_without_a_word() -> None:
    with serving(ScriptedEngine(), options=ServerOptions(idle_timeout_s=0.3)) as (url, _):
        with _open(url) as sock:
            assert _all(sock) == b""
        with _open(url) as sock:
            sock.sendall(HEALTH)
            assert _all(sock).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize("size", [40_000, 3_000_000])
def test_a_head_that_is_too_large(url: str, size: int) -> None:
    with _open(url) as sock:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"a" * size + b"\r\n\r\n")
        status, _, message = _said(_all(sock))
        assert (status, message) == (431, "the request header is larger than 16384 bytes")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",  # TLS
        b"GET /health\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # no Host
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad name: 1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n",
    ],
)
def test_what_is_no_http(url: str, garbage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with _open(url) as sock:
        sock.sendall(garbage)
        status, headers, message = _said(_all(sock))
        assert status == 400 and headers["connection"] == "close" and message.startswith("not an HTTP/1.1 request")
    assert get(url, "/health")[0] == 200
    assert capfd.readouterr().err == ""


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
HIDDEN = HEALTH.replace(b"/health", b"/v1/models")


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (CHUNKED + b"Content-Length: 4\r\n\r\n0\r\n\r\n", "both Content-Length and Transfer-Encoding"),
        (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "multiple Transfer-Encoding"),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n", "Transfer-Encoding"),
        (CHUNKED.replace(b"chunked", b"identity") + b"\r\n0\r\n\r\n", "Transfer-Encoding"),
        (CHUNKED.replace(b"Encoding:", b"Encoding :") + b"\r\n0\r\n\r\n", "illegal header line"),
        (CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n", "Transfer-Encoding in HTTP/1.0"),
        (CHUNKED + b"\r\n0\r\n\n", "bare line feed"),
        (CHUNKED + b"\r\n0\r\nX-A: b\n\r\n", "bare line feed"),
        (CHUNKED + b"\r\n0\r\nX-A: b\r\n c\r\n\r\n", "folded line"),
        (CHUNKED + b"\r\n1;\ra\r\n \r\n0\r\n\r\n", "bare carriage return"),
        (CHUNKED + b"\r\n1;\na\r\n \r\n0\r\n\r\n", "illegal chunk header"),
        (CHUNKED + b"\r\n-1\r\n", "illegal chunk header"),
        (CHUNKED + b"\r\n0x1\r\n", "illegal chunk header"),
        (CHUNKED + b"\r\n1\r\n  \n0\r\n\r\n", "chunk footer"),
        (HEALTH.replace(b"\r\n", b"\n"), "bare line feed"),
        (HEALTH.replace(b"localhost\r\n", b"localhost\nX-A: b\r\n"), "bare line feed"),
        (HEALTH.replace(b"localhost", b"localhost\r\n folded"), "folded line"),
        (HEALTH.replace(b"localhost", b"localhost\r\nX-A: b\rX-B: c"), "illegal header line"),
        (HEALTH.replace(b"localhost", b"local\0host"), "illegal header line"),
        (HEALTH.replace(b"localhost", b"localhost\r\nHost: other"), "Host"),
        (HEALTH.replace(b"localhost", b"localhost\r\nContent-Length: +0"), "Content-Length"),
        (HEALTH.replace(b"localhost", b"localhost\r\nContent-Length: 0, 1"), "Content-Length"),
        (HEALTH.replace(b"localhost", b"localhost\r\nContent-Length:"), "Content-Length"),
    ],
)
@pytest.mark.parametrize("bytewise", [False, True])
def test_a_request_that_hides_another_one(url: str, request_bytes: bytes, reason: str, bytewise: bool) -> None:
    """It gets one answer, however its bytes arrive, and the bytes behind it get none."""
    with _open(url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = request_bytes + HIDDEN
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for part in (bytes([byte]) for byte in data) if bytewise else (data,):
                sock.sendall(part)
        answer = _all(sock)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"400"]
    _, headers, message = _said(answer)
    assert headers["connection"] == "close" and reason in message


@pytest.mark.parametrize("bytewise", [False, True])
def test_a_body_in_chunks_and_the_request_after_it(url: str, bytewise: bool) -> None:
    body = _body() + b"\n"  # a line feed at a chunk's end is its own
    parts = [body[:1], body[1:40], body[40:]]
    chunks = b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nX-After: c\r\n\r\n"
    # Its second chunk begins with the digits of a size that would be too large.
    digits = b"11\r\n" + b"f" * 17 + b"\r\n0\r\n\r\n"
    head = CHUNKED + b"Content-Type: application/json\r\n\r\n"
    data = head + chunks + head + digits + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with _open(url) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (bytes([byte]) for byte in data) if bytewise else (data,):
            sock.sendall(part)
        answer = _all(sock)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"400", b"200"]
    assert b"the body is not JSON" in answer


@pytest.mark.parametrize(
    "request_bytes",
    [
        CHUNKED + b"\r\nFFFFFFFFFFFFFFFF\r\n",
        CHUNKED + b"\r\nFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF",  # without its end
        CHUNKED + b"\r\n1\r\n \r\n5000000\r\n",
        HEALTH.replace(b"localhost", b"localhost\r\nContent-Length: 99999999999999999999"),
    ],
)
def test_an_absurd_size_is_refused_before_its_body(request_bytes: bytes) -> None:
    with serving(ScriptedEngine(), options=ServerOptions(body_timeout_s=60)) as (url, _), _open(url) as sock:
        began = time.monotonic()
        sock.sendall(request_bytes)
        status, headers, message = _said(_all(sock))
        assert (status, headers["connection"], message) == (413, "close", "the body is larger than 2097152 bytes")
        assert time.monotonic() - began < 30


def test_a_head_of_thousands_of_fields(url: str) -> None:
    with _open(url) as sock:
        sock.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\n" + b"a:\r\n" * 4000 + b"Connection: close\r\n\r\n"))
        assert _all(sock).startswith(b"HTTP/1.1 200")


def test_garbage_behind_a_request_waits_for_the_answer(url: str) -> None:
    with _open(url) as sock:
        sock.sendall(_request(_body(stream=True)) + b"\x00 garbage\r\n\r\n")
        answer = _all(sock)
    assert answer.count(b"data: [DONE]") == 1
    status, _, message = _said(answer[answer.index(b"HTTP/1.1 400") :])
    assert status == 400 and "illegal request line" in message


def test_pipelined_requests_are_answered_in_their_order(url: str) -> None:
    with _open(url) as sock:
        last = HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        sock.sendall(
            HEALTH + _request(_body()) + b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH + last
        )
        answer = _all(sock)
    starts = [part.split()[0] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert starts == [b"200", b"200", b"404", b"200", b"200"]


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with serving(ScriptedEngine(), options=ServerOptions(send_timeout_s=0.3)) as (url, server):
        state = server.server_state
        with _open(url) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1500)
            eventually(lambda: state.total_requests > 3)
            eventually(lambda: not state.connections and not state.tasks)
            assert state.total_requests < 1500


class _Pipe:
    """A transport and a loop whose time is told to pass."""

    def __init__(self) -> None:
        self.unread, self.aborted = 0, False
        self.timers: list[Any] = []

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.aborted = True

    def call_later(self, seconds: float, call: Any) -> Any:
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: self.timers.remove(call))

    def pass_time(self) -> None:
        due, self.timers = self.timers, []
        for call in due:
            call()


def test_a_client_that_reads_slowly_is_not() -> None:
    pipe: Any = _Pipe()
    connection = connections.HttpConnection.__new__(connections.HttpConnection)
    connection.shared = connections.Connections(ServerOptions())
    connection.shared.crowded = lambda: True
    connection.loop = connection.transport = pipe
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)  # type: ignore[assignment]
    connection.cycle, connection.send_timer = None, None  # type: ignore[assignment]
    for unread in (90_000, 60_000, 30_000):  # it reads, but not enough to be sent more
        pipe.unread = unread
        connection.pause_writing() if unread == 90_000 else pipe.pass_time()
        assert len(pipe.timers) == 1 and not pipe.aborted
    connection.resume_writing()
    assert pipe.timers == []
    pipe.unread = 90_000  # it has read all that, and was sent more
    connection.pause_writing()
    connection.cycle = object()  # type: ignore[assignment]
    pipe.pass_time()
    assert len(pipe.timers) == 1 and not pipe.aborted
    pipe.pass_time()
    assert pipe.timers == [] and pipe.aborted and connection.shared.unread == 1


def test_an_unread_connection_is_cut_sooner_while_others_wait() -> None:
    pipe: Any = _Pipe()
    connection = connections.HttpConnection.__new__(connections.HttpConnection)
    connection.shared = connections.Connections(ServerOptions(send_timeout_s=3, unread_timeout_s=1))
    connection.loop = connection.transport = pipe
    connection.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)  # type: ignore[assignment]
    connection.cycle, connection.send_timer = None, None  # type: ignore[assignment]
    pipe.unread = 90_000
    connection.pause_writing()
    for _ in range(2):
        pipe.pass_time()
        assert not pipe.aborted
    pipe.pass_time()
    assert pipe.aborted and connection.shared.unread == 1


def test_bodies_that_are_too_large_together() -> None:
    engine = ScriptedEngine(reply="word " * 60, step_s=0.02)
    with serving(engine, options=ServerOptions(max_body_bytes=4096)) as (url, _):
        large = _request(_body(user="x" * 3900, max_tokens=60))
        socks = [_open(url) for _ in range(20)]
        for sock in socks:
            sock.sendall(large)
        statuses = [int(sock.recv(20).split()[1]) for sock in socks]
        assert statuses.count(200) == 16 and statuses.count(503) == 4
        assert post(url, "/v1/completions", {**ASK, "user": "x" * 3900})[0] == 200


def test_methods_that_are_not_there(url: str) -> None:
    for method, path, status in [
        ("HEAD", "/v1/models", 405),
        ("OPTIONS", "/v1/completions", 405),
        ("TRACE", "/health", 405),
        ("GET", "/v1/chat/completions", 405),
        ("BREW", "/v1/completions", 405),
        ("DELETE", "/v1/models/reference", 405),
    ]:
        connection = connect(url)
        connection.request(method, path)
        response = connection.getresponse()
        assert response.status == status and response.headers["Allow"] in ("GET", "POST"), (method, path)
        assert "Access-Control-Allow-Origin" not in response.headers
        assert method == "HEAD" or "Method Not Allowed" in json.loads(response.read())["error"]["message"]


@pytest.mark.parametrize("name", ["max_connections", "idle_timeout_s", "head_timeout_s", "send_timeout_s"])
def test_limits_that_make_no_sense(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 0"):
        ServerOptions(**{name: 0})


@pytest.mark.parametrize(
    "opening",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
        b"PRI * HTTP/2.0\r\n\r\n",
        b"GET / HTTP/3.0\r\nHost: x\r\n\r\n",
    ],
)
def test_other_versions_of_http_are_told_which_is_spoken(
    url: str, opening: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with _open(url) as sock:
        sock.sendall(opening)
        status, headers, message = _said(_all(sock))
    assert (status, headers["connection"]) == (505, "close") and "speaks HTTP/1.1, not HTTP/" in message
    assert "Traceback" not in capfd.readouterr().err
