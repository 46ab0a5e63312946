"""`moetool serve --cluster --mode ep`: what is refused, in one line, before any rank is started."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetool.cli import main as cli
from tests.edge_process import write_plan
from tests.profiles import make_profile
from tests.synthetic import make_spec


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the embedded model, for three GPUs."""
    return write_plan(tmp_path_factory.mktemp("plan") / "placement.json")


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan: Path
) -> Callable[..., tuple[int, str]]:
    """Run `moetool serve --mode ep` in this process; gives the code and the last line."""

    def call(*args: Any, cluster: str = "local:3") -> tuple[int, str]:
        given = ["--plan", plan, "--cluster", cluster, "--mode", "ep", "--port", "0", *args]
        monkeypatch.setattr(sys, "argv", ["moetool", "serve", "reference", *map(str, given)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        *_, line = captured.err.strip().splitlines()
        assert captured.out == ""
        return int(ended.value.code or 0), line

    return call


def test_what_does_not_fit_the_plan(refused: Callable[..., tuple[int, str]]) -> None:
    code, line = refused(cluster="local:2")
    assert code == 2 and "starts 2 ranks, and the plan is for 3: s0, s1, s2; write local:3" in line
    code, line = refused("--policy", "lru")
    assert code == 2 and "--policy has no effect with --cluster" in line


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("placment=vanilla", "did you mean 'placement'"),
        ("placement=reactiv", "did you mean 'reactive'"),
        ("migrate=stopp", "did you mean 'stop'"),
        ("seats=0", "seats"),
        ("planner=directer", "did you mean 'director'"),
        ("starts=frist", "did you mean 'first'"),
        ("gather_s=-1", "at least 0"),
        ("placement=proactive", "--predictor DIR"),
        ("server.port=1", "server"),
    ],
)
def test_settings(refused: Callable[..., tuple[int, str]], setting: str, said: str) -> None:
    code, line = refused("--set", setting)
    assert code == 2 and said in line


def test_a_predictor_that_is_none(refused: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, line = refused("--predictor", tmp_path / "none")
    assert code == 2 and "no predictor at" in line


def test_a_profile_that_is_none_or_of_another_model(refused: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, line = refused("--profile", tmp_path / "none.json")
    assert code == 2 and "no profile at" in line
    make_profile(make_spec()).save(tmp_path / "other.json")
    code, line = refused("--profile", tmp_path / "other.json", "--set", "dtype=float32")
    assert code == 3 and "the profile is of synthetic" in line
    code, line = refused("--profile", tmp_path / "other.json")
    assert "the profile has no costs of bfloat16 on cpu" in line  # the checkpoint's data type


def test_a_profile_means_something_to_ranks_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan: Path
) -> None:
    for given in ([], ["--plan", str(plan), "--cluster", "local:3"]):
        monkeypatch.setattr(sys, "argv", ["moetool", "serve", "reference", "--profile", "costs.json", *given])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2 and "--profile" in capsys.readouterr().err


def test_without_ray(refused: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    code, line = refused(cluster="127.0.0.1:6379")
    assert code == 2 and "pip install 'moetool[cluster]'" in line
