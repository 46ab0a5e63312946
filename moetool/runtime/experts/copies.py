"""Device and host memory, and copies between them that overlap computation.

A *mark* is a point in the device's work. `copy` returns a mark that is passed when its bytes have arrived; `mark`
returns one that is passed when all computation queued so far is done; None is always passed. Only `finish` blocks a
thread: everything else orders the device's queues, so that the model's thread runs ahead of them.
"""

import contextlib
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from moetool.base.errors import CapacityError, first_line
from moetool.kernels.cpu.huge_pages import ask_for_huge_pages

ALIGNMENT = 256
"""Alignment of every expert in memory: the choice of kernel, and so the summation order, depends on it."""
_COPIES = 8


class Copies(Protocol):
    """Device copies for the store. Every method except `mark` and `wait` may be called from any thread.

    Attributes:
        device: the slots' device.
        staged: whether slots can only be filled by a copy from host memory, not by reading a file into them.
    """

    device: torch.device
    staged: bool

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory for slots, uint8. Raises: CapacityError if the device lacks it."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory to copy from, uint8; pinned beside a GPU. Raises: CapacityError."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        """Copy from host to device memory once `after` is passed; returns the mark of its end."""

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]) -> Any:
        """Like `copy`, for several (source, target, after); returns the mark of the last one's end."""

    def mark(self) -> Any:
        """Return the mark of the end of all computation that the calling thread has queued."""

    def wait(self, mark: Any, tier: str) -> None:
        """Order later computations of the calling thread after `mark`.

        Args:
            tier: tier charged with the device's waiting time: `disk` or `host`.
        """

    def passed(self, mark: Any) -> bool:
        """Whether a mark is passed."""

    def finish(self, mark: Any) -> None:
        """Block the calling thread until `mark` is passed, with the GIL released."""

    def stalled(self, tier: str) -> float:
        """Seconds of completed device waits in `wait`."""

    def close(self) -> None:
        """Finish all copies and free the host memory. Call once."""


def open_copies(device: torch.device) -> Copies:
    """Return the `Copies` of a device."""
    return CudaCopies(device) if device.type == "cuda" else CpuCopies()


def is_staged(device: torch.device) -> bool:
    """Whether a device's slots can only be filled from host memory (`Copies.staged`)."""
    return CudaCopies.staged if device.type == "cuda" else CpuCopies.staged


def copy_seconds(device: torch.device, num_bytes: int) -> float:
    """Return the seconds of a copy from host memory (pinned for a GPU) to the device: the fastest of several."""
    copies = open_copies(device)
    try:
        source, target = copies.host_memory(num_bytes), copies.device_memory(num_bytes)
        best = float("inf")
        for _ in range(_COPIES):
            began = time.perf_counter()
            copies.finish(copies.copy(source, target, None))
            best = min(best, time.perf_counter() - began)
        return best
    finally:
        copies.close()


class CpuCopies:
    """The CPU as its own device: a copy is done when the call returns, so every mark is passed."""

    device = torch.device("cpu")
    staged = False

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return _allocate(num_bytes, self.device)

    host_memory = device_memory

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        target.copy_(source)

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]) -> Any:
        for source, target, _ in pairs:
            target.copy_(source)

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any, tier: str) -> None: ...

    def passed(self, mark: Any) -> bool:
        return True

    def finish(self, mark: Any) -> None: ...

    def stalled(self, tier: str) -> float:
        return 0.0

    def close(self) -> None: ...


class CudaCopies:
    """A GPU: copies have a stream of their own, marks are CUDA events.

    Host memory is allocated in pages and registered with the driver afterwards, because torch rounds pinned memory up
    to powers of two: a budget of 100 GB would take 128. The driver registers whole pages, and each page once.
    """

    staged = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._registered: list[torch.Tensor] = []
        # Also without `close`: freed memory that stays registered makes later registrations of its pages fail.
        self._give_back = weakref.finalize(self, _unregister, self._stream, self._registered)
        self._give_back.atexit = False
        self._lock = threading.Lock()
        self._stalls: dict[str, deque[tuple[Any, Any]]] = {"disk": deque(), "host": deque()}
        self._stalled = {"disk": 0.0, "host": 0.0}
        self._waited: tuple[Any, Any] = (None, None)

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        memory = _allocate(num_bytes, self.device)
        # The calling thread's stream writes the zeros: no copy and no other stream may run before.
        torch.cuda.current_stream(self.device).synchronize()
        return memory

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        memory = _allocate(-(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, torch.device("cpu"), mmap.PAGESIZE)
        with torch.cuda.device(self.device):
            error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        if error:
            clear_error(self.device)
            raise CapacityError(
                f"the driver cannot pin {num_bytes:,} bytes of host memory (CUDA error {error}); lower "
                "--host-memory; 'moetool doctor' shows this machine's memory"
            )
        self._registered.append(memory)
        return memory[:num_bytes]

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        return self.copy_all([(source, target, after)])

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]) -> Any:
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for mark in {id(after): after for _, _, after in pairs if after is not None}.values():
                self._stream.wait_event(mark)
            for source, target, _ in pairs:
                target.copy_(source, non_blocking=True)
            copied.record(self._stream)
        return copied

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def wait(self, mark: Any, tier: str) -> None:
        if mark is None or mark.query():
            return
        stream = torch.cuda.current_stream(self.device)
        if self._waited[0] is mark and self._waited[1] == stream:
            return  # copies queued together share a mark
        self._waited = (mark, stream)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record(stream)
        stream.wait_event(mark)
        after.record(stream)
        with self._lock:
            self._stalls[tier].append((before, after))
        self.stalled(tier)

    def passed(self, mark: Any) -> bool:
        return mark is None or bool(mark.query())

    def finish(self, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()

    def stalled(self, tier: str) -> float:
        waits = self._stalls[tier]
        with self._lock:
            while waits and waits[0][1].query():
                before, after = waits.popleft()
                self._stalled[tier] += before.elapsed_time(after) / 1000
            return self._stalled[tier]

    def close(self) -> None:
        self._give_back()


def clear_error(device: torch.device) -> None:
    """Make CUDA forget a reported error, which torch's next launch would raise again."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unregister(stream: torch.cuda.Stream, registered: list[torch.Tensor]) -> None:
    stream.synchronize()
    while registered:
        torch.cuda.cudart().cudaHostUnregister(registered.pop().data_ptr())


def _allocate(num_bytes: int, device: torch.device, alignment: int = ALIGNMENT) -> torch.Tensor:
    """Allocate aligned memory; alignment takes a few extra bytes."""
    try:
        # Zeros touch every page now, so that no load pays for the first touch later.
        memory = torch.empty(num_bytes + alignment, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            ask_for_huge_pages(memory)
        memory.zero_()
    except RuntimeError as error:
        raise CapacityError(
            f"{device} does not have {num_bytes:,} bytes for experts ({first_line(error)}); set a smaller "
            "--device-memory or --host-memory"
        ) from None
    start = -memory.data_ptr() % alignment
    return memory[start : start + num_bytes]


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small CPU tensor to a device asynchronously."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)  # torch keeps the memory until it has been copied


def stride_of(slot_bytes: int) -> int:
    """Bytes from one slot to the next in a pool of aligned slots."""
    return -(-slot_bytes // ALIGNMENT) * ALIGNMENT


def slot_views(memory: torch.Tensor, count: int, num_bytes: int) -> list[torch.Tensor]:
    """Return views of a pool's slots of `num_bytes` each, aligned."""
    stride = stride_of(num_bytes)
    return [memory[i * stride : i * stride + num_bytes] for i in range(count)]
