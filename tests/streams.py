"""A simulated GPU: two queues that run in random order, as long as each keeps its order and waits for its events."""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Mark:
    """A point in a queue."""

    def __init__(self) -> None:
        self.passed = False


class Streams:
    """`moetool.runtime.experts.copies.Copies` over CPU memory.

    Operations run only when `advance` or `finish` is called; then the queues of copies and of compute alternate at
    random. A missing dependency therefore makes an operation read another expert's bytes. Reads into host memory run at
    once, as on a machine with a GPU.
    """

    device = torch.device("cpu")
    staged = True

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)
        self._lock = threading.RLock()
        self._queues: dict[str, deque[tuple[Any, Callable[[], None]]]] = {"copy": deque(), "compute": deque()}
        self.waits = 0
        self.finishes = 0

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    host_memory = device_memory

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        mark = Mark()

        def run() -> None:
            target.copy_(source)
            mark.passed = True

        with self._lock:
            self._queues["copy"].append((after, run))
        return mark

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]) -> Any:
        return [self.copy(*pair) for pair in pairs][-1]

    def mark(self) -> Any:
        mark = Mark()

        def run() -> None:
            mark.passed = True

        self.compute(run)
        return mark

    def compute(self, work: Callable[[], None]) -> None:
        """Queue a computation."""
        with self._lock:
            self._queues["compute"].append((None, work))

    def wait(self, mark: Any, tier: str) -> None:
        self.waits += 1
        with self._lock:
            self._queues["compute"].append((mark, lambda: None))

    def passed(self, mark: Any) -> bool:
        return mark is None or mark.passed

    def finish(self, mark: Any) -> None:
        self.finishes += 1
        deadline = time.monotonic() + 10
        while not self.passed(mark):
            self.advance(1)
            assert time.monotonic() < deadline, "the queues wait for each other"

    def stalled(self, tier: str) -> float:
        return 0.0

    def close(self) -> None:
        self.drain()

    def advance(self, operations: int) -> None:
        """Run up to this many operations, as far as events allow."""
        with self._lock:
            for _ in range(operations):
                ready = [q for q in self._queues.values() if q and self.passed(q[0][0])]
                if not ready:
                    return
                self._draw.choice(ready).popleft()[1]()

    def drain(self) -> None:
        """Run all operations."""
        deadline = time.monotonic() + 10
        while any(self._queues.values()):
            self.advance(1)
            assert time.monotonic() < deadline, "the queues wait for each other"


class Eager(Streams):
    """Copies run when they are waited for, and no sooner; computations run at once."""

    def wait(self, mark: Any, tier: str) -> None:
        self.finish(mark)

    def mark(self) -> Any:
        return None


class SlowLink:
    """A device whose memory is a second buffer on the CPU, filled over a link of `bytes_s` in the order of the calls.

    The calling thread is the device, and its computations are done when they return.
    """

    device = torch.device("cpu")
    staged = True
    bytes_s = 1e9

    def __init__(self) -> None:
        self._copies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    host_memory = device_memory

    def copy(self, source: torch.Tensor, target: torch.Tensor, after: Any) -> Any:
        return self.copy_all([(source, target, after)])

    def copy_all(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor, Any]]) -> Any:
        copied = threading.Event()
        self._copies.put((pairs, copied))
        return copied

    def mark(self) -> Any:
        return None

    def wait(self, mark: Any, tier: str) -> None:
        self.finish(mark)

    def passed(self, mark: Any) -> bool:
        return mark is None or mark.is_set()

    def finish(self, mark: Any) -> None:
        if mark is not None:
            mark.wait()

    def stalled(self, tier: str) -> float:
        return 0.0

    def close(self) -> None:
        self._copies.put(None)
        self._thread.join()

    def _run(self) -> None:
        ends = 0.0
        while (job := self._copies.get()) is not None:
            pairs, copied = job
            ends = max(ends, time.perf_counter()) + sum(source.numel() for source, _, _ in pairs) / self.bytes_s
            for source, target, _ in pairs:
                target.copy_(source)
            time.sleep(max(0.0, ends - time.perf_counter()))
            copied.set()
