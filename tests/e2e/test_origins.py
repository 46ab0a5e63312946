"""Which names and which web pages a server answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from moetool.base.errors import UsageError
from moetool.serving.server_options import ServerOptions
from tests.refusals import refused
from tests.scripted_engine import ScriptedEngine
from tests.servers import connect, serving

EVIL = "http://evil.example"
ASK = json.dumps({"model": "reference", "prompt": "a", "max_tokens": 2, "temperature": 0})


@pytest.fixture(scope="module")
def keyless() -> Iterator[str]:
    options = ServerOptions(allowed_hosts=("Lab.Example",), cors_origins=("https://chat.example:443/",))
    with serving(ScriptedEngine(), options=options) as (url, _):
        yield url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with serving(ScriptedEngine(), api_key="secret", options=ServerOptions(cors_origins=("*",))) as (url, _):
        yield url


def ask(url: str, method: str = "POST", path: str = "/v1/completions", **headers: str) -> tuple[int, Any, str]:
    """Status, headers and body of the answer to a request with these headers."""
    connection = connect(url)
    connection.putrequest(method, path, skip_host="Host" in headers)
    body = ASK if method == "POST" else ""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **given}.items():
        connection.putheader(name, value)
    connection.endheaders(body.encode())
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "localhost.:80",
        "127.0.0.1:9",
        "[::1]:8000",
        "192.0.2.7",
        "lab.example",
        "LAB.example:8",
    ],
)
def test_served_hosts(keyless: str, host: str) -> None:
    assert ask(keyless, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        *(
            "evil.example",
            "evil.example:80",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example/localhost",
        ),
        *(
            "localhost@evil.example",
            "local host",
            "",
            ":80",
            "localhost:",
            "localhost:x",
            "[::1",
            "2130706433",
            "0x7f.1",
        ),
    ],
)
def test_refused_hosts(keyless: str, host: str) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/health"), ("GET", "/v1/models")):
        status, headers, body = ask(keyless, method, path, Host=host)
        assert status == 403 and headers["x-request-id"]
        error = json.loads(body)["error"]
        assert error["code"] == "origin_refused" and "--allowed-host" in error["message"]


def test_pages_without_a_key(keyless: str) -> None:
    host = keyless.removeprefix("http://")
    assert ask(keyless, Origin=f"http://{host}")[0] == 200
    assert ask(keyless, Origin="https://lab.example", Host="lab.example")[0] == 200
    for origin in (
        EVIL,
        "null",
        "https://chat.example.evil.example",
        "http://chat.example",
        "http://localhost:3000",
        "",
    ):
        status, headers, body = ask(keyless, Origin=origin)
        assert status == 403 and "--cors-origin" in json.loads(body)["error"]["message"], origin
        assert "access-control-allow-origin" not in headers
    status, headers, _ = ask(keyless, Origin="https://chat.example")
    assert (status, headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "Origin" in headers["vary"]


def test_preflights(keyless: str, locked: str) -> None:
    asks = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization,content-type"}
    for url in (keyless, locked):
        status, headers, _ = ask(url, "OPTIONS", Origin="https://chat.example", **asks)
        assert status == 200 and headers["access-control-allow-origin"] in ("*", "https://chat.example")
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-allow-headers"] == "authorization,content-type"
    status, headers, _ = ask(keyless, "OPTIONS", Origin=EVIL, **asks)
    assert status == 403 and "access-control-allow-origin" not in headers


def test_pages_with_a_key(locked: str) -> None:
    assert ask(locked, Host="any.example", Authorization="Bearer secret")[0] == 200
    status, headers, _ = ask(locked, Origin=EVIL)
    # The page may read that it lacks the key.
    assert (status, headers["access-control-allow-origin"]) == (401, "*")
    assert ask(locked, Origin=EVIL, Authorization="Bearer secret")[0] == 200


def test_hosts_with_a_key_are_checked_where_any_is_named() -> None:
    options = ServerOptions(allowed_hosts=("lab.example",))
    with serving(ScriptedEngine(), api_key="secret", options=options) as (url, _):
        assert ask(url, Host="lab.example", Authorization="Bearer secret")[0] == 200
        assert ask(url, Host="other.example", Authorization="Bearer secret")[0] == 403
        # No origin is shared, so a browser shows the answer to no page; the key is what lets programs in.
        status, headers, _ = ask(url, Origin=EVIL, Authorization="Bearer secret")
        assert status == 200 and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("host", ["http://lab.example", "lab.example:80", "a b", "", "a@b", "a/b"])
def test_names_that_are_no_hosts(host: str) -> None:
    with refused(UsageError, "allowed", "host"):
        ServerOptions(allowed_hosts=(host,))


@pytest.mark.parametrize(
    "origin", ["lab.example", "https://", "https://a.example/chat", "https://a@b", "http://a:x", ""]
)
def test_names_that_are_no_origins(origin: str) -> None:
    with refused(UsageError, "CORS"):
        ServerOptions(cors_origins=(origin,))
