"""Products with packed weights are those of the weights, and their order on the processor can be undone."""

import pytest
import torch
from torch.nn import functional

from moetool.kernels.cpu import int4, many_rows
from moetool.kernels.cpu.int4 import (
    FEW_ROWS,
    KernelBlock,
    KernelWeight,
    arrange,
    multiplies,
    pairs,
    restore,
    tile_rows,
)
from moetool.models.weights.packed import Block, PackedWeight, Rounded, Scheme, pack, round_weight

DRAW = torch.Generator().manual_seed(5)
needs_kernel = pytest.mark.skipif(not tile_rows(), reason="torch has no such kernel for this processor")


def _both(rows: int = 192, columns: int = 128, group: int = 64) -> tuple[PackedWeight, KernelWeight]:
    """A weight in the order of its file and in that of the kernel."""
    rounded = round_weight(torch.randn(rows, columns, generator=DRAW), Scheme(group=group), torch.bfloat16)
    return PackedWeight((Block(pack(rounded.values, 4), rounded.scale, None, columns),), 4), _in_order(rounded)


def _in_order(rounded: Rounded) -> KernelWeight:
    words, tile = pack(rounded.values, 4), tile_rows() or 64
    arranged = torch.empty_like(words)
    arrange(words.view(torch.uint8), arranged.view(torch.uint8), tile)
    zero = None if rounded.zero is None else (rounded.zero + 8).to(torch.uint8)
    scale = None if rounded.scale.dtype == torch.bfloat16 else rounded.scale
    return KernelWeight((KernelBlock(arranged, pairs(rounded.scale, zero), scale, zero, None, tile),))


@pytest.mark.parametrize("tile", [64, 32])
@pytest.mark.parametrize("chunk_bytes", [1, 2**19])
def test_the_order_by_hand(tile: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4, "CHUNK_BYTES", chunk_bytes)
    values_OI = torch.randint(-8, 8, (2 * tile, 16), dtype=torch.int8, generator=DRAW)
    words = pack(values_OI, 4)
    arranged = torch.empty_like(words)
    arrange(words.view(torch.uint8), arranged.view(torch.uint8), tile)
    flat = arranged.view(torch.uint8).flatten().tolist()
    for byte, tile_number, column, row in [(0, 0, 0, 0), (tile // 2 * 5 + 3, 0, 5, 3), (len(flat) - 1, 1, 15, -1)]:
        row = tile_number * tile + row % (tile // 2)
        assert flat[byte] & 15 == values_OI[row, column] + 8
        assert flat[byte] >> 4 == values_OI[row + tile // 2, column] + 8
    assert torch.equal(restore(arranged, 2 * tile, tile), words.view(torch.uint8))


@needs_kernel
def test_the_order_is_torchs_own() -> None:
    values_OI = torch.randint(-8, 8, (192, 64), dtype=torch.int8, generator=DRAW)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values_OI.to(torch.int32) + 8, 1)
    words = pack(values_OI, 4)
    arranged = torch.empty_like(words)
    arrange(words.view(torch.uint8), arranged.view(torch.uint8), tile_rows())
    assert torch.equal(arranged.view(torch.uint8).flatten(), theirs.flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unpacked_it_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    filed, arranged = _both()
    assert torch.equal(arranged.to(dtype), filed.to(dtype))
    for count, kind in ((FEW_ROWS + 1, dtype), (3, torch.float32)):
        x = torch.randn(count, 128, generator=DRAW).to(kind)
        assert torch.equal(arranged.times(x), many_rows.linear(x, filed.to(kind)))


@needs_kernel
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("count", [1, 5, FEW_ROWS])
def test_no_weight_is_rounded_on_the_way(group: int, count: int) -> None:
    """Against values times scales in float64: the rounding of the result to bfloat16 is all that there is."""
    rounded = round_weight(torch.randn(64, 256, generator=DRAW), Scheme(group=group), torch.bfloat16)
    exact = rounded._replace(scale=rounded.scale.double()).dense()
    weight = _in_order(rounded)
    x = torch.randn(count, 256, generator=DRAW).bfloat16()
    found, expected = weight.times(x).double(), functional.linear(x.double(), exact)
    assert ((found - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all()
    assert torch.equal(weight.times(x), weight.times(x.clone()))


@needs_kernel
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_scales_of_float16_come_as_near_as_unpacked_weights(symmetric: bool, group: int, mean: float) -> None:
    """Both ways round to bfloat16, the one scales and the other weights: neither is twice as far off."""
    scheme = Scheme(group=group, symmetric=symmetric)
    rounded = round_weight(torch.randn(256, 2048, generator=DRAW), scheme, torch.float16)
    x = (torch.randn(8, 2048, generator=DRAW) + mean).bfloat16()
    exact = functional.linear(x.double(), rounded.dense().double())
    made = _in_order(rounded)
    assert torch.equal(made.to(torch.float32), rounded.dense().float())
    found, unpacked = made.times(x), functional.linear(x, rounded.dense().bfloat16())
    assert (found.double() - exact).norm() < 1.5 * (unpacked.double() - exact).norm()


@needs_kernel
def test_what_the_kernel_does_not_take_is_unpacked() -> None:
    assert multiplies(128, 256, 2)
    assert not multiplies(120, 256, 2)  # half a tile
    assert not multiplies(128, 256, 16)  # groups of 16
