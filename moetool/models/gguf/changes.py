"""Inverse of the tensor changes of llama.cpp's converter."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class TensorJoin(Protocol):
    """Makes a weight from several tensors."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the weight, from the tensors' shapes."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def _only(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    (tensor,) = parts.values()
    return tensor


@dataclass(frozen=True, slots=True)
class RotaryHalves:
    """Move two outputs that rotate together half a head apart; llama.cpp stores them side by side.

    Attributes:
        heads: attention heads of the projection.
    """

    heads: int

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = _only(parts)
        return tensor.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class MinusOne:
    """Subtract the 1 that stored norms include and the model adds."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _only(parts) - 1


@dataclass(frozen=True, slots=True)
class Concatenated:
    """Join the rows of tensors."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts.values()))


@dataclass(frozen=True, slots=True)
class Convolutions:
    """Join the channels of convolutions, each [1, channels, 1, width]; quantizers omit the first dimension."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        return (sum(math.prod(shape[:-1]) for shape in shapes), 1, shapes[0][-1])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.flatten(0, -2) for part in parts.values()])


@dataclass(frozen=True, slots=True)
class FlatExperts:
    """Put the matrices of all experts below each other.

    Attributes:
        transposed: whether the model has them transposed.
    """

    transposed: bool

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        ((experts, rows, columns),) = shapes
        return (experts * columns, rows) if self.transposed else (experts * rows, columns)

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        matrices = _only(parts)
        return (matrices.mT if self.transposed else matrices).flatten(0, -2)


@dataclass(frozen=True, slots=True)
class Latent:
    """Join keys [heads, rank, keys] and values [heads, values, rank] to [heads * (keys + values), rank]."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        keys, values = shapes
        return (keys[0] * (keys[2] + values[1]), keys[1])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        keys, values = parts.values()
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Restore the order of value heads: those of one key head follow each other.

    Attributes:
        keys, each: key heads, and value heads of each.
        first: rows before the first value head.
        inputs: whether value heads are columns.
        logarithm: whether the tensor holds -exp(x).
    """

    keys: int
    each: int
    first: int = 0
    inputs: bool = False
    logarithm: bool = False

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = _only(parts)
        if self.inputs:
            return self._sorted(tensor.T).T.contiguous()
        made = torch.cat([tensor[: self.first], self._sorted(tensor[self.first :])])
        return (-made).log() if self.logarithm else made

    def _sorted(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (self.each, self.keys, -1)).transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Join queries, keys, values and gates, head by head; stored are all queries, all keys, all values and all gates.

    Attributes:
        keys: key heads.
        width: rows of a key head.
    """

    keys: int
    width: int

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        stored, gates = shapes
        return (stored[0] + gates[0], stored[1])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        stored, gates = parts.values()
        sizes = [self.width * self.keys] * 2 + [len(stored) - 2 * self.width * self.keys]
        blocks = [block.unflatten(0, (self.keys, -1)) for block in (*stored.split(sizes), gates)]
        return torch.cat(blocks, dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Logarithm:
    """Restore x from a tensor that stores -exp(x)."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (-_only(parts)).log()
