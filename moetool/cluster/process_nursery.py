"""Forks workers' processes of this machine from one that has imported what they need: that takes seconds for each."""

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
from typing import Any

from moetool.cluster.worker_process import ProcessOrder, ProcessRecord, environment_of, serve_order
from moetool.errors import MoetoolError, first_line

_START_S = 120.0
_CUDA = Path("/dev/nvidiactl")


class ProcessNursery:
    """One process that imports a module, and forks from itself on request.

    Args:
        module: has what the processes build. It may name modules that are imported besides in `USED_AT_START`.
        threads: of arithmetic, for the libraries of each (0 leaves it to them).

    Effects: starts the process, which ends with this one; those that it has forked do not.
    """

    def __init__(self, module: str, threads: int = 0) -> None:
        self._lock = threading.Lock()
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,  # a line that was read ahead would not be polled for
            start_new_session=True,  # Ctrl-C is for the head
            env=environment_of(threads),
        )

    @staticmethod
    def is_possible() -> bool:
        """Whether processes of this machine may be forked: CUDA does not survive it."""
        return sys.platform == "linux" and not _CUDA.exists()

    def start(self, order: ProcessOrder, log: Path) -> ProcessRecord:
        """Fork a worker's process, which appends what it has to say to `log`. Raises: MoetoolError: it cannot start."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None and stdout is not None
        by = time.monotonic() + _START_S
        with self._lock:
            try:
                stdin.write(json.dumps({"order": asdict(order), "log": str(log)}).encode() + b"\n")
                stdin.flush()
                while True:
                    poll = select.poll()
                    poll.register(stdout, select.POLLIN)
                    line = stdout.readline() if poll.poll(max(0.0, 1e3 * (by - time.monotonic()))) else b""
                    said = json.loads(line or b'{"error": "it said nothing"}')
                    if said.get("mark", order.mark) == order.mark:  # not of one that was late
                        break
            except (OSError, ValueError) as error:
                said = {"error": first_line(error)}
        if "error" in said:
            raise MoetoolError(f"a worker's process does not start: {said['error']}")
        return ProcessRecord(**said)

    def close(self) -> None:
        """End it; the processes that it has forked go on."""
        with contextlib.suppress(OSError):
            assert self._popen.stdin is not None and self._popen.stdout is not None
            self._popen.stdin.close()
            self._popen.stdout.close()
        self._popen.kill()
        self._popen.wait()


def _import(module: str) -> None:
    with contextlib.suppress(Exception):  # who builds it says why
        for name in getattr(importlib.import_module(module), "USED_AT_START", ()):
            importlib.import_module(name)


def _fork(wanted: dict[str, Any]) -> None:
    """Fork a process, which does not return."""
    if os.fork():
        return
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        silence, log = os.open(os.devnull, os.O_RDWR), os.open(wanted["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(silence, 0)
        os.dup2(log, 2)
        serve_order(ProcessOrder(**wanted["order"]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _main() -> None:
    _import(sys.argv[1])
    gc.freeze()  # what is here stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended processes leave nothing
    while line := sys.stdin.buffer.readline():
        _fork(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    _main()
