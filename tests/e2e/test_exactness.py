"""The main invariant: no policy, budget or order of loads changes the tokens or logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetool.base import plugins
from moetool.caching.policy import policy_class
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather as prompt_sets
from tests.engines import Answered, RandomPolicy, engine, generate

MIXED = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said", "12 * 3 =", "User: hello"]


@pytest.fixture(scope="module")
def baseline(reference: Path, tokenizer: Any) -> Answered:
    """Every expert has a slot."""
    return Answered.by(engine(reference, tokenizer, "lru", 256), MIXED, 8)


@pytest.mark.parametrize(
    ("policy", "slots"),
    [
        *((policy, slots) for policy in ("on_demand", "lru", "lfu", "duoserve") for slots in (2, 5, 64)),
        *(("lfru", 3), ("lfru", 40)),
        *(("layerwise", 32), ("layerwise", 80), ("moesys", 64)),
        *(("mixtral_offloading", 2), ("mixtral_offloading", 64), ("promoe", 2), ("promoe", 64)),
        *(("moe_infinity", 2), ("moe_infinity", 64), ("static_split", 2), ("static_split", 70)),
        *(("finemoe", 2), ("finemoe", 64)),
        *(("hybrimoe", 2), ("hybrimoe", 64), ("foresight", 2), ("foresight", 64)),
    ],
)
def test_logits_are_the_same_to_the_bit(
    policy: str, slots: int, baseline: Answered, reference: Path, tokenizer: Any, predictor: Any
) -> None:
    baseline.require_same(engine(reference, tokenizer, policy, slots, predictor=predictor))


def test_every_policy_that_serves_is_among_these() -> None:
    marks = test_logits_are_the_same_to_the_bit.pytestmark
    tested = {policy for policy, _ in marks[0].args[1]}
    kinds = {name: policy_class(name) for name in plugins.names("policy")}
    assert tested == {name for name, kind in kinds.items() if kind.lossless and not kind.needs_future}


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(slots=st.integers(2, 256), seed=st.integers(0, 1000), io_threads=st.integers(1, 3))
def test_no_order_of_loads_changes_a_bit(
    slots: int, seed: int, io_threads: int, baseline: Answered, reference: Path, tokenizer: Any
) -> None:
    policy = RandomPolicy(Checkpoint.open(reference).spec, slots, seed)
    baseline.require_same(engine(reference, tokenizer, policy, slots, io_threads=io_threads))


@pytest.fixture(scope="module")
def fifty(full: Any, tokenizer: Any) -> Any:
    """50 prompts with the plain model's greedy answers and the gap between its two likeliest tokens at each step."""
    texts = [prompt.text for prompt in prompt_sets.load(["all"], max_prompts=8)][:50]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    answers = []
    for prompt in ids:
        with torch.inference_mode():
            made = full.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=8,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        top = torch.stack(made.logits)[:, 0].topk(2).values
        answers.append((made.sequences[0, len(prompt) :].tolist(), (top[:, 0] - top[:, 1]).tolist()))
    return ids, answers


@pytest.mark.parametrize("batch", [1, 8, 50])
def test_tokens_are_those_of_the_plain_model(
    batch: int, fifty: Any, reference: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, answers = fifty
    made = engine(reference, tokenizer, "lru", 64, max_requests=batch)
    tokens = []
    for start in range(0, len(ids), batch):
        tokens += generate(made, ids[start : start + batch], 8)[0]
    made.close()
    ties = 0
    for found, (expected, gaps) in zip(tokens, answers, strict=True):
        if found != expected:
            first = next(i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b)
            assert gaps[first] < 1e-4, f"another token at a gap of {gaps[first]}"
            ties += 1
    with capsys.disabled():
        print(f"\nbatch {batch}: {len(ids) - ties} of {len(ids)} answers equal the plain model's, {ties} ties ", end="")
    assert ties <= 1
