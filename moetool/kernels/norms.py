"""RMSNorm of rows in one pass: in bfloat16 on a CPU, in any floating type on a GPU.

transformers computes it by eight operations, each of which takes longer to call than to compute: on a CPU 0.1 ms per
norm of a decode step, of which a layer has two to four.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moetool.kernels.cpu.activations import BinaryRow, BinaryRowCall, BinaryRows, compile_rows, compiled
from moetool.kernels.cpu.vectors import LANES, pairwise_sum

GpuNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""Rows, weight and epsilon to the rows' RMSNorm."""


def adopt(model: nn.Module) -> int:
    """Let a kernel compute a model's RMSNorms that compute what Llama's does; returns their number.

    Each result is that of transformers but for the order in which a row's squares are summed in float32, and on a GPU
    for the rounding of the root: at most a rounding of its type apart. A row's result is bit-identical in any batch.

    Effects: gives those modules a `forward` of their own.
    """
    norms: list[Any] = [module for module in model.modules() if is_norm(module)]
    on_gpu = [module for module in norms if module.weight.device.type == "cuda"]
    on_cpu = [module for module in norms if suits_a_cpu(module.weight)]
    made = 0
    if on_gpu and (launched := find_gpu_norm()) is not None:
        for module in on_gpu:
            module.forward = functools.partial(_normalized_by, launched, module)
        made += len(on_gpu)
    if on_cpu and (kernel := find_norm_kernel()) is not None:
        for module in on_cpu:
            module.forward = functools.partial(_normalized, kernel, module)
        made += len(on_cpu)
    return made


def is_norm(module: Any) -> bool:
    """Whether a module computes what Llama's RMSNorm does."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 1
        and weight.is_contiguous()
        and weight.is_floating_point()
        and _is_llamas(type(module).forward)
    )


def suits_a_cpu(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and len(weight) % LANES == 0


@functools.cache
def _is_llamas(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward has the same code as that of transformers' `LlamaRMSNorm`."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs, llamas = (inspect.unwrap(each).__code__ for each in (forward, LlamaRMSNorm.forward))
    same = ("co_code", "co_consts", "co_names", "co_argcount")
    return all(getattr(theirs, each) == getattr(llamas, each) for each in same)


def _normalized_by(norm: GpuNorm, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x, weight = hidden_states, module.weight
    if x.dtype != weight.dtype or x.shape[-1] != len(weight) or not x.is_contiguous():
        return type(module).forward(module, x)
    return norm(x, weight, module.variance_epsilon)


def find_gpu_norm() -> GpuNorm | None:
    """Return the norm of rows on a GPU; None without Triton."""
    try:
        from moetool.kernels.gpu import norms
    except ImportError:
        return None
    return norms.norm


def _normalized(kernel: BinaryRowCall, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x, weight = hidden_states, module.weight
    usable = x.dtype == weight.dtype == torch.bfloat16 and x.device.type == "cpu" and x.shape[-1] == len(weight)
    if not usable or not x.is_contiguous():
        return type(module).forward(module, x)
    output, width = torch.empty_like(x), len(weight)
    count = x.numel() // width
    addresses = (x.data_ptr(), 2 * width, weight.data_ptr(), 0, output.data_ptr(), 2 * width)
    kernel(BinaryRows(*addresses, count, width // LANES), module.variance_epsilon)
    return output


@functools.cache
def find_norm_kernel() -> BinaryRowCall | None:
    """Return the compiled kernel; None if numba does not compile it, or Llama's norm is another one."""
    return compiled("norms", _checked)


def _checked() -> BinaryRowCall:
    """Raises: RuntimeError: the kernel computes something else than transformers."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    kernel = compile_rows(_normalize)
    norm = LlamaRMSNorm(4 * LANES, eps=0.5).to(torch.bfloat16)
    x = torch.linspace(-2, 3, 4 * LANES, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(x.flip(0))
        if not torch.allclose(_normalized(kernel, norm, x), norm(x), rtol=2**-7, atol=0):
            raise RuntimeError("its result is wrong")
    return kernel


def _normalize(row: BinaryRow) -> None:
    """`first` over its root mean square, times the weight `second`; the factor is epsilon."""
    from numba.core import cgutils

    v, builder = row.vectors, row.vectors.builder
    total = cgutils.alloca_once(builder, v.floats)
    builder.store(v.all(v.float32, 0.0), total)
    with cgutils.for_range(builder, row.count) as loop:
        numbers = row.read(row.first, loop.index)
        builder.store(v.multiply_add(numbers, numbers, builder.load(total)), total)
    width = builder.sitofp(v.times(row.count, LANES), v.float32)
    mean = builder.fdiv(pairwise_sum(builder, [builder.load(total)]), width)
    root = builder.call(v.function("llvm.sqrt.f32", v.float32, v.float32), [builder.fadd(mean, row.factor)])
    inverse = v.broadcast(builder.fdiv(v.ir.Constant(v.float32, 1.0), root))
    with cgutils.for_range(builder, row.count) as loop:
        scaled = v.widened(v.bfloat16(builder.fmul(row.read(row.first, loop.index), inverse)))
        row.write(builder.fmul(scaled, row.read(row.second, loop.index)), loop.index)
