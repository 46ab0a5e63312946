"""Batches of requests that each keep a transformers cache of their own, for families that pages cannot hold.

Pages do not hold linear and chunked attention and fixed-size states. With the model's own attention
and cache they run as in `generate`. The forwards of the requests meet at every MoE layer
(`moetool.runtime.loop.joint_forwards`), so that experts are loaded and multiplied once for all.
"""

import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any

import torch

from moetool.base.families import own_cache, resumes_cache
from moetool.models.cache_argument import cache_argument
from moetool.models.cache_size import CacheSize
from moetool.runtime.decoding import Batch, kv_cache_bytes
from moetool.runtime.kv.kept_caches import KeptCache, attends_only, cuttable, name_linear_layers, state_bytes, states_of
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.joint_forwards import JointForwards
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.scheduler import Request, Scheduled, Scheduler
from moetool.runtime.request import Output

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
class _Cache:
    """Cache of a request; `marks` as for `KeptCache`."""

    states: Any = None
    marks: dict[int, Any] = field(default_factory=dict)


class OwnCaches(Scheduler):
    """Continuous batching with one cache per request.

    Requests begin in order of arrival, if their caches fit at full length. A prompt is forwarded whole, whatever its
    length, unless other requests wait for it (`max_prompt_wait_s`).

    Prefix caching keeps the caches of ended requests while there is room, the least recently used leave first. A cache
    that cannot go back to any token is marked where the request's own forward began and where its prompt ended, so that
    a chat goes on after an answer, after an answer that the client changed, and with another last question.

    Args:
        model, max_requests: as for `Scheduler`.
        kv_tokens: tokens in the caches, over all requests.
        max_batch_tokens: as for `Scheduler`, unless a single prompt has more.
        prefix_caching: keep caches of ended requests for prompts that begin alike.
        max_prompt_wait_s: as for `Batcher`, for families whose caches take several tokens at once (`resumes_cache`).
        size: bytes of caches (default: as paged).

    Attributes:
        kv_bytes: upper bound of the caches' bytes; they grow with the requests.
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
        super().__init__(model, max_requests, kv_tokens, max_batch_tokens, PromptChunks(max_prompt_wait_s, sys.maxsize))
        if size is None:
            paged = kv_cache_bytes(model.config.get_text_config(), model.dtype, kv_tokens)
            size = CacheSize(paged // kv_tokens)
        self._size = size
        self.kv_bytes = size.of(kv_tokens, max_requests)
        self.grown_kv_tokens = kv_tokens  # all: requests' own caches have a fixed share of memory
        self._prefix_caching = prefix_caching
        self._appends = resumes_cache(model.config.get_text_config())
        self._kept: list[KeptCache] = []  # the least recently used first
        self._joint = JointForwards(model)
        self._cache_argument = cache_argument(model)

    def close(self) -> None:
        """Drop all requests and end their threads."""
        super().close()
        self._kept.clear()
        self._joint.close()

    def step(self) -> list[Output]:
        """Begin requests, and run one forward (`Scheduler.step`)."""
        return [*self._begin(), *super().step()]

    def _schedule(self) -> Scheduled:
        """Requests that decode, then prompts in order of arrival, up to `max_batch_tokens`; at least one request."""
        batch = [(request, 1) for request in self._running if request.decodes][: self.max_batch_tokens]
        room, chunk = self.max_batch_tokens - len(batch), self._chunks.tokens(decoding=bool(batch))
        for at, request in enumerate(request for request in self._running if not request.decodes):
            count = min(request.num_to_prefill - request.num_cached, chunk)
            room, chunk = room - count, chunk - count
            if at and (room < 0 or count == 0):
                break
            batch.append((request, count))
        return batch

    def _begin(self) -> list[Output]:
        """Begin requests whose caches fit at full length; returns the ends of those that fail."""
        free_bytes, ends = self._free_bytes(), []
        while self._waiting:
            request = self._waiting[0]
            free_bytes -= self._size.of(request.most_tokens, 1)
            if self._running and (len(self._running) == self.max_requests or free_bytes < 0):
                break
            request.cache = _Cache()
            self._running.append(self._waiting.pop(0))
            if self._kept and not request.params.return_routes:
                try:
                    self._go_on(request)
                except Exception as error:  # for example, no memory for a copy
                    ends.append(self._fail(request, error))
        self._make_room()
        return ends

    def _go_on(self, request: Request) -> None:
        """Give a request the cached part of its prompt."""
        kept = max(reversed(self._kept), key=lambda other: other.common(request.tokens))
        if count := kept.common(request.tokens):
            self._kept.remove(kept)
            self._kept.append(kept)
            request.cache.states, request.reused, request.num_cached = kept.resumed(count), count, count
            if not cuttable(kept.cache):
                request.cache.marks[count] = kept.states_at(count)

    def _free_bytes(self) -> int:
        """Bytes that the running requests leave, each at full length."""
        return self.kv_bytes - sum(self._size.of(request.most_tokens, 1) for request in self._running)

    def _make_room(self) -> None:
        """Drop what does not fit beside the requests: kept caches, the least recently used first, then marks."""
        free_bytes = self._free_bytes() - sum(state_bytes(request.cache.marks) for request in self._running)
        kept_bytes = [self._size.of(len(kept.tokens), 1) + state_bytes(kept.marks) for kept in self._kept]
        most = max(1, self.max_requests - len(self._running))
        while self._kept and (len(self._kept) > most or sum(kept_bytes) > free_bytes):
            del self._kept[0], kept_bytes[0]
        if free_bytes < 0:
            for request in self._running:
                request.cache.marks.clear()

    def _keeps(self, cache: Any) -> bool:
        """Whether to keep a request's cache for later prompts."""
        return self._prefix_caching and (self._appends or attends_only(cache))

    def _forward(self, batch: Scheduled, composed: Batch) -> torch.Tensor:
        logits_1V = self._joint.run([partial(self._forward_one, request, count) for request, count in batch])
        ready = [request.num_cached + count == len(request.tokens) for request, count in batch]
        return torch.cat(list(compress(logits_1V, ready)) or logits_1V).float()

    def _forward_one(self, request: Request, count: int) -> torch.Tensor:
        part = request.part(count)
        coming = torch.tensor([part.tokens], device=self.model.device)
        positions = torch.arange(part.start, part.start + count, device=self.model.device)[None]
        cache, held = request.cache, {self._cache_argument: request.cache.states}
        output = self.model(coming, position_ids=positions, use_cache=True, logits_to_keep=1, **held)
        first, cache.states = cache.states is None, output[self._cache_argument]
        if first:
            name_linear_layers(cache.states)
        return output.logits[:, -1]

    def _note(self, request: Request) -> None:
        """Mark the cache of a request whose prompt has been forwarded."""
        states, marks = request.cache.states, request.cache.marks
        if request.num_cached == request.num_prompt and self._keeps(states) and not cuttable(states):
            marks[request.num_cached] = states_of(states)
            self._make_room()

    def _release(self, request: Request, finish: str | None) -> None:
        """Keep the cache of an answered request, in place of those that it continued."""
        if finish in ("stop", "length") and self._keeps(request.cache.states):
            tokens = request.tokens[: request.num_cached]
            self._kept = [kept for kept in self._kept if kept.tokens != tokens[: len(kept.tokens)]]
            self._kept.append(KeptCache(tokens, request.cache.states, request.cache.marks))
