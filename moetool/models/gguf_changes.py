"""Inverse of the tensor changes of llama.cpp's converter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Joining(Protocol):
    """Makes a weight of several tensors."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the weight, of those of the tensors."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def _only(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    (tensor,) = parts.values()
    return tensor


@dataclass(frozen=True, slots=True)
class Halves:
    """llama.cpp lets the two numbers that are rotated together lie side by side; transformers half a head apart."""

    heads: int

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = _only(parts)
        return tensor.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class LessOne:
    """Norms are stored with the one that the model adds to them."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _only(parts) - 1


@dataclass(frozen=True, slots=True)
class Latent:
    """The keys' and the values' share of one projection [heads * (keys + values), rank], stored apart: keys [heads,
    rank, keys], values [heads, values, rank].
    """

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        keys, values = shapes
        return (keys[0] * (keys[2] + values[1]), keys[1])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        keys, values = parts.values()
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Heads of values, stored with those of one group of keys apart, put side by side.

    Attributes:
        keys, each: heads of keys, and of values for each.
        first: rows before the first value.
        inputs: whether values are the columns.
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
class Interwoven:
    """Queries, keys, values and gates [heads * width, inputs], stored as all queries, all keys and all values, and all
    gates, of so many heads of keys.
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
    """Stored is -exp(x)."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (-_only(parts)).log()
