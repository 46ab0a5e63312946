"""The safetensors files of a model: what lies where, and reading it without the page cache."""

import contextlib
import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from moetool.errors import MismatchError, UsageError
from moetool.models.packed import ORDER, PACKED, SCALE, SHAPE, ZERO, Block
from moetool.models.packing import Packing
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
    columns: int


class Shards:
    """The safetensors files of a model: an index over their headers and aligned reads of their bytes.

    Args:
        path: the model's folder.
        direct: read with O_DIRECT, so that the page cache can neither help nor be filled. Falls back to ordinary
            reads where the file system refuses (`direct` then becomes False).
        packing: of the packed weights, where there are any.

    Attributes:
        tensors: by name; a packed weight goes by the name and shape that it would have unpacked.
        packed: the tensors that make a packed weight.

    Effects: keeps the files open until `close`. Reads may come from several threads.

    Raises:
        MismatchError: a shard is damaged or shorter than its header says, or packed tensors contradict one another or
            the config.
        UsageError: weights are packed in a way that is not read.
    """

    def __init__(self, path: Path, direct: bool = True, packing: Packing | None = None) -> None:
        self.files = weight_files(path)
        self.tensors: dict[str, Tensor] = {}
        self.packed: dict[str, PackedTensors] = {}
        self.bits = packing.bits if packing is not None else 0
        self._as_stored = packing is not None and packing.as_stored
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptors: list[int] = []
        self._scratch = threading.local()
        for number, file in enumerate(self.files):
            self._index(number, file)
        if packing is not None:
            self._join_packed(path, packing)
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
        needed, done = offset + num_bytes - start, 0
        while done < needed:
            got = os.preadv(self._descriptors[file], [view[done:span]], start + done)
            reached = done + max(0, got)
            if reached < needed:
                reached = reached // _BLOCK * _BLOCK  # O_DIRECT goes on at a block
            if reached == done:  # and a file that ends inside one would give the same bytes again, for ever
                end = os.fstat(self._descriptors[file]).st_size
                raise OSError(f"{self.files[file].name} ends at byte {end:,}, expected {offset + num_bytes:,}")
            done = reached
        return view[offset - start : offset - start + num_bytes]

    def load(self, name: str) -> torch.Tensor:
        """One whole tensor, in memory of its own; a packed weight unpacked, in float32 or as its scales.

        Raises:
            MismatchError: it has a data type that moetool does not read.
        """
        if name in self.packed:
            block = self.block(name)
            return block._replace(scale=block.scale if self._as_stored else block.scale.float()).dense(self.bits)
        return self._load(name, self.tensors[name])

    def block(self, name: str) -> Block:
        """A packed weight as it is stored, in memory of its own."""
        packed = self.packed[name]
        zero = None if packed.zero is None else self._load(name, packed.zero)
        return Block(self._load(name, packed.words), self._load(name, packed.scale), zero, packed.columns)

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

    def _join_packed(self, path: Path, packing: Packing) -> None:
        """Put one weight in the place of each group of packed tensors, once they have been found to agree."""
        for name in self.tensors:
            if name.endswith("." + ORDER):
                raise UsageError(
                    f"{path} orders the groups of a weight by activation ({name}), which moetool does not read: give "
                    "the one that it was made from"
                )
        shapes = self._packed_shapes()
        for name in [name for name in self.tensors if name.endswith("." + PACKED)]:
            stem = name.removesuffix(PACKED)
            words, scale = self.tensors.pop(name), self.tensors.pop(stem + SCALE, None)
            zero = self.tensors.pop(stem + ZERO, None)
            columns = self._columns(name, words, shapes.get(stem + SHAPE), packing.bits)
            _require_scales(name, words, scale, zero, columns, packing)
            assert scale is not None
            self.packed[stem + "weight"] = PackedTensors(words, zero, scale, columns)
            self.tensors[stem + "weight"] = words._replace(shape=(words.shape[0], columns), dtype=f"int{packing.bits}")

    def _packed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Takes the records of unpacked shapes out of the index and reads them: in the order in which they lie."""
        records = {name: self.tensors.pop(name) for name in list(self.tensors) if name.endswith("." + SHAPE)}
        found: dict[str, tuple[int, ...]] = {}
        for number, file in enumerate(self.files):
            mine = sorted((t.offset, name) for name, t in records.items() if t.file == number)
            with file.open("rb") as stream:
                for offset, name in mine:
                    stream.seek(offset)
                    found[name] = _integers(name, stream.read(records[name].num_bytes), records[name].dtype)
        return found

    def _columns(self, name: str, words: Tensor, shape: tuple[int, ...] | None, bits: int) -> int:
        """The inputs of a packed weight, by the record of its shape, or where it has none as many as words hold."""
        rows, wide = words.shape if len(words.shape) == 2 else (0, 0)
        if shape is None:
            return wide * 32 // bits
        if len(shape) != 2 or shape[0] != rows or -(-shape[1] * bits // 32) != wide or words.dtype != "I32":
            raise MismatchError(
                f"{name} is {words.dtype} of shape {list(words.shape)}, and the {SHAPE} beside it says {list(shape)}, "
                f"expected I32 of [{shape[0]}, {-(-shape[-1] * bits // 32)}] for it at {bits} bits; download the model "
                "again"
            )
        return shape[1]


def _require_scales(
    name: str, words: Tensor, scale: Tensor | None, zero: Tensor | None, columns: int, packing: Packing
) -> None:
    """Raises: MismatchError where scales or zero points do not fit the weight, or not what the config says of it."""
    rows = words.shape[0]
    if scale is None or len(scale.shape) != 2 or scale.shape[0] != rows or columns % max(1, scale.shape[1]):
        found = "no scales" if scale is None else f"scales of shape {list(scale.shape)}"
        raise MismatchError(
            f"{name} of shape {list(words.shape)} has {found}, expected some for each of its {rows} rows; download the "
            "model again"
        )
    groups = scale.shape[1]
    right = {columns // size if size else 1 for size in packing.groups if not size or columns % size == 0}
    if groups not in right:
        sizes = ", ".join(str(size) if size else "whole rows" for size in sorted(packing.groups))
        raise MismatchError(
            f"{name} has {groups} scales a row of {columns} inputs, expected groups of {sizes} by the config; download "
            "the model again"
        )
    if packing.symmetric == {zero is not None}:
        expected = "none, since it is symmetric" if zero is not None else "them, since it is asymmetric"
        raise MismatchError(
            f"{name} has {'' if zero is not None else 'no '}zero points ({ZERO}), and the config expects {expected}; "
            "download the model again"
        )
    packed_rows = -(-rows * packing.bits // 32)
    if zero is not None and (zero.shape, zero.dtype) != ((packed_rows, groups), "I32"):
        raise MismatchError(
            f"{name} has zero points as {zero.dtype} of shape {list(zero.shape)}, expected I32 of "
            f"{[packed_rows, groups]}; download the model again"
        )


def _integers(name: str, data: bytes, dtype: str) -> tuple[int, ...]:
    sizes = {"I64": 8, "I32": 4}
    if dtype not in sizes:
        raise MismatchError(f"{name} is stored as {dtype}, expected one of {', '.join(sizes)}")
    size = sizes[dtype]
    return tuple(int.from_bytes(data[i : i + size], "little", signed=True) for i in range(0, len(data), size))
