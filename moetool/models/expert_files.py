"""Where each expert lies in the safetensors shards, and reading one without the page cache."""

import contextlib
import mmap
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetool.errors import MismatchError
from moetool.models.checkpoint import Source
from moetool.models.spec import MoeLayer, read_header, weight_files
from moetool.types import ModelSpec

_BLOCK = 4096
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_OTHER_DTYPES = {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}


class Tensor(NamedTuple):
    """A tensor's place in a shard: `offset` counts from the start of the file."""

    file: int
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


class Piece(NamedTuple):
    """A run of bytes of a read that belongs at `target` in the slot; `source` counts from the read's start."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read: `num_bytes` at `offset` of a shard, cut into pieces of a slot."""

    file: int
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]


class Shards:
    """The safetensors files of a model: an index over their headers and aligned reads of their bytes.

    Args:
        path: the model's folder.
        direct: read with O_DIRECT, so that the page cache can neither help nor be filled. Falls back to ordinary
            reads where the file system refuses (`direct` then becomes False).

    Effects: keeps the files open until `close`. Reads may come from several threads.

    Raises:
        MismatchError: a shard is damaged or shorter than its header says.
    """

    def __init__(self, path: Path, direct: bool = True) -> None:
        self.files = weight_files(path)
        self.tensors: dict[str, Tensor] = {}
        self.direct = direct and hasattr(os, "O_DIRECT")
        self._descriptors: list[int] = []
        self._scratch = threading.local()
        for number, file in enumerate(self.files):
            self._index(number, file)
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
        """One whole tensor, in memory of its own.

        Raises:
            MismatchError: it has a data type that moetool does not read.
        """
        tensor = self.tensors[name]
        dtype = (_DTYPES | _OTHER_DTYPES).get(tensor.dtype)
        if dtype is None:
            raise MismatchError(f"{name} is stored as {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
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


class ExpertFiles:
    """Reads any one expert of a model into a slot.

    A slot holds the parts of the family's `ExpertForm` one after the other, in the checkpoint's data type, whatever
    order the files have. An expert is read from tensors of its own or out of stacked ones; what makes what is
    transformers' to say (`moetool.models.checkpoint`).

    Args:
        sources: what makes each parameter, from `moetool.models.checkpoint.sources`.

    Raises:
        MismatchError: a tensor is missing, has another shape or type than the config says, or would have to be
            computed from others before it can be used.
    """

    def __init__(self, shards: Shards, layers: list[MoeLayer], spec: ModelSpec, sources: dict[str, Source]) -> None:
        self.shards = shards
        self.spec = spec
        self._sources = sources
        self._reads: dict[int, tuple[Read, ...]] = {}
        form = layers[0].form
        self._shapes = [part.shape for part in form.parts]
        self._dtypes = [self._dtype(f"{layers[0].path}.{part.parameters[0]}", layers[0]) for part in form.parts]
        self._offsets = []
        end = 0
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            end = -(-end // dtype.itemsize) * dtype.itemsize
            self._offsets.append(end)
            end += torch.Size(shape).numel() * dtype.itemsize
        self.slot_bytes = end
        for layer in layers:
            if [part.shape for part in layer.form.parts] != self._shapes:
                raise MismatchError(
                    f"the experts of layer {layer.layer_id} have other shapes than those of layer "
                    f"{layers[0].layer_id}; moetool serves models whose experts all have one shape"
                )
            for expert in range(layer.form.num_experts):
                self._reads[spec.expert_key(layer.index, expert)] = _coalesce(self._find(layer, expert))

    def read_into(self, key: int, slot: torch.Tensor) -> int:
        """Fill a slot (uint8 [slot_bytes]) with the expert `key`.

        Returns:
            The bytes that were read; 0 for an expert without weights.

        Raises:
            OSError: the disk failed.
        """
        total = 0
        for read in self._reads.get(key, ()):
            data = torch.frombuffer(self.shards.read(read.file, read.offset, read.num_bytes), dtype=torch.uint8)
            for source, target, num_bytes in read.pieces:
                slot[target : target + num_bytes].copy_(data[source : source + num_bytes])
            total += read.num_bytes
        return total

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of the expert in a slot, as `ExpertForm.parts` orders them."""
        return tuple(
            slot[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for offset, shape, dtype in zip(self._offsets, self._shapes, self._dtypes, strict=True)
        )

    def _find(self, layer: MoeLayer, expert: int) -> list[tuple[Tensor, int]]:
        """The expert's tensors (or its parts of stacked ones) with their places in the slot."""
        found = []
        for part, offset, dtype in zip(layer.form.parts, self._offsets, self._dtypes, strict=True):
            target = offset
            for parameter in part.parameters:
                for tensor in self._share(layer, parameter, part.share, expert):
                    if _DTYPES.get(tensor.dtype) != dtype:
                        raise MismatchError(
                            f"{layer.path}.{parameter} of expert {expert} is stored as {tensor.dtype}, "
                            f"expected {dtype} as in the first MoE layer"
                        )
                    found.append((tensor, target))
                    target += tensor.num_bytes
        return found

    def _share(self, layer: MoeLayer, parameter: str, share: tuple[int, ...], expert: int) -> list[Tensor]:
        """The tensors, or parts of tensors, that make one expert's share of a parameter."""
        name = f"{layer.path}.{parameter}"
        source = self._source(name)
        if source.converter is None:
            whole = self._take(next(iter(source.names)), tuple(layer.experts.get_parameter(parameter).shape))
            size = torch.Size(share).numel() * _DTYPES[whole.dtype].itemsize
            return [Tensor(whole.file, whole.offset + expert * size, size, share, whole.dtype)]
        if not _is_stacking(source.converter):
            steps = ", ".join(type(step).__name__ for step in source.converter.operations)
            raise MismatchError(
                f"{name} has to be computed from its tensors ({steps}), so its experts cannot be read one by one; "
                "save the model again with transformers' save_pretrained"
            )
        patterns = source.converter.source_patterns  # gate and up, say: one under the other
        rows = (share[0] // len(patterns), *share[1:])
        tensors = []
        for pattern in patterns:
            if pattern not in source.names:
                raise MismatchError(f"{name} lacks the tensors {pattern}; download the model again")
            tensors.append(self._take(_numbered(source.names[pattern][0], expert), rows))
        return tensors

    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            raise MismatchError(
                f"no tensor in the weight files of {self.spec.name} makes {name}: one is missing, or this is a layout "
                "that transformers does not read; download the model again"
            )
        return source

    def _dtype(self, name: str, layer: MoeLayer) -> torch.dtype:
        names = next(iter(self._source(name).names.values()))
        dtype = self.shards.tensors[names[0]].dtype
        if dtype not in _DTYPES:
            raise MismatchError(f"experts are stored as {dtype} ({names[0]}), expected one of {', '.join(_DTYPES)}")
        return _DTYPES[dtype]

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.shards.tensors.get(name)
        if tensor is None:
            raise MismatchError(f"{name} is missing from the weight files; download the model again")
        if tensor.shape != shape:
            raise MismatchError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)} by the config")
        return tensor


def _is_stacking(converter: Any) -> bool:
    """Whether a conversion only lays whole tensors of single experts side by side."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _numbered(name: str, expert: int) -> str:
    """The name of the same tensor of another expert: the last number between dots is the expert's."""
    return re.sub(r"^(.*)\.\d+\.", lambda match: f"{match[1]}.{expert}.", name)


def _coalesce(parts: list[tuple[Tensor, int]]) -> tuple[Read, ...]:
    """Join parts that lie side by side in one file into one read."""
    reads: list[Read] = []
    for tensor, target in sorted(parts, key=lambda part: (part[0].file, part[0].offset)):
        last = reads[-1] if reads else None
        if last is not None and last.file == tensor.file and last.offset + last.num_bytes == tensor.offset:
            piece = Piece(last.num_bytes, target, tensor.num_bytes)
            reads[-1] = Read(last.file, last.offset, last.num_bytes + tensor.num_bytes, (*last.pieces, piece))
        else:
            reads.append(Read(tensor.file, tensor.offset, tensor.num_bytes, (Piece(0, target, tensor.num_bytes),)))
    return tuple(reads)
