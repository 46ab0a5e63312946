"""Shares of several clients: nobody keeps the others waiting, and no answer changes."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from moetool.models.checkpoint import Checkpoint
from moetool.serving.clients import Client, Load, client_of
from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import eventually, get, post, serving

GREEDY: dict[str, Any] = {"model": "reference", "prompt": "Once upon a time", "temperature": 0}


def _metric(url: str, name: str) -> float:
    return float(re.findall(rf"^moetool_{name}_total (\S+)", get(url, "/metrics")[2], re.MULTILINE)[0])


def _stream(url: str, body: dict[str, Any], key: str) -> socket.socket:
    """A connection that has asked for a stream and reads nothing."""
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


def _text(sock: socket.socket) -> str:
    """The text of a stream, read to its end."""
    received = b""
    while b"[DONE]" not in received:
        part = sock.recv(65536)
        assert part, received[-300:]
        received += part
    events = re.findall(rb"data: (\{.*\})\n\n", received)
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_two_hundred_unread_streams_keep_nobody_waiting() -> None:
    """Neither another client nor a new request of the same one."""
    engine = ScriptedEngine(reply="word " * 50_000, step_s=0.002, max_running=8, max_requests=8, max_context=10**6)
    options = ServerOptions(preempt_after_s=0.5, unread_timeout_s=600, send_timeout_s=600)
    with serving(engine, options=options) as (url, _):
        socks = [_stream(url, {**GREEDY, "max_tokens": 50_000}, "flood") for _ in range(200)]
        eventually(lambda: engine.num_live >= 8)
        for key in ("ordinary", "flood"):
            preempted, began = _metric(url, "requests_preempted"), time.monotonic()
            status, body = post(url, "/v1/completions", {**GREEDY, "max_tokens": 5}, **_bearer(key))
            assert status == 200 and body["usage"]["completion_tokens"] == 5
            assert time.monotonic() - began < 30
            assert _metric(url, "requests_preempted") > preempted
        for sock in socks:
            sock.close()
        eventually(lambda: engine.num_live == 0)


def test_unread_streams_are_cut_for_another_request_of_the_same_client() -> None:
    engine = ScriptedEngine(reply="word " * 50_000, max_running=4, max_requests=4, max_context=10**6)
    options = ServerOptions(unread_timeout_s=0.5, send_timeout_s=600, preempt_after_s=600)
    with serving(engine, options=options) as (url, _):
        socks = [_stream(url, {**GREEDY, "max_tokens": 50_000}, "one") for _ in range(4)]
        eventually(lambda: engine.num_live == 4)
        assert post(url, "/v1/completions", {**GREEDY, "max_tokens": 5}, **_bearer("one"))[0] == 200
        assert _metric(url, "connections_unread") >= 1 and _metric(url, "requests_preempted") == 0
        for sock in socks:
            sock.close()


def test_one_client_alone_runs_as_many_as_the_engine() -> None:
    engine = ScriptedEngine(reply="word " * 400, step_s=0.005, max_running=8, max_requests=8, max_context=10**4)
    with serving(engine, options=ServerOptions(preempt_after_s=0.2)) as (url, _):
        socks = [_stream(url, {**GREEDY, "max_tokens": 300}, "one") for _ in range(12)]
        eventually(lambda: engine.num_live >= 8)
        assert {_text(sock) for sock in socks} == {_text(_stream(url, {**GREEDY, "max_tokens": 300}, "one"))}
        assert _metric(url, "requests_preempted") == 0 and engine.cancelled == []


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 1},
        {"seed": 3, "temperature": 1},
        {"n": 2},
        {"stop": ["never in the text"]},
    ],
)
def test_a_preempted_answer_is_the_same(more: dict[str, Any]) -> None:
    engine = ScriptedEngine(reply="a b c d e f g " * 60, step_s=0.01, max_running=4, max_requests=4, max_context=10**4)
    asked = {**GREEDY, "max_tokens": 150, **more}
    with serving(engine, options=ServerOptions(preempt_after_s=0.1)) as (url, _):
        alone = post(url, "/v1/completions", asked)[1]
        with ThreadPoolExecutor(10) as pool:
            long = [pool.submit(post, url, "/v1/completions", asked, **_bearer("long")) for _ in range(6)]
            eventually(lambda: engine.num_live >= 4)
            short = [
                pool.submit(post, url, "/v1/completions", {**GREEDY, "max_tokens": 40}, **_bearer("short"))
                for _ in range(3)
            ]
            assert all(answer.result()[0] == 200 for answer in short)
            for answer in long:
                status, body = answer.result()
                assert status == 200 and body["choices"] == alone["choices"]
                assert body["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
        assert _metric(url, "requests_preempted") >= 1
        server = json.loads(get(url, "/stats")[2])["server"]
        assert [server[name] for name in ("requests_running", "choices_in_engine", "choices_waiting")] == [0, 0, 0]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"seed": 5, "temperature": 1, "presence_penalty": 0.5},
        {"response_format": {"type": "json_object"}, "seed": 7, "temperature": 1, "ignore_eos": False},
    ],
)
def test_a_preempted_answer_of_a_model_is_the_same(more: dict[str, Any]) -> None:
    from moetool.runtime.assembly import ServeOptions, build_engine

    options = ServeOptions(kv_tokens=2048, max_requests=2, dtype="float32")
    engine = build_engine(Checkpoint.open("reference"), options=options, policy="lru")
    engine.start()
    asked = {**GREEDY, "max_tokens": 80, "ignore_eos": True, **more}
    with serving(engine, options=ServerOptions(preempt_after_s=0.05)) as (url, _):
        alone = post(url, "/v1/completions", asked)[1]["choices"]
        answers: list[Any] = []

        def ask(body: dict[str, Any], key: str) -> Callable[[], None]:
            return lambda: answers.append((key, post(url, "/v1/completions", body, **_bearer(key))))

        threads = [threading.Thread(target=ask(asked, "long")) for _ in range(3)]
        threads += [threading.Thread(target=ask({**asked, "max_tokens": 20}, "short")) for _ in range(2)]
        for number, thread in enumerate(threads):
            if number == 3:  # the long answers have begun
                eventually(lambda: json.loads(get(url, "/stats")[2])["server"]["choices_in_engine"] >= 2)
            thread.start()
        for thread in threads:
            thread.join()
        assert all(status == 200 for _, (status, _) in answers)
        assert [body["choices"] for key, (_, body) in answers if key == "long"] == [alone] * 3
        assert _metric(url, "requests_preempted") >= 1


def test_a_client_has_an_address_and_a_key() -> None:
    def client(address: str, key: str = "") -> Client:
        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        return client_of({"type": "http", "client": (address, 1), "headers": headers})

    assert client("10.0.0.1") != client("10.0.0.2")
    assert client("2001:db8::1") == client("2001:db8::ffff:2") != client("2001:db8:0:1::1")
    assert client("10.0.0.1", "a") != client("10.0.0.1", "b")
    assert "secret" not in repr(client("10.0.0.1", "secret"))
    assert client("10.0.0.1", "a").network == client("10.0.0.1", "b").network


def test_keys_do_not_add_to_the_share_of_an_address() -> None:
    load = Load()
    for key in "abc":
        load.add(Client("10.0.0.1", key), 2)
    assert load.of(Client("10.0.0.1", "d")) > load.of(Client("10.0.0.2"))
    assert load.excess(Client("10.0.0.1", "a"), Client("10.0.0.2")) == 6
    assert load.excess(Client("10.0.0.1", "a"), Client("10.0.0.1", "d")) == 2
