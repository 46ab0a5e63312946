"""Decoding one request at a time: the contract of the batcher, with one request in every forward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moetool.errors import CapacityError, UsageError
from moetool.request import Output, SamplingParams
from moetool.runtime.batching import Batcher
from moetool.runtime.decoding import Batch
from moetool.runtime.sequential import Sequential, open_batcher
from moetool.types import Phase

PROMPTS = ["Question: What is 12 + 7? Answer:", "def add(a, b):", "The king said"]


@pytest.fixture
def batcher(full: Any) -> Iterator[Sequential]:
    batcher = Sequential(full.model, kv_tokens=256)
    yield batcher
    batcher.close()


@pytest.fixture
def ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def _run(batcher: Sequential | Batcher) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {}
    while not batcher.idle:
        for output in batcher.step():
            outputs.setdefault(output.request, []).append(output)
    return outputs


def _tokens(outputs: list[Output]) -> list[int]:
    return [o.token for o in outputs if o.token is not None]


def test_requests_run_one_after_the_other(batcher: Sequential, ids: list[list[int]]) -> None:
    seen: list[Batch] = []
    batcher.on_forward = seen.append
    for i, prompt in enumerate(ids):
        batcher.add(10 + i, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    assert (batcher.running, batcher.waiting) == (0, 3)
    outputs = _run(batcher)
    assert [b.info.forward_id for b in seen] == list(range(9))
    assert all(b.info.token_id_T == b.token_id_T for b in seen)
    for i, prompt in enumerate(ids):
        first, second, third = seen[3 * i : 3 * i + 3]
        tokens = _tokens(outputs[10 + i])
        assert len(tokens) == 3 and outputs[10 + i][-1].finish == "length"
        assert first.info.request_T == (10 + i,) * len(prompt) and first.token_id_T == tuple(prompt)
        assert first.info.phase_T == (Phase.PREFILL,) * len(prompt) and set(first.iteration_T) == {0}
        assert second.info.phase_T == third.info.phase_T == (Phase.DECODE,)
        assert (second.token_id_T, third.token_id_T) == ((tokens[0],), (tokens[1],))
        assert (second.info.position_T, third.info.position_T) == ((len(prompt),), (len(prompt) + 1,))
        assert (second.iteration_T, third.iteration_T) == ((1,), (2,))


def test_tokens_and_samples_are_those_of_the_batch(full: Any, batcher: Sequential, ids: list[list[int]]) -> None:
    draws = [
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=2),
        SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, seed=3),
        SamplingParams(max_tokens=8, temperature=1.2, seed=4),
    ]
    for i, params in enumerate(draws):
        batcher.add(i, ids[i], params)
    alone = _run(batcher)
    together = Batcher(full.model, max_requests=3, kv_tokens=256)
    for i, params in enumerate(draws):
        together.add(i, ids[i], params)
    batched = _run(together)
    together.close()
    for i in range(3):
        assert _tokens(alone[i]) == _tokens(batched[i])
        assert alone[i][-1].finish == batched[i][-1].finish
    first, other = alone[0][0].logprob, batched[0][0].logprob
    assert first is not None and other is not None and first.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_failure_takes_only_its_own_request(full: Any, batcher: Sequential, ids: list[list[int]]) -> None:
    def blow(module: Any, args: Any) -> None:
        hook.remove()
        raise RuntimeError("the fuse is blown")

    hook = full.layers[3].experts.register_forward_pre_hook(blow)
    for i in range(2):
        batcher.add(i, ids[i], SamplingParams(max_tokens=4, ignore_eos=True))
    outputs = _run(batcher)
    assert outputs[0] == [Output(0, None, finish="error", error="the fuse is blown")]
    assert len(_tokens(outputs[1])) == 4


def test_cancelled_requests_leave(batcher: Sequential, ids: list[list[int]]) -> None:
    for i in range(3):
        batcher.add(i, ids[i], SamplingParams(max_tokens=4, ignore_eos=True))
    batcher.step()
    assert (batcher.running, batcher.waiting) == (1, 2)
    for request in (0, 1, 77):
        batcher.cancel(request)
    outputs = _run(batcher)
    assert list(outputs) == [2] and len(_tokens(outputs[2])) == 4


def test_scores_do_not_disturb_the_running_request(batcher: Sequential, full: Any, ids: list[list[int]]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    batcher.add(0, ids[0], params)
    alone = _tokens(_run(batcher)[0])
    batcher.add(1, ids[0], params)
    tokens = _tokens(batcher.step())
    with torch.inference_mode():
        plain = full.model(torch.tensor([ids[1]])).logits[0]
    assert torch.allclose(batcher.score(5, ids[1]), plain, atol=1e-4)
    assert tokens + _tokens(_run(batcher)[1]) == alone


def test_what_cannot_run_is_refused(batcher: Sequential) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        batcher.check([], SamplingParams(max_tokens=1))
    with pytest.raises(CapacityError, match="250 tokens and 7 more are asked for, but the context holds 256"):
        batcher.check([1] * 250, SamplingParams(max_tokens=7))


def test_families_that_can_be_batched_are(full: Any) -> None:
    batcher = open_batcher(full.model, max_requests=2, kv_tokens=64)
    assert isinstance(batcher, Batcher) and batcher.max_requests == 2
    batcher.close()
