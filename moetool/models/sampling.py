"""Choosing tokens inside transformers' continuous batching: temperature, top_p, seeds and log-probabilities.

The manager samples with one seed for everybody. So it is told to take the argmax, and this processor makes the
argmax a sample by the Gumbel-max rule, with noise that depends on a request's seed and the token's place in its
answer alone: the same text alone or in any batch.
"""

import secrets
from typing import Any

import torch
from torch import Tensor

from moetool.request import SamplingParams, TokenLogprob

NOT_NUMBERS = "the model's scores are not numbers (NaN): a broken checkpoint, or a data type too narrow for it"
"""Why a request ends whose next token cannot be chosen."""

_COLDEST = 1e-5
"""At and below this temperature the likeliest token is all but certain, and dividing by it may overflow."""


class _Choice:
    """The sampling state of one request."""

    __slots__ = ("broken", "drawn", "logprobs_V", "params", "seed")

    def __init__(self, params: SamplingParams, drawn: int) -> None:
        self.params = params
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.drawn = drawn
        self.broken = False
        self.logprobs_V: Tensor | None = None


class Sampler:
    """Sampling parameters by request, and the logits processor that applies them."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._choices: dict[str, _Choice] = {}

    def add(self, request: str, params: SamplingParams, drawn: int = 0) -> None:
        """Take in a request.

        Args:
            drawn: tokens of its answer that were made elsewhere and are now the end of its prompt; those to come are
                chosen as if they had been made here.
        """
        self._choices[request] = _Choice(params, drawn)

    def remove(self, request: str) -> None:
        """Forget a request."""
        self._choices.pop(request, None)

    def logprob(self, request: str, token: int) -> TokenLogprob | None:
        """The log-probabilities of the token that was last drawn, where the request asked for them."""
        choice = self._choices[request]
        if choice.logprobs_V is None:
            return None
        top: list[tuple[int, float]] = []
        if count := choice.params.logprobs:
            values, ids = choice.logprobs_V.topk(count)
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(float(choice.logprobs_V[token]), top)

    def is_broken(self, request: str) -> bool:
        """Whether the model's scores for it were not numbers, so that its newest token means nothing."""
        return self._choices[request].broken

    def apply(self, requests: list[str], scores_BV: Tensor) -> Tensor:
        """Make the argmax of each row the token that its request's parameters choose.

        Args:
            requests: the request of each row; rows beyond them are left alone.
            scores_BV: logits, float32.
        """
        for row, request in enumerate(requests):
            choice = self._choices.get(request)
            if choice is None:
                continue  # cancelled while its forward ran
            if scores_BV[row].isnan().any():
                choice.broken = True
                scores_BV[row] = 0.0
            if choice.params.logprobs is not None:
                choice.logprobs_V = scores_BV[row].log_softmax(-1)
            if choice.params.temperature > _COLDEST:
                scores_BV[row] = _gumbel_scores(scores_BV[row], choice.params, choice.seed, choice.drawn)
            choice.drawn += 1
        return scores_BV

    def processor(self) -> Any:
        """A logits processor of transformers' continuous batching that calls `apply`."""
        from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

        sampler = self

        class Processor(ContinuousBatchingLogitsProcessor):
            def __init__(self) -> None:
                self.supported_kwargs: dict[str, type] = {}
                self.ignored_kwargs = ()
                self.requests: list[str] = []

            def fill_defaults(self, int32_tensor: Tensor) -> None:
                int32_tensor.zero_()

            def prepare_tensor_args(self, requests_with_new_token: Any) -> Tensor:
                # The parameters stay with us; this call only tells whose logits the rows will be.
                self.requests = [future.state.request_id for future in requests_with_new_token]
                return torch.zeros(len(self.requests), dtype=torch.int32)

            def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
                return sampler.apply(self.requests, scores)

        return Processor()


def _gumbel_scores(logits_V: Tensor, params: SamplingParams, seed: int, place: int) -> Tensor:
    """Scores whose argmax is a sample of softmax(logits / temperature) cut to its top_p nucleus.

    Made on the CPU whatever the model's device: a GPU adds up a running sum in no fixed order, and has random numbers
    of its own.
    """
    scaled = logits_V.cpu() / params.temperature
    if params.top_p < 1.0:
        values, order = scaled.softmax(-1).sort(descending=True)
        # The nucleus is the shortest run of likeliest tokens that reaches top_p; the first always belongs to it.
        outside = values.cumsum(-1) - values >= params.top_p
        scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), float("-inf"))
    generator = torch.Generator().manual_seed(_mix(seed, place))
    uniform = torch.rand(scaled.shape, generator=generator, dtype=torch.float64).clamp_(min=1e-300)
    return scaled + (-(-uniform.log()).log()).to(scaled)


def _mix(seed: int, place: int) -> int:
    """One 63-bit number from two, so that neighbouring seeds and places share no noise (splitmix64)."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + place * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
