"""Gates with SiLU by the compiled kernel beside transformers' own."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from moetool.kernels.cpu.gates import find_gate_kernel, gate_of, is_silu_gate
from moetool.models.transformers_internals import expert_gate


def _module(activation: str = "silu") -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=8, num_experts=2, hidden_act=activation)
    return Qwen3MoeExperts(config)


def _rows(num_rows: int, width: int = 192) -> torch.Tensor:
    return torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(1)).mul_(4).bfloat16()


@pytest.mark.parametrize("num_rows", [0, 1, 70, 700])
def test_gates_are_those_of_transformers(num_rows: int) -> None:
    assert find_gate_kernel() is not None
    module, x = _module(), _rows(num_rows)
    expected, made = module._apply_gate(x), gate_of(*expert_gate(module))(x)
    assert made.shape == expected.shape
    assert torch.allclose(made.float(), expected.float(), rtol=2**-7, atol=1e-30)
    assert not num_rows or (made != expected).float().mean() <= 0.001
    assert all(torch.equal(gate_of(*expert_gate(module))(row[None])[0], one) for row, one in zip(x, made, strict=True))


def test_large_numbers_and_numbers_that_are_not_finite() -> None:
    x = torch.tensor([[300.0, -300.0, 0.0, float("nan"), float("inf"), -50.0] + [1.0] * 10 + [1.0] * 16]).bfloat16()
    made, expected = gate_of(*expert_gate(_module()))(x), _module()._apply_gate(x)
    assert torch.allclose(made.float(), expected.float(), rtol=2**-7, atol=1e-30, equal_nan=True)


def test_other_activations_types_and_widths_are_computed_by_the_module() -> None:
    gelu, silu, x = _module("gelu"), _module(), _rows(3)
    assert [is_silu_gate(gate_of(*expert_gate(module))) for module in (gelu, silu)] == [False, True]
    assert torch.equal(gate_of(*expert_gate(gelu))(x), gelu._apply_gate(x))
    for other in (x.float(), _rows(3, 20), x.T):
        assert torch.equal(gate_of(*expert_gate(silu))(other), silu._apply_gate(other))
