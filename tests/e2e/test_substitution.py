"""SMoE live: without alpha it changes nothing, with it a replay of the log decides as the server did."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.families import FAMILIES
from moetool.caching.policy import build_policy
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.request import SamplingParams
from moetool.runtime.serve_options import ServeOptions
from moetool.tuning.replay import ReplaySetup, replay
from tests.engines import engine, generate, require_replayed
from tests.refusals import refused

COSTS = {"load_s": 3.0, "host_s": 1.0}
TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]


def test_without_alpha_the_logits_are_those_of_lru(reference: Path, tokenizer: Any) -> None:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    results = {}
    configurations: dict[str, tuple[str, dict[str, Any]]] = {
        "lru": ("lru", {}),
        "smoe": ("smoe", {"alpha": 0.0}),
        "smoe and host": ("smoe", {"alpha": 0.0, **COSTS}),
        "hybrimoe and host": ("hybrimoe", COSTS),
        "alpha": ("smoe", {"alpha": 0.5}),
    }
    hosted = {}
    for title, (name, options) in configurations.items():
        made = engine(reference, tokenizer, build_policy(name, Checkpoint.open(reference).spec, options, 40), 40)
        results[title] = generate(made, ids, 4)
        hosted[title] = made.residency.counts.hosted
        made.close()
    tokens, logits = results["lru"]
    for title in ("smoe", "smoe and host", "hybrimoe and host"):
        found_tokens, found = results[title]
        assert found_tokens == tokens
        assert len(found) == len(logits) and all(map(torch.equal, found, logits)), title
        assert bool(hosted[title]) == ("host" in title)
    assert not torch.equal(results["alpha"][1][2], logits[2])  # it does substitute


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        (40, {"alpha": 0.3}),
        (3, {"alpha": 0.5}),
        (60, {"alpha": 0.3, "prefetch": False}),
        (60, {"alpha": 0.5, **COSTS}),
    ],
)
def test_replay_substitutes_as_serve_did(
    slots: int, options: dict[str, Any], reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    policy = build_policy("smoe", Checkpoint.open(reference).spec, options, slots)
    made = engine(reference, tokenizer, policy, slots, log=tmp_path / "log")
    for i, text in enumerate(TEXTS):  # a request begins while others run
        params = SamplingParams(max_tokens=5 + i, temperature=0.7, seed=i)
        made.submit(tokenizer(text)["input_ids"], params, lambda output: None)
        made.step()
    while not made.idle:
        made.step()
    trace, row = require_replayed(made, tmp_path / "log", "smoe", slots, ReplaySetup(options={"smoe": options}))
    counts = row.counts
    assert trace.columns >= {"experts", "logits"} | ({"ahead"} if options.get("prefetch", True) else set())
    (other,) = replay(
        trace, ["smoe"], [slots * trace.spec.slot_bytes], ReplaySetup(options={"smoe": {**options, "alpha": 0}})
    )
    assert other.counts.missed + other.counts.hosted > counts.missed + counts.hosted
    assert bool(counts.hosted) == ("load_s" in options)


def test_a_family_without_substitutes_is_refused_when_serving(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_moe", replace(FAMILIES["qwen3_moe"], fixed="its router is made of stone"))
    with refused(Exception, "smoe", "qwen3_moe"):
        build_engine(Checkpoint.open(str(reference)), options=ServeOptions(), policy="smoe")
