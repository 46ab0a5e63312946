"""The socket before the model, and a server process under signals."""

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from moetool.base.errors import MoetoolError, UsageError
from moetool.serving.server import bind, url_of
from tests.refusals import refused
from tests.servers import PATIENCE_S

PROCESS = """
import sys
from moetool.serving.server import HttpServer, bind, warn_if_open
from moetool.serving.server_options import ServerOptions
from tests.scripted_engine import ScriptedEngine

host, timeout = sys.argv[1:]
engine = ScriptedEngine(reply="word " * 40, step_s=0.02)
options = ServerOptions(drain_timeout_s=float(timeout))
sock = bind(host, 0)
warn_if_open(sock, None)
HttpServer(engine, sock, on_ready=lambda url: print(url, flush=True), options=options).serve_forever()
print("ended, live requests:", engine.num_live)
"""


def test_a_port_in_use_is_known_at_once() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            MoetoolError, match=rf"127\.0\.0\.1 port {port} \(Address already in use\).*--port"
        ) as caught:
            bind("127.0.0.1", port)
        assert caught.value.exit_code == 1 and "\n" not in str(caught.value)


def test_addresses_that_do_not_exist() -> None:
    with refused(UsageError, "--port"):
        bind("127.0.0.1", 70_000)
    with refused(UsageError, "--host"):
        bind("no.such.host.invalid", 0)
    with refused(MoetoolError, "cannot listen"):
        bind("192.0.2.1", 0)  # reserved for documentation


def test_urls() -> None:
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    if socket.has_ipv6:
        with bind("::1", 0) as sock:
            assert url_of(sock) == f"http://[::1]:{sock.getsockname()[1]}"


class Process:
    """A server process and one streaming client."""

    def __init__(self, host: str = "127.0.0.1", timeout_s: float = 30) -> None:
        command = [sys.executable, "-c", PROCESS, host, str(timeout_s)]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.url = self.popen.stdout.readline().strip()

    def stream(self) -> http.client.HTTPResponse:
        """A stream whose first event has been read."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        body = {"model": "reference", "prompt": "a", "temperature": 0, "max_tokens": 100, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        return response

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, out, err


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.popen.kill()
        process.popen.communicate()


def test_sigterm_drains(processes: list[Process]) -> None:
    processes.append(process := Process())
    response = process.stream()
    process.popen.send_signal(signal.SIGTERM)
    assert response.read().endswith(b"data: [DONE]\n\n")
    code, out, err = process.end()
    assert (code, out) == (0, "ended, live requests: 0\n")
    assert err == "moetool: finishing 1 running request; Ctrl-C again stops at once\n"


def test_ctrl_c_drains_and_a_second_one_stops_at_once(processes: list[Process]) -> None:
    processes.append(process := Process())
    response = process.stream()
    assert process.popen.stderr is not None
    process.popen.send_signal(signal.SIGINT)
    assert process.popen.stderr.readline() == "moetool: finishing 1 running request; Ctrl-C again stops at once\n"
    assert [response.readline() for _ in range(6)].count(b"\n") == 3  # tokens still come
    process.popen.send_signal(signal.SIGINT)
    last = response.read().removesuffix(b"\n\n").rpartition(b"data: ")[2]
    assert json.loads(last)["error"]["message"] == "the server was stopped"
    code, out, err = process.end()
    assert (code, out, err) == (0, "ended, live requests: 0\n", "")


def test_other_machines_are_warned_about(processes: list[Process]) -> None:
    processes.append(process := Process("0.0.0.0"))
    process.popen.send_signal(signal.SIGTERM)
    code, _, err = process.end()
    assert code == 0 and err.startswith("moetool: warning: 0.0.0.0 is reachable from other machines")
