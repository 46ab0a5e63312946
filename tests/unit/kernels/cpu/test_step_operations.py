"""Small operations beside torch's own, over strides, types and broadcasts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from moetool.kernels.cpu import step_operations as functions
from moetool.kernels.cpu.memory import BFLOAT16, BOOLEAN, FLOAT32, INT64
from moetool.kernels.cpu.program import Program

_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.int64: INT64, torch.bool: BOOLEAN}


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def _operand(tensor: torch.Tensor, dims: int) -> list[int]:
    steps = [
        0 if size == 1 else stride * tensor.itemsize for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return [tensor.data_ptr(), _KINDS[tensor.dtype], *[0] * (dims - len(steps)), *steps]


def _run(code: int, output: torch.Tensor, *inputs: torch.Tensor, chunk: int = 512, k: int = 0) -> torch.Tensor:
    """Run one operation over the shape of the first input."""
    shape = torch.broadcast_shapes(output.shape, inputs[0].shape) if code < functions.SUM else inputs[0].shape
    room, program = torch.zeros(4 * chunk), Program()
    head = [0, code, len(inputs) if code < functions.SUM else 1, room.data_ptr(), chunk, k]
    job = [*head, *[1] * (4 - len(shape)), *shape]
    for each in (output, *inputs):
        job += _operand(each, 4)
    program.add(functions.operate.address, job)
    program.close()
    assert program.run(0, len(program), 1) == len(program)
    return output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (functions.COPY, lambda a, b: a.clone()),
        (functions.ADD, torch.add),
        (functions.SUBTRACT, torch.sub),
        (functions.MULTIPLY, torch.mul),
        (functions.DIVIDE, torch.div),
        (functions.NEGATE, lambda a, b: -a),
        (functions.SQUARE, lambda a, b: a.pow(2)),
    ],
)
def test_arithmetic_has_the_bits_of_torch(
    code: int, expected: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    a, b = _numbers(3, 5, 700, dtype=dtype), _numbers(3, 1, 700, dtype=dtype, seed=2)
    for left in (a, a.transpose(0, 1).contiguous().transpose(0, 1), a.flip(0)):
        made = _run(code, torch.empty(3, 5, 700, dtype=dtype), left, b)
        assert torch.equal(made, expected(left, b))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (functions.SIGMOID, torch.sigmoid),
        (functions.SILU, torch.nn.functional.silu),
        (functions.INVERSE_ROOT, lambda x: x.abs().rsqrt()),
    ],
)
def test_functions_are_within_a_rounding_of_torch(code: int, expected: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.cat([_numbers(2000, dtype=torch.float32) * 8, torch.tensor([0.0, -0.0, 200.0, -200.0, float("nan")])])
    given = x.abs() + 1e-3 if code == functions.INVERSE_ROOT else x
    made = _run(code, torch.empty_like(given), given)
    assert torch.allclose(made, expected(given), rtol=3e-7, atol=1e-36, equal_nan=True)


def test_types_are_converted_as_torch_converts() -> None:
    x = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -0.0, float("inf"), float("nan"), 3e38])
    assert torch.equal(_run(functions.COPY, torch.empty(6, dtype=torch.bfloat16), x).isnan(), x.isnan())
    made = _run(functions.COPY, torch.empty(6, dtype=torch.bfloat16), x)
    assert torch.equal(made.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    whole = torch.arange(5)
    assert torch.equal(_run(functions.COPY, torch.empty(5), whole), whole.float())
    mask = whole > 2
    assert torch.equal(_run(functions.NOT, torch.empty(5, dtype=torch.bool), mask), ~mask)
    numbers, fill = _numbers(5), torch.tensor([-2.5])
    made = _run(functions.FILL, torch.empty_like(numbers), numbers, mask, fill)
    assert torch.equal(made, numbers.masked_fill(mask, -2.5))


@pytest.mark.parametrize("count", [1, 8, 33, 512])
def test_rows_are_those_of_torch(count: int) -> None:
    x = _numbers(4, count, dtype=torch.float32)
    made = _run(functions.SOFTMAX, torch.empty_like(x), x, chunk=count)
    assert torch.allclose(made, x.softmax(-1), rtol=1e-6)
    for code, expected in ((functions.SUM, x.double().sum(-1)), (functions.MEAN, x.double().mean(-1))):
        output = torch.empty(4, 1)
        assert torch.equal(_run(code, output, x, chunk=max(count, 1))[:, 0], expected.float())


def test_the_top_k_fall_and_of_equal_numbers_the_first_comes_first() -> None:
    x = _numbers(6, 64, dtype=torch.float32)
    x[0, :4] = 50.0
    x[1, 3] = float("nan")
    x[2] = float("nan")
    values, indices = torch.empty(6, 8), torch.empty(6, 8, dtype=torch.int64)
    _run(functions.TOP_K, values, x, indices, chunk=64, k=8)
    assert indices[0, :4].tolist() == [0, 1, 2, 3]
    assert 3 not in indices[1]
    expected = x.nan_to_num(-1e9).topk(8)
    assert torch.equal(values[3:], expected.values[3:])
    assert torch.equal(indices[3:], expected.indices[3:])
    assert values[2].isnan().all()
    assert indices[2].max() < 64


def test_numbers_are_gathered_and_scattered_by_index() -> None:
    x, index = _numbers(3, 10), torch.tensor([[9, 0, 4], [1, 1, 2], [0, 5, 6]])
    output, one = torch.empty(3, 3, dtype=torch.bfloat16), torch.tensor([2.0]).bfloat16()
    for to_it, target, source in ((0, output, x), (1, x.clone(), one)):
        program = Program()
        job = [0, to_it, 2, 0, 0, 0, 1, 1, 3, 3, *_operand(target, 4), *_operand(source, 4), *_operand(index, 4)]
        program.add(functions.gather.address, job)
        program.close()
        program.run(0, len(program), 1)
        expected = x.scatter(1, index, 2.0) if to_it else x.gather(1, index)
        assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("k", "dtype"), [(2, torch.bfloat16), (8, torch.bfloat16), (20, torch.bfloat16), (8, torch.float32)]
)
def test_the_weighted_sum_has_the_bits_of_torch(k: int, dtype: torch.dtype) -> None:
    rows, width = 3, 700
    products, weights = _numbers(rows * k, width), _numbers(rows, k, dtype=dtype).abs()
    expected = (products * weights.reshape(-1, 1)).view(rows, k, width).sum(dim=1).bfloat16()
    room, wide, output = torch.empty(1024), weights.float(), torch.empty(rows, width, dtype=torch.bfloat16)
    program = Program()
    job = [0, room.data_ptr(), rows, k, width, products.data_ptr(), wide.data_ptr(), int(dtype == torch.bfloat16)]
    program.add(functions.weighted_sum.address, [*job, output.data_ptr()])
    program.close()
    program.run(0, len(program), 1)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 8), (70, 3), (5, 1)])
def test_a_linear_layer_of_any_shape(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = _numbers(3, inputs, dtype=torch.float32), _numbers(outputs, inputs, dtype=dtype, seed=2)
    made, program = torch.empty(3, outputs), Program()
    job = [0, 3, inputs, outputs, x.data_ptr(), weight.data_ptr(), int(dtype == torch.bfloat16), made.data_ptr()]
    program.add(functions.small_linear.address, job)
    program.close()
    program.run(0, len(program), 1)
    expected = x.double() @ weight.double().T
    assert torch.allclose(made.double(), expected, rtol=1e-5, atol=1e-4)


def test_complex_products() -> None:
    a, b = (
        torch.view_as_complex(_numbers(2, 6, 2, dtype=torch.float32)),
        torch.view_as_complex(_numbers(1, 6, 2).float()),
    )
    made, program = torch.empty_like(a), Program()
    job = [0] * 6 + [1, 1, 2, 6]
    for each in (made, a, b):
        steps = [0 if size == 1 else 8 * stride for size, stride in zip(each.shape, each.stride(), strict=True)]
        job += [each.data_ptr(), FLOAT32, 0, 0, *steps]
    program.add(functions.complex_product.address, job)
    program.close()
    program.run(0, len(program), 1)
    assert np.allclose(made.numpy(), (a * b).numpy(), rtol=1e-6)


@pytest.mark.parametrize(("least", "most"), [(-1.0, 2.0), (-torch.inf, 0.5)])
def test_clamped_numbers(least: float, most: float) -> None:
    x = _numbers(3, 40)
    x[1, 2] = torch.nan
    bounds = [torch.tensor([bound]) for bound in (least, most)]
    made = _run(functions.CLAMP, torch.empty_like(x), x, *bounds)
    assert torch.equal(made.nan_to_num(7), x.clamp(least, most).nan_to_num(7))


def test_the_gate_and_biases_of_gpt_oss_have_the_bits_of_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

    width, k, experts = 96, 3, 5
    module = GptOssExperts(GptOssConfig(hidden_size=64, intermediate_size=width, num_local_experts=experts))
    first, second = _numbers(k, 2 * width, seed=3), _numbers(k, 64, seed=4)
    up, down = _numbers(experts, 2 * width, seed=5), _numbers(experts, 64, seed=6)
    first[0, :4] = torch.tensor([torch.nan, 40.0, 40.0, -40.0])
    routes, table = torch.tensor([4, 0, 2]), np.zeros((experts, functions.TABLE), np.int64)
    for expert in (0, 4):  # expert 2 has no slot
        table[expert] = 1, 0, 1, 0, up[expert].data_ptr(), down[expert].data_ptr()
    gated, summed, program = torch.zeros(k, width).bfloat16(), second.clone(), Program()
    constants = torch.tensor([module.alpha, module.limit])
    given = [0, routes.data_ptr(), k, table.ctypes.data]
    addresses = [first.data_ptr(), constants.data_ptr(), constants.data_ptr() + 4, gated.data_ptr()]
    program.add(functions.gate_clamped.address, [*given, width, *addresses])
    program.add(functions.add_biases.address, [*given, 64, summed.data_ptr()])
    program.close()
    program.run(0, len(program), 1)
    for place, expert in enumerate(routes.tolist()):
        if expert == 2:
            assert not gated[place].any() and torch.equal(summed[place], second[place])
            continue
        expected = module._apply_gate(first[place] + up[expert])
        assert torch.equal(gated[place].nan_to_num(7), expected.nan_to_num(7))
        assert torch.equal(summed[place], second[place] + down[expert])
