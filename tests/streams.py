"""A made-up GPU: two queues that run whenever they like, as long as each keeps its order and waits for its marks."""

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
    """`moetool.runtime.copies.Copies` over memory of the CPU.

    Nothing that is asked for happens before `advance` is called or somebody waits with `finish`; then the queues of
    copies and of computing take turns at random. So an operation that the store forgot to order finds the bytes of
    another expert. Reading a file into host memory happens at once, as it does beside a GPU.
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
        """Ask for some computing."""
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
        """Let so many operations happen, as far as they may."""
        with self._lock:
            for _ in range(operations):
                ready = [q for q in self._queues.values() if q and self.passed(q[0][0])]
                if not ready:
                    return
                self._draw.choice(ready).popleft()[1]()

    def drain(self) -> None:
        """Let everything happen."""
        deadline = time.monotonic() + 10
        while any(self._queues.values()):
            self.advance(1)
            assert time.monotonic() < deadline, "the queues wait for each other"
