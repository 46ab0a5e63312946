"""The safetensors files of a model: what lies where, and reading it without the page cache."""

import contextlib
import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from moetool.errors import MismatchError
from moetool.models.packed import PACKED, SCALE, SHAPE, ZERO, Block
from moetool.models.spec import read_header, weight_files

_BLOCK = 4096
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
OTHER_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


class Tensor(NamedTuple):
    """A tensor's place in a shard: `offset` counts from the start of the file."""

    file: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


class PackedTensors(NamedTuple):
    """The tensors of a packed weight (`moetool.models.packed`)."""

    words: Tensor
    zero: Tensor | None
    scale: Tensor


class Shards:
    """The safetensors files of a model: an index over their headers and aligned reads of their bytes.

    Args:
        path: the model's folder.
        direct: read with O_DIRECT, so that the page cache can neither help nor be filled. Falls back to ordinary
            reads where the file system refuses (`direct` then becomes False).
        bits: of packed weights, where there are any.
        as_stored: whether `load` unpacks in the type of the scales.

    Attributes:
        tensors: by name; a packed weight goes by the name and shape that it would have unpacked.
        packed: the tensors that make a packed weight.

    Effects: keeps the files open until `close`. Reads may come from several threads.

    Raises:
        MismatchError: a shard is damaged or shorter than its header says.
    """

    def __init__(self, path: Path, direct: bool = True, bits: int | None = None, as_stored: bool = False) -> None:
        self.files = weight_files(path)
        self.tensors: dict[str, Tensor] = {}
        self.packed: dict[str, PackedTensors] = {}
        self.bits = bits or 0
        self._as_stored = as_stored
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptors: list[int] = []
        self._scratch = threading.local()
        for number, file in enumerate(self.files):
            self._index(number, file)
        if bits is not None:
            self._join_packed(bits)
        for file in self.files:
            self._descriptors.append(self._open(file))

    def close(self) -> None:
        """Close the files. Reads that come later fail."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def read(self, file: int, offset: int, num_bytes: int) -> memoryview:
        """Read a run of bytes into this thread's scratch buffer; valid until its next read.

        Raises:
            OSError: the disk failed, or the file ended early.
        """
        start = offset // _BLOCK * _BLOCK
        span = (offset + num_bytes - start + _BLOCK - 1) // _BLOCK * _BLOCK
        buffer: mmap.mmap | None = getattr(self._scratch, "buffer", None)
        if buffer is None or len(buffer) < span:
            buffer = self._scratch.buffer = mmap.mmap(-1, span)  # page-aligned, as O_DIRECT asks
        view = memoryview(buffer)
        done = 0
        while done < offset + num_bytes - start:
            got = os.preadv(self._descriptors[file], [view[done:span]], start + done)
            if got <= 0:
                raise OSError(f"{self.files[file]} ended at byte {start + done:,}, expected {offset + num_bytes:,}")
            done += got
            if done % _BLOCK and done < offset + num_bytes - start:
                done = done // _BLOCK * _BLOCK  # O_DIRECT goes on at a block
        return view[offset - start : offset - start + num_bytes]

    def load(self, name: str) -> torch.Tensor:
        """One whole tensor, in memory of its own; a packed weight unpacked, in float32 or as its scales.

        Raises:
            MismatchError: it has a data type that moetool does not read.
        """
        if packed := self.packed.get(name):
            words, zero, scale = (None if part is None else self._load(name, part) for part in packed)
            assert words is not None and scale is not None
            return Block(words, scale if self._as_stored else scale.float(), zero).dense(self.bits)
        return self._load(name, self.tensors[name])

    def _load(self, name: str, tensor: Tensor) -> torch.Tensor:
        dtype = (DTYPES | OTHER_DTYPES).get(tensor.dtype)
        if dtype is None:
            raise MismatchError(f"{name} is stored as {tensor.dtype}, expected one of {', '.join(DTYPES)}")
        if not tensor.num_bytes:
            return torch.empty(tensor.shape, dtype=dtype)
        data = bytearray(self.read(tensor.file, tensor.offset, tensor.num_bytes))
        return torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)

    def _open(self, file: Path) -> int:
        if self.direct:
            with contextlib.suppress(OSError):
                return os.open(file, os.O_RDONLY | os.O_DIRECT)
            self.direct = False
        return os.open(file, os.O_RDONLY)

    def _index(self, number: int, file: Path) -> None:
        size = file.stat().st_size
        header, base = read_header(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if base + end > size:
                raise MismatchError(
                    f"{file} is cut short: {size:,} bytes, expected {base + end:,} for {name}; download the model again"
                )
            self.tensors[name] = Tensor(number, base + begin, end - begin, tuple(entry["shape"]), entry["dtype"])

    def _join_packed(self, bits: int) -> None:
        for name in [name for name in self.tensors if name.endswith("." + PACKED)]:
            stem = name.removesuffix(PACKED)
            words, scale = self.tensors.pop(name), self.tensors.pop(stem + SCALE, None)
            zero = self.tensors.pop(stem + ZERO, None)
            self.tensors.pop(stem + SHAPE, None)
            columns = words.shape[1] * 32 // bits
            if scale is None or len(scale.shape) != 2 or scale.shape[0] != words.shape[0] or columns % scale.shape[1]:
                found = "no scales" if scale is None else f"scales of shape {list(scale.shape)}"
                raise MismatchError(
                    f"{name} of shape {list(words.shape)} has {found}, expected some for each of its {words.shape[0]} "
                    "rows; download the model again"
                )
            self.packed[stem + "weight"] = PackedTensors(words, zero, scale)
            self.tensors[stem + "weight"] = words._replace(shape=(words.shape[0], columns), dtype=f"int{bits}")
