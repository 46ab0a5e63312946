"""Runs the application: a socket before the model, signals, draining."""

import contextlib
import errno
import ipaddress
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import uvicorn

from moetool.base import tables
from moetool.base.errors import MoetoolError, UsageError
from moetool.runtime.request import EngineLike
from moetool.serving.access import AccessRecord
from moetool.serving.api import create_app
from moetool.serving.connections import ACCEPTED_AT_ONCE, Connections, HttpConnection, affordable_connections
from moetool.serving.generation import Frontend
from moetool.serving.server_options import ServerOptions

_BACKLOG = 2048
"""Length of the system's accept queue."""
_GOODBYE_S = 2
"""Seconds for clients to read the last bytes of their answers."""


def bind(host: str, port: int) -> socket.socket:
    """Bind a listening socket, so that a busy port is known before a model is loaded.

    Effects: clients that connect before `run` wait.

    Raises:
        UsageError: no such address.
        MoetoolError: the port is in use or not allowed.
    """
    if not 0 <= port < 2**16:
        raise UsageError(f"port {port} does not exist; choose one from 0 (any free one) to 65535 with --port")
    family, kind, protocol, _, address = _look_up(host, port)
    sock = socket.socket(family, kind, protocol)
    try:
        # Old connections of a server that has just ended do not block its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        reason = error.strerror or str(error)
        advice = "choose a free port with --port"
        if error.errno == errno.EADDRNOTAVAIL:
            advice = "give an address of this machine with --host"
        raise MoetoolError(f"cannot listen on {host} port {port} ({reason}); {advice}") from None
    return sock


def address_of(host: str) -> str:
    """Return the address for `bind`. Raises: UsageError where there is none."""
    return str(_look_up(host, 0)[4][0])


def _look_up(host: str, port: int) -> Any:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(
            f"host {host!r} is not an address of this machine ({error}); choose another with --host"
        ) from None
    # `localhost` is an address of either family; clients that know only one mostly know the older.
    return min(found, key=lambda info: info[0] != socket.AF_INET)


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """TLS context; None for plain HTTP. Raises: UsageError: the certificate or the key cannot be used."""
    if not options.ssl_certfile:
        return None

    def refuse() -> str:
        raise UsageError(f"the TLS key {options.ssl_keyfile or options.ssl_certfile} is encrypted; decrypt it first")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile or None, refuse)
    except OSError as error:  # ssl's own errors are among them
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        files = " and ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        raise UsageError(
            f"cannot use {files} for TLS ({reason}); give --ssl-certfile and --ssl-keyfile in PEM"
        ) from None
    return context


def url_of(sock: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a bound socket for clients on this machine."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def open_to_all(address: str, api_key: str | None) -> str:
    """Return the warning for a server that others can reach without a key; empty otherwise."""
    if api_key is not None or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    return f"warning: {address} is reachable from other machines without authentication; set --api-key"


def warn_if_open(sock: socket.socket, api_key: str | None) -> None:
    """Print the warning of `open_to_all` for a bound socket, if any."""
    if warning := open_to_all(sock.getsockname()[0], api_key):
        _narrate(warning)


class HttpServer(uvicorn.Server):
    """Serves an engine until an interruption.

    The first interruption drains: new requests get 503, running ones finish, up to a timeout. The second ends running
    ones with an error; the third closes their connections without an answer. SIGINT and SIGTERM interrupt a server on
    the main thread.

    Args:
        sock: a bound socket that does not listen yet.
        on_ready: called with the URL when the server accepts requests.
        api_key: the key that clients must send (default: none).
        settings: (name, value, reason) for `/stats`.

    Attributes:
        url: URL for clients on this machine.

    Effects: raises this process's limit of open files if it is too low for `max_connections`.
    """

    def __init__(
        self,
        engine: EngineLike,
        sock: socket.socket,
        *,
        on_ready: Callable[[str], object] = lambda url: None,
        options: ServerOptions | None = None,
        api_key: str | None = None,
        settings: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        options = options or ServerOptions()
        tls = tls_context(options)
        self._log = _AccessLog(options.access_log)
        most = affordable_connections(options.max_connections)
        if most < options.max_connections:
            _narrate(
                f"warning: this process may have too few open files for more than {most} connections; see ulimit -n"
            )
        connections = Connections(options, most)
        app = create_app(
            engine, options=options, api_key=api_key, report=self._log.write, connections=connections, settings=settings
        )
        super().__init__(
            uvicorn.Config(
                app,
                # One tested combination, whatever else is installed.
                http=partial(HttpConnection, connections),  # type: ignore[arg-type]
                timeout_keep_alive=options.idle_timeout_s,  # type: ignore[arg-type]
                backlog=ACCEPTED_AT_ONCE,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_level="error",  # otherwise it warns of each invalid request
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_GOODBYE_S,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        self.frontend: Frontend = app.state.frontend
        self._sock = sock
        self.url = url_of(sock, tls=tls is not None)
        self._on_ready = on_ready
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, name="endpoint", daemon=True)
        self._drain_timeout_s = options.drain_timeout_s
        self._num_interrupts = 0
        self._deadline: float | None = None

    def serve_forever(self) -> None:
        """Serve on this thread until interrupted.

        Effects: closes the socket. The engine stays open; all its requests from this server end or are cancelled.
        """
        try:
            self.run(sockets=[self._sock])
        finally:
            for exchange in list(self.frontend.running):
                exchange.close()
            self._sock.close()
            self._log.close()

    def start(self) -> None:
        """Serve on a new thread."""
        self._thread.start()

    def serves(self, within_s: float) -> bool:
        """Whether that thread answers requests within a timeout."""
        return self._ready.wait(within_s) and self._thread.is_alive()

    def stop(self, within_s: float) -> bool:
        """Interrupt that thread; return whether it ended within a timeout."""
        self.interrupt()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def drain(self, within_s: float) -> bool:
        """Finish running requests on that thread, and accept no others; return whether it ended within a timeout."""
        self._num_interrupts = max(1, self._num_interrupts)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    @property
    def draining(self) -> bool:
        """Return whether it accepts no more requests."""
        return self._num_interrupts > 0

    def interrupt(self) -> None:
        """Handle a signal; from any thread."""
        self._num_interrupts += 1
        if self._num_interrupts > 2:
            self.force_exit = self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal for uvicorn by draining, without calling the next handler."""
        self.interrupt()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sock.listen(_BACKLOG)  # uvicorn set it to ACCEPTED_AT_ONCE
        self._on_ready(self.url)
        self._ready.set()

    async def on_tick(self, counter: int) -> bool:
        """Act on uvicorn's heartbeat, ten times a second."""
        if self._num_interrupts and not self.should_exit:
            self._drain()
        return await super().on_tick(counter)

    def _drain(self) -> None:
        frontend = self.frontend
        if self._deadline is None:
            frontend.draining = True
            self._deadline = time.monotonic() + self._drain_timeout_s
            if frontend.running:
                running = tables.numbered(len(frontend.running), "running request")
                _narrate(f"finishing {running}; Ctrl-C again stops at once")
        if self._num_interrupts > 1:
            frontend.abort("the server was stopped")
        elif time.monotonic() > self._deadline:
            frontend.abort(f"the server is shutting down and waited {self._drain_timeout_s:g} s for this answer")
        elif frontend.running:
            return
        self.should_exit = True


class _AccessLog:
    """A line of JSON per finished request, in a file or on stderr; a full disk ends the log, not the server."""

    def __init__(self, path: str) -> None:
        self._file: TextIO | None = None
        if path == "-":
            self._file = sys.stderr
        elif path:
            try:
                self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the server
            except OSError as error:
                raise MoetoolError(f"cannot write the access log {path}: {error.strerror}") from None

    def write(self, record: AccessRecord) -> None:
        if self._file is None:
            return
        try:
            self._file.write(record.line() + "\n")
            self._file.flush()
        except OSError as error:
            _narrate(f"access log stopped: {error.strerror}")
            self._file = None

    def close(self) -> None:
        if self._file not in (None, sys.stderr):
            with contextlib.suppress(OSError):
                self._file.close()


def _narrate(line: str) -> None:
    tables.narrate(f"moetool: {line}")
