"""A model's open safetensors files, read without the page cache."""

import contextlib
import mmap
import os
import threading
import weakref
from pathlib import Path

import torch

from moetool.base.errors import MismatchError
from moetool.models.files.file_changes import FileChanges
from moetool.models.files.tensor_index import FLOATS, OTHER_DTYPES, Tensor
from moetool.models.weight_index import WeightIndex
from moetool.models.weights.format import STORED_DTYPES, Dense, unpack

_BLOCK = 4096
_KEPT_BYTES = 384 << 20  # largest buffer kept for later reads: fits any expert
_PIECE_BYTES = 16 << 20


class WeightsChanged(OSError):
    """The weights on disk have changed since they were opened."""


class Shards:
    """A model's open safetensors files, with aligned reads.

    Writing to an open file would mix old and new weights. So each read checks the file after reading
    (`moetool.models.files.file_changes`), and once a change is found all reads fail. Renaming another file over it is
    safe: the old bytes stay until the file is closed. So are changes of its permissions, links and name.

    Args:
        weights: weights of the checkpoint.
        direct: read with O_DIRECT, so that the page cache neither helps nor fills up. Falls back to ordinary reads if
            the file system refuses (`direct` then becomes False).

    Attributes:
        weights: weights of the checkpoint, by name.
        changed: why reads fail; empty without a problem.

    Effects: keeps the files open until `close` or until it is collected as garbage. Reads may come from several
        threads.

    Raises:
        OSError: one cannot be opened.
        MismatchError: one has changed since its header was read.
    """

    def __init__(self, weights: WeightIndex, direct: bool = True) -> None:
        self.files = weights.files
        self.weights = weights.weights
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptors: list[int] = []
        self._changes: FileChanges | None = None
        self._scratch = threading.local()
        self.changed = ""
        try:
            self._descriptors.extend(map(self._open, self.files))
        except OSError:
            self.close()
            raise
        self._changes = FileChanges(self.files, weights.stamps, self._descriptors)
        # Not at exit: threads that still read would end in a traceback.
        weakref.finalize(self, _close, self._descriptors, self._changes).atexit = False
        if why := self._changes.opening:
            self.close()
            raise MismatchError(f"{why}; try again")

    def close(self) -> None:
        """Close the files and free the buffers. Later reads fail."""
        _close(self._descriptors, self._changes)
        self._scratch = threading.local()

    def read(self, file: int, offset: int, num_bytes: int, *, once: bool = False) -> memoryview:
        """Read a byte range into this thread's scratch buffer; valid until its next read.

        Args:
            once: whether it will not be read again, so that no checksum need be kept of it.

        Raises:
            OSError: the disk failed, or the file ended early.
            WeightsChanged: the file was written to.
        """
        start = offset // _BLOCK * _BLOCK
        span = (offset + num_bytes - start + _BLOCK - 1) // _BLOCK * _BLOCK
        buffer: mmap.mmap | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < span:
            buffer = mmap.mmap(-1, span)  # page-aligned, as O_DIRECT asks
            if span <= _KEPT_BYTES:
                self._scratch.buffer = buffer
        view = memoryview(buffer)
        needed, done = offset + num_bytes - start, 0
        while done < needed:
            got = os.preadv(self._descriptors[file], [view[done:span]], start + done)
            reached = done + max(0, got)
            if reached < needed:
                reached = reached // _BLOCK * _BLOCK  # O_DIRECT continues at a block
            if reached == done:  # a file that ends inside a block would return the same bytes forever
                self._require_unchanged(file)
                end = os.fstat(self._descriptors[file]).st_size
                raise OSError(f"{self.files[file].name} ends at byte {end:,}, expected {offset + num_bytes:,}")
            done = reached
        data = view[offset - start : offset - start + num_bytes]
        self._require_unchanged(file, offset, None if once else data)
        return data

    def stop(self, why: str) -> None:
        """Fail all further reads, because a file has changed."""
        self.changed = self.changed or why

    def drop_buffer(self) -> None:
        """Free this thread's read buffer; the next read makes another."""
        self._scratch.__dict__.pop("buffer", None)

    def load(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Read one whole weight into its own memory.

        Args:
            dtype: data type of unpacked weights; others keep their stored type.

        Raises:
            MismatchError: its data type is not supported.
        """
        weight = self.weights[name]
        if isinstance(weight.codec, Dense):
            return self._load(name, weight.tensors["weight"], FLOATS | OTHER_DTYPES)
        stored = self.stored(name)
        return unpack(weight.codec, stored, weight.shape, dtype)

    def stored(self, name: str) -> dict[str, torch.Tensor]:
        """Read the tensors of a weight, by role, into their own memory."""
        return {role: self._load(name, tensor, STORED_DTYPES) for role, tensor in self.weights[name].tensors.items()}

    def _load(self, name: str, tensor: Tensor, dtypes: dict[str, torch.dtype]) -> torch.Tensor:
        dtype = dtypes.get(tensor.dtype)
        if dtype is None:
            raise MismatchError(
                f"{self.files[tensor.file]}: {name} is stored as {tensor.dtype}, expected one of {', '.join(FLOATS)}"
            )
        if not tensor.num_bytes:
            return torch.empty(tensor.shape, dtype=dtype)
        data = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        for part in data.split(_PIECE_BYTES):  # a buffer of the whole weight would double its memory
            offset = tensor.offset + part.storage_offset()
            part.copy_(torch.frombuffer(self.read(tensor.file, offset, len(part), once=True), dtype=torch.uint8))
        return data.view(dtype).view(tensor.shape)

    def _require_unchanged(self, file: int, offset: int = 0, data: memoryview | None = None) -> None:
        """Raises: WeightsChanged: the file, or the bytes that were just read from it, have changed."""
        assert self._changes is not None, "no file is read before all are open"
        if not self.changed:
            self.changed = self._changes.of_file(file) if data is None else self._changes.of_part(file, offset, data)
        if self.changed:
            raise WeightsChanged(self.changed)

    def _open(self, file: Path) -> int:
        if self.direct:
            with contextlib.suppress(OSError):
                return os.open(file, os.O_RDONLY | os.O_DIRECT)
            self.direct = False
        return os.open(file, os.O_RDONLY)


def _close(descriptors: list[int], changes: FileChanges | None) -> None:
    if changes is not None:
        changes.close()
    while descriptors:
        os.close(descriptors.pop())
