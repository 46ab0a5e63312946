"""Policies, predictors and planners of the user's own, by module and by file."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moetool.base import plugins
from moetool.base.errors import UsageError
from moetool.training.predictor import load_predictor
from tests.command_line import exit_code
from tests.refusals import refused

MINE = """
from dataclasses import dataclass
from moetool.caching import lru

@dataclass(frozen=True, kw_only=True)
class Options:
    pass

class {name}(lru.Policy):
    def __init__(self, spec, options, num_slots, predictor=None):
        super().__init__(spec, lru.Options(), num_slots, predictor)
"""
PAIRS = """
from predictors.popularity import Options, Predictor
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `bench_lab.mine`, `named.py` and `bench_lab.pairs`."""
    folder = tmp_path / "bench_lab"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE.format(name="Policy"))
    (folder / "pairs.py").write_text(PAIRS)
    (tmp_path / "named.py").write_text("from bench_lab.mine import Options\n" + MINE.format(name="Mine"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["bench_lab.mine", "./bench_lab/mine.py", "./named.py:Mine"])
def test_a_policy_of_the_working_directory(
    name: str, lab: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "replay", "--trace", trace, f"--policy=lru,{name}", "--budget", "25%") == 0
    lru, mine = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if "MB" in line and "%" not in line][
        -2:
    ]
    assert lru == mine


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./named.py:Yours", "./named.py has no policy Yours; 'moetool guide plugins'"),
        ("./named.py", "./named.py is not a policy: it has no Policy; 'moetool guide plugins'"),
        ("./none.py", "no policy at none.py; give the path"),
        ("bench_lab.none", "no module 'bench_lab.none' on Python's path"),
        ("./none.txt", "is not a module name or file"),
    ],
)
def test_what_is_no_policy_is_refused(
    name: str, said: str, lab: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(monkeypatch, "replay", "--trace", trace, "--policy", name, "--budget", "25%") == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process one that has named and imported no plugin, with the working directory on its path."""

    def forget() -> None:
        monkeypatch.setattr(plugins, "typed", set())
        monkeypatch.setattr(sys, "path", ["", str(Path.cwd()), *sys.path])
        for name in [name for name in sys.modules if name.startswith("bench_lab")]:
            monkeypatch.delitem(sys.modules, name)

    return forget


def test_a_predictor_runs_no_file_that_the_command_line_does_not_name(
    lab: Path,
    trace: Path,
    forgotten: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(monkeypatch, "train", "./bench_lab/pairs.py", "--trace", trace, "--out", "pairs") == 0
    load_predictor(Path("pairs"))
    forgotten()
    assert exit_code(monkeypatch, "evaluate", "pairs", "--trace", trace) == 3
    assert "no module 'bench_lab" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", ".")
    assert exit_code(monkeypatch, "evaluate", "pairs", "--trace", trace) == 0


@pytest.mark.parametrize(
    "words",
    [["--plan", "bench_lab.mine"], ["--planner", "bench_lab.mine"], ["--out=bench_lab.mine"], ["bench_lab.mine"]],
)
def test_only_options_that_name_policies_name_one(words: list[str], lab: Path, forgotten: Callable[[], None]) -> None:
    forgotten()
    plugins.allow_from(words)
    with refused(UsageError, "bench_lab"):
        plugins.load("policy", "bench_lab.mine")


def test_a_module_that_is_named_vouches_for_no_other(lab: Path, forgotten: Callable[[], None]) -> None:
    forgotten()
    plugins.allow_from(["--policy=bench_lab.mine"])
    plugins.load("policy", "bench_lab.mine")
    with refused(UsageError, "bench_lab"):
        plugins.load("predictor", "bench_lab.pairs")


BROKEN = (
    MINE.format(name="Policy")
    + """
    def gate(self, event, hits, misses):
        return misses + [hits[10**6]]
"""
)
WRONG = (
    MINE.format(name="Policy")
    + """
    def evict(self, locked):
        return {}
"""
)
WRONG_KEYS = (
    MINE.format(name="Policy")
    + """
    computes_on_host = True

    def {}(self, event, *misses):
        return {}
"""
)
MISSPELT = """
from dataclasses import dataclass
from moetool import plugins

@dataclass(frozen=True, kw_only=True)
class Options:
    pass

class Policy(plugins.Policy):
    def evct(self, locked):
        return self.oldest(locked)

    def oldest(self, locked):
        return 0
"""


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (BROKEN, ("IndexError", "wrong.py:14 in gate")),
        ("import os\n1 / 0\n", ("ZeroDivisionError", "wrong.py:2 in <module>")),
        ("def f(:\n", ("SyntaxError", "wrong.py:1")),
        (WRONG.format("10**9"), ("evict answered 1000000000, expected a resident", "wrong.py:13 in evict")),
        (WRONG.format("[0]"), ("evict answered [0], expected a resident", "wrong.py:13 in evict")),
        (
            WRONG_KEYS.format("on_host", "[[0]]"),
            ("on_host answered [[0]], expected the keys", "wrong.py:15 in on_host"),
        ),
        (WRONG_KEYS.format("on_host", "None"), ("on_host answered None, expected the keys", "wrong.py:15 in on_host")),
        (WRONG_KEYS.format("gate", "None"), ("gate answered None, expected the keys", "wrong.py:15 in gate")),
        (WRONG_KEYS.format("gate", "[0, 'a']"), ("gate answered [0, 'a'], expected the keys", "wrong.py:15 in gate")),
        (WRONG_KEYS.format("gate", "[]"), ("gate answered [], expected all of the misses", "wrong.py:15 in gate")),
        (MISSPELT, ("no method evict", "wrong.py")),
    ],
)
def test_an_error_of_a_plugin_is_one_line_with_its_place(
    text: str,
    facts: tuple[str, ...],
    lab: Path,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (lab / "wrong.py").write_text(text)
    assert exit_code(monkeypatch, "replay", "--trace", trace, "--policy", "./wrong.py", "--budget", "25%") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(fact in error for fact in (*facts, "MOETOOL_DEBUG=1"))


def test_a_misspelt_hook_is_said(
    lab: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lab / "wrong.py").write_text(MISSPELT)
    assert exit_code(monkeypatch, "replay", "--trace", trace, "--policy", "lru,./wrong.py", "--budget", "25%") == 1
    said = [line for line in capsys.readouterr().err.splitlines() if "is no hook" in line]
    assert said == [
        "moetool: policy ./wrong.py: its method evct is no hook; did you mean evict? If not, start a helper's name "
        "with an underscore"
    ]


def test_a_helper_with_an_underscore_is_no_misspelt_hook(
    lab: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for helper, lines in (("gates", 1), ("_gates", 0)):
        file = lab / f"my{helper}.py"
        file.write_text(f"{MINE.format(name='Policy')}\n    def {helper}(self):\n        pass\n")
        replay = ("replay", "--trace", trace, "--policy", f"./{file.name}", "--budget", "25%")
        assert exit_code(monkeypatch, *replay) == 0
        assert capsys.readouterr().err.count("is no hook") == lines


def test_an_error_of_a_plugin_in_a_forward_names_its_place(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lab / "wrong.py").write_text(BROKEN)
    capture = "capture reference --data arithmetic --max-prompts 1 --max-new-tokens 1 --device-memory 20MB --out t"
    assert exit_code(monkeypatch, *capture.split(), "--policy", "./wrong.py") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "prompt arithmetic-001: IndexError" in error and "wrong.py:14 in gate)" in error


@pytest.mark.parametrize("name", ["bench_lab.wrong", "./bench_lab/wrong.py"])
@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("import os\n1 / 0\n", ("ZeroDivisionError", "wrong.py:2 in <module>")),
        ("def f(:\n", ("SyntaxError", "wrong.py:1")),
        ("import absent_library\n", ("pip install absent_library", "wrong.py:1 in <module>")),
    ],
)
def test_an_error_of_an_import_names_the_plugins_line(
    name: str,
    text: str,
    facts: tuple[str, ...],
    lab: Path,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "bench_lab", raising=False)  # another test's directory
    (lab / "bench_lab" / "wrong.py").write_text(text)
    assert exit_code(monkeypatch, "replay", "--trace", trace, "--policy", name, "--budget", "25%") == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert all(fact in lines[-1] for fact in facts) and not any("Traceback" in line for line in lines)
