"""Servers in threads, and their clients."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil

from moetool.serving.server import HttpServer, bind

PATIENCE_S = 60.0
"""Time limit for events that are immediate on an idle machine."""


@contextlib.contextmanager
def serving(engine: Any, **options: Any) -> Iterator[tuple[str, HttpServer]]:
    """(URL, server) of an engine served in a thread; closes the engine at the end."""
    server = HttpServer(engine, bind("127.0.0.1", 0), **options)
    server.start()
    try:
        assert server.serves(within_s=PATIENCE_S)
        yield server.url, server
    finally:
        server.interrupt()
        server.interrupt()
        ended = server.stop(within_s=PATIENCE_S)
        engine.close()
        assert ended


@contextlib.contextmanager
def serving_reference(chat_template: str, **options: Any) -> Iterator[str]:
    """URL of the embedded model with a chat template; `options` as of `serving`."""
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.assembly import build_engine
    from moetool.runtime.serve_options import ServeOptions

    engine = build_engine(Checkpoint.open("reference"), options=ServeOptions(kv_tokens=2048), policy="lru")
    engine.tokenizer.chat_template = chat_template
    engine.start()
    with serving(engine, **options) as (url, _):
        yield url


def client_of(url: str) -> Any:
    import openai  # not on every machine with a GPU

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def connect(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_S)


def post(url: str, path: str, body: bytes | dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
    connection = connect(url)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def get(url: str, path: str, **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
    connection = connect(url)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended, even if it is still a zombie."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE or not process.is_running()
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Wait for a condition that another thread or process makes true."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        time.sleep(0.01)
