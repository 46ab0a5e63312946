"""A model's open safetensors files, read without the page cache."""

import contextlib
import mmap
import os
import threading
from pathlib import Path

import torch

from moetool.errors import MismatchError
from moetool.models.tensor_index import FLOATS, OTHER_DTYPES, FileStamp, Tensor
from moetool.models.weight_format import STORED_DTYPES, Dense, unpack
from moetool.models.weight_index import WeightIndex

_BLOCK = 4096
_KEPT_BYTES = 384 << 20  # largest buffer kept for later reads: fits any expert
_PIECE_BYTES = 16 << 20


class WeightsChanged(OSError):
    """The weights on disk have changed since they were opened."""


class Shards:
    """A model's open safetensors files, with aligned reads.

    Writing to an open file would mix old and new weights. So each read checks the file after reading, and once a change
    is found all reads fail. Renaming another file over it is safe: the old bytes stay until the file is closed. Writes
    through a memory map are detected when the system updates the file's time.

    Args:
        weights: weights of the checkpoint.
        direct: read with O_DIRECT, so that the page cache neither helps nor fills up. Falls back to ordinary reads if
            the file system refuses (`direct` then becomes False).

    Attributes:
        weights: weights of the checkpoint, by name.
        changed: why reads fail; empty without a problem.

    Effects: keeps the files open until `close`. Reads may come from several threads.

    Raises:
        OSError: one cannot be opened.
        MismatchError: one has changed since its header was read.
    """

    def __init__(self, weights: WeightIndex, direct: bool = True) -> None:
        self.files = weights.files
        self.weights = weights.weights
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptors: list[int] = []
        self._stamps = weights.stamps
        self._scratch = threading.local()
        self.changed = ""
        try:
            for number, file in enumerate(self.files):
                self._descriptors.append(self._open(file))
                self._require_unchanged(number)
        except WeightsChanged:
            self.close()
            raise MismatchError(f"{self.changed}; try again") from None
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the files and free the buffers. Later reads fail."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._scratch = threading.local()

    def read(self, file: int, offset: int, num_bytes: int) -> memoryview:
        """Read a byte range into this thread's scratch buffer; valid until its next read.

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
        self._require_unchanged(file)
        return view[offset - start : offset - start + num_bytes]

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
            part.copy_(torch.frombuffer(self.read(tensor.file, offset, len(part)), dtype=torch.uint8))
        return data.view(dtype).view(tensor.shape)

    def _require_unchanged(self, file: int) -> None:
        """Raises: WeightsChanged: the file has changed."""
        found, expected = FileStamp.of(os.fstat(self._descriptors[file])), self._stamps[file]
        if found != expected and not self.changed:
            name = self.files[file].name
            if found.inode != expected.inode:
                self.changed = f"{name} was replaced while the model was being opened"
            elif found.num_bytes != expected.num_bytes:
                self.changed = f"{name} has changed from {expected.num_bytes:,} to {found.num_bytes:,} bytes in place"
            else:
                self.changed = f"{name} was written to after the model was opened"
        if self.changed:
            raise WeightsChanged(self.changed)

    def _open(self, file: Path) -> int:
        if self.direct:
            with contextlib.suppress(OSError):
                return os.open(file, os.O_RDONLY | os.O_DIRECT)
            self.direct = False
        return os.open(file, os.O_RDONLY)
