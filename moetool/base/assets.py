"""Locations of data/ and recipes/ (next to the package in a checkout, inside it in a wheel) and of the user's cache."""

import os
from pathlib import Path

from moetool.base.errors import MoetoolError

_PACKAGE = Path(__file__).resolve().parents[1]


def cache_folder() -> Path:
    """`XDG_CACHE_HOME/moetool`, where the variable is set, else `~/.cache/moetool`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "moetool"


def recipe(name: Path) -> Path | None:
    """Return the shipped recipe of a name such as `reference/capture`, or None."""
    folder = path("recipes")
    found = (folder / name).with_suffix(".toml").resolve()
    return found if found.is_file() and found.is_relative_to(folder.resolve()) else None


def path(*parts: str) -> Path:
    """Return the path of an asset, such as `path("data", "reference-moe")`.

    Raises:
        MoetoolError: the installation lacks the asset.
    """
    for root in (_PACKAGE / "_assets", _PACKAGE.parent):
        found = root.joinpath(*parts)
        if found.exists():
            return found
    raise MoetoolError(f"this installation lacks {'/'.join(parts)}; install moetool again")
