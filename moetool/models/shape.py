"""The shape of a model, from its config alone where it has no weights."""

from pathlib import Path

from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.models.checkpoint import Checkpoint, UnknownFamily, read_config
from moetool.models.config_model import ConfigModel
from moetool.models.files.location import REFERENCE, locate, locate_config
from moetool.models.files.tensor_index import has_weights


def open_shape(model: str) -> Checkpoint | ConfigModel:
    """Open a model whose shape matters, and which need not run.

    Args:
        model: argument of `locate_config`.

    Raises:
        UsageError: there is no such model, or its config lacks a number.
        MismatchError: its config is damaged.
    """
    path = locate_config(model)
    try:
        return Checkpoint(path, name=model, weights=False)
    except UnknownFamily:
        if path.is_file():  # a GGUF file of a family that this version of transformers lacks
            raise
        return ConfigModel(path, model, *read_config(path / "config.json"))


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
    try:
        checkpoint = Checkpoint(folder, weights=has_weights(folder))
    except UnknownFamily:
        model = ConfigModel(folder, name, *read_config(folder / "config.json"))
        return model.spec, model.num_hidden_layers
    layers = getattr(checkpoint.config, "num_hidden_layers", None)
    return checkpoint.spec, None if layers is None else int(layers)
