"""Slots that hold experts as stored: which scales they take, and that they stand for the weights of the format."""

from dataclasses import replace

import pytest
import torch

from moetool.kernels.cpu.compiled import find_kernel
from moetool.kernels.cpu.kinds import BFLOAT16
from moetool.models.experts.expert_files import slot_forms
from moetool.models.experts.expert_form import ExpertForm, Part
from moetool.models.experts.scaled_slot import ScaledSlot, stays_scaled
from moetool.models.experts.stored_expert import DenseSlot, layout_of
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.weights.format import StoredWeight, unpack
from moetool.models.weights.scaled import Scaled
from tests.unit.models.weights.test_format import scheme_config, stored

pytestmark = pytest.mark.skipif(find_kernel(BFLOAT16) is None, reason="numba compiles no kernel here")

SHAPES = [(512, 1024), (512, 512), (1024, 512)]
Shape = tuple[int, ...]


def _expert(
    shape: Shape, scale_shape: Shape, strategy: str = "channel", dtype: torch.dtype = torch.float32, form: str = "float"
) -> tuple[StoredWeight, dict[str, torch.Tensor]]:
    """The second expert of two that lie stacked, and its tensors."""
    draw = torch.Generator().manual_seed(3)
    values = (torch.randn(2, *shape, generator=draw) * 40).to(torch.int8 if form == "int" else torch.float8_e4m3fn)
    scale = torch.rand(2, *scale_shape, generator=draw) + 0.01
    scale = (scale * 2 + 120).to(torch.uint8) if dtype.itemsize == 1 else scale.to(dtype)
    scale = scale.view(dtype) if dtype.itemsize == 1 else scale
    if form == "block":
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        tensors = {"a.weight": values, "a.weight_scale_inv": scale}
    else:
        weights = {"num_bits": 8, "type": form, "strategy": strategy, "symmetric": True}
        config = scheme_config(f"{form}-quantized", weights)
        tensors = {"a.weight": values, "a.weight_scale": scale}
    made = stored(config, tensors)["a.weight"].share(1, 2, shape)
    return made, {"values": tensors["a.weight"][1], "scale": scale[1]}


def _same_as_unpacked(shape: Shape, experts: tuple[StoredWeight, dict[str, torch.Tensor]]) -> type:
    """The kind of slot for a weight, which must give the bits that its codec unpacks."""
    weight, tensors = experts
    layout = layout_of([[weight]])
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    for field in layout.fields:
        field.of(memory).copy_(tensors[field.role])
    (form,) = slot_forms([layout], (shape,), torch.bfloat16)
    assert isinstance(form, ScaledSlot | DenseSlot)
    slot = torch.empty(form.num_bytes, dtype=torch.uint8)
    form.fill(layout, memory, slot)
    assert torch.equal(form.views(slot)[0].to(torch.bfloat16), unpack(weight.codec, tensors, shape, torch.bfloat16))
    return type(form)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_scale_for_each_column_is_not_taken_for_one_of_a_row_or_group(shape: Shape) -> None:
    assert _same_as_unpacked(shape, _expert(shape, (1, shape[1]))) is DenseSlot
    assert _same_as_unpacked(shape, _expert(shape, (shape[0], 1))) is ScaledSlot


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["float", "int"])
def test_one_scale_for_a_weight_stays_with_it(shape: Shape, form: str) -> None:
    assert _same_as_unpacked(shape, _expert(shape, (1, 1), "tensor", form=form)) is ScaledSlot


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_every_type(dtype: torch.dtype) -> None:
    """Weights of compressed-tensors are rounded to float16 where their scales are, those in blocks never."""
    shape = (512, 512)
    kept = DenseSlot if dtype == torch.float16 else ScaledSlot
    assert _same_as_unpacked(shape, _expert(shape, (512, 1), dtype=dtype)) is kept
    assert _same_as_unpacked(shape, _expert(shape, (4, 4), dtype=dtype, form="block")) is ScaledSlot


def test_a_part_of_ggml_and_dense_blocks_is_unpacked() -> None:
    values, _ = _expert((512, 512), (1, 1), "tensor")
    ggml = replace(values, tensors={"values": values.tensors["values"]}, codec=GgmlCodec((("values", 8),)))
    (form,) = slot_forms([layout_of([[ggml, values]])], ((1024, 512),), torch.bfloat16)
    assert isinstance(form, DenseSlot)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_config_alone_says_whether_slots_hold_experts_as_stored(strategy: str, transposed: bool) -> None:
    """An output is a column of a matrix that lies [in, out], and each has a scale of its own by channel."""
    shape = (1024, 512)
    outputs = (1, shape[1]) if transposed else (shape[0], 1)
    kept = _same_as_unpacked(shape, _expert(shape, (1, 1) if strategy == "tensor" else outputs, strategy)) is ScaledSlot
    form = ExpertForm(
        num_experts=2,
        parts=(Part(parameters=("up",), share=shape), Part(parameters=("down",), share=shape[::-1])),
        up_transposed=transposed,
        down_transposed=transposed,
        gate=torch.relu,
    )
    assert stays_scaled(Scaled(strategy), form, torch.bfloat16, torch.bfloat16) == kept
    assert not stays_scaled(Scaled(strategy), form, torch.bfloat16, torch.float16)
