"""Timings of sends to another machine: a small acknowledging server, and a measuring client.

The server accepts and discards bytes from anyone, without authentication or encryption: use it on trusted networks
only.
"""

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from moetool.base.errors import MoetoolError, UsageError
from moetool.costing.costs import Curve
from moetool.measuring.probes.repeat import Timings, repeat

SIZES = (1, 2**12, 2**16, 2**20, 2**24)
_HEADER = struct.Struct("!Q")
_MAX_BYTES = SIZES[-1]
_TIMEOUT_S = 10.0
_SIGNAL_S = 1.0  # poll interval: a Ctrl-C just before the wait for a client does not end the wait
_ACK = b"\x06"
_BUFFER_BYTES = 2**20


def parse_peer(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, or `PORT` for this machine, into (host, port). Raises: UsageError: it is neither."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not an address: write HOST:PORT, or PORT for this machine only")
    return host or "127.0.0.1", int(port)


def serve(address: str, on_ready: Callable[[str], None]) -> None:
    """Acknowledge clients' bytes, one client after the other, until an interruption.

    Args:
        address: HOST:PORT, or PORT for this machine only; port 0 takes any free one.
        on_ready: called with the address when the server listens.

    Raises:
        UsageError: the text is not an address.
        MoetoolError: the address cannot be bound.
    """
    host, port = parse_peer(address)
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise MoetoolError(f"cannot listen on {host}:{port} ({error.strerror}); choose another address") from None
    server.settimeout(_SIGNAL_S)
    with server:
        on_ready(f"{host}:{server.getsockname()[1]}")
        while True:
            try:
                client, _ = server.accept()
            except TimeoutError:
                continue
            with client, contextlib.suppress(OSError):  # a disconnect does not end the server
                _answer(client)


def _answer(client: socket.socket) -> None:
    scratch = memoryview(bytearray(_BUFFER_BYTES))
    client.settimeout(_TIMEOUT_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while len(header := client.recv(_HEADER.size, socket.MSG_WAITALL)) == _HEADER.size:
        (left,) = _HEADER.unpack(header)
        if left > _MAX_BYTES:
            return
        while left:
            left -= _received(client.recv_into(scratch, min(left, len(scratch))))
        client.sendall(_ACK)


def link_curve(peer: str, seconds: float) -> Curve:
    """Return the seconds until bytes sent to `peer` are acknowledged, against bytes.

    Raises:
        UsageError: `peer` is not an address.
        MoetoolError: no probe answers there.
    """
    host, port = parse_peer(peer)
    payload = bytes(SIZES[-1])
    timings = Timings()

    def measure(num_bytes: int) -> None:
        began = time.perf_counter()
        connection.sendall(_HEADER.pack(num_bytes))
        connection.sendall(memoryview(payload)[:num_bytes])
        _received(len(connection.recv(1)))
        timings.add(num_bytes, time.perf_counter() - began)

    try:
        with socket.create_connection((host, port), timeout=_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            repeat([partial(measure, num_bytes) for num_bytes in SIZES], seconds)
    except OSError as error:
        raise MoetoolError(
            f"no answer from {host}:{port} ({error}); start there: moetool profile --listen {host}:{port}"
        ) from None
    return timings.curve()


def _received(num_bytes: int) -> int:
    """Raises: ConnectionError where the other side has closed."""
    if not num_bytes:
        raise ConnectionError("the connection was closed")
    return num_bytes
