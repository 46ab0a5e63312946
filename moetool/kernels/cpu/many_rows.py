"""Products of many bfloat16 rows by small weights on a CPU that has no bfloat16 products.

There torch adds bfloat16 numbers without the vector units. In float32, a block of the weight at a time, the same
product takes 0.7 (16 rows) to 0.14 (256 rows) of the time on an AMD EPYC with AVX2 (`tests/bench/test_many_rows.py`).
Large weights have a kernel of their own (`moetool.kernels.cpu.tiles`).
"""

import functools
import platform

import torch
from torch.nn.functional import linear as torch_linear

_LEAST_ROWS = 8
"""Below, reading the weight as float32 costs more than it saves."""
_BLOCK_NUMBERS = 2**18  # 1 MB of float32: half of a core's second-level cache


@functools.cache
def lacks_bfloat16_products() -> bool:
    """Whether torch multiplies bfloat16 on this x86 CPU with AVX2 or less, where its product is slow."""
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() in (
        "AVX2",
        "DEFAULT",
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`; sums in float32, rounded once, where this CPU lacks bfloat16 products.

    Args:
        x: [..., I].
        weight: [O, I], on any device and of any type.
        bias: [O].

    Returns:
        [..., O], of the type of `x`. No gradients pass where it sums in float32.
    """
    num_outputs, num_inputs = weight.shape
    rows = x.numel() // max(1, num_inputs)
    if (
        rows < _LEAST_ROWS
        or not x.dtype == weight.dtype == torch.bfloat16
        or x.device.type != "cpu"
        or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        or not lacks_bfloat16_products()
    ):
        return torch_linear(x, weight, bias)
    x_RI, output_RO = x.reshape(rows, num_inputs).float(), x.new_empty(rows, num_outputs)
    step = max(1, _BLOCK_NUMBERS // num_inputs)
    for made, block, added in zip(
        output_RO.split(step, dim=1),
        weight.split(step),
        [None] * num_outputs if bias is None else bias.split(step),
        strict=False,
    ):
        sums = torch.mm(x_RI, block.float().T)
        made.copy_(sums if added is None else sums.add_(added))
    return output_RO.view(*x.shape[:-1], num_outputs)
