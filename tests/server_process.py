"""`moetool serve` on the embedded model as a separate process, for tests that kill it or measure its memory."""

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import psutil

from tests.command_line import child_environment

_SERVING = re.compile(r"serving on (http://\S+?)/v1")


class ServerProcess:
    """A running `moetool serve`.

    Args:
        arguments: of `moetool serve`, model first; any free port is used.
        prefix: a command that runs the rest of the command line.

    Attributes:
        url: its address; set once it answers.
    """

    def __init__(self, arguments: list[str], stderr: IO[str], prefix: Sequence[str] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "moetool.cli.main", "serve", *arguments, "--port", "0"]
        self._stderr = stderr
        self.popen = subprocess.Popen(command, stderr=stderr, env=child_environment())
        self.url = self._answers()

    @property
    def narration(self) -> str:
        """Its stderr so far."""
        return Path(self._stderr.name).read_text(encoding="utf-8")

    def kill(self) -> None:
        """Kill with SIGKILL, without cleanup."""
        self.popen.kill()
        self.popen.wait(30)

    def stop(self) -> int:
        """Stop with SIGTERM; returns the exit code."""
        self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(60)

    def urls(self, number: int) -> list[str]:
        """Addresses of this many servers of a cluster, once they serve."""
        deadline = time.monotonic() + 300
        while len(found := _SERVING.findall(self.narration)) < number:
            assert self.popen.poll() is None and time.monotonic() < deadline, self.narration
            time.sleep(0.05)
        return found[:number]

    def _answers(self) -> str:
        deadline = time.monotonic() + 300  # a start takes 5 s of compute on a shared machine
        while time.monotonic() < deadline:
            if found := _SERVING.search(self.narration):
                return found[1]
            assert self.popen.poll() is None, self.narration
            time.sleep(0.05)
        raise AssertionError(f"no answer: {self.narration}")


@contextlib.contextmanager
def served(*arguments: str, prefix: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A `moetool serve` that answers; killed at the end if it still runs."""
    with tempfile.NamedTemporaryFile("w", suffix=".stderr") as stderr:
        process = None
        try:
            process = ServerProcess(list(arguments), stderr, prefix)
            yield process
        finally:
            if process is not None and process.popen.poll() is None:
                process.kill()


def loads_arrow(process: ServerProcess) -> bool:
    """Whether a server has mapped Arrow's library, which takes memory."""
    return any("libarrow" in library.path for library in psutil.Process(process.popen.pid).memory_maps())


def quarter_of_experts() -> list[str]:
    """Arguments that keep a quarter of the embedded model's experts in memory."""
    from moetool.models.checkpoint import Checkpoint
    from moetool.runtime.budget import divide_with_slots
    from moetool.runtime.serve_options import ServeOptions

    checkpoint = Checkpoint.open("reference")
    options = ServeOptions(kv_tokens=2048)
    memory = divide_with_slots(checkpoint, options, checkpoint.spec.total_experts // 4).device_bytes
    return ["reference", "--policy", "lru", "--device-memory", str(memory), "--set", "kv_tokens=2048"]
