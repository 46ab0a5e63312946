"""The tier between disk and device: host memory in which experts that were read stay for a while."""

import threading
from typing import Any

import torch


class Buffer:
    """Room for one expert in host memory.

    Attributes:
        memory: its bytes, uint8.
        key: the expert that it holds or is being filled with.
        filled: whether the expert is there, whole.
        num_bytes: bytes that were read into it.
        copied: mark of the last copy out of it; it must be passed before the buffer is filled again.
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

    Inclusive: an expert that is read from disk goes through a buffer of this tier and stays in it when its copy on the
    device is given up; weights are never changed, so nothing is ever written back. The buffer that is filled next is
    the one whose expert was neither loaded to the device nor given up by it for longest (LRU). So a tier that is not
    larger than the pool of slots mostly holds what the device has too, and saves few reads; one that holds all
    experts reads each once.

    What it holds depends on when bytes arrive, unlike the slots: it decides where a load comes from, never what is
    loaded.

    Args:
        buffers: the memory of each buffer. With fewer buffers than threads that use them at once, `open` may answer
            None.
    """

    def __init__(self, buffers: list[torch.Tensor]) -> None:
        self._free = [Buffer(memory) for memory in reversed(buffers)]
        self._of: dict[int, Buffer] = {}  # least recently used first
        self._changed = threading.Condition()

    def open(self, key: int) -> Buffer | None:
        """The buffer of an expert, kept from everybody else's fillings until `release`.

        Where it is not `filled`, the caller has to fill it, and to call `publish` or `drop`. Waits while another
        thread is filling it.

        Returns:
            None where all buffers are in use.
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

    def open_free(self, key: int) -> Buffer | None:
        """As `open`, in a buffer that holds nothing; None where there is none, or the expert has one."""
        with self._changed:
            if key in self._of or not self._free:
                return None
            buffer = self._of[key] = self._free.pop()
            buffer.key, buffer.users = key, 1
            return buffer

    def hold(self, key: int) -> Buffer | None:
        """The buffer of an expert that is here, whole, as `open` gives it; None for any other, without waiting."""
        with self._changed:
            buffer = self._of.get(key)
            if buffer is None or not buffer.filled:
                return None
            self._of[key] = self._of.pop(key)
            buffer.users += 1
            return buffer

    def publish(self, buffer: Buffer) -> None:
        """The buffer holds its expert, whole."""
        with self._changed:
            buffer.filled = True
            self._changed.notify_all()

    def drop(self, buffer: Buffer) -> None:
        """The expert could not be read: the buffer holds nothing and is free."""
        with self._changed:
            del self._of[buffer.key]
            buffer.key, buffer.users = -1, 0
            self._free.append(buffer)
            self._changed.notify_all()

    def release(self, buffer: Buffer) -> None:
        """The caller no longer uses a filled buffer."""
        with self._changed:
            buffer.users -= 1

    def touch(self, key: int) -> None:
        """The device gave up an expert: where it is in this tier it counts as just used."""
        with self._changed:
            if (buffer := self._of.pop(key, None)) is not None:
                self._of[key] = buffer

    def holds(self, key: int) -> bool:
        """Whether an expert is here, whole; by the next moment it may not be."""
        buffer = self._of.get(key)
        return buffer is not None and buffer.filled

    def _oldest(self) -> Buffer | None:
        for key, buffer in self._of.items():
            if not buffer.users:
                del self._of[key]
                buffer.filled = False
                return buffer
        return None
