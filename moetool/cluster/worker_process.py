"""A worker's process: builds the worker, serves its head, and ends on SIGTERM or after some time without a head.

It runs in its own session and depends on no other process: it outlives its head, and another head may call it.
"""

import contextlib
import importlib
import json
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from moetool.base import durable, garbage, logs
from moetool.base.errors import MoetoolError, UsageError, first_line
from moetool.cluster.certificates import Identity, self_signed
from moetool.cluster.control_messages import MOST_BYTES, receive_message, send_message
from moetool.cluster.frames import FrameConnection
from moetool.cluster.listener import Acceptor, listen
from moetool.cluster.transport import own_address

_LOG = logging.getLogger(__name__)

_FIRST_S = 60.0
"""Seconds for the first head to connect."""
_TICK_S = 0.2
_END_S = 20.0
"""Seconds for a worker to close before its process ends anyway."""
_START_S = 60.0
_DETACH = ("sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh")
"""A shell starts the command in the background and ends, so that the command has no parent here."""
RECORD = ".worker.json"
"""Suffix of record files in a cluster's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """Arguments of a new process.

    Attributes:
        mark: its unique name.
        authority: certificate that signs those of heads, PEM.
        toward: an address on the head's network; empty: on this machine.
        port: port for heads; 0: any free one.
        orphan_s: seconds without a head after which it ends.
        record: file with its address on this machine; a process that ends without a head removes it, and the folder
            after the last one. Empty: none.
    """

    mark: str
    authority: str
    toward: str = ""
    port: int = 0
    orphan_s: float = 0.0
    record: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """Address and identity of a worker's process.

    Attributes:
        host, port: address for heads.
        pid: process id on its machine.
        mark: its unique name.
        started: start time in clock ticks since boot, which tells it from a later process with the same pid.
        certificate: certificate by which heads know it, PEM; it has made the key itself.
        machine: Ray node id of its machine; empty: the head's machine.
    """

    host: str
    port: int
    pid: int
    mark: str
    started: int
    certificate: str
    machine: str = ""


class WorkerProcess:
    """Serves heads: builds the worker that the first one orders, and calls its methods.

    Args:
        sock: a bound, listening socket.
        identity: this process's key and certificate.

    Effects: owns the socket; starts a thread for each connection.
    """

    def __init__(self, sock: Any, identity: Identity, order: ProcessOrder) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._heads: set[FrameConnection] = set()
        self._had_head = False
        self._alone_since = time.monotonic()
        self._worker: Any = None
        self._over, self._drained = threading.Event(), threading.Event()
        self._acceptor = Acceptor(sock, identity, ("head",), self._serve, limit_bytes=MOST_BYTES)

    def run(self) -> None:
        """Serve until a head ends the process, or no head has called for too long; once drained, until it has none."""
        while not self._over.wait(_TICK_S):
            with self._lock:  # a hanging call does not count as a head
                now, is_led = time.monotonic(), any(head.is_open for head in self._heads)
                self._alone_since = now if is_led else self._alone_since
                alone_s = 0.0 if is_led else now - self._alone_since
                is_built = self._worker is not None and not self._drained.is_set()
            if alone_s > (self._order.orphan_s if is_built else 0.0 if self._had_head else _FIRST_S):
                _LOG.warning("no head for %.0f s: the worker ends", alone_s)
                self._close()
                _forget(self._order.record)
                return
        self._acceptor.close()

    def drain(self) -> bool:
        """Have the worker finish its requests. Its head then ends the process; without a head it ends by itself.

        Returns:
            Whether it may have any: it is built, and serves requests.

        Effects: starts a thread.
        """
        if (work := getattr(self._worker, "drain", None)) is None:
            return False
        threading.Thread(target=self._drain, args=(work,), name="drain", daemon=True).start()
        return True

    def _drain(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            self._drained.set()

    def _serve(self, connection: FrameConnection) -> None:
        with self._lock:
            self._heads.add(connection)
            self._had_head = True
        try:
            while True:
                message = receive_message(connection)
                answer = self._answer(message)
                send_message(connection, answer)
                if message.get("do") == "end" or (message.get("do") == "build" and "raised" in answer):
                    self._over.set()
        finally:
            with self._lock:
                self._heads.discard(connection)
                self._alone_since = time.monotonic()

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            match message.get("do"):
                case "build":
                    module, _, name = message["build"].partition(":")
                    self._worker = getattr(importlib.import_module(module), name)(**message["arguments"])
                    garbage.as_usual()
                    return {"value": None}
                case "call":
                    value = getattr(self._worker, message["method"])(*message["args"], **message["kwargs"])
                    return {"value": value}
                case "hello":
                    return {"value": self._worker is not None}
                case "end":
                    self._close()
                    return {"value": None}
            raise MoetoolError(f"{message.get('do')!r} is unknown to this version of moetool")
        except MoetoolError as error:
            if message.get("do") == "build":
                _LOG.error("the worker cannot be built: %s", error)
            return {"raised": type(error).__name__, "text": str(error)}
        except Exception as error:
            _LOG.exception("a call of the head failed")
            return {"raised": "MoetoolError", "text": f"{type(error).__name__}: {first_line(error)}"}

    def _close(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            closing = threading.Thread(target=worker.close, daemon=True)
            closing.start()
            closing.join(_END_S)


def new_mark() -> str:
    """Return a unique name for a process."""
    return f"moetool-worker-{secrets.token_hex(8)}"


def start_process(order: ProcessOrder, *, threads: int = 0, log: IO[bytes] | None = None, detach: bool = False) -> Any:
    """Start a worker's process on this machine.

    Args:
        threads: compute threads of its libraries (0: the libraries' default).
        log: file for its output (default: this process's).
        detach: whether it is no child of this process.

    Returns:
        Its `ProcessRecord`, and the `Popen` of the child.

    Raises:
        MoetoolError: it does not start.
    """
    popen = subprocess.Popen(
        [*(_DETACH if detach else ()), sys.executable, "-m", __name__, order.mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,  # Ctrl-C must reach only the head
        env=environment_of(threads),
    )
    assert popen.stdin is not None and popen.stdout is not None
    try:
        with popen.stdin, popen.stdout:
            popen.stdin.write(json.dumps(asdict(order)).encode())
            popen.stdin.close()
            poll = select.poll()
            poll.register(popen.stdout, select.POLLIN)
            line = popen.stdout.readline() if poll.poll(1e3 * _START_S) else b""
        said = json.loads(line or b'{"error": "no answer"}')
    except (OSError, ValueError) as error:
        said = {"error": first_line(error)}
    if "error" in said:
        popen.kill()
        popen.wait()
        raise MoetoolError(f"cannot start a worker: {said['error']}")
    if detach:
        popen.wait()
    return ProcessRecord(**said), popen


def environment_of(threads: int) -> dict[str, str]:
    """Environment of a new process. Args: as of `start_process`."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}


def end_process(pid: int, started: int) -> None:
    """End a worker's process of this machine at once, if it is still that one; returns when it has gone.

    Effects: waits for at most five seconds.
    """
    by = time.monotonic() + 5.0
    while lives(pid, started) and time.monotonic() < by:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def lives(pid: int, started: int) -> bool:
    """Whether a process of this machine lives, by its record (Linux; elsewhere: false)."""
    state, at = _state_of(pid)
    return at == started and state not in ("", "Z", "X")


def _state_of(pid: int) -> tuple[str, int]:
    """State and start time of a process, in clock ticks since boot; "" and -1 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()  # the name may contain blanks
        return fields[0].decode(), int(fields[19])
    except (OSError, IndexError):
        return "", -1


def _forget(record: str) -> None:
    """Remove a record and, after the last one, the cluster's folder, unless a head has it."""
    if not record:
        return
    path = Path(record)
    path.unlink(missing_ok=True)
    with contextlib.suppress(UsageError, OSError), durable.alone(path.parent):
        if not list(path.parent.glob(f"*{RECORD}")):
            shutil.rmtree(path.parent)


def serve_order(order: ProcessOrder) -> None:
    """Run as a worker's process: write its record to stdout, serve, and exit."""
    logs.configure_if_readable()
    try:
        sock = listen(own_address(order.toward) if order.toward else "127.0.0.1", order.port)
        identity = self_signed(order.mark, order.authority)
    except MoetoolError as error:
        sys.stdout.write(json.dumps({"mark": order.mark, "error": str(error)}) + "\n")
        sys.stdout.flush()
        return
    host, port = sock.getsockname()[:2]
    pid = os.getpid()
    said = {"host": host, "port": port, "pid": pid, "started": _state_of(pid)[1], "certificate": identity.certificate}
    sys.stdout.write(json.dumps({"mark": order.mark, **said}) + "\n")
    sys.stdout.flush()
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(silence, number)
    garbage.rarely()
    process = WorkerProcess(sock, identity, order)

    def drain(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process at once
        if not process.drain():
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, drain)
    process.run()
    logging.shutdown()
    os._exit(0)  # even if the worker's threads still run


if __name__ == "__main__":
    serve_order(ProcessOrder(**json.loads(sys.stdin.buffer.read())))
