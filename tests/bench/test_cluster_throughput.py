"""Requests a second of edge servers and of ranks beside one process, on the cores of this machine.

    python -m pytest tests/bench/test_cluster_throughput.py -m '' -s  # on idle cores

Nine clients ask again once they are answered, each with prompts of one server's task. Edge servers hold half of the
experts each, by plans from other prompts of these tasks; ranks share all experts. All serve in the model's own type.
"""

import http.client
import json
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from moetool.bench.live_cluster.bench_inputs import prepare
from moetool.bench.live_cluster.bench_options import TASKS, ClusterBenchOptions
from tests.server_process import ServerProcess, served

CLIENTS = 9
SECONDS = 5.0
ROUNDS = int(os.environ.get("MOETOOL_ROUNDS", "3"))
START_CHARACTERS = 24
"""Of a prompt in the second load, where decoding takes most of the time."""


def _requests_s(urls: Sequence[str], texts: Sequence[Sequence[str]]) -> float:
    """Requests a second of all clients, each with its server and its task."""
    until = time.perf_counter() + SECONDS

    def live(client: int) -> int:
        connection = http.client.HTTPConnection(urlsplit(urls[client % len(urls)]).netloc, timeout=60)
        prompts = texts[client % len(texts)]
        turn = client
        while time.perf_counter() < until:
            turn += 1
            prompt, max_tokens = prompts[turn * 5 % len(prompts)], 8 + turn * 7 % 19
            body = {"model": "reference", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            response.read()
        return turn - client - 1  # the last answer came too late

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(live, range(CLIENTS))) / SECONDS


def _busy_s() -> float:
    """Seconds in which the machine's cores were busy."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _own_s(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _processes(server: ServerProcess) -> list[psutil.Process]:
    root = psutil.Process(server.popen.pid)
    return [root, *root.children(recursive=True)]


@pytest.mark.slow
def test_clusters_beside_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # keeps nothing for later servers
    options = ClusterBenchOptions(memory=(0.5, 0.5, 0.5), new_tokens=24, profile_s=0.0)
    inputs = prepare("reference", TASKS, options, tmp_path)
    plans = inputs.plans(inputs.cluster(options), ("prism_exact", "whole_layers"), seed=0)
    with ExitStack() as stack:
        servers: dict[str, tuple[ServerProcess, Sequence[str]]] = {}

        def start(name: str, *arguments: str) -> None:
            server = stack.enter_context(served("reference", *arguments))
            servers[name] = server, server.urls(3 if name.startswith("edge") else 1)

        start("one process")
        for planner, plan in plans.items():
            plan.save(tmp_path / f"{planner}.json")
            cluster = ("--cluster", "local:3", "--set", f"cluster.name={planner}")
            start(f"edge {planner}", *cluster, "--plan", str(tmp_path / f"{planner}.json"))
        ranks = ("--cluster", "local:3", "--mode", "ep", "--set", "seats=3")
        start("three ranks", *ranks, "--plan", str(tmp_path / "prism_exact.json"))
        loads = {
            "whole prompts": inputs.texts,
            "starts of prompts": [[text[:START_CHARACTERS] for text in texts] for texts in inputs.texts],
        }
        own = [process for server, _ in servers.values() for process in _processes(server)] + [psutil.Process()]
        began, others_s = time.perf_counter(), _busy_s() - _own_s(own)
        rates: dict[tuple[str, str], list[float]] = {}
        for turn in range(-1, ROUNDS):  # the first round warms up
            for load, texts in loads.items():
                for name, (_, urls) in servers.items():
                    rate = _requests_s(urls, texts)
                    if turn >= 0:
                        rates.setdefault((load, name), []).append(rate)
        others = (_busy_s() - _own_s(own) - others_s) / (time.perf_counter() - began) / (psutil.cpu_count() or 1)
        for server, _ in servers.values():
            assert server.stop() in (0, 130), server.narration
    print(f"\nother processes took {others:.0%} of the cores; clusters need all, one process hardly more than one")
    for (load, name), found in rates.items():
        ratio = statistics.median(found) / statistics.median(rates[load, "one process"])
        print(f"{load:18} {name:18} {statistics.median(found):6.1f} requests/s  x {ratio:.2f}")
