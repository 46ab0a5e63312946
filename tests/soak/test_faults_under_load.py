"""Faults under load: kills, a full disk, clock steps, pauses and memory pressure, alone and two at a time.

Every answer equals that of the plain model. The part of a log that a kill leaves can be read and replayed to the
decisions that were taken. Faults that a machine does not allow are left out and named.

make soak                        ten minutes
MOETOOL_SOAK_MINUTES=1 make soak
"""

import contextlib
import http.client
import json
import mmap
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.trace.reader import Trace
from moetool.tuning.replay import replay
from tests.load import PROMPTS
from tests.memory_group import MemoryGroup
from tests.server_process import ServerProcess, quarter_of_experts, served
from tests.servers import connect, eventually, post

MINUTES = float(os.environ.get("MOETOOL_SOAK_MINUTES", "10"))
CLIENTS = 4
MAX_TOKENS = 12
STEPS_S = (-10 * 365 * 86400, -86400, -3, 3, 86400, 10 * 365 * 86400)
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile long *step;
__attribute__((constructor)) static void begin(void) {
  int file = open(getenv("MOETOOL_SOAK_CLOCK"), O_RDONLY);
  void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
  step = page == MAP_FAILED ? 0 : page;
}
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(id, at);
  if (!failed && step && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *step;
  return failed;
}
int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def right(full: Any, tokenizer: Any) -> dict[str, str]:
    """The plain model's answers."""
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            tokens = full.model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
        answers[prompt] = str(tokenizer.decode(tokens[ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


class Clock:
    """The wall clock of the processes that are started from here, which can be stepped while they run."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        compiler = shutil.which("cc")
        self.usable = compiler is not None
        if compiler is None:
            return
        (folder / "clock.c").write_text(CLOCK)
        library, page = folder / "clock.so", folder / "clock"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "clock.c", "-ldl"], check=True)
        page.write_bytes(bytes(mmap.PAGESIZE))
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("MOETOOL_SOAK_CLOCK", str(page))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def step(self, seconds: int) -> None:
        """Set how far it is off."""
        self._page[:8] = struct.pack("l", seconds)


class Clients:
    """Ask for ever, and compare.

    Attributes:
        outcomes: how many answers were right, and how many requests got none while something was wrong.
        wrong: what must not be.
        url: of the server as it is; None while there is none.
    """

    def __init__(self, right: dict[str, str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.url: str | None = None
        self.excused = False  # a server may be killed now, or is not there
        self._right, self._over, self._lock = right, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._live, args=(n,), daemon=True) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(90)

    def answers_come(self, number: int = 5) -> None:
        """Wait for more right answers."""
        before = self.outcomes["right"]
        eventually(lambda: self.outcomes["right"] >= before + number, within_s=120)

    def _live(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            url, excused = self.url, self.excused
            if url is None:
                time.sleep(0.05)
                continue
            prompt = draw.choice(PROMPTS)
            try:
                text = self._streamed(url, prompt) if draw.random() < 0.5 else self._whole(url, prompt)
            except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
                excused = excused or self.excused or self.url != url
                self._count("no answer" if excused else f"unexplained: {type(error).__name__}: {error}", excused)
                time.sleep(0.05)
                continue
            if text != self._right[prompt]:
                self._count(f"wrong: {prompt!r}: {text!r}", False)
            else:
                self._count("right", True)

    def _count(self, outcome: str, well: bool) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if not well:
                self.wrong.append(outcome)

    def _whole(self, url: str, prompt: str) -> str:
        status, answer = post(url, "/v1/completions", _body(prompt))
        if status != 200:
            raise ValueError(f"{status}: {answer}")
        return str(answer["choices"][0]["text"])

    def _streamed(self, url: str, prompt: str) -> str:
        connection = connect(url)
        connection.request(
            "POST", "/v1/completions", json.dumps(_body(prompt, stream=True)), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        if response.status != 200 or not events or events[-1] != "[DONE]":
            raise ValueError(f"{response.status}: {text[-200:]}")
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def _body(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": "reference", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **more}


class FaultInjection:
    """A server that is started again whenever it has ended, and the faults that it can get."""

    def __init__(self, disk: Path, clients: Clients, clock: Clock, memory: MemoryGroup, stack: contextlib.ExitStack):
        self.disk, self.clients, self.clock, self.memory = disk, clients, clock, memory
        self.faults: Counter[str] = Counter()
        self.logs = self.rows = 0
        self._draw = random.Random(int(time.time()))
        self._process = stack.enter_context(contextlib.ExitStack())
        self._shot = False  # the server, by us
        self.server: ServerProcess
        self._start()

    def kinds(self) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
        """Faults that this machine allows, by name."""
        found: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
            "kill": self._killed,
            "pause": self._paused,
        }
        if os.path.ismount(self.disk):
            found["full disk"] = self._full
        if self.clock.usable:
            found["clock step"] = self._stepped
        if self.memory.usable:
            found["memory pressure"] = self._squeezed
        return found

    def inject(self, names: list[str]) -> None:
        """Inject these faults together, then check that answers come and are right."""
        kinds = self.kinds()
        with contextlib.ExitStack() as together:
            for name in names:
                self.faults[name] += 1
                together.enter_context(kinds[name]())
                time.sleep(self._draw.uniform(0.3, 2.0))
        if self.server.popen.poll() is not None:
            self._start()
        self.clients.excused = False
        self.clients.answers_come()

    def check_log(self, log: Path) -> None:
        """The files there are whole, and replay to the same decisions."""
        trace = Trace(log)
        trace.verify()
        facts = trace.manifest["provenance"]
        if trace.num_tokens and not facts["failed_forwards"]:
            (row,) = replay(trace, [facts["policy"]], [facts["slots"] * trace.spec.slot_bytes])
            assert row.digest == facts["decisions"], log
        self.logs += 1
        self.rows += trace.num_tokens

    def stop(self) -> None:
        """End the server as it should."""
        self.clients.url = None
        self.clients.excused = True
        assert self.server.stop() == 0, self.server.narration
        assert "Traceback" not in self.server.narration, self.server.narration
        assert Trace(self.disk / "log").closed
        self.check_log(self.disk / "log")
        self._process.close()

    def _start(self) -> None:
        self.clients.excused = True
        self.clients.url = None
        self._process.close()
        self._shot = False
        policy = self._draw.choice(["lru", "lfu", "moe_infinity"])
        arguments = [*quarter_of_experts(), "--policy", policy, "--log", str(self.disk / "log")]
        arguments += ["--set", "log_segment_s=0.5", "--set", "dtype=float32"]  # as what is right was made
        self.server = self._process.enter_context(served(*arguments, prefix=self.memory.prefix))
        for log in self.disk.glob("log.*"):
            if log.is_dir():  # of the one before
                self.check_log(log)
                shutil.rmtree(log)
        self.clients.url = self.server.url

    @contextlib.contextmanager
    def _killed(self) -> Iterator[None]:
        self.clients.excused = self._shot = True
        self.server.kill()
        self.clients.url = None
        yield

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """As when a machine sleeps."""
        self.server.popen.send_signal(signal.SIGSTOP)
        yield
        self.server.popen.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)) == 4096:
                pass
        yield
        filler.unlink()

    @contextlib.contextmanager
    def _stepped(self) -> Iterator[None]:
        self.clock.step(self._draw.choice(STEPS_S))
        yield
        self.clock.step(self._draw.choice((0, *STEPS_S)))

    @contextlib.contextmanager
    def _squeezed(self) -> Iterator[None]:
        self.clients.excused = True  # it may be more than the server can bear
        self.memory.squeeze(self._draw.choice((1 << 20, 8 << 20, 64 << 20)))
        yield
        self.memory.release()
        time.sleep(0.5)
        if self.server.popen.poll() is not None and not self._shot:
            self.faults["killed for want of memory"] += 1


def test_faults_under_load(right: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with contextlib.ExitStack() as stack:
        if (
            os.geteuid() == 0
            and not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", disk]).returncode
        ):
            stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        clock, memory = Clock(tmp_path, monkeypatch), MemoryGroup("moetool-soak")
        stack.callback(memory.close)
        clients = Clients(right)
        stack.callback(clients.close)
        injection = FaultInjection(disk, clients, clock, memory, stack)
        names = sorted(injection.kinds())
        if absent := {"full disk", "clock step", "memory pressure"} - set(names):
            print(f"\nnot possible here: {', '.join(sorted(absent))}")
        if clock.usable:
            _steps_are_seen(injection)
        clients.answers_come(20)
        draw = random.Random(0)
        until, singles = time.monotonic() + 60 * MINUTES, list(names)
        while time.monotonic() < until or singles:  # each alone at least once
            injection.inject([singles.pop()] if singles else draw.sample(names, draw.choice((1, 2, 2))))
            assert not clients.wrong, clients.wrong
        clients.answers_come(20)
        injection.stop()
        clients.close()
        print(f"\n{MINUTES:g} minutes: faults survived {dict(injection.faults)}; requests {dict(clients.outcomes)}")
        print(f"{injection.logs} logs of killed or closed servers, {injection.rows:,} rows, all replayed exactly")
    assert not clients.wrong
    assert clients.outcomes["right"] > 50


def _steps_are_seen(injection: FaultInjection) -> None:
    """Lest the fault be none: the server's own clock shows in its answers."""
    injection.clock.step(86400)
    _, answer = post(injection.server.url, "/v1/completions", _body(PROMPTS[0]))
    assert answer["created"] - time.time() > 80000, answer
    injection.clock.step(0)
