"""RMSNorm of rows in bfloat16 on a CPU, in one pass.

transformers computes it by six operations, each a call that takes longer than its arithmetic: 0.1 ms per norm of a
decode step, of which a layer has two to four.
"""

import ctypes
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from moetool.models.llvm_vectors import LANES, Vectors, pairwise_sum

_log = logging.getLogger(__name__)

_NormCall = Callable[[int, int, int, int, int, float], None]
"""Addresses of rows, of the weight and of the output, number of rows, vectors per row, and epsilon."""


def adopt(model: nn.Module) -> int:
    """Let the kernel compute a model's RMSNorms in bfloat16 that compute what Llama's does; returns their number.

    Each result is that of transformers but for the order in which a row's squares are summed in float32: at most a
    rounding of bfloat16 apart. A row's result is bit-identical in any batch.

    Effects: gives those modules a `forward` of their own.
    """
    norms = [module for module in model.modules() if _takes(module)]
    kernel = find_kernel() if norms else None
    if kernel is None:
        return 0
    for module in norms:
        module.forward = functools.partial(_normalized, kernel, module)
    return len(norms)


def _takes(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 1
        and len(weight) % LANES == 0
        and weight.is_contiguous()
        and _is_llamas(type(module).forward)
    )


@functools.cache
def _is_llamas(forward: Callable[..., Any]) -> bool:
    """Whether a class's forward has the same code as that of transformers' `LlamaRMSNorm`."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs, llamas = (inspect.unwrap(each).__code__ for each in (forward, LlamaRMSNorm.forward))
    same = ("co_code", "co_consts", "co_names", "co_argcount")
    return all(getattr(theirs, each) == getattr(llamas, each) for each in same)


def _normalized(kernel: _NormCall, module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    x, weight = hidden_states, module.weight
    if x.dtype != torch.bfloat16 or not x.is_contiguous():
        normalized: torch.Tensor = type(module).forward(module, x)
        return normalized
    output, width = torch.empty_like(x), len(weight)
    kernel(
        x.data_ptr(),
        weight.data_ptr(),
        output.data_ptr(),
        x.numel() // width,
        width // LANES,
        module.variance_epsilon,
    )
    return output


@functools.cache
def find_kernel() -> _NormCall | None:
    """Return the compiled kernel; None if numba is missing, does not compile it, or Llama's norm is another one."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    try:
        kernel = _compile()
        norm = LlamaRMSNorm(4 * LANES, eps=0.5).to(torch.bfloat16)
        x = torch.linspace(-2, 3, 4 * LANES, dtype=torch.bfloat16)
        with torch.no_grad():
            norm.weight.copy_(x.flip(0))
            if not torch.allclose(_normalized(kernel, norm, x), norm(x), rtol=2**-7, atol=0):
                raise RuntimeError("its result is wrong")
    except Exception as error:  # numba raises many kinds; torch computes the same norms
        _log.warning("norms use torch, because numba does not compile the kernel (%s)", error)
        return None
    return kernel


def _compile() -> _NormCall:
    import numba
    from numba import types

    normalize = _row_normalization()

    @numba.cfunc(types.void(*[types.int64] * 5, types.float32), nopython=True)
    def work(x: Any, weight: Any, output: Any, rows: Any, vectors: Any, epsilon: Any) -> None:
        for row in range(rows):
            start = row * vectors * 2 * LANES
            normalize(x + start, weight, output + start, vectors, epsilon)

    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5, ctypes.c_float)(work.address)
    call.work = work  # type: ignore[attr-defined]  # keeps the machine code
    return call


def _row_normalization() -> Any:
    """numba's `normalize(x, weight, output, vectors, epsilon)` of one row."""
    from numba.core import cgutils, types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, weight, output, count, epsilon = arguments
        v = Vectors(builder)

        def place(address: Any, vector: Any) -> Any:
            return builder.add(address, v.times(vector, 2 * LANES))

        def numbers(address: Any, vector: Any) -> Any:
            return v.widened(v.load(place(address, vector), v.of(v.int16), 2))

        total = cgutils.alloca_once(builder, v.floats)
        builder.store(v.all(v.float32, 0.0), total)
        with cgutils.for_range(builder, count) as loop:
            each = numbers(x, loop.index)
            builder.store(v.multiply_add(each, each, builder.load(total)), total)
        width = builder.sitofp(v.times(count, LANES), v.float32)
        mean = builder.fdiv(pairwise_sum(builder, [builder.load(total)]), width)
        root = builder.call(v.function("llvm.sqrt.f32", v.float32, v.float32), [builder.fadd(mean, epsilon)])
        factor = v.broadcast(builder.fdiv(v.ir.Constant(v.float32, 1.0), root))
        with cgutils.for_range(builder, count) as loop:
            scaled = v.widened(v.bfloat16(builder.fmul(numbers(x, loop.index), factor)))
            weighted = builder.fmul(scaled, numbers(weight, loop.index))
            v.store(v.bfloat16(weighted), place(output, loop.index), 2)
        return context.get_dummy_value()

    @intrinsic
    def normalize(typing_context: Any, x: Any, weight: Any, output: Any, vectors: Any, epsilon: Any) -> Any:
        return types.void(*[types.int64] * 4, types.float32), generate

    return normalize
