"""The page about a cluster: what it answers, and to whom."""

import contextlib
import http.client
import json
import re
import socket
from collections.abc import Iterator

import pytest

import moetool.cluster.edge.dashboard as dashboard
from moetool.base.errors import UsageError
from moetool.serving.live_page import HEADERS, PAGE
from tests.edge_workers import odds
from tests.live_page import missing_fields
from tests.refusals import refused
from tests.servers import PATIENCE_S
from tests.unit.cluster.edge.test_scheduler import SPEC, World, planned


@pytest.fixture(scope="module")
def world() -> World:
    odds_NLE = odds(SPEC, 3)
    made = World(odds_NLE, planned(odds_NLE, "uniform"))
    made.pass_s(90)
    return made


@pytest.fixture(scope="module")
def page(world: World) -> Iterator[dashboard.Dashboard]:
    made = dashboard.Dashboard(world.scheduler.snapshot)
    yield made
    made.close()


def ask(page: dashboard.Dashboard, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(page.url.removeprefix("http://"), timeout=PATIENCE_S)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def test_the_state_has_what_the_page_shows(world: World, page: dashboard.Dashboard) -> None:
    status, headers, content = ask(page, "GET", "/stats")
    state = json.loads(content)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert [server["name"] for server in state["servers"]] == ["s0", "s1", "s2"]
    assert all(len(server["held"]) > 20 and server["serves"] for server in state["servers"])
    assert state["decisions"][0]["made"] and state["decisions"][0]["saved_s"] > state["decisions"][0]["cost_s"]
    assert len(state["bytes"]) == 3 and state["bytes"][0][0] == 0 and state["bytes"][0][1] > 0
    assert 0 < state["local"] < 1 and state["latency"][0]["p50_s"] == 0.1
    assert not missing_fields("edgeView", state)
    experts = state["experts"]
    assert experts["by_layer"]["resident"] == [
        sum(layer == place[0] for server in state["servers"] for place in server["held"]) for layer in experts["layers"]
    ]
    loaded = sum(sum(place["loaded"]) for place in experts["devices"])
    assert loaded == sum(decision["copies"] for decision in state["decisions"] if decision["outcome"] == "done") > 0


def test_the_head_has_the_page_of_every_server(page: dashboard.Dashboard) -> None:
    status, headers, content = ask(page, "GET", "/")
    assert (status, content.decode()) == (200, PAGE) and HEADERS.items() <= headers.items()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_get_is_taken(page: dashboard.Dashboard, method: str) -> None:
    status, headers, _ = ask(page, method, "/stats")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Host: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"200"),
        (b"Host: localhost\r\nConnection: keep-alive\r\n", b"200"),
        (b"Host: localhost\r\nHost: elsewhere.example\r\n", b"400"),
        (b"Host : elsewhere.example\r\nHost: localhost\r\n", b"400"),
        (b"no field\r\nHost: elsewhere.example\r\n", b"400"),
    ],
)
def test_one_answer_on_a_connection(page: dashboard.Dashboard, head: bytes, status: bytes) -> None:
    host, port = page.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + head + b"\r\nGET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionResetError):  # bytes of the second request were not read
            while part := sock.recv(65536):
                answer += part
    assert re.findall(rb"HTTP/1\.[01] (\d+)", answer) == [status]


def test_pages_of_other_sites_are_refused(page: dashboard.Dashboard) -> None:
    for host in ("elsewhere.example", "127.0.0.1.elsewhere.example:80", "lab.example"):
        status, _, content = ask(page, "GET", "/stats", Host=host)
        assert status == 403 and b"--allowed-host" in content
    for origin in ("http://elsewhere.example", "null", "http://localhost:1"):
        assert ask(page, "GET", "/stats", Origin=origin)[0] == 403
    assert ask(page, "GET", "/stats", Origin=page.url)[0] == 200
    assert ask(page, "GET", "/stats", Host="localhost:1")[0] == 200
    assert ask(page, "GET", "/../pyproject.toml")[0] == 404
    status, headers, content = ask(page, "HEAD", "/")
    assert status == 200 and content == b"" and int(headers["Content-Length"]) > 1000


def test_names_that_are_allowed(world: World) -> None:
    for host in ("127.0.0.1", "0.0.0.0"):  # on every address too: a name may have been pointed at one of them
        page = dashboard.Dashboard(world.scheduler.snapshot, host, allowed_hosts=("lab.example",))
        try:
            assert ask(page, "GET", "/stats", Host="LAB.example:80")[0] == 200
            assert ask(page, "GET", "/stats", Host="elsewhere.example")[0] == 403
        finally:
            page.close()


@pytest.mark.follows("moetool.cluster.edge.dashboard Dashboard.__init__")
def test_a_port_that_is_taken_is_said(page: dashboard.Dashboard) -> None:
    with refused(UsageError, "127.0.0.1", "--set", "dashboard.port"):
        dashboard.Dashboard(dict, port=int(page.url.rsplit(":", 1)[1]))
    dashboard.Dashboard(dict, port=0).close()
