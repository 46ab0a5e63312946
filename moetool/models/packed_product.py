"""Products with weights of four bits that stay packed, by the kernel that torch has for processors.

The kernel wants the same bytes in an order of its own: tiles of rows, in each of them column after column, and in a
byte two rows that lie half a tile apart. Weights are put into it once, as they are read, and in place.

It multiplies values with scales in float32 and adds in float32, so that no weight is rounded to bfloat16 on the way, as
it is where a weight is unpacked. The two products differ by that, and by the order of their sums.
"""

import functools

import torch

FEW_ROWS = 64
"""Tokens up to which the kernel is faster than unpacking and a dense product."""
_GROUPS = (32, 64, 128, 256)  # inputs that may share a scale
_TILES = (64, 32)  # rows of a tile: four vectors of float32, by AVX-512 and by AVX2
CHUNK_BYTES = 2**19  # that are put in order at a time, so that they stay in the processor's cache


@functools.cache
def tile_rows() -> int:
    """Rows of a tile on this processor, found by comparing with torch's own; 0 where they are laid out otherwise."""
    values_OI = torch.randint(0, 16, (2 * _TILES[0], 32), generator=torch.Generator().manual_seed(0))
    words = (values_OI[:, ::2] | values_OI[:, 1::2] << 4).to(torch.uint8)
    scale_OG = torch.ones(len(values_OI), 1, dtype=torch.bfloat16)
    try:
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI.to(torch.int32), 1)
        for tile in _TILES:
            ours = torch.empty_like(words)
            arrange(words, ours, tile)
            if torch.equal(ours.flatten(), theirs.flatten()):
                made = product(torch.eye(32, dtype=torch.bfloat16), ours.view(torch.int32), scale_OG)
                return tile if torch.equal(made.T, values_OI.to(made.dtype) - 8) else 0
    except (AttributeError, RuntimeError):  # NotImplementedError is one: another processor, or another torch
        return 0
    return 0


def multiplies(rows: int, columns: int, groups: int, scale_dtype: torch.dtype) -> bool:
    """Whether the kernel takes a symmetric weight [rows, columns] with so many scales a row."""
    tile = tile_rows()
    fits = tile > 0 and rows % tile == 0 and columns % groups == 0 and columns // groups in _GROUPS
    return fits and scale_dtype == torch.bfloat16


def arrange(packed: torch.Tensor, out: torch.Tensor, tile: int) -> None:
    """Put the bytes [O, I / 2] of a packed weight into the kernel's order.

    Effects: overwrites `out`, as many bytes in any shape; not the memory of `packed`.
    """
    pairs = packed.unflatten(0, (-1, 2, tile // 2))
    made = out.view(len(pairs), pairs.shape[-1], 2, tile // 2)  # tile, byte, its half, row
    for part in _parts(pairs):
        first, second = pairs[part].unbind(1)
        made[part, :, 0] = ((first & 15) | (second << 4)).transpose(1, 2)
        made[part, :, 1] = ((first >> 4) | (second & 0xF0)).transpose(1, 2)


def restore(words: torch.Tensor, rows: int, tile: int) -> torch.Tensor:
    """The bytes uint8 [O, I / 2] of a packed weight of so many rows, from its words in the kernel's order."""
    made = words.view(torch.uint8).view(rows // tile, -1, 2, tile // 2)
    pairs = torch.empty(len(made), 2, tile // 2, made.shape[1], dtype=torch.uint8)
    for part in _parts(pairs):
        even, odd = (half.transpose(1, 2).contiguous() for half in made[part].unbind(2))
        pairs[part, 0] = (even & 15) | (odd << 4)
        pairs[part, 1] = (even >> 4) | (odd & 0xF0)
    return pairs.view(rows, -1)


def product(x: torch.Tensor, words: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """x [T, I] in bfloat16 times the transpose of a weight whose words [O, I / 8] are in the kernel's order."""
    scale_and_offset = scale_OG.new_zeros(scale_OG.shape[1], len(scale_OG), 2)
    scale_and_offset[..., 0] = scale_OG.T
    packed = words.view(torch.uint8)
    group = x.shape[1] // scale_OG.shape[1]
    made: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, scale_and_offset)
    return made


def _parts(pairs: torch.Tensor) -> list[slice]:
    step = max(1, CHUNK_BYTES // pairs[0].numel())
    return [slice(first, first + step) for first in range(0, len(pairs), step)]
