"""`moetool serve --cluster local:3 --mode edge`: answers, deaths, hangs, and a clean end."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edge_process import NAMES, PROMPTS, EdgeProcess, Load, edge_cluster, right_answers
from tests.servers import eventually, get

pytestmark = pytest.mark.ray
MAX_TOKENS = 12
CHAT = "https://chat.example"
CALL_TIMEOUT_S = 5
HANG_S = 8
"""More than a server takes to answer the head while another one starts beside it."""


@pytest.fixture(scope="module")
def right(reference: Path, tokenizer: Any) -> dict[str, str]:
    """The answers of one server that has all experts."""
    return right_answers(reference, tokenizer, MAX_TOKENS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = ("--set", f"cluster.hang_s={HANG_S}", "--set", f"cluster.call_timeout_s={CALL_TIMEOUT_S}")
    with edge_cluster(folder, *settings, "--allowed-host", "lab.example", "--cors-origin", CHAT) as started:
        yield started


def _all_right(cluster: EdgeProcess, right: dict[str, str]) -> None:
    load = Load(cluster, right, MAX_TOKENS)
    assert [(name, load.ask(name, prompt)) for name in NAMES for prompt in PROMPTS] == [
        (name, "right") for name in NAMES for _ in PROMPTS
    ], load.wrong


def test_every_server_answers_as_one_server_would(cluster: EdgeProcess, right: dict[str, str]) -> None:
    assert all(len(text) > 5 for text in right.values())
    _all_right(cluster, right)
    for name in NAMES:
        stats = json.loads(get(cluster.urls[name], "/stats")[2])["engine"]["cluster"]
        assert stats["remote_pairs"] > 0 and stats["served_pairs"] > 0 and 0.2 < stats["local_share"] < 0.8
        assert not stats.get("failed_calls") and (stats.get("late_calls") or not stats.get("last_resort"))


def test_every_port_answers_only_known_names_and_pages(cluster: EdgeProcess) -> None:
    eventually(lambda: "cluster page:" in cluster.narration)
    page = cluster.narration.partition("cluster page: ")[2].split()[0]
    for url, path in ((page, "/stats"), *((cluster.urls[name], "/health") for name in NAMES)):
        assert get(url, path)[0] == get(url, path, Host="lab.example:9")[0] == 200
        assert get(url, path, Host="evil.example")[0] == get(url, path, Origin="https://evil.example")[0] == 403
    for name in NAMES:
        status, headers, _ = get(cluster.urls[name], "/health", Origin=CHAT)
        assert (status, headers["access-control-allow-origin"]) == (200, CHAT)


def test_a_server_that_is_killed_under_load(cluster: EdgeProcess, right: dict[str, str]) -> None:
    with Load(cluster, right, MAX_TOKENS) as load:
        eventually(lambda: all(load.outcomes[name, "right"] > 1 for name in NAMES))
        cluster.kill("s1")
        eventually(lambda: "server s1 is gone: its process has ended" in cluster.narration)
        before = dict(load.outcomes)
        eventually(lambda: all(load.outcomes[name, "right"] > before[name, "right"] for name in ("s0", "s2")))
        eventually(lambda: cluster.is_back("s1"), within_s=240)
        before = dict(load.outcomes)
        eventually(lambda: load.outcomes["s1", "right"] > before["s1", "right"])
    assert not load.wrong
    for name in ("s0", "s2"):  # whoever asked another server did not notice
        assert {outcome for at, outcome in load.outcomes if at == name} == {"right"}, load.outcomes
    assert "experts without a server are placed on other servers until theirs returns" in cluster.narration
    _all_right(cluster, right)


def test_a_server_that_hangs(cluster: EdgeProcess, right: dict[str, str]) -> None:
    load = Load(cluster, right, MAX_TOKENS)

    def ask_s() -> float:
        began = time.monotonic()
        assert load.ask("s0", PROMPTS[0]) == "right"
        return time.monotonic() - began

    def counted() -> tuple[int, int]:
        stats = json.loads(get(cluster.urls["s0"], "/stats")[2])["engine"]["cluster"]
        return stats.get("late_calls", 0), stats.get("failed_calls", 0)

    usual_s = sorted(ask_s() for _ in range(5))
    late, failed = counted()
    cluster.server("s2").send_signal(signal.SIGSTOP)
    hung_s = ask_s()  # others have what it had, long before its calls run out of time
    now_late, now_failed = counted()
    print(f"usually {usual_s}, and {hung_s:.3f} s once a server stands still, late calls {now_late - late}")
    assert now_late > late and now_failed == failed and hung_s < usual_s[-1] + CALL_TIMEOUT_S
    gone = f"server s2 is gone: server s2 did not answer info in {HANG_S} s"
    eventually(lambda: gone in cluster.narration)
    eventually(lambda: cluster.is_back("s2"), within_s=240)
    _all_right(cluster, right)
