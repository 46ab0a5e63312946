"""The short form of tests/soak: clients that come and go, and made-up requests, for some seconds."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from moetool.serving.server_options import ServerOptions
from tests.load import run_clients
from tests.made_requests import Call, fuzz, verdict
from tests.servers import eventually, get, serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = build_engine(
        Checkpoint.open("reference"), options=ServeOptions(kv_tokens=2048), policy="lru", device_memory_bytes=20_000_000
    )
    engine.start()
    with serving(engine, options=ServerOptions(max_queue=8)) as (url, _):
        yield url


def _at_rest(url: str) -> bool:
    server = json.loads(get(url, "/stats")[2])["server"]
    return not any(server[name] for name in ("requests_running", "choices_in_engine", "choices_waiting"))


def test_clients_that_come_and_go(url: str) -> None:
    tally = run_clients(url, 16, 2)
    assert tally.wrong == []
    assert tally.outcomes["answered"] + tally.outcomes["streamed"] > 0
    eventually(lambda: _at_rest(url))


def test_made_up_requests(url: str) -> None:
    statuses = fuzz(url, json.loads(get(url, "/openapi.json")[2]), examples=30)
    assert {200, 400} <= set(statuses)
    eventually(lambda: _at_rest(url))


@pytest.mark.parametrize(
    ("status", "body", "wrong"),
    [
        (500, b"{}", "status 500"),
        (418, b"{}", "not in the description"),
        (400, b"{}", "without an error object"),
        (200, b"{}", None),
    ],
)
def test_the_judge_of_answers(status: int, body: bytes, wrong: str | None) -> None:
    description: Any = {"paths": {"/a": {"get": {"responses": {"200": {}, "400": {}}}}}}
    said = verdict(Call("GET", "/a", "/a", None, {}), status, {"X-Request-Id": "1"}, body, description)
    assert (said is None) == (wrong is None) and (wrong is None or wrong in str(said))
