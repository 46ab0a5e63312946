"""`serve` splits misses between link and host, on a stand-in of a GPU: the texts without, and decisions that repeat."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moetool.base.config import parse
from moetool.base.errors import MismatchError, UsageError
from moetool.caching.machine_split import SplitCosts
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.expert_form import ExpertForm
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.split_guard import SplitGuard
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.trace.reader import MANIFEST, Trace
from moetool.tuning.replay import replay_served
from tests.engines import Answered
from tests.refusals import refused
from tests.streams import SlowLink

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 ="]
COSTS = SplitCosts(load_s=1e-3, host_s=1e-3, host_knots=((8.0, 2e-3),), device_s=1e-5, link_share=0.9, host_share=0.8)
SLOTS = 40


def _engine(
    policy: str, host_compute: str, log: Path | None = None, *, by_value: bool = False, **settings: Any
) -> Engine:
    checkpoint = Checkpoint.open("reference")
    settings["policy"] = {"admit": "value"} if by_value else {}
    options = ServeOptions(kv_tokens=1024, threads=1, log_segment_s=1e-3, host_compute=host_compute, **settings)
    budget = divide_with_slots(checkpoint, options, SLOTS)
    made = build_engine(checkpoint, options=options, policy=policy, device_memory_bytes=budget, log=log)
    made.state = "ready"
    return made


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of a GPU, with known costs."""
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", SlowLink)
    monkeypatch.setattr("moetool.runtime.assembly.split_costs", lambda *parts: COSTS)


@pytest.mark.parametrize("policy", ["lru", "foresight"])
@pytest.mark.parametrize("clients", [1, 4])
def test_the_texts_are_those_without_and_the_decisions_repeat(
    policy: str, clients: int, device: None, tmp_path: Path
) -> None:
    without = Answered.by(_engine(policy, "off"), PROMPTS[:clients], 8)
    made = _engine(policy, "on", tmp_path / "log")
    stats = made.stats()["host_compute"]
    assert (stats["active"], stats["ended"], stats["digest"]) == (True, False, COSTS.digest)
    metrics = without.require_same(made, atol=1e-3)
    assert metrics["hosted"] > 20 and metrics["misses"] > 20
    trace = Trace(tmp_path / "log")
    row = replay_served(trace)
    assert row.counts.hosted == metrics["hosted"]
    manifest = json.loads((trace.path / MANIFEST).read_text(encoding="utf-8"))
    manifest["provenance"]["host_compute"]["costs"]["load_s"] *= 2
    (trace.path / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    with refused(MismatchError, "host_compute", COSTS.digest):
        replay_served(Trace(trace.path))


@pytest.mark.parametrize("policy", ["lru", "foresight"])
def test_experts_on_disk_are_read_once_for_either_side(policy: str, device: None, tmp_path: Path) -> None:
    without = Answered.by(_engine(policy, "off"), PROMPTS[:1], 8)
    made = _engine(policy, "on", tmp_path / "log", host_memory_bytes=20 * 73_728)
    assert made.split is not None and made.split.host_experts == 20 < made.spec.total_experts
    filled = made.store.stats.reads
    metrics = without.require_same(made, atol=1e-3)
    assert metrics["hosted"] > 10 and metrics["misses"] > 10
    stats, counts = made.store.stats, made.residency.counts
    assert stats.bytes_read > 20 * 73_728  # more than host memory holds
    assert stats.reads - filled + stats.host_hits <= counts.missed + counts.hosted + counts.prefetch_loads
    assert replay_served(Trace(tmp_path / "log")).counts.hosted == metrics["hosted"]


_SERVER = """
import sys
from moetool.base import durable
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.experts import copies
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests.streams import SlowLink

copies.CpuCopies = SlowLink
if sys.argv[1] == "calibrating":
    write = durable.write_text

    def write_text(path, text):
        print("calibrating", flush=True)
        while True:
            write(path, text)

    durable.write_text = write_text
checkpoint = Checkpoint.open("reference")
options = ServeOptions(kv_tokens=1024, threads=1, host_compute="on")
budget = divide_with_slots(checkpoint, options, 40)
made = build_engine(checkpoint, options=options, policy="lru", device_memory_bytes=budget)
made.state = "ready"
params = SamplingParams(max_tokens=900, ignore_eos=True)
made.submit(made.tokenizer("def add(a, b):")["input_ids"], params, lambda output: print("serving", flush=True))
while not made.idle:
    made.step()
"""


@pytest.mark.parametrize("when", ["calibrating", "serving"])
def test_a_killed_server_leaves_whole_costs_or_none(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    killed = subprocess.Popen([sys.executable, "-c", _SERVER, when], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    with killed:
        assert killed.stdout.readline() == f"{when}\n"
        time.sleep(0.05)  # into the writes, or into the request
        killed.kill()
    assert killed.returncode == -signal.SIGKILL
    files = list((tmp_path / "moetool").glob("*.costs.json"))
    costs = [parse(SplitCosts, json.loads(file.read_text(encoding="utf-8"))["costs"], "costs") for file in files]
    assert costs or when == "calibrating"
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", SlowLink)
    made = _engine("lru", "on")
    assert made.split is not None and (not costs or made.split.costs == costs[0])
    Answered.by(made, PROMPTS[:1], 4)
    assert not caplog.records  # no file was measured again


def test_a_slower_split_ends_between_requests(
    device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compute_each = ExpertForm.compute_each

    def slowly(self: ExpertForm, *arguments: Any) -> Any:
        time.sleep(0.02)  # the costs do not know of it
        return compute_each(self, *arguments)

    monkeypatch.setattr(ExpertForm, "compute_each", slowly)  # the host alone calls it
    made = _engine("lru", "auto", tmp_path / "log")
    assert made.split is not None
    made.split_misses(made.split, guard := SplitGuard(window=3))
    for prompt in [*PROMPTS, *PROMPTS[:2]]:
        made.submit(made.tokenizer(prompt)["input_ids"], SamplingParams(max_tokens=5), lambda output: None)
        while not made.idle:
            made.step()
    assert guard.ended and guard.ratio is not None and guard.ratio > 1.03
    stats = made.stats()["host_compute"]
    assert (stats["active"], stats["ended"], stats["step_ratio"]) == (False, True, guard.ratio)
    assert "computes no further misses" in caplog.text
    hosted = made.residency.counts.hosted
    unfinished = Trace(tmp_path / "log")  # as after a kill
    assert replay_served(unfinished).counts.hosted <= hosted
    made.close()
    trace = Trace(tmp_path / "log")
    assert replay_served(trace).counts.hosted == hosted
    changes = dict(trace.manifest["provenance"]["splits"])
    assert list(changes.values()) == [0, 1, 0]
    begins = {info.recorded_id for info, rows in trace.forward_rows(sequential=False) if not rows.iteration_T.any()}
    assert changes.keys() <= begins


def test_where_it_is_impossible_it_is_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(UsageError, "host_compute=on", "no GPU"):
        _engine("lru", "on")
    with refused(UsageError, "host_compute", "maybe"):
        ServeOptions(host_compute="maybe")
    made = _engine("lru", "auto")
    assert made.stats()["host_compute"] is None
    made.close()
    monkeypatch.setattr("moetool.runtime.experts.copies.CpuCopies", SlowLink)
    for policy, settings, why in (
        ("lru", {"deterministic": True}, "deterministic"),
        ("static_split", {}, "policy"),
        ("lru", {"devices": 2}, "2 devices"),
    ):
        with refused(UsageError, "host_compute=on", why):
            _engine(policy, "on", **settings)
    with refused(UsageError, "admit=value"):
        _engine("lru", "off", by_value=True)
