"""`moetool serve --cluster local:3` as a separate process, for tests that kill its servers."""

import contextlib
import itertools
import json
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
from tests.command_line import child_environment
from tests.engines import engine, generate
from tests.servers import PATIENCE_S, eventually, has_ended, post

NAMES = ("s0", "s1", "s2")
_SERVING = re.compile(r"(\w+) is serving on (http://\S+?)/v1")
PROMPTS = ("The king said", "def add(a, b):", "12 * 3 =")


def write_plan(path: Path) -> Path:
    """Write a plan for the embedded model: half of its experts on each of three servers, each expert on one or two."""
    spec = Checkpoint.open("reference").spec
    placed_GLE = np.zeros((3, spec.num_layers, spec.num_experts), bool)
    for key in range(spec.total_experts):
        layer, expert = spec.expert_of(key)
        placed_GLE[key % 3, layer, expert] = True
        placed_GLE[(key + 1) % 3, layer, expert] |= key % 2 == 0
    make_plan(spec, make_cluster([[130]] * 3, slot_bytes=spec.slot_bytes), placed_GLE).save(path)
    return path


def right_answers(reference: Path, tokenizer: Any, max_tokens: int) -> dict[str, str]:
    """The greedy answer to each of `PROMPTS` by a single engine."""
    alone = engine(reference, tokenizer, "lru", 256)
    right = {}
    for prompt in PROMPTS:
        (tokens,), _ = generate(alone, [tokenizer(prompt)["input_ids"]], max_tokens)
        right[prompt] = tokenizer.decode(tokens, skip_special_tokens=True)
    alone.close()
    return right


class EdgeProcess:
    """A running cluster of three servers.

    Args:
        cache: the user's cache folder, which contains the cluster's folder.

    Attributes:
        urls: address of each server by name.
        started_s: seconds from the command until every server served.
    """

    def __init__(self, arguments: list[str], stderr: IO[str], cache: Path) -> None:
        self._arguments, self._stderr, self._cache = arguments, stderr, cache
        self._read_from = 0
        self.urls: dict[str, str] = {}
        self.started_s = 0.0
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "moetool.cli.main", "serve", "reference", "--cluster", "local:3"]
        command += ["--set", "dtype=float32"]  # as `right_answers`
        environment = child_environment(XDG_CACHE_HOME=str(self._cache))
        self._began = time.monotonic()
        self.popen = subprocess.Popen([*command, *self._arguments], stderr=self._stderr, env=environment)

    def kill_head(self) -> None:
        """Kill only the head, with SIGKILL."""
        self.popen.kill()
        self.popen.wait()

    def restart_head(self) -> None:
        """Start a new head with the same command; wait until all serve. `narration` is then that head's."""
        self._read_from += len(self.narration)
        self._start()
        self.wait()

    def wait(self) -> None:
        """Wait until every server serves."""
        deadline = time.monotonic() + 600
        while len(found := dict(_SERVING.findall(self.narration))) < len(NAMES):
            assert self.popen.poll() is None and time.monotonic() < deadline, self.narration
            time.sleep(0.1)
        self.urls, self.started_s = found, time.monotonic() - self._began

    @property
    def narration(self) -> str:
        """The head's stderr so far."""
        return Path(self._stderr.name).read_text(encoding="utf-8")[self._read_from :]

    def server(self, name: str) -> psutil.Process:
        """The current process of a server."""
        port = urlsplit(self.urls[name]).port
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if any(c.status == "LISTEN" and c.laddr.port == port for c in process.net_connections("tcp")):
                    return process
        raise AssertionError(f"nobody listens on {self.urls[name]}: {self.narration}")

    def kill(self, name: str) -> None:
        """Kill one server with SIGKILL."""
        self.server(name).send_signal(signal.SIGKILL)

    def is_back(self, name: str, times: int = 1) -> bool:
        """Whether a server has returned this many times; its port may differ if another process took it."""
        found = re.findall(rf"server {name} is back on (http://\S+?)/v1", self.narration)
        if len(found) >= times:
            self.urls[name] = found[-1]
        return len(found) >= times

    def processes(self) -> list[psutil.Process]:
        """The server processes."""
        found = []
        for path in self._cache.rglob("*.worker.json"):
            with contextlib.suppress(psutil.Error, OSError):
                found.append(psutil.Process(json.loads(path.read_text(encoding="utf-8"))["pid"]))
        return found

    def is_forgotten(self) -> bool:
        """Whether the cluster's folder is gone."""
        return not list(self._cache.glob("moetool/clusters/*"))


@contextlib.contextmanager
def edge_cluster(folder: Path, *arguments: str) -> Iterator[EdgeProcess]:
    """A serving cluster; interrupted at the end, it must leave no process and no file."""
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
    """Users that repeat requests, one per server.

    Args:
        right: the expected answer to each prompt.
        prompts: prompts of each server's user, in turn (default: all prompts).

    Attributes:
        outcomes: (server, outcome): `right`, `wrong`, `refused` (an error message) or `broken` (the connection ended).
        wrong: unexpected answers.
        longest_s: longest time until an answer.
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
            thread.join(2 * PATIENCE_S)  # a request takes no longer
            assert not thread.is_alive(), "a user waits forever"

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
