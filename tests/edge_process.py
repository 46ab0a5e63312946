"""`moetool serve --cluster local:3` as a process of its own, for tests that kill its servers."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from moetool.models.checkpoint import Checkpoint
from tests.clusters import make_cluster, make_plan
from tests.servers import PATIENCE_S, eventually, has_ended, post

NAMES = ("s0", "s1", "s2")
_SERVING = re.compile(r"(\w+) is serving on (http://\S+?)/v1")
PROMPTS = ("The king said", "def add(a, b):", "12 * 3 =")


def write_plan(path: Path) -> Path:
    """A plan for the embedded model: half of its experts on each of three servers, each on one or two of them."""
    spec = Checkpoint.open("reference").spec
    placed_GLE = np.zeros((3, spec.num_layers, spec.num_experts), bool)
    for key in range(spec.total_experts):
        layer, expert = spec.expert_of(key)
        placed_GLE[key % 3, layer, expert] = True
        placed_GLE[(key + 1) % 3, layer, expert] |= key % 2 == 0
    make_plan(spec, make_cluster([[130]] * 3, slot_bytes=spec.slot_bytes), placed_GLE).save(path)
    return path


class EdgeProcess:
    """A running cluster of three servers.

    Args:
        cache: the user's cache folder, in which the cluster has its own.

    Attributes:
        urls: of each server, by its name.
    """

    def __init__(self, arguments: list[str], stderr: IO[str], cache: Path) -> None:
        self._arguments, self._stderr, self._cache = arguments, stderr, cache
        self._read_from = 0
        self.urls: dict[str, str] = {}
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "moetool.cli.main", "serve", "reference", "--cluster", "local:3"]
        path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(self._cache)}
        self.popen = subprocess.Popen([*command, *self._arguments], stderr=self._stderr, env=environment)

    def kill_head(self) -> None:
        """SIGKILL the head alone."""
        self.popen.kill()
        self.popen.wait()

    def restart_head(self) -> None:
        """Another head, by the same command; waits until all serve. From now on, narration is that head's."""
        self._read_from += len(self.narration)
        self._start()
        self.wait()

    def wait(self) -> None:
        """Until every server serves."""
        deadline = time.monotonic() + 600
        while len(found := dict(_SERVING.findall(self.narration))) < len(NAMES):
            assert self.popen.poll() is None and time.monotonic() < deadline, self.narration
            time.sleep(0.1)
        self.urls = found

    @property
    def narration(self) -> str:
        """What the head has written on stderr so far."""
        return Path(self._stderr.name).read_text(encoding="utf-8")[self._read_from :]

    def server(self, name: str) -> psutil.Process:
        """The process that serves a server's users now."""
        port = urlsplit(self.urls[name]).port
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections("tcp")):
                    return process
        raise AssertionError(f"nobody listens on {self.urls[name]}: {self.narration}")

    def kill(self, name: str) -> None:
        """SIGKILL one server."""
        self.server(name).send_signal(signal.SIGKILL)

    def is_back(self, name: str, times: int = 1) -> bool:
        """Whether a server has come back so often; on another port, where somebody has taken its own meanwhile."""
        found = re.findall(rf"server {name} is back on (http://\S+?)/v1", self.narration)
        if len(found) >= times:
            self.urls[name] = found[-1]
        return len(found) >= times

    def processes(self) -> list[psutil.Process]:
        """Those of its servers."""
        found = []
        for path in self._cache.rglob("*.worker.json"):
            with contextlib.suppress(psutil.Error, OSError):
                found.append(psutil.Process(json.loads(path.read_text(encoding="utf-8"))["pid"]))
        return found

    def is_forgotten(self) -> bool:
        """Whether no folder of the cluster is left."""
        return not list(self._cache.glob("moetool/clusters/*"))


@contextlib.contextmanager
def edge_cluster(folder: Path, *arguments: str) -> Iterator[EdgeProcess]:
    """A cluster that serves; at the end it is interrupted, and nothing may be left of it."""
    plan = write_plan(folder / "plan.json")
    with tempfile.NamedTemporaryFile("w", suffix=".stderr") as stderr:
        cluster = None
        try:
            given = ["--plan", str(plan), "--port", "0", "--set", "kv_tokens=512", *arguments]
            cluster = EdgeProcess(given, stderr, folder / "cache")
            cluster.wait()
            yield cluster
            left = cluster.processes()
            cluster.popen.send_signal(signal.SIGINT)
            assert cluster.popen.wait(90) == 0, cluster.narration
            eventually(lambda: all(map(has_ended, left)))
            assert len(left) == len(NAMES) and cluster.is_forgotten()
        finally:
            if cluster is not None and cluster.popen.poll() is None:
                cluster.kill_head()
            for process in [] if cluster is None else cluster.processes():
                process.kill()


class Load:
    """Users of every server, one each, that ask again and again.

    Args:
        right: the answer to each prompt.
        prompts: what each server's user asks, in turn; all of them, without.

    Attributes:
        outcomes: (server, what became of a request): `right`, `wrong`, `refused` (an error in words), or `broken` (the
            connection ended).
        wrong: answers that were not what they had to be.
        longest_s: that anybody waited.
    """

    def __init__(
        self,
        cluster: EdgeProcess,
        right: dict[str, str],
        max_tokens: int,
        prompts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[Any] = []
        self.longest_s = 0.0
        self._cluster, self._right, self._max_tokens = cluster, right, max_tokens
        self._prompts = prompts or dict.fromkeys(NAMES, PROMPTS)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(name,), daemon=True) for name in NAMES]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)  # what it has asked for takes no longer than that
            assert not thread.is_alive(), "somebody waits for ever"

    def _live(self, name: str) -> None:
        for prompt in itertools.cycle(self._prompts[name]):
            if self._stop.is_set():
                return
            began = time.monotonic()
            outcome = self.ask(name, prompt)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.outcomes[name, outcome] += 1
            if outcome in ("broken", "refused"):
                self._stop.wait(0.2)

    def ask(self, name: str, prompt: str) -> str:
        body = {"model": "reference", "prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0}
        try:
            status, answer = post(self._cluster.urls[name], "/v1/completions", body)
        except (OSError, HTTPException, ValueError):
            return "broken"
        if status != 200:
            return "refused" if answer["error"]["message"] else "wrong"
        if answer["choices"][0]["text"] == self._right[prompt]:
            return "right"
        self.wrong.append((name, prompt, answer))
        return "wrong"
