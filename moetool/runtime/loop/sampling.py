"""Sample tokens: constraints, penalties, sampling and log-probabilities.

The argmax of changed scores is a sample by the Gumbel-max rule. The noise depends only on a request's seed and the
token's position: the text is the same alone and in any batch.

The order is vLLM's: grammar, logit bias, penalties, temperature, min_p, top_k, top_p.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moetool.base import plugins
from moetool.runtime.decoding import NOT_NUMBERS
from moetool.runtime.experts.copies import on_device
from moetool.runtime.loop.batched_sampling import RowSampling, batched_gumbel_scores
from moetool.runtime.request import Finish, Matcher, Output, SamplingParams, TokenLogprob

NO_TOKEN_LEFT = "no token is left to sample: grammar and logit_bias together exclude all of them"
"""Error of a request without an allowed token."""

_COLDEST = 1e-5
"""At and below this temperature the most likely token is almost certain, and division may overflow."""
_PREFIXES = (256, 4096)
"""Number of most likely tokens tried as the nucleus before all are sorted (`tests/bench/test_sampling_cost.py`)."""


class _Choice:
    """The sampling state of one request.

    Attributes:
        broken: why its next token cannot be sampled; empty if it can.
        refused: whether that is because no token is left.
        prompt_ids: distinct tokens of its prompt, for the repetition penalty.
        counts: how often each token occurs in its answer.
    """

    __slots__ = ("broken", "counts", "drawn", "logprobs_V", "matcher", "params", "prompt_ids", "refused", "seed")

    def __init__(self, params: SamplingParams, drawn: int, prompt: Sequence[int]) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.drawn = drawn
        self.broken, self.refused = "", False
        self.logprobs_V: Tensor | None = None
        asked, answer = prompt[: len(prompt) - drawn], prompt[len(prompt) - drawn :]
        self.prompt_ids = torch.tensor(sorted(set(asked)) if params.repetition_penalty != 1 else [], dtype=torch.long)
        self.counts: Counter[int] = Counter()
        self.matcher: Matcher | None = None if params.grammar is None else params.grammar.start()
        self.take(answer)

    @property
    def is_constrained(self) -> bool:
        """Whether tokens may be excluded or their scores changed."""
        return self.matcher is not None or bool(self.params.logit_bias) or self.params.penalizes

    def refuse(self) -> None:
        """Note that every token is excluded."""
        try:
            self.broken = (self.matcher.error if self.matcher is not None else "") or NO_TOKEN_LEFT
            self.refused = True
        except Exception as error:
            self.broken = plugins.describe(error)

    def take(self, tokens: Iterable[int]) -> None:
        """Count tokens of the answer."""
        for token in tokens:
            if self.params.penalizes:
                self.counts[token] += 1
            if self.matcher is not None:
                self.matcher.accept(token)


class Sampler:
    """Sampling parameters by request, applied to the rows of a batch.

    Args:
        eos: tokens that end an answer; a grammar allows them only where the answer is complete.
        batched: whether all rows are sampled together on the scores' device (`moetool.runtime.loop.batched_sampling`)
            (default: on any device but the CPU).
    """

    def __init__(self, eos: Collection[int] = (), *, batched: bool | None = None) -> None:
        self._eos = list(eos)
        self._batched = batched
        self._choices: dict[int, _Choice] = {}
        self._verdicts: list[_Verdicts] = []

    def add(self, request: int, params: SamplingParams, prompt: Sequence[int], drawn: int = 0) -> None:
        """Add a request.

        Args:
            drawn: number of its answer's tokens that were generated elsewhere and are now the end of its prompt; later
                tokens are sampled as if these had been sampled here.
        """
        self._choices[request] = _Choice(params, drawn, prompt)

    def remove(self, request: int) -> None:
        self._choices.pop(request, None)

    def take(self, request: int, token: int) -> TokenLogprob | None:
        """Record a sampled token; returns its log-probabilities if the request asked for them.

        Call it for every token, before the request's next one.
        """
        choice = self._choices[request]
        choice.take((token,))
        if choice.logprobs_V is None:
            return None
        top: list[tuple[int, float]] = []
        if count := choice.params.logprobs:
            values, ids = choice.logprobs_V.topk(count)
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(float(choice.logprobs_V[token]), top)

    def broken_end(self, request: int) -> Output | None:
        """Return the last message of a request whose newest token is invalid; None if it is valid."""
        arrived, self._verdicts = self._verdicts, []
        for verdicts in arrived:
            verdicts.tell()
        choice = self._choices[request]
        finish: Finish = "refused" if choice.refused else "error"
        return Output(request, None, finish=finish, error=choice.broken) if choice.broken else None

    def apply(self, requests: Sequence[int], scores_BV: Tensor) -> Tensor:
        """Make the argmax of each row the sampled token of its request.

        Args:
            requests: the request of each row; further rows are unchanged.
            scores_BV: logits, float32.
        """
        if self._batched or (self._batched is None and scores_BV.device.type != "cpu"):
            return self._apply_together(requests, scores_BV)
        sound_B = scores_BV.amax(-1).isfinite().tolist()  # the maximum of a row with a NaN is NaN
        for row, request in enumerate(requests):
            choice = self._choices.get(request)
            if choice is None:
                continue  # cancelled while its forward ran
            scores_V = scores_BV[row]
            if not sound_B[row]:
                choice.broken = NOT_NUMBERS
                scores_V.zero_()
            if choice.params.logprobs is not None:
                choice.logprobs_V = scores_V.log_softmax(-1)
            _constrain_alone(scores_V, choice, self._eos)
            if choice.is_constrained and not choice.broken and not scores_V.max().isfinite():
                choice.refuse()
                scores_V.zero_()
            if choice.params.temperature > _COLDEST:
                scores_BV[row] = gumbel_scores(scores_V, choice.params, choice.seed, choice.drawn)
            choice.drawn += 1
        return scores_BV

    def _apply_together(self, requests: Sequence[int], scores_BV: Tensor) -> Tensor:
        """Like `apply`, without synchronizing; `broken` reads the result later."""
        choices = [(row, choice) for row, request in enumerate(requests) if (choice := self._choices.get(request))]
        if not choices:
            return scores_BV
        unsound_B = ~scores_BV.amax(-1).isfinite()
        scores_BV.masked_fill_(unsound_B[:, None], 0.0)
        for row, choice in choices:
            if choice.params.logprobs is not None:
                choice.logprobs_V = scores_BV[row].log_softmax(-1)
            _constrain_alone(scores_BV[row], choice, self._eos)
        empty_B = ~scores_BV.amax(-1).isfinite()
        scores_BV.masked_fill_(empty_B[:, None], 0.0)
        drawn = [(row, choice) for row, choice in choices if choice.params.temperature > _COLDEST]
        if drawn:
            device, keyed = scores_BV.device, [(c.params, _mix(c.seed, c.drawn)) for _, c in drawn]
            draws = RowSampling.of(keyed, scores_BV.shape[1], device)
            rows = on_device(torch.tensor([row for row, _ in drawn]), device)
            scores_BV.index_copy_(0, rows, batched_gumbel_scores(scores_BV.index_select(0, rows), draws))
        for _, choice in choices:
            choice.drawn += 1
        self._verdicts.append(_Verdicts(choices, torch.stack([unsound_B, empty_B])))
        return scores_BV


class _Verdicts:
    """Rows of a batch that cannot be sampled, in transfer from the device.

    Args:
        choices: rows and their requests.
        broken_2B: whether their scores are not finite, and whether no token is left.
    """

    def __init__(self, choices: list[tuple[int, _Choice]], broken_2B: Tensor) -> None:
        self._choices = choices
        self._arrived: Any = None
        self._broken_2B = broken_2B
        if broken_2B.device.type == "cuda":
            self._broken_2B = torch.empty(broken_2B.shape, dtype=torch.bool, pin_memory=True)
            self._broken_2B.copy_(broken_2B, non_blocking=True)
            self._arrived = torch.cuda.current_stream(broken_2B.device).record_event()

    def tell(self) -> None:
        """Wait for the transfer, and record the rows."""
        if self._arrived is not None:
            self._arrived.synchronize()
        unsound, empty = self._broken_2B.tolist()
        for row, choice in self._choices:
            if unsound[row]:
                choice.broken = NOT_NUMBERS
            elif empty[row] and not choice.broken:
                choice.refuse()


def _constrain_alone(scores_V: Tensor, choice: _Choice, eos: list[int]) -> None:
    """Constrain a row (`_constrain`); an error breaks its request alone, unless its scores are no numbers."""
    try:
        _constrain(scores_V, choice, eos)
    except Exception as error:
        choice.broken = choice.broken or plugins.describe(error)


def _constrain(scores_V: Tensor, choice: _Choice, eos: list[int]) -> None:
    """Apply the grammar, the logit bias and the penalties, in place."""
    params, device = choice.params, scores_V.device
    if choice.matcher is not None:
        allowed = torch.frombuffer(choice.matcher.allowed(), dtype=torch.uint8)
        allowed[eos] = int(choice.matcher.may_end)
        allowed = on_device(allowed, device)
        scores_V.masked_fill_(allowed[: len(scores_V)] == 0, float("-inf"))
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        scores_V[on_device(torch.tensor(ids), device)] += on_device(torch.tensor(biases), device)
    if params.penalizes:
        answer = torch.tensor(list(choice.counts), dtype=torch.long)
        if params.repetition_penalty != 1.0:
            seen = on_device(torch.cat([choice.prompt_ids, answer]).unique(), device)
            scores, factor = scores_V[seen], params.repetition_penalty
            scores_V[seen] = torch.where(scores > 0, scores / factor, scores * factor)
        if len(answer):
            counts = on_device(torch.tensor(list(choice.counts.values()), dtype=scores_V.dtype), device)
            scores_V[on_device(answer, device)] -= params.frequency_penalty * counts + params.presence_penalty


def gumbel_scores(logits_V: Tensor, params: SamplingParams, seed: int, place: int) -> Tensor:
    """Scores whose argmax is a sample of softmax(logits / temperature) over the allowed tokens.

    For scores on a CPU; `moetool.runtime.loop.batched_sampling` has the same rule for a GPU, with other noise.
    """
    scaled = (logits_V - logits_V.max()) / params.temperature  # at most 0, so that division cannot overflow
    generator = torch.Generator().manual_seed(_mix(seed, place))
    uniform = torch.rand(scaled.shape, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    kept = _kept(scaled, params)
    if kept is None:
        return scaled + _gumbel(uniform).to(scaled)
    scores = torch.full_like(scaled, float("-inf"))
    scores[kept] = scaled[kept] + _gumbel(uniform[kept]).to(scaled)
    return scores


def _gumbel(uniform: Tensor) -> Tensor:
    return -(-uniform.log()).log()


def _kept(scaled_V: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids of the tokens that min_p, top_k and top_p allow, always the most likely one; None if all are allowed.

    Each is applied to the result of the previous one, and top_p to the renormalized probabilities.
    """
    limited = 0 < params.top_k < len(scaled_V)
    if not limited and params.min_p <= 0.0 and params.top_p >= 1.0:
        return None
    if params.min_p > 0.0:
        probabilities = scaled_V.softmax(-1)
        scaled_V = scaled_V.masked_fill(probabilities < params.min_p * probabilities.max(), float("-inf"))
    if limited:
        top = likeliest(scaled_V, params.top_k)
        scaled_V = torch.full_like(scaled_V, float("-inf")).scatter(-1, top, scaled_V[top])
    if params.top_p < 1.0:
        return nucleus(scaled_V.softmax(-1), params.top_p)
    return scaled_V.isfinite().nonzero()[:, 0]


def nucleus(probabilities_V: Tensor, top_p: float) -> Tensor:
    """Ids of the fewest most likely tokens that reach `top_p`, unordered; lower ids first among equals.

    The most likely token always belongs to it, also if `top_p` is below float32's smallest number. Sorting all gives
    exactly the same tokens: a running sum over the first sorted values is a prefix of the whole sum.
    """
    for size in (*_PREFIXES, len(probabilities_V)):
        size = min(size, len(probabilities_V))
        if size == len(probabilities_V):
            values = probabilities_V.sort(descending=True).values
        else:
            values = probabilities_V.topk(size).values
        outside = (values.cumsum(-1) - values >= top_p).nonzero()
        if len(outside) or size == len(probabilities_V):
            break
    inside = int(outside[0]) if len(outside) else len(values)
    return _at_least(probabilities_V, values[: max(1, inside)])


def likeliest(scores_V: Tensor, count: int) -> Tensor:
    """Ids of the `count` highest scores, unordered; lower ids first among equals."""
    return _at_least(scores_V, scores_V.topk(count).values)


def _at_least(scores_V: Tensor, values_N: Tensor) -> Tensor:
    """Ids of the N highest scores from their values: all above the smallest, and the first that equal it."""
    least = values_N[-1]
    above = (scores_V > least).nonzero()[:, 0]
    return torch.cat([above, (scores_V == least).nonzero()[: len(values_N) - len(above), 0]])


def _mix(seed: int, place: int) -> int:
    """Mix two numbers into 63 bits, so that neighbouring seeds and positions share no noise (splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
