"""Packed weights in the slots of a pool, as a kernel reads them that multiplies without unpacking."""

from dataclasses import dataclass
from enum import IntEnum, auto

import torch

WIDEST = 512
"""Inputs per kernel step; larger groups are multiples of it."""


class Values(IntEnum):
    """Encodings of values in bytes."""

    E4M3 = auto()  # float8 of a byte
    INT8 = auto()  # two's complement
    BIASED8 = auto()  # minus 128
    E2M1 = auto()  # two 4-bit floats, the first in the lower half
    BIASED4 = auto()  # two 4-bit integers, minus 8


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One part of the experts in all slots of a pool: a weight [O, I] per slot, values times group scales.

    Attributes:
        values_SB: bytes of the values, from the first byte in a slot; slots are one stride apart.
        scale_SG: the scales likewise, uint8 for exponents of two with a bias of 127.
        values: encoding of the bytes.
        rounded: type that a weight is rounded to before the type of the inputs.
        shape: slots, O, I.
        row_bytes: bytes of an output's values.
        block: outputs and inputs that share a scale.
    """

    values_SB: torch.Tensor
    scale_SG: torch.Tensor
    values: Values
    rounded: torch.dtype
    shape: tuple[int, int, int]
    row_bytes: int
    block: tuple[int, int]

    @property
    def groups(self) -> int:
        """Scales of a row of blocks."""
        return -(-self.shape[2] // self.block[1])
