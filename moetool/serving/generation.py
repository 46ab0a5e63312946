"""Generation between HTTP requests and the engine: submit, follow, stop, abandon.

Everything here runs on the server's event loop; the engine's thread only puts messages into an inbox.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from moetool.errors import MoetoolError
from moetool.request import EngineLike, Finish, Output, SamplingParams, TokenLogprob, Unavailable
from moetool.serving.access import AccessRecord
from moetool.serving.detokenize import StopStrings, Vocabulary
from moetool.serving.fair_queue import FairQueue
from moetool.serving.http_errors import Overloaded, Refusal
from moetool.serving.metrics import Metrics
from moetool.serving.server_options import ServerOptions


class ScoredToken(NamedTuple):
    """A token with its log-probability, and where its text begins in the text of its choice."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next part of a choice: text that is certain, the scored tokens that began in it, and perhaps the end."""

    text: str = ""
    tokens: Sequence[ScoredToken] = ()
    finish: Finish | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate.

    Attributes:
        offset: where its text begins (after an echoed prompt).
        shown: special tokens that its text has to have.
    """

    prompt: list[int]
    params: SamplingParams
    offset: int = 0
    shown: frozenset[int] = frozenset()


class Choice:
    """Turns the engine's messages about one choice into pieces.

    Attributes:
        tokens: generated, with those that a stop string cut off.
        experts: of the tokens that were forwarded, where the job asks for them: arrays [T, H, K], one after the other.
        reused: tokens of its prompt that were in the KV cache.
        finished: no more messages are wanted.
    """

    def __init__(self, job: Job, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.experts: list[np.ndarray] = []
        self.reused = 0
        self.finished = False
        self._detokenizer = vocabulary.detokenizer(vocabulary.special - job.shown)
        self._stops = StopStrings(stops)
        self._wants_logprobs = job.params.logprobs is not None
        self._scored: list[ScoredToken] = []  # those whose text is held back
        self._num_read = job.offset
        self._num_given = job.offset

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return len(self.tokens)

    def advance(self, output: Output) -> TextPiece:
        """Take one message. Raises: MoetoolError: the engine gave the request up."""
        if output.finish == "error":
            raise MoetoolError(f"the engine failed: {output.error or 'no reason given'}")
        if output.finish == "cancelled":
            raise Unavailable(output.error or "the server stopped before the answer was finished")
        read = ""
        if output.token is not None:
            self.tokens.append(output.token)
            if output.experts_THK is not None:
                self.experts.append(output.experts_THK)
            self.reused += output.reused
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
        return TextPiece(text, self._take_scored(), finish)

    def _take_scored(self) -> list[ScoredToken]:
        """The scored tokens whose text has begun to be given out; at a natural end all of them."""
        everything = self.finished and not self._stops.matched
        num = sum(everything or scored.offset < self._num_given for scored in self._scored)
        taken, self._scored = self._scored[:num], self._scored[num:]
        return taken


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of an answer: `at` on the event loop's clock, `seconds` after the request arrived."""

    seconds: float
    at: float

    @property
    def missed(self) -> str:
        """Error message of a missed deadline."""
        return f"the answer was not finished within {self.seconds:g} s, its limit"


class Exchange:
    """The choices of one HTTP request while they wait and run.

    Args:
        record: of the request; gets the numbers of tokens.
        deadline: an exchange that is not over by then is aborted.
    """

    def __init__(
        self, frontend: "Frontend", jobs: Sequence[Job], stops: Sequence[str], record: AccessRecord, deadline: Deadline
    ) -> None:
        self.jobs = list(jobs)
        self.choices = [Choice(job, frontend.vocabulary, stops) for job in jobs]
        self.record = record
        self._frontend = frontend
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[int, Output, float]] = asyncio.Queue()
        self._began = time.perf_counter()
        self._latest = [self._began] * len(jobs)  # when a choice was asked for or had its latest token
        self._ids: dict[int, int] = {}
        self._begun: set[int] = set()
        self._timer = self._loop.call_at(deadline.at, self.abort, deadline.missed)

    @property
    def num_tokens(self) -> int:
        """Tokens generated, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_reused(self) -> int:
        """Prompt tokens that were in the KV cache; of several choices of one prompt the least counts."""
        least: dict[int, int] = {}
        for job, choice in zip(self.jobs, self.choices, strict=True):
            least[id(job.prompt)] = min(choice.reused, least.get(id(job.prompt), choice.reused))
        return sum(least.values())

    def submit(self, index: int) -> bool:
        """Hand a choice to the engine; gives whether it was taken. One that is not ends with an error."""
        job = self.jobs[index]
        try:
            self._ids[index] = self._frontend.engine.submit(job.prompt, job.params, partial(self._post, index))
        except MoetoolError as error:
            self._inbox.put_nowait((index, Output(-1, None, None, "cancelled", str(error)), 0.0))
            return False
        return True

    async def pieces(self) -> AsyncIterator[tuple[int, TextPiece]]:
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
                first = choice.num_tokens == 0
                self._frontend.metrics.observe_token(at - self._latest[index], first=first)
                if first and self.record.first_token_s is None:
                    self.record.first_token_s = round(at - self._began, 6)
                self._latest[index] = at
            piece = choice.advance(output)
            if choice.finished and output.finish is None:  # by a stop string, which the engine knows nothing of
                self._frontend.engine.cancel(self._ids[index])
            yield index, piece

    def abort(self, reason: str) -> None:
        """End every unfinished choice with an error that the client gets to see."""
        for index, choice in enumerate(self.choices):
            if not choice.finished:
                self._inbox.put_nowait((index, Output(-1, None, None, "cancelled", reason), 0.0))

    def close(self) -> None:
        """Take back what waits, and cancel in the engine what is unfinished."""
        self._timer.cancel()
        self.record.generated_tokens = self.num_tokens
        self.record.reused_tokens = self.num_reused
        self._frontend.forget(self)
        for index, request in self._ids.items():
            if not self.choices[index].finished:
                self._frontend.engine.cancel(request)

    def _post(self, index: int, output: Output) -> None:
        """The sink, on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, index, output, time.perf_counter())
        except RuntimeError:
            if not self._loop.is_closed():  # closed: the server was stopped at once, nobody is reading
                raise

    def _arrived(self, index: int, output: Output, at: float) -> None:
        self._inbox.put_nowait((index, output, at))
        if index not in self._begun:
            self._begun.add(index)
            self._frontend.begun()
        if output.finish is not None:
            self._frontend.release(at - self._began)


@dataclass
class Frontend:
    """Shared state of a server's requests, and their queue.

    The engine gets no more choices than it can run, and as many again so that it never waits for more. Those that it
    has not begun are fewer than that where it can run many: it may run fewer for want of memory; who is next is decided
    here (`FairQueue`), clients told apart by their address.

    Attributes:
        draining: no new exchanges; those running go on.
        running: exchanges whose answer is not complete.
        in_engine: choices that the engine has.
        scoring: held while a prompt is scored. The engine scores one at a time, and those that wait for it must
            not take the threads that tokenise.
    """

    engine: EngineLike
    vocabulary: Vocabulary
    metrics: Metrics
    options: ServerOptions = field(default_factory=ServerOptions)
    draining: bool = False
    running: set[Exchange] = field(default_factory=set)
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)
    _queue: FairQueue[tuple[Exchange, int]] = field(default_factory=FairQueue)
    in_engine: int = 0
    _not_begun: int = 0  # of those in the engine
    _num_scoring: int = 0
    _seconds: float = 1.0  # that a choice took lately

    @property
    def status(self) -> str:
        """The engine's state, or `draining`, or `stuck`."""
        if self.draining:
            return "draining"
        if self.engine.state == "ready" and self._forward_seconds() > self.options.stuck_after_s:
            return "stuck"
        return self.engine.state

    @property
    def num_waiting(self) -> int:
        """Choices and prompts to score that wait for a place in the engine."""
        return len(self._queue) + self._num_scoring

    def require_ready(self) -> None:
        """Raises: Unavailable unless requests are taken."""
        match self.status:
            case "ready":
                return
            case "starting":
                raise Unavailable("the model is not loaded yet; try again soon")
            case "draining":
                raise Unavailable("the server is shutting down")
            case "stuck":
                seconds = self._forward_seconds()
                raise Unavailable(f"a forward has been running for {seconds:.0f} s; try again later", retry_after_s=30)
            case _:
                reasons = "; ".join(self.engine.problems) or "the server's log says why"
                raise Unavailable(f"the engine failed: {reasons}", retry_after_s=30)

    def open(self, jobs: Sequence[Job], stops: Sequence[str], record: AccessRecord, deadline: Deadline) -> Exchange:
        """Queue jobs for the engine, all or none; the caller closes the exchange.

        Raises:
            UsageError, CapacityError: the engine could never serve one of them, or so many of them.
            Overloaded: too many wait already.
            Unavailable: not now.
        """
        self.require_ready()
        for job in jobs:
            self.engine.check(job.prompt, job.params)
        self._require_room(len(jobs))
        exchange = Exchange(self, jobs, stops, record, deadline)
        self.running.add(exchange)
        for index in range(len(jobs)):
            self._queue.push(record.client, exchange, (exchange, index))
        self._pump()
        return exchange

    async def score(self, prompt: list[int], top: int, deadline: Deadline) -> list[TokenLogprob | None]:
        """`EngineLike.prompt_logprobs`, when it is this prompt's turn.

        Raises: as `open`; Unavailable where the deadline comes first.
        """
        self.require_ready()
        self._require_room(1)
        self._num_scoring += 1
        work: asyncio.Future[list[TokenLogprob | None]] | None = None
        try:
            async with asyncio.timeout_at(deadline.at):
                await self.scoring.acquire()
                work = asyncio.ensure_future(asyncio.to_thread(self.engine.prompt_logprobs, prompt, top))
                # A thread cannot be stopped: where nobody waits for it any more, the next prompt does.
                work.add_done_callback(self._scored)
                return await asyncio.shield(work)
        except TimeoutError:
            raise Unavailable(deadline.missed) from None
        finally:
            if work is None:
                self._num_scoring -= 1

    def begun(self) -> None:
        """The engine has given its first word on a choice."""
        self._not_begun -= 1
        self._pump()

    def release(self, seconds: float) -> None:
        """A choice has left the engine, this long after it was asked for."""
        self.in_engine -= 1
        self._seconds += 0.1 * (seconds - self._seconds)
        self._pump()

    def forget(self, exchange: Exchange) -> None:
        """An exchange is over; what of it still waits is not submitted any more."""
        self.running.discard(exchange)
        self._queue.remove(exchange.record.client, exchange)

    def abort(self, reason: str) -> None:
        """End all that is running with an error."""
        for exchange in self.running:
            exchange.abort(reason)

    def _pump(self) -> None:
        most = self.engine.max_requests
        while len(self._queue) and self.in_engine < 2 * most and self._not_begun < self.engine.max_unbegun:
            exchange, index = self._queue.pop()
            if exchange.submit(index):
                self.in_engine += 1
                self._not_begun += 1

    def _scored(self, work: "asyncio.Future[list[TokenLogprob | None]]") -> None:
        self._num_scoring -= 1
        self.scoring.release()
        if not work.cancelled():
            work.exception()  # looked at, lest asyncio complain of it where nobody waits any more

    def _require_room(self, num: int) -> None:
        most = self.options.max_queue + 2 * self.engine.max_requests
        if num > most:
            raise Refusal(f"{num} choices in one request; this server holds at most {most} at once")
        free = 2 * self.engine.max_requests - self.in_engine
        waiting = self.num_waiting
        if waiting + num > self.options.max_queue + max(0, free):
            seconds = waiting * self._seconds / (2 * self.engine.max_requests)
            raise Overloaded(
                f"{waiting} choices are queued, the limit is {self.options.max_queue}; try again later",
                retry_after_s=min(60, max(1, round(seconds))),
            )

    def _forward_seconds(self) -> float:
        return self.engine.metrics().get("forward_running_seconds", 0.0)
