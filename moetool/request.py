"""What the engine and its callers say to each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from moetool.errors import MoetoolError

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: at most so many new tokens.
        temperature: 0 takes the likeliest token.
        top_p: sample among the likeliest tokens that together have this probability (0 < top_p <= 1).
        seed: with a seed the same request gives the same tokens, alone or in any batch.
        logprobs: for each token, how many of the likeliest alternatives to report (None: no log-probabilities).
        ignore_eos: go on after the end-of-sequence token.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of the model before temperature and top_p: of the chosen token, of the likeliest."""

    logprob: float
    top: Sequence[tuple[int, float]]


class Output(NamedTuple):
    """One message of the engine about a request: a token, or the end, or both.

    `token` is None only in a message that ends a request without a token (cancelled, error, or max_tokens 0).
    The end-of-sequence token is reported as a token with finish `stop`.
    """

    request: int
    token: int | None
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    error: str | None = None


Sink = Callable[[Output], None]
"""Called on the engine's thread; must not block."""


class Unavailable(MoetoolError):
    """The engine takes no request now: it is starting, draining or has failed."""
