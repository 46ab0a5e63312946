"""Requests that wait and run, and their tokens: what batches over pages and over caches of their own have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moetool.base import plugins
from moetool.base.types import Phase
from moetool.runtime.decoding import (
    NOT_NUMBERS,
    Batch,
    Part,
    check_request,
    compose,
    context_of,
    eos_ids,
    finish_of,
    score_prompt,
)
from moetool.runtime.kv.paged_attention import plain_arguments
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.sampling import Sampler
from moetool.runtime.request import Output, SamplingParams


@dataclass(slots=True, eq=False)
class Request:
    """The state of a request that waits or runs.

    Attributes:
        number: its number, from the caller.
        tokens: ids of its prompt, then of its answer so far.
        num_prompt: tokens of its prompt.
        num_to_prefill: tokens to forward before the next new one; those of a request that lost its cache are all a
            prompt.
        num_cached: tokens in its cache.
        cache: its keys and values, or where they are; None before it begins.
        reused: prompt tokens that the cache held before its first forward; None: not known yet.
    """

    number: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    num_to_prefill: int
    num_cached: int = 0
    cache: Any = None
    reused: int | None = None

    @property
    def most_tokens(self) -> int:
        """Tokens at full length."""
        return self.num_prompt + self.params.max_tokens

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been forwarded."""
        return self.num_cached >= self.num_to_prefill

    def part(self, count: int) -> Part:
        """Its next tokens, as a part of a batch."""
        tokens = self.tokens[self.num_cached : self.num_cached + count]
        phase = Phase.DECODE if self.decodes else Phase.PREFILL
        return Part(self.number, tokens, self.num_cached, phase, len(self.tokens) - self.num_prompt)


Scheduled = list[tuple[Request, int]]
"""Requests of a forward, and the number of tokens of each."""


class Scheduler(ABC):
    """Continuous batching, one forward at a time: requests join and leave between two forwards of the model.

    All methods belong to one thread. Requests are numbered by the caller, and begin in order of arrival.

    Source: Orca's iteration-level scheduling.

    Args:
        model: a transformers model in memory.
        max_requests: requests per batch; others queue.
        kv_tokens: tokens in the KV cache, over all requests.
        max_batch_tokens: most tokens of one forward.
        chunks: sizes of prompts' parts.

    Attributes:
        max_batch_tokens: may be lowered between steps, and raised again up to its first value. Requests that decode
            then take turns: those that began first go first.
        failed: whether the last step's forward raised, which ended all its requests.
        on_forward: called with each batch before its forward.
        stalled_s: returns the seconds that forwards have waited for experts so far.
    """

    def __init__(
        self, model: Any, max_requests: int, kv_tokens: int, max_batch_tokens: int, chunks: PromptChunks
    ) -> None:
        self.model, self.max_requests, self.kv_tokens = model, max_requests, kv_tokens
        self.max_batch_tokens = max_batch_tokens
        self.failed = False
        self.on_forward: Callable[[Batch], None] | None = None
        self.stalled_s: Callable[[], float] = float
        self._chunks = chunks
        self._eos = eos_ids(model)
        self._sampler = Sampler(self._eos)
        self._requests: dict[int, Request] = {}
        self._waiting: list[Request] = []  # in the order in which they begin
        self._running: list[Request] = []  # in the order in which they have begun
        self._forward_id = 0

    def close(self) -> None:
        """Drop all requests."""
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return context_of(self.model, self.kv_tokens)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that cannot run, so that none fails inside the batch (`check_request`)."""
        check_request(self.model, self.max_context, prompt, params)

    def add(self, request: int, prompt: list[int], params: SamplingParams, drawn: int = 0) -> None:
        """Queue a request that passed `check` and asks for at least one token; `drawn` as in `Sampler.add`.

        Numbers of cancelled requests may be reused. An error of its grammar is raised, and leaves nothing queued.
        """
        self._sampler.add(request, params, prompt, drawn)
        queued = Request(request, params, list(prompt), len(prompt), num_to_prefill=len(prompt))
        self._requests[request] = queued
        self._waiting.append(queued)

    def cancel(self, request: int) -> None:
        """Drop a request; unknown ones are ignored."""
        if request in self._requests:
            self._end(self._requests[request])

    def step(self) -> list[Output]:
        """Run one forward and report new tokens, finished requests and failures.

        A forward that raises fails only its own requests; a grammar that raises fails its request.
        """
        batch: Scheduled = []
        self.failed = False
        try:
            batch = self._schedule()
            if not batch:
                return []
            num_prompt_tokens = sum(count for request, count in batch if not request.decodes)
            began, stalled_s = time.perf_counter(), self.stalled_s()
            composed = compose(self._forward_id, (request.part(count) for request, count in batch))
            if self.on_forward is not None:
                self.on_forward(composed)
            ready = [request for request, count in batch if request.num_cached + count == len(request.tokens)]
            with torch.inference_mode():
                scores_BV = self._sampler.apply([request.number for request in ready], self._forward(batch, composed))
                sampled = scores_BV[: len(ready)].argmax(-1).tolist()
            self._chunks.observe(num_prompt_tokens, time.perf_counter() - began, self.stalled_s() - stalled_s)
            for request, count in batch:
                request.num_cached += count
                self._note(request)
        except Exception as error:
            self.failed = True
            failed = [request for request, _ in batch] or list(self._requests.values())
            return [self._fail(request, error) for request in failed]
        self._forward_id += 1
        return [self._report(request, token) for request, token in zip(ready, sampled, strict=True)]

    def score(self, request: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        """Forward a prompt by itself, outside the batch; gives its logits [t, V] float32 in pieces (`score_prompt`)."""
        arguments = plain_arguments(self.model)
        logits = score_prompt(self.model, request, prompt, self._forward_id, self.on_forward, **arguments)
        self._forward_id += 1
        return logits

    @abstractmethod
    def _schedule(self) -> Scheduled:
        """Begin requests, and choose those of the next forward, with room in the cache."""

    @abstractmethod
    def _forward(self, batch: Scheduled, composed: Batch) -> torch.Tensor:
        """Forward a batch; returns float32 logits [B, V], first those of the requests that get a new token.

        They may be overwritten.
        """

    @abstractmethod
    def _note(self, request: Request) -> None:
        """Note that a request holds more tokens."""

    @abstractmethod
    def _release(self, request: Request, finish: str | None) -> None:
        """Take back the cache of a request, which may not have begun.

        Args:
            finish: `error` if its values were no numbers; None if it was cancelled, or its forward or grammar failed.
        """

    def _report(self, request: Request, token: int) -> Output:
        try:
            if (end := self._sampler.broken_end(request.number)) is not None:
                self._end(request, "error" if end.error == NOT_NUMBERS else None)
                return end
            logprob = self._sampler.take(request.number, token)
        except Exception as error:  # from a grammar
            return self._fail(request, error)
        request.tokens.append(token)
        done = len(request.tokens) - request.num_prompt
        if (finish := finish_of(token, done, request.params, self._eos)) is not None:
            self._end(request, finish)
        return Output(request.number, token, logprob, finish, reused=(request.reused or 0) if done == 1 else 0)

    def _fail(self, request: Request, error: Exception) -> Output:
        self._end(request)
        return Output(request.number, None, finish="error", error=plugins.describe(error))

    def _end(self, request: Request, finish: str | None = None) -> None:
        """Forget a request."""
        del self._requests[request.number]
        self._sampler.remove(request.number)
        (self._running if request in self._running else self._waiting).remove(request)
        self._release(request, finish)
