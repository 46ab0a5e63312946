"""The expert pool: slots of device memory, filled from host memory or disk by I/O threads that only read and copy.

`Residency` decides; the store executes. A load starts without waiting; `ready` waits for it just before the expert is
computed. Arrival order affects stall time only, never results.
"""

import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from moetool.caching.residency import Residency
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.stored_expert import Weight
from moetool.models.loading import LoadedModel
from moetool.runtime.experts.copies import Copies, CpuCopies, open_copies, slot_views, stride_of
from moetool.runtime.experts.cost_meter import CostMeter
from moetool.runtime.experts.host_tier import Buffer
from moetool.runtime.experts.source import ExpertSource, StoreStats
from moetool.runtime.returned_memory import release_pages

_LOG = logging.getLogger(__name__)


class _Job:
    """One load of an expert into a slot."""

    __slots__ = ("after", "claimed", "copied", "done", "error", "freed", "key", "prefetch", "slot", "tier")

    def __init__(self, key: int, slot: int, prefetch: bool, freed: Any) -> None:
        self.key = key
        self.slot = slot
        self.prefetch = prefetch
        self.freed = freed  # mark that the slot's former expert is computed
        self.after: _Job | None = None  # the slot's earlier load, while it may still be writing
        self.claimed = False
        self.done = False  # the slot is filled, or its copy is queued
        self.copied: Any = None  # mark of that copy's end
        self.tier = "disk"  # source of the expert
        self.error: BaseException | None = None


class ExpertStore:
    """A fixed pool of expert slots over host memory and the expert files.

    `load`, `ready`, `computed`, `put`, `bytes_of` and `close` belong to the model's thread, or to a thread that holds
    the lock that excludes it (`moetool.cluster.edge.placed_experts`).

    Args:
        num_slots: slots of the pool.
        num_threads: I/O threads.
        host_memory_bytes: for the host tier (`HostTier`). A device that only copies can fill needs a buffer per reading
            thread, and so does computing on the host. None: only these buffers; none on a CPU that computes from slots
            alone.
        hosts: whether `host` will be called.
        copies: the device; the CPU by default.

    Attributes:
        meter: receives load times, if set.
        on_replaced: called with a slot when its expert is about to be replaced or has been lost.
        pool_bytes: bytes of the slots.
        host_pool_bytes: bytes of the host tier, at most `host_memory_bytes` if set.

    Effects: allocates slots and host tier, and starts the threads; `close` ends them.

    Raises:
        CapacityError: `host_memory_bytes` is less than the tier must have, or there is no such memory.
    """

    def __init__(
        self,
        files: ExpertFiles,
        num_slots: int,
        num_threads: int = 2,
        *,
        host_memory_bytes: int | None = None,
        hosts: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self.files = files
        self.num_slots = num_slots
        self.meter: CostMeter | None = None
        self.on_replaced: Callable[[int], None] = lambda slot: None
        self.copies = CpuCopies() if copies is None else copies
        self._source = ExpertSource(files, self.copies, num_threads, host_memory_bytes, hosts)
        self.host_pool_bytes = self._source.pool_bytes
        self.pool_bytes = num_slots * stride_of(files.slot_bytes)
        self.slots = slot_views(self.copies.device_memory(self.pool_bytes), num_slots, files.slot_bytes)
        self._views = [[files.views(slot, layout) for slot in self.slots] for layout in range(files.num_layouts)]
        self._jobs: list[_Job | None] = [None] * num_slots
        self._freed: list[Any] = [None] * num_slots
        self._queue: list[tuple[bool, int, _Job]] = []
        self._order = itertools.count()
        self._lock = self._source.lock
        self._queued = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._closed = False
        self._ahead: deque[int] = deque()  # experts to read into host memory when idle
        self._threads = [
            threading.Thread(target=self._work, name=f"expert-io-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stores(self) -> tuple["ExpertStore"]:
        """This store alone, as `moetool.runtime.experts.device_stores.Stores` has several."""
        return (self,)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of the slots, as `Stores` has several."""
        return (self.copies.device,)

    def note_hosted(self, seconds: float) -> None:
        """Count the time of products on the host."""
        self._source.stats.hosted_seconds += seconds

    def device_of(self, key: int) -> int:
        """Number of an expert's device."""
        return 0

    @property
    def stats(self) -> StoreStats:
        """Current counters. On a GPU, stalls include the time that its queue waited for copies."""
        stats, host, disk = self._source.stats, self.copies.stalled("host"), self.copies.stalled("disk")
        return replace(
            stats, stall_seconds=stats.stall_seconds + host + disk, host_stall_seconds=stats.host_stall_seconds + host
        )

    def load(self, key: int, slot: int, prefetch: bool) -> None:
        """Start to load expert `key` into `slot`; on-demand loads go ahead of prefetches.

        The slot's former expert must be computed already (`computed`), or not be needed. It stays if `key` has no
        weights.
        """
        if prefetch:
            if self.files.has_weights(key):
                self._enqueue(self._replace(key, slot, prefetch))
        else:
            self.load_together([(key, slot)])

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Let idle threads read experts into host memory, in this order, while it has room.

        If the host memory is full, experts read last are evicted first.
        """
        with self._lock:
            self._ahead.extend(filter(self.files.has_weights, keys))
            self._queued.notify_all()

    def load_together(self, loads: Sequence[tuple[int, int]]) -> None:
        """Load each (key, slot) on demand; experts in host memory share one batch of copies and one mark."""
        held: list[tuple[_Job, Buffer]] = []
        for key, slot in loads:
            if not self.files.has_weights(key):
                continue
            job = self._replace(key, slot, prefetch=False)
            measured = self.meter is not None and self.meter.due()
            at_once = self.copies.staged and job.after is None and not measured
            if at_once and (buffer := self._source.hold(key)) is not None:
                job.claimed = True  # queueing a copy takes no longer than passing it to a thread
                held.append((job, buffer))
            else:
                self._enqueue(job)
        if not held:
            return
        mark, failed = None, None
        try:
            mark = self._source.copy_held([(buffer, self.slots[job.slot], job.freed) for job, buffer in held])
        except Exception as error:
            failed = error  # `ready` tries once more
        with self._lock:
            for job, _ in held:
                job.tier, job.copied, job.error, job.done = "host", mark, failed, True
            self._finished.notify_all()

    def ready(self, key: int, slot: int) -> tuple[Weight, ...]:
        """Return the weights of expert `key` in `slot` (`ExpertFiles.views`); () if it has none.

        Waits until its bytes are read; if they are still being copied, the device's next computation waits. A failed
        read is tried once more. A slot that does not hold the program's expert (no load was requested, or an earlier
        forward was aborted) is loaded at once: a wrong weight is never returned.

        Raises:
            MoetoolError: the expert could not be read twice.
        """
        job = self._jobs[slot]
        if job is not None and job.key == key and job.done and job.copied is None and job.error is None:
            return self._views[self.files.layout_of(key)][slot]
        if not self.files.has_weights(key):
            return ()
        if job is None or job.key != key:
            job = self._replace(key, slot, prefetch=False)
        if job.prefetch and not (job.done and self.copies.passed(job.copied)):
            self._source.stats.late += 1
        if not job.done:
            self._wait_for(job)
        job.prefetch = False
        if job.error is not None:
            self._source.count_retry(key, job.error)
            job = self._replace(key, slot, prefetch=False)
            self._wait_for(job)
            if job.error is not None:
                self._jobs[slot] = None
                self.on_replaced(slot)
                raise self._source.unreadable(key, job.error) from job.error
        if self.copies.passed(job.copied):
            job.copied = None
        else:
            self.copies.wait(job.copied, job.tier)
        return self._views[self.files.layout_of(key)][slot]

    def holds(self, key: int, slot: int) -> bool:
        """Whether the slot holds the complete expert, so that no computation with it waits."""
        if not self.files.has_weights(key):
            return True
        job = self._jobs[slot]
        here = job is not None and job.key == key and job.done and job.error is None
        return here and self.copies.passed(job.copied)  # type: ignore[union-attr]

    def views_of(self, layout: int, slot: int) -> tuple[Weight, ...]:
        """Weights of an expert with this layout in `slot`, whatever the slot holds."""
        return self._views[layout][slot]

    def stacked(self, layer: int) -> tuple[torch.Tensor, ...] | None:
        """Parts of a layer's experts in all slots, [slots, ...]; None if slots hold packed experts."""
        first = self._views[self.files.layout_of(self.files.spec.expert_key(layer, 0))][0]
        stride, stacked = stride_of(self.files.slot_bytes), []
        for part in first:
            if not isinstance(part, torch.Tensor):
                return None
            strides = (stride // part.dtype.itemsize, *part.stride())
            stacked.append(part.as_strided((self.num_slots, *part.shape), strides))
        return tuple(stacked)

    def release(self, slots: Iterable[int]) -> None:
        """Return the memory of slots to the system, on a CPU; they can be filled again at any time.

        Their content is lost. Waits for loads into them that have begun.
        """
        for slot in slots:
            self.on_replaced(slot)
            with self._lock:
                job, self._jobs[slot] = self._jobs[slot], None
                if job is not None:
                    self._source.given_up(job.key)
                if job is not None and not job.claimed:
                    job.claimed = True  # no longer needed
                    job = job.after
            if job is not None:
                self._await(job)
            release_pages(self.slots[slot])

    def computed(self, slots: Iterable[int]) -> None:
        """Allow the experts in `slots` to be replaced after the computation queued so far."""
        mark = self.copies.mark()
        for slot in slots:
            self._freed[slot] = mark

    def put(self, key: int, slot: int, data: torch.Tensor) -> None:
        """Fill `slot` with the bytes of expert `key` from another source (uint8 [slot_bytes], on the CPU).

        Queued computation with the slot's former expert runs first: both use one stream.
        """
        before = self._jobs[slot]
        job = self._replace(key, slot, prefetch=False)
        job.claimed = True
        if job.after is not None:
            self._await(job.after)
            job.after = None
        if before is not None:
            self.copies.finish(before.copied)
        self.slots[slot].copy_(data)
        self._freed[slot] = self.copies.mark()  # a later load comes after this too
        job.done = True

    def bytes_of(self, key: int, slot: int) -> torch.Tensor:
        """Copy expert `key` from `slot` to the CPU; zeros if it has no weights. Raises: see `ready`."""
        if not self.ready(key, slot):
            return torch.zeros_like(self.slots[slot], device="cpu")
        return self.slots[slot].to("cpu", copy=True)

    @contextlib.contextmanager
    def host(self, key: int) -> Iterator[tuple[Weight, ...]]:
        """Weights of an expert in host memory while the context lasts; read from disk if missing.

        For one thread at a time, not necessarily the model's. Needs `hosts`.

        Raises:
            MoetoolError: the expert could not be read twice.
        """
        began = time.perf_counter()
        with self._source.host(key) as (weights, tier):
            if not self.copies.staged:  # otherwise the waiting thread is not the model's
                self._charge(tier, time.perf_counter() - began)
            yield weights

    def host_copy(self, key: int) -> contextlib.AbstractContextManager[tuple[Weight, ...]] | None:
        """Like `host`, for an expert that host memory holds as it is computed; None for any other, without waiting."""
        return self._source.host_copy(key)

    def close(self) -> None:
        """Drop queued loads, end the threads, and finish running copies."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._ahead.clear()
            self._queued.notify_all()
        for thread in self._threads:
            thread.join()
        self.copies.close()

    def _replace(self, key: int, slot: int, prefetch: bool) -> _Job:
        """Replace the slot's job by a new one; a job that has not begun is dropped."""
        self.on_replaced(slot)
        job = _Job(key, slot, prefetch, self._freed[slot])
        with self._lock:
            before = self._jobs[slot]
            if before is not None:
                self._source.given_up(before.key)
                if not before.claimed:
                    before.claimed = True  # no longer needed
                    before = before.after
            if before is not None and not before.done:
                job.after = before
            self._jobs[slot] = job
        return job

    def _enqueue(self, job: _Job) -> None:
        """Let an idle thread run the job."""
        with self._lock:
            heapq.heappush(self._queue, (job.prefetch, next(self._order), job))
            self._queued.notify()

    def _wait_for(self, job: _Job) -> None:
        """Run the job here if no thread has begun it, else wait for that thread."""
        began = time.perf_counter()
        with self._lock:
            mine = not job.claimed
            job.claimed = True
        if mine:
            self._run(job)
        else:
            self._await(job)
        self._charge(job.tier, time.perf_counter() - began)

    def _await(self, job: _Job) -> None:
        with self._finished:
            while not job.done:
                self._finished.wait()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._ahead and not self._closed:
                    self._queued.wait()
                if self._closed:
                    return
                ahead = self._ahead.popleft() if not self._queue else None
            if ahead is not None:
                self._read_ahead(ahead)
                continue
            with self._lock:
                if not self._queue:
                    continue
                prefetch, _, job = heapq.heappop(self._queue)
                if job.claimed:
                    continue
                job.claimed = True
            began = time.perf_counter()
            self._run(job)
            if prefetch or (self.meter is not None and self.copies.staged):
                # Copies share one queue: prefetches from host memory would fill it ahead of demand loads.
                self.copies.finish(job.copied)
                if self.meter is not None and self.copies.staged:
                    self.meter.loaded(time.perf_counter() - began)

    def _read_ahead(self, key: int) -> None:
        try:
            room = self._source.read_ahead(key)
        except Exception as error:
            _LOG.warning("%s; it will be read again when needed", self._source.unreadable(key, error))
            return
        if not room:
            with self._lock:
                self._ahead.clear()

    def _run(self, job: _Job) -> None:
        if job.after is not None:
            self._await(job.after)
            job.after = None
        began = time.perf_counter()
        try:
            job.tier, job.copied = self._source.fill(job.key, self.slots[job.slot], job.prefetch, job.freed)
            if self.meter is not None and not self.copies.staged:
                self.meter.loaded(time.perf_counter() - began)
        except BaseException as error:
            job.error = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._lock:
                job.done = True
                self._finished.notify_all()

    def _charge(self, tier: str, seconds: float) -> None:
        """Count seconds that the model's thread waited."""
        self._source.stats.stall_seconds += seconds
        if tier == "host":
            self._source.stats.host_stall_seconds += seconds


def open_store(
    loaded: LoadedModel,
    residency: Residency,
    num_threads: int = 2,
    host_memory_bytes: int | None = None,
    *,
    device: torch.device | None = None,
    hosts: bool = False,
) -> ExpertStore:
    """Open the store of a model from `load_lazy`, on the model's device unless another is given.

    `hosts` may be left out for a policy that computes on the host. Arguments and errors are otherwise those of
    `ExpertStore`.
    """
    assert loaded.files is not None
    return ExpertStore(
        loaded.files,
        residency.num_slots,
        num_threads,
        host_memory_bytes=host_memory_bytes,
        hosts=hosts or residency.policy.computes_on_host,
        copies=open_copies(device or loaded.device),
    )
