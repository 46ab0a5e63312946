"""Calls to CUDA and their order, on a stand-in that records its few primitives."""

import contextlib
import gc
from typing import Any

import pytest
import torch

from moetool.base.errors import CapacityError, UsageError
from moetool.models.loading import parse_device, parse_devices
from moetool.runtime.experts.copies import ALIGNMENT, CpuCopies, CudaCopies, open_copies, slot_views, stride_of
from tests.refusals import refused

GPU = torch.device("cuda", 0)


class _Cuda:
    """Streams and events that only log; an event is passed once `run` was called after it was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, ...]] = []
        self.events: list[Any] = []
        self.refuse = 0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.name, self.timed, self.done = f"event{len(cuda.events)}", enable_timing, False
                cuda.events.append(self)

            def record(self, stream: Any) -> None:
                cuda.log.append((stream.name, "record", self.name))

            def query(self) -> bool:
                return self.done

            def synchronize(self) -> None:
                cuda.log.append(("host", "wait", self.name))

            def elapsed_time(self, end: Any) -> float:
                assert self.timed and end.timed
                return 250.0

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                cuda.log.append((self.name, "wait", event.name))

            def record_event(self) -> Event:
                event = Event()
                event.record(self)
                return event

            def synchronize(self) -> None:
                cuda.log.append(("host", "wait", self.name))

        compute = Stream("compute")

        class Cudart:
            def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:
                cuda.log.append(("register", str(num_bytes)))
                return cuda.refuse

            def cudaHostUnregister(self, pointer: int) -> int:
                cuda.log.append(("unregister",))
                return 0

        for name, stand_in in {
            "Event": Event,
            "Stream": lambda device: Stream("copies"),
            "current_stream": lambda device: compute,
            "stream": lambda stream: contextlib.nullcontext(),
            "device": lambda device: contextlib.nullcontext(),
            "cudart": Cudart,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr("moetool.runtime.experts.copies.clear_error", lambda device: cuda.log.append(("clear",)))

    def run(self) -> None:
        for event in self.events:
            event.done = True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> _Cuda:
    return _Cuda(monkeypatch)


def test_a_copy_comes_after_the_computing_and_the_computing_after_the_copy(cuda: _Cuda) -> None:
    copies = CudaCopies(GPU)
    source, target = torch.ones(4), torch.zeros(4)
    freed = copies.mark()
    copied = copies.copy(source, target, after=freed)
    copies.wait(copied, "host")
    assert cuda.log == [
        ("compute", "record", "event0"),
        ("copies", "wait", "event0"),
        ("copies", "record", "event1"),
        ("compute", "record", "event2"),
        ("compute", "wait", "event1"),
        ("compute", "record", "event3"),
    ]
    assert torch.equal(source, target)
    assert (copies.passed(copied), copies.stalled("host")) == (False, 0.0)
    cuda.run()
    assert copies.passed(copied)
    assert (copies.stalled("host"), copies.stalled("disk")) == (0.25, 0.0)
    assert copies.stalled("host") == 0.25  # counted once
    cuda.log.clear()
    copies.wait(copied, "host")
    assert cuda.log == []  # nothing to wait for
    copies.finish(copied)
    assert cuda.log == [("host", "wait", "event1")]


@pytest.mark.follows("moetool.runtime.experts.copies CudaCopies.host_memory")
def test_host_memory_is_registered_and_given_back(cuda: _Cuda) -> None:
    copies = CudaCopies(GPU)
    memory = copies.host_memory(5000)
    assert (memory.numel(), memory.data_ptr() % ALIGNMENT) == (5000, 0)
    copies.close()
    assert cuda.log == [("register", "8192"), ("host", "wait", "copies"), ("unregister",)]  # whole pages
    copies = CudaCopies(GPU)
    copies.host_memory(5000)
    with refused(CapacityError, "5,000", "CUDA error 2"):
        cuda.refuse = 2
        copies.host_memory(5000)
    assert cuda.log[-1] == ("clear",)
    smaller = CudaCopies(GPU)
    cuda.refuse = 0
    smaller.host_memory(4000)
    smaller.close()
    cuda.log.clear()
    del copies
    gc.collect()
    assert cuda.log == [("host", "wait", "copies"), ("unregister",)]  # without `close` too


@pytest.mark.follows("moetool.runtime.experts.copies _allocate")
def test_memory_that_is_not_there_is_refused() -> None:
    with refused(CapacityError, "cpu", "smaller --device-memory"):
        CpuCopies().device_memory(1 << 60)
    assert CpuCopies().device_memory(1 << 10).numel() == 1 << 10
    assert isinstance(open_copies(torch.device("cpu")), CpuCopies)


def test_slots_are_cut_at_equal_distances() -> None:
    assert [stride_of(n) for n in (1, 256, 257)] == [256, 256, 512]
    slots = slot_views(CpuCopies().device_memory(3 * 512), 3, 300)
    assert [slot.data_ptr() - slots[0].data_ptr() for slot in slots] == [0, 512, 1024]
    assert {slot.numel() for slot in slots} == {300}


@pytest.mark.follows("moetool.models.loading parse_devices")
def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert parse_device("cuda") == torch.device("cuda", 0)
    assert [parse_device("cuda", first).index for first in (1, 2)] == [1, 0]
    assert parse_device("cpu") == torch.device("cpu")
    with refused(UsageError, "unknown", "device"):
        parse_device("cuda:1")
    with refused(UsageError, "2 GPUs", "fewer devices"):
        parse_devices("cuda", 3)
    assert [device.index for device in parse_devices("cuda", 2)] == [0, 1]
