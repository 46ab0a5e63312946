"""Products of few rows by the compiled kernel, against float64 and against themselves."""

import sys
from dataclasses import replace

import numba
import pytest
import torch

from moetool.kernels.cpu import many_rows, matmul
from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.inputs import ordered_rows
from moetool.kernels.cpu.kinds import BFLOAT16, GGML_KINDS
from moetool.kernels.cpu.matmul import (
    MAX_SCALED_ROWS,
    RowLinear,
    RowsOf,
    adopt,
    max_bfloat16_rows,
    multiplies,
    products,
    scattered_products,
    takes,
)


def _weights(count: int, rows: int = 512, columns: int = 576) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(rows, columns, generator=generator).mul_(0.05).bfloat16() for _ in range(count)]


def _rows(num_rows: int, columns: int = 576, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows", range(1, MAX_SCALED_ROWS + 2))
def test_products_are_those_of_float64_but_for_one_rounding(num_rows: int) -> None:
    (weight,) = _weights(1)
    x = _rows(num_rows, dtype=torch.float32)
    (output,) = products([x], [weight])
    exact = x.double() @ weight.double().T
    assert output.dtype == torch.float32
    assert torch.allclose(output.double(), exact, rtol=0, atol=1e-5)
    (narrow,) = products([x.bfloat16()], [weight])
    assert narrow.dtype == torch.bfloat16
    assert torch.allclose(narrow.double(), x.bfloat16().double() @ weight.double().T, rtol=2**-8, atol=1e-5)


def test_memory_of_a_product_does_not_depend_on_the_default_type() -> None:
    """transformers sets it, for all threads, while it builds a model."""
    x = _rows(3, dtype=torch.float32)
    expected = ordered_rows(x, BFLOAT16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ordered = ordered_rows(x, BFLOAT16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ordered.dtype == torch.float32 and torch.equal(ordered, expected)


@pytest.mark.parametrize("rows", [480, 544, 1056])
def test_every_row_of_a_weight_is_multiplied(rows: int) -> None:
    """Also where the last task of a weight is shorter than the others."""
    weights, x = _weights(2, rows), _rows(1, dtype=torch.float32)
    for weight, output in zip(weights, products([x, x], weights), strict=True):
        assert torch.allclose(output.double(), x.double() @ weight.double().T, rtol=0, atol=1e-5)


def test_rows_in_bfloat16_give_what_their_float32_gives_rounded_once() -> None:
    (weight,) = _weights(1)
    x = _rows(max_bfloat16_rows())
    x[0, 3], weight[5, 3], weight[6] = float("inf"), 0.0, 1e38  # infinite, not a number, and beyond bfloat16
    (narrow,), (wide,) = products([x], [weight]), products([x.float()], [weight])
    assert wide[0].isnan().any()
    assert wide[0].isinf().any()
    assert torch.equal(narrow.nan_to_num(7.0), wide.bfloat16().nan_to_num(7.0))


def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads() -> None:
    weights = _weights(5)
    xs = [_rows(count, seed=count) for count in (1, 8, 3, 5, 2)]
    together = products(xs, weights)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for x, weight, output in zip(xs, weights, together, strict=True):
                assert torch.equal(products([x], [weight])[0], output)
                alone = torch.cat([products([row[None]], [weight])[0] for row in x])
                assert torch.equal(alone, output)
    finally:
        torch.set_num_threads(before)


def test_rows_are_taken_from_and_written_to_the_places_that_jobs_name() -> None:
    first, second = _weights(2)
    x = _rows(3)
    jobs = [RowsOf(first, [2, 0], [0, 3]), RowsOf(second, [1, 2, 2], [4, 1, 2])]
    made = scattered_products(x, jobs, 5)
    expected = [(first, 2), (second, 2), (second, 2), (first, 0), (second, 1)]
    for output, (weight, source) in zip(made, expected, strict=True):
        assert torch.equal(output, products([x[source : source + 1]], [weight])[0][0])


def test_a_kernel_leaves_nothing_to_compile_for_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(next(kind for kind in GGML_KINDS if kind.name == "q4_k"))  # one that nothing is compiled for yet
    assert matmul.find_kernel(kind) is not None
    monkeypatch.setattr(numba, "cfunc", None)
    assert ordered_rows(_rows(1, kind.numbers), kind).shape[:2] == (1, 1)


def test_weights_keep_their_values_in_huge_pages() -> None:
    weight = torch.arange(2**22, dtype=torch.float32)
    ask_for_huge_pages(weight, collapse=True)
    assert torch.equal(weight, torch.arange(2**22, dtype=torch.float32))
    assert not ask_for_huge_pages(weight[:4])  # holds no whole page


def test_what_the_kernel_does_not_take_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    (weight,) = _weights(1)
    assert takes(weight)
    monkeypatch.setattr(matmul, "find_tiles", lambda *kind: None)
    assert not multiplies(_rows(max_bfloat16_rows() + 1), weight)
    assert multiplies(_rows(MAX_SCALED_ROWS, dtype=torch.float32), weight)
    assert not multiplies(_rows(MAX_SCALED_ROWS + 1, dtype=torch.float32), weight)
    assert not multiplies(_rows(0), weight)
    assert not takes(weight.float())
    assert not takes(weight[:, :560])  # neither contiguous nor of whole vectors
    assert takes(weight.T)  # stored [in, out]
    assert not multiplies(_rows(max_bfloat16_rows() + 1, len(weight)), weight.T)
    assert not takes(weight.T[:, :256])
    assert not takes(weight[:64])  # not worth a call
    assert not takes(weight.to("meta"))
    assert not takes("a packed weight")


@pytest.mark.parametrize("lacking", [False, True])
def test_linear_layers_are_adopted_in_place(lacking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "find_tiles", lambda *kind: None)
    monkeypatch.setattr(many_rows, "lacks_bfloat16_products", lambda: lacking)
    model = torch.nn.Sequential(
        torch.nn.Linear(576, 512, dtype=torch.bfloat16),
        torch.nn.Linear(512, 64, bias=False, dtype=torch.bfloat16),  # small
    )
    x = _rows(max_bfloat16_rows())[None]
    with torch.inference_mode():
        before = model[0](x)
        assert adopt(model) == 1 + lacking
        assert isinstance(model[0], RowLinear)
        assert type(model[1]) is (RowLinear if lacking else torch.nn.Linear)
        after = model[0](x)
        assert after.shape == before.shape
        assert torch.allclose(after.float(), before.float(), rtol=2**-7, atol=1e-2)
        many = _rows(max_bfloat16_rows() + 1)
        assert torch.equal(model[0](many), many_rows.linear(many, model[0].weight, model[0].bias))
    assert adopt(model) == 0


def test_without_numba_torch_computes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(matmul, "find_kernel", matmul.find_kernel.__wrapped__)
    assert not takes(_weights(1)[0])


def test_a_router_multiplies_few_rows_by_the_kernel_and_more_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "find_tiles", lambda *kind: None)

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(_weights(1)[0])

        def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight, bias)

    router, x, bias = Router(), _rows(max_bfloat16_rows() + 1), _rows(1, 512)[0]
    expected = many_rows.linear(x, router.weight.detach())
    assert adopt(torch.nn.Sequential(), [router]) == 1
    assert torch.equal(router(x), expected)
    few = x[: max_bfloat16_rows()]
    (made,) = products([few], [router.weight])
    assert torch.equal(router(few), made)
    assert torch.equal(router(few, bias), made + bias)
    assert torch.equal(router.weight.float(), _weights(1)[0].float())  # other functions take it as it is
