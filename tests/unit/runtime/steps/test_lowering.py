"""Lowered steps on plain arrays beside transformers' modules, family by family."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM

from moetool.base.families import FAMILIES
from moetool.kernels import norms
from moetool.kernels.cpu import matmul
from moetool.kernels.cpu.many_rows import lacks_bfloat16_products
from moetool.models.experts.moe_layers import moe_layers
from moetool.runtime.decoding import row_shapes
from moetool.runtime.kv.latents import Expansion, is_unexpanded, keep_latents
from moetool.runtime.steps.lowering import LoweredStep, PageStrides, lower
from moetool.runtime.steps.recorder import Unrecordable, record_step
from tests import families
from tests.refusals import refused

_WIDTHS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32} | {
    "moe_intermediate_size": 64,
    "intermediate_size": 96,
    "shared_expert_intermediate_size": 32,
}
_LATENTS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32} | {
    "num_key_value_heads": 4,
    "head_dim": 16,
}
_PAGED = [family for family in FAMILIES.values() if not (family.refused or family.own_cache)]
_ROWS = 16


def _own_token(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, recorder: Any = None, **given: Any
) -> Any:
    """Attention of each token to itself alone."""
    expansion = Expansion.of(module) if is_unexpanded(module) else None
    if recorder is not None:
        values = {"scaling": given.get("scaling"), "window": given.get("sliding_window"), "sinks": given.get("s_aux")}
        return recorder.record_attention(module, query, key, value, {**values, "expansion": expansion}), None
    if expansion is not None:
        return expansion.values(key[0].expand(query.shape[1], -1, -1)).transpose(0, 1)[None].contiguous(), None
    return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    AttentionInterface.register("own_token", _own_token)
    yield


def _model(family: str, **changed: Any) -> Any:
    torch.manual_seed(0)
    config = families.config(family)
    widths = {name: size for name, size in _WIDTHS.items() if hasattr(config, name)}
    widths |= _LATENTS if hasattr(config, "kv_lora_rank") else {}
    model = AutoModelForCausalLM.from_config(families.config(family, **widths, **changed), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(0, 0.15)
            if name.endswith("sinks"):  # one key takes all the weight
                parameter.fill_(-torch.inf)
    model.set_attn_implementation("own_token")
    keep_latents(model)
    matmul.adopt(model)
    norms.adopt(model)
    return model.eval()


def _lowered(model: Any, rows: int) -> LoweredStep:
    heads, width, *_ = row_shapes(model.config)[0]
    strides = PageStrides(*[2 * heads * width, 2 * width] * 2)
    return lower(record_step(model, moe_layers(model), rows), lambda layer: strides, lambda layer: None)


def _run(model: Any, step: LoweredStep, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The logits of tokens that each attend to themselves."""
    rows, recording = ids.shape[1], step.recording
    recording.ids.copy_(ids)
    recording.positions.copy_(positions)
    for call in recording.before:
        for target, made in zip(
            tree_leaves(call.output), tree_leaves(call.module(*call.args, **call.kwargs)), strict=True
        ):
            target.copy_(made)
    heads, width, value_width, _ = row_shapes(model.config)[0]
    pages = torch.full((len(step.pages_L5), 2, _ROWS, heads, width), torch.nan, dtype=torch.bfloat16)
    places, spans = torch.arange(rows) + 5, torch.tensor([[row, 1] for row in range(rows)])
    room = torch.zeros(step.score_bytes[0] * rows + step.score_bytes[1])
    step.room[0] = room.data_ptr()
    for layer, (key, value) in enumerate(pages):
        vectors = (places.data_ptr(), places.data_ptr(), spans.data_ptr())
        step.pages_L5[layer] = (key.data_ptr(), (value if value_width else key).data_ptr(), *vectors)
    at = 0
    for call in step.experts:
        step.program.run(at, call.first, 1)
        call.output.copy_(call.layer.experts(*call.inputs).view(call.output.shape))
        at = call.after
    step.program.run(at, len(step.program), 1)
    return step.logits


@pytest.mark.parametrize("family", [family.name for family in _PAGED if not family.unrecorded])
def test_a_step_has_the_bits_of_the_modules(family: str) -> None:
    """With latents, whose products are summed in another order, it differs by rounding.

    Where a CPU has bfloat16 products, torch sums by them in another order, and one sum in 10,000 rounds to its other
    neighbour: there one draw of four has equal bits, and the others differ by rounding. flex_olmo norms after its
    experts, not before, and so triples such a difference at each layer.
    """
    families.require_known(family)
    model = _model(family)
    latent = hasattr(model.config, "kv_lora_rank")
    draw = torch.Generator().manual_seed(1)
    same_sums = lacks_bfloat16_products()
    for rows in (1, 3):
        step, differences = _lowered(model, rows), []
        for _ in range(2 if same_sums else 4):
            ids, positions = (torch.randint(3, 60, (1, rows), generator=draw) for _ in range(2))
            with torch.no_grad():
                expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
                made = _run(model, step, ids, positions)
                differences.append(float((made.float() - expected.float()).norm() / expected.float().norm()))
        assert max(differences) <= (0.03 if latent or family == "flex_olmo" else 0.01)
        assert latent or (max(differences) == 0 if same_sums else 0 in differences), differences


@pytest.mark.parametrize(
    "family", [each.name for each in _PAGED if each.unrecorded and "indexers" not in each.unrecorded]
)  # indexed ones are refused by their pages, before any recording
def test_other_families_are_said_to_run_by_their_modules(family: str) -> None:
    with pytest.raises(Unrecordable, match=r"no compiled function|not called with routes"):
        _lowered(_model(family), 1)


def test_memory_is_reused_between_layers() -> None:
    sizes = []
    for layers in (2, 8):
        step = _lowered(_model("qwen3_moe", num_hidden_layers=layers), 1)
        sizes.append(max(each.numel() for each in step.program.kept if isinstance(each, torch.Tensor)))
    assert sizes[1] < 1.5 * sizes[0]


def test_a_model_is_as_before_after_its_recording() -> None:
    model, seen = _model("qwen3_moe"), []
    model.model.layers[0].mlp.gate.register_forward_hook(lambda *given: seen.append(given))
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    _lowered(model, 1)
    assert not seen
    assert forwards == {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]), use_cache=False)
    assert len(seen) == 1


def test_an_unknown_operation_is_named() -> None:
    model = _model("qwen3_moe")
    plain = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: plain(F.hardswish(x))
    with refused(Unrecordable, "hardswish"):
        _lowered(model, 1)
    assert "forward" not in vars(model.model.layers[0].mlp.experts)


def test_numbers_that_decide_are_refused() -> None:
    model = _model("qwen3_moe")
    plain = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: plain(x) if x.sum() > 0 else plain(-x)
    with pytest.raises(Unrecordable, match=r"_local_scalar_dense|item"):
        _lowered(model, 1)
