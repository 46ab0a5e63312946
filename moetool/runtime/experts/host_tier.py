"""The tier between disk and device: a cache of experts in host memory."""

import threading
from collections import OrderedDict
from typing import Any

import torch


class Buffer:
    """Buffer for one expert in host memory.

    Attributes:
        memory: bytes of the buffer, uint8.
        key: the expert in it, or being read into it.
        filled: whether the expert is complete.
        num_bytes: bytes read into it.
        copied: mark of the last copy from it, which must be passed before the next read into it.
    """

    __slots__ = ("copied", "filled", "key", "memory", "num_bytes", "users")

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.key = -1
        self.filled = False
        self.num_bytes = 0
        self.copied: Any = None
        self.users = 0


class HostTier:
    """A cache of experts in host memory, beside the device's slots.

    Inclusive: an expert read from disk passes through a buffer of this tier and stays in it after the device evicts its
    copy; weights never change, so nothing is written back. Eviction is LRU over loads to the device and evictions from
    it. So a tier no larger than the pool mostly duplicates the device and saves few reads; a tier for all experts reads
    each once.

    Its content depends on arrival times, unlike the slots': it decides the source of a load, never which expert is
    loaded.

    Args:
        buffers: memory of each buffer. With fewer buffers than concurrent threads, `open` may return None.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._free = [Buffer(memory) for memory in reversed(buffers)]
        self._of: OrderedDict[int, Buffer] = OrderedDict()  # least recently used first
        self._changed = threading.Condition()

    def open(self, key: int) -> Buffer | None:
        """Return the buffer of an expert, protected from reuse until `release`.

        If it is not `filled`, the caller must fill it and call `publish` or `drop`. Waits while another thread fills
        it.

        Returns:
            None if all buffers are in use.
        """
        with self._changed:
            while (buffer := self._of.get(key)) is not None and not buffer.filled:
                self._changed.wait()
            if buffer is None:
                buffer = self._free.pop() if self._free else self._oldest()
                if buffer is None:
                    return None
                buffer.key = key
            self._of.pop(key, None)
            self._of[key] = buffer
            buffer.users += 1
            return buffer

    @property
    def full(self) -> bool:
        """Whether no buffer is empty."""
        return not self._free

    def open_free(self, key: int) -> Buffer | None:
        """Like `open`, with an empty buffer, as the least recently used expert; None if there is none, or it has one.

        So experts that are read ahead in the order of expected use leave in the opposite order.
        """
        with self._changed:
            if key in self._of or not self._free:
                return None
            buffer = self._of[key] = self._free.pop()
            self._of.move_to_end(key, last=False)
            buffer.key, buffer.users = key, 1
            return buffer

    def hold(self, key: int) -> Buffer | None:
        """Like `open`, for a complete expert in this tier; None for any other, without waiting."""
        with self._changed:
            buffer = self._of.get(key)
            if buffer is None or not buffer.filled:
                return None
            self._of[key] = self._of.pop(key)
            buffer.users += 1
            return buffer

    def publish(self, buffer: Buffer) -> None:
        """Mark the buffer's expert as complete."""
        with self._changed:
            buffer.filled = True
            self._changed.notify_all()

    def drop(self, buffer: Buffer) -> None:
        """Empty the buffer after a failed read."""
        with self._changed:
            del self._of[buffer.key]
            buffer.key, buffer.users = -1, 0
            self._free.append(buffer)
            self._changed.notify_all()

    def release(self, buffer: Buffer) -> None:
        """End the caller's use of a filled buffer."""
        with self._changed:
            buffer.users -= 1

    def touch(self, key: int) -> None:
        """Count an expert that the device evicted as just used, if it is in this tier."""
        with self._changed:
            if (buffer := self._of.pop(key, None)) is not None:
                self._of[key] = buffer

    def holds(self, key: int) -> bool:
        """Whether a complete copy of an expert is here at the moment."""
        buffer = self._of.get(key)
        return buffer is not None and buffer.filled

    def _oldest(self) -> Buffer | None:
        for key, buffer in self._of.items():
            if not buffer.users:
                del self._of[key]
                buffer.filled = False
                return buffer
        return None
