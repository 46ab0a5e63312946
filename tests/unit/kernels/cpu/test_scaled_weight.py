"""Weights that stay as they are stored: their products against float64, and unpacked against their formats."""

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from moetool.kernels.cpu import many_rows, scaled_weight, vectors
from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.kinds import BFLOAT16, FP8, INT8, MXFP4, NVFP4, NVFP4_DIVIDED, RowKind
from moetool.kernels.cpu.matmul import MAX_SCALED_ROWS, RowsOf, max_rows, products, scattered_products
from moetool.kernels.cpu.scaled_weight import ScaledWeight, multiplies
from moetool.models.weights.format import Codec
from moetool.models.weights.fp8_block import Fp8BlockCodec
from moetool.models.weights.mxfp4 import Mxfp4Codec
from moetool.models.weights.nvfp4 import Nvfp4Codec
from moetool.models.weights.scaled import ScaledCodec
from moetool.models.weights.value_scaling import four_bits

pytestmark = pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")

ROWS = 256
CASES: dict[str, tuple[RowKind, int]] = {
    "fp8 in blocks": (FP8, 128),
    "fp8 by row": (FP8, 384),
    "int8 by row": (INT8, 384),
    "mxfp4": (MXFP4, 32),
    "mxfp4, half a vector": (MXFP4, 32),
    "nvfp4": (NVFP4, 16),
    "nvfp4, divided, half a vector": (NVFP4_DIVIDED, 16),
}


def _made(name: str, seed: int = 0, rows: int = ROWS) -> tuple[ScaledWeight, Mapping[str, torch.Tensor], Codec]:
    """A weight, and the same as its format stores it."""
    kind, group = CASES[name]
    draw = torch.Generator().manual_seed(seed)
    columns = 320 if "half" in name else 384
    if kind is MXFP4:
        values = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
        scale = torch.randint(118, 130, (rows, columns // 32), generator=draw, dtype=torch.uint8)
        scale[3, 1] = 0
        kept = torch.cat([scale.flatten(), torch.zeros(4, dtype=torch.uint8)])
        weight = ScaledWeight(kind, values, kept, columns, group, 1, False)
        return weight, {"values": values, "scale": scale}, Mxfp4Codec(transposed=False)
    if kind.scale == "float8":
        values = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
        scale = torch.randint(0, 256, (rows, columns // 16), generator=draw, dtype=torch.uint8)
        scale = torch.where(scale & 127 == 127, 0, scale)
        whole = torch.tensor([317.3 if kind.divides else 0.00317])
        first = (whole * kind.factor).view(torch.uint8).expand(rows, 4)
        kept = torch.cat([torch.cat([first, scale], dim=1).flatten(), torch.zeros(8, dtype=torch.uint8)])
        weight = ScaledWeight(kind, values, kept, columns, group, 1, False)
        stored = {"values": values, "scale": scale.view(torch.float8_e4m3fn), "whole": whole}
        return weight, stored, Nvfp4Codec(kind.divides)
    values = torch.randint(0, 256, (rows, columns), generator=draw, dtype=torch.uint8)
    if kind is FP8:
        values = torch.where(values & 127 == 127, 0, values)  # no number
    blocks = name.endswith("blocks")
    scale = torch.rand(rows // 128 if blocks else rows, columns // group, generator=draw) * 0.01
    weight = ScaledWeight(kind, values, scale * kind.factor, columns, group, 128 if blocks else 1, False)
    stored = {"values": values.view(torch.float8_e4m3fn if kind is FP8 else torch.int8), "scale": scale}
    return weight, stored, Fp8BlockCodec((128, 128)) if blocks else ScaledCodec(None)


def example_weight(name: str) -> ScaledWeight:
    """A weight of one of `CASES`."""
    return _made(name)[0]


def _dense(name: str, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    weight, stored, codec = _made(name, seed)
    if isinstance(codec, Nvfp4Codec) and dtype == torch.float64:  # its library rounds the weight to bfloat16
        numbers, scale = four_bits(stored["values"], e2m1=True).unflatten(1, (-1, 16)), stored["scale"].float()
        scale = scale / stored["whole"] if codec.divides else scale * stored["whole"]
        return (numbers.double() * scale.double()[..., None]).flatten(1)
    out = torch.empty(weight.shape, dtype=dtype)
    codec.into(stored, out)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("count", [1, 2, 3, MAX_SCALED_ROWS])
def test_no_weight_is_rounded_on_the_way(name: str, count: int) -> None:
    weight = _made(name)[0]
    assert multiplies(weight.kind, weight.columns, weight.group)
    assert max_rows(weight, torch.float32) == MAX_SCALED_ROWS
    x = torch.randn(count, weight.columns, generator=torch.Generator().manual_seed(count))
    exact = x.double() @ _dense(name, torch.float64).T
    (found,) = products([x], [weight])
    assert torch.allclose(found.double(), exact, rtol=0, atol=2e-6 * float(exact.abs().max()))
    (narrow,) = products([x.bfloat16()], [weight])
    exact = x.bfloat16().double() @ _dense(name, torch.float64).T
    assert torch.allclose(narrow.double(), exact, rtol=2**-8, atol=2e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_in_any_company(name: str) -> None:
    weights = [_made(name, seed)[0] for seed in range(3)]
    x = torch.randn(11, weights[0].columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    jobs = [
        RowsOf(weights[0], [0, 1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4, 3]),
        RowsOf(weights[1], [7], [0]),
        RowsOf(weights[2], [9, 10], [1, 2]),
    ]
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(scattered_products(x, jobs, 10))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*made)
    for weight, sources, targets in jobs:
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(products([x[source : source + 1]], [weight])[0][0], made[0][target])


def test_processors_without_a_look_up_make_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _made("mxfp4")[0]
    x = torch.randn(3, weight.columns, generator=torch.Generator().manual_seed(2)).bfloat16()
    made = products([x], [weight])[0], weight.to(torch.bfloat16)
    monkeypatch.setattr(vectors, "has_features", lambda *names: False)
    monkeypatch.setattr(scaled_weight, "find_kernel", cache(find_kernel.__wrapped__))  # beside the compiled ones
    again = products([x], [weight])[0], weight.to(torch.bfloat16)
    assert all(map(torch.equal, made, again))


@pytest.mark.parametrize("name", CASES)
def test_unpacked_it_is_what_its_format_makes(name: str) -> None:
    weight, dense = _made(name)[0], _dense(name, torch.bfloat16)
    assert torch.equal(weight.to(torch.bfloat16), dense)
    x = torch.randn(40, weight.columns).bfloat16()
    assert torch.equal(weight.times(x), many_rows.linear(x, dense))
    assert torch.equal(weight._replace(transposed=True).to(torch.float32), dense.T.float())


@pytest.mark.parametrize("name", ["fp8 by row", "mxfp4", "nvfp4"])
def test_a_large_weight_is_multiplied_as_its_rows_are(name: str) -> None:
    """More numbers than need be unpacked at a time."""
    weight = _made(name, rows=ROWS * 172)[0]
    x = torch.randn(MAX_SCALED_ROWS + 1, weight.columns).bfloat16()
    assert weight.values.shape[0] * weight.columns > 2**24
    expected = torch.nn.functional.linear(x, weight.to(torch.bfloat16))
    assert torch.allclose(weight.times(x).float(), expected.float(), rtol=2**-6, atol=1e-2)


@pytest.mark.parametrize(
    ("kind", "columns", "group"),
    [(FP8, 320, 128), (FP8, 96, 96), (MXFP4, 96, 32), (MXFP4, 128, 16), (NVFP4, 96, 16), (NVFP4, 128, 32)],
)
def test_what_the_kernels_do_not_take(kind: RowKind, columns: int, group: int) -> None:
    assert not multiplies(kind, columns, group)
