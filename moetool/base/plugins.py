"""Plugins: the folder is the registry.

A policy, planner, predictor, file format or experiment of a paper is one module in its folder; the file's name is its
name. Nothing is registered by hand. Modules of users are named `my_lab.policy`, or by file, `./policy.py`; an appended
`:NAME` names a class other than `Policy`.

Options of the command line may also name modules of the working directory. A name in a plan or a predictor's card is
searched on Python's path only, so that a downloaded directory runs no code.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import isfunction
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any

from moetool.base.errors import UsageError, unknown_name
from moetool.base.tables import narrate

FOLDERS = {
    "policy": "moetool.caching.policies",
    "planner": "moetool.placement.planners",
    "predictor": "predictors",
    "format": "moetool.trace.formats",
    "export": "moetool.placement.exports",
    "experiment": "moetool.bench.paper.experiments",
}

_FORMER = {
    "moetool.caching._policy": "moetool.caching.policy",
    "moetool.errors": "moetool.base.errors",
    "moetool.learning": "moetool.training",
    "moetool.learning.fit_options": "moetool.training.fit_options",
    "moetool.learning.predictor": "moetool.training.predictor",
    "moetool.learning.tokens": "moetool.training.tokens",
    "moetool.placement._planner": "moetool.placement.planner",
    "moetool.types": "moetool.base.types",
}
"""Names of 0.1 that plugins of others import, and the modules' names now; new plugins use `moetool.plugins`."""

_FORMER_FOLDERS = {"moetool.caching": "policy", "moetool.placement": "planner"}
"""Packages of 0.1 that held plugins of a kind, which plugins of others may extend."""

_PARTS = {
    "policy": ("Options", "Policy"),
    "planner": ("Options", "place"),
    "predictor": ("Options", "Predictor"),
    "experiment": ("Options", "run"),
}
"""Required attributes of a module of each kind; `:NAME` replaces the last."""

_CONTRACTS = dict.fromkeys(("policy", "planner", "predictor"), "; 'moetool guide plugins' has the contract")

_FLAGS = {"--policy": ("policy",), "--planner": ("planner",), "--mode": ("planner",), "--format": ("format", "export")}
"""Options whose values name plugins, single or comma-separated, of these kinds."""

_CALLED = {"format": "format of routes", "export": "format of plans"}
"""Kinds in errors, where the name of a kind says too little."""

typed: set[tuple[str, str]] = set()
"""Kind and name of each plugin that the command line names."""


_foreign_files: set[str] = set()
"""Files of imported plugins that do not come with moetool."""


class WrongAnswer(ValueError):
    """An answer of a plugin's method that moetool cannot act on.

    Attributes:
        place: the method's file, line and name; empty if it is no Python function.
    """

    def __init__(self, message: str, method: Callable[..., Any] | None = None) -> None:
        super().__init__(message)
        code = getattr(method, "__code__", None)
        self.place = ("", 0, "") if code is None else (code.co_filename, code.co_firstlineno, code.co_name)


def foreign_place(error: BaseException) -> str | None:
    """Return the line of a foreign plugin from which an error came: `FILE:LINE in FUNCTION`.

    Return the plugins' files if the error is in the pool, which acts on a policy's answers; None for other errors.
    """
    if isinstance(error, SyntaxError) and error.filename in _foreign_files:
        return f"{error.filename}:{error.lineno}"
    places = _places(error)
    own = [f"{file}:{line} in {name}" for file, line, name in places if file in _foreign_files]
    if own:
        return own[-1]
    in_pool = any("/caching/" in file for file, *_ in places)
    return f"an answer of {', '.join(sorted(_foreign_files))}" if _foreign_files and in_pool else None


def describe(error: BaseException) -> str:
    """Return an error's text; if it passed through a foreign plugin, also its type and the plugin's line."""
    own = [f"{Path(file).name}:{line} in {name}" for file, line, name in _places(error) if file in _foreign_files]
    return f"{type(error).__name__}: {error} (from {own[-1]})" if own else str(error)


def _places(error: BaseException) -> list[tuple[str, int, str]]:
    walked = traceback.walk_tb(error.__traceback__)
    answered = [error.place] if isinstance(error, WrongAnswer) else []
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked] + answered


def allow(kind: str, names: str) -> None:
    """Trust plugins named by the user in a comma-separated list."""
    typed.update((kind, name) for name in names.split(","))


def allow_from(words: Sequence[str]) -> None:
    """Trust the plugins named by options of a command line."""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        flag, given, value = word.partition("=")
        if flag in _FLAGS:
            for kind in _FLAGS[flag]:
                allow(kind, value if given else following)


def names(kind: str) -> list[str]:
    """Return the names of a kind's plugins (`FOLDERS`), sorted. A module `_x` is a common part of several."""
    package = importlib.import_module(FOLDERS[kind])
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(kind: str, name: str) -> ModuleType:
    """Import the plugin `name` of a kind.

    Effects: imports the module; its errors propagate unchanged.

    Raises:
        UsageError: there is no such plugin; the error suggests the nearest name.
    """
    if "." in name or "/" in name:
        return _imported(kind, name)
    if name not in names(kind):
        raise unknown_name(_CALLED.get(kind, kind), name, names(kind))
    return importlib.import_module(f"{FOLDERS[kind]}.{name}")


class _FormerNames(MetaPathFinder, Loader):
    """Imports modules by the names that they had in 0.1."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        package, _, name = fullname.rpartition(".")
        kind = _FORMER_FOLDERS.get(package) if fullname not in FOLDERS.values() else None
        now = f"{FOLDERS[kind]}.{name}" if kind is not None and name in names(kind) else _FORMER.get(fullname)
        return None if now is None else ModuleSpec(fullname, self, origin=now)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state  # the import system has replaced it


def _imported(kind: str, name: str) -> ModuleType:
    """Import a user's module. Raises: UsageError where it cannot be found or is of another kind."""
    if not any(isinstance(finder, _FormerNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _FormerNames())
    source, _, attribute = name.partition(":")
    file = Path(source) if source.endswith(".py") else None
    parts = list(file.with_suffix("").parts) if file is not None else source.split(".")
    if file is None and not all(part.isidentifier() for part in parts):
        raise UsageError(f"{kind} {name!r} is not a module name or file, expected my_lab.{kind} or ./my_{kind}.py")
    if (kind, name) in typed:
        besides = [Path.cwd(), *([file.parent] if file else [])]
        with _path([*sys.path, *(str(directory.resolve()) for directory in besides)]):
            module = _from_file(kind, file) if file is not None else _from_path(kind, source)
    elif all(part.isidentifier() for part in parts):
        with _path(_own_path()):
            if PathFinder.find_spec(parts[0], sys.path) is None:  # even if it was imported from elsewhere before
                raise _not_found(kind, ".".join(parts), parts[0])
            module = _from_path(kind, ".".join(parts))
    else:
        raise UsageError(f"{kind} {name!r} is a file that the command line does not name; name it if you trust it")
    if module.__file__ is not None:
        _foreign_files.add(module.__file__)
    if attribute:
        if kind not in _PARTS or not hasattr(module, attribute):
            raise UsageError(f"{source} has no {kind} {attribute}{_CONTRACTS.get(kind, '')}")
        whole, module = module, ModuleType(module.__name__, module.__doc__)
        vars(module).update({**vars(whole), _PARTS[kind][-1]: getattr(whole, attribute)})
    if missing := [part for part in _PARTS.get(kind, ()) if not hasattr(module, part)]:
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(
            f"{name} is not {article} {kind}: it has no {' and no '.join(missing)}{_CONTRACTS.get(kind, '')}"
        )
    if parent_process() is None and isinstance(own := getattr(module, _PARTS.get(kind, ("",))[-1], None), type):
        _warn_of_misspelt(f"{kind} {name}", own)
    return module


@cache
def _warn_of_misspelt(called: str, own: type) -> None:
    """Warn once about methods of a plugin's class that resemble a method of its contract but are not called."""
    contract = {
        name
        for base in own.__mro__
        if base.__module__.partition(".")[0] == "moetool"
        for name, value in vars(base).items()
        if isfunction(value) and not name.startswith("_")
    }
    defined = {name for name, value in vars(own).items() if isfunction(value) and not name.startswith("_")}
    for name in sorted(defined - contract):
        if near := difflib.get_close_matches(name, contract - defined, n=1, cutoff=0.75):
            narrate(
                f"moetool: {called}: its method {name} is no hook; did you mean {near[0]}? If not, start a "
                "helper's name with an underscore"
            )


def _own_path() -> list[str]:
    """Return Python's path without the working directory that `python -m` adds, unless PYTHONPATH names it."""
    here = Path.cwd()
    asked = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return [entry for entry in sys.path if entry and (Path(entry).resolve() != here or here in asked)]


@contextlib.contextmanager
def _path(entries: list[str]) -> Iterator[None]:
    """Use these directories as the module path within the block."""
    before = list(sys.path)
    sys.path[:] = entries
    try:
        yield
    finally:
        sys.path[:] = before


def _not_found(kind: str, name: str, module: str) -> UsageError:
    return UsageError(
        f"cannot import {kind} {name!r}: no module {module!r} on Python's path; "
        "if you trust it, run with PYTHONPATH=DIRECTORY"
    )


def _from_path(kind: str, name: str) -> ModuleType:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            _foreign_files.add(spec.origin)  # before the import, which may fail
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise _not_found(kind, name, error.name) from None
        raise


def _from_file(kind: str, file: Path) -> ModuleType:
    """Import the module of a file, once per process. Raises: UsageError: there is no such file."""
    if not file.is_file():
        raise UsageError(f"no {kind} at {file}; give the path of its .py file")
    name = f"_moetool_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        _foreign_files.add(str(spec.origin))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
