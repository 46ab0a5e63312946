"""Source of an expert's bytes: host memory if cached there, else disk."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetool.base.errors import CapacityError, MoetoolError
from moetool.base.json_files import JsonRecord
from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.stored_expert import Weight
from moetool.runtime.experts.copies import Copies, slot_views, stride_of
from moetool.runtime.experts.host_tier import Buffer, HostTier

_LOG = logging.getLogger(__name__)
_RING_BYTES = 2**30
"""Default bytes of host memory for transfers to a device."""


@dataclass(slots=True)
class StoreStats(JsonRecord):
    """Counters of the store since its start.

    Attributes:
        reads: experts read from disk.
        prefetch_bytes: the prefetched part of these bytes.
        host_hits: experts found in host memory when loaded, or computed there.
        late: prefetched experts that arrived late.
        retried: reads repeated after an error.
        stall_seconds: time the model's thread waited for bytes.
        host_stall_seconds: the part spent on experts in host memory; the rest is spent on the disk.
        hosted_seconds: time of products on the host.
    """

    reads: int = 0
    bytes_read: int = 0
    prefetch_bytes: int = 0
    host_hits: int = 0
    host_bytes: int = 0
    late: int = 0
    retried: int = 0
    stall_seconds: float = 0.0
    host_stall_seconds: float = 0.0
    hosted_seconds: float = 0.0


class ExpertSource:
    """The tiers below the slots. Every method may be called from any thread.

    Args:
        num_threads: threads besides the model's that call `fill`.
        host_memory_bytes, hosts: as for `moetool.runtime.experts.store.ExpertStore`.

    Attributes:
        pool_bytes: bytes of the host tier.
        lock: held while `stats` is changed.

    Effects: allocates the host tier.

    Raises:
        CapacityError: `host_memory_bytes` is below the tier's minimum, or the machine lacks the memory.
    """

    def __init__(
        self, files: ExpertFiles, copies: Copies, num_threads: int, host_memory_bytes: int | None, hosts: bool
    ) -> None:
        self.stats = StoreStats()
        self.lock = threading.Lock()
        self._files = files
        self._copies = copies
        stride = stride_of(files.stored_bytes)
        least = num_threads + 1 if copies.staged or hosts else 0  # one for the model's thread
        least += copies.staged and hosts  # and one for the thread that computes on the host
        if host_memory_bytes is None:
            host_memory_bytes = max(least * stride, _RING_BYTES if copies.staged else 0)
        count = min(host_memory_bytes // stride, max(least, files.spec.total_experts))
        if count < least:
            raise CapacityError(
                f"--host-memory {host_memory_bytes:,} holds {count} experts of {stride:,} bytes, expected at least "
                f"{least}, so that {num_threads} threads can read; set it to {least * stride:,}, or omit it"
            )
        self.pool_bytes = count * stride
        self._host = None
        if count:
            self._host = HostTier(slot_views(copies.host_memory(self.pool_bytes), count, files.stored_bytes))
        if hosts and files.converts:
            (self._converted,) = slot_views(copies.device_memory(stride_of(files.slot_bytes)), 1, files.slot_bytes)
        # After two copies from one buffer it keeps the later mark; a finished copy needs none.
        self._copying = threading.Lock() if copies.staged else contextlib.nullcontext()

    def fill(self, key: int, slot: torch.Tensor, prefetch: bool, freed: Any) -> tuple[str, Any]:
        """Load an expert into a slot, or queue its copy there after `freed` is passed.

        Returns:
            Its source tier, `host` or `disk`, and the mark of the end of its copy.

        Raises: any error of the read or the copy.
        """
        buffer, tier = self._open(key, prefetch)
        if buffer is None or self._host is None:
            assert not self._copies.staged
            self._count(self._files.read_into(key, slot), prefetch)
            return tier, None
        try:
            if self._files.converts:
                self._files.fill(key, buffer.memory, slot)
                return tier, None
            with self._copying:
                buffer.copied = copied = self._copies.copy(buffer.memory, slot, after=freed)
        finally:
            self._host.release(buffer)
        return tier, copied

    def read_ahead(self, key: int) -> bool:
        """Read an expert into an empty buffer of host memory, unless it has one; False if no buffer is empty."""
        if self._host is None or (buffer := self._host.open_free(key)) is None:
            return self._host is not None and not self._host.full
        self._read(key, buffer, prefetch=True)
        self._host.release(buffer)
        return True

    def hold(self, key: int) -> Buffer | None:
        """Hold the buffer of an expert in host memory for `copy_held`; None if it is not there."""
        buffer = None if self._host is None or self._files.converts else self._host.hold(key)
        if buffer is not None:
            self._count_hit(buffer)
        return buffer

    def copy_held(self, loads: Sequence[tuple[Buffer, torch.Tensor, Any]]) -> Any:
        """Copy held buffers into slots, each after its mark, and release them; returns the last copy's mark."""
        assert self._host is not None
        try:
            with self._copying:
                copied = self._copies.copy_all([(buffer.memory, slot, freed) for buffer, slot, freed in loads])
                for buffer, _, _ in loads:
                    buffer.copied = copied
        finally:
            for buffer, _, _ in loads:
                self._host.release(buffer)
        return copied

    def in_host(self, key: int) -> bool:
        """Whether an expert is in host memory at the moment."""
        return self._host is not None and self._host.holds(key)

    def given_up(self, key: int) -> None:
        """Record that the device dropped an expert."""
        if self._host is not None:
            self._host.touch(key)

    @contextlib.contextmanager
    def host(self, key: int) -> Iterator[tuple[tuple[Weight, ...], str]]:
        """Weights of an expert in host memory, and their source tier; for one thread at a time.

        Raises:
            MoetoolError: the expert could not be read twice.
        """
        try:
            buffer, tier = self._open(key, prefetch=False)
        except Exception as failed:
            self.count_retry(key, failed)
            try:
                buffer, tier = self._open(key, prefetch=False)
            except Exception as error:
                raise self.unreadable(key, error) from error
        assert buffer is not None and self._host is not None  # every thread has a buffer
        try:
            memory = buffer.memory
            if self._files.converts:  # in the slot's form, for bit-identical results
                self._files.fill(key, memory, self._converted)
                memory = self._converted
            yield self._files.views(memory, self._files.layout_of(key)), tier
        finally:
            self._host.release(buffer)

    def host_copy(self, key: int) -> contextlib.AbstractContextManager[tuple[Weight, ...]] | None:
        """Like `host`, for an expert that host memory holds as it is computed; None for any other, without waiting."""
        buffer = self.hold(key)
        return None if buffer is None else self._held(key, buffer)

    @contextlib.contextmanager
    def _held(self, key: int, buffer: Buffer) -> Iterator[tuple[Weight, ...]]:
        assert self._host is not None
        try:
            yield self._files.views(buffer.memory, self._files.layout_of(key))
        finally:
            self._host.release(buffer)

    def count_retry(self, key: int, error: BaseException) -> None:
        """Count a failed read that is tried once more."""
        with self.lock:
            self.stats.retried += 1
        _LOG.warning("%s; trying once more", self.unreadable(key, error))

    def unreadable(self, key: int, error: BaseException) -> MoetoolError:
        """Error for an expert that could not be read."""
        layer, expert = self._files.spec.expert_of(key)
        return MoetoolError(f"cannot read expert {expert} of layer {self._files.spec.layer_ids_L[layer]}: {error}")

    def _open(self, key: int, prefetch: bool) -> tuple[Buffer | None, str]:
        """Return the host buffer that holds the expert, for the caller to release, and the source tier.

        None if there is no host tier, or all buffers are in use.

        Raises: any error of the read; the tier then does not hold the expert.
        """
        buffer = None if self._host is None else self._host.open(key)
        if buffer is None or self._host is None:
            return None, "disk"
        if buffer.filled:
            self._count_hit(buffer)
            return buffer, "host"
        self._read(key, buffer, prefetch)
        return buffer, "disk"

    def _read(self, key: int, buffer: Buffer, prefetch: bool) -> None:
        """Read an expert into an opened buffer of the host tier. Raises: any error; the buffer is then dropped."""
        assert self._host is not None
        try:
            self._copies.finish(buffer.copied)
            buffer.num_bytes = self._files.read_stored(key, buffer.memory)
        except BaseException:
            self._host.drop(buffer)
            raise
        self._host.publish(buffer)
        self._count(buffer.num_bytes, prefetch)

    def _count_hit(self, buffer: Buffer) -> None:
        with self.lock:
            self.stats.host_hits += 1
            self.stats.host_bytes += buffer.num_bytes

    def _count(self, num_bytes: int, prefetch: bool) -> None:
        with self.lock:
            self.stats.reads += 1
            self.stats.bytes_read += num_bytes
            if prefetch:
                self.stats.prefetch_bytes += num_bytes
