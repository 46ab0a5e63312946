"""Forks this machine's workers from one process with imported modules, since importing takes seconds."""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from moetool.base.errors import MoetoolError, first_line
from moetool.cluster.worker_process import ProcessOrder, ProcessRecord, end_process, environment_of, serve_order

_START_S = 120.0
_GONE_S = 5.0
"""Seconds for a running fork to finish on `close`; the fork server is killed after that."""
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # CUDA, CUDA under WSL, ROCm


class ForkServer:
    """A process that imports a module once and forks workers on request.

    Args:
        module: module of the workers' build function; its `USED_AT_START` may name more modules to import.
        threads: compute threads of each worker's libraries (0: the libraries' default).

    Effects: starts the process, and restarts it if it has ended. It ends with this process; forked workers do not.
    """

    def __init__(self, module: str, threads: int = 0) -> None:
        self._lock = threading.Lock()
        self._module, self._threads, self._closed = module, threads, False
        self._is_asked = False  # whether an order is unanswered
        self._popen = self._begin()

    def _begin(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", __name__, self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # poll does not see lines in a read-ahead buffer
            start_new_session=True,  # Ctrl-C must reach only the head
            env=environment_of(self._threads),
        )

    @staticmethod
    def is_possible() -> bool:
        """Whether workers may be forked here: GPU drivers do not survive a fork."""
        return sys.platform == "linux" and not any(Path(driver).exists() for driver in _GPU_DRIVERS)

    def start(self, order: ProcessOrder, log: Path) -> ProcessRecord:
        """Fork a worker process that appends its output to `log`. Raises: MoetoolError: it does not start."""
        by = time.monotonic() + _START_S
        with self._lock:
            if self._closed:
                raise MoetoolError("cannot start a worker: the fork server has ended")
            if self._popen.poll() is not None:
                self._popen = self._begin()
            stdin, stdout = self._popen.stdin, self._popen.stdout
            assert stdin is not None and stdout is not None
            try:
                stdin.write(json.dumps({"order": asdict(order), "log": str(log)}).encode() + b"\n")
                stdin.flush()
                self._is_asked = True
                while True:
                    poll = select.poll()
                    poll.register(stdout, select.POLLIN)
                    line = stdout.readline() if poll.poll(max(0.0, 1e3 * (by - time.monotonic()))) else b""
                    said = json.loads(line or b'{"error": "no answer"}')
                    if said.get("mark", order.mark) == order.mark:  # skips answers to earlier orders
                        break
                self._is_asked = not line
            except (OSError, ValueError) as error:
                said = {"error": first_line(error)}
        if "error" in said:
            raise MoetoolError(f"cannot start a worker: {said['error']}")
        return ProcessRecord(**said)

    def close(self) -> None:
        """End the fork server; its workers continue, except one whose start has not been reported."""
        self._closed = True
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(OSError):
            stdin.close()  # it ends after its current order
        is_alone = self._lock.acquire(timeout=_GONE_S)
        if is_alone and self._is_asked:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_GONE_S)
        self._popen.kill()
        self._popen.wait()
        if is_alone:
            for line in [] if stdout.closed else stdout.readlines():
                if "pid" in (said := json.loads(line)):
                    end_process(said["pid"], said["started"])
            self._lock.release()
        with contextlib.suppress(OSError):
            stdout.close()


def _import(module: str) -> None:
    with contextlib.suppress(Exception):  # building the worker reports the error
        for name in getattr(importlib.import_module(module), "USED_AT_START", ()):
            importlib.import_module(name)


def _fork(wanted: dict[str, Any]) -> bytes:
    """Fork a process that does not return; return its first line, or the error that prevented it."""
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return _error(wanted, error)
    if not child:
        os.close(reading)
        _serve(wanted, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        return said.readline() or _error(wanted, "it ended before it served")


def _serve(wanted: dict[str, Any], stdout: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(stdout, 1)
        os.close(stdout)
        os.dup2(os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
        serve_order(ProcessOrder(**wanted["order"]))
    except BaseException as error:
        traceback.print_exc()
        os.write(1, _error(wanted, error))
    finally:
        os._exit(1)


def _error(wanted: dict[str, Any], error: object) -> bytes:
    return json.dumps({"mark": wanted["order"]["mark"], "error": str(error)}).encode() + b"\n"


def _main() -> None:
    _import(sys.argv[1])
    gc.freeze()  # keeps existing objects in shared pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reaps ended children automatically
    while line := sys.stdin.buffer.readline():
        os.write(1, _fork(json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    _main()
