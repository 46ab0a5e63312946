"""Inverse of the tensor changes of llama.cpp's converter."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Joining(Protocol):
    """Makes a weight from several tensors."""

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the weight, from the tensors' shapes."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor: ...


def _only(parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    (tensor,) = parts.values()
    return tensor


@dataclass(frozen=True, slots=True)
class Halves:
    """llama.cpp stores the two numbers that rotate together side by side; transformers, half a head apart."""

    heads: int

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        tensor = _only(parts)
        return tensor.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True, slots=True)
class LessOne:
    """Stored norms include the 1 that the model adds."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _only(parts) - 1


@dataclass(frozen=True, slots=True)
class Latent:
    """Join keys and values of one projection [heads * (keys + values), rank], stored separately: keys [heads, rank,
    keys], values [heads, values, rank].
    """

    def shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        keys, values = shapes
        return (keys[0] * (keys[2] + values[1]), keys[1])

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        keys, values = parts.values()
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Restore the order of value heads, which are stored apart within one group of keys.

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
    """Join queries, keys, values and gates [heads * width, inputs], stored as all queries, all keys, all values and all
    gates, for this number of key heads.
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
    """The tensor stores -exp(x)."""

    def __call__(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (-_only(parts)).log()
