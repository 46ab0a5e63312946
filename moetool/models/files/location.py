"""Location of a model: embedded, a directory, a hub name, or a shape in recipes/shapes/."""

import re
from pathlib import Path

from moetool.base import assets
from moetool.base.errors import UsageError, unknown_name
from moetool.models.files.hub import HubName, download, parse_hub_name

REFERENCE = "reference"


def shape_names() -> list[str]:
    """Names of the model shapes in the package."""
    return sorted(path.parent.name for path in assets.path("recipes", "shapes").glob("*/config.json"))


def locate(model: str) -> Path:
    """Return the location of a model: `reference`, a directory, a GGUF file, or a hub name (`HubName`).

    Effects: downloads a hub name to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such model, or the folder is not one.
        CapacityError, MismatchError, MoetoolError: see `moetool.models.files.hub.download`.
    """
    if model == REFERENCE:
        return assets.path("data", "reference-moe")
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            ggufs = sorted(file.name for file in path.glob("*.gguf"))
            other = f" or one of its {len(ggufs)} GGUF files, such as {path / ggufs[0]}" if ggufs else ""
            raise UsageError(
                f"{path} is not a model: it has no config.json; give a directory in Hugging Face format{other}"
            )
        return path
    if path.is_file():
        raise UsageError(f"{path} is one file, expected a model; give its directory, or a .gguf file")
    name = _on_hub(
        model,
        f"no model at {model!r}: give {REFERENCE!r}, a local directory, a .gguf file, or a hub name like org/model",
    )
    return download(name, weights=True)


def locate_config(model: str) -> Path:
    """Return the folder of a config.json.

    Args:
        model: `reference`, the name of a shape, a folder, the path of a config.json, or a name on the Hugging Face hub.

    Effects: downloads config and tokenizer of a hub name to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such config.
        CapacityError, MoetoolError: see `moetool.models.files.hub.download`.
    """
    path = Path(model)
    if model in shape_names():
        return assets.path("recipes", "shapes", model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if model == REFERENCE or path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return locate(model)
    if re.fullmatch(r"[\w.-]+", model) and not path.exists():
        unknown = unknown_name("shape", model, [REFERENCE, *shape_names()])
        raise UsageError(
            f"{unknown}; or give a directory with a config.json, a .gguf file or a hub name like org/model"
        )
    name = _on_hub(
        model,
        f"no config at {model!r}: give a directory with a config.json, that file, a hub name like org/model, or one of "
        f"{', '.join([REFERENCE, *shape_names()])}",
    )
    return download(name, weights=False)


def _on_hub(model: str, problem: str) -> HubName:
    """Parse a name on the hub. Raises: UsageError: it cannot be one, with the problem."""
    name = parse_hub_name(model)
    if name is None or Path(model).exists():
        raise UsageError(problem)
    return name
