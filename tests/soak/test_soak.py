"""A server under 64 clients that come and go, and under made-up requests, for minutes: nothing breaks, nothing leaks.

make soak                        ten minutes
MOETOOL_SOAK_MINUTES=1 make soak
"""

import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from tests import servers
from tests.load import run_clients
from tests.made_requests import fuzz
from tests.server_process import quarter_of_experts, served
from tests.servers import eventually, get

MINUTES = float(os.environ.get("MOETOOL_SOAK_MINUTES", "10"))
CLIENTS = int(os.environ.get("MOETOOL_SOAK_CLIENTS", "64"))
FLAT = 0.03
"""Largest rise of resident memory, as a share of it, over the last two thirds of the run."""
EVERY_S = 0.5


class _Memory(threading.Thread):
    """Reads a process's resident memory until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._readings: list[tuple[float, int]] = []

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._over.wait(EVERY_S):
                self._readings.append((time.monotonic(), self._process.memory_info().rss))

    def end(self) -> tuple[float, float]:
        """(mean bytes, bytes by which a straight line rises) over the last two thirds; prints how it went."""
        self._over.set()
        self.join()
        sixths = [part[:, 1].mean() / 1e6 for part in np.array_split(np.array(self._readings), 6)]
        print(f"\nresident memory by sixths of the time: {', '.join(f'{mean:.1f}' for mean in sixths)} MB")
        at_N, bytes_N = np.array(self._readings[len(self._readings) // 3 :]).T
        slope = np.polyfit(at_N - at_N[0], bytes_N, 1)[0]
        return float(bytes_N.mean()), float(slope * (at_N[-1] - at_N[0]))


def test_a_server_that_is_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_S", 600.0)  # others may stop this machine's processes for minutes
    seconds = 60 * MINUTES
    float32 = ("--set", "dtype=float32")  # in bfloat16 other batches round to other texts
    with served(*quarter_of_experts(), *float32, "--set", f"server.max_queue={CLIENTS // 2}") as process:
        description = json.loads(get(process.url, "/openapi.json")[2])
        statuses: dict[int, int] = {}

        def make_up() -> None:
            until, seed = time.monotonic() + seconds, 0
            while time.monotonic() < until:
                for status, times in fuzz(process.url, description, examples=50, seed=seed).items():
                    statuses[status] = statuses.get(status, 0) + times
                seed += 1

        memory = _Memory(process.popen.pid)
        memory.start()
        with ThreadPoolExecutor(1) as pool:
            fuzzing = pool.submit(make_up)
            tally = run_clients(process.url, CLIENTS, seconds)
            fuzzing.result()
        mean, rise = memory.end()
        print(
            f"\n{MINUTES:g} minutes, {CLIENTS} clients: {dict(tally.outcomes)}; the slowest took {tally.latest:.1f} s"
        )
        print(f"made-up requests by status: {dict(sorted(statuses.items()))}")
        print(f"resident memory {mean / 1e6:.0f} MB, rising by {rise / 1e6:.2f} MB over the last two thirds")

        def at_rest() -> bool:
            server = json.loads(get(process.url, "/stats")[2])["server"]
            return not any(server[name] for name in ("requests_running", "choices_in_engine", "choices_waiting"))

        eventually(at_rest)
        assert tally.wrong == []
        assert {"answered", "streamed", "left", "left a stream", "429"} <= set(tally.outcomes)
        assert rise < FLAT * mean
        stats = json.loads(get(process.url, "/stats")[2])
        assert stats["engine"]["failures"] == 0 and stats["server"]["status"] == "ready"
        assert process.stop() == 0
        assert "Traceback" not in process.narration, process.narration
