"""The requests of lm-eval's `local-completions`, by its own rules, against log-likelihoods from the plain model.

lm-eval itself is not needed: what it sends and how it reads the answers is written down here.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moetool.models.checkpoint import Checkpoint
from moetool.runtime.assembly import build_engine
from moetool.runtime.serve_options import ServeOptions
from tests.servers import get, post, serving

TASK = Path(__file__).parent / "multiple_choice.jsonl"


class Item(NamedTuple):
    """One choice of one question: tokens of the context and of what may follow it."""

    context: list[int]
    continuation: list[int]
    text: str


class Score(NamedTuple):
    """Log-likelihood of a continuation, and whether greedy decoding would have written it."""

    logprob: float
    greedy: bool


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    options = ServeOptions(kv_tokens=1024)
    engine = build_engine(Checkpoint.open("reference"), options=options, policy="lru", device_memory_bytes=16_000_000)
    engine.start()
    with serving(engine) as (url, _):
        yield url


@pytest.fixture(scope="module")
def items(tokenizer: Any) -> list[Item]:
    """The task as lm-eval cuts it: spaces go to the continuation, both are tokenised together and then parted."""
    made = []
    for line in TASK.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        context = row["context"].rstrip()
        space = row["context"][len(context) :]
        for choice in row["choices"]:
            whole = tokenizer.encode(context + space + choice)
            num = len(tokenizer.encode(context))
            made.append(Item(whole[:num], whole[num:], context + space + choice))
    assert all(item.context and item.continuation for item in made)
    return made


@pytest.fixture(scope="module")
def plain(items: list[Item], full: Any) -> list[Score]:
    """The same from the plain model's logits."""
    scores = []
    for item in items:
        tokens = torch.tensor([item.context + item.continuation])
        with torch.inference_mode():
            logprobs_TV = full.model(tokens).logits[0].float().log_softmax(-1)
        at = range(len(item.context) - 1, len(item.context) + len(item.continuation) - 1)
        own = [float(logprobs_TV[t, token]) for t, token in zip(at, item.continuation, strict=True)]
        best = [int(logprobs_TV[t].argmax()) for t in at]
        scores.append(Score(sum(own), best == item.continuation))
    return scores


def _ask(url: str, prompts: Any, max_tokens: int) -> list[dict[str, Any]]:
    body = {
        "model": "reference",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    status, answer = post(url, "/v1/completions", body)
    assert status == 200, answer
    return sorted(answer["choices"], key=lambda choice: choice["index"])


def _read(choice: dict[str, Any], num_context: int, max_tokens: int) -> Score:
    """lm-eval's reading of a choice: all after the context, without the generated tokens."""
    wanted = slice(num_context, len(choice["logprobs"]["token_logprobs"]) - max_tokens)
    own, top = choice["logprobs"]["token_logprobs"][wanted], choice["logprobs"]["top_logprobs"][wanted]
    return Score(sum(own), all(one == max(best.values()) for one, best in zip(own, top, strict=True)))


def _agree(found: list[Score], expected: list[Score]) -> None:
    assert [score.logprob for score in found] == pytest.approx([score.logprob for score in expected], abs=1e-3)
    assert [score.greedy for score in found] == [score.greedy for score in expected]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_log_likelihoods_of_batches_of_tokens(url: str, items: list[Item], plain: list[Score], max_tokens: int) -> None:
    found = []
    for start in range(0, len(items), 8):
        batch = items[start : start + 8]
        choices = _ask(url, [item.context + item.continuation for item in batch], max_tokens)
        found += [_read(choice, len(item.context), max_tokens) for choice, item in zip(choices, batch, strict=True)]
    _agree(found, plain)
    assert len({score.greedy for score in plain}) == 2  # the task has both kinds


def test_log_likelihoods_of_text(url: str, items: list[Item], plain: list[Score]) -> None:
    found = [_read(_ask(url, item.text, 1)[0], len(item.context), 1) for item in items[:6]]
    _agree(found, plain[:6])


def test_the_remote_tokenizer_is_found_missing(url: str) -> None:
    assert get(url, "/tokenizer_info")[0] == 404


def test_generation_until_a_string(url: str, full: Any, tokenizer: Any) -> None:
    prompt = "Question: What is 12 + 7? Answer:"
    ids = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        tokens = full.model.generate(**ids, max_new_tokens=16, do_sample=False)[0][ids["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    until = text[4:6]
    body = {"model": "reference", "prompt": [ids["input_ids"][0].tolist()], "max_tokens": 16, "temperature": 0}
    status, answer = post(url, "/v1/completions", {**body, "stop": [until, tokenizer.eos_token], "seed": 1234})
    assert (status, answer["choices"][0]["text"]) == (200, text[: text.find(until)])
