"""Products of few rows with weights on a CPU, at memory bandwidth; of more rows by tiles where the CPU can.

A decode step multiplies one row, or a few, with every weight that it reads, so memory bandwidth bounds it. torch's
products of few rows are far below that bound (`tests/bench/test_row_products.py`). The kernels here
(`moetool.kernels.cpu.compiled`) stream the stored weights, in bfloat16 or fewer bits, for all experts of a layer in one
call. A row's result is bit-identical in any batch that a kernel computes, and differs from torch's only in rounding.
"""

import functools
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu import many_rows
from moetool.kernels.cpu.compiled import BLOCK_ROWS, chosen_prefetches, find_kernel
from moetool.kernels.cpu.dots import RowJob, RowShape
from moetool.kernels.cpu.huge_pages import ask_for_huge_pages
from moetool.kernels.cpu.inputs import ordered_rows
from moetool.kernels.cpu.kinds import BFLOAT16, BFLOAT16_COLUMNS, RowKind
from moetool.kernels.cpu.scaled_weight import ScaledWeight, StackedWeight, kernel_of
from moetool.kernels.cpu.threads import PoolCall
from moetool.kernels.cpu.tiles import (
    FEATURES,
    TILE_INPUTS,
    Rows,
    cpu_has_tiles,
    find_tiles,
    tile_products,
    widens_bfloat16,
)
from moetool.kernels.cpu.vectors import has_features

MAX_SCALED_ROWS = 8
"""`max_bfloat16_rows` for weights that torch must unpack, or widen for float32 rows."""
MIN_ELEMENTS = 2**18
"""Smallest weight, in numbers, for which calling and compiling the kernel pays."""


def max_bfloat16_rows() -> int:
    """Most rows for which the bfloat16 kernel is faster than tiles or torch (`tests/bench/test_row_products.py`)."""
    # AMX and AMD's pair products do more arithmetic, which bounds more rows. Beyond x86 nothing was measured.
    return 8 if widens_bfloat16() and has_features("avx2") else 2


class RowsOf(NamedTuple):
    """A weight [O, I], its rows of x and their rows of the output."""

    weight: torch.Tensor | ScaledWeight | StackedWeight
    sources: Sequence[int]
    targets: Sequence[int]


def multiplies(x: torch.Tensor, weight: Any, together: int = 1) -> bool:
    """Whether the kernels support the product of rows x [T, I] with a transposed weight [O, I] (`max_rows`)."""
    return 0 < x.shape[0] <= max_rows(weight, x.dtype, together)  # `len` of a tensor takes a microsecond


def max_rows(weight: Any, dtype: torch.dtype, together: int = 1) -> int:
    """Most rows of a product with this weight [O, I] in the kernels: any number with tiles; 0 if it is unsupported.

    Args:
        dtype: type of x.
        together: weights of this size that a call may multiply; they count together.
    """
    if not isinstance(weight, ScaledWeight | StackedWeight) and not takes(weight, together):
        return 0
    if isinstance(weight, torch.Tensor) and dtype != torch.bfloat16 and not weight.is_contiguous():
        return 0  # float32 keeps torch's sums
    return sys.maxsize if dtype == torch.bfloat16 and _has_tiles(weight) else _few(weight, dtype)


def _few(weight: torch.Tensor | ScaledWeight | StackedWeight, dtype: torch.dtype) -> int:
    """Most rows that the kernel for few rows computes."""
    return max_bfloat16_rows() if isinstance(weight, torch.Tensor) and dtype == torch.bfloat16 else MAX_SCALED_ROWS


def _has_tiles(weight: torch.Tensor | ScaledWeight | StackedWeight) -> bool:
    if isinstance(weight, StackedWeight):
        return all(map(_has_tiles, weight.parts))
    return weight.shape[0] % BLOCK_ROWS == 0 and weight.shape[1] % TILE_INPUTS == 0 and _tiles_of(weight) is not None


def _tiles_of(weight: torch.Tensor | ScaledWeight) -> PoolCall | None:
    kind = weight.kind if isinstance(weight, ScaledWeight) else _kind_of(weight)
    return None if kind in (None, BFLOAT16_COLUMNS) else find_tiles(kind)


def takes(weight: Any, together: int = 1) -> bool:
    """Whether the kernel supports this bfloat16 weight [O, I], or so many of its size (`max_rows`)."""
    return (
        isinstance(weight, torch.Tensor)
        and together * weight.numel() >= MIN_ELEMENTS
        and (kind := _kind_of(weight)) is not None
        and find_kernel(kind) is not None
    )


def _kind_of(weight: torch.Tensor) -> RowKind | None:
    """The kind of a weight [O, I], perhaps the transposed view of one stored [I, O]; None if no kernel supports it."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or weight.dim() != 2:
        return None
    kind = BFLOAT16 if weight.is_contiguous() else BFLOAT16_COLUMNS
    supported = weight.shape[1] % (kind.numbers * kind.unroll) == 0 and weight.shape[0] % BLOCK_ROWS == 0
    return kind if supported and (kind is BFLOAT16 or weight.T.is_contiguous()) else None


def products(
    xs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | ScaledWeight | StackedWeight]
) -> list[torch.Tensor]:
    """Compute x @ weight.T for several weights of one shape and kind in one call.

    Args:
        xs: the rows [T, I] of each weight, at most `max_rows`, all of one dtype, on the CPU.
        weights: [O, I] that `max_rows` accepts.

    Returns:
        For each weight [T, O], of the dtype of `xs`.
    """
    counts = [len(x) for x in xs]
    ends = list(accumulate(counts))
    rows = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    x_RI = xs[0] if len(xs) == 1 else torch.cat(list(xs))
    jobs = [RowsOf(weight, each, each) for weight, each in zip(weights, rows, strict=True)]
    return list(scattered_products(x_RI, jobs, ends[-1]).split(counts))


def scattered_products(x_TI: torch.Tensor, jobs: Sequence[RowsOf], num_targets: int) -> torch.Tensor:
    """Multiply rows of one x by several weights of one shape and kind, each into its row of one output.

    Args:
        x_TI: rows on the CPU.
        jobs: weights [O, I] that `max_rows` accepts. Together their targets are the rows of the output.
        num_targets: R.

    Returns:
        [R, O], of the dtype of `x_TI`.

    Raises:
        ValueError: rows of x are not as wide as those of the weights.
    """
    first = jobs[0].weight
    if x_TI.shape[1] != first.shape[1]:
        raise ValueError(f"rows have {x_TI.shape[1]} numbers, expected {first.shape[1]}")
    if isinstance(first, StackedWeight):
        made = []
        for number in range(len(first.parts)):
            its = [job._replace(weight=job.weight.parts[number]) for job in jobs]  # type: ignore[union-attr]
            made.append(scattered_products(x_TI, its, num_targets))
        return torch.cat(made, dim=1)
    narrow = x_TI.dtype == torch.bfloat16
    output_RO = x_TI.new_empty(num_targets, first.shape[0], dtype=torch.bfloat16 if narrow else torch.float32)
    own = _kind_of(first) or BFLOAT16 if isinstance(first, torch.Tensor) else first.kind
    shape = first.row_shape if isinstance(first, ScaledWeight) else _row_shape(own, *first.shape)
    rows = [Rows(*_addresses(each.weight), each.sources, each.targets) for each in jobs]
    most = _few(first, x_TI.dtype)
    by_tiles = [each for each in rows if len(each.sources) > most] if narrow else []
    if by_tiles and (multiply := _tiles_of(first)) is not None:
        tile_products(multiply, x_TI, by_tiles, shape, output_RO)
        rows = [each for each in rows if len(each.sources) <= most]
    if rows:
        kind, shape = first.multiplied(x_TI.dtype) if isinstance(first, ScaledWeight) else (own, shape)
        _multiply_few(kind, x_TI, rows, shape, output_RO)
    return output_RO.to(x_TI.dtype)


class RowWeight(NamedTuple):
    """A weight [O, I] as its kernel is called with it.

    Attributes:
        values, scale: addresses.
    """

    kind: RowKind
    shape: RowShape
    values: int
    scale: int


def row_weight(weight: Any, dtype: torch.dtype = torch.bfloat16) -> RowWeight | None:
    """Describe a weight [O, I] of any size to the kernel for few rows of a type; None if there is no kernel."""
    if isinstance(weight, ScaledWeight):
        return RowWeight(*weight.multiplied(dtype), *_addresses(weight))
    kind = _kind_of(weight) if isinstance(weight, torch.Tensor) else None
    if kind is None or find_kernel(kind) is None:
        return None
    return RowWeight(kind, _row_shape(kind, *weight.shape), *_addresses(weight))


def _multiply_few(
    kind: RowKind, x_TI: torch.Tensor, rows: Sequence[Rows], shape: RowShape, output_RO: torch.Tensor
) -> None:
    kernel, ordered = kernel_of(kind), ordered_rows(x_TI, kind)
    narrow = output_RO.dtype == torch.bfloat16
    head = RowJob(0, ordered.data_ptr(), output_RO.data_ptr(), narrow, kernel.prefetch_bytes, len(rows))
    job = [*head, *shape, *(each.values for each in rows), *(each.scale for each in rows)]
    job += accumulate((len(each.sources) for each in rows), initial=0)
    for each in rows:
        for source, target in zip(each.sources, each.targets, strict=True):
            job += (source, target)
    kernel(job)


def _addresses(weight: torch.Tensor | ScaledWeight | StackedWeight) -> tuple[int, int]:
    """Addresses of a weight's values and of its scales."""
    assert not isinstance(weight, StackedWeight)
    if isinstance(weight, ScaledWeight):
        return weight.values.data_ptr(), weight.scale.data_ptr()
    return weight.data_ptr(), 0


@functools.cache
def _row_shape(kind: RowKind, num_outputs: int, num_inputs: int) -> RowShape:
    return RowShape(
        outputs=num_outputs,
        x_bytes=4 * num_inputs,
        row_bytes=2 * num_inputs,
        groups=1,
        vectors=num_inputs // kind.numbers,
        scale_rows=num_outputs,
        scale_bytes=0,
    )


class RowLinear(torch.nn.Linear):
    """A linear layer computed by the kernels for up to `max_rows` rows, and by `many_rows.linear` beyond.

    `adopt` turns a `torch.nn.Linear` into one in place.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _linear(input, self.weight, self.bias)


class RowParameter(torch.nn.Parameter):
    """A weight [O, I] of another module: `torch.nn.functional.linear` with it uses the kernels like `RowLinear`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if (
                func is torch.nn.functional.linear
                and len(args) > 1
                and isinstance(args[1], RowParameter)
                and not kwargs
            ):
                return _linear(*args)
            return func(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    num_outputs, num_inputs = weight.shape
    rows = input.numel() // num_inputs
    few = 0 < rows <= max_bfloat16_rows() and takes(weight)
    if not few and not 0 < rows <= max_rows(weight, input.dtype):
        return many_rows.linear(input, weight, bias)
    job = RowsOf(weight, range(rows), range(rows))
    output = scattered_products(input.reshape(rows, num_inputs), [job], rows)
    output = output.view(*input.shape[:-1], num_outputs)
    return output if bias is None else output + bias


def chosen_kernels() -> dict[str, Any]:
    """Name the kernels of bfloat16 and packed weights in this process on this CPU.

    Features of the CPU decide, but for prefetch distances, which a trial finds (`moetool.kernels.cpu.compiled`).

    Returns:
        instructions (torch's name of them), few_rows (prefetch distance in bytes of each compiled kernel, by number
        format) and more_rows (products of longer inputs in bfloat16).
    """
    more = "float32 blocks" if many_rows.lacks_bfloat16_products() else "torch"
    if cpu_has_tiles():
        more = "AMX tiles"
    elif has_features(*FEATURES):
        vectors = "AVX-512" if has_features("avx512f") else "AVX2"
        more = f"{vectors} in float32" if widens_bfloat16() else "avx512_bf16"
    return {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "few_rows": chosen_prefetches(),
        "more_rows": more,
    }


def _is_faster(weight: torch.Tensor) -> bool:
    """Whether products with a weight [O, I] are faster here than torch's, at least those of many rows."""
    slow = many_rows.lacks_bfloat16_products() and weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return slow or takes(weight)


def adopt(model: torch.nn.Module, routers: Iterable[torch.nn.Module] = ()) -> int:
    """Let this package compute a model's linear layers where it is faster than torch; returns their number.

    Args:
        routers: modules that multiply by their own weights.

    Effects: changes the class of those layers to `RowLinear` and of those weights to `RowParameter`, and moves their
        weights into huge pages; compiles the kernel of more rows if there is one such layer.
    """
    linears = [m for m in model.modules() if type(m) is torch.nn.Linear and _is_faster(m.weight)]
    for module in linears:
        module.__class__ = RowLinear
        ask_for_huge_pages(module.weight, collapse=True)
    owned = [(router, *each) for router in routers for each in router.named_parameters(recurse=False)]
    owned = [(router, name, weight) for router, name, weight in owned if weight.dim() == 2 and _is_faster(weight)]
    for router, name, weight in owned:
        if not isinstance(router, RowLinear):
            setattr(router, name, RowParameter(weight, requires_grad=False))
    if linears or owned:
        find_tiles(BFLOAT16)  # no request waits for the compiler
    return len(linears) + len(owned)
