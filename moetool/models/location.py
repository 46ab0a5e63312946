"""Where a model lies: the embedded one, a folder, a name on the hub, or the shapes in recipes/shapes/."""

import re
from pathlib import Path

from moetool import assets
from moetool.errors import UsageError, first_line, unknown_name

REFERENCE = "reference"


def shape_names() -> list[str]:
    """The shapes that come with moetool."""
    return sorted(path.parent.name for path in assets.path("recipes", "shapes").glob("*/config.json"))


def locate(model: str) -> Path:
    """Where a model is: `reference`, a folder, a GGUF file, or a name on the Hugging Face hub.

    Effects: a hub name is downloaded to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such model, or the folder is not one.
    """
    if model == REFERENCE:
        return assets.path("data", "reference-moe")
    path = Path(model)
    if path.suffix == ".gguf" and path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} is not a model: it has no config.json; give a folder in Hugging Face format")
        return path
    if path.exists() or model.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(
            f"no model at {model!r}: give {REFERENCE!r}, a local folder, a .gguf file, or a hub name like org/model"
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # the hub raises a dozen kinds, and each means that the model cannot be had
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"cannot get {model!r} from the hub ({reason}); give a local folder or {REFERENCE!r}"
        ) from None


def locate_config(model: str) -> Path:
    """The folder of a config.json.

    Args:
        model: `reference`, the name of a shape, a folder, the path of a config.json, or a name on the Hugging Face hub.

    Effects: of a hub name the config alone is downloaded, to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such config.
    """
    path = Path(model)
    if model in shape_names():
        return assets.path("recipes", "shapes", model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if model == REFERENCE or path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        return locate(model)
    if re.fullmatch(r"[\w.-]+", model) and not path.exists():
        raise unknown_name("shape", model, [REFERENCE, *shape_names()])
    if path.exists() or model.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(
            f"no config at {model!r}: give a folder with a config.json, that file, a hub name like org/model, or one "
            f"of {', '.join([REFERENCE, *shape_names()])}"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub raises a dozen kinds, and each means that the config cannot be had
        raise UsageError(
            f"cannot get the config of {model!r} from the hub ({first_line(error)}); give a local folder or one of "
            f"{', '.join([REFERENCE, *shape_names()])}"
        ) from None
