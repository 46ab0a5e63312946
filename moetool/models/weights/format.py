"""Contract of weight formats: the stored tensors of a weight, their bytes, and how to unpack them.

Each format is a module of this package. A format recognizes its weights by tensor names, takes its parameters from the
checkpoint's config and checks the tensors against them. It returns a `StoredWeight` with the name and shape of an
unquantized checkpoint, so that the rest of the package is independent of formats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from moetool.base.errors import MismatchError
from moetool.models.files.tensor_index import FLOATS, Tensor

STORED_DTYPES = FLOATS | {
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""Data types of safetensors files as torch types."""


Stored = Mapping[str, torch.Tensor]
"""Tensors of a weight, by role."""


class Codec(Protocol):
    """Codec from stored tensors to a weight. Equal codecs unpack identically.

    Attributes:
        transposed: whether the weight is [in, out] and `into` writes its transpose, for a faster product.
    """

    @property
    def transposed(self) -> bool: ...

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        """Write the weight [out, in] to `out`, which is contiguous.

        It is rounded like the format's own library, then to the type of `out`.

        Args:
            stored: tensors by role.
        """


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight stored unpacked."""

    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        out.copy_(stored["weight"])


@dataclass(frozen=True, slots=True)
class DenseTransposed:
    """Plain numbers of a weight [out, in] that are stored [in, out]."""

    transposed: bool = True

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        out.copy_(stored["transposed"])


def unpack(codec: Codec, stored: Stored, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Unpack stored tensors to their weight.

    Args:
        shape: shape of the weight.
    """
    first = {tensor.shape[:1] for tensor in stored.values()}
    stacked = len(shape) > 2 and any(tensor.dim() >= len(shape) for tensor in stored.values())
    if stacked and first == {tuple(shape[:1])} and not isinstance(codec, Dense):
        shares = zip(*(tensor.unbind() for tensor in stored.values()), strict=True)
        return torch.stack([unpack(codec, dict(zip(stored, s, strict=True)), shape[1:], dtype) for s in shares])
    natural = tuple(shape[::-1]) if codec.transposed else tuple(shape)
    out = torch.empty(natural, dtype=dtype, device=next(iter(stored.values())).device)
    codec.into(stored, out)
    return out.T if codec.transposed else out


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight and its stored tensors.

    Attributes:
        name: name of the weight in an unquantized checkpoint.
        tensors: tensors by role.
        codec: makes the weight from them.
        share_codec: makes a share from its part of them, if not `codec`.
    """

    name: str
    shape: tuple[int, ...]
    tensors: Mapping[str, Tensor]
    codec: Codec
    format: str
    share_codec: Codec | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def share(self, index: int, count: int, shape: tuple[int, ...]) -> "StoredWeight":
        """Return one of `count` equal shares of a stacked weight, each of this shape.

        Raises:
            ValueError: a tensor cannot be split so.
        """
        cut = {role: _cut(tensor, index, count) for role, tensor in self.tensors.items()}
        return replace(self, shape=shape, tensors=cut, codec=self.share_codec or self.codec)


def _cut(tensor: Tensor, index: int, count: int) -> Tensor:
    if not tensor.shape or tensor.shape[0] % count:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} does not hold {count} experts")
    rows, size = tensor.shape[0] // count, tensor.num_bytes // count
    shape = tensor.shape[1:] if rows == 1 else (rows, *tensor.shape[1:])
    return tensor._replace(offset=tensor.offset + index * size, num_bytes=size, shape=shape)


def as_dense(name: str, tensor: Tensor) -> StoredWeight:
    """Return a tensor that is the weight itself."""
    return StoredWeight(name=name, shape=tensor.shape, tensors={"weight": tensor}, codec=Dense(), format="dense")


class WeightFormat(Protocol):
    """A weight format with the parameters that a config gives.

    Attributes:
        name: name of the format in tables.
    """

    @property
    def name(self) -> str: ...

    def weight_of(self, tensor: str) -> str | None:
        """Name of the weight that a tensor's name identifies; None if it identifies none."""

    def claim(self, weight: str, unclaimed: "UnclaimedTensors") -> StoredWeight | None:
        """Claim the tensors of a weight; None if they belong to another format.

        Raises:
            MismatchError: one is missing, or they contradict one another or the config.
        """

    def stored_bytes(self, rows: int, columns: int, number_bytes: int) -> int:
        """Bytes of a stored matrix [rows, columns], scales included.

        Args:
            number_bytes: bytes per number of the model's data type, for scales without a fixed type.
        """


class UnclaimedTensors:
    """Tensors of a checkpoint that no weight has claimed yet.

    Args:
        tensors: tensors by name; claimed ones are removed.
        files: the files that `Tensor.file` indexes.
        read: returns the bytes of a small tensor.
    """

    def __init__(self, tensors: dict[str, Tensor], files: Sequence[Path], read: Callable[[Tensor], bytes]) -> None:
        self._tensors = tensors
        self._files = files
        self._read = read

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tensors))

    def get(self, name: str) -> Tensor | None:
        """Return a tensor without claiming it."""
        return self._tensors.get(name)

    def take(self, name: str) -> Tensor | None:
        """A tensor, claimed."""
        return self._tensors.pop(name, None)

    def need(self, name: str, sibling: Tensor, what: str) -> Tensor:
        """Claim a tensor. Raises: MismatchError: it is missing.

        Args:
            sibling: another tensor of the same weight.
            what: description of the tensor, for the error.
        """
        tensor = self.take(name)
        if tensor is None:
            raise MismatchError(
                f"{self._files[sibling.file]}: {name}, {what} of a weight, is missing; download the model again"
            )
        return tensor

    def integers(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        """Return the values of a small integer tensor."""
        self.require_dtype(name, tensor, "I64", "I32")
        size = {"I64": 8, "I32": 4}[tensor.dtype]
        data = self._read(tensor)
        return tuple(int.from_bytes(data[i : i + size], "little", signed=True) for i in range(0, len(data), size))

    def error(self, name: str, tensor: Tensor, problem: str) -> MismatchError:
        """Error for a wrong tensor, with file, name, found and expected value."""
        return MismatchError(f"{self._files[tensor.file]}: {name} {problem}; download the model again")

    def require_dtype(self, name: str, tensor: Tensor, *dtypes: str) -> None:
        """Raises: MismatchError: a tensor has none of these data types."""
        if tensor.dtype not in dtypes:
            raise self.error(name, tensor, f"is stored as {tensor.dtype}, expected {' or '.join(dtypes)}")

    def require_shape(self, name: str, tensor: Tensor, expected: Sequence[int], why: str) -> None:
        """Raises: MismatchError: a tensor has another shape.

        Args:
            why: reason for the expected shape, for the error.
        """
        if tuple(tensor.shape) != tuple(expected):
            raise self.error(name, tensor, f"has shape {list(tensor.shape)}, expected {list(map(int, expected))} {why}")


def packed_weight_of(tensor: str) -> str | None:
    """Return the weight of a tensor of GPTQ or AWQ; None for other tensors."""
    for suffix in (".qweight", ".qzeros"):
        if tensor.endswith(suffix):
            return tensor.removesuffix(suffix) + ".weight"
    return None


def claim_packed(
    stem: str, unclaimed: UnclaimedTensors, group: int, bits: int = 32
) -> tuple[dict[str, Tensor], int, int]:
    """Claim values, zero points and scales of a weight of GPTQ or AWQ.

    Args:
        stem: the weight's name without `weight`.
        group: the config's group_size; -1: all inputs.
        bits: bits of an input in a column of `qweight`; 32: a row per input.

    Returns:
        The tensors `values`, `zero` and `scale`, the number of inputs, and the inputs of a group.

    Raises:
        MismatchError: a tensor is missing or has another data type, or groups do not divide the inputs.
    """
    values_name, zero_name, scale_name = (stem + part for part in ("qweight", "qzeros", "scales"))
    either = unclaimed.get(values_name) or unclaimed.get(zero_name)
    assert either is not None
    values = unclaimed.need(values_name, either, "the values")
    zero = unclaimed.need(zero_name, either, "the zero points")
    scale = unclaimed.need(scale_name, either, "the scales")
    unclaimed.require_dtype(values_name, values, "I32")
    unclaimed.require_dtype(zero_name, zero, "I32")
    unclaimed.require_dtype(scale_name, scale, *FLOATS)
    if len(values.shape) != 2:
        raise unclaimed.error(values_name, values, f"has shape {list(values.shape)}, expected a matrix")
    columns = values.shape[0] * 32 // bits
    group = columns if group == -1 else group
    if columns % group:
        raise unclaimed.error(
            values_name, values, f"holds {columns} inputs, expected a multiple of the config's group_size {group}"
        )
    return {"values": values, "zero": zero, "scale": scale}, columns, group


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
