"""Requests and outputs of the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from moetool.base.errors import MoetoolError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Finish = Literal["stop", "length", "cancelled", "refused", "error"]
"""How a request ends. `refused`: its grammar allows no further token; `error`: the engine or the grammar failed."""


class Matcher(Protocol):
    """Progress of one answer through its grammar."""

    @property
    def error(self) -> str:
        """Why the grammar allows no token at all; empty if unknown."""
        ...

    @property
    def may_end(self) -> bool:
        """Whether the answer is complete."""
        ...

    def allowed(self) -> bytearray:
        """Return a byte for every token of the vocabulary: 0 where it cannot come next."""
        ...

    def accept(self, token: int) -> None:
        """Advance by a token of the answer."""
        ...


class Grammar(Protocol):
    """Grammar of an answer."""

    def start(self) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_tokens: maximum number of new tokens.
        temperature: temperature of sampling; 0 is greedy.
        top_p: sample among the likeliest tokens that together have this probability (0 to 1; 0: the likeliest token).
        seed: with a seed the same request gives the same tokens, alone or in any batch.
        logprobs: number of top alternatives per token to report (None: no log-probabilities).
        ignore_eos: continue after the end-of-sequence token.
        top_k: sample among this many of the likeliest tokens (0: all).
        min_p: exclude tokens below this share of the top probability.
        presence_penalty: subtracted from logits of tokens in the answer.
        frequency_penalty: the same, once per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and answer.
        logit_bias: (token, value added to its logit), each token once.
        grammar: grammar of the answer; other tokens get no probability.
        return_routes: whether outputs hold the experts of each token.
        drawn: number of the prompt's last tokens that are the beginning of the answer, from an earlier request; the
            rest is sampled as if it continued there.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Sequence[tuple[int, float]] = ()
    grammar: Grammar | None = None
    return_routes: bool = False
    drawn: int = 0

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the next one's logits."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of the model, before sampling: of the chosen token and the likeliest."""

    logprob: float
    top: Sequence[tuple[int, float]]


class Output(NamedTuple):
    """One message of the engine about a request: a token, the end, or both.

    `token` is None only in a message that ends a request without a token (cancelled, refused, error, or max_tokens 0).
    The end-of-sequence token is reported as a token with finish `stop`. `reused` comes with the first token: the prompt
    tokens that were in the KV cache. With `return_routes`, `experts_THK` (uint8, or uint16 beyond 256 experts; all
    layers, zeros in dense ones) belong to the tokens forwarded since the last output: the prompt's with the first
    token, then one row per token.
    """

    request: int
    token: int | None
    logprob: TokenLogprob | None = None
    finish: Finish | None = None
    error: str | None = None
    experts_THK: Any = None
    reused: int = 0


Sink = Callable[[Output], None]
"""Called on the engine's thread; must not block."""


State = Literal["starting", "ready", "draining", "failed"]


class Unavailable(MoetoolError):
    """The engine accepts no requests now (starting, draining, rebuilding); a retry may succeed."""

    def __init__(self, message: str, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLike(Protocol):
    """The engine's interface for the HTTP server.

    Attributes:
        model_name: the model name for clients.
        max_context: maximum tokens of a prompt and its answer together.
        vocab_size: bound of token ids.
        max_requests: maximum concurrent requests; the engine queues more in the order of arrival.
        max_unbegun: maximum submitted requests that have not begun; others wait outside, where clients take turns.
            Larger for engines that use knowledge of coming requests.
        state: requests are accepted only in `ready`.
        problems: faults, also while requests are accepted; public, so without paths.
    """

    @property
    def model_name(self) -> str: ...
    @property
    def max_context(self) -> int: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def max_unbegun(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase": ...
    @property
    def state(self) -> State: ...
    @property
    def problems(self) -> Sequence[str]: ...

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that can never be served. Thread-safe, never waits.

        Raises:
            UsageError: the request is invalid.
            CapacityError: the request does not fit.
        """
        ...

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request and return its id; never waits for the model.

        Effects: `sink` is called from another thread, possibly before this returns, until a message with `finish`.
        Thread-safe.

        Raises:
            UsageError, CapacityError: as `check`.
            Unavailable: the engine accepts no requests now.
        """
        ...

    def cancel(self, request: int) -> None:
        """Stop a running or queued request; without effect after its end. Thread-safe, never waits."""
        ...

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probability of each prompt token given the earlier ones (None for the first). Blocks for a forward."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return current counters and gauges by name. Thread-safe."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Return statistics as JSON: by layer, and memory by use. Thread-safe."""
        ...
