"""What moetool uses of transformers beyond its public interface. The list only gets shorter."""

from typing import Any


def attention_of(model: Any) -> str:
    """Name of a model's attention function."""
    name: str = model.config.get_text_config()._attn_implementation
    return name
