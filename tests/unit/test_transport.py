"""Calls between servers: who may call, what is refused, and that nobody waits for ever."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moetool.cluster.frames import HELLO, Frame, LinkError, pack, proof_of
from moetool.cluster.links import Bucket, Links
from moetool.cluster.listener import listen
from moetool.cluster.transport import CallRefused, Channel, Listener
from moetool.errors import MoetoolError

TOKEN = b"t" * 32


def _echo(message: Frame) -> Frame:
    if message.head.get("wait"):
        time.sleep(message.head["wait"])
    if message.head.get("fail"):
        raise MoetoolError("not here\nand more")
    if message.head.get("bug"):
        raise KeyError("bug")
    return Frame(head={"got": message.head["from"]}, parts=[bytes(part)[::-1] for part in message.parts])


@contextmanager
def _listener(handle: Callable[[Frame], Frame] = _echo, **options: Any) -> Iterator[Listener]:
    listener = Listener(listen("127.0.0.1"), TOKEN, handle, **options)
    yield listener
    listener.close()


@contextmanager
def _channel(listener: Listener, token: bytes = TOKEN, **options: Any) -> Iterator[Channel]:
    channel = Channel(1, listener.address, token, caller=0, **options)
    yield channel
    channel.close()


def _raw(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, timeout=5)


def _admitted(listener: Listener) -> socket.socket:
    """A caller that knows the token, as a plain socket."""
    sock = _raw(listener)
    hello = sock.recv(len(HELLO) + 32, socket.MSG_WAITALL)
    nonces = hello[len(HELLO) :] + b"n" * 32
    sock.sendall(nonces[32:] + proof_of(TOKEN, b"caller", nonces))
    assert sock.recv(32, socket.MSG_WAITALL) == proof_of(TOKEN, b"called", nonces)
    return sock


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_call_brings_parts_there_and_back_and_errors_as_words() -> None:
    with _listener() as listener, _channel(listener) as channel:
        parts = [b"abc", b"", bytes(range(256)) * 4096]
        answer = channel.call({"x": 1}, parts, timeout_s=5).result(5)
        assert answer.head == {"got": 0} and [bytes(part) for part in answer.parts] == [p[::-1] for p in parts]
        with pytest.raises(CallRefused, match=r"server 1: not here and more$"):
            channel.call({"fail": True}, timeout_s=5).result(5)
        with pytest.raises(CallRefused, match="KeyError"):
            channel.call({"bug": True}, timeout_s=5).result(5)
        assert channel.call({}, [b"x"], timeout_s=5).result(5).head == {"got": 0}


def test_a_caller_for_whom_there_is_no_room_costs_only_that_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    refused: list[threading.Thread] = []

    def first_fails(thread: threading.Thread) -> None:
        if thread.name == "peer-call" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with _listener() as listener:
        monkeypatch.setattr(threading.Thread, "start", first_fails)
        with _raw(listener) as sock:
            assert _is_closed(sock) and refused
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}


def test_connections_that_prove_nothing_keep_no_peer_out() -> None:
    with _listener() as listener, contextlib.ExitStack() as ends:
        silent = [ends.enter_context(_raw(listener)) for _ in range(70)]
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}
        for sock in silent[:6]:
            assert len(sock.recv(1000, socket.MSG_WAITALL)) == len(HELLO) + 32  # and the end: it made room
        assert silent[-1].recv(len(HELLO), socket.MSG_WAITALL) == HELLO


def test_bytes_are_counted_each_way() -> None:
    there, back = Links(), Links()
    with _listener(links=back) as listener, _channel(listener, links=there) as channel:
        channel.call({}, [b"x" * 1000], timeout_s=5).result(5)
    asked, answered = pack({"from": 0}, [b"x" * 1000]), pack({"got": 0}, [b"x" * 1000])
    assert there.bytes_out == {1: len(asked) + 1000} and back.bytes_out == {0: len(answered) + 1000}


def test_a_wrong_token_is_accepted_by_neither_side() -> None:
    called: list[Frame] = []
    with _listener(lambda m: called.append(m) or m) as listener, _channel(listener, b"w" * 32) as channel:
        answer = channel.call({}, timeout_s=5)
        with pytest.raises(LinkError, match="does not accept this cluster's token"):
            answer.result(5)
    assert not called
    with socket.create_server(("127.0.0.1", 0)) as false:  # greets as a listener does, and knows no token

        def pose() -> None:
            sock, _ = false.accept()
            sock.sendall(HELLO + b"n" * 32)
            sock.recv(64, socket.MSG_WAITALL)
            sock.sendall(b"p" * 32)
            sock.recv(1)
            sock.close()

        thread = threading.Thread(target=pose)
        thread.start()
        channel = Channel(1, false.getsockname(), TOKEN, caller=0)
        with pytest.raises(LinkError, match="the peer does not know this cluster's token"):
            channel.call({"secret": 1}, timeout_s=5).result(5)
        channel.close()
        thread.join(5)


def test_an_overheard_handshake_helps_nobody() -> None:
    with _listener() as listener:
        sock = _raw(listener)
        hello = sock.recv(len(HELLO) + 32, socket.MSG_WAITALL)
        nonces = hello[len(HELLO) :] + b"n" * 32
        heard = nonces[32:] + proof_of(TOKEN, b"caller", nonces)
        sock.sendall(heard)
        proof = sock.recv(32, socket.MSG_WAITALL)
        sock.close()
        for answer in (heard, nonces[32:] + proof):  # played again; the called one's proof sent as the caller's
            again = _raw(listener)
            again.recv(len(HELLO) + 32, socket.MSG_WAITALL)
            again.sendall(answer)
            assert _is_closed(again)
            again.close()


@pytest.mark.parametrize(
    "data",
    [
        pack({}, [b""])[:4] + (2**20 + 1).to_bytes(4) + (0).to_bytes(8),
        pack({}, [b""])[:4] + (2).to_bytes(4) + (2**40).to_bytes(8),
        b"GET / HTTP/1.1\r\n\r\n",
        pack({}, []).replace(b"[]", b"{}"),
        pack({}, [b"12345678"]).replace(b"[8]", b"[9]") + b"12345678",
        pack({}, []).replace(b'"parts":[]', b"[[[[[[[[[["),
    ],
    ids=["long head", "long body", "http", "sizes no list", "sizes wrong", "no json"],
)
def test_what_is_no_message_ends_the_connection_before_memory_is_taken(data: bytes) -> None:
    with _listener(limit_bytes=2**20) as listener:
        sock = _admitted(listener)
        sock.sendall(data)
        assert _is_closed(sock)
        sock.close()
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}


def test_half_a_message_does_not_keep_a_thread() -> None:
    with _listener(rest_s=0.2) as listener:
        halves = [_admitted(listener) for _ in range(2)]
        halves[0].sendall(pack({"a": "b"}, [b"12"])[:9])
        halves[1].sendall(pack({"a": "b"}, [b"12"]) + b"1")
        assert all(map(_is_closed, halves))
        for sock in halves:
            sock.close()


def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    with _listener() as listener, _channel(listener) as channel:
        with pytest.raises(LinkError, match="did not answer in time"):
            channel.call({"wait": 0.3}, [b"first"], timeout_s=0.1).result(5)
        answer = channel.call({}, [b"second"], timeout_s=5).result(5)
        assert bytes(answer.parts[0]) == b"dnoces"


def test_a_peer_that_started_anew_is_found_by_the_next_call() -> None:
    sock = listen("127.0.0.1")
    port = sock.getsockname()[1]
    first = Listener(sock, TOKEN, _echo)
    with _channel(first) as channel:
        channel.call({}, timeout_s=5).result(5)
        first.close()
        with pytest.raises(LinkError, match="no answer from 127"):
            channel.call({}, timeout_s=5).result(5)
        second = Listener(listen("127.0.0.1", port), TOKEN, _echo)
        channel.call({}, timeout_s=5).result(5)
        second.close()
        third = Listener(listen("127.0.0.1", port), TOKEN, _echo)  # nothing was asked in between
        channel.call({}, timeout_s=5).result(5)
        third.close()


def test_a_peer_that_says_nothing_and_a_closed_channel_let_nobody_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = Channel(1, silent.getsockname(), TOKEN, caller=0)
        with pytest.raises(LinkError, match="did not answer in time"):
            channel.call({}, timeout_s=0.1).result(5)
        first, second = channel.call({}, timeout_s=60), channel.call({}, timeout_s=60)
        time.sleep(0.05)
        channel.close()
        for answer in (first, second, channel.call({}, timeout_s=60)):
            with pytest.raises(LinkError):
                answer.result(10)


def test_a_listener_is_closed_while_calls_wait() -> None:
    with _listener() as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)
        answer = channel.call({"wait": 0.2}, timeout_s=5)
        idle = _admitted(listener)
        time.sleep(0.05)
        listener.close()
        assert _is_closed(idle)
        with pytest.raises(LinkError):
            answer.result(5)
        idle.close()


def test_calls_that_do_not_end_keep_a_listener_from_closing_only_once() -> None:
    over = threading.Event()

    def wait(message: Frame) -> Frame:
        over.wait(20)
        return message

    listener = Listener(listen("127.0.0.1"), TOKEN, wait, rest_s=0.3)
    channels = [Channel(1, listener.address, TOKEN, caller=0) for _ in range(5)]
    for channel in channels:
        channel.call({}, timeout_s=5)
    time.sleep(0.2)
    began = time.monotonic()
    listener.close()
    assert time.monotonic() - began < 1.0  # and not a wait for each
    over.set()
    for channel in channels:
        channel.close()


def test_a_port_in_use_is_said() -> None:
    with _listener() as listener, pytest.raises(MoetoolError, match=r"cannot listen for peers on 127.0.0.1 port \d+"):
        sock = listen("127.0.0.1", listener.address[1])
        sock.close()


class _Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


def _bucket(time: _Time, *args: Any, **kwargs: Any) -> Bucket:
    return Bucket(*args, **kwargs, clock=lambda: time.now, sleep=time.sleep)


def test_a_bucket_takes_as_long_as_the_link_would() -> None:
    clock = _Time()
    bucket = _bucket(clock, 1000.0, 0.5)
    for num_bytes, arrives in ((100, 100.6), (400, 101.5)):
        bucket.take(num_bytes, by=200)
        assert clock.now == pytest.approx(arrives)
    clock.now = 150.0
    bucket.take(1000, by=200)
    assert clock.now == pytest.approx(151.5)


def test_a_bucket_gives_up_at_the_deadline() -> None:
    clock = _Time()
    with pytest.raises(LinkError, match="the link did not take a message in time"):
        _bucket(clock, 10.0).take(1000, by=103)
    assert clock.now == pytest.approx(103)


def test_calls_over_a_slow_link_miss_their_deadline_and_say_so() -> None:
    links = Links({1: Bucket(1000.0)})
    with _listener() as listener, _channel(listener, links=links) as channel:
        answer = channel.call({}, [b"x" * 10_000], timeout_s=0.05)
        with pytest.raises(LinkError, match="server 1: the link did not take"):
            answer.result(5)


def test_a_head_is_json_and_nothing_else() -> None:
    data = pack({"a": [1, 2.5, "é"]}, [b"12"])
    assert json.loads(data[16:]) == {"a": [1, 2.5, "é"], "parts": [2]}
