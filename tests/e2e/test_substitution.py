"""SMoE live: without alpha it changes nothing, with it a replay of the log decides as the server did."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.models.families import FAMILIES
from moetool.models.spec import read_spec
from moetool.policy import build_policy
from moetool.replay import replay
from moetool.request import SamplingParams
from moetool.serving.assembly import ServeOptions, build_engine
from moetool.trace import Trace
from tests.engines import engine, generate

TEXTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]


def test_without_alpha_the_logits_are_those_of_lru(reference: Path, tokenizer: Any) -> None:
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    results = {}
    for name, options, slots in (("lru", {}, 40), ("smoe", {"alpha": 0}, 40), ("smoe", {"alpha": 0.5}, 40)):
        made = engine(reference, tokenizer, build_policy(name, read_spec(reference), options, slots), slots)
        results[name, options.get("alpha")] = generate(made, ids, 6)
        made.close()
    tokens, logits = results["lru", None]
    found_tokens, found = results["smoe", 0]
    assert found_tokens == tokens
    assert len(found) == len(logits) and all(map(torch.equal, found, logits))
    assert not torch.equal(results["smoe", 0.5][1][2], logits[2])  # it does substitute


@pytest.mark.parametrize(
    ("alpha", "slots", "prefetch"), [(0.3, 40, True), (0.5, 100, True), (0.5, 3, True), (0.3, 60, False)]
)
def test_replay_substitutes_as_serve_did(
    alpha: float, slots: int, prefetch: bool, reference: Path, tokenizer: Any, tmp_path: Path
) -> None:
    options = {"alpha": alpha, "prefetch": prefetch}
    policy = build_policy("smoe", read_spec(reference), options, slots)
    made = engine(reference, tokenizer, policy, slots, log=tmp_path / "log")
    for i, text in enumerate(TEXTS):  # a request begins while others run
        params = SamplingParams(max_tokens=5 + i, temperature=0.7, seed=i)
        made.submit(tokenizer(text)["input_ids"], params, lambda output: None)
        made.step()
    while not made.idle:
        made.step()
    counts = made.residency.counts
    made.close()
    trace = Trace(tmp_path / "log")
    assert trace.columns >= {"experts", "logits"} | ({"ahead"} if prefetch else set())
    (row,) = replay(trace, ["smoe"], [slots * trace.spec.slot_bytes], options={"smoe": options})
    assert row.counts == counts
    assert row.digest == trace.manifest["provenance"]["decisions"]
    (other,) = replay(trace, ["smoe"], [slots * trace.spec.slot_bytes], options={"smoe": {**options, "alpha": 0}})
    assert other.counts.missed >= counts.missed


def test_a_family_without_substitutes_is_refused_when_serving(reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3_moe", replace(FAMILIES["qwen3_moe"], fixed="its router is made of stone"))
    with pytest.raises(Exception, match=r"smoe .* qwen3_moe does not allow that: its router is made of stone"):
        build_engine(str(reference), options=ServeOptions(), policy="smoe")
