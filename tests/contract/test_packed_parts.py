"""Packed experts that a kernel multiplies where they lie: the weights that it reads there, and its products."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.kernels.packed_part import PackedPart, Values
from moetool.kernels.slot_backends import triton_kernels
from moetool.kernels.slot_products import SlotRows
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.packed_parts import packed_parts
from moetool.models.loading import load_lazy
from moetool.models.weights.value_scaling import four_bits, scale_values
from moetool.runtime.experts.copies import stride_of
from tests.contract.test_quantized import NAMES, written

UNPACKED = {
    "mixtral-gptq",
    "qwen3_moe-gptq_act_order",
    "mixtral-awq",
    "qwen3_moe-fp8_tensor",
    "qwen3_moe-nvfp4",
    "qwen3_moe-int4_asymmetric",
}
PLACES = {7: 2, 1: 0, 4: 5}  # slots and the experts in them


def _weight(part: PackedPart, slot: int) -> torch.Tensor:
    """Weights [O, I] in float32 that torch unpacks from a slot's bytes."""
    _, outputs, inputs = part.shape
    rows = part.values_SB[slot, : outputs * part.row_bytes].reshape(outputs, part.row_bytes)
    numbers = {
        Values.E4M3: lambda: rows.contiguous().view(torch.float8_e4m3fn).float(),
        Values.INT8: lambda: rows.contiguous().view(torch.int8).float(),
        Values.BIASED8: lambda: rows.float() - 128,
        Values.E2M1: lambda: four_bits(rows, e2m1=True),
        Values.BIASED4: lambda: four_bits(rows, e2m1=False) - 8,
    }[part.values]()[:, :inputs]
    high = -(-outputs // part.block[0])
    scale = scale_values(part.scale_SG[slot, : high * part.groups].reshape(high, part.groups))
    scale = scale.repeat_interleave(part.block[0], 0)[:outputs].repeat_interleave(part.block[1], 1)[:, :inputs]
    return (numbers * scale).to(part.rounded).float()


def _loaded(name: str, folder: Path) -> tuple[Any, list[torch.Tensor]]:
    path, _ = written(name, folder)
    loaded = load_lazy(Checkpoint.open(path), torch.float32, products=False)  # slots as on a GPU
    assert loaded.files is not None
    pool = torch.zeros(9, stride_of(loaded.files.slot_bytes), dtype=torch.uint8)
    return loaded, [row[: loaded.files.slot_bytes] for row in pool]


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_the_weights_of_each_expert(name: str, tmp_path: Path) -> None:
    loaded, slots = _loaded(name, tmp_path)
    for layer in loaded.layers:
        for slot, expert in PLACES.items():
            loaded.files.read_into(loaded.spec.expert_key(layer.index, expert), slots[slot])
        parts = packed_parts(loaded.files, layer.index, layer.form, slots)
        assert (parts is None) == (name in UNPACKED)
        stacked = loaded.files.stacked(layer, torch.float32).values()
        for number, (part, expected) in enumerate(zip(parts or (), stacked, strict=False)):
            transposed = (layer.form.up_transposed, layer.form.down_transposed)[number > 0] and expected.dim() == 3
            for slot, expert in PLACES.items():
                if isinstance(part, torch.Tensor):
                    assert torch.equal(part[slot].float(), expected[expert])
                else:
                    weight = _weight(part, slot)
                    assert torch.equal(weight, expected[expert].T if transposed else expected[expert])
    loaded.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(set(NAMES) - UNPACKED))
def test_packed_products_are_those_of_each_expert(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
        pytest.skip("in a process of its own")
    loaded, slots = _loaded(name, tmp_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layer = loaded.layers[-1]
    moved = list(torch.zeros(9, stride_of(len(slots[0])), dtype=torch.uint8, device=device)[:, : len(slots[0])])
    for slot, expert in PLACES.items():
        loaded.files.read_into(loaded.spec.expert_key(layer.index, expert), slots[slot])
        moved[slot].copy_(slots[slot])
    table = torch.full((layer.num_experts,), -1, dtype=torch.int32)
    for slot, expert in PLACES.items():
        table[expert] = slot
    draw = torch.Generator().manual_seed(1)
    index = torch.tensor([[2, 0], [5, 3], [0, 5]])  # nobody has 3
    rows = SlotRows.of(index.to(device), layer.num_experts)
    for part in packed_parts(loaded.files, layer.index, layer.form, moved) or ():
        if isinstance(part, torch.Tensor):
            continue
        x = torch.randn(3, part.shape[2], generator=draw).to(dtype)
        out = torch.full((6, part.shape[1]), 7.0, dtype=dtype, device=device)
        triton_kernels().multiply_packed(x.to(device), 2, rows, table.to(device), part, out)
        for place, expert in enumerate(index.flatten().tolist()):
            expected = torch.full((part.shape[1],), 7.0, dtype=torch.float64)
            if table[expert] >= 0:
                expected = _weight(part, int(table[expert])).to(dtype).double().cpu() @ x[place // 2].double()
            near = 1e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(out[place].double().cpu(), expected, rtol=near, atol=4 * near)
    loaded.close()


def test_packed_kernel_by_the_interpreter_of_triton() -> None:
    """Triton decides when it is imported whether it interprets, so in a process of its own."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the GPU runs the kernel itself")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "packed_products"]
    ran = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and " skipped" not in ran.stdout, ran.stdout
