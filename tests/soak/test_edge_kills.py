"""Three edge servers under load, of which one after the other is killed: twenty times, at random moments."""

import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.edge_process import NAMES, EdgeProcess, Load, edge_cluster, right_answers
from tests.servers import eventually

pytestmark = pytest.mark.ray
MAX_TOKENS = 16
KILLS = int(os.environ.get("MOETOOL_SOAK_KILLS", "20"))


def test_random_kills(reference: Path, tokenizer: Any, tmp_path: Path) -> None:
    right = right_answers(reference, tokenizer, MAX_TOKENS)
    draw, killed = random.Random(0), Counter[str]()
    back_s = []
    with (
        edge_cluster(tmp_path, "--set", "cluster.call_timeout_s=5") as cluster,
        Load(cluster, right, MAX_TOKENS) as load,
    ):
        eventually(lambda: all(load.outcomes[name, "right"] > 1 for name in NAMES))
        for _ in range(KILLS):
            name = draw.choice(NAMES)
            time.sleep(draw.uniform(0, 2))
            killed[name] += 1
            began = time.monotonic()
            cluster.kill(name)
            _returns(cluster, load, name, killed[name])
            back_s.append(time.monotonic() - began)
            print(f"{name} back after {back_s[-1]:.1f} s; {dict(load.outcomes)}", flush=True)
    print(f"\n{KILLS} kills {dict(killed)}; outcomes {dict(load.outcomes)}")
    print(f"back after {sorted(back_s)[len(back_s) // 2]:.1f} s in the median, {max(back_s):.1f} at most")
    print(f"the longest that anybody waited for an answer or a refusal: {load.longest_s:.1f} s")
    assert not load.wrong
    assert not any(outcome == "wrong" for _, outcome in load.outcomes)


def _returns(cluster: EdgeProcess, load: Load, name: str, times: int) -> None:
    """The others go on, and the killed one comes back and answers rightly."""
    before = dict(load.outcomes)
    others = [other for other in NAMES if other != name]
    eventually(lambda: all(load.outcomes[n, "right"] > before.get((n, "right"), 0) for n in others), within_s=60)
    eventually(lambda: cluster.is_back(name, times), within_s=180)
    before = dict(load.outcomes)
    eventually(lambda: load.outcomes[name, "right"] > before.get((name, "right"), 0), within_s=60)
