"""Models known by their config alone: the shapes in recipes/shapes/, and configs wherever else they are."""

import re
from pathlib import Path

from moetool import assets
from moetool.errors import UsageError, first_line, unknown_name
from moetool.models.spec import REFERENCE, locate


def names() -> list[str]:
    """The shapes that come with moetool."""
    return sorted(path.parent.name for path in assets.path("recipes", "shapes").glob("*/config.json"))


def locate_config(model: str) -> Path:
    """The folder of a config.json.

    Args:
        model: `reference`, the name of a shape, a folder, the path of a config.json, or a name on the Hugging Face hub.

    Effects: of a hub name the config alone is downloaded, to the hub's own cache, unless HF_HUB_OFFLINE is set.

    Raises:
        UsageError: there is no such config.
    """
    path = Path(model)
    if model in names():
        return assets.path("recipes", "shapes", model)
    if path.name == "config.json" and path.is_file():
        return path.parent
    if model == REFERENCE or path.is_dir():
        return locate(model)
    if re.fullmatch(r"[\w.-]+", model) and not path.exists():
        raise unknown_name("shape", model, [REFERENCE, *names()])
    if path.exists() or model.startswith((".", "~", "/")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise UsageError(
            f"no config at {model!r}: give a folder with a config.json, that file, a hub name like org/model, or one "
            f"of {', '.join([REFERENCE, *names()])}"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except Exception as error:  # the hub raises a dozen kinds, and each means that the config cannot be had
        raise UsageError(
            f"cannot get the config of {model!r} from the hub ({first_line(error)}); give a local folder or one of "
            f"{', '.join([REFERENCE, *names()])}"
        ) from None
