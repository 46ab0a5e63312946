"""Orders of x by kind of weight, and blocks that multiply pairs of bfloat16."""

from dataclasses import replace

import pytest
import torch

from moetool.kernels.cpu.blocks import paired, row_order
from moetool.kernels.cpu.kinds import GGML_KINDS, RowKind
from moetool.kernels.cpu.matmul import MAX_SCALED_ROWS, products
from moetool.kernels.cpu.scaled_weight import ScaledWeight
from moetool.kernels.cpu.vectors import cpu_has_pairs

_INPUTS = 1024
_PAIRED = [kind for kind in GGML_KINDS if kind.name in ("q4_k", "q5_k", "q6_k")]


@pytest.mark.parametrize("kind", GGML_KINDS, ids=lambda kind: kind.name)
def test_a_block_reads_each_number_of_x_once(kind: RowKind) -> None:
    for each in (kind, replace(kind, paired=True)):
        assert sorted(row_order(each).indices) == list(range(kind.numbers))


@pytest.mark.skipif(not cpu_has_pairs(), reason="this CPU has no avx512_bf16")
@pytest.mark.parametrize("kind", _PAIRED, ids=lambda kind: kind.name)
def test_pairs_are_as_close_to_float64_as_single_numbers(kind: RowKind) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.gguf_models import random_blocks

    assert paired(kind).paired
    form = gguf.GGMLQuantizationType(kind.ggml)
    blocks = random_blocks((512, _INPUTS), form)
    weight = ScaledWeight(kind, torch.from_numpy(blocks), torch.empty(0), _INPUTS, kind.numbers, 1, False)
    x = torch.randn(MAX_SCALED_ROWS, _INPUTS, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ torch.from_numpy(gguf.dequantize(blocks, form)).double().T
    by_pairs, single = products([x], [weight])[0], products([x.float()], [weight])[0].bfloat16()
    errors = [(each.double() - exact).abs() for each in (by_pairs, single)]
    assert errors[0].mean() <= 1.05 * errors[1].mean()
    assert (errors[0] <= exact.abs() * 2.0**-8 + 1e-4).all()
    for count in (1, 2, 3, 7):
        assert torch.equal(products([x[1 : 1 + count]], [weight])[0], by_pairs[1 : 1 + count])
