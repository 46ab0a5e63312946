"""`replay` takes the decisions that `serve` took, on the gate stream that serve logged."""

from pathlib import Path
from typing import Any

import pytest

from moetool.replay import replay
from moetool.request import SamplingParams
from moetool.trace import Trace
from tests.engines import engine

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "User: hello"]


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        ("on_demand", 8),
        ("lru", 40),
        ("lru", 3),
        ("lfu", 90),
        ("duoserve", 8),
        ("layerwise", 40),
        ("moesys", 64),
        ("moe_infinity", 60),
        ("static_split", 70),
        ("finemoe", 60),
        ("finemoe", 4),
        ("hybrimoe", 3),
        ("hybrimoe", 60),
    ],
)
def test_replay_decides_as_serve_did(
    policy: str, slots: int, reference: Path, tokenizer: Any, predictor: Any, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    made = engine(reference, tokenizer, policy, slots, predictor=predictor, log=log)
    ids = [tokenizer(text)["input_ids"] for text in PROMPTS]
    ended: list[int] = []
    requests = []
    for i, prompt in enumerate(ids):  # requests come and go while others run
        params = SamplingParams(max_tokens=4 + 3 * i, temperature=0.7, seed=i)
        requests.append(made.submit(prompt, params, lambda o: ended.append(o.request) if o.finish else None))
        for _ in range(3):
            made.step()
    made.cancel(requests[3])
    while not made.idle:
        made.step()
    counts, num_slots = made.residency.counts, made.store.num_slots
    made.close()
    if policy == "layerwise":
        assert made.store.stats.reads == counts.loads  # nothing of a whole layer is spared, needed or not

    trace = Trace(log)
    assert trace.manifest["composition"] == {"kind": "log"}
    (row,) = replay(trace, [policy], [slots * trace.spec.slot_bytes], predictor=predictor)
    assert row.slots == num_slots
    assert row.counts == counts
    assert row.digest == trace.manifest["provenance"]["decisions"]
    assert counts.needed > 500
