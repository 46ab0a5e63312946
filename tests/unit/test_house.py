"""The package as a whole: what it offers by name, and whether its map is true."""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import typer

import moetool
from moetool import plugins
from moetool.base import plugins as plugins_by_name
from moetool.base.plugins import allow, load
from moetool.cli.main import app
from tests.refusals import refused

ROOT = Path(moetool.__file__).parent
TESTS = Path(__file__).parents[1]
UNIT = TESTS / "unit"
MOST_PARAMETERS = 8
PLUGIN_CLASSES = {"Options", "Policy", "Predictor"}
DICTATED = {"paged_attention", "few_rows", "few_packed_rows", "many_rows"}
"""Functions whose parameters are those that a library calls them with, and kernels, which take numbers alone."""
FOREIGN = {
    *(
        "_apply_gate",
        "_attn_implementation",
        "_experts_implementation",
        "_kv_token_views",
        "_dequantize_one",
    ),  # transformers
    *("_convert_weight_to_int4pack_for_cpu", "_forward_hooks", "_forward_pre_hooks", "_linear_pointwise"),  # torch
    *("_reorder_linear_weight", "_sleep"),
    *("_exit", "_ntuple_diskusage", "_replace"),  # the standard library
}
"""Underscore names of other libraries, which no seam of ours can replace."""


PUBLIC = re.compile(r"transformers(\.cache_utils)?(\.[A-Z]\w*)?")
"""Names of transformers that the loop and the KV cache may import: classes of the package and of its caches."""


def _paths(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path.relative_to(ROOT.parent) for path in sorted(folder.rglob("*.py")))


def _trees(*folders: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in _paths(*folders):
        yield path, ast.parse((ROOT.parent / path).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(set(moetool.__all__) - {"__version__"}))
def test_public_names_are_there_and_name_no_package(name: str) -> None:
    assert callable(getattr(moetool, name)) and name in dir(moetool)
    assert not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    with refused(AttributeError, "open_traces"):
        _ = moetool.open_traces


def test_importing_moetool_imports_nothing_else() -> None:
    code = "import sys, moetool; print(moetool.__version__, *[m for m in sys.modules if m.startswith('moetool.')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == [moetool.__version__]


def test_the_map_lists_every_package() -> None:
    assert moetool.__doc__ is not None
    houses = moetool.__doc__.partition("The glossary")[0]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    listed = set(re.findall(r"^    (\w+)  ", houses, re.MULTILINE))
    assert packages == listed - {"predictors"}


@pytest.mark.parametrize("name", plugins.__all__)
def test_names_for_plugins_are_there(name: str) -> None:
    assert isinstance(getattr(plugins, name), type) and name in dir(plugins)


def test_plugins_of_the_last_release_find_their_contracts(tmp_path: Path) -> None:
    (tmp_path / "newest.py").write_text(_FORMER_POLICY)
    allow("policy", str(tmp_path / "newest.py"))
    module = load("policy", str(tmp_path / "newest.py"))
    assert issubclass(module.Policy, plugins.Policy) and module.Failed is plugins.UsageError
    assert plugins.Policy.__module__ == "moetool.caching.policy"


_FORMER_POLICY = """
import moetool.learning.predictor
from moetool.caching import _policy as policy
from moetool.errors import UsageError as Failed
from moetool.learning.tokens import Tokens
from moetool.placement._planner import Problem

class Options: pass
class Policy(policy.Policy): pass
"""


def test_the_light_install_has_the_versions_of_the_whole_one() -> None:
    whole, core = (
        {line for line in (ROOT.parent / name).read_text().splitlines() if "==" in line}
        for name in ("constraints.txt", "constraints-core.txt")
    )
    assert core and core < whole


def test_functions_have_at_most_eight_parameters() -> None:
    found, commands = [], set(_commands(app))
    for path, tree in _trees(ROOT, ROOT.parent / "predictors"):
        module = ".".join(path.with_suffix("").parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name in DICTATED:
                continue
            args = node.args
            names = [argument.arg for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > MOST_PARAMETERS and (module, node.name) not in commands:
                found.append(f"{path}:{node.lineno} {node.name} has {count}")
    assert found == []


def _commands(app: typer.Typer) -> Iterator[tuple[str, str]]:
    """Module and name of the functions that Typer calls."""
    for command in app.registered_commands:
        function = inspect.unwrap(command.callback)  # type: ignore[arg-type]
        yield function.__module__, function.__name__
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance)


def test_public_class_names_occur_once_in_a_package() -> None:
    names = Counter(
        (path.parts[:2], node.name)
        for path, tree in _trees(ROOT, ROOT.parent / "predictors")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in PLUGIN_CLASSES
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_unit_tests_stand_where_their_modules_stand() -> None:
    """`tests/unit/PACKAGE/test_MODULE[_aspect].py`, or `test_PACKAGE[_aspect].py` for several modules of a package."""
    assert [str(file) for file in UNIT.rglob("test_*.py") if file.parent != UNIT and not _module_of(file)] == []


def test_the_list_of_modules_without_a_test_is_true() -> None:
    """No test imports them or has their name. Plugins, which contract tests load by name, and commands are left out."""
    imported = {name for _, tree in _trees(TESTS) for node in ast.walk(tree) for name in _imports(node)}
    named = {_module_of(file) for file in UNIT.rglob("test_*.py")}
    left_out = (*plugins_by_name.FOLDERS.values(), "moetool.cli", "moetool.__main__")
    found = [
        module
        for path in _paths(ROOT, ROOT.parent / "predictors")
        if path.stem != "__init__" and (module := ".".join(path.with_suffix("").parts)) not in imported | named
        if not module.startswith(left_out)
    ]
    assert found == (UNIT / "modules_without_a_test.txt").read_text(encoding="utf-8").split()


def _module_of(file: Path) -> str:
    """The module that a unit test is named for, or its package; empty if there is none."""
    folder = file.parent.relative_to(UNIT)
    package = folder if folder.parts[:1] == ("predictors",) else Path("moetool", folder)
    name, whole = file.stem.removeprefix("test_"), ROOT.parent / package
    modules = [*(path.stem for path in whole.glob("*.py")), whole.name]
    found = max((m for m in modules if name == m or name.startswith(f"{m}_")), key=len, default="")
    return ".".join((*package.parts, found)) if found else ""


def _imports(node: ast.AST) -> Iterator[str]:
    """Names of modules that a node imports or names in a text."""
    if isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("moetool."):
        yield from accumulate(node.value.split("."), "{}.{}".format)


def test_tests_reach_into_no_underscore_attributes() -> None:
    assert [f"{path}:{line} {text}" for path, tree in _trees(TESTS) for line, text in _reaching(tree)] == []


def _reaching(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Attributes, imported names and monkeypatched names that begin with one underscore."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            names = [] if own or ast.unparse(node.value) == "super()" else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            folder = ROOT.parent.joinpath(*(node.module or "").split("."))
            names = [alias.name for alias in node.names if not (folder / f"{alias.name}.py").exists()]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):  # setattr, getattr, delattr
            texts = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            names = [text.rpartition(".")[2] for text in texts if " " not in text]
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in FOREIGN:
                yield node.lineno, ast.unparse(node)


def test_the_loop_and_the_kv_cache_stand_on_public_interfaces_of_transformers() -> None:
    """They reach into no private name of another object, and import only the package and its caches."""
    found = []
    for room in ("loop", "kv"):
        for path, tree in _trees(ROOT / "runtime" / room):
            own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_self(node.value)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                    found += [] if _is_self(node.value) or node.attr in own else [f"{path}:{node.lineno} {node.attr}"]
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [name for name in _imports(node) if name.startswith("transformers")]
                    found += [f"{path}:{node.lineno} {name}" for name in names if not PUBLIC.fullmatch(name)]
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attr"):
                    texts = [item.value for item in node.args if isinstance(item, ast.Constant)]
                    found += [f"{path}:{node.lineno} {text}" for text in texts if str(text).startswith("_")]
    assert found == []


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")
