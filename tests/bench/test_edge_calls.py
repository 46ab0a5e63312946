"""Edge servers on this machine: seconds of a start, and of a call between two processes, printed.

python -m pytest tests/bench/test_edge_calls.py -m '' -s  # on idle cores
"""

import multiprocessing
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from moetool.cluster.certificates import Identity
from moetool.cluster.frames import Frame
from moetool.cluster.listener import listen
from moetool.cluster.transport import Channel, Listener
from tests.edge_process import edge_cluster
from tests.identities import identity

SIZES = {"a hidden state, 768 bytes": 768, "an expert, 73,728 bytes": 73_728, "16 MiB": 2**24}
STARTS = 3
ROUNDS = {num_bytes: 300 if num_bytes < 2**20 else 20 for num_bytes in SIZES.values()}


def _serve(pipe: Any, own: Identity) -> None:
    listener = Listener(listen("127.0.0.1"), own, lambda message: Frame(head={}, parts=message.parts))
    echo = socket.create_server(("127.0.0.1", 0))
    pipe.send((listener.address, echo.getsockname()))
    sock, _ = echo.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = bytearray(max(SIZES.values()))
    for num_bytes in SIZES.values():
        for _ in range(ROUNDS[num_bytes]):
            _receive(sock, memoryview(buffer)[:num_bytes])
            sock.sendall(memoryview(buffer)[:num_bytes])
    pipe.recv()
    listener.close()


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view) :]


def test_calls_on_loopback() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, identity("server-1")), daemon=True)
    process.start()
    address, echo = pipe.recv()
    plain = socket.create_connection(echo)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    began = time.perf_counter()
    channel = Channel(1, address, identity("server-0"))
    channel.call({}, timeout_s=10).result()
    print(f"\nfirst call, with connection and handshake: {1e3 * (time.perf_counter() - began):.2f} ms")
    buffer = bytearray(max(SIZES.values()))
    for name, num_bytes in SIZES.items():
        data = memoryview(buffer)[:num_bytes]
        calls, bare = [], []
        for _ in range(ROUNDS[num_bytes]):  # in turn, so that what else runs here disturbs both alike
            began = time.perf_counter()
            channel.call({"do": "compute"}, [data], timeout_s=60).result()
            between = time.perf_counter()
            plain.sendall(data)
            _receive(plain, data)
            calls.append(between - began)
            bare.append(time.perf_counter() - between)
        line = " | ".join(
            f"{1e3 * statistics.median(some):.3f} ({1e3 * sorted(some)[len(some) // 10]:.3f})" for some in (calls, bare)
        )
        print(f"{name} there and back, ms, median (10th percentile): call | bare socket: {line}")
    channel.close()
    pipe.send(None)
    process.join(10)


@pytest.mark.slow
def test_three_servers_start(tmp_path: Path) -> None:
    """From the command to the last server's address."""
    taken = []
    for number in range(STARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with edge_cluster(folder) as cluster:
            taken.append(cluster.started_s)
    print(f"\nstarts of three servers, s: {', '.join(f'{seconds:.1f}' for seconds in taken)}")
