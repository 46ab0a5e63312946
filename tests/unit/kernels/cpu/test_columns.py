"""Products of few rows with weights stored [in, out], against float64 and against themselves."""

import pytest
import torch

from moetool.kernels.cpu.matmul import RowsOf, products, scattered_products


def _weight(inputs: int, outputs: int, seed: int = 0) -> torch.Tensor:
    """The view [out, in] of a weight stored [in, out]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(inputs, outputs, generator=generator).mul_(0.05).bfloat16().T


def _rows(num_rows: int, columns: int) -> torch.Tensor:
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 32), (80, 160), (256, 128), (720, 1440)])
def test_products_are_those_of_float64_but_for_one_rounding(inputs: int, outputs: int, num_rows: int) -> None:
    weight, x = _weight(inputs, outputs), _rows(num_rows, inputs)
    (output,) = products([x], [weight])
    assert torch.allclose(output.double(), x.double() @ weight.double().T, rtol=0, atol=1e-5)
    few = x[:2]
    (narrow,) = products([few.bfloat16()], [weight])
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, products([few.bfloat16().float()], [weight])[0].bfloat16())


def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads() -> None:
    weights = [_weight(576, 544, seed) for seed in range(5)]
    xs = [_rows(count, 576) for count in (1, 8, 3, 5, 2)]
    together = products(xs, weights)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for x, weight, output in zip(xs, weights, together, strict=True):
                assert torch.equal(products([x], [weight])[0], output)
                assert torch.equal(torch.cat([products([row[None]], [weight])[0] for row in x]), output)
    finally:
        torch.set_num_threads(before)


def test_rows_are_taken_from_and_written_to_the_places_that_jobs_name() -> None:
    first, second = _weight(64, 96, 1), _weight(64, 96, 2)
    x = _rows(3, 64)
    made = scattered_products(x, [RowsOf(first, [2, 0], [0, 3]), RowsOf(second, [1, 2, 2], [4, 1, 2])], 5)
    for output, (weight, source) in zip(
        made, [(first, 2), (second, 2), (second, 2), (first, 0), (second, 1)], strict=True
    ):
        assert torch.equal(output, products([x[source : source + 1]], [weight])[0][0])
