"""Errors that name an option or a command: each exists, and following the advice changes the outcome."""

import ast
import builtins
import csv
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.main import get_command

import moetool
from moetool.base.errors import MoetoolError
from moetool.cli.main import app
from moetool.models.shape import shape_of
from moetool.trace.foreign.importing import import_trace
from moetool.training.training import train
from tests import families, foreign, synthetic_routes
from tests.command_line import Run


@dataclass(frozen=True, slots=True)
class Advice:
    """A command that is refused, the advice in its error, and the command that follows it.

    Attributes:
        wrong, right: arguments, of which `{}` stands for the folder of the files.
        prepare: writes the files.
        place: module and function of the error, of those in `_places`.
    """

    wrong: str
    advice: str
    right: str
    prepare: Callable[[Path], Any]
    place: str


def _responses(folder: Path) -> None:
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"))


def _table(folder: Path) -> None:
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("tok", "lay", "exp"))
        writer.writerows((token, layer, expert) for token in range(3) for layer in range(2) for expert in (1, 2))


def _unsized(folder: Path) -> None:
    _responses(folder)
    settings = {name: value for name, value in foreign.HEADLESS.items() if name != "expert_bytes"}
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings)


def _counts(folder: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (2, 4, 8))
    counts[:, 0] = 0
    foreign.save(folder / "s.pt", {"logical_count": torch.from_numpy(counts)})


def _trace(folder: Path) -> None:
    synthetic_routes.write_trace(folder / "t", num_requests=4)


def _unknown_family(folder: Path) -> None:
    _responses(folder)
    numbers = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_experts": 8, "num_experts_per_tok": 2}
    more = {"model_type": "kimi_k9", "hidden_size": 8, "moe_intermediate_size": 4, "vocab_size": 64}
    (folder / "m").mkdir()
    (folder / "m" / "config.json").write_text(json.dumps({**numbers, **more}))


def _unfinished(folder: Path, **changed: Any) -> None:
    """An unknown family, without or with wrong numbers."""
    _unknown_family(folder)
    file = folder / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def _trained(folder: Path, lost: str) -> None:
    """A predictor of which a file is lost."""
    _trace(folder)
    train("affinity", folder / "t", folder / "p")
    (folder / "p" / lost).unlink()


def _shape(folder: Path) -> None:
    families.save("qwen3_moe", folder / "m")
    (folder / "m" / "model.safetensors").unlink()


_FACTS = "--set num_experts=8 --set expert_bytes=1000 --set first_k_dense=1"
_TABLE = "trace import {}/t.csv --set num_experts=8 --set expert_bytes=100 --out {}/t"
_IMPORTED = f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t"
_MAPPED = f"{_TABLE} --map layer=lay,expert=exp,token=tok"
_CAPTURED = "capture reference --data arithmetic --max-prompts 1 --max-new-tokens 1 --out {}/t"
_BY_NUMBERS = (
    "trace import {}/r.jsonl --set num_hidden_layers=4 --set moe_layers=1..3 --set num_experts=8 --set top_k=2"
)
_BY_NUMBERS += " --out {}/t"
_ADVICE = {
    "a missing number": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --out {{}}/t",
        "--set top_k=",
        _IMPORTED,
        _responses,
        "moetool.trace.foreign.model_facts ModelFacts.said",
    ),
    "a table of unknown columns": Advice(
        _TABLE,
        "--map layer=COLUMN,expert=COLUMN",
        _MAPPED,
        _table,
        "moetool.trace.foreign.detection guess",
    ),
    "layers without counts": Advice(
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --out {}/t",
        "--set moe_layers=1..3",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set moe_layers=1..3 --out {}/t",
        _counts,
        "moetool.trace.expert_counts Counted.__post_init__",
    ),
    "layers given twice": Advice(
        "trace import {}/s.pt --set top_k=2 --set moe_layers=1..3 --set first_k_dense=1 --out {}/t",
        "give one",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --out {}/t",
        _counts,
        "moetool.trace.foreign.import_settings Settings.__post_init__",
    ),
    "counts without tokens": Advice(
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --as decode --out {}/t",
        "leave out --as",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set first_k_dense=1 --out {}/t",
        _counts,
        "moetool.trace.foreign.importing import_trace",
    ),
    "a fact of the model twice": Advice(
        "trace import {}/r.jsonl --set model={}/m --set top_k=2 --out {}/t",
        "leave out --set top_k",
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        _unknown_family,
        "moetool.trace.foreign.import_settings Settings.__post_init__",
    ),
    "a family that cannot run": Advice(
        "profile {}/m --config-only --out {}/p.json",
        "trace import --set model=PATH",
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        _unknown_family,
        "moetool.models.checkpoint _parse_config",
    ),
    "a directory that exists": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t",
        "--overwrite",
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t --overwrite",
        _unsized,
        "moetool.base.durable require_absent",
    ),
    "bytes for experts of unknown size": Advice(
        "replay --trace {}/t --policy lru --budget 2KB",
        "such as 25%",
        "replay --trace {}/t --policy lru --budget 25%",
        _unsized,
        "moetool.base.types ModelSpec.require_sizes",
    ),
    "bytes for experts of unknown size, imported again": Advice(
        "replay --trace {}/t --policy lru --budget 5KB",
        "--set expert_bytes=NUMBER",
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=2 --out {{}}/t --overwrite",
        _unsized,
        "moetool.base.types ModelSpec.require_sizes",
    ),
    "a replay without memory": Advice(
        "replay --trace {}/t --policy lru",
        "--budget",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
        "moetool.cli.replay replay",
    ),
    "a share of tasks": Advice(
        "trace split {}/t --by task --share 0.5 --out {}/u",
        "--by request",
        "trace split {}/t --by request --share 0.5 --out {}/u",
        _trace,
        "moetool.trace.edit _by_name",
    ),
    "no trace": Advice(
        "replay --trace {}/none --policy lru --budget 25%",
        "moetool capture MODEL --data NAME --out",
        "capture reference --data arithmetic --max-prompts 1 --max-new-tokens 1 --out {}/none",
        _trace,
        "moetool.trace.reader Trace.__init__",
    ),
    "a shape without weights": Advice(
        "profile {}/m --out {}/p.json",
        "--config-only",
        "profile {}/m --config-only --seconds 1 --out {}/p.json",
        _shape,
        "moetool.measuring.profile _open",
    ),
    "a policy by another name": Advice(
        "replay --trace {}/t --policy lrru --budget 25%",
        "did you mean 'lru'",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
        "moetool.base.errors unknown_name",
    ),
    "several tasks for a format of one": Advice(
        "trace export {}/t --format topk_parquet --out {}/x.parquet",
        "moetool trace split {}/t --by task --out DIR",
        "trace split {}/t --by task --out {}/parts",
        _trace,
        "moetool.trace.foreign.routes one_task",
    ),
    "a setting without a value": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k --out {{}}/t",
        "name=value",
        _IMPORTED,
        _responses,
        "moetool.base.config parse_settings",
    ),
    "a number that is none": Advice(
        f"trace import {{}}/r.jsonl {_FACTS} --set num_hidden_layers=4 --set top_k=0 --out {{}}/t",
        "above 0",
        _IMPORTED,
        _responses,
        "moetool.trace.foreign.import_settings Settings.__post_init__",
    ),
    "layers in words": Advice(
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set moe_layers=all --out {}/t",
        "1..26 or 1,3,5",
        "trace import {}/s.pt --set top_k=2 --set expert_bytes=9 --set moe_layers=1..3 --out {}/t",
        _counts,
        "moetool.trace.foreign.import_settings _layers",
    ),
    "a map without a column": Advice(
        f"{_TABLE} --map layer", "layer=l,expert=e", _MAPPED, _table, "moetool.trace.foreign.column_table parse_map"
    ),
    "a map to no column": Advice(
        f"{_TABLE} --map layer=none,expert=exp", "lay", _MAPPED, _table, "moetool.trace.foreign.column_table match"
    ),
    "a phase of what marks its own": Advice(
        f"{_IMPORTED} --as decode",
        "leave out --as",
        _IMPORTED,
        _responses,
        "moetool.trace.foreign.importing _check_sources",
    ),
    "shares that are no numbers": Advice(
        "trace split {}/t --by request --share half --out {}/u",
        "0.8 or 0.6,0.2",
        "trace split {}/t --by request --share 0.8 --out {}/u",
        _trace,
        "moetool.cli.trace split",
    ),
    "shares above one": Advice(
        "trace split {}/t --by request --share 2 --out {}/u",
        "as in 0.8",
        "trace split {}/t --by request --share 0.8 --out {}/u",
        _trace,
        "moetool.trace.edit _by_share",
    ),
    "a directory of something else": Advice(
        "trace split {}/t --by request --share 0.5 --out {} --overwrite",
        "choose another",
        "trace split {}/t --by request --share 0.5 --out {}/u",
        _trace,
        "moetool.base.durable require_absent",
    ),
    "an unknown order": Advice(
        "replay --trace {}/t --policy lru --budget 25% --order any",
        "sequential",
        "replay --trace {}/t --policy lru --budget 25% --order sequential",
        _trace,
        "moetool.base.errors unknown_name",
    ),
    "an option of no policy": Advice(
        "replay --trace {}/t --policy lru --budget 25% --set lfu.x=1",
        "POLICY.OPTION=VALUE",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
        "moetool.cli.flags require_policies",
    ),
    "two costs of a machine": Advice(
        "replay --trace {}/t --policy lru --budget 25% --machine h100 --profile {}/p.json",
        "give one of them",
        "replay --trace {}/t --policy lru --budget 25% --machine h100",
        _trace,
        "moetool.cli.flags named_timeline",
    ),
    "a timeline without costs": Advice(
        "replay --trace {}/t --policy lru --budget 25% --set timeline.device=cpu",
        "--profile FILE",
        "replay --trace {}/t --policy lru --budget 25%",
        _trace,
        "moetool.cli.flags read_timeline",
    ),
    "a policy without its predictor": Advice(
        "replay --trace {}/t --policy promoe --budget 50%",
        "--predictor DIR",
        "train popularity --trace {}/t --out {}/p",
        _trace,
        "moetool.caching.policy build_policy",
    ),
    "no predictor": Advice(
        "evaluate {}/p --trace {}/t",
        "moetool train",
        "train popularity --trace {}/t --out {}/p",
        _trace,
        "moetool.training.predictor_card read_card",
    ),
    "memory in bytes for advice": Advice(
        "advise {}/t --memory 2GB",
        "such as 25%",
        "advise {}/t --memory 25%",
        _trace,
        "moetool.cli.advise _share",
    ),
    "a config without experts per token": Advice(
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        "give --set num_hidden_layers, moe_layers, num_experts and top_k instead of the model",
        _BY_NUMBERS,
        lambda folder: _unfinished(folder, num_experts_per_tok=None),
        "moetool.models.config_model ConfigModel._require",
    ),
    "a config of a wrong number": Advice(
        "trace import {}/r.jsonl --set model={}/m --out {}/t",
        "give --set num_hidden_layers, moe_layers, num_experts and top_k instead of the model",
        _BY_NUMBERS,
        lambda folder: _unfinished(folder, num_experts="eight"),
        "moetool.models.config_model ConfigModel._typed",
    ),
    "a predictor without its weights": Advice(
        "replay --trace {}/t --policy foresight --predictor {}/p --budget 50%",
        "moetool train PREDICTOR --trace DIR --out {}/p --overwrite",
        "train affinity --trace {}/t --out {}/p --overwrite",
        lambda folder: _trained(folder, "predictor.safetensors"),
        "moetool.training.predictor load_predictor",
    ),
    "a placement that is not there": Advice(
        "plan export {}/p.json --format sglang --out {}/e.json",
        "moetool plan placement",
        "plan placement --trace {}/t --cluster 2x1GB --planner uniform --out {}/p.json",
        _trace,
        "moetool.base.artefact Artefact.load",
    ),
    "a file that is not there": Advice(
        "capture reference --data none.jsonl --max-prompts 1 --out {}/t",
        "--data",
        _CAPTURED,
        lambda folder: None,
        "moetool.prompts.gather _file",
    ),
}


@pytest.mark.parametrize("name", _ADVICE)
def test_following_the_advice_changes_the_outcome(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, places = _ADVICE[name], set()
    one.prepare(tmp_path)
    init = MoetoolError.__init__

    def noted(self: MoetoolError, message: str = "") -> None:
        caller = inspect.stack(0)[1].frame
        places.add(f"{caller.f_globals['__name__']} {caller.f_code.co_qualname}".replace(".<locals>", ""))
        init(self, message)

    monkeypatch.setattr(MoetoolError, "__init__", noted)
    code, _, refusal = run(*one.wrong.replace("{}", str(tmp_path)).split())
    assert one.place in places, places
    assert code != 0 and one.advice.replace("{}", str(tmp_path)) in refusal, refusal
    code, _, err = run(*one.right.replace("{}", str(tmp_path)).split())
    assert code == 0, err


def _named(folder: Path, **settings: Any) -> None:
    """A trace that another program recorded, `t`."""
    foreign.write_lines(folder / "r.jsonl", foreign.sglang_native("a"), foreign.sglang_native("b"))
    import_trace([folder / "r.jsonl"], None, folder / "t", settings=settings, find_model=shape_of)


def _counted(folder: Path) -> None:
    _counts(folder)
    import_trace([folder / "s.pt"], None, folder / "t", settings={"top_k": 2, "first_k_dense": 1})


def _of_a_model(folder: Path) -> None:
    families.save("qwen3_moe", folder / "m", num_hidden_layers=4, mlp_only_layers=[0], std=0.1)
    _named(folder, model=str(folder / "m"))


_SUGGESTED = {
    "counts": (_counted, {"advise", "plan placement"}),
    "another program's": (_unsized, {"report", "replay", "plan placement"}),
    "another program's, of a model": (_of_a_model, {"report", "plan cache", "plan placement"}),
    "one captured request": (None, {"report", "replay", "plan placement"}),
}


@pytest.mark.parametrize("kind", _SUGGESTED)
def test_commands_that_advise_prints_run(kind: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, expected = _SUGGESTED[kind]
    if prepare is None:
        assert run(*_CAPTURED.replace("{}", str(tmp_path)).split())[0] == 0
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


PACKAGE = Path(moetool.__file__).parent
NOT_FOLLOWED = Path(__file__).parent / "advice_not_followed.txt"
MOST_NOT_FOLLOWED = 176
"""The list only gets shorter."""
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


def test_the_list_of_advice_that_no_test_follows_is_true() -> None:
    options = dict(_commands(get_command(app)))
    places = {place for place, text in _places() if _advises(text, options)}
    followed = {one.place for one in _ADVICE.values()}
    listed = NOT_FOLLOWED.read_text(encoding="utf-8").splitlines()
    assert listed == sorted(places - followed) and len(listed) <= MOST_NOT_FOLLOWED
