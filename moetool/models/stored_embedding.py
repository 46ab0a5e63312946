"""Input embeddings that stay in the weight file: a token needs one row."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moetool.base.errors import MismatchError
from moetool.models.conversion import TensorSource
from moetool.models.files.file_changes import FileChanges
from moetool.models.files.tensor_index import FLOATS
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.tied_weights import head_is_tied
from moetool.models.weight_index import WeightIndex
from moetool.models.weights.format import STORED_DTYPES, Dense, StoredWeight, unpack

LEAST_BYTES = 64 << 20
"""Smallest embedding, in bytes, for which reading rows from disk is worth the delay."""


class StoredEmbedding(nn.Module):
    """Embedding [V, H] whose rows are read from a weight file when tokens need them.

    Reads go through the page cache, which keeps the rows of frequent tokens while memory allows.

    Args:
        weights: index of the checkpoint.
        name: the embedding's weight in it; `is_readable` must hold.
        dtype: type of the rows that `forward` returns. Values are converted as if they were loaded.
        on_change: called before the error when a forward finds that the file was written to.

    Effects: keeps one file open while the module lives.

    Raises:
        OSError: the file cannot be opened.
        MismatchError: it has changed since its header was read.
    """

    def __init__(
        self, weights: WeightIndex, name: str, dtype: torch.dtype, on_change: Callable[[str], None] = lambda why: None
    ) -> None:
        super().__init__()
        self._stored = weights.weights[name]
        (self._tensor,) = self._stored.tensors.values()
        self.num_embeddings, self.embedding_dim = self._stored.shape
        # A model's device and type are those of its first parameter, often this one.
        self.weight = nn.Parameter(torch.empty(0, self.embedding_dim, dtype=dtype), requires_grad=False)
        self._row_bytes = self._tensor.num_bytes // self.num_embeddings
        self._path, stamp = weights.files[self._tensor.file], weights.stamps[self._tensor.file]
        self._on_change = on_change
        self._file = os.open(self._path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._changes = FileChanges([self._path], [stamp], [self._file])
        weakref.finalize(self, self._changes.close)
        if why := self._changes.opening:
            raise MismatchError(f"{why}; try again")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of token ids [...].

        Raises:
            IndexError: an id is outside the vocabulary.
            OSError: the file cannot be read, or was written to.
        """
        ids, inverse = torch.unique(tokens, return_inverse=True)
        if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.num_embeddings:
            raise IndexError(f"token ids {int(ids[0])} to {int(ids[-1])}, expected 0 to {self.num_embeddings - 1}")
        offsets = [self._tensor.offset + row * self._row_bytes for row in ids.tolist()]
        data = bytearray(len(offsets) * self._row_bytes)
        if len(offsets) > 1:
            for offset in offsets:  # start all reads before waiting for the first
                os.posix_fadvise(self._file, offset, self._row_bytes, os.POSIX_FADV_WILLNEED)
        view = memoryview(data)
        for number, offset in enumerate(offsets):
            self._read(view[number * self._row_bytes :][: self._row_bytes], offset)
        self._require_unchanged()
        return self._unpacked(data, len(offsets))[inverse]

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self._path.name}"

    def _read(self, out: memoryview, offset: int) -> None:
        done = 0
        while done < len(out):
            got = os.preadv(self._file, [out[done:]], offset + done)
            if got == 0:
                raise OSError(f"{self._path.name} ends at byte {offset + done:,}, expected {offset + len(out):,}")
            done += got

    def _unpacked(self, data: bytearray, rows: int) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self.embedding_dim, dtype=self.weight.dtype)
        (role,) = self._stored.tensors
        stored = torch.frombuffer(data, dtype=STORED_DTYPES[self._tensor.dtype]).view(rows, -1)
        return unpack(self._stored.codec, {role: stored}, (rows, self.embedding_dim), self.weight.dtype)

    def _require_unchanged(self) -> None:
        if why := self._changes.of_file(0):
            self._on_change(why)
            raise OSError(why)


def embedding_to_store(model: Any, dtype: torch.dtype) -> str | None:
    """Name of a model's input embedding if it is large and the model needs only rows of it."""
    embedding = model.get_input_embeddings()
    if type(embedding) is not nn.Embedding or head_is_tied(model):
        return None  # subclasses scale rows or add to them
    if embedding.weight.numel() * dtype.itemsize < LEAST_BYTES or not hasattr(os, "posix_fadvise"):
        return None
    return next(name for name, module in model.named_modules() if module is embedding)


def is_readable(source: TensorSource, weights: dict[str, StoredWeight]) -> bool:
    """Whether rows of a parameter can be read alone: it is one stored tensor of plain numbers or blocks."""
    names = source.tensor_names
    if source.converter is not None or len(names) != 1:
        return False
    weight = weights[names[0]]
    if len(weight.tensors) != 1 or len(weight.shape) != 2:
        return False
    (tensor,) = weight.tensors.values()
    if isinstance(weight.codec, GgmlCodec):
        return len(weight.codec.kinds) == 1 and weight.codec.undo is None and not weight.codec.transposed
    return isinstance(weight.codec, Dense) and tensor.dtype in FLOATS
