"""RMSNorm by the compiled kernel beside transformers' own."""

import importlib

import pytest
import torch
from torch import nn

from moetool.kernels.norms import adopt


def _norm(family: str, name: str, width: int) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, name)(width, eps=1e-6).bfloat16()
    norm.weight.data.copy_(torch.randn(width, generator=torch.Generator().manual_seed(width)))
    return norm


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).mul_(3).bfloat16()


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3_moe", "Qwen3MoeRMSNorm"), ("deepseek_v3", "DeepseekV3RMSNorm"), ("mixtral", "MixtralRMSNorm")],
)
@pytest.mark.parametrize("shape", [(1, 1, 2048), (3, 32, 128), (200, 64), (0, 32)])
def test_norms_are_those_of_transformers(family: str, name: str, shape: tuple[int, ...]) -> None:
    norm, x = _norm(family, name, shape[-1]), _rows(*shape)
    expected = norm(x)
    assert adopt(nn.Sequential(norm)) == 1
    made = norm(x)
    assert made.shape == x.shape
    assert torch.allclose(made.float(), expected.float(), rtol=2**-7, atol=0)
    assert (made != expected).float().mean() <= 0.001 if x.numel() else True
    assert all(torch.equal(norm(row), one) for row, one in zip(x, made, strict=True))


def test_numbers_that_are_not_finite_stay_in_their_row() -> None:
    norm, x = _norm("qwen3_moe", "Qwen3MoeRMSNorm", 64), _rows(3, 64)
    x[0, 5], x[1, 7] = float("nan"), float("inf")
    expected = norm(x)
    adopt(nn.Sequential(norm))
    assert torch.equal(norm(x).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_other_norms_types_and_layouts_are_computed_by_their_own_class() -> None:
    gemma, wide = _norm("gemma2", "Gemma2RMSNorm", 64), _norm("qwen3_moe", "Qwen3MoeRMSNorm", 64).float()
    assert adopt(nn.Sequential(gemma, wide, _norm("qwen3_moe", "Qwen3MoeRMSNorm", 40))) == 0
    norm, x = _norm("qwen3_moe", "Qwen3MoeRMSNorm", 64), _rows(4, 128)[:, ::2]
    expected, exact = norm(x), norm(x.float())
    assert adopt(nn.Sequential(norm)) == 1
    assert torch.equal(norm(x), expected)  # not contiguous
    assert torch.equal(norm(x.float()), exact)
    assert torch.equal(norm.float()(x.float()), exact)
