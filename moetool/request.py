"""Requests and outputs of the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from moetool.errors import MoetoolError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Finish = Literal["stop", "length", "cancelled", "error"]


class Matcher(Protocol):
    """Progress of one answer through its grammar."""

    @property
    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""
        ...

    def allowed(self) -> bytearray:
        """A byte for every token of the vocabulary: 0 where it cannot come next."""
        ...

    def accept(self, token: int) -> None:
        """Go on by a token of the answer."""
        ...


class Grammar(Protocol):
    """Grammar of an answer."""

    def start(self) -> Matcher:
        """A matcher at the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_tokens: at most so many new tokens.
        temperature: 0 takes the likeliest token.
        top_p: sample among the likeliest tokens that together have this probability (0 < top_p <= 1).
        seed: with a seed the same request gives the same tokens, alone or in any batch.
        logprobs: for each token, how many of the likeliest alternatives to report (None: no log-probabilities).
        ignore_eos: go on after the end-of-sequence token.
        top_k: sample among so many of the likeliest tokens (0: all).
        min_p: leave out tokens less likely than this share of the likeliest one's probability.
        presence_penalty: lowers the logits of tokens that the answer has.
        frequency_penalty: the same, once for each time that the answer has them.
        repetition_penalty: divides the logits of tokens of prompt and answer where they are positive, else multiplies.
        logit_bias: (token, what is added to its logit), each token once.
        grammar: tokens that it does not allow have no probability.
        return_routes: outputs carry the experts that each token used.
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

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far matter to the next one."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


class TokenLogprob(NamedTuple):
    """Natural log-probabilities of the model itself, whatever the sampling: of the chosen token, of the likeliest."""

    logprob: float
    top: Sequence[tuple[int, float]]


class Output(NamedTuple):
    """One message of the engine about a request: a token, or the end, or both.

    `token` is None only in a message that ends a request without a token (cancelled, error, or max_tokens 0).
    The end-of-sequence token is reported as a token with finish `stop`. `reused` comes with the first token: so many
    tokens of the prompt were in the KV cache.
    With `return_routes`, `experts_THK` (uint8, or uint16 beyond 256 experts; all layers, zeros in dense ones) are those
    of the tokens forwarded since the last output: the prompt's with the first token, then one row a token.
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
    """The engine takes no requests just now (starting, draining, rebuilding); the same request may work later."""

    def __init__(self, message: str, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineLike(Protocol):
    """Engine interface of the HTTP server.

    Attributes:
        model_name: the name that clients ask for.
        max_context: at most so many tokens in a prompt and its answer together.
        vocab_size: token ids are below this.
        tokenizer: the model's own.
        max_requests: so many requests run together; the engine queues more in the order in which they come.
        max_unbegun: so many requests it is handed before it has begun them; others wait outside, where users take
            turns. More where it makes something of knowing what comes.
        state: requests are taken only in `ready`.
        problems: faults, whether or not requests are taken; public, so without paths.
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
        """Refuse what can never be served. Thread-safe, never waits.

        Raises:
            UsageError: the request makes no sense.
            CapacityError: it does not fit.
        """
        ...

    def submit(self, prompt: list[int], params: SamplingParams, sink: Sink) -> int:
        """Queue a request and return its id; never waits for the model.

        Effects: from now on `sink` is called from another thread, perhaps before this returns, until a message
        with `finish`. Thread-safe.

        Raises:
            UsageError, CapacityError: as `check`.
            Unavailable: not now.
        """
        ...

    def cancel(self, request: int) -> None:
        """Stop a request, running or queued; nothing happens if it has ended. Thread-safe, never waits."""
        ...

    def prompt_logprobs(self, prompt: list[int], top: int) -> list[TokenLogprob | None]:
        """Log-probability of each prompt token given those before it (None for the first). Blocks for a forward."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by name, as of now. Thread-safe."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """The same for people, as JSON: by layer, and memory by what holds it. Thread-safe."""
        ...
