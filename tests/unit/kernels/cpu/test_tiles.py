"""Products by tiles: against float64, in any batch, of stored weights, and beside torch's own."""

import sys

import pytest
import torch

from moetool.kernels.cpu import matmul, tiles
from moetool.kernels.cpu.kinds import BFLOAT16, GGML_KINDS, RowKind
from moetool.kernels.cpu.matmul import (
    MAX_SCALED_ROWS,
    MIN_ELEMENTS,
    RowsOf,
    max_bfloat16_rows,
    max_rows,
    products,
    scattered_products,
)
from moetool.kernels.cpu.scaled_weight import ScaledWeight
from moetool.kernels.cpu.tiles import FEATURES, find_tiles
from moetool.kernels.cpu.vectors import has_features
from tests.unit.kernels.cpu.test_scaled_weight import CASES, example_weight

pytestmark = pytest.mark.skipif(not has_features(*FEATURES), reason="this CPU has no AVX2")

OUTPUTS, INPUTS = 512, 576


def _rows(count: int, seed: int = 0, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _weight(seed: int = 1) -> torch.Tensor:
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("count", [max_bfloat16_rows() + 1, 16, 17, 33, 128, 3000])
def test_a_product_is_that_of_float64_rounded_once(count: int) -> None:
    x, weight = _rows(count), _weight()
    assert max_rows(weight, x.dtype) == sys.maxsize
    exact = x.double() @ weight.double().T
    made = products([x], [weight])[0]
    assert made.dtype == torch.bfloat16
    assert ((made.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_is_the_same_in_any_batch(threads: int) -> None:
    before, x, weights = torch.get_num_threads(), _rows(90), [_weight(seed) for seed in range(3)]
    alone = [products([x[9:18]], [weight])[0] for weight in weights]
    torch.set_num_threads(threads)
    try:
        targets = torch.randperm(75, generator=torch.Generator().manual_seed(2)).tolist()
        jobs = [
            RowsOf(weights[0], range(9, 18), targets[:9]),
            RowsOf(weights[1], range(40), targets[9:49]),
            RowsOf(weights[2], [9, 80, 10, 11, *range(20)], targets[49:73]),
            RowsOf(weights[0], [9, 10], targets[73:]),  # few rows: another kernel
        ]
        made = scattered_products(x, jobs, 75)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(made[targets[:9]], alone[0])
    assert torch.equal(made[targets[18:27]], alone[1])
    assert torch.equal(made[[targets[49], targets[51], targets[52]]], alone[2][:3])
    assert torch.equal(made[targets[73:]], products([x[9:11]], [weights[0]])[0])


@pytest.mark.parametrize("form", ["avx512_bf16", "AVX-512", "AVX2"])
def test_sums_add_the_odd_input_of_a_pair_first(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = {"avx512_bf16": ("avx512f", "avx512bf16"), "AVX-512": ("avx512f",), "AVX2": ()}[form]
    if not has_features(*features):
        pytest.skip(f"this CPU has no {form}")
    count = 40
    monkeypatch.setattr(tiles, "cpu_has_tiles", lambda: False)  # those of AMX add pairs in another order
    monkeypatch.setattr(tiles, "widens_bfloat16", lambda: form != "avx512_bf16")
    monkeypatch.setattr(
        tiles, "has_features", lambda *names: has_features(*names) and ("avx512f" not in names or form != "AVX2")
    )
    multiply = find_tiles.__wrapped__(BFLOAT16)
    monkeypatch.setattr(matmul, "find_tiles", lambda kind: multiply)
    x, weight = _rows(count), _weight()
    sums = torch.zeros(count, OUTPUTS)
    for first in range(0, INPUTS, 2):
        for place in (first + 1, first):  # a product of two bfloat16 is exact in float32
            sums += x[:, place, None].float() * weight[:, place].float()
    assert torch.equal(products([x], [weight])[0], sums.bfloat16())


@pytest.mark.parametrize("kind", GGML_KINDS, ids=lambda kind: kind.name)
def test_blocks_give_the_bits_of_the_unpacked_weight(kind: RowKind) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.gguf_models import random_blocks

    assert find_tiles(kind) is not None
    blocks = torch.from_numpy(random_blocks((512, 512), gguf.GGMLQuantizationType(kind.ggml)))
    weight, x = ScaledWeight(kind, blocks, torch.empty(0), 512, kind.numbers, 1, False), _rows(40, inputs=512)
    assert torch.equal(products([x], [weight])[0], products([x], [weight.to(torch.bfloat16)])[0])


@pytest.mark.parametrize("name", CASES)
def test_a_stored_weight_gives_the_bits_of_the_unpacked_one(name: str) -> None:
    weight = example_weight(name)
    x = _rows(MAX_SCALED_ROWS + 30, inputs=weight.columns)
    assert max_rows(weight, x.dtype) == sys.maxsize and max_rows(weight, torch.float32) == MAX_SCALED_ROWS
    dense = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, -weight.columns % 64))
    dense = torch.cat([dense] * (-(-MIN_ELEMENTS // dense.numel())))
    unpacked = products([torch.nn.functional.pad(x, (0, -weight.columns % 64))], [dense])[0]
    assert torch.equal(products([x], [weight])[0], unpacked[:, : weight.shape[0]])


def test_torch_multiplies_rightly_in_between() -> None:
    """Both use the tiles of the same threads, in configurations of their own."""
    x, weight = _rows(40), _weight()
    expected = torch.nn.functional.linear(x, weight)
    for _ in range(3):
        made = products([x], [weight])[0]
        assert torch.equal(torch.nn.functional.linear(x, weight), expected)
        assert torch.equal(products([x], [weight])[0], made)


def test_rows_of_another_width_are_refused() -> None:
    for rows in (max_bfloat16_rows(), 40):
        with pytest.raises(ValueError, match=f"rows have 512 numbers, expected {INPUTS}"):
            scattered_products(_rows(rows, inputs=512), [RowsOf(_weight(), range(rows), range(rows))], rows)


def test_many_experts_with_few_rows_take_several_calls() -> None:
    x, weights = _rows(400), [_weight(seed) for seed in range(100)]
    jobs = [RowsOf(weight, range(4 * n, 4 * n + 4), range(4 * n, 4 * n + 4)) for n, weight in enumerate(weights)]
    made = scattered_products(x, jobs, 400)
    for n in (0, 49, 50, 99):
        assert torch.equal(made[4 * n : 4 * n + 4], products([x[4 * n : 4 * n + 4]], [weights[n]])[0])


def test_a_row_is_the_same_among_many() -> None:
    x, weight = _rows(3000), _weight()
    made = products([x], [weight])[0]
    for start in (0, 1000, 2990):
        assert torch.equal(made[start : start + 10], products([x[start : start + 10]], [weight])[0])


def test_layers_and_routers_multiply_many_rows_by_tiles() -> None:
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16)
    assert matmul.adopt(torch.nn.Sequential(layer)) == 1
    x = _rows(300)
    with torch.inference_mode():
        assert torch.equal(layer(x[None])[0], products([x], [layer.weight])[0])


def test_without_tiles_the_kernel_for_few_rows_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "find_tiles", lambda kind: None)
    weight = example_weight("mxfp4")
    assert isinstance(weight, ScaledWeight) and max_rows(weight, torch.bfloat16) == MAX_SCALED_ROWS
    assert max_rows(_weight(), torch.bfloat16) == max_bfloat16_rows()
