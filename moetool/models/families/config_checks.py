"""Check the sizes in a model's config before a model is built from them."""

from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError, shortened
from moetool.base.validation import MAX_EXPERTS
from moetool.models.families.config_relations import EXPERTS, require_relations

_LEAST = {
    "num_hidden_layers": 1,
    "hidden_size": 1,
    "num_attention_heads": 1,
    "vocab_size": 1,
    "unpadded_vocab_size": 1,
    "max_position_embeddings": 1,
    "intermediate_size": 0,
    "moe_intermediate_size": 0,
    **dict.fromkeys(EXPERTS, 0),
}
_MOST = {**dict.fromkeys(EXPERTS, MAX_EXPERTS), "max_position_embeddings": 2**40}
_MAX_SIZE = 2**24


def check_config(config: Any, raw: dict[str, Any], file: Path) -> None:
    """Refuse a text config with impossible sizes, such as negative ones, or with fields that contradict one another.

    Args:
        raw: the content of its file.

    Raises:
        MismatchError: a size is not a whole number, too small or too large, or a relation is broken.
    """
    for name, least in _LEAST.items():
        value, most = _value(config, name), _MOST.get(name, _MAX_SIZE)
        if value is not None and not isinstance(value, list) and not _within(value, least, most):
            raise _wrong(file, name, value, least, most)
    require_relations(config, raw, file)


def _value(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except Exception:  # transformers refuses a value that differs by layer
        return None


def _within(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _wrong(file: Path, name: str, value: Any, least: int, most: int) -> MismatchError:
    return MismatchError(
        f"{file}: {name}: found {shortened(repr(value))}, expected {least} to {most:,}; correct it, or download the "
        f"model again"
    )
