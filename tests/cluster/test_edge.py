"""`moetool serve --cluster local:3 --mode edge` through Ray: answers, deaths, hangs, and a clean end."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.edge_process import NAMES, PROMPTS, EdgeProcess, Load, edge_cluster
from tests.engines import engine, generate
from tests.servers import eventually, get

pytest.importorskip("ray")
pytestmark = pytest.mark.ray
MAX_TOKENS = 12
CHAT = "https://chat.example"
HANG_S = 8
"""More than a server takes to answer the head while another one starts beside it."""


@pytest.fixture(scope="module")
def right(reference: Path, tokenizer: Any) -> dict[str, str]:
    """What one server that has all experts answers."""
    made = engine(reference, tokenizer, "lru", 256)
    answers = {}
    for prompt in PROMPTS:
        (tokens,), _ = generate(made, [tokenizer(prompt)["input_ids"]], MAX_TOKENS)
        answers[prompt] = tokenizer.decode(tokens, skip_special_tokens=True)
    made.close()
    return answers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EdgeProcess]:
    folder = tmp_path_factory.mktemp("cluster")
    settings = ("--set", f"cluster.hang_s={HANG_S}", "--set", "cluster.call_timeout_s=5")
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
        assert not stats.get("last_resort") and not stats.get("failed_calls")


def test_every_port_answers_only_known_names_and_pages(cluster: EdgeProcess) -> None:
    eventually(lambda: "is to be seen on" in cluster.narration)
    page = cluster.narration.partition("is to be seen on ")[2].split()[0]
    for url, path in ((page, "/state.json"), *((cluster.urls[name], "/health") for name in NAMES)):
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
    assert "experts that only it held have another place until it is back" in cluster.narration
    _all_right(cluster, right)


def test_a_server_that_hangs(cluster: EdgeProcess, right: dict[str, str]) -> None:
    cluster.server("s2").send_signal(signal.SIGSTOP)
    load = Load(cluster, right, MAX_TOKENS)
    assert load.ask("s0", PROMPTS[0]) == "right"  # its calls run out of time, and others have what it had
    gone = f"server s2 is gone: server s2 did not answer info in {HANG_S} s"
    eventually(lambda: gone in cluster.narration)
    eventually(lambda: cluster.is_back("s2"), within_s=240)
    _all_right(cluster, right)
