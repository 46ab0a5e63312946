"""Batches of requests that each keep a transformers cache of their own, for families that pages cannot hold.

Pages do not hold linear and chunked attention and fixed-size states. With the model's own attention
and cache they run as in `generate`. The forwards of the requests meet at every MoE layer
(`moetool.runtime.loop.joint_forwards`), so that experts are loaded and multiplied once for all.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from moetool.base import plugins
from moetool.base.families import own_cache, resumes_cache
from moetool.base.types import Phase
from moetool.models.cache_argument import cache_argument
from moetool.models.cache_size import CacheSize
from moetool.runtime.decoding import (
    Batch,
    Part,
    check_request,
    compose,
    context_of,
    eos_ids,
    finish_of,
    kv_cache_bytes,
    score_prompt,
)
from moetool.runtime.kv.kept_caches import KeptCache, attends_only, cuttable, name_linear_layers, state_bytes, states_of
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.joint_forwards import JointForwards
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.sampling import Sampler
from moetool.runtime.request import Output, SamplingParams

_OF_PAGES = ("unreserved", "first_kv_tokens")


def open_batcher(model: Any, *, own: CacheSize | None = None, **settings: Any) -> "Batcher | OwnCaches":
    """Open the batcher for the model's family.

    Args:
        own: size of a request's own cache, where it has one (`OwnCaches.size`).
        settings: arguments of `Batcher`; requests with caches of their own have no use for some.
    """
    config = model.config.get_text_config()
    if not own_cache(config):
        return Batcher(model, **settings)
    settings = {name: value for name, value in settings.items() if name not in _OF_PAGES}
    if not resumes_cache(config):
        settings["max_prompt_wait_s"] = 0.0
    return OwnCaches(model, size=own, **settings)


@dataclass(slots=True)
class _Request:
    number: int
    prompt: list[int]
    params: SamplingParams
    answer: list[int] = field(default_factory=list)
    cache: Any = None
    marks: dict[int, Any] = field(default_factory=dict)  # as for `KeptCache`
    reused: int = 0  # tokens of the prompt that the cache held before its first forward
    held: int = 0  # tokens of the prompt that the cache holds
    take: int = 0  # tokens of the prompt in its next forward

    @property
    def num_tokens(self) -> int:
        """Tokens at full length."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def coming(self) -> list[int]:
        """Tokens of its next forward: `take` of the prompt that are not in the cache, or the newest one."""
        return self.answer[-1:] or self.prompt[self.held : self.held + self.take]

    @property
    def part(self) -> Part:
        """These tokens, as a part of a batch."""
        iteration = len(self.answer)
        phase, start = (Phase.DECODE, len(self.prompt) + iteration - 1) if iteration else (Phase.PREFILL, self.held)
        return Part(self.number, self.coming, start, phase, iteration)


class OwnCaches:
    """Continuous batching with one cache per request; otherwise like `Batcher`.

    Requests begin in order of arrival, if their caches fit at full length. A prompt is forwarded whole, whatever its
    length, unless other requests wait for it (`max_prompt_wait_s`).

    Prefix caching keeps the caches of ended requests while there is room, the least recently used leave first. A cache
    that cannot go back to any token is marked where the request's own forward began and where its prompt ended, so that
    a chat goes on after an answer, after an answer that the client changed, and with another last question.

    Args:
        model: a transformers model in memory.
        max_requests: requests per batch; others queue.
        kv_tokens: tokens in the caches, over all requests.
        max_batch_tokens: most tokens of one forward, unless a single prompt has more.
        prefix_caching: keep caches of ended requests for prompts that begin alike.
        max_prompt_wait_s: as for `Batcher`, for families whose caches take several tokens at once (`resumes_cache`).
        size: bytes of caches (default: as paged).

    Attributes:
        max_batch_tokens: as for `Batcher`.
        kv_bytes: upper bound of the caches' bytes; they grow with the requests.
        stalled_s: as for `Batcher`.
    """

    evicted_pages = held_kv_bytes = 0

    def __init__(
        self,
        model: Any,
        *,
        kv_tokens: int,
        max_requests: int = 1,
        max_batch_tokens: int = 512,
        prefix_caching: bool = False,
        max_prompt_wait_s: float = 0.0,
        size: CacheSize | None = None,
    ) -> None:
        self.model = model
        self.max_requests = max_requests
        self.kv_tokens = kv_tokens
        if size is None:
            paged = kv_cache_bytes(model.config.get_text_config(), model.dtype, kv_tokens)
            size = CacheSize(paged // kv_tokens)
        self._size = size
        self.kv_bytes = size.of(kv_tokens, max_requests)
        self.on_forward: Callable[[Batch], None] | None = None
        self.stalled_s: Callable[[], float] = float
        self.max_batch_tokens = max_batch_tokens
        self._chunks = PromptChunks(max_prompt_wait_s, sys.maxsize)
        self._prefix_caching = prefix_caching
        self._appends = resumes_cache(model.config.get_text_config())
        self._kept: list[KeptCache] = []  # the least recently used first
        self._eos = eos_ids(model)
        self._sampler = Sampler(self._eos)
        self._requests: dict[int, _Request] = {}
        self._inside: list[_Request] = []  # in order of admission
        self._forward_id = 0
        self._joint = JointForwards(model)
        self._cache_argument = cache_argument(model)

    def close(self) -> None:
        """Drop all requests and end their threads."""
        self._requests.clear()
        self._inside.clear()
        self._kept.clear()
        self._joint.close()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._requests) - self.running

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    @property
    def grown_kv_tokens(self) -> int:
        """All tokens: requests' own caches have a fixed share of memory."""
        return self.kv_tokens

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return context_of(self.model, self.kv_tokens)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that cannot run (`check_request`)."""
        check_request(self.model, self.max_context, prompt, params)

    def add(self, request: int, prompt: list[int], params: SamplingParams, drawn: int = 0) -> None:
        """Queue a request that passed `check` and asks for at least one token; `drawn` as in `Sampler.add`."""
        self._requests[request] = _Request(request, prompt, params)
        self._sampler.add(str(request), params, prompt, drawn)

    def cancel(self, request: int) -> None:
        """Drop a request before the next forward; unknown ones are ignored."""
        if request in self._requests:
            self._end(request)

    def step(self) -> list[Output]:
        """Run one forward and report new tokens, finished requests and failures.

        A forward that raises fails its own requests; a sampler that raises fails the request that it samples.
        """
        self._admit()
        requests = self._next_batch()
        if not requests:
            return []
        num_prompt_tokens = sum(len(request.coming) for request in requests if not request.answer)
        began, stalled_s = time.perf_counter(), self.stalled_s()
        try:
            logits_RV = self._forward(requests)
        except Exception as error:
            return [self._fail(request, error) for request in requests]
        self._chunks.observe(num_prompt_tokens, time.perf_counter() - began, self.stalled_s() - stalled_s)
        self._forward_id += 1
        for request in requests:
            if not request.answer:
                request.held += request.take
                self._mark(request)
        return [
            self._sample(request, logits_RV[i : i + 1])
            for i, request in enumerate(requests)
            if request.held == len(request.prompt)
        ]

    def score(self, request: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        """Forward a prompt by itself, outside the running requests; gives its logits as `score_prompt`."""
        logits = score_prompt(self.model, request, prompt, self._forward_id, self.on_forward)
        self._forward_id += 1
        return logits

    def _admit(self) -> None:
        free_bytes = self._free_bytes()
        for request in list(self._requests.values()):
            if request in self._inside:
                continue
            needed = self._size.of(request.num_tokens, 1)
            full = len(self._inside) == self.max_requests or needed > free_bytes
            if self._inside and full:
                break
            self._inside.append(request)
            free_bytes -= needed
            if self._kept and not request.params.return_routes:
                self._go_on(request)
        self._make_room()

    def _go_on(self, request: _Request) -> None:
        """Give a request the cached part of its prompt."""
        kept = max(reversed(self._kept), key=lambda one: one.common(request.prompt))
        if count := kept.common(request.prompt):
            self._kept.remove(kept)
            self._kept.append(kept)
            request.cache, request.reused, request.held = kept.resumed(count), count, count
            if not cuttable(kept.cache):
                request.marks[count] = kept.states_at(count)

    def _free_bytes(self) -> int:
        """Bytes that the running requests leave, each at full length."""
        return self.kv_bytes - sum(self._size.of(request.num_tokens, 1) for request in self._inside)

    def _make_room(self) -> None:
        """Drop what does not fit beside the requests: kept caches, the least recently used first, then marks."""
        free_bytes = self._free_bytes() - sum(state_bytes(request.marks) for request in self._inside)
        kept_bytes = [self._size.of(len(kept.tokens), 1) + state_bytes(kept.marks) for kept in self._kept]
        most = max(1, self.max_requests - len(self._inside))
        while self._kept and (len(self._kept) > most or sum(kept_bytes) > free_bytes):
            del self._kept[0], kept_bytes[0]
        if free_bytes < 0:
            for request in self._inside:
                request.marks.clear()

    def _keeps(self, cache: Any) -> bool:
        """Whether to keep a request's cache for later prompts."""
        return self._prefix_caching and (self._appends or attends_only(cache))

    def _mark(self, request: _Request) -> None:
        """Mark the cache of a request whose prompt has been forwarded."""
        if self._keeps(request.cache) and request.held == len(request.prompt) and not cuttable(request.cache):
            request.marks[request.held] = states_of(request.cache)
            self._make_room()

    def _keep(self, request: _Request) -> None:
        """Keep the cache of an ended request, in place of those that it continued."""
        if self._keeps(request.cache):
            tokens = [*request.prompt, *request.answer[:-1]]
            self._kept = [one for one in self._kept if one.tokens != tokens[: len(one.tokens)]]
            self._kept.append(KeptCache(tokens, request.cache, request.marks))

    def _next_batch(self) -> list[_Request]:
        """Requests that decode, then prompts in order of arrival, up to `max_batch_tokens`; at least one request."""
        decoding = [request for request in self._inside if request.answer][: self.max_batch_tokens]
        room = self.max_batch_tokens - len(decoding)
        chunk = self._chunks.tokens(decoding=bool(decoding))
        prompts: list[_Request] = []
        for request in self._inside:
            if not request.answer:
                request.take = min(len(request.prompt) - request.held, chunk)
                room, chunk = room - request.take, chunk - request.take
                if prompts and (room < 0 or request.take == 0):
                    break
                prompts.append(request)
        return decoding + prompts

    def _forward(self, requests: list[_Request]) -> torch.Tensor:
        """Forward each request's next tokens; returns the logits [R, V] float32 of the following tokens."""
        if self.on_forward is not None:
            self.on_forward(compose(self._forward_id, (request.part for request in requests)))
        with torch.inference_mode():
            made = self._joint.run([partial(self._forward_one, request) for request in requests])
        return torch.cat(made).float().clone()

    def _forward_one(self, request: _Request) -> torch.Tensor:
        part = request.part
        coming = torch.tensor([part.tokens], device=self.model.device)
        positions = torch.arange(part.start, part.start + len(part.tokens), device=self.model.device)[None]
        held = {self._cache_argument: request.cache}
        made = self.model(coming, position_ids=positions, use_cache=True, logits_to_keep=1, **held)
        first, request.cache = request.cache is None, made[self._cache_argument]
        if first:
            name_linear_layers(request.cache)
        return made.logits[:, -1]

    def _sample(self, request: _Request, logits_1V: torch.Tensor) -> Output:
        """Choose the next token of a request and report it, or its failure."""
        name = str(request.number)
        try:
            token = int(self._sampler.apply([name], logits_1V).argmax())
            if (end := self._sampler.broken_end(name)) is not None:
                self._end(request.number)
                return end
            logprob = self._sampler.take(name, token)
        except Exception as error:
            return self._fail(request, error)
        request.answer.append(token)
        finish = finish_of(token, len(request.answer), request.params, self._eos)
        if finish is not None:
            self._keep(request)
            self._end(request.number)
        return Output(request.number, token, logprob, finish, reused=request.reused if len(request.answer) == 1 else 0)

    def _fail(self, request: _Request, error: Exception) -> Output:
        self._end(request.number)
        return Output(request.number, None, finish="error", error=plugins.describe(error))

    def _end(self, number: int) -> None:
        request = self._requests.pop(number)
        self._sampler.remove(str(number))
        if request in self._inside:
            self._inside.remove(request)
