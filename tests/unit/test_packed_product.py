"""Products with packed weights are those of the weights, and their order on the processor can be undone."""

import pytest
import torch
from torch.nn import functional

from moetool.models import packed_product
from moetool.models.packed import Block, PackedWeight, Scheme, pack, round_weight
from moetool.models.packed_product import FEW_ROWS, arrange, multiplies, restore, tile_rows

DRAW = torch.Generator().manual_seed(5)
needs_kernel = pytest.mark.skipif(not tile_rows(), reason="torch has no such kernel for this processor")


def _both(rows: int = 192, columns: int = 128, group: int = 64) -> tuple[PackedWeight, PackedWeight]:
    """A weight in the order of its file and in that of the kernel."""
    rounded = round_weight(torch.randn(rows, columns, generator=DRAW), Scheme(group=group), torch.bfloat16)
    words, tile = pack(rounded.values, 4), tile_rows() or 64
    arranged = torch.empty_like(words)
    arrange(words.view(torch.uint8), arranged.view(torch.uint8), tile)
    blocks = (Block(words, rounded.scale, None, columns), Block(arranged, rounded.scale, None, columns, tile))
    first, second = (PackedWeight((block,), 4) for block in blocks)
    return first, second


@pytest.mark.parametrize("tile", [64, 32])
@pytest.mark.parametrize("chunk_bytes", [1, 2**19])
def test_the_order_by_hand(tile: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_product, "CHUNK_BYTES", chunk_bytes)
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
        assert torch.equal(arranged.times(x), functional.linear(x, filed.to(kind)))


@needs_kernel
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("count", [1, 5, FEW_ROWS])
def test_no_weight_is_rounded_on_the_way(group: int, count: int) -> None:
    """Against values times scales in float64: the rounding of the result to bfloat16 is all that there is."""
    rounded = round_weight(torch.randn(64, 256, generator=DRAW), Scheme(group=group), torch.bfloat16)
    exact = rounded._replace(scale=rounded.scale.double()).dense()
    arranged = torch.empty_like(words := pack(rounded.values, 4))
    arrange(words.view(torch.uint8), arranged.view(torch.uint8), tile_rows())
    weight = PackedWeight((Block(arranged, rounded.scale, None, 256, tile_rows()),), 4)
    x = torch.randn(count, 256, generator=DRAW).bfloat16()
    found, expected = weight.times(x).double(), functional.linear(x.double(), exact)
    assert ((found - expected).abs() <= expected.abs() * 2**-8 + 1e-4).all()
    assert torch.equal(weight.times(x), weight.times(x.clone()))


@needs_kernel
def test_what_the_kernel_does_not_take_is_unpacked() -> None:
    assert multiplies(128, 256, 2, torch.bfloat16)
    assert not multiplies(120, 256, 2, torch.bfloat16)  # half a tile
    assert not multiplies(128, 256, 16, torch.bfloat16)  # groups of 16
    assert not multiplies(128, 256, 2, torch.float32)  # scales of a type that no product in bfloat16 has
