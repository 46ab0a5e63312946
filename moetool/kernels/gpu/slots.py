# mypy: disable-error-code="no-untyped-def"
"""`moetool.kernels.slot_products.multiply` in Triton: weights are read from the slots that the table names.

Both kernels sum the inputs in float32, in an order that depends only on the weight's width.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from moetool.kernels.packed_part import WIDEST, PackedPart
from moetool.kernels.slot_products import SlotRows

# Part of a weight that one program multiplies. On an H100, one row by eight experts of Qwen3-30B-A3B takes 28 us; with
# 16, 256 and four warps it takes 37.
_FEW_OUTPUTS, _FEW_INPUTS, _FEW_WARPS = 4, 1024, 2
_OUTPUTS, _INPUTS = 64, 64
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def few_rows(
    x,
    expert_R,
    table_E,
    weight_SOI,
    out_RO,
    each,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    slot_stride,
    output_stride,
    input_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One row times `OUTPUTS` rows of its expert's weight."""
    row = tl.program_id(1)
    expert = tl.load(expert_R + row)
    if expert >= num_experts:
        return
    slot = tl.load(table_E + expert)
    if slot < 0:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight = weight_SOI + slot.to(tl.int64) * slot_stride + output.to(tl.int64)[:, None] * output_stride
    source = x + (row // each).to(tl.int64) * x_stride
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        inside = inputs < num_inputs
        numbers = tl.load(source + inputs, mask=inside, other=0.0).to(tl.float32)
        part = tl.load(
            weight + inputs.to(tl.int64)[None, :] * input_stride,
            mask=(output < num_outputs)[:, None] & inside[None, :],
            other=0.0,
        )
        total += part.to(tl.float32) * numbers[None, :]
    target = out_RO + row.to(tl.int64) * num_outputs + output
    tl.store(target, tl.sum(total, axis=1).to(out_RO.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def few_packed_rows(
    x,
    expert_R,
    table_E,
    values_SB,
    scale_SG,
    out_RO,
    each,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    values_stride,
    row_bytes,
    scale_stride,
    groups,
    block_outputs,
    block_inputs,
    VALUES: tl.constexpr,
    ROUNDED: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One row times `OUTPUTS` rows of its expert's weight, as `moetool.kernels.packed_part.PackedPart` describes it.

    `GROUP` inputs share a scale, at most `INPUTS`.
    """
    row = tl.program_id(1)
    expert = tl.load(expert_R + row)
    if expert >= num_experts:
        return
    slot = tl.load(table_E + expert)
    if slot < 0:
        return
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_O = output < num_outputs
    values = values_SB + slot.to(tl.int64) * values_stride + output.to(tl.int64)[:, None] * row_bytes
    scales = scale_SG + slot.to(tl.int64) * scale_stride + (output // block_outputs)[:, None] * groups
    source = x + (row // each).to(tl.int64) * x_stride
    total = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        if VALUES >= 4:  # two in a byte
            place = first // 2 + tl.arange(0, INPUTS // 2)
            pair = tl.load(values + place[None, :], mask=inside_O[:, None] & (2 * place < num_inputs)[None, :], other=0)
            bits = tl.join(pair & 15, pair >> 4).reshape(OUTPUTS, INPUTS).to(tl.int32)
        else:
            mask = inside_O[:, None] & (inputs < num_inputs)[None, :]
            bits = tl.load(values + inputs[None, :], mask=mask, other=0).to(tl.int32)
        if VALUES == 1:  # exponent and fraction at a float32's positions, minus the difference of the biases
            part = ((bits & 127) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
            part = tl.where(bits >= 128, -part, part)
            part = tl.where((bits & 127) == 127, float("nan"), part)
        elif VALUES == 2:
            part = ((bits ^ 128) - 128).to(tl.float32)
        elif VALUES == 3:
            part = (bits - 128).to(tl.float32)
        elif VALUES == 4:
            part = ((bits & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37
            part = tl.where(bits >= 8, -part, part)
        else:
            part = (bits - 8).to(tl.float32)
        starts = first + tl.arange(0, INPUTS // GROUP) * GROUP
        mask = inside_O[:, None] & (starts < num_inputs)[None, :]
        scale = tl.load(scales + (starts // block_inputs)[None, :], mask=mask, other=0)
        if scale.dtype == tl.uint8:
            scale = tl.exp2(scale.to(tl.float32) - 127.0)
        part = part.reshape(OUTPUTS, INPUTS // GROUP, GROUP) * scale.to(tl.float32)[:, :, None]
        part = part.reshape(OUTPUTS, INPUTS).to(ROUNDED).to(x.dtype.element_ty)
        numbers = tl.load(source + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
        total += part.to(tl.float32) * numbers[None, :]
    target = out_RO + row.to(tl.int64) * num_outputs + output
    tl.store(target, tl.sum(total, axis=1).to(out_RO.dtype.element_ty), mask=inside_O)


@triton.jit
def many_rows(
    x,
    order_R,
    first_E,
    end_E,
    expert_B,
    block_E,
    table_E,
    weight_SOI,
    out_RO,
    each,
    num_experts,
    num_outputs,
    num_inputs,
    x_stride,
    slot_stride,
    output_stride,
    input_stride,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """`ROWS` rows of one expert times `OUTPUTS` rows of its weight."""
    block = tl.program_id(0)
    expert = tl.load(expert_B + block)
    if expert >= num_experts:
        return
    slot = tl.load(table_E + expert)
    if slot < 0:
        return
    place = tl.load(first_E + expert) + (block - tl.load(block_E + expert)) * ROWS + tl.arange(0, ROWS)
    used = place < tl.load(end_E + expert)
    row = tl.load(order_R + place, mask=used, other=0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    weight = weight_SOI + slot.to(tl.int64) * slot_stride + output.to(tl.int64)[None, :] * output_stride
    source = x + (row // each).to(tl.int64)[:, None] * x_stride
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, num_inputs, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        inside = inputs < num_inputs
        numbers = tl.load(source + inputs[None, :], mask=used[:, None] & inside[None, :], other=0.0)
        part = tl.load(
            weight + inputs.to(tl.int64)[:, None] * input_stride,
            mask=inside[:, None] & (output < num_outputs)[None, :],
            other=0.0,
        )
        total = tl.dot(numbers, part.to(numbers.dtype), total, input_precision="ieee")
    target = out_RO + row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(target, total.to(out_RO.dtype.element_ty), mask=used[:, None] & (output < num_outputs)[None, :])


def multiply(
    x: torch.Tensor, each: int, rows: SlotRows, table_E: torch.Tensor, weight_SOI: torch.Tensor, out_RO: torch.Tensor
) -> None:
    """See `moetool.kernels.slot_products.multiply`; rows of `x` and `out_RO` must be contiguous."""
    _, num_outputs, num_inputs = weight_SOI.shape
    sizes = (each, rows.num_experts, num_outputs, num_inputs, x.stride(0), *weight_SOI.stride())
    if rows.order_R is None:
        grid: Any = (triton.cdiv(num_outputs, _FEW_OUTPUTS), len(rows.expert_R))
        few_rows[grid](
            *(x, rows.expert_R, table_E, weight_SOI, out_RO, *sizes),
            OUTPUTS=_FEW_OUTPUTS,
            INPUTS=_FEW_INPUTS,
            num_warps=_FEW_WARPS,
        )
        return
    assert rows.expert_B is not None
    grid = (len(rows.expert_B), triton.cdiv(num_outputs, _OUTPUTS))
    places = (rows.order_R, rows.first_E, rows.end_E, rows.expert_B, rows.block_E)
    inputs = _INPUTS if x.dtype.itemsize == 2 else _INPUTS // 2
    many_rows[grid](
        x, *places, table_E, weight_SOI, out_RO, *sizes, ROWS=rows.block_rows, OUTPUTS=_OUTPUTS, INPUTS=inputs
    )


def multiply_packed(
    x: torch.Tensor, each: int, rows: SlotRows, table_E: torch.Tensor, part: PackedPart, out_RO: torch.Tensor
) -> None:
    """Like `multiply`, for few rows and packed weights."""
    assert rows.order_R is None
    _, num_outputs, num_inputs = part.shape
    grid: Any = (triton.cdiv(num_outputs, _FEW_OUTPUTS), len(rows.expert_R))
    few_packed_rows[grid](
        *(x, rows.expert_R, table_E, part.values_SB, part.scale_SG, out_RO),
        *(each, rows.num_experts, num_outputs, num_inputs, x.stride(0)),
        *(part.values_SB.stride(0), part.row_bytes, part.scale_SG.stride(0), part.groups, *part.block),
        VALUES=int(part.values),
        ROUNDED=_TYPES[part.rounded],
        GROUP=min(part.block[1], WIDEST) if part.groups > 1 else WIDEST,
        OUTPUTS=_FEW_OUTPUTS,
        INPUTS=WIDEST,
        num_warps=_FEW_WARPS,
    )
