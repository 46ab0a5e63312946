"""`moetool serve --cluster local:3 --mode edge`: SIGTERM of one server under load, and the next head."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.edge_process import NAMES, PROMPTS, EdgeProcess, Load, edge_cluster, right_answers
from tests.servers import eventually, get, has_ended, post

pytestmark = pytest.mark.ray
MAX_TOKENS, LONG = 12, 200


def _stats(cluster: EdgeProcess, name: str) -> Any:
    return json.loads(get(cluster.urls[name], "/stats")[2])


def _failed(cluster: EdgeProcess) -> list[int]:
    """Calls of the two others that failed."""
    return [_stats(cluster, name)["engine"]["cluster"].get("failed_calls", 0) for name in ("s0", "s2")]


def test_a_server_that_is_asked_to_end_finishes_and_stays_away(reference: Path, tokenizer: Any, tmp_path: Path) -> None:
    right = right_answers(reference, tokenizer, MAX_TOKENS)
    with edge_cluster(tmp_path, "--set", "cluster.name=drained") as cluster, ThreadPoolExecutor() as pool:
        with Load(cluster, right, MAX_TOKENS, {"s0": PROMPTS, "s1": (), "s2": PROMPTS}) as load:
            eventually(lambda: all(load.outcomes[name, "right"] > 1 for name in ("s0", "s2")))
            failed = _failed(cluster)
            body = {"model": "reference", "prompt": PROMPTS[0], "max_tokens": LONG, "ignore_eos": True}
            running = pool.submit(post, cluster.urls["s1"], "/v1/completions", body)
            eventually(lambda: _stats(cluster, "s1")["server"]["requests_running"])
            process = cluster.server("s1")
            process.send_signal(signal.SIGTERM)
            eventually(lambda: load.ask("s1", PROMPTS[0]) == "refused")
            assert not running.done()
            status, answer = running.result()
            assert status == 200 and answer["usage"]["completion_tokens"] == LONG
            eventually(lambda: has_ended(process))
            before = dict(load.outcomes)
            eventually(lambda: all(load.outcomes[name, "right"] > before[name, "right"] + 2 for name in ("s0", "s2")))
            assert _failed(cluster) == failed
        assert {outcome for _, outcome in load.outcomes} == {"right"}, load.wrong
        assert [line for line in cluster.narration.splitlines() if "server s1 " in line and "warning" not in line] == [
            "moetool: server s1 is leaving: it finishes its requests within 30 s and accepts no new ones",
            "moetool: server s1 has left; it returns when its machine joins again, or with the next head",
        ]
        assert "experts without a server are placed on other servers until theirs returns" in cluster.narration
        cluster.kill_head()
        cluster.restart_head()
        assert [load.ask(name, PROMPTS[0]) for name in NAMES] == ["right"] * 3
