"""Seeds, temperature, top_p and log-probabilities: one request after the other, and all together as on a GPU."""

import sys
from functools import partial

import pytest
import torch

from moetool.runtime.decoding import NOT_NUMBERS
from moetool.runtime.loop import sampling
from moetool.runtime.loop.batched_sampling import RowSampling, batched_gumbel_scores, gumbel_noise
from moetool.runtime.loop.sampling import NO_TOKEN_LEFT, Sampler, gumbel_scores, likeliest, nucleus
from moetool.runtime.request import Output, SamplingParams


@pytest.fixture(autouse=True, params=[False, True], ids=["one by one", "together"])
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Which way `Sampler` takes in a test."""
    monkeypatch.setattr(sys.modules[__name__], "Sampler", partial(sampling.Sampler, batched=request.param))
    return bool(request.param)


def test_both_ways_leave_the_same_tokens(batched: bool) -> None:
    logits_BV = 3 * torch.randn(60, 300, generator=torch.Generator().manual_seed(2))
    limits = [
        SamplingParams(max_tokens=1, temperature=0.5 + 0.1 * (i % 7), top_k=k, top_p=p, min_p=m)
        for i, (k, p, m) in enumerate(
            (k, p, m) for k in (0, 1, 7, 299) for p in (1.0, 0.9, 0.3, 1e-40) for m in (0.0, 0.02, 1.0)
        )
    ]
    logits_BV = logits_BV[: len(limits)]
    draws = RowSampling.of([(params, 5) for params in limits], 300, torch.device("cpu"))
    together = batched_gumbel_scores(logits_BV, draws)
    for params, row_V, logits_V in zip(limits, together, logits_BV, strict=True):
        alone_V = gumbel_scores(logits_V, params, 1, 1)
        assert torch.equal(row_V.isfinite(), alone_V.isfinite()), params


def test_noise_is_of_the_key_and_the_token_alone(batched: bool) -> None:
    keys = torch.tensor([0, 1, 2**62 + 3])
    noise_BV = gumbel_noise(keys, 5000)
    assert torch.equal(gumbel_noise(keys[1:2], 70)[0], noise_BV[1, :70])
    assert len(noise_BV.unique()) > 0.99 * noise_BV.numel()
    below = (noise_BV < 0).double().mean(-1)  # by its distribution exp(-exp(0))
    assert ((below - 0.36788).abs() < 0.03).all()


def test_choosing_together_asks_nothing_of_the_device(batched: bool) -> None:
    """A tensor without values cannot answer."""
    sampler = sampling.Sampler(batched=True)
    params = SamplingParams(max_tokens=1, temperature=0.7, top_p=0.9, seed=1, frequency_penalty=0.5)
    sampler.add(1, params, [0])
    sampler.add(2, SamplingParams(max_tokens=1), [0])
    sampler.take(1, 3)
    chosen = sampler.apply([1, 2], torch.empty(2, 50, device="meta")).argmax(-1)
    assert chosen.device.type == "meta"


def _draw(params: SamplingParams, logits_V: torch.Tensor, count: int, others: int = 0) -> list[int]:
    sampler = Sampler()
    sampler.add(others, params, [0])
    for i in range(others):
        sampler.add(i, SamplingParams(max_tokens=1, temperature=2.0, seed=i), [0])
    requests = range(others + 1)
    return [int(sampler.apply(requests, logits_V.repeat(others + 1, 1))[-1].argmax()) for _ in range(count)]


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
    sampler = Sampler()
    sampler.add(0, params, [0] * 20, drawn=20)
    rest = [int(sampler.apply([0], LOGITS[None].clone())[0].argmax()) for _ in range(30)]
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
    sampler = Sampler()
    sampler.add(1, SamplingParams(max_tokens=1, temperature=0.1, top_p=0.5, seed=1, logprobs=2), [0])
    sampler.apply([1], LOGITS.repeat(1, 1).clone())
    logprob = sampler.take(1, 3)
    expected = LOGITS.log_softmax(-1)
    assert logprob is not None
    assert logprob.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in logprob.top] == [0, 1]


@pytest.mark.parametrize("top_p", [1e-30, 1e-46, 1e-300, 5e-324, 0.0])
def test_the_likeliest_token_is_kept_however_small_top_p_is(top_p: float) -> None:
    assert _draw(SamplingParams(max_tokens=1, temperature=1.0, top_p=top_p, seed=3), LOGITS, 20) == [0] * 20


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_end_their_request_only(wrong: float) -> None:
    sampler = Sampler()
    for request in (1, 2):
        sampler.add(request, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=1, logprobs=2), [0])
    scores = LOGITS.repeat(2, 1)
    scores[0, 2] = wrong
    sampler.apply([1, 2], scores)
    assert sampler.broken_end(1) == Output(1, None, finish="error", error=NOT_NUMBERS)
    assert sampler.broken_end(2) is None
    assert scores.isfinite().any(-1).all()


def test_a_row_of_impossible_tokens_is_broken_and_one_impossible_token_is_not() -> None:
    sampler = Sampler()
    for request in (1, 2):
        sampler.add(request, SamplingParams(max_tokens=1, temperature=1.0, seed=1, logprobs=2), [0])
    scores = LOGITS.repeat(2, 1)
    scores[0] = float("-inf")
    scores[1, 0] = float("-inf")
    sampler.apply([1, 2], scores)
    assert sampler.broken_end(1) is not None and sampler.broken_end(2) is None
    assert int(scores[1].argmax()) != 0


def test_no_temperature_makes_large_logits_overflow() -> None:
    params = SamplingParams(max_tokens=1, temperature=2e-5, top_p=0.5, seed=3)
    assert _draw(params, LOGITS * 1e38, 20) == [0] * 20


def _sorted_nucleus(probabilities_V: torch.Tensor, top_p: float) -> list[int]:
    """By its definition: the likeliest tokens one after another, until those before reach top_p."""
    values, order = probabilities_V.sort(descending=True, stable=True)
    outside = (values.cumsum(-1) - values >= top_p).nonzero()
    return sorted(order[: max(1, int(outside[0]) if len(outside) else len(order))].tolist())


@pytest.mark.parametrize("size", [5, 300, 5000, 20_000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 12.0])
def test_the_nucleus_without_sorting_is_that_of_sorting(size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(size)
    for top_p in (1e-46, 0.1, 0.5, 0.9, 0.95, 0.999, 0.9999999):
        logits = torch.randn(size, generator=generator) * spread
        for scores in (logits, logits.round()):  # rounded: many equal ones
            probabilities = scores.softmax(-1)
            assert sorted(nucleus(probabilities, top_p).tolist()) == _sorted_nucleus(probabilities, top_p)


def test_equal_scores_go_by_their_ids() -> None:
    scores = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert sorted(likeliest(scores, 2).tolist()) == [1, 2]
    assert sorted(likeliest(scores, 4).tolist()) == [0, 1, 2, 3]


def test_top_k_and_min_p_keep_what_they_say() -> None:
    probabilities = LOGITS.softmax(-1)
    drawn = _draw(SamplingParams(max_tokens=1, temperature=1.0, top_k=2, seed=3), LOGITS, 300)
    assert set(drawn) == {0, 1}
    least = float(probabilities[2] / probabilities[0]) - 1e-6
    drawn = _draw(SamplingParams(max_tokens=1, temperature=1.0, min_p=least, seed=3), LOGITS, 500)
    assert set(drawn) == {0, 1, 2}
    # top_p counts among those that top_k has left: two of three tokens of equal probability.
    even = torch.zeros(9)
    drawn = _draw(SamplingParams(max_tokens=1, temperature=1.0, top_k=3, top_p=0.6, seed=3), even, 200)
    assert set(drawn) == {0, 1}


def test_limits_that_exclude_nothing_change_nothing() -> None:
    plain = _draw(SamplingParams(max_tokens=1, temperature=1.0, seed=3), LOGITS, 100)
    for extra in ({"top_k": 5}, {"top_k": 4096}, {"top_p": 0.9999999}, {"min_p": 1e-9}, {"logit_bias": ((2, 0.0),)}):
        assert _draw(SamplingParams(max_tokens=1, temperature=1.0, seed=3, **extra), LOGITS, 100) == plain


def _scores(params: SamplingParams, prompt: list[int], answer: list[int], drawn: int = 0) -> torch.Tensor:
    sampler = Sampler()
    sampler.add(0, params, prompt, drawn)
    for token in answer:
        sampler.take(0, token)
    return sampler.apply([0], LOGITS[None].clone())[0]


def test_penalties_are_those_of_vllm_and_transformers() -> None:
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    params = SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS - 0.5 * torch.tensor([0.0, 1, 0, 0, 1]) - 0.25 * torch.tensor([0.0, 1, 0, 0, 2])
    assert torch.equal(_scores(params, [0, 2], [4, 1, 4]), expected)
    params = SamplingParams(max_tokens=9, repetition_penalty=1.5)
    theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
    expected = theirs(torch.tensor([[0, 2, 4, 1, 4]]), LOGITS[None].clone())[0]
    assert torch.equal(_scores(params, [0, 2], [4, 1, 4]), expected)


def test_penalties_go_on_elsewhere() -> None:
    params = SamplingParams(max_tokens=9, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
    assert torch.equal(_scores(params, [0, 2], [4, 1, 4]), _scores(params, [0, 2, 4, 1, 4], [], drawn=3))


def test_logit_bias_decides() -> None:
    assert int(_scores(SamplingParams(max_tokens=1, logit_bias=((4, 100.0),)), [0], []).argmax()) == 4
    assert int(_scores(SamplingParams(max_tokens=1, logit_bias=((0, -100.0),)), [0], []).argmax()) == 1


class _Only:
    """A grammar of one token after another."""

    error = ""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def start(self) -> "_Only":
        started = _Only(*self._tokens)
        started.error = self.error
        return started

    @property
    def may_end(self) -> bool:
        return not self._tokens

    def allowed(self) -> bytearray:
        return bytearray(200 * (token in self._tokens[:1]) for token in range(5))

    def accept(self, token: int) -> None:
        assert token == self._tokens.pop(0)


def test_a_grammar_leaves_what_it_allows_and_logprobs_are_of_the_model() -> None:
    sampler = Sampler()
    grammar = _Only(3, 1)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=9, temperature=temperature, seed=1, top_p=0.5, logprobs=2, grammar=grammar)
        sampler.add(0, params, [0])
        for token in (3, 1):
            assert int(sampler.apply([0], LOGITS[None].clone())[0].argmax()) == token
            logprob = sampler.take(0, token)
            assert logprob is not None and logprob.top[0][0] == 0
            assert logprob.logprob == pytest.approx(float(LOGITS.log_softmax(-1)[token]))
        sampler.apply([0], LOGITS[None].clone())
        assert sampler.broken_end(0) == Output(0, None, finish="refused", error=NO_TOKEN_LEFT)


@pytest.mark.parametrize("batched", [False, True])
def test_the_end_of_a_request_says_whose_fault_it_is(batched: bool) -> None:
    sampler = Sampler(batched=batched)
    stuck = _Only()
    stuck.error = "the row is full"
    for name, grammar in ((1, stuck), (2, None), (3, None)):
        sampler.add(name, SamplingParams(max_tokens=9, temperature=0, grammar=grammar), [0])
    sampler.apply([1, 2, 3], torch.stack([LOGITS, LOGITS * float("nan"), LOGITS]))
    ends = [sampler.broken_end(name) for name in (1, 2, 3)]
    assert ends[0] == Output(1, None, finish="refused", error="the row is full")
    assert ends[1] is not None and ends[1].finish == "error" and ends[2] is None


class _Torn(_Only):
    """A grammar that raises, or whose mask is not as wide as the vocabulary."""

    def __init__(self, fails: str) -> None:
        super().__init__()
        self._fails = fails

    def start(self) -> "_Torn":
        return self

    @property
    def error(self) -> str:  # type: ignore[override]
        raise RuntimeError("the grammar is torn")

    def allowed(self) -> bytearray:
        if self._fails == "allowed":
            raise RuntimeError("the grammar is torn")
        return bytearray(2 if self._fails == "width" else 5)


@pytest.mark.parametrize("fails", ["allowed", "error", "width"])
def test_a_grammar_that_raises_breaks_its_own_row(fails: str) -> None:
    sampler, grammar = Sampler(), _Torn(fails)
    sampler.add(1, SamplingParams(max_tokens=9, temperature=0), [0])
    sampler.add(2, SamplingParams(max_tokens=9, temperature=0, grammar=grammar), [0])
    for _ in range(2):
        chosen = sampler.apply([1, 2], LOGITS.repeat(2, 1)).argmax(-1)
        assert sampler.broken_end(1) is None and chosen[0] == LOGITS.argmax()
        end = sampler.broken_end(2)
        assert end is not None and end.finish == "error"
        assert end.error == "the grammar is torn" or fails == "width"
    sampler.apply([2], LOGITS[None] * float("nan"))
    assert sampler.broken_end(2) == Output(2, None, finish="error", error=NOT_NUMBERS)
