"""The live page of an edge cluster at its head, and the scheduler's observations and decisions as JSON."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from moetool.base.errors import UsageError
from moetool.serving.live_page import HEADERS, PAGE
from moetool.serving.origins import OriginRules
from moetool.serving.web_names import host_name

_PORT = 8090


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardOptions:
    """Options of `--set dashboard.NAME=VALUE`.

    Attributes:
        host: address of the page.
        port: 0: any free port; -1: no page (default: 8090, or any free port if that is taken).
    """

    host: str = "127.0.0.1"
    port: int | None = None

    def __post_init__(self) -> None:
        if self.port is not None and not -1 <= self.port < 2**16:
            raise UsageError(f"--set dashboard.port: found {self.port}, expected 0 to 65535, or -1 for no page")


class Dashboard:
    """Serves one page, and the scheduler's state as /stats. It accepts only GET and changes nothing.

    There is no login: anyone who reaches the port may read it, but web pages of other sites may not (`OriginRules`).

    Args:
        snapshot: returns the state as a JSON object (`moetool.cluster.edge.scheduler.Scheduler.snapshot`).
        host: address of the page.
        port: 0: any free port (default: 8090, or any free port if that is taken).
        allowed_hosts: further host names under which it may be requested.

    Effects: a thread, until `close`.

    Raises:
        UsageError: the address is not available.
    """

    def __init__(
        self,
        snapshot: Callable[[], dict[str, Any]],
        host: str = "127.0.0.1",
        port: int | None = None,
        *,
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        rules = OriginRules(hosts=frozenset(filter(None, map(host_name, (host, *allowed_hosts)))))
        handler = type("_Bound", (_Handler,), {"snapshot": staticmethod(snapshot), "rules": rules})
        try:
            try:
                self._server = ThreadingHTTPServer((host, _PORT if port is None else port), handler)
            except OSError:
                if port is not None:
                    raise
                self._server = ThreadingHTTPServer((host, 0), handler)
        except OSError as error:
            where = host if port is None else f"{host}:{port}"
            raise UsageError(
                f"the cluster page cannot listen on {where} ({error.strerror}); choose another address with "
                "--set dashboard.host=ADDRESS or --set dashboard.port=PORT"
            ) from None
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving the page."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _Handler(BaseHTTPRequestHandler):
    snapshot: Callable[[], dict[str, Any]]
    rules: OriginRules
    timeout = 10.0  # seconds, for a client that stops in the middle of a request
    server_version, sys_version = "moetool", ""

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if self.headers.defects or len(self.headers.get_all("Host", [])) > 1:
            self.send_error(HTTPStatus.BAD_REQUEST)  # the rules would see other names than a proxy
        elif (why := self.rules.refusal(Headers(raw=_raw(self.headers)))) is not None:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"{why}\n".encode())
        elif path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.encode())
        elif path == "/stats":
            content = json.dumps(self.snapshot(), allow_nan=False).encode()
            self._answer(HTTPStatus.OK, "application/json", content)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found; open / or /stats\n")

    do_HEAD = do_GET

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request without repeating its content."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection = True
        self._answer(status, "text/plain", f"{status.phrase}\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a page polls every two seconds."""

    def _answer(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _raw(headers: Message) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
