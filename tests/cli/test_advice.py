"""Errors that name an option or a command: each exists, and following the advice changes the outcome."""

import ast
import builtins
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import moetool
from moetool.cli.main import app
from tests.cli import advice_files
from tests.command_line import Run, child_environment
from tests.error_places import noted_places


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A command that is refused, the advice in its error, and the command that follows it; see advice.toml.

    Attributes:
        place: module and function of the error, of those in `_places`.
        then: words of the next refusal; empty: the command that follows the advice ends well.
    """

    files: str
    place: str
    wrong: str
    advice: str
    right: str
    then: str = ""


_FOLLOWED = [
    Advice(files=files, **row)
    for files, rows in tomllib.loads(Path(__file__).with_name("advice.toml").read_text(encoding="utf-8")).items()
    for row in rows
]


def _run_all(run: Run, commands: str) -> tuple[int, str]:
    """Run commands joined with &&, all but the last without error; exit code and output of that one."""
    *before, last = commands.split(" && ")
    for command in before:
        code, _, err = run(*command.split())
        assert code == 0, (command, err)
    code, out, err = run(*last.split())
    return code, out + err


@pytest.mark.parametrize("one", _FOLLOWED, ids=lambda one: f"{one.place.split()[-1]}-{_FOLLOWED.index(one)}")
def test_following_the_advice_changes_the_outcome(
    one: Advice, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    getattr(advice_files, one.files)(tmp_path)
    monkeypatch.chdir(tmp_path)
    wrong, advice, right, then = (
        text.replace("{}", str(tmp_path)) for text in (one.wrong, one.advice, one.right, one.then)
    )
    with noted_places() as places:
        code, refusal = _run_all(run, wrong)
    assert one.place in places, places
    assert code != 0 and advice in refusal, refusal
    code, said = _run_all(run, right)
    assert (code != 0) == bool(then) and then in said and (not then or then not in refusal), said


_SUGGESTED = {
    "counts": (advice_files.imported_counts, {"advise", "plan placement"}),
    "another program's": (advice_files.unsized, {"report", "replay", "plan placement"}),
    "another program's, of a model": (advice_files.of_a_model, {"report", "plan cache", "plan placement"}),
    "another program's, of an inferred family": (
        advice_files.of_an_inferred_family,
        {"report", "plan cache", "plan placement"},
    ),
    "an engine's, of a family that cannot run": (advice_files.of_a_config, {"report", "replay", "plan placement"}),
    "of another trace's model": (advice_files.of_a_trace, {"report", "replay", "plan placement"}),
    "one captured request": (None, {"report", "replay", "plan placement"}),
}


@pytest.mark.parametrize("kind", _SUGGESTED)
def test_commands_that_advise_prints_run(kind: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, expected = _SUGGESTED[kind]
    if prepare is None:
        captured = f"capture reference --data arithmetic --max-prompts 1 --max-new-tokens 1 --out {tmp_path}/t"
        assert run(*captured.split())[0] == 0
    else:
        prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("advise", "t", "--tokens", "20")
    assert code == 0, err
    commands = re.findall(r"^Next, [^:]+: moetool (.+)$", out, re.MULTILINE)
    assert {re.split(r" (--|t\b)", command)[0] for command in commands} == expected
    for command in commands:
        code, _, err = run(*command.split())
        assert code == 0, (command, err)


def test_advise_knows_a_model_of_an_inferred_family_in_a_new_process(tmp_path: Path) -> None:
    advice_files.of_an_inferred_family(tmp_path)
    script = "from moetool.cli.main import main; main()"
    command = (sys.executable, "-c", script, "advise", "t", "--tokens", "20")
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True)
    assert f"moetool plan cache --trace t --model {tmp_path / 'm'} --config-only" in done.stdout


PACKAGE = Path(moetool.__file__).parent
TESTS = Path(__file__).parents[1]
_OTHERS = {
    "--enable-eplb",
    "--head",
    "--address",
    "--resources",
    "--node-ip-address",
    "--upgrade",
    "--enable-return-routed-experts",
    "--repo-type",
    "--local-dir",
    "--output-format",
    "--help",
}
"""Options of Ray, pip, vLLM, SGLang, hf and llama-imatrix; and the one of every command."""
_OPTION, _COMMAND = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*"), re.compile(r"(?<![\w.])moetool((?: [a-z]+){1,2})")
_MARK = re.compile(r'^@pytest\.mark\.follows\("(.+)"\)$', re.MULTILINE)
"""Tests that provoke an error and follow its advice, beside the others of its module."""


@cache
def _places() -> list[tuple[str, str]]:
    """Module and function of each error with advice on options or commands, and its text."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    constants = {path: _assigned(tree.body) for path, tree in trees.items()}
    shared = {name: values for mine in constants.values() for name, values in mine.items()}
    raised, found = _error_names(trees.values()), []
    for path, tree in trees.items():
        module = ".".join(("moetool", *path.relative_to(PACKAGE).with_suffix("").parts))
        imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names}
        known = {name: values for name, values in shared.items() if name in imported} | constants[path]
        for function, text in _errors(tree, (), raised, known):
            if _OPTION.search(text) or _COMMAND.search(text):
                found.append((f"{module} {'.'.join(function)}", text))
    return found


def _error_names(trees: Iterable[ast.AST]) -> set[str]:
    """Names of the package's exceptions."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"MoetoolError"}
    while more := {name for name, parents in bases.items() if parents & found} - found:
        found |= more
    return found | {name for name in dir(builtins) if name.endswith("Error")}


def _assigned(body: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    """Expressions that statements give to names."""
    found: dict[str, list[ast.expr]] = {}
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return found


def _errors(
    node: ast.AST, inside: tuple[str, ...], raised: set[str], known: dict[str, list[ast.expr]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    for child in ast.iter_child_nodes(node):
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        names = known | _assigned(ast.walk(child)) if function else known
        if isinstance(child, ast.Call) and ast.unparse(child.func).rpartition(".")[2] in raised:
            yield inside, " ".join(_text(part, known) for part in child.args)
        named = function or isinstance(child, ast.ClassDef)
        yield from _errors(child, (*inside, child.name) if named else inside, raised, names)


def _text(node: ast.AST, known: dict[str, list[ast.expr]], deep: int = 3) -> str:
    """The text of an expression, with all values of a name or a choice, and … for what is not there yet."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.Name(id=name) if deep and name in known:
            return " or ".join(_text(value, known, deep - 1) for value in known[name])
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, known, deep) for part in parts)
        case ast.FormattedValue(value=value):
            return _text(value, known, deep)
        case ast.BinOp(left=left, right=right):
            return _text(left, known, deep) + _text(right, known, deep)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body, known, deep)} or {_text(other, known, deep)}"
        case ast.BoolOp(values=values):
            return " or ".join(_text(value, known, deep) for value in values)
        case _:
            return "…"


def _commands(group: Any, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Every command, and its options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path}{name} ")
        else:
            yield (
                f"{path}{name}",
                {option for found in command.params for option in (*found.opts, *found.secondary_opts)},
            )


def test_commands_and_options_that_errors_name_exist() -> None:
    options = dict(_commands(get_command(app)))
    groups = {name.split()[0] for name in options if " " in name}
    anywhere, wrong = set().union(*options.values(), _OTHERS), []
    for place, text in _places():
        for clause in re.split(r"[;)(]|, or |, and ", text):
            found = _COMMAND.search(clause)
            words = found[1].split() if found else []
            called = found is not None and clause[: found.start()].endswith(("'", "run: ", "run ", "with: ", "with "))
            name = " ".join(words[: 2 if words[:1] and words[0] in groups else 1])
            if called and name not in options:
                wrong.append(f"{place}: no command {name!r}")
            begin = found.end() if found is not None and name in options else len(clause)
            for part, known in ((clause[:begin], anywhere), (clause[begin:], options.get(name, anywhere))):
                wrong += [
                    f"{place}: {name!r} has no {option}" for option in _OPTION.findall(part) if option not in known
                ]
    assert wrong == []


def _advises(text: str, options: dict[str, set[str]]) -> bool:
    """Whether a text names a command or an option of moetool, not of another program."""
    first = {name.split()[0] for name in options}
    named = any(words.split()[0] in first for words in _COMMAND.findall(text))
    return named or bool({*_OPTION.findall(text)} & set().union(*options.values()))


def test_every_advice_is_followed() -> None:
    """By a row of advice.toml, or by a test beside the module's others with the mark."""
    options = dict(_commands(get_command(app)))
    places = {place for place, text in _places() if _advises(text, options)}
    marked = {place for path in TESTS.rglob("test_*.py") for place in _MARK.findall(path.read_text(encoding="utf-8"))}
    assert sorted(places - marked - {one.place for one in _FOLLOWED}) == []
    assert sorted(marked - places) == []
