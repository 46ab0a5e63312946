"""Where each expert lies in the safetensors shards, and reading one without the page cache."""

import contextlib
import mmap
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from moetool.errors import MismatchError
from moetool.models.spec import MoeLayer, read_header, weight_files
from moetool.types import ModelSpec

_BLOCK = 4096
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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
        """One whole tensor, in memory of its own."""
        tensor = self.tensors[name]
        data = bytearray(self.read(tensor.file, tensor.offset, tensor.num_bytes))
        return torch.frombuffer(data, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)

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

    A slot holds `gate_up` [2I, D] and then `down` [D, I], in the checkpoint's data type, whatever order the
    file has. Checkpoints with one tensor per expert and projection (`experts.7.gate_proj.weight`, or mixtral's
    `w1`, `w3`, `w2`) and with stacked experts (`experts.gate_up_proj` [E, 2I, D]) are understood.

    Raises:
        MismatchError: a tensor is missing or has another shape or type than the config says.
    """

    _NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

    def __init__(self, shards: Shards, layers: list[MoeLayer], spec: ModelSpec) -> None:
        self.shards = shards
        self.spec = spec
        self.names: set[str] = set()
        first = layers[0].experts
        self.inner = int(first.intermediate_dim)
        self.hidden = int(first.hidden_dim)
        self._reads: dict[int, tuple[Read, ...]] = {}
        dtypes = set()
        for layer in layers:
            for expert in range(spec.num_experts_L[layer.index]):
                parts = self._find(layer, expert)
                dtypes |= {part.dtype for part, _ in parts}
                self._reads[spec.expert_key(layer.index, expert)] = _coalesce(parts)
        if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
            raise MismatchError(
                f"experts are stored as {', '.join(sorted(dtypes))}, expected one of {', '.join(_DTYPES)}"
            )
        self.dtype = _DTYPES[dtypes.pop()]
        self.slot_bytes = 3 * self.inner * self.hidden * self.dtype.itemsize

    def read_into(self, key: int, slot: torch.Tensor) -> None:
        """Fill a slot (uint8 [slot_bytes]) with the expert `key`.

        Raises:
            OSError: the disk failed.
        """
        for read in self._reads[key]:
            data = torch.frombuffer(self.shards.read(read.file, read.offset, read.num_bytes), dtype=torch.uint8)
            for source, target, num_bytes in read.pieces:
                slot[target : target + num_bytes].copy_(data[source : source + num_bytes])

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(gate_up [2I, D], down [D, I]) over a slot's bytes."""
        split = 2 * self.inner * self.hidden * self.dtype.itemsize
        gate_up = slot[:split].view(self.dtype).view(2 * self.inner, self.hidden)
        down = slot[split : self.slot_bytes].view(self.dtype).view(self.hidden, self.inner)
        return gate_up, down

    def _find(self, layer: MoeLayer, expert: int) -> list[tuple[Tensor, int]]:
        """The expert's tensors (or parts of stacked ones) with their place in the slot, gate, up, down."""
        tensors = self.shards.tensors
        inner, hidden = self.inner, self.hidden
        stacked = [f"{layer.path}.gate_up_proj", f"{layer.path}.down_proj"]
        if stacked[0] in tensors:
            parts, target = [], 0
            for name, shape in zip(stacked, [(2 * inner, hidden), (hidden, inner)], strict=True):
                tensor = self._take(name, (self.spec.num_experts_L[layer.index], *shape))
                size = tensor.num_bytes // tensor.shape[0]
                parts.append((Tensor(tensor.file, tensor.offset + expert * size, size, shape, tensor.dtype), target))
                target += size
            return parts
        # Mixtral's files keep the block's old name.
        roots = (layer.path, re.sub(r"\.mlp\.experts$", ".block_sparse_moe.experts", layer.path))
        for root in roots:
            for names in self._NAMES:
                if f"{root}.{expert}.{names[0]}.weight" in tensors:
                    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
                    parts, target = [], 0
                    for name, shape in zip(names, shapes, strict=True):
                        tensor = self._take(f"{root}.{expert}.{name}.weight", shape)
                        parts.append((tensor, target))
                        target += tensor.num_bytes
                    return parts
        raise MismatchError(
            f"expert {expert} of layer {layer.layer_id} is not in the weight files in a layout that moetool knows: "
            f"expected {layer.path}.{expert}.gate_proj.weight or {stacked[0]}"
        )

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.shards.tensors.get(name)
        if tensor is None:
            raise MismatchError(f"{name} is missing from the weight files; download the model again")
        if tensor.shape != shape:
            raise MismatchError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)} by the config")
        self.names.add(name)
        return tensor


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
