"""`moetool serve --cluster local:3` whose head is killed under load: servers go on, and the next takes them over."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edge_process import NAMES, PROMPTS, EdgeProcess, Load, edge_cluster, right_answers
from tests.servers import eventually, get

pytestmark = pytest.mark.ray
MAX_TOKENS = 8
SETTINGS = (
    "cluster.name=lab",
    "cluster.orphan_s=240",
    "cluster.hang_s=30",
    "scheduler.interval_s=5",
    "scheduler.poll_s=0.5",
    "scheduler.half_life_s=5",
)


@pytest.fixture(scope="module")
def right(reference: Path, tokenizer: Any) -> dict[str, str]:
    """The answers of one server that has all experts."""
    return right_answers(reference, tokenizer, MAX_TOKENS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    settings = [part for name in SETTINGS for part in ("--set", name)]
    with edge_cluster(tmp_path_factory.mktemp("cluster"), *settings) as started:
        yield started


def _state(cluster: EdgeProcess) -> Any:
    found = re.search(r"cluster page: (http://\S+)", cluster.narration)
    assert found is not None
    return json.loads(get(found[1], "/stats")[2])


def _done(cluster: EdgeProcess) -> list[Any]:
    return [one for one in _state(cluster)["decisions"] if one["made"] and one["outcome"] == "done"]


def test_a_head_that_is_killed_and_the_next(cluster: EdgeProcess, right: dict[str, str]) -> None:
    eventually(lambda: "outlive this process by 240 s" in cluster.narration)
    asked = {name: (prompt,) for name, prompt in zip(NAMES, PROMPTS, strict=True)}
    with Load(cluster, right, MAX_TOKENS, asked) as load:
        eventually(lambda: len(_done(cluster)) > 0, within_s=240)  # experts are no longer where the plan has them
        before, made = _state(cluster), len(_done(cluster))
        served = {process.pid for process in cluster.processes()}
        cluster.kill_head()
        answered = load.outcomes.total()
        eventually(lambda: load.outcomes.total() > answered + 9, within_s=120)  # without a head
        urls = dict(cluster.urls)
        cluster.restart_head()
        assert "cluster lab serves without a head; taking over s0, s1, s2" in cluster.narration
        assert cluster.urls == urls and {process.pid for process in cluster.processes()} == served
        eventually(lambda: "cluster page:" in cluster.narration)
        after = _state(cluster)
        assert after["uncovered"] == 0 and len(after["decisions"]) >= made
        assert sum(len(server["held"]) for server in after["servers"]) >= 256
        assert after["since_s"] >= before["since_s"]  # it has not begun anew
        assert {outcome for _, outcome in load.outcomes} == {"right"}, load.wrong
        cluster.kill("s1")  # the new head mends as the old one did
        eventually(lambda: cluster.is_back("s1"), within_s=240)
        soon = load.outcomes["s1", "right"]
        eventually(lambda: load.outcomes["s1", "right"] > soon)
    assert not load.wrong
    for name in ("s0", "s2"):
        assert {outcome for at, outcome in load.outcomes if at == name} == {"right"}, load.outcomes


def test_migration_goes_on_under_the_next_head(cluster: EdgeProcess, right: dict[str, str]) -> None:
    moved = {name: (prompt,) for name, prompt in zip(NAMES, PROMPTS[1:] + PROMPTS[:1], strict=True)}
    made = len(_done(cluster))
    with Load(cluster, right, MAX_TOKENS, moved) as load:
        eventually(lambda: len(_done(cluster)) > made, within_s=240)
    assert {outcome for _, outcome in load.outcomes} == {"right"}, load.wrong


def test_a_second_head_is_refused(cluster: EdgeProcess, tmp_path: Path) -> None:
    first = cluster.popen
    try:
        cluster.restart_head()
    except AssertionError as error:
        assert "cluster lab already has a head, another moetool serve" in str(error)
    finally:
        second, cluster.popen = cluster.popen, first
    assert second.wait() == 2 and first.poll() is None
