"""The shape of a local model, from its config alone where it has no weights."""

from pathlib import Path

from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.location import REFERENCE, locate
from moetool.models.files.tensor_index import has_weights


def shape_of(name: str) -> tuple[ModelSpec, int | None]:
    """Return the spec of a local model, and its number of layers, if known.

    Args:
        name: `reference`, or a model's folder; config.json is enough.

    Raises:
        UsageError: there is no such model.
    """
    if name != REFERENCE and not (Path(name) / "config.json").is_file():
        raise UsageError(
            f"no model at {name!r}: give {REFERENCE!r}, a directory with a model's config.json, or a trace directory"
        )
    folder = locate(name)
    checkpoint = Checkpoint(folder, weights=has_weights(folder))
    layers = getattr(checkpoint.config, "num_hidden_layers", None)
    return checkpoint.spec, None if layers is None else int(layers)
