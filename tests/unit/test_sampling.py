"""Seeds, temperature, top_p and log-probabilities."""

import pytest
import torch

from moetool.models.sampling import Sampler
from moetool.request import SamplingParams


def _draw(params: SamplingParams, logits_V: torch.Tensor, count: int, others: int = 0) -> list[int]:
    sampler = Sampler(len(logits_V))
    sampler.add("me", params)
    for i in range(others):
        sampler.add(f"other{i}", SamplingParams(max_tokens=1, temperature=2.0, seed=i))
    names = [*(f"other{i}" for i in range(others)), "me"]
    return [int(sampler.apply(names, logits_V.repeat(len(names), 1).clone())[-1].argmax()) for _ in range(count)]


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def test_greedy_is_the_argmax() -> None:
    assert _draw(SamplingParams(max_tokens=1), LOGITS, 5) == [0] * 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    count = 4000
    drawn = torch.tensor(_draw(SamplingParams(max_tokens=1, temperature=temperature, seed=1), LOGITS, count))
    expected = (LOGITS / temperature).softmax(-1) * count
    found = torch.bincount(drawn, minlength=5)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 99.9 % of a chi-square with 4 degrees of freedom


def test_the_same_seed_gives_the_same_tokens_alone_and_in_company() -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=7)
    assert _draw(params, LOGITS, 50) == _draw(params, LOGITS, 50, others=3)


def test_a_request_that_goes_on_elsewhere_draws_what_it_would_have() -> None:
    params = SamplingParams(max_tokens=1, temperature=1.0, seed=7)
    sampler = Sampler(len(LOGITS))
    sampler.add("me", params, drawn=20)
    rest = [int(sampler.apply(["me"], LOGITS[None].clone())[0].argmax()) for _ in range(30)]
    assert rest == _draw(params, LOGITS, 50)[20:]


def test_other_seeds_give_other_tokens() -> None:
    flat = torch.zeros(1000)
    draws = {tuple(_draw(SamplingParams(max_tokens=1, temperature=1.0, seed=s), flat, 5)) for s in (0, 1, 2, None)}
    assert len(draws) == 4


def test_top_p_keeps_the_nucleus_only() -> None:
    probabilities = LOGITS.softmax(-1)
    assert probabilities[0] < 0.7 < probabilities[:2].sum()
    drawn = _draw(SamplingParams(max_tokens=1, temperature=1.0, top_p=0.7, seed=3), LOGITS, 500)
    assert set(drawn) == {0, 1}
    tiny = _draw(SamplingParams(max_tokens=1, temperature=1.0, top_p=1e-9, seed=3), LOGITS, 20)
    assert set(tiny) == {0}


def test_logprobs_are_of_the_model_not_of_the_sampling() -> None:
    sampler = Sampler(5)
    sampler.add("a", SamplingParams(max_tokens=1, temperature=0.1, top_p=0.5, seed=1, logprobs=2))
    sampler.apply(["a"], LOGITS.repeat(1, 1).clone())
    logprob = sampler.logprob("a", 3)
    expected = LOGITS.log_softmax(-1)
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in logprob.top] == [0, 1]
