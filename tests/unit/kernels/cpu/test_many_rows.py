"""Products of many bfloat16 rows are sums in float32, rounded once, where the CPU lacks bfloat16 products."""

import pytest
import torch

from moetool.kernels.cpu import many_rows


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).bfloat16()


@pytest.mark.parametrize("lacking", [True, False])
@pytest.mark.parametrize("num_rows", [6, 8, 40])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_those_of_float32_rounded_once(
    monkeypatch: pytest.MonkeyPatch, lacking: bool, num_rows: int, biased: bool
) -> None:
    monkeypatch.setattr(many_rows, "lacks_bfloat16_products", lambda: lacking)
    x, weight, bias = _numbers(num_rows // 2, 2, 640), _numbers(1_000, 640), _numbers(1_000) if biased else None
    made = many_rows.linear(x, weight, bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert made.dtype == torch.bfloat16 and made.shape == exact.shape
    if lacking and num_rows >= 8:
        assert (made.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
        assert (made == exact.bfloat16()).double().mean() > 0.99
    else:
        assert torch.equal(made, torch.nn.functional.linear(x, weight, bias))


def test_views_other_types_and_gradients_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_rows, "lacks_bfloat16_products", lambda: True)
    x, weight = _numbers(8, 640), _numbers(640, 1_000)
    turned = many_rows.linear(x, weight.T)
    torch.testing.assert_close(turned, (x.double() @ weight.double()).bfloat16(), rtol=2**-7, atol=1e-3)
    assert torch.equal(
        many_rows.linear(x.float(), weight.T.float()), torch.nn.functional.linear(x.float(), weight.T.float())
    )
    learned = torch.nn.Parameter(weight.T.contiguous())
    many_rows.linear(x, learned).sum().backward()
    assert learned.grad is not None
