"""The folder is the registry.

A policy, planner, predictor, file format or experiment of a paper is one module in its folder; the file's name is its
name. Nothing is registered by hand. A dotted name (`my_lab.policy`) loads a stranger's module the same way.
"""

import importlib
import pkgutil
from types import ModuleType

from moetool.errors import UsageError, unknown_name

FOLDERS = {
    "policy": "moetool.caching",
    "planner": "moetool.placement",
    "predictor": "predictors",
    "format": "moetool.formats",
    "experiment": "moetool.bench.paper.experiments",
}

_PARTS = {
    "policy": ("Options", "Policy"),
    "planner": ("Options", "place"),
    "predictor": ("Options", "Predictor"),
    "experiment": ("Options", "run"),
}
"""Required attributes of a module of each kind."""


def names(kind: str) -> list[str]:
    """The plugins of a kind (of `FOLDERS`), sorted.

    Modules that begin with `_` are not plugins.
    """
    package = importlib.import_module(FOLDERS[kind])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import the plugin `name` of a kind.

    Effects: imports the module; an error inside it propagates as it is.

    Raises:
        UsageError: there is no such plugin; the nearest name is suggested.
    """
    if "." in name:
        return _imported(kind, name)
    if name.startswith("_") or name not in names(kind):
        raise unknown_name(kind, name, names(kind))
    return importlib.import_module(f"{FOLDERS[kind]}.{name}")


def _imported(kind: str, name: str) -> ModuleType:
    """A stranger's module. Raises: UsageError where it cannot be found or is of another kind."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{kind} {name!r} is not a module name, expected one such as my_lab.{kind}")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise UsageError(
                f"cannot import {kind} {name!r}: no module {error.name!r} on Python's path; run with PYTHONPATH=FOLDER"
            ) from None
        raise
    if missing := [part for part in _PARTS.get(kind, ()) if not hasattr(module, part)]:
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(f"{name} is not {article} {kind}: it has no {' and no '.join(missing)}")
    return module
