"""With deterministic=true an answer in bfloat16 depends neither on other requests nor on what is cached."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moetool.base.errors import UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.loop.engine import Engine
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.serve_options import ServeOptions
from tests import families
from tests.refusals import refused

WIDE = {
    **{"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 64},
    **{"num_hidden_layers": 2, "num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 4},
}
SLOTS = 20  # of 32 experts
CHAT = [3 + (7 * i + i * i) % 60 for i in range(60)]
PROMPTS = [CHAT[:length] for length in (40, 45, 50, 60)] + [[3 + (11 * i) % 60] * (3 + i) for i in range(4)]
"""A chat's turns, each with the beginning of the next one, and other prompts."""

Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]
"""Each token with its log-probability and those of all others."""


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, reference: Path) -> Checkpoint:
    """A family with pages, and one whose requests keep caches of their own."""
    path = tmp_path_factory.mktemp(request.param)
    families.save(request.param, path, std=0.06, **WIDE)
    for file in reference.glob("token*"):
        shutil.copy(file, path)
    return Checkpoint.open(path)


def _open(checkpoint: Checkpoint, policy: str = "lru", slots: int = SLOTS, **settings: Any) -> Engine:
    values = {"dtype": "bfloat16", "kv_tokens": 1024, "prefill_chunk": 16, "oracle_s": 0.0, "threads": 1, **settings}
    options = ServeOptions(**values)
    memory = divide_with_slots(checkpoint, options, slots).device_bytes
    engine = build_engine(checkpoint, options=options, policy=policy, device_memory_bytes=memory)
    engine.state = "ready"
    return engine


def _answers(engine: Engine, clients: int, *, repeats: int = 1) -> list[list[Answer]]:
    """Answers to all prompts, each so many times, with so many requests at a time; closes the engine."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=engine.vocab_size)
    answers: dict[int, Answer] = {}
    running: set[int] = set()

    def sink(output: Output) -> None:
        assert output.token is not None and output.logprob is not None, output.error
        answers[output.request].append((output.token, output.logprob.logprob, tuple(output.logprob.top)))
        if output.finish is not None:
            running.remove(output.request)

    waiting = PROMPTS * repeats
    try:
        while waiting or running:
            while waiting and len(running) < clients:
                number = engine.submit(waiting.pop(0), params, sink)
                answers[number] = []
                running.add(number)
            engine.step()
    finally:
        engine.close()
    found = list(answers.values())
    return [found[i : i + len(PROMPTS)] for i in range(0, len(found), len(PROMPTS))]


def test_answers_are_bit_equal_alone_together_and_repeated(checkpoint: Checkpoint) -> None:
    (alone,) = _answers(_open(checkpoint, deterministic=True), 1)
    assert _answers(_open(checkpoint, slots=32, deterministic=True), 4, repeats=2) == [alone, alone]
    one, several = _open(checkpoint, deterministic=True), _open(checkpoint)
    assert one.batcher.max_requests == 1 < several.batcher.max_requests
    one.close()
    several.close()


@pytest.mark.parametrize(
    ("policy", "settings", "found"),
    [("lru", {"max_requests": 4}, "max_requests is 4"), ("smoe", {}, "policy smoe changes routes")],
)
def test_what_depends_on_other_requests_is_refused(
    checkpoint: Checkpoint, policy: str, settings: dict[str, Any], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        _open(checkpoint, policy, deterministic=True, **settings)


def test_prefixes_of_a_policy_that_changes_routes_are_not_kept(checkpoint: Checkpoint) -> None:
    with refused(UsageError, "smoe", "keep_prefixes"):
        _open(checkpoint, "smoe", keep_prefixes=True)
