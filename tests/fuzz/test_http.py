"""Generated HTTP for a server with a scripted engine: from its OpenAPI description, and as bytes on a socket.

`corpus/http` has one file for each connection that once failed; every `make test` sends them again.
"""

import contextlib
import hashlib
import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from schemathesis import checks as known_checks
from schemathesis.specs.openapi import checks as openapi_checks

from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine
from tests.servers import post, serving

CORPUS = Path(__file__).parent / "corpus" / "http"
SHORT = {"head_timeout_s": 0.1, "body_timeout_s": 0.1, "idle_timeout_s": 0.1, "send_timeout_s": 1.0}
CHECKS = (
    known_checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
)
ALIVE: dict[str, Any] = {"model": "reference", "prompt": "a", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(ScriptedEngine(), options=ServerOptions(request_timeout_s=20)) as (url, _):
        yield url


@pytest.fixture(scope="module")
def hasty() -> Iterator[str]:
    """A server with short timeouts, so that half a request costs no time."""
    with serving(ScriptedEngine(), options=ServerOptions(**SHORT)) as (url, _):
        yield url


def said(url: str, pieces: list[bytes]) -> bytes:
    """Bytes that a server answers to these packets before it closes the connection."""
    parts = urlsplit(url)
    answer = b""
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                sock.sendall(piece)
            while data := sock.recv(65536):
                answer += data
    return answer


def wrong_with(answer: bytes) -> str | None:
    """Error in the answer to arbitrary bytes; None if there is none."""
    if answer and not answer.startswith(b"HTTP/1.1 "):
        return f"no HTTP: {answer[:60]!r}"
    statuses = [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()]
    if bad := [status for status in statuses if status >= 500 and status not in (503, 505)]:
        return f"status {bad[0]}"
    return "internal error" if b"internal error" in answer else None


def keep(data: bytes) -> Path:
    """Add a case to the corpus."""
    path = CORPUS / f"found-{hashlib.sha256(data).hexdigest()[:12]}.request"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.request")), ids=lambda path: path.stem)
def test_corpus(hasty: str, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = path.read_bytes()
    for pieces in ([data], [data[i : i + 7] for i in range(0, len(data), 7)]):
        answer = said(hasty, pieces)
        assert wrong_with(answer) is None
    assert post(hasty, "/v1/completions", ALIVE)[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def requests_of(operation: Any, *, examples: int, seed: int, deadline: float = float("inf")) -> int:
    """Send generated requests to one operation, valid and invalid; returns their number.

    Raises:
        AssertionError: an answer breaks the description, or is a server error.
    """
    sent = 0
    modes = schemathesis.GenerationMode
    strategies = [operation.as_strategy(generation_mode=mode) for mode in (modes.POSITIVE, modes.NEGATIVE)]

    @seeded(seed)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.one_of(*strategies))
    def ask(case: Any) -> None:
        nonlocal sent
        if time.monotonic() > deadline:
            return
        sent += 1
        case.call_and_validate(checks=CHECKS, timeout=60, headers={"X-Request-Timeout": "10"})

    ask()
    return sent


def described(url: str) -> list[Any]:
    """The operations of the server's description."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def test_a_few_requests_to_every_operation(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    operations = described(url)
    assert len(operations) >= 7
    for operation in operations:
        served = operation.method == "post" and operation.definition.raw.get("summary") != "Not served"
        requests_of(operation, examples=16 if served else 3, seed=0)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_requests_by_the_description(
    url: str, fuzz_seconds: float, fuzz_seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    deadline, sent = time.monotonic() + fuzz_seconds, 0
    operations = [one for one in described(url) if one.definition.raw.get("summary") != "Not served"]
    for seed in itertools.count(fuzz_seed):
        for operation in operations:
            sent += requests_of(operation, examples=100, seed=seed, deadline=deadline)
        if time.monotonic() > deadline:
            break
    assert post(url, "/v1/completions", ALIVE)[0] == 200
    read = capfd.readouterr()
    print(f"{read.out}{sent} requests by the description")
    assert "Traceback" not in read.err


_TOKENS = [b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b"\xff", b"%00", b"HTTP/1.1", b"HTTP/2.0", b"Host: localhost\r\n"]
_HEADERS = [
    b"Content-Length: 0",
    b"Content-Length: 99999999999999999999",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    b"Origin: http://evil.example",
    b"Host: evil.example",
    b"X-Request-Timeout: nan",
    b"Authorization: \xff",
    b" folded: 1",
]


@st.composite
def connections(draw: st.DrawFn) -> list[bytes]:
    """Requests of the corpus, corrupted here and there and cut into packets."""
    seeds = [path.read_bytes() for path in sorted(CORPUS.glob("*.request"))]
    data = b"".join(draw(st.lists(st.sampled_from(seeds), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.integers(0, 4)):
            case 0:
                data = data[:at] + draw(st.sampled_from(_TOKENS)) + data[at:]
            case 1:
                data = data[:at] + data[at + draw(st.integers(1, 20)) :]
            case 2:
                data = data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:]
            case 3:
                data = (
                    data[:at] + data[max(0, at - draw(st.integers(1, 60))) : at] * draw(st.integers(1, 400)) + data[at:]
                )
            case _:
                data = data.replace(b"\r\n", b"\r\n" + draw(st.sampled_from(_HEADERS)) + b"\r\n", 1)
    cuts = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=4))})
    return [data[a:b] for a, b in itertools.pairwise(cuts)]


@pytest.mark.slow
def test_bytes_on_a_socket(hasty: str, fuzz_seconds: float, fuzz_seed: int, capfd: pytest.CaptureFixture[str]) -> None:
    deadline, sent = time.monotonic() + fuzz_seconds, 0

    @settings(
        max_examples=200,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(connections())
    def send(pieces: list[bytes]) -> None:
        nonlocal sent
        if time.monotonic() > deadline:
            return
        sent += 1
        wrong = wrong_with(said(hasty, pieces))
        assert wrong is None, f"{wrong}; kept in {keep(b''.join(pieces))}"

    for seed in itertools.count(fuzz_seed):
        seeded(seed)(send)()
        if time.monotonic() > deadline:
            break
    assert _lives(hasty)
    read = capfd.readouterr()
    print(f"{read.out}{sent} connections")
    assert "Traceback" not in read.err


def _lives(url: str) -> bool:
    """Whether a server answers; it hangs up on a client that a busy machine makes slow, which then asks again."""
    for _ in range(5):
        with contextlib.suppress(ConnectionError):
            return post(url, "/v1/completions", ALIVE)[0] == 200
    return False
