"""Products over a pool of slots: torch's and Triton's, each against one product an expert."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from moetool.kernels import slot_products
from moetool.kernels.slot_backends import triton_kernels
from moetool.kernels.slot_products import SlotRows

EXPERTS, OUTPUTS, INPUTS = 12, 80, 96


def _event(tokens: int, top_k: int, dtype: torch.dtype, slots: int, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    index_TK = torch.stack([torch.randperm(EXPERTS + 1, generator=draw)[:top_k] for _ in range(tokens)])
    x_TI = torch.randn(tokens, INPUTS, generator=draw).to(dtype)
    flat = torch.randn(slots * (OUTPUTS * INPUTS + 64), generator=draw).to(dtype)
    weight_SOI = flat.as_strided((slots, OUTPUTS, INPUTS), (OUTPUTS * INPUTS + 64, INPUTS, 1))
    table_E = torch.randperm(slots, generator=draw)[:EXPERTS].to(torch.int32)
    return index_TK, x_TI, weight_SOI, table_E


def _expected(index_TK: torch.Tensor, x_TI: torch.Tensor, weight_SOI: torch.Tensor, table: list[int]) -> torch.Tensor:
    rows = [
        weight_SOI[table[expert]].double() @ x_TI[token].double() if expert < EXPERTS and table[expert] >= 0 else None
        for token, experts in enumerate(index_TK.tolist())
        for expert in experts
    ]
    return torch.stack([torch.full((OUTPUTS,), 7.0, dtype=torch.float64) if row is None else row for row in rows])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 20), (16, 20), (40, 20), (40, 1100), (150, 20)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_are_those_of_each_expert(
    backend: str, tokens: int, slots: int, dtype: torch.dtype, transposed: bool
) -> None:
    multiply = slot_products.multiply
    if backend == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("in a process of its own")
        if dtype == torch.bfloat16 and tokens > 16:
            dtype = torch.float16  # the interpreter multiplies bfloat16 as if it were integers
        multiply = triton_kernels().multiply
    index_TK, x_TI, weight_SOI, table_E = _event(tokens, 4, dtype, slots)
    if transposed:
        weight_SOI = weight_SOI.transpose(1, 2).contiguous().transpose(1, 2)
    table_E[3] = -1
    rows = SlotRows.of(index_TK, EXPERTS)
    assert (rows.order_R is None) == (tokens * 4 <= slot_products.FEW_ROWS)
    out = torch.full((tokens * 4, OUTPUTS), 7.0, dtype=dtype)
    multiply(x_TI, 4, rows, table_E, weight_SOI, out)
    expected = _expected(index_TK, x_TI, weight_SOI, table_E.tolist())
    near = 1e-5 if dtype == torch.float32 else 2**-7  # the interpreter cuts bits off where a GPU rounds
    torch.testing.assert_close(out.double(), expected, rtol=near, atol=4 * near)


@pytest.mark.parametrize("tokens", [3, 40])
def test_waves_and_places_change_no_bit(tokens: int) -> None:
    index_TK, x_TI, weight_SOI, table_E = _event(tokens, 3, torch.bfloat16, 14)
    rows = SlotRows.of(index_TK, EXPERTS)
    at_once = torch.zeros(tokens * 3, OUTPUTS, dtype=torch.bfloat16)
    slot_products.multiply(x_TI, 3, rows, table_E, weight_SOI, at_once)
    moved = torch.randperm(14, generator=torch.Generator().manual_seed(5))
    elsewhere, in_waves = weight_SOI[moved], torch.zeros_like(at_once)
    for wave in range(3):
        table = torch.full_like(table_E, -1)
        for expert in range(wave, EXPERTS, 3):
            table[expert] = (moved == table_E[expert]).nonzero()[0, 0]
        slot_products.multiply(x_TI, 3, rows, table, elsewhere, in_waves)
    assert torch.equal(in_waves, at_once)


def test_blocks_hold_every_row_once() -> None:
    index_TK = torch.tensor([[0, 12], [2, 0], [2, 5]]).repeat(60, 1)
    rows = SlotRows.of(index_TK, EXPERTS)
    assert rows.order_R is not None and rows.expert_B is not None and rows.block_E is not None
    assert rows.first_E is not None and rows.end_E is not None
    found = []
    for block, expert in enumerate(rows.expert_B.tolist()):
        if expert < EXPERTS:
            first = int(rows.first_E[expert]) + (block - int(rows.block_E[expert])) * rows.block_rows
            part = rows.order_R[first : min(first + rows.block_rows, int(rows.end_E[expert]))]
            assert len(part) and (rows.expert_R[part] == expert).all()
            found += part.tolist()
    assert sorted(found) == (rows.expert_R < EXPERTS).nonzero()[:, 0].tolist()


def test_triton_kernels_by_its_interpreter() -> None:
    """Triton decides when it is imported whether it interprets, so in a process of its own."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "triton and products_are"]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and " skipped" not in ran.stdout, ran.stdout


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rows", [0, 16, 64])
def test_triton_kernels_compile_for_an_h200(dtype: str, rows: int) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = triton_kernels()
    kernel = kernels.many_rows if rows else kernels.few_rows
    sizes = ("each", "num_experts", "num_outputs", "num_inputs", "x_stride", "slot_stride", "output_stride")
    constants = {"OUTPUTS": 64, "INPUTS": 64, "ROWS": rows} if rows else {"OUTPUTS": 16, "INPUTS": 256}
    numbers = dict.fromkeys(("x", "weight_SOI", "out_RO"), f"*{dtype}") | dict.fromkeys(sizes, "i32")
    signature = {name: numbers.get(name, "*i32") for name in kernel.arg_names}
    signature |= dict.fromkeys([*constants, "input_stride"], "constexpr")
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants | {"input_stride": 1}),
        target=GPUTarget("cuda", 90, 32),
    )
    assert made.asm["cubin"]


@pytest.mark.parametrize("scale", ["u8", "bf16", "fp32"])
@pytest.mark.parametrize("values", [1, 2, 3, 4, 5])
def test_packed_kernels_compile_for_an_h200(values: int, scale: str) -> None:
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = triton_kernels().few_packed_rows
    constants: dict[str, Any] = {"VALUES": values, "ROUNDED": tl.bfloat16, "GROUP": 32, "OUTPUTS": 4, "INPUTS": 512}
    pointers = {"x": "*bf16", "out_RO": "*bf16", "values_SB": "*u8", "scale_SG": f"*{scale}"}
    pointers |= {"expert_R": "*i32", "table_E": "*i32"}
    signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )
    assert made.asm["cubin"]


@pytest.mark.parametrize("tokens", [3, 40])
def test_the_device_is_asked_nothing(tokens: int) -> None:
    """Tensors without values cannot answer."""
    index_TK, x_TI, weight_SOI, table_E = (t.to("meta") for t in _event(tokens, 3, torch.bfloat16, 14))
    out = torch.empty(tokens * 3, OUTPUTS, dtype=torch.bfloat16, device="meta")
    slot_products.multiply(x_TI, 3, SlotRows.of(index_TK, EXPERTS), table_E, weight_SOI, out)
