"""Generation between HTTP requests and the engine: submit, follow, stop, cancel.

All code here runs on the server's event loop; the engine's thread only puts messages into an inbox.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from moetool.base.errors import MoetoolError
from moetool.runtime.request import EngineLike, Finish, Output, SamplingParams, TokenLogprob, Unavailable
from moetool.serving.access import AccessRecord
from moetool.serving.clients import Client, Load
from moetool.serving.detokenize import StopStrings, Vocabulary
from moetool.serving.fair_queue import FairQueue
from moetool.serving.http_errors import Overloaded, Refusal
from moetool.serving.metrics import Metrics
from moetool.serving.server_options import ServerOptions


class ScoredToken(NamedTuple):
    """A token with its log-probability, and the offset of its text in the text of its choice."""

    token: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """The next part of a choice: certain text, the scored tokens that begin in it, and possibly the end.

    Attributes:
        stop: the stop string that ended it.
    """

    text: str = ""
    tokens: Sequence[ScoredToken] = ()
    finish: Finish | None = None
    stop: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate.

    Attributes:
        offset: offset of its text (after an echoed prompt).
        shown: special tokens to keep in its text.
    """

    prompt: list[int]
    params: SamplingParams
    offset: int = 0
    shown: frozenset[int] = frozenset()

    @property
    def resumable(self) -> bool:
        """Whether its answer can go on in another request; the routes of tokens are one request's."""
        return not self.params.return_routes


class Choice:
    """Converts the engine's messages about one choice into pieces.

    Attributes:
        tokens: generated tokens, including those cut off by a stop string.
        experts: experts of the forwarded tokens, if the job requests them: a list of arrays [T, H, K].
        reused: prompt tokens that were in the KV cache.
        finished: whether further messages are ignored.
    """

    def __init__(self, job: Job, vocabulary: Vocabulary, stops: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.experts: list[np.ndarray] = []
        self.reused = 0
        self.finished = False
        self._detokenizer = vocabulary.detokenizer(vocabulary.special - job.shown)
        self._stops = StopStrings(stops)
        self._wants_logprobs = job.params.logprobs is not None
        self._scored: list[ScoredToken] = []  # scored tokens whose text is held back
        self._num_read = job.offset
        self._num_given = job.offset

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def advance(self, output: Output) -> TextPiece:
        """Process one message.

        Raises:
            Refusal: the request's grammar allows no further token.
            MoetoolError: the engine or the request's grammar failed.
        """
        if output.finish == "refused":
            raise Refusal(f"the answer cannot go on: {output.error}")
        if output.finish == "error":
            raise MoetoolError(output.error or "the engine failed without a reason")
        if output.finish == "cancelled":
            raise Unavailable(output.error or "the server stopped before the answer was finished")
        read = ""
        if output.token is not None:
            self.tokens.append(output.token)
            if output.experts_THK is not None:
                self.experts.append(output.experts_THK)
            self.reused += output.reused
            # The token that ends a sequence is not part of its text, even if the tokenizer does not call it special.
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
        return TextPiece(text, self._take_scored(), finish, self._stops.matched)

    def _take_scored(self) -> list[ScoredToken]:
        """Return the scored tokens whose text is at least partly released; at a natural end all of them."""
        everything = self.finished and not self._stops.matched
        num = sum(everything or scored.offset < self._num_given for scored in self._scored)
        taken, self._scored = self._scored[:num], self._scored[num:]
        return taken


_TURN_TOKENS = 256
"""Tokens after which a running request may give way to a waiting one of its client: many prefills' worth."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Deadline of an answer: `at` on the event loop's clock, `seconds` after the request arrived."""

    seconds: float
    at: float

    @property
    def missed(self) -> str:
        """Return the error message of a missed deadline."""
        return f"the answer was not finished within {self.seconds:g} s, its limit"


class Exchange:
    """The waiting and running choices of one HTTP request.

    Args:
        record: the request's record, which receives the token counts.
        deadline: time at which an unfinished exchange is aborted.
    """

    def __init__(
        self,
        frontend: "Frontend",
        jobs: Sequence[Job],
        stops: Sequence[str],
        record: AccessRecord,
        deadline: Deadline,
        client: Client,
    ) -> None:
        self.jobs = list(jobs)
        self.choices = [Choice(job, frontend.vocabulary, stops) for job in jobs]
        self.record = record
        self.client = client
        self._frontend = frontend
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[tuple[int, Output, float]] = asyncio.Queue()
        self.began = time.perf_counter()
        self._latest = [self.began] * len(jobs)  # time of a choice's submission or latest token
        self._ids: dict[int, int] = {}
        self._in_engine: set[int] = set()
        self._begun: set[int] = set()  # of these
        self._preempted: dict[int, list[tuple[int, Output, float]]] = {}  # until the engine has ended them
        self._made: list[list[int]] = [[] for _ in jobs]  # the tokens that have arrived
        self._resumed = [0] * len(jobs)  # tokens that had arrived at its last submission
        self._closed = False
        self._timer = self._loop.call_at(deadline.at, self.abort, deadline.missed)

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens over all choices."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def turn_tokens(self) -> int:
        """Return the most tokens that a running choice has had since it was last submitted."""
        return max((len(self._made[index]) - self._resumed[index] for index in self._begun), default=0)

    @property
    def tokens_left(self) -> int:
        """Return the most tokens that a running choice may still have."""
        return max((self.jobs[i].params.max_tokens - len(self._made[i]) for i in self._begun), default=0)

    @property
    def num_reused(self) -> int:
        """Return the prompt tokens that were in the KV cache; the minimum over choices of one prompt."""
        least: dict[int, int] = {}
        for job, choice in zip(self.jobs, self.choices, strict=True):
            least[id(job.prompt)] = min(choice.reused, least.get(id(job.prompt), choice.reused))
        return sum(least.values())

    def submit(self, index: int) -> bool:
        """Submit a choice to the engine; return whether it was accepted. A refused one ends with an error."""
        if self.choices[index].finished:  # by a stop string, while it was preempted
            return False
        job, made = self.jobs[index], self._made[index]
        params = replace(job.params, max_tokens=job.params.max_tokens - len(made), drawn=len(made))
        self._resumed[index] = len(made)
        try:
            self._ids[index] = self._frontend.engine.submit(job.prompt + made, params, partial(self._post, index))
        except MoetoolError as error:
            self._inbox.put_nowait((index, Output(-1, None, None, "cancelled", str(error)), 0.0))
            return False
        self._in_engine.add(index)
        return True

    def preempt_waiting(self) -> None:
        """Take back the choices that wait in the engine."""
        for index in self._in_engine - self._begun - self._preempted.keys():
            self._preempt(index)

    def preempt_running(self, least_turn: int = 0) -> bool:
        """Take back the newest running choice that can go on later; return whether there is one.

        Args:
            least_turn: fewest tokens that it has had since it was last submitted.
        """
        for index in sorted(self._begun - self._preempted.keys(), reverse=True):
            long = len(self._made[index]) - self._resumed[index] >= least_turn
            if long and self.jobs[index].resumable and not self.choices[index].finished:
                self._preempt(index)
                return True
        return False

    def _preempt(self, index: int) -> None:
        self._preempted[index] = []
        self._frontend.engine.cancel(self._ids[index])

    async def pieces(self, patience_s: float | None = None) -> AsyncIterator[tuple[int, TextPiece]]:
        """Yield (index of the choice, its next piece) until every choice is finished.

        Args:
            patience_s: seconds without a message after which index -1 with an empty piece is yielded.

        Raises:
            Refusal: the grammar of one allows no further token.
            MoetoolError: the engine failed one of them.
        """
        while not all(choice.finished for choice in self.choices):
            try:
                async with asyncio.timeout(patience_s):
                    index, output, at = await self._inbox.get()
            except TimeoutError:
                yield -1, TextPiece()
                continue
            choice = self.choices[index]
            if choice.finished:  # messages from before its cancellation
                continue
            if output.token is not None:
                first = choice.num_tokens == 0
                self._frontend.metrics.observe_token(at - self._latest[index], first=first)
                if first and self.record.first_token_s is None:
                    self.record.first_token_s = round(at - self.began, 6)
                self._latest[index] = at
            piece = choice.advance(output)
            if choice.finished and output.finish is None:  # by a stop string, which the engine does not know
                self._frontend.engine.cancel(self._ids[index])
            yield index, piece

    def abort(self, reason: str) -> None:
        """End every unfinished choice with an error for the client."""
        for index, choice in enumerate(self.choices):
            if not choice.finished:
                self._inbox.put_nowait((index, Output(-1, None, None, "cancelled", reason), 0.0))

    def close(self) -> None:
        """Remove waiting choices, and cancel unfinished ones in the engine."""
        self._closed = True
        self._timer.cancel()
        self.record.generated_tokens = self.num_tokens
        self.record.reused_tokens = self.num_reused
        self._frontend.forget(self)
        for index, request in self._ids.items():
            if not self.choices[index].finished:
                self._frontend.engine.cancel(request)

    def _post(self, index: int, output: Output) -> None:
        """Receive a message on the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, index, output, time.perf_counter())
        except RuntimeError:
            if not self._loop.is_closed():  # closed: the server stopped at once, nothing reads
                raise

    def _arrived(self, index: int, output: Output, at: float) -> None:
        if index not in self._begun:
            self._begun.add(index)
            self._frontend.begun(self)
        held = self._preempted.get(index)
        if output.finish is not None:
            self._preempted.pop(index, None)
            self._begun.discard(index)
            self._in_engine.discard(index)
            self._frontend.release(self, at - self.began)
        if held is not None and output.finish == "cancelled" and not self._closed:
            self._frontend.queue(self, index)
            return
        output = output._replace(reused=0) if self._made[index] else output
        if held is not None and not self.jobs[index].resumable:
            # It had not begun when it was preempted. Unless it ends first, it begins again with other tokens.
            held.append((index, output, at))
            if output.finish is None:
                return
        else:
            held = [(index, output, at)]
        for message in held:
            if message[1].token is not None:
                self._made[index].append(message[1].token)
            self._inbox.put_nowait(message)


@dataclass
class Frontend:
    """Shared state of a server's requests, and their queue.

    The engine gets at most twice as many choices as it can run, so that it never waits for more. Where it can run many,
    it may run fewer for lack of memory, so fewer unbegun ones are submitted. The client with the fewest choices in the
    engine is next. One client may fill the engine; if another then waits for `ServerOptions.preempt_after_s`, with at
    least two running choices fewer, a choice gives way: it is cancelled in the engine and queued again, and its prompt
    then includes its answer so far. Among one client's requests, one that has had `_TURN_TOKENS` tokens gives way.

    Attributes:
        draining: no new exchanges; running ones continue.
        running: exchanges whose answer is not complete.
        in_engine: choices in the engine.
        preempted: number of running choices that gave way so far.
        scoring: lock held while a prompt is scored. The engine scores one at a time, and waiting ones must not occupy
            the threads that tokenize.
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
    preempted: int = 0
    _not_begun: int = 0  # choices in the engine that have not begun
    _submitted: Load = field(default_factory=Load)
    _running: Load = field(default_factory=Load)  # the begun ones
    _pending: Load = field(default_factory=Load)  # queued, or not begun
    _since: dict[Client, float] = field(default_factory=dict)  # when a client with pending choices last began one
    _preempting: asyncio.TimerHandle | None = None
    _newest: bool = False  # whether the newest request of a standing queue was taken last
    _num_scoring: int = 0
    _seconds: float = 1.0  # recent duration of a choice

    @property
    def status(self) -> str:
        """Return the engine's state, or `draining`, or `stuck`."""
        if self.draining:
            return "draining"
        if self.engine.state == "ready" and self._forward_seconds() > self.options.stuck_after_s:
            return "stuck"
        return self.engine.state

    @property
    def num_waiting(self) -> int:
        """Return the number of waiting choices and prompts to score."""
        return len(self._queue) + self._num_scoring

    @property
    def is_crowded(self) -> bool:
        """Whether a choice waits, here or in the engine."""
        return bool(self._since)

    def require_ready(self) -> None:
        """Raises: Unavailable unless requests are accepted."""
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
                reasons = "; ".join(self.engine.problems) or "see the server's log"
                raise Unavailable(f"the engine failed: {reasons}", retry_after_s=30)

    def open(
        self, jobs: Sequence[Job], stops: Sequence[str], record: AccessRecord, deadline: Deadline, client: Client
    ) -> Exchange:
        """Queue jobs for the engine, all or none; the caller closes the exchange.

        Raises:
            UsageError, CapacityError: the engine could never serve one of them, or this many.
            Overloaded: too many are waiting.
            Unavailable: the server does not accept requests now.
        """
        self.require_ready()
        for job in jobs:
            self.engine.check(job.prompt, job.params)
        self._require_room(len(jobs))
        exchange = Exchange(self, jobs, stops, record, deadline, client)
        self.running.add(exchange)
        for index in range(len(jobs)):
            self.queue(exchange, index)
        return exchange

    def queue(self, exchange: Exchange, index: int) -> None:
        """Queue a choice for the engine."""
        self._queue.push(exchange.client, exchange, (exchange, index))
        self._pending.add(exchange.client, 1)
        self._since.setdefault(exchange.client, time.monotonic())
        self._pump()
        if self._preempting is None and self._since and self.options.preempt_after_s:
            self._watch()

    async def score(self, prompt: list[int], top: int, deadline: Deadline) -> list[TokenLogprob | None]:
        """Call `EngineLike.prompt_logprobs` when it is this prompt's turn.

        Raises: as `open`; Unavailable if the deadline comes first.
        """
        self.require_ready()
        self._require_room(1)
        self._num_scoring += 1
        work: asyncio.Future[list[TokenLogprob | None]] | None = None
        try:
            async with asyncio.timeout_at(deadline.at):
                await self.scoring.acquire()
                work = asyncio.ensure_future(asyncio.to_thread(self.engine.prompt_logprobs, prompt, top))
                # A thread cannot be stopped: after a client's disconnect, the next prompt waits for it.
                work.add_done_callback(self._scored)
                return await asyncio.shield(work)
        except TimeoutError:
            raise Unavailable(deadline.missed) from None
        finally:
            if work is None:
                self._num_scoring -= 1

    def begun(self, exchange: Exchange) -> None:
        """Record the engine's first message about a choice."""
        self._not_begun -= 1
        self._running.add(exchange.client, 1)
        self._no_longer_pending(exchange.client, 1)
        self._pump()

    def release(self, exchange: Exchange, seconds: float) -> None:
        """Record that a choice has left the engine, with its duration."""
        self.in_engine -= 1
        self._submitted.add(exchange.client, -1)
        self._running.add(exchange.client, -1)
        self._seconds += 0.1 * (seconds - self._seconds)
        self._pump()

    def forget(self, exchange: Exchange) -> None:
        """Drop the waiting choices of an exchange that has ended."""
        self.running.discard(exchange)
        self._no_longer_pending(exchange.client, len(self._queue.remove(exchange.client, exchange)))

    def abort(self, reason: str) -> None:
        """End all running exchanges with an error."""
        for exchange in self.running:
            exchange.abort(reason)

    def _pump(self) -> None:
        most = self.engine.max_requests
        while len(self._queue) and self.in_engine < 2 * most and self._not_begun < self.engine.max_unbegun:
            exchange, index = self._queue.pop(self._submitted.of, self._choose)
            if exchange.submit(index):
                self.in_engine += 1
                self._not_begun += 1
                self._submitted.add(exchange.client, 1)
            else:
                self._no_longer_pending(exchange.client, 1)

    def _choose(self, exchanges: Iterable[Exchange]) -> Exchange:
        """Choose one of a client's waiting requests: the next one; the newest every other time, if the next waits long.

        The oldest of many may be abandoned, or read by nobody; a new one must not wait for all of them.
        """
        following = next(iter(exchanges))
        patience_s = self.options.preempt_after_s
        if patience_s and time.perf_counter() - following.began >= patience_s:
            self._newest = not self._newest
            if self._newest:
                fresh = (exchange for exchange in exchanges if not exchange.num_tokens)
                return max(fresh, key=lambda exchange: exchange.began, default=following)
        return following

    def _no_longer_pending(self, client: Client, num: int) -> None:
        self._pending.add(client, -num)
        if not self._pending.of(client)[1]:
            self._since.pop(client, None)
        elif num:
            self._since[client] = time.monotonic()

    def _watch(self) -> None:
        """Preempt for clients that have waited long, as long as any wait."""
        self._preempting = None
        if not self._since:
            return
        now, patience_s = time.monotonic(), self.options.preempt_after_s
        for client in [client for client, since in self._since.items() if now - since >= patience_s]:
            self._since[client] = now
            self._preempt_for(client)
        self._preempting = asyncio.get_running_loop().call_later(patience_s / 4, self._watch)

    def _preempt_for(self, client: Client) -> None:
        """Take back a running choice of the client that has most above this one's, and all that it has waiting."""
        others = {exchange.client for exchange in self.running} - {client}
        largest = max(others, key=lambda other: self._running.excess(other, client), default=None)
        # A difference of 1 would only change sides.
        if largest is None or self._running.excess(largest, client) < 2:
            self._end_turns(client)
            return
        theirs = sorted((e for e in self.running if e.client == largest), key=lambda e: e.began, reverse=True)
        for exchange in theirs:
            exchange.preempt_waiting()
        self.preempted += any(exchange.preempt_running() for exchange in theirs)

    def _end_turns(self, client: Client) -> None:
        """Take back the running requests of a client that have had a long turn, for its waiting ones."""
        theirs = [exchange for exchange in self.running if exchange.client == client]
        long = [e for e in theirs if e.turn_tokens >= _TURN_TOKENS <= e.tokens_left]  # others end soon
        long.sort(key=lambda exchange: exchange.turn_tokens, reverse=True)
        self.preempted += sum(
            exchange.preempt_running(_TURN_TOKENS) for exchange in long[: self._pending.of(client)[1]]
        )

    def _scored(self, work: "asyncio.Future[list[TokenLogprob | None]]") -> None:
        self._num_scoring -= 1
        self.scoring.release()
        if not work.cancelled():
            work.exception()  # retrieve it, or asyncio warns if nothing waits any more

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
