"""Embeddings that stay in the weight files: a token needs a few rows.

Sources: the input embedding of any model, and tables of n-grams (Qwen4-Exp), which may be split into many tensors.
"""

import os
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from moetool.base.errors import MismatchError
from moetool.models.conversion import TensorSource
from moetool.models.files.file_changes import FileChanges
from moetool.models.files.tensor_index import FLOATS, Tensor
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.transformers_internals import weight_loading
from moetool.models.weight_index import WeightIndex
from moetool.models.weights.format import STORED_DTYPES, Codec, Dense, StoredWeight, unpack
from moetool.models.weights.fp8_block import Fp8BlockCodec
from moetool.models.weights.scaled import ScaledCodec

_CPU = torch.device("cpu")
LEAST_BYTES = 64 << 20
"""Smallest embedding, in bytes, for which reading rows from disk is worth the delay."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """How to read rows of a stored weight.

    Attributes:
        first: number of its first row in the embedding.
        count: number of its rows.
        tensors: its tensors by role.
        shared: rows of the weight that share a row of a tensor, by role; 0: all share the whole tensor.
        codec: unpacks any of its rows.
    """

    first: int
    count: int
    tensors: Mapping[str, Tensor]
    shared: Mapping[str, int]
    codec: Codec

    def ranges(self, role: str, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Offset and bytes of what these rows need of a tensor."""
        tensor, shared = self.tensors[role], self.shared[role]
        if not shared:
            return [(tensor.offset, tensor.num_bytes)]
        size = tensor.num_bytes // tensor.shape[0]
        return [(tensor.offset + row // shared * size, size) for row in rows]


class StoredEmbedding(nn.Module):
    """Embedding [V, H] whose rows are read from the weight files when tokens need them.

    Reads go through the page cache, which keeps the rows of frequent tokens while memory allows. To a GPU rows go
    through pinned memory.

    Args:
        weights: index of the checkpoint.
        names: weights in it whose rows follow each other in the embedding; `readable_rows` must hold.
        dtype: type of the rows that `forward` returns. Values are converted as if they were loaded.
        on_change: called before the error when a forward finds that a file was written to.

    Effects: keeps the files of these weights open while the module lives.

    Raises:
        OSError: a file cannot be opened.
        MismatchError: one has changed since its header was read.
    """

    def __init__(
        self,
        weights: WeightIndex,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device = _CPU,
        on_change: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__()
        self._parts: list[_Rows] = []
        self.num_embeddings, self.embedding_dim = 0, weights.weights[names[0]].shape[1]
        for name in names:
            part = _rows_of(weights.weights[name], self.num_embeddings)
            assert part is not None, name
            self._parts.append(part)
            self.num_embeddings += part.count
        # A model's device and type are those of its first parameter, often this one.
        empty = torch.empty(0, self.embedding_dim, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._pinned = device.type == "cuda"
        self._on_change = on_change
        used = sorted({tensor.file for part in self._parts for tensor in part.tensors.values()})
        self._paths = [weights.files[file] for file in used]
        self._number_of = {file: number for number, file in enumerate(used)}
        self._files: list[int] = []
        for path in self._paths:
            self._files.append(os.open(path, os.O_RDONLY))
            weakref.finalize(self, os.close, self._files[-1])
        self._changes = FileChanges(self._paths, [weights.stamps[file] for file in used], self._files)
        weakref.finalize(self, self._changes.close)
        if why := self._changes.opening:
            raise MismatchError(f"{why}; try again")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of token ids [...].

        Raises:
            IndexError: an id is outside the vocabulary.
            OSError: a file cannot be read, or was written to.
        """
        ids, inverse = torch.unique(tokens.cpu(), return_inverse=True)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.num_embeddings:
            raise IndexError(f"token ids {int(ids[0])} to {int(ids[-1])}, expected 0 to {self.num_embeddings - 1}")
        rows = torch.empty(len(ids), self.embedding_dim, dtype=self.weight.dtype, pin_memory=self._pinned)
        wanted = self._by_part(ids.tolist())
        if len(ids) > 1:
            for _, part, numbers in wanted:  # start all reads before waiting for the first
                for role, tensor in part.tensors.items():
                    for offset, size in part.ranges(role, numbers):
                        os.posix_fadvise(self._file(tensor), offset, size, os.POSIX_FADV_WILLNEED)
        for begin, part, numbers in wanted:
            rows[begin : begin + len(numbers)] = self._read(part, numbers)
        for file in {self._number_of[tensor.file] for _, part, _ in wanted for tensor in part.tensors.values()}:
            if why := self._changes.of_file(file):
                self._on_change(why)
                raise OSError(why)
        return rows.to(tokens.device, non_blocking=True)[inverse.to(tokens.device)]

    def placeholder(self, tokens: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape that `forward` returns."""
        return torch.zeros(*tokens.shape, self.embedding_dim, dtype=self.weight.dtype, device=tokens.device)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self._paths[0].name}"

    def _by_part(self, ids: list[int]) -> list[tuple[int, _Rows, list[int]]]:
        """Split sorted ids by the weight that holds them: position of the first, weight, and numbers in it."""
        found, begin = [], 0
        for part in self._parts:
            end = bisect_left(ids, part.first + part.count, begin)
            if end > begin:
                found.append((begin, part, [row - part.first for row in ids[begin:end]]))
            begin = end
        return found

    def _read(self, part: _Rows, numbers: list[int]) -> torch.Tensor:
        """Rows of one weight by their numbers in it."""
        stored = {}
        for role, tensor in part.tensors.items():
            ranges = part.ranges(role, numbers)
            data = bytearray(sum(size for _, size in ranges))
            view, done = memoryview(data), 0
            for offset, size in ranges:
                self._fill(view[done : done + size], tensor, offset)
                done += size
            made = torch.frombuffer(data, dtype=STORED_DTYPES[tensor.dtype])
            stored[role] = made.view(len(numbers), -1) if part.shared[role] else made.view(tensor.shape)
        return unpack(part.codec, stored, (len(numbers), self.embedding_dim), self.weight.dtype)

    def _fill(self, out: memoryview, tensor: Tensor, offset: int) -> None:
        done = 0
        while done < len(out):
            got = os.preadv(self._file(tensor), [out[done:]], offset + done)
            if got == 0:
                path = self._paths[self._number_of[tensor.file]]
                raise OSError(f"{path.name} ends at byte {offset + done:,}, expected {offset + len(out):,}")
            done += got

    def _file(self, tensor: Tensor) -> int:
        return self._files[self._number_of[tensor.file]]


def lookup_tables(model: Any) -> dict[str, nn.Embedding]:
    """Embeddings of a model that share their weight with no other module, by name: a token needs rows of them."""
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and uses[id(module.weight)] == 1
    }


def embeddings_to_store(model: Any, dtype: torch.dtype, device: str) -> list[str]:
    """Names of a model's large embeddings of which rows suffice; beside a GPU without the input embedding."""
    if not hasattr(os, "posix_fadvise"):
        return []
    stays = None if device == "cpu" else model.get_input_embeddings()
    return [
        name
        for name, table in lookup_tables(model).items()
        if type(table) is nn.Embedding  # subclasses scale rows or add to them
        and table is not stays
        and table.weight.numel() * dtype.itemsize >= LEAST_BYTES
    ]


def readable_rows(table: nn.Embedding, source: TensorSource, weights: Mapping[str, StoredWeight]) -> list[str]:
    """Weights whose rows are those of an embedding, one after the other; empty if its rows cannot be read alone."""
    names = source.tensor_names
    if len(names) != 1 or source.converter is not None:
        operations: Any = getattr(source.converter, "operations", ())
        joined = len(operations) == 1 and isinstance(operations[0], weight_loading().Concatenate)
        if not joined or operations[0].dim != 0 or len(source.names) != 1:
            return []
    shapes = [weights[name].shape for name in names]
    if any(shape[1:] != (table.embedding_dim,) for shape in shapes):
        return []
    if sum(shape[0] for shape in shapes) != table.num_embeddings:
        return []
    return names if all(_rows_of(weights[name], 0) is not None for name in names) else []


def _rows_of(weight: StoredWeight, first: int) -> _Rows | None:
    """How to read rows of a weight; None if they cannot be read alone."""
    count, codec, tensors = weight.shape[0], weight.codec, weight.tensors
    shared = dict.fromkeys(tensors, 1)
    if isinstance(codec, Fp8BlockCodec | ScaledCodec):
        by_row = isinstance(codec, ScaledCodec) and tensors["scale"].shape[:1] == (count,)
        shared |= dict.fromkeys(tensors.keys() - {"values"}, codec.block[0] if codec.block else int(by_row))
        codec = replace(codec, block=codec.block and (1, codec.block[1]))
        alone = not codec.transposed
    elif isinstance(codec, GgmlCodec):
        alone = len(codec.kinds) == 1 and codec.undo is None and not codec.transposed
    else:
        alone = isinstance(codec, Dense) and tensors["weight"].dtype in FLOATS
    return _Rows(first, count, tensors, shared, codec) if alone else None
