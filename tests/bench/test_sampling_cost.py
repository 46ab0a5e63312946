"""Cost of choosing one token with a vocabulary of 151,936 (Qwen's), in milliseconds of one CPU thread."""

import time

import pytest
import torch

from moetool.runtime.loop.sampling import Sampler, nucleus
from moetool.runtime.request import SamplingParams

VOCABULARY = 151_936
ROUNDS = 20


def _logits(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "language":  # a few likely tokens and a long tail, as models have it: a nucleus of about 200 tokens
        return -1.5 * (torch.randperm(VOCABULARY, generator=generator).float() + 1).log()
    return torch.randn(VOCABULARY, generator=generator) * 2.5  # a nucleus of 30,000 tokens


def _milliseconds(params: SamplingParams, logits_V: torch.Tensor) -> float:
    sampler = Sampler()
    sampler.add("me", params, [0])
    times = []
    for _ in range(ROUNDS):
        scores = logits_V[None].clone()
        began = time.perf_counter()
        sampler.apply(["me"], scores)
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[ROUNDS // 2]


@pytest.mark.parametrize("kind", ["language", "flat"])
def test_a_token(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    logits = _logits(kind)
    cases = {
        "greedy": SamplingParams(max_tokens=1),
        "temperature": SamplingParams(max_tokens=1, temperature=0.8, seed=1),
        "top_p 0.95": SamplingParams(max_tokens=1, temperature=0.8, seed=1, top_p=0.95),
        "top_k 50, top_p 0.95": SamplingParams(max_tokens=1, temperature=0.8, seed=1, top_k=50, top_p=0.95),
        "min_p 0.05": SamplingParams(max_tokens=1, temperature=0.8, seed=1, min_p=0.05),
    }
    found = {name: _milliseconds(params, logits) for name, params in cases.items()}
    began = time.perf_counter()
    for _ in range(ROUNDS):
        logits.softmax(-1).sort(descending=True)
    found["sorting all, which top_p no longer does"] = 1e3 * (time.perf_counter() - began) / ROUNDS
    with capsys.disabled():
        print(f"\n{kind}: " + "; ".join(f"{name} {ms:.2f} ms" for name, ms in found.items()))
    probabilities = (logits / 0.8).softmax(-1)
    order = probabilities.sort(descending=True, stable=True)
    inside = int((order.values.cumsum(-1) - order.values < 0.95).sum())
    assert sorted(nucleus(probabilities, 0.95).tolist()) == sorted(order.indices[:inside].tolist())
