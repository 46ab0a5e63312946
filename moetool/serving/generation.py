"""What lies between an HTTP request and the engine: submitting, following, stopping, abandoning.

Everything here runs on the server's event loop; the engine's thread only puts messages into an inbox.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from moetool.errors import MoetoolError
from moetool.request import EngineLike, Finish, Output, SamplingParams, TokenLogprob, Unavailable
from moetool.serving.metrics import Metrics
from moetool.serving.text import StopStrings, Vocabulary


class ScoredToken(NamedTuple):
    """A token with its log-probability, and where its text begins in the text of its choice."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of a choice: text that is certain, the scored tokens that began in it, and perhaps the end."""

    text: str = ""
    tokens: Sequence[ScoredToken] = ()
    finish: Finish | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate; `offset` is where its text begins (after an echoed prompt)."""

    prompt: list[int]
    params: SamplingParams
    offset: int = 0


class Choice:
    """Turns the engine's messages about one choice into pieces.

    Attributes:
        num_tokens: generated, with those that a stop string cut off.
        finished: no more messages are wanted.
    """

    def __init__(self, job: Job, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self.num_tokens = 0
        self.finished = False
        self._detokenizer = vocabulary.detokenizer()
        self._stops = StopStrings(stops)
        self._wants_logprobs = job.params.logprobs is not None
        self._scored: list[ScoredToken] = []  # those whose text is held back
        self._num_read = job.offset
        self._num_given = job.offset

    def advance(self, output: Output) -> Piece:
        """Take one message.

        Raises:
            MoetoolError: the engine gave the request up.
        """
        if output.finish == "error":
            raise MoetoolError(f"the engine failed: {output.error or 'no reason given'}")
        if output.finish == "cancelled":
            raise Unavailable(output.error or "the server stopped before the answer was finished")
        read = ""
        if output.token is not None:
            self.num_tokens += 1
            # The token that ends a sequence is no part of its text, whether or not the tokenizer calls it special.
            if output.finish != "stop":
                if self._wants_logprobs:
                    self._scored.append(ScoredToken(output.token, self._num_read, output.logprob))
                read = self._detokenizer.push(output.token)
        if output.finish is not None:
            read += self._detokenizer.finish()
        self._num_read += len(read)
        text = self._stops.push(read)
        if output.finish is not None:
            text += self._stops.finish()
        self._num_given += len(text)
        finish: Finish | None = "stop" if self._stops.matched else output.finish
        self.finished = finish is not None
        return Piece(text, self._take_scored(), finish)

    def _take_scored(self) -> list[ScoredToken]:
        """The scored tokens whose text has begun to be given out; at a natural end all of them."""
        everything = self.finished and not self._stops.matched
        num = sum(everything or scored.offset < self._num_given for scored in self._scored)
        taken, self._scored = self._scored[:num], self._scored[num:]
        return taken


class Exchange:
    """The choices of one HTTP request while they run in the engine."""

    def __init__(self, frontend: "Frontend", jobs: Sequence[Job], stops: Sequence[str]) -> None:
        """Submit all jobs, or none.

        Raises:
            UsageError, CapacityError, Unavailable: as the engine refuses them.
        """
        self.choices = [Choice(job, frontend.vocabulary, stops) for job in jobs]
        self._frontend = frontend
        self._engine = frontend.engine
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[int, Output, float]] = asyncio.Queue()
        self._latest = [time.perf_counter()] * len(jobs)  # when a choice was submitted or had its latest token
        self._ids: list[int] = []
        try:
            for index, job in enumerate(jobs):
                self._ids.append(self._engine.submit(job.prompt, job.params, partial(self._post, index)))
        except BaseException:
            self.close()
            raise

    @property
    def num_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the choice, its next piece), as they come, until every choice is finished.

        Raises:
            MoetoolError: the engine gave one of them up.
        """
        while not all(choice.finished for choice in self.choices):
            index, output, at = await self._inbox.get()
            choice = self.choices[index]
            if choice.finished:  # its last messages, from before it was cancelled
                continue
            if output.token is not None:
                self._frontend.metrics.observe_token(at - self._latest[index], first=choice.num_tokens == 0)
                self._latest[index] = at
            piece = choice.advance(output)
            if choice.finished and output.finish is None:  # by a stop string, which the engine knows nothing of
                self._engine.cancel(self._ids[index])
            yield index, piece

    def abort(self, reason: str) -> None:
        """End every unfinished choice with an error that the client gets to see."""
        for index, choice in enumerate(self.choices):
            if not choice.finished:
                self._inbox.put_nowait((index, Output(self._ids[index], None, None, "cancelled", reason), 0.0))

    def close(self) -> None:
        """Cancel in the engine what is unfinished."""
        self._frontend.running.discard(self)
        # After a submission that failed there are fewer ids than choices.
        for choice, request in zip(self.choices, self._ids, strict=False):
            if not choice.finished:
                self._engine.cancel(request)

    def _post(self, index: int, output: Output) -> None:
        """The sink, on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, (index, output, time.perf_counter()))
        except RuntimeError:
            if not self._loop.is_closed():  # closed: the server was stopped at once, nobody is reading
                raise


@dataclass
class Frontend:
    """What all requests of one server share.

    Attributes:
        draining: no new exchanges; those running go on.
        running: exchanges whose answer is not complete.
        scoring: held while a prompt is scored. The engine scores one at a time, and those that wait for it must
            not take the threads that tokenise.
    """

    engine: EngineLike
    vocabulary: Vocabulary
    metrics: Metrics
    draining: bool = False
    running: set[Exchange] = field(default_factory=set)
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def status(self) -> str:
        """The engine's state, or `draining`."""
        return "draining" if self.draining else self.engine.state

    def require_ready(self) -> None:
        """Raises: Unavailable unless requests are taken."""
        match self.status:
            case "ready":
                return
            case "starting":
                raise Unavailable("the model is not loaded yet; try again soon")
            case "draining":
                raise Unavailable("the server is shutting down")
            case _:
                raise Unavailable("the engine has failed; the server's log says why", retry_after_s=30)

    def open(self, jobs: Sequence[Job], stops: Sequence[str]) -> Exchange:
        """Submit jobs to the engine; the caller closes the exchange."""
        self.require_ready()
        exchange = Exchange(self, jobs, stops)
        self.running.add(exchange)
        return exchange

    def abort(self, reason: str) -> None:
        """End all that is running with an error."""
        for exchange in self.running:
            exchange.abort(reason)
