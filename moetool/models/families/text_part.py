"""Build a checkpoint's language model, which may be part of a multimodal model."""

import copy
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from moetool.base.errors import UsageError, first_line, shortened
from moetool.models.transformers_internals import has_conversions


def stands_alone(whole: Any) -> bool:
    """Whether transformers has a language model class for a config's text part, and reads the checkpoint's names so.

    Some multimodal checkpoints have names that it converts only for the whole model (MiniMax M3).

    Args:
        whole: the checkpoint's full config.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as ALONE
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as WITHIN

    text = whole.get_text_config()
    if type(text) not in ALONE or type(whole) in ALONE or type(whole) not in WITHIN:
        return type(text) in ALONE
    return has_conversions(text.model_type) or not has_conversions(whole.model_type)


def build_empty(whole: Any, file: Path, dtype: torch.dtype) -> Any:
    """Build the language model of a config on the meta device.

    If transformers builds the text part only inside a larger model, the result is that model without its other parts.

    Args:
        whole: the checkpoint's full config.
        file: config.json or the GGUF file that the config comes from, for errors.

    Raises:
        UsageError: transformers has no language model for this config, or computes it wrongly, or the config lacks a
            value.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    text = whole.get_text_config()
    alone = stands_alone(whole)
    if not alone and type(whole) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise UsageError(
            f"{file} is of the model type {whole.model_type!r}, whose text part ({text.model_type}) transformers "
            "builds only with other parts, not as a language model; 'moetool models' lists supported families"
        )
    kind, config = (AutoModelForCausalLM, text) if alone else (AutoModelForImageTextToText, whole)
    try:
        with torch.device("meta"):
            model = kind.from_config(copy.deepcopy(config), dtype=dtype).eval()
    except Exception as error:  # a missing value fails where the model first needs it
        remedy = "install what is missing" if isinstance(error, ImportError) else "a value there is missing or wrong"
        raise UsageError(
            f"transformers cannot build a {text.model_type} model from {file}: "
            f"{field_of(vars(text), error)}{shortened(first_line(error), 200)}; {remedy}"
        ) from error
    if text.model_type == "granitemoehybrid":
        _require_norm_by_group(model, file)
    if not alone:
        _cut_out_other_parts(model)
    return model


def field_of(config: Mapping[str, Any], error: Exception) -> str:
    """Return the only field whose text transformers' error quotes, unless the error names it; else an empty string."""
    quoted = re.findall(r"'([^']+)'", first_line(error))
    names = {name for name, text in _texts(config) if text in quoted}
    return f"{names.pop()}: " if len(names) == 1 and not any(name in first_line(error) for name in names) else ""


def _texts(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Fields of a config, nested ones too, whose value is a text."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and not str(name).startswith("_"):
            yield str(name), value


def _require_norm_by_group(model: Any, file: Path) -> None:
    """Raises: UsageError: transformers normalizes all groups of a state-space layer together."""
    for module in model.modules():
        if getattr(module, "n_groups", 1) > 1 and not hasattr(module.norm, "group_size"):
            raise UsageError(
                f"{file}: mamba_n_groups: found {module.n_groups}, and transformers {version('transformers')} would "
                "compute wrong logits, since it normalizes all groups together; use transformers 5.23 or newer"
            )


def _cut_out_other_parts(model: Any) -> None:
    base, decoder = model.base_model, model.get_decoder()
    if any(child is decoder for child in base.children()):
        for name, child in base.named_children():
            if child is not decoder:
                base._modules[name] = None
        base._parameters.clear()
        left = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in model.all_tied_weights_keys.keys() - left:
            del model.all_tied_weights_keys[name]
