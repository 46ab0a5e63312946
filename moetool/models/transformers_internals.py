"""Parts of transformers that moetool uses beyond the public interface, in one list that only gets shorter.

`make oldest` and `make newest` run it with the oldest and the newest release.
"""

from typing import Any


def attention_of(model: Any) -> str:
    """Name of a model's attention function."""
    return model.config.get_text_config()._attn_implementation


def router_recorders(module: Any) -> list[Any]:
    """The classes of routers that a module records, each with the position of the logits in its output."""
    found = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits", [])
    return found if isinstance(found, list) else [found]


def expert_gate(module: Any) -> tuple[Any, bool]:
    """The gate function of an experts' module, and whether it is SiLU of the first half times the second half."""
    from torch.nn import SiLU
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import _default_apply_gate

    gate = module._apply_gate
    is_default = getattr(gate, "__func__", None) is _default_apply_gate
    return gate, is_default and isinstance(module.act_fn, SiLU | SiLUActivation)


def clamped_gate(gate: Any) -> tuple[float, float] | None:
    """The constants alpha and limit of an `expert_gate` that is gpt-oss's; None: it is another one."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    if getattr(gate, "__func__", None) is not GptOssExperts._apply_gate:
        return None
    return float(gate.__self__.alpha), float(gate.__self__.limit)


def wide_parameters(model: Any, dtype: Any) -> tuple[str, ...]:
    """Parts of the names of parameters that stay in float32 in a model of another dtype."""
    return tuple(model._get_dtype_plan(dtype))


def initialize(model: Any, module: Any) -> None:
    """Compute the buffers and parameters of a module as for a new model."""
    model._init_weights(module)


def conversion_mapping(model: Any) -> list[Any]:
    """Renamings and conversions from the tensors of a checkpoint to a model's parameters."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)


def has_conversions(model_type: str) -> bool:
    """Whether transformers converts the tensors of checkpoints of this type."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(model_type))


def weight_loading() -> Any:
    """The module with the classes of a `conversion_mapping`, and the functions that apply them to names."""
    from transformers import core_model_loading

    return core_model_loading
