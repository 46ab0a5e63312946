"""Products with packed 4-bit weights, by torch's CPU kernel.

The kernel reads the same bytes in its own order: tiles of rows, column after column within a tile, and two rows half a
tile apart in each byte. Weights are reordered once, in place, when they are read.

It multiplies values by scales and sums in float32, so that no weight is rounded to bfloat16, unlike an unpacked weight.
Instead scales, and zero points times scales, are rounded to bfloat16. Both ways have bfloat16's error
(`tests/unit/kernels/cpu/test_int4.py`).
"""

import functools
from typing import NamedTuple

import torch

from moetool.kernels.cpu import many_rows
from moetool.kernels.unpacking import unpack_pairs, write_dense

FEW_ROWS = 128
"""Most tokens for which the kernel is faster than unpacking and a dense product."""
_GROUPS = (32, 64, 128, 256)  # supported group sizes
_TILES = (64, 32)  # rows of a tile: four vectors of float32, by AVX-512 and by AVX2
_LOWER = 0x0F0F0F0F  # the lower half of each byte of a word
CHUNK_BYTES = 2**19  # reordered at a time, so that they stay in the CPU cache


@functools.cache
def tile_rows() -> int:
    """Rows of a tile on this CPU, found by comparison with torch's own packing; 0 if its layout is unknown."""
    values_OI = torch.randint(0, 16, (2 * _TILES[0], 32), generator=torch.Generator().manual_seed(0))
    words = (values_OI[:, ::2] | values_OI[:, 1::2] << 4).to(torch.uint8)
    scale_OG = torch.ones(len(values_OI), 1, dtype=torch.bfloat16)
    try:
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI.to(torch.int32), 1)
        for tile in _TILES:
            ours = torch.empty_like(words)
            arrange(words, ours, tile)
            if torch.equal(ours.flatten(), theirs.flatten()):
                made = product(torch.eye(32, dtype=torch.bfloat16), ours.view(torch.int32), pairs(scale_OG, None))
                return tile if torch.equal(made.T, values_OI.to(made.dtype) - 8) else 0
    except (AttributeError, RuntimeError):  # includes NotImplementedError: another CPU or torch version
        return 0
    return 0


def multiplies(rows: int, columns: int, groups: int) -> bool:
    """Whether the kernel supports a weight [rows, columns] with this number of scales per row."""
    tile = tile_rows()
    return tile > 0 and rows % tile == 0 and columns % groups == 0 and columns // groups in _GROUPS


def arrange(packed: torch.Tensor, out: torch.Tensor, tile: int) -> None:
    """Reorder the bytes [O, I / 2] of a packed weight for the kernel.

    Effects: overwrites `out`, as many bytes in any shape; not the memory of `packed`.
    """
    pairs = packed.unflatten(0, (-1, 2, tile // 2))
    made = out.view(len(pairs), pairs.shape[-1], 2, tile // 2)  # tile, byte, its half, row
    for part in _parts(pairs):
        first, second = pairs[part].unbind(1)
        made[part, :, 0] = ((first & 15) | (second << 4)).transpose(1, 2)
        made[part, :, 1] = ((first >> 4) | (second & 0xF0)).transpose(1, 2)


def restore(words: torch.Tensor, rows: int, tile: int) -> torch.Tensor:
    """Restore the bytes uint8 [O, I / 2] of a packed weight from its words in the kernel's order."""
    made = words.view(torch.uint8).view(rows // tile, -1, 2, tile // 2)
    pairs = torch.empty(len(made), 2, tile // 2, made.shape[1], dtype=torch.uint8)
    for part in _parts(pairs):
        even, odd = (half.transpose(1, 2).contiguous() for half in made[part].unbind(2))
        pairs[part, 0] = (even & 15) | (odd << 4)
        pairs[part, 1] = (even >> 4) | (odd & 0xF0)
    return pairs.view(rows, -1)


def pairs(scale_OG: torch.Tensor, zero_OG: torch.Tensor | None) -> torch.Tensor:
    """The kernel's constants per group, bfloat16 [G, O, 2]: the scale, and the weight of the value 8.

    Args:
        zero_OG: the zero points; None: 8.
    """
    made = torch.zeros(scale_OG.shape[1], len(scale_OG), 2, dtype=torch.bfloat16)
    made[..., 0] = scale_OG.T
    if zero_OG is not None:
        made[..., 1] = ((8 - zero_OG.to(torch.float32)) * scale_OG).T
    return made


def product(x: torch.Tensor, words: torch.Tensor, pairs_GO2: torch.Tensor) -> torch.Tensor:
    """x [T, I] in bfloat16 times the transpose of a weight whose words [O, I / 8] are in the kernel's order."""
    packed, group = words.view(torch.uint8), x.shape[1] // len(pairs_GO2)
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, pairs_GO2)


def paired_bytes(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The kernel's bytes of two rows, from words that hold eight values of one row each.

    Args:
        first, second: int32 [..., M].

    Returns:
        uint8 [..., M, 4, 2]: each byte of a word of `first` and `second`, by its lower halves, then its upper halves.
    """
    halves = (first & _LOWER) | ((second & _LOWER) << 4), ((first >> 4) & _LOWER) | (second & ~_LOWER)
    return torch.stack([half.contiguous().view(torch.uint8).unflatten(-1, (-1, 4)) for half in halves], dim=-1)


class Grouping(NamedTuple):
    """Scales and zero points of a 4-bit weight [O, I], whose values are 0 to 15.

    Attributes:
        scale_OG: scale of each group of inputs.
        zero_OG: the zero points, [O, G]; None: 8.
        order_I: the inputs sorted by group, if groups are not consecutive.
    """

    scale_OG: torch.Tensor
    zero_OG: torch.Tensor | None
    order_I: torch.Tensor | None


class KernelBlock(NamedTuple):
    """A weight [O, I] in the kernel's form, with the data to restore it.

    Attributes:
        words: int32 [O, I / 8] in the kernel's order.
        pairs_GO2: result of `pairs`.
        scale: [O, G] if it is not bfloat16.
        zero: uint8 [O, G] if it is not 8.
        order: order of the words' inputs (`Grouping.order_I`).
        tile: rows of a tile.
    """

    words: torch.Tensor
    pairs_GO2: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    order: torch.Tensor | None
    tile: int

    @property
    def columns(self) -> int:
        return self.words.shape[1] * 8

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] with its columns in the order of the words."""
        return x if self.order is None else x.index_select(1, self.order)

    def into(self, out: torch.Tensor) -> None:
        """Write the weight to `out`, with inputs in the order of the words, rounded to the type of its scales."""

        def values(part: slice) -> torch.Tensor:
            words = self.words[part]
            return unpack_pairs(restore(words, len(words), self.tile))

        scale = self.pairs_GO2[..., 0].T.contiguous() if self.scale is None else self.scale
        zero = None if self.zero is None else (self.zero - 8).view(torch.int8)
        write_dense(out, values, scale, zero, multiple=self.tile)


class KernelWeight(NamedTuple):
    """A 4-bit weight in the kernel's order: concatenated blocks."""

    blocks: tuple[KernelBlock, ...]

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [O, I]."""
        made = []
        for block in self.blocks:
            dense = self._dense(block, dtype)
            made.append(dense if block.order is None else dense.index_select(1, block.order.argsort()))
        return made[0] if len(made) == 1 else torch.cat(made)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, I] times the transposed weight, in the type of `x`.

        For few tokens in bfloat16 it stays packed. Only their number and type decide this, so that equal tokens give
        bit-identical products.
        """
        few = x.dtype == torch.bfloat16 and len(x) <= FEW_ROWS
        made = [
            product(block.ordered(x), block.words, block.pairs_GO2)
            if few
            else many_rows.linear(block.ordered(x), self._dense(block, x.dtype))
            for block in self.blocks
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=1)

    @staticmethod
    def _dense(block: KernelBlock, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(block.words), block.columns, dtype=dtype)
        block.into(out)
        return out


def _parts(pairs: torch.Tensor) -> list[slice]:
    step = max(1, CHUNK_BYTES // pairs[0].numel())
    return [slice(first, first + step) for first in range(0, len(pairs), step)]
