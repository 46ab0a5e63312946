"""The expert pool: slots of memory, filled from disk by I/O threads that only read and copy.

`Residency` decides; the store executes. A load is started and not waited for; `ready` waits for it just before
the expert is computed. What arrives when changes the seconds lost and nothing else.
"""

import heapq
import itertools
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moetool.errors import MoetoolError
from moetool.models.expert_files import ExpertFiles

_ALIGNMENT = 64


@dataclass(slots=True)
class StoreStats:
    """What the store did since it began.

    Attributes:
        reads: experts read.
        bytes_read: their bytes.
        prefetch_bytes: bytes among them that a prefetch asked for.
        late: prefetched experts that were waited for.
        retried: reads that were tried again after an error.
        stall_seconds: time the model's thread waited for bytes.
    """

    reads: int = 0
    bytes_read: int = 0
    prefetch_bytes: int = 0
    late: int = 0
    retried: int = 0
    stall_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The counters by name."""
        return asdict(self)


class _Job:
    """One load of an expert into a slot."""

    __slots__ = ("after", "claimed", "done", "error", "key", "prefetch", "slot")

    def __init__(self, key: int, slot: int, prefetch: bool, after: "_Job | None") -> None:
        self.key = key
        self.slot = slot
        self.prefetch = prefetch
        self.after = after  # the slot's earlier load, while it may still be writing
        self.claimed = False
        self.done = threading.Event()
        self.error: OSError | None = None


class ExpertStore:
    """A fixed pool of expert slots over the expert files.

    `load`, `ready` and `close` belong to the model's thread.

    Args:
        num_slots: slots of the pool.
        num_threads: I/O threads.

    Effects: allocates the pool (`pool_bytes`) at once; starts the threads; `close` ends them.
    """

    def __init__(self, files: ExpertFiles, num_slots: int, num_threads: int = 2) -> None:
        self.files = files
        self.num_slots = num_slots
        self.stats = StoreStats()
        stride = -(-files.slot_bytes // _ALIGNMENT) * _ALIGNMENT
        pool = torch.empty(num_slots * stride + _ALIGNMENT, dtype=torch.uint8)
        start = -pool.data_ptr() % _ALIGNMENT  # every slot equally aligned: kernels may add in another order if not
        self.pool_bytes = num_slots * stride
        self._slots = [pool[start + i * stride : start + i * stride + files.slot_bytes] for i in range(num_slots)]
        self._views = [files.views(slot) for slot in self._slots]
        self._jobs: list[_Job | None] = [None] * num_slots
        self._queue: list[tuple[bool, int, _Job]] = []
        self._order = itertools.count()
        self._lock = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-io-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def load(self, key: int, slot: int, prefetch: bool) -> None:
        """Start to read expert `key` into `slot`, ahead of every prefetch unless it is one.

        The slot's former expert must have been computed, or not be needed.
        """
        with self._lock:
            before = self._jobs[slot]
            if before is not None and not before.claimed:
                before.claimed = True  # never begun, and nobody needs it now
                before = before.after
            job = self._jobs[slot] = _Job(key, slot, prefetch, before)
            heapq.heappush(self._queue, (prefetch, next(self._order), job))
            self._lock.notify()

    def ready(self, key: int, slot: int) -> tuple[torch.Tensor, ...]:
        """Wait until `slot` holds the expert `key`; gives its weights (`ExpertFiles.views`).

        A read that failed is tried once more. A slot that does not hold what the program says (because an earlier
        forward was broken off) is read again: a wrong weight is never handed out.

        Raises:
            MoetoolError: the expert could not be read twice.
        """
        job = self._jobs[slot]
        if job is None or job.key != key:
            self.load(key, slot, prefetch=False)
            job = self._jobs[slot]
            assert job is not None
        if not job.done.is_set():
            began = time.perf_counter()
            if job.prefetch:
                self.stats.late += 1
            self._finish(job)
            self.stats.stall_seconds += time.perf_counter() - began
        if job.error is not None:
            self.stats.retried += 1
            self.load(key, slot, prefetch=False)
            job = self._jobs[slot]
            assert job is not None
            self._finish(job)
            if job.error is not None:
                self._jobs[slot] = None
                layer, expert = self.files.spec.expert_of(key)
                absolute = self.files.spec.layer_ids_L[layer]
                raise MoetoolError(f"cannot read expert {expert} of layer {absolute}: {job.error}") from job.error
        return self._views[slot]

    def close(self) -> None:
        """Drop what is queued and end the threads."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    def _finish(self, job: _Job) -> None:
        """Do the job here if no thread has begun it, else wait for the one that has."""
        with self._lock:
            mine = not job.claimed
            job.claimed = True
        if mine:
            self._run(job)
        else:
            job.done.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                job = heapq.heappop(self._queue)[2]
                if job.claimed:
                    continue
                job.claimed = True
            self._run(job)

    def _run(self, job: _Job) -> None:
        if job.after is not None:
            job.after.done.wait()
            job.after = None
        try:
            num_bytes = self.files.read_into(job.key, self._slots[job.slot])
            with self._lock:
                self.stats.reads += 1
                self.stats.bytes_read += num_bytes
                if job.prefetch:
                    self.stats.prefetch_bytes += num_bytes
        except OSError as error:
            job.error = error
        finally:
            job.done.set()
