"""Checks of a Ray head from this machine, answered and unanswered."""

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moetool.base.errors import UsageError
from moetool.cluster.ray_check import (
    HeadAnswer,
    JoinedMachine,
    ask_head,
    check_cluster,
    is_here,
    require_fitting,
    require_reach,
    token_source,
)
from tests.refusals import refused

HERE = JoinedMachine(address="127.0.0.1")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of loopback on which nobody listens, and which nobody else gets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.mark.follows("moetool.cluster.ray_check require_reach")
def test_nobody_listens(closed_port: int) -> None:
    with refused(UsageError, f"127.0.0.1:{closed_port}", "ray start --head"):
        require_reach(f"127.0.0.1:{closed_port}")
    with socket.create_server(("127.0.0.1", 0)) as started:
        require_reach(f"127.0.0.1:{started.getsockname()[1]}")
    (check,) = check_cluster(f"127.0.0.1:{closed_port}")
    assert (check.name, check.good) == ("head", False)


def test_what_listens_and_never_answers_is_given_up() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with refused(UsageError, "Ray head", "1 s"):
            ask_head(address, within_s=1.0)


def test_a_head_that_does_not_answer_says_nothing_about_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    answers = iter([0.0, 11.0])  # a second is left of the check's twelve
    monkeypatch.setattr("moetool.cluster.ray_check.time", SimpleNamespace(monotonic=lambda: next(answers)))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        (check,) = check_cluster(f"127.0.0.1:{sock.getsockname()[1]}")
    assert (check.name, check.value, check.good) == ("head", "no answer", False) and "ray status" in check.meaning


def test_versions_and_joining() -> None:
    ray = pytest.importorskip("ray")
    fits = HeadAnswer(asks_token=True, versions={"Ray": ray.__version__}, machines=(HERE,))
    require_fitting("a:1", fits)
    with refused(UsageError, 1.0, ray.__version__):
        require_fitting("a:1", HeadAnswer(asks_token=True, versions={"Ray": "1.0"}, machines=(HERE,)))
    other = JoinedMachine(address="192.0.2.77")
    with refused(UsageError, "ray start --address=a:1"):
        require_fitting("a:1", HeadAnswer(asks_token=True, versions={}, machines=(other,)))


def test_a_head_without_a_token_where_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    open_head = HeadAnswer(asks_token=False, versions={}, machines=(HERE,))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    require_fitting("a:1", open_head)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with refused(UsageError, "RAY_AUTH_MODE"):
        require_fitting("a:1", open_head)


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_source({}) == "" == token_source({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")})
    (tmp_path / ".ray").mkdir()
    kept = tmp_path / ".ray" / "auth_token"
    kept.write_text("x" * 32)
    assert token_source({}) == str(kept)
    assert token_source({"RAY_AUTH_TOKEN": "y", "RAY_AUTH_TOKEN_PATH": str(kept)}) == "$RAY_AUTH_TOKEN"


def test_addresses_of_this_machine() -> None:
    assert is_here("127.0.0.1") and not is_here("192.0.2.77")
