"""Tokens a second at 1, 8 and 64 clients with everything in memory, beside `transformers serve` on the same model.

    pytest tests/bench/test_throughput.py -s

All servers are up the whole time; those that are not measured are stopped (SIGSTOP), so that their idle loops cost the
other nothing. By processor time the ratio hardly depends on what else the machine does. `transformers serve` loads no
model without the package accelerate, which moetool has no use for; without it there is nothing to stand beside.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.load import PROMPTS
from tests.server_process import served

CLIENTS = (1, 8, 64)
ROUNDS = int(os.environ.get("MOETOOL_ROUNDS", "5"))
MAX_TOKENS = 24
KV_TOKENS = 8192
DTYPE = os.environ.get("MOETOOL_DTYPE", "bfloat16")
"""Of all servers; bfloat16 is that of the checkpoint, which both choose by default."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server under measurement, and what it calls the model."""

    name: str
    url: str
    model: str
    pid: int

    def ask(self, prompt: str, max_tokens: int) -> Any:
        """The greedy completion of a prompt. Raises: OSError where nobody listens yet."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=600)
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return answer

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for as long as the block does."""
        os.kill(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGSTOP)

    def serve(self, num_clients: int) -> tuple[float, float]:
        """(tokens a second, and a second of its processor time), of clients that ask again once they are answered."""
        requests = {1: 4, 8: 2}.get(num_clients, 1)

        def live(number: int) -> int:
            tokens = 0
            for turn in range(requests):
                prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                tokens += self.ask(prompt, MAX_TOKENS)["usage"]["completion_tokens"]
            return tokens

        with self.awake(), ThreadPoolExecutor(num_clients) as pool:
            began, busy = time.perf_counter(), _processor_s(self.pid)
            tokens = sum(pool.map(live, range(num_clients)))
            return tokens / (time.perf_counter() - began), tokens / (_processor_s(self.pid) - busy)


def _processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextlib.contextmanager
def _transformers_serve(model: Path) -> Iterator[Contender]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model), "--continuous-batching"]
    command += ["--device", "cpu", "--dtype", DTYPE, "--port", str(port), "--host", "127.0.0.1"]
    # Twice the KV cache of the others: left to itself it takes most of the machine's memory.
    command += ["--cb-block-size", "32", "--cb-num-blocks", str(2 * KV_TOKENS // 32)]
    popen = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        made = Contender("transformers serve", f"http://127.0.0.1:{port}", str(model), popen.pid)
        deadline = time.monotonic() + 180
        while True:
            assert popen.poll() is None and time.monotonic() < deadline, "transformers serve does not start"
            with contextlib.suppress(OSError):
                made.ask("a", 1)
                break
            time.sleep(0.5)
        yield made
    finally:
        popen.kill()
        popen.wait(30)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="transformers serve wants accelerate")
def test_throughput(reference: Path) -> None:
    options = ["--set", f"kv_tokens={KV_TOKENS}", "--set", f"dtype={DTYPE}"]
    with contextlib.ExitStack() as stack:
        chosen = stack.enter_context(served("reference", *options))
        few = stack.enter_context(served("reference", *options, "--set", "max_requests=8"))
        contenders = [
            Contender("moetool serve", chosen.url, "reference", chosen.popen.pid),
            Contender("moetool serve, max_requests=8", few.url, "reference", few.popen.pid),
            stack.enter_context(_transformers_serve(reference)),
        ]
        for contender in contenders:
            contender.serve(1)  # warms it up, and leaves it stopped
        rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for turn in range(ROUNDS):
            for num in CLIENTS:
                for contender in contenders[:: 1 if turn % 2 else -1]:
                    rates.setdefault((contender.name, num), []).append(contender.serve(num))
        for contender in contenders:
            os.kill(contender.pid, signal.SIGCONT)
    print()
    for num in CLIENTS:
        theirs = rates[contenders[-1].name, num]
        for contender in contenders:
            own = rates[contender.name, num]
            by_clock, by_processor = (
                sorted(one[kind] / other[kind] for one, other in zip(own, theirs, strict=True)) for kind in (0, 1)
            )
            print(
                f"{num:3} clients  {contender.name:32} {statistics.median(rate for rate, _ in own):7.1f} tokens/s  "
                f"x {statistics.median(by_clock):.2f} ({by_clock[0]:.2f} to {by_clock[-1]:.2f})  by processor time "
                f"x {statistics.median(by_processor):.2f} ({by_processor[0]:.2f} to {by_processor[-1]:.2f})"
            )
