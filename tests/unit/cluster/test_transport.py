"""Calls between servers: who may call, what is refused, and that nobody waits for ever."""

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from moetool.base.errors import MoetoolError
from moetool.cluster import frames
from moetool.cluster.certificates import Authority, Identity
from moetool.cluster.frames import HELLO, DeadlineExceeded, Frame, FrameConnection, LinkError, pack
from moetool.cluster.links import Bucket, Links
from moetool.cluster.listener import Acceptor, listen
from moetool.cluster.transport import CallRefused, Channel, Listener
from tests.identities import authority, identity
from tests.servers import PATIENCE_S, eventually

CALLER, CALLED = "server-0", "server-1"


def _echo(message: Frame) -> Frame:
    if message.head.get("wait"):
        time.sleep(message.head["wait"])
    if message.head.get("fail"):
        raise MoetoolError("not here\nand more")
    if message.head.get("bug"):
        raise KeyError("bug")
    return Frame(head={"got": message.sender}, parts=[bytes(part)[::-1] for part in message.parts])


@contextmanager
def _listener(handle: Callable[[Frame], Frame] = _echo, **options: Any) -> Iterator[Listener]:
    listener = Listener(listen("127.0.0.1"), identity(CALLED), handle, **options)
    yield listener
    listener.close()


@contextmanager
def _channel(listener: Listener, caller: Identity | None = None, **options: Any) -> Iterator[Channel]:
    channel = Channel(1, listener.address, caller or identity(CALLER), **options)
    yield channel
    channel.close()


def _held(released: threading.Event, begun: threading.Event | None = None) -> Callable[[Frame], Frame]:
    """A handler that keeps calls marked `held` until the event; sets `begun` at the first of them."""

    def handle(message: Frame) -> Frame:
        if message.head.get("held"):
            if begun is not None:
                begun.set()
            assert released.wait(PATIENCE_S)
        return _echo(message)

    return handle


def _raw(listener: Listener) -> socket.socket:
    return socket.create_connection(listener.address, timeout=5)


def _admitted(listener: Listener) -> ssl.SSLSocket:
    """A caller that has a certificate, as a plain TLS socket."""
    sock = identity(CALLER).calling().wrap_socket(_raw(listener), server_hostname=CALLED)
    assert sock.recv(len(HELLO)) == HELLO
    return sock


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except (ConnectionResetError, ssl.SSLError):
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


def test_connections_without_a_handshake_keep_no_peer_out() -> None:
    with _listener() as listener, contextlib.ExitStack() as ends:
        silent = [ends.enter_context(_raw(listener)) for _ in range(70)]
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}
        assert all(map(_is_closed, silent[:6]))  # they made room
        silent[-1].settimeout(0.01)
        with pytest.raises(TimeoutError):
            silent[-1].recv(1)


def test_bytes_are_counted_each_way() -> None:
    there, back = Links(), Links()
    with _listener(links=back) as listener, _channel(listener, links=there) as channel:
        channel.call({}, [b"x" * 1000], timeout_s=5).result(5)
    asked, answered = pack({}, [b"x" * 1000], call=1), pack({"got": 0}, [b"x" * 1000], call=1)
    assert there.bytes_out == {1: len(asked) + 1000} and back.bytes_out == {0: len(answered) + 1000}


def _of_another_cluster() -> Identity:
    return Authority.new().issue(CALLER)


def _valid(starts_days: int, ends_days: int) -> Identity:
    now = datetime.now(UTC)
    return authority().issue(CALLER, starts=now + timedelta(starts_days), ends=now + timedelta(ends_days))


@pytest.mark.parametrize(
    ("stranger", "reason"),
    [
        (lambda: replace(_of_another_cluster(), authority=authority().certificate), "unable to get local issuer"),
        (lambda: _valid(-9, -8), "certificate has expired"),
        (lambda: _valid(8, 9), "certificate is not yet valid"),
        (lambda: identity("rank-0"), "rank-0 may not call here, expected server"),
        (lambda: identity("head"), "head may not call here, expected server"),
    ],
    ids=["another cluster", "expired", "not yet valid", "rank", "head"],
)
def test_a_stranger_is_refused_in_one_line_and_peers_are_served(
    stranger: Callable[[], Identity], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[Frame] = []
    with _listener(lambda m: called.append(m) or _echo(m)) as listener, caplog.at_level(logging.WARNING):
        with _channel(listener, stranger()) as channel, pytest.raises(LinkError, match="does not accept this process"):
            channel.call({}, timeout_s=5).result(5)
        eventually(lambda: caplog.messages)
        (line,) = caplog.messages
        assert line.startswith("refused a connection from 127.0.0.1 on port") and reason in line
        assert not called
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}


def test_a_server_is_known_by_the_number_of_its_certificate() -> None:
    with _listener() as listener, _channel(listener, identity("server-7")) as channel:
        assert channel.call({}, timeout_s=5).result(5).head == {"got": 7}


def test_callers_without_certificate_or_tls_1_3_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=authority().certificate)
    old = identity(CALLER).calling()
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    for context, reason in ((bare, "peer did not return a certificate"), (old, "unsupported protocol")):
        caplog.clear()
        with _listener() as listener, caplog.at_level(logging.WARNING), _raw(listener) as raw:
            with contextlib.suppress(ssl.SSLError):
                assert _is_closed(context.wrap_socket(raw, server_hostname=CALLED))
            with _channel(listener) as channel:
                assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}
        eventually(lambda: caplog.messages)
        (line,) = caplog.messages
        assert reason in line


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, pack({}, []) * 10, b"\x16\x03\x01\xff\xff" * 20]
)
def test_plain_bytes_are_refused_in_one_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with _listener() as listener, caplog.at_level(logging.WARNING):
        with _raw(listener) as sock:
            sock.sendall(data)
            while not _is_closed(sock):  # an alert comes before the end
                pass
        eventually(lambda: caplog.messages)
        (line,) = caplog.messages
        assert line.startswith("refused a connection from 127.0.0.1")
        with _channel(listener) as channel:
            assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}


@pytest.mark.parametrize(
    ("poser", "reason"),
    [
        (lambda: replace(_of_another_cluster(), name=CALLED), "server-1 of this cluster"),
        (lambda: identity("server-2"), "not server-1 of this cluster .*server-1"),
    ],
    ids=["another cluster", "another server"],
)
def test_nobody_poses_as_a_server(poser: Callable[[], Identity], reason: str) -> None:
    called: list[Frame] = []
    listener = Listener(listen("127.0.0.1"), poser(), lambda m: called.append(m) or m)
    with _channel(listener) as channel, pytest.raises(LinkError, match=reason):
        channel.call({"secret": 1}, timeout_s=5).result(5)
    listener.close()
    assert not called


def test_bytes_changed_on_the_way_end_the_connection() -> None:
    seen, changes = bytearray(), [0]

    def forward(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(2**16)):
                seen.extend(data)
                if changes[0] and len(data) > 2000:
                    changes[0] -= 1
                    data[len(data) // 2] ^= 1
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    with _listener() as listener, socket.create_server(("127.0.0.1", 0)) as between:

        def meet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    near, _ = between.accept()
                    for ends in ((near, far := _raw(listener)), (far, near)):
                        threading.Thread(target=forward, args=ends, daemon=True).start()

        threading.Thread(target=meet, daemon=True).start()
        channel = Channel(1, between.getsockname(), identity(CALLER))
        secret = b"which nobody on the way reads" * 100
        assert bytes(channel.call({}, [secret], timeout_s=5).result(5).parts[0]) == secret[::-1]
        changes[0] = 2  # also of the call that is tried again
        with pytest.raises(LinkError, match=r"ended the connection|connection broke|alert"):
            channel.call({}, [secret], timeout_s=5).result(5)
        assert bytes(channel.call({}, [secret], timeout_s=5).result(5).parts[0]) == secret[::-1]
        assert secret[:20] not in seen and secret[::-1][:20] not in seen
        channel.close()


@pytest.mark.parametrize(
    "data",
    [
        pack({}, [])[:4] + (2**20 + 1).to_bytes(4) + pack({}, [])[8:],
        pack({}, [b""])[:-8] + (2**40).to_bytes(8),
        pack({}, [b"", b""])[:-16] + (2**19 + 1).to_bytes(8) * 2,
        pack({}, [])[:8] + (9).to_bytes(2) + pack({}, [])[10:] + bytes(72),
        b"GET / HTTP/1.1\r\n\r\n" * 2,
        pack({"a": 1}, []).replace(b'{"a":1}', b'["a",1]'),
        pack({"a": 1}, []).replace(b'{"a":1}', b"[[[[[[["),
    ],
    ids=["long head", "long part", "long parts", "many parts", "http", "no object", "no json"],
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


def test_threads_that_share_a_channel_get_their_own_answers() -> None:
    wrong: list[object] = []

    def ask(thread: int) -> None:
        for number in range(200):
            part = b"%d of thread %d" % (number, thread)
            try:
                answer = channel.call({}, [part], timeout_s=10).result(10)
            except (LinkError, TimeoutError) as error:
                wrong.append(error)
            else:
                wrong.extend([answer] * (bytes(answer.parts[0]) != part[::-1]))

    with _listener() as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)  # connects: from now on the callers send and receive
        threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not wrong


def test_an_answer_to_another_call_is_an_error_and_ends_the_connection() -> None:
    def answer_twice(connection: FrameConnection) -> None:
        while True:
            number = connection.receive(None).call
            for _ in range(2):
                connection.send(pack({"got": number}, [], call=number), (), time.monotonic() + 5)

    acceptor = Acceptor(listen("127.0.0.1"), identity(CALLED), ("server",), answer_twice, limit_bytes=2**20)
    channel = Channel(1, acceptor.address, identity(CALLER))
    for direct in (True, False):
        assert channel.call({}, timeout_s=5).result(5).head["got"]
        shifted = channel.call({}, [] if direct else [b"x" * 2**19], timeout_s=5)
        with pytest.raises(LinkError, match=r"answered call \d, expected \d"):
            shifted.result(5)
    channel.close()
    acceptor.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_bug_while_an_answer_arrives_does_not_disturb_the_next_call(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = FrameConnection.receive

    def fails(connection: FrameConnection, by: float | None, rest_s: float = 10.0, poll_s: float = 0.0) -> Frame:
        if threading.current_thread().name == "peer-call":
            return receive(connection, by, rest_s, poll_s)
        monkeypatch.setattr(FrameConnection, "receive", receive)
        raise RuntimeError("a bug")

    with _listener() as listener, _channel(listener) as channel:
        if direct:
            channel.call({}, timeout_s=5).result(5)
        monkeypatch.setattr(FrameConnection, "receive", fails)
        first = channel.call({}, [b"first"], timeout_s=5)
        with pytest.raises(RuntimeError, match="a bug"):
            first.result(5)
        assert bytes(channel.call({}, [b"second"], timeout_s=5).result(5).parts[0]) == b"dnoces"
        if direct:
            assert bytes(first.result(5).parts[0]) == b"tsrif"  # the channel's thread has repeated the call


def test_an_answer_may_be_left_and_collected_later() -> None:
    released = threading.Event()
    with _listener(_held(released)) as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)
        slow = channel.call({"held": True}, [b"slow"], timeout_s=20)
        with pytest.raises(TimeoutError):
            slow.result(0.05)
        following = channel.call({}, [b"next"], timeout_s=20)
        released.set()
        assert bytes(following.result(20).parts[0]) == b"txen"
        assert bytes(slow.result(0).parts[0]) == b"wols"


@pytest.mark.parametrize("polled", [True, False])
def test_an_answer_that_is_left_arrives_although_nobody_waits(polled: bool) -> None:
    released, arrived = threading.Event(), threading.Event()
    with _listener(_held(released)) as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)
        slow = channel.call({"held": True}, timeout_s=20)
        with pytest.raises(TimeoutError):
            slow.result(0.05)
        if polled:
            assert not slow.done()
            released.set()
            eventually(slow.done)
        else:
            slow.add_done_callback(lambda _: arrived.set())
            released.set()
            assert arrived.wait(20)
        assert slow.result(0).head == {"got": 0}
        assert channel.call({}, timeout_s=5).result(5).head == {"got": 0}


def test_an_answer_that_one_thread_gives_up_is_received_for_another() -> None:
    released, got = threading.Event(), list[Frame]()
    with _listener(_held(released)) as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)
        slow = channel.call({"held": True}, timeout_s=20)
        patient = threading.Timer(0.05, lambda: got.append(slow.result(20)))
        patient.start()
        with pytest.raises(TimeoutError):
            slow.result(0.2)
        released.set()
        patient.join(20)
    assert got[0].head == {"got": 0}


def test_a_channel_that_is_closed_lets_the_thread_that_receives_go() -> None:
    released = threading.Event()
    with _listener(_held(released)) as listener, _channel(listener) as channel:
        channel.call({}, timeout_s=5).result(5)
        answer = channel.call({"held": True}, timeout_s=PATIENCE_S)
        threading.Timer(0.1, channel.close).start()
        with pytest.raises(LinkError, match="is closed"):
            answer.result(10)
        released.set()


def test_a_message_that_comes_in_pieces_is_received_in_several_calls() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        connection = FrameConnection(server.accept()[0], 2**20)
    whole = pack({"a": "b"}, [b"12", b"3"]) + b"123"
    for piece in (whole[:5], whole[5:20], whole[20:-2]):
        far.sendall(piece)
        with pytest.raises(DeadlineExceeded):
            connection.receive(time.monotonic() + 0.05)
    far.sendall(whole[-2:] + whole * 2)
    for _ in range(3):
        frame = connection.receive(time.monotonic() + 5)
        assert frame.head == {"a": "b"} and [bytes(part) for part in frame.parts] == [b"12", b"3"]
    connection.close()
    far.close()


def test_a_receiver_polls_before_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        connection = FrameConnection(server.accept()[0], 2**20)
    yields = itertools.count()

    def on_yield() -> None:
        if next(yields) == 3:
            far.sendall(pack({}, [b"soon"], call=7) + b"soon")

    monkeypatch.setattr(os, "sched_yield", on_yield)
    monkeypatch.setattr(frames, "BUSY_S", math.inf)  # on a busy machine a receiver sleeps sooner
    frame = connection.receive(time.monotonic() + 20, poll_s=10)
    assert (frame.call, bytes(frame.parts[0])) == (7, b"soon") and next(yields) > 3
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        connection.receive(began + 0.05, poll_s=10)
    with pytest.raises(DeadlineExceeded):
        connection.receive(time.monotonic() + 0.05, poll_s=0.01)
    assert time.monotonic() - began < 5
    connection.close()
    far.close()


def test_a_peer_that_started_anew_is_found_by_the_next_call() -> None:
    sock = listen("127.0.0.1")
    port = sock.getsockname()[1]
    first = Listener(sock, identity(CALLED), _echo)
    with _channel(first) as channel:
        channel.call({}, timeout_s=5).result(5)
        first.close()
        with pytest.raises(LinkError, match="no answer from 127"):
            channel.call({}, timeout_s=5).result(5)
        second = Listener(listen("127.0.0.1", port), identity(CALLED), _echo)
        channel.call({}, timeout_s=5).result(5)
        second.close()
        third = Listener(listen("127.0.0.1", port), identity(CALLED), _echo)  # nothing was asked in between
        channel.call({}, timeout_s=5).result(5)
        third.close()


def test_a_peer_that_says_nothing_and_a_closed_channel_let_nobody_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = Channel(1, silent.getsockname(), identity(CALLER))
        with pytest.raises(LinkError, match="did not answer in time"):
            channel.call({}, timeout_s=0.1).result(5)
        first, second = channel.call({}, timeout_s=60), channel.call({}, timeout_s=60)
        time.sleep(0.05)
        channel.close()
        for answer in (first, second, channel.call({}, timeout_s=60)):
            with pytest.raises(LinkError):
                answer.result(10)


def test_a_listener_is_closed_while_calls_wait() -> None:
    begun, released = threading.Event(), threading.Event()
    with _listener(_held(released, begun)) as listener, _channel(listener) as channel:
        answer = channel.call({"held": True}, timeout_s=PATIENCE_S)
        idle = _admitted(listener)
        assert begun.wait(PATIENCE_S)
        closing = threading.Thread(target=listener.close)
        closing.start()
        with pytest.raises(LinkError):
            answer.result(5)
        released.set()
        closing.join()
        assert _is_closed(idle)
        idle.close()


def test_calls_that_do_not_end_keep_a_listener_from_closing_only_once() -> None:
    over, begun = threading.Event(), list[Frame]()

    def wait(message: Frame) -> Frame:
        begun.append(message)
        over.wait(PATIENCE_S)
        return message

    listener = Listener(listen("127.0.0.1"), identity(CALLED), wait, rest_s=2.0)
    channels = [Channel(1, listener.address, identity(CALLER)) for _ in range(5)]
    for channel in channels:
        channel.call({}, timeout_s=PATIENCE_S)
    eventually(lambda: len(begun) == 5)
    began = time.monotonic()
    listener.close()
    assert time.monotonic() - began < 6.0  # and not a wait for each
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


def test_nothing_does_not_queue_in_a_bucket() -> None:
    bucket = _bucket(clock := _Time(), 1000.0)
    began = clock.now
    with pytest.raises(LinkError):
        bucket.take(1000, by=began)  # in the queue all the same
    bucket.take(0)
    assert clock.now == began


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
    data = pack({"a": [1, 2.5, "é"]}, [b"12"])  # 18 bytes of header, and 8 of the part's size
    assert json.loads(data[26:]) == {"a": [1, 2.5, "é"]}
