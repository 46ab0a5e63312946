"""An engine leaves nothing behind, however often one is opened and closed, and wherever opening fails."""

import contextlib
import ctypes
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from moetool.base.errors import CapacityError, MoetoolError
from moetool.cluster.frames import LinkError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime import assembly
from moetool.runtime.assembly import build_engine, open_pooled
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests.identities import identity
from tests.refusals import refused
from tests.servers import eventually

CYCLES = int(os.environ.get("MOETOOL_LIFETIME_CYCLES", "24"))
OPTIONS = ServeOptions(kv_tokens=512)


def descriptors() -> list[str]:
    """Open files of this process."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            found.append(str(entry.readlink()))
    return sorted(found)


def run_once(engine: Engine, prompt: list[int]) -> None:
    outputs: list[Output] = []
    engine.start()
    done = threading.Event()

    def sink(output: Output) -> None:
        outputs.append(output)
        if output.finish is not None:
            done.set()

    engine.submit(prompt, SamplingParams(max_tokens=2), sink)
    assert done.wait(60) and outputs[-1].finish == "length"


def test_engines_that_come_and_go_leave_no_descriptor_thread_or_memory(tokenizer: Any) -> None:
    prompt = tokenizer("The king said")["input_ids"]
    process, used = psutil.Process(), []
    warm = max(4, CYCLES // 5)
    before: tuple[list[str], int] = ([], 0)
    for cycle in range(CYCLES):
        if cycle == 1:  # the first loads libraries, which keep what they like
            before = descriptors(), threading.active_count()
        engine = build_engine(
            Checkpoint.open("reference"), options=OPTIONS, policy="lru", device_memory_bytes=20_000_000
        )
        run_once(engine, prompt)
        engine.close()
        if cycle >= warm:
            # Free memory in pieces, of which a process that ran many other tests has much, is no leak.
            del engine
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            used.append(process.memory_info().rss)
    gc.collect()
    assert (descriptors(), threading.active_count()) == before
    slope = float(np.polyfit(np.arange(len(used)), used, 1)[0])
    print(f"\n{CYCLES} engines: resident memory {used[-1] / 1e6:.1f} MB, rising by {slope / 1e3:.1f} kB an engine")
    assert slope < 2_000_000  # the model has 60 MB and its pool 14


def test_one_checkpoint_serves_many_engines(tokenizer: Any) -> None:
    checkpoint = Checkpoint.open("reference")
    before = descriptors()
    for _ in range(3):
        engine = build_engine(checkpoint, options=OPTIONS, policy="lru", device_memory_bytes=20_000_000)
        engine.close()
    assert descriptors() == before


def _no_runtime(*args: Any) -> ExpertRuntime:
    raise MoetoolError("no runtime")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"device_memory_bytes": 100_000}, "too small"),
        ({"policy": "finemoe", "options": ServeOptions(kv_tokens=512, policy={"distance": -1})}, "distance"),
        ({"options": ServeOptions(kv_tokens=512, host_memory_bytes=1, devices=1)}, None),
        ({"open_runtime": _no_runtime}, "no runtime"),
        ({"log": Path("/proc/no/log")}, "/proc/no"),
    ],
    ids=["memory", "policy", "host memory", "runtime", "log"],
)
def test_what_fails_half_way_leaves_nothing(arguments: dict[str, Any], reason: str | None) -> None:
    Checkpoint.open("reference").spec  # noqa: B018 - loads libraries
    before = descriptors(), threading.active_count()
    given = {"options": OPTIONS, "policy": "lru", "device_memory_bytes": 20_000_000, **arguments}
    try:
        build_engine(Checkpoint.open("reference"), **given).close()
    except (MoetoolError, OSError) as error:
        assert reason is not None and reason in str(error)
    else:
        assert reason is None
    assert (descriptors(), threading.active_count()) == before


@pytest.mark.parametrize("name", ["divide_memory", "open_store"])
def test_a_pooled_model_that_fails_half_way_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fail(*args: Any, **more: Any) -> None:
        raise CapacityError("does not fit")

    before = descriptors()
    monkeypatch.setattr(assembly, name, fail)
    with refused(CapacityError, "fit"):
        open_pooled(Checkpoint.open("reference"), torch.float32, device_memory_bytes=30_000_000)
    assert descriptors() == before


@pytest.mark.parametrize(
    "at", ["ExpertBuffers", "RankExperts", "open_batcher", "ExpertTransfer", "Lockstep", "connect"]
)
def test_a_rank_that_cannot_be_built_leaves_nothing(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    from moetool.cluster.parallel import rank

    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), wait_for_workers=False)
    given: dict[str, Any] = {"gpu": 0, "model": "reference", "server_G": [0], "identity": identity("rank-0")}
    options = rank.RankOptions(dtype="float32", kv_tokens=512)
    given |= {"head": ("127.0.0.1", 1), "store": ("127.0.0.1", store.port), "options": options}
    with contextlib.suppress(LinkError):  # port 1 takes nobody; the first time loads libraries
        rank.Rank(**given)
    gc.collect()
    before = descriptors(), threading.active_count()

    def fail(*args: Any, **more: Any) -> None:
        raise MoetoolError("not today")

    monkeypatch.setattr(rank, at, fail)
    with contextlib.suppress(MoetoolError):
        rank.Rank(**given)
        pytest.fail("it was built")
    gc.collect()
    # The store's own end of the connection closes a little later.
    eventually(lambda: not Counter(descriptors()) - Counter(before[0]) and threading.active_count() <= before[1])


@pytest.mark.parametrize("at", ["load_lazy", "Layerwise"])
def test_a_judgement_that_cannot_begin_leaves_nothing(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from moetool.training.quantize import judging

    real, calls = getattr(judging, at), []

    def fail_second(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise MoetoolError("damaged")
        return real(*args)

    before = descriptors()
    monkeypatch.setattr(judging, at, fail_second)
    with refused(MoetoolError, "damaged"):
        judging.judge(Checkpoint.open("reference"), Checkpoint.open("reference"), torch.zeros(1, 4), torch.float32)
    assert len(calls) == 2 and descriptors() == before


@pytest.mark.parametrize("at", ["_fill", "moe_layers"])
def test_a_model_that_cannot_be_loaded_leaves_nothing(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetool.models import loading

    real: Callable[..., Any] = getattr(loading, at)

    def fail(*args: Any) -> None:
        real(*args)
        raise MoetoolError("damaged")

    before = descriptors()
    monkeypatch.setattr(loading, at, fail)
    with refused(MoetoolError, "damaged"):
        build_engine(Checkpoint.open("reference"), options=OPTIONS)
    assert descriptors() == before
