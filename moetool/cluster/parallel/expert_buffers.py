"""A rank's expert buffers: its experts, each in separate memory on the rank's device."""

import threading
import zlib
from typing import Any

import torch

from moetool.models.experts.expert_files import ExpertFiles
from moetool.models.experts.stored_expert import Weight
from moetool.runtime.experts.copies import CpuCopies, open_copies


class ExpertBuffers:
    """A rank's experts by key, each in a buffer.

    Migration threads write and read bytes; the rank's own thread uses and drops experts.

    Args:
        files: source of experts that come from no other rank.
        device: compute device.

    Attributes:
        most: largest number of experts held since it was set to 0.
    """

    def __init__(self, files: ExpertFiles, device: torch.device) -> None:
        self.files = files
        self.size = files.slot_bytes
        self.most = 0
        self._copies = open_copies(device)
        self._on_cpu = isinstance(self._copies, CpuCopies)
        self._slots: dict[int, torch.Tensor] = {}
        self._views: dict[int, tuple[Weight, ...]] = {}
        self._free: list[torch.Tensor] = []
        self._host_buffers = self._free if self._on_cpu else []  # free host memory
        self._lock = threading.Lock()

    def __contains__(self, key: int) -> bool:
        return key in self._views

    @property
    def keys(self) -> set[int]:
        return set(self._views)

    def weights(self, key: int) -> tuple[Weight, ...]:
        """An expert's weights. Raises: KeyError if it is not held."""
        return self._views[key]

    def load(self, key: int) -> None:
        """Read an expert from the checkpoint, if it is not held. Raises: OSError: the disk failed."""
        if key not in self._views:
            buffer = self.allocate()
            self.files.read_into(key, buffer)
            self.put(key, buffer)

    def allocate(self) -> torch.Tensor:
        """Host memory for one expert, for `put` or `give_back`: uint8."""
        with self._lock:
            if self._host_buffers:
                return self._host_buffers.pop()
        return self._copies.host_memory(self.size)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Free memory that received no expert."""
        with self._lock:
            self._host_buffers.append(buffer)

    def put(self, key: int, buffer: torch.Tensor) -> None:
        """Hold the expert with the bytes in `buffer`, which is released."""
        slot = buffer
        if not self._on_cpu:
            with self._lock:
                free = self._free.pop() if self._free else None
            slot = self._copies.device_memory(self.size) if free is None else free
            self._copies.finish(self._copies.copy(buffer, slot, None))
            self.give_back(buffer)
        with self._lock:
            self._slots[key], self._views[key] = slot, self.files.views(slot, self.files.layout_of(key))
            self.most = max(self.most, len(self._slots))

    def drop(self, key: int) -> None:
        """Drop an expert; its memory is reused."""
        with self._lock:
            self._views.pop(key, None)
            if (slot := self._slots.pop(key, None)) is not None:
                self._free.append(slot)

    def read(self, key: int, offset: int, num_bytes: int) -> tuple[bytes, int] | None:
        """Part of an expert's bytes and its checksum; None if it is not held."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return None
            piece: Any = slot[offset : offset + num_bytes].cpu().numpy().tobytes()
        return piece, zlib.crc32(piece)

    def close(self) -> None:
        """Free all memory."""
        with self._lock:
            self._slots.clear()
            self._views.clear()
            self._free.clear()
            self._host_buffers.clear()
        self._copies.close()
