"""The name by which a model takes its cache."""

import inspect
from typing import Any


def cache_argument(model: Any) -> str:
    """Name of the cache among the arguments and results of a model's forward: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
