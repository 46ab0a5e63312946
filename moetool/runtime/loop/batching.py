"""Continuous batching: requests join and leave the batch between two forwards of the model.

Source: Orca's iteration-level scheduling, and the scheduler of nano-vllm.

Deviations:
- Prompts are forwarded in chunks beside requests that decode (`moetool.runtime.loop.prompt_chunks`).
- Requests run in order of arrival; none overtakes another. Beyond `unreserved`, one begins only if the KV cache holds
  all running ones at full length. A running request that finds no page takes those of the newest one, which begins
  again, from kept pages if there are any, once another has ended.
"""

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base import plugins
from moetool.base.errors import MoetoolError, UsageError
from moetool.base.types import Phase
from moetool.kernels.cpu.attention import find_attention_kernel
from moetool.kernels.cpu.matmul import MIN_ELEMENTS
from moetool.kernels.cpu.threads import one_thread
from moetool.models.cache_argument import cache_argument
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.transformers_internals import attention_of
from moetool.runtime.decode_graphs import DecodeGraphs
from moetool.runtime.decoding import (
    PAGE_TOKENS,
    Batch,
    Part,
    check_request,
    compose,
    context_of,
    eos_ids,
    finish_of,
    is_indexed,
    row_shapes,
    score_prompt,
)
from moetool.runtime.experts.copies import on_device
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.kv.indexed import indexed_arguments
from moetool.runtime.kv.kept_prefixes import PrefixFile
from moetool.runtime.kv.latents import keep_latents
from moetool.runtime.kv.ledger import PageLedger, PageTable
from moetool.runtime.kv.paged_attention import PAGED, DecodeRows, paged_attention, plain_arguments
from moetool.runtime.kv.pages import KvBatch, KvPages
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.sampling import Sampler
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.steps.recorded_steps import RecordedSteps

_LOG = logging.getLogger(__name__)
NARROW_ROWS = 128
"""Most rows of a forward on one thread where all products of a layer are small: waking others takes longer."""
_CROWDED = 0.15
"""Share of free pages below which prompts wait for requests that decode."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request.

    Attributes:
        tokens: of its prompt, and of its answer so far.
        table: its pages; it has none while it waits.
        held: tokens in the KV cache.
        whole: tokens to forward before the next new one; those of a request that lost its pages are all a prompt.
        reused: prompt tokens with pages of earlier requests; None: not known yet.
    """

    number: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    table: PageTable
    whole: int = 0
    held: int = 0
    reused: int | None = None

    @property
    def num_pages(self) -> int:
        """KV cache pages that it needs at full length."""
        return -(-(self.num_prompt + self.params.max_tokens) // PAGE_TOKENS)

    @property
    def decodes(self) -> bool:
        """Whether its prompt has been forwarded."""
        return self.held >= self.whole

    def part(self, count: int) -> Part:
        """Its next tokens, as a part of a batch."""
        tokens = self.tokens[self.held : self.held + count]
        phase = Phase.DECODE if self.decodes else Phase.PREFILL
        return Part(self.number, tokens, self.held, phase, len(self.tokens) - self.num_prompt)


class Batcher:
    """Continuous batching over a model, one forward at a time.

    All methods belong to one thread. Requests are numbered by the caller.

    Args:
        model: a transformers model in memory.
        max_requests: requests per batch; others queue.
        kv_tokens: tokens in the KV cache, over all requests.
        max_batch_tokens: most tokens of one forward; longer prompts come in chunks.
        unreserved: number of requests that begin whatever their length: if the KV cache proves too small, one of them
            restarts. Further requests begin only if the cache holds all at full length.
        max_prompt_wait_s: time limit of a forward with prompt tokens while others decode
            (`moetool.runtime.loop.prompt_chunks.PromptChunks`; 0: chunks have full size).
        prefix_caching: keep the pages of finished requests, and forward only the part of a prompt without a page.
        first_kv_tokens: initial tokens of the KV cache (`PageLedger`); 0: all.

    Attributes:
        max_batch_tokens: may be lowered between steps, and raised again up to its first value. Requests that decode
            then take turns: those that began first go first.
        kv_tokens: tokens in the KV cache.
        kv_bytes: bytes of the KV cache.
        graphs: runs decode steps once they are recorded (`record_steps`).
        recorded: likewise on a CPU.
        fixed_shapes: whether the sequences of a decode step attend in one call, by tensors of fixed shapes; default on
            a GPU, where many calls cost more than padding.
        stalled_s: returns the seconds that forwards have waited for experts so far.

    Effects: switches the model to moetool's paged attention; `close` undoes that.

    Raises:
        UsageError: the family takes no attention function.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_requests: int,
        kv_tokens: int,
        max_batch_tokens: int = 512,
        unreserved: int | None = None,
        prefix_caching: bool = False,
        max_prompt_wait_s: float = 0.0,
        first_kv_tokens: int = 0,
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(PAGED, paged_attention)
        self.model = model
        self._attention = attention_of(model)
        self.on_forward: Callable[[Batch], None] | None = None
        self.stalled_s: Callable[[], float] = float
        self.graphs: DecodeGraphs | None = None
        self.recorded: RecordedSteps | None = None
        self.fixed_shapes = model.device.type == "cuda" and not is_indexed(model.config.get_text_config())
        self.max_requests = max_requests
        self._unreserved = max_requests if unreserved is None else unreserved
        self.max_batch_tokens = max_batch_tokens
        self._eos = eos_ids(model)
        self._requests: dict[int, _Request] = {}
        self._waiting: list[_Request] = []  # in the order in which they begin
        self._running: list[_Request] = []  # in the order in which they have begun
        self._restarts = False  # whether a request lost its pages, and none has ended since
        self._forward_id = 0
        config = model.config.get_text_config()
        shapes = row_shapes(config)
        self._is_narrow = model.device.type == "cpu" and config.hidden_size**2 < MIN_ELEMENTS
        if model.device.type == "cpu" and model.dtype == torch.bfloat16:
            for layer, shape in zip(config.per_layer_config, shapes, strict=True):
                queries = getattr(layer, "num_attention_heads", None) or 0
                if shape.heads and queries and queries % shape.heads == 0:  # no request waits for a compiler
                    find_attention_kernel(queries // shape.heads, shape.key_width)
        num_pages = -(-kv_tokens // PAGE_TOKENS)
        self._pages = KvPages(shapes, num_pages, model.dtype, model.device)
        first_pages = -(-first_kv_tokens // PAGE_TOKENS)
        release = self._pages.return_memory
        self._ledger = PageLedger(num_pages, sharing=prefix_caching, first_pages=first_pages, release=release)
        self.kv_tokens = num_pages * PAGE_TOKENS
        self.kv_bytes = sum(tensor.nbytes for tensor in self._pages.tensors)
        self._arguments = {cache_argument(model): self._pages, "use_cache": True, **indexed_arguments(model)}
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sampler = Sampler(self._eos)
        self._prefixes: PrefixFile | None = None
        self._chunks = PromptChunks(max_prompt_wait_s, max_batch_tokens)
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._fixed: dict[str, torch.Tensor] = {}  # inputs of decode steps, where recorded steps read them
        if self._stream is not None:
            torch.cuda.synchronize(model.device)  # the pages were filled on another stream
        model.set_attn_implementation(PAGED)
        if attention_of(model) != PAGED:
            raise UsageError(f"{type(model).__name__} cannot be batched: its attention stays {self._attention}")
        self._expand = keep_latents(model)

    def restore_prefixes(self, path: Path, facts: Mapping[str, str]) -> None:
        """Keep prefixes in a file (`PrefixFile`), and begin with those that it holds; one that is unusable is named."""
        self._prefixes = PrefixFile(path, facts, self._pages.tensors)
        try:
            self._ledger.restore(self._prefixes.load(self._ledger.limit))
        except MoetoolError as error:
            _LOG.warning("%s; starting without them", error)

    def save_prefixes(self) -> None:
        """Write the prefixes of ended requests, if a file keeps them. Raises: MoetoolError: see `PrefixFile.save`."""
        if self._prefixes is not None:
            kept = self._ledger.kept
            self._prefixes.save(list(kept), list(kept.values()))

    def close(self) -> None:
        """Restore the model's attention and drop all requests and the KV cache."""
        self.model.set_attn_implementation(self._attention)
        self._expand()
        self._requests.clear()
        self._waiting.clear()
        self._running.clear()
        self._fixed.clear()
        self.graphs = self.recorded = None
        self._prefixes = None  # it refers to the pages
        self._pages.close()

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def evicted_pages(self) -> int:
        """Number of pages of earlier requests that were evicted."""
        return self._ledger.evicted

    @property
    def grown_kv_tokens(self) -> int:
        """Current KV cache tokens beyond the initial ones; all if it does not grow."""
        ledger = self._ledger
        return PAGE_TOKENS * (ledger.limit - (ledger.first if ledger.first < ledger.num_pages else 0))

    @property
    def held_kv_bytes(self) -> int:
        """Bytes of `kv_bytes` that the cache does not use yet."""
        return (self._ledger.num_pages - self._ledger.limit) * (self.kv_bytes // (self._ledger.num_pages + 1))

    @property
    def idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._requests

    @property
    def max_context(self) -> int:
        """Most tokens of one request, prompt and answer together."""
        return context_of(self.model, self.kv_tokens)

    def record_steps(self, layers: Sequence[MoeLayer], runtime: ExpertRuntime) -> None:
        """Record decode steps: on a CPU as programs, now; on a GPU as CUDA graphs, if their shapes are fixed."""
        if self.fixed_shapes:
            self.graphs = DecodeGraphs(self.model, layers, runtime, self._locate)
        elif self.model.device.type == "cpu":
            self.recorded = RecordedSteps(self.model, layers, runtime, self._pages)

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        """Refuse a request that cannot run, so that none fails inside the batch (`check_request`)."""
        check_request(self.model, self.max_context, prompt, params)

    def add(self, request: int, prompt: list[int], params: SamplingParams, drawn: int = 0) -> None:
        """Queue a request that passed `check` and asks for at least one token; `drawn` as in `Sampler.add`.

        Numbers of cancelled requests may be reused.
        """
        table = PageTable(len(prompt) + params.max_tokens)
        self._requests[request] = _Request(request, params, list(prompt), len(prompt), table)
        self._waiting.append(self._requests[request])
        self._sampler.add(str(request), params, prompt, drawn)

    def cancel(self, request: int) -> None:
        """Drop a request; unknown ones are ignored."""
        if (found := self._requests.get(request)) is not None:
            self._end(found)

    def step(self) -> list[Output]:
        """Run one forward and report new tokens, finished requests and failures.

        A forward that raises fails only its own requests.
        """
        batch: list[tuple[_Request, int]] = []
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                batch = self._schedule()
                if not batch:
                    return []
                began, stalled_s = time.perf_counter(), self.stalled_s()
                ready, sampled = self._forward(batch)
                stalled_s = self.stalled_s() - stalled_s
                num_prompt_tokens = sum(count for request, count in batch if not request.decodes)
                self._chunks.observe(num_prompt_tokens, time.perf_counter() - began, stalled_s)
            except Exception as error:
                failed = [request for request, _ in batch] or list(self._requests.values())
                return [self._fail(request, error) for request in failed]
        self._forward_id += 1
        for request, count in batch:
            request.held += count
            self._ledger.register(request.table, request.tokens, request.held)
        return [self._report(request, token) for request, token in zip(ready, sampled, strict=True)]

    def score(self, request: int, prompt: list[int]) -> Iterator[torch.Tensor]:
        """Forward a prompt by itself, outside the batch; gives its logits [t, V] float32 in pieces (`score_prompt`)."""
        arguments = plain_arguments(self.model)
        logits = score_prompt(self.model, request, prompt, self._forward_id, self.on_forward, **arguments)
        self._forward_id += 1
        return logits

    def _schedule(self) -> list[tuple[_Request, int]]:
        """Choose the requests of the next forward and the number of tokens of each, and give them pages.

        Requests that decode come first, then prompts that have begun, then waiting ones.
        """
        self._ledger.begin_forward()
        decoding = [request for request in self._running if request.decodes]
        room = min(self.max_batch_tokens, self._chunks.tokens(decoding=bool(decoding)) + len(decoding))
        crowded = self._ledger.free_share < _CROWDED
        batch: list[tuple[_Request, int]] = []
        for request in [*decoding, *(request for request in self._running if not request.decodes)]:
            if not room or (crowded and batch and not request.decodes):
                break
            count = min(len(request.tokens) - request.held, room)
            if request in self._running and self._make_room(request, count, batch):
                batch.append((request, count))
                room -= count
        while self._waiting and room and not (crowded and batch) and self._may_begin(self._waiting[0]):
            request = self._waiting[0]
            held = 0 if request.params.return_routes else self._ledger.match(request.table, request.tokens)
            count = min(len(request.tokens) - held, room)
            if not self._ledger.reserve(request.table, held + count):
                self._ledger.release(request.table)
                break
            request.held, request.whole = held, len(request.tokens)
            if request.reused is None:
                request.reused = held
            self._running.append(self._waiting.pop(0))
            batch.append((request, count))
            room -= count
        return batch

    def _may_begin(self, request: _Request) -> bool:
        if not self._running:
            return True
        if self._restarts or len(self._running) >= self.max_requests:
            return False
        pages = sum(other.num_pages for other in self._running) + request.num_pages
        return len(self._running) < self._unreserved or pages <= self._ledger.num_pages

    def _make_room(self, request: _Request, count: int, batch: list[tuple[_Request, int]]) -> bool:
        """Give a running request pages for its next tokens, if need be from newer ones; returns whether there are any.

        Without them it waits for another forward, or to begin again.
        """
        scheduled = [other for other, _ in batch]  # compared by identity
        while not self._ledger.reserve(request.table, request.held + count):
            newest = next(other for other in reversed(self._running) if other not in scheduled)
            assert len(self._running) > 1, "a request alone fits: it passed check"
            self._running.remove(newest)
            self._waiting.insert(0, newest)
            self._ledger.release(newest.table)
            newest.held = newest.whole = 0
            self._restarts = True
            if newest is request:
                return False
        return True

    def _forward(self, batch: list[tuple[_Request, int]]) -> tuple[list[_Request], list[int]]:
        """Forward the batch; returns the requests that have a new token, and these tokens."""
        composed = compose(self._forward_id, (request.part(count) for request, count in batch))
        if self.on_forward is not None:
            self.on_forward(composed)
        kv_batch, inputs = self._inputs(batch, composed)
        self._pages.batch = kv_batch
        inputs |= {"kv_batch": kv_batch, **self._arguments}
        ready = [request for request, count in batch if request.held + count == len(request.tokens)]
        with torch.inference_mode():
            room = self._room(kv_batch)
            if room and self.graphs is not None:
                logits = self.graphs(inputs, room)
            elif self.recorded is not None and self.recorded.takes(kv_batch):
                logits = self.recorded.run(inputs["input_ids"], inputs["position_ids"], kv_batch)
            else:
                few = self._is_narrow and kv_batch.query_ends[-1] <= NARROW_ROWS
                with one_thread() if few else contextlib.nullcontext():
                    logits = self.model(**(self._locate(inputs, room) if room else inputs)).logits
            logits_BV = logits[0] if self._keeps_logits else logits[0, [end - 1 for end in kv_batch.query_ends[1:]]]
            # Only the batch's last request can be without a new token.
            scores_BV = self._sampler.apply([str(request.number) for request in ready], logits_BV.float())
            return ready, scores_BV.argmax(-1)[: len(ready)].tolist()

    def _inputs(self, batch: list[tuple[_Request, int]], composed: Batch) -> tuple[KvBatch, dict[str, Any]]:
        """The batch for attention, and the model's inputs."""
        query_ends = list(accumulate((count for _, count in batch), initial=0))
        key_ends = list(accumulate((request.held + count for request, count in batch), initial=0))
        rows = [request.table.rows[: request.held + count] for request, count in batch]
        arrays = {
            "tokens": np.array(composed.token_id_T),
            "positions": np.array(composed.info.position_T),
            "write_rows": np.concatenate([row[-count:] for row, (_, count) in zip(rows, batch, strict=True)]),
            "kept": np.array(query_ends[1:]) - 1,
            "key_ends": np.array(key_ends),
            "key_rows": np.concatenate(rows),
        }
        found = self._tensors(arrays, fixed=self.fixed_shapes and query_ends[-1] == len(batch))
        written, keys = found["write_rows"], found["key_rows"]
        kv_batch = KvBatch(
            pages=self._pages, query_ends=query_ends, key_ends=key_ends, write_row_T=written, key_rows=keys
        )
        inputs = {"input_ids": found["tokens"][None], "position_ids": found["positions"][None]}
        return kv_batch, inputs | ({"logits_to_keep": found["kept"]} if self._keeps_logits else {})

    def _tensors(self, arrays: dict[str, np.ndarray], *, fixed: bool) -> dict[str, torch.Tensor]:
        """Integer vectors on the model's device, in one transfer; if fixed, always in the same memory.

        A fixed vector of key rows has the length of the cache, with any values at its end.
        """
        if self._stream is None and not fixed:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        packed = on_device(torch.from_numpy(np.concatenate(list(arrays.values()))), self.model.device)
        found = dict(zip(arrays, packed.split([len(array) for array in arrays.values()]), strict=True))
        if fixed and len(found["key_rows"]) <= self.kv_tokens:
            for name, values in found.items():
                size = self.kv_tokens if name == "key_rows" else self.max_requests + 1
                memory = self._fixed.setdefault(name, torch.zeros(size, dtype=torch.int64, device=packed.device))
                memory[: len(values)].copy_(values)
                found[name] = memory if name == "key_rows" else memory[: len(values)]
        return found

    def _room(self, batch: KvBatch) -> int:
        """Padded keys of a sequence, if all have one new token and attend in one call, otherwise 0.

        0 too if lengths differ so much that the gathered keys would exceed the cache.
        """
        num_sequences = len(batch.query_ends) - 1
        if not self.fixed_shapes or batch.query_ends[-1] != num_sequences:
            return 0
        longest = max(end - first for first, end in pairwise(batch.key_ends))
        room = min(DecodeRows.room_for(longest), self.kv_tokens)
        return room if room * num_sequences <= self.kv_tokens else 0

    def _locate(self, inputs: dict[str, Any], room: int) -> dict[str, Any]:
        """Add the rows of its keys to the inputs of a decode step."""
        batch: KvBatch = inputs["kv_batch"]
        ends = self._fixed["key_ends"][: len(batch.key_ends)]
        rows = DecodeRows.of(batch.key_rows, ends, room, self.model.dtype)
        return {**inputs, "kv_batch": replace(batch, decode=rows)}

    def _report(self, request: _Request, token: int) -> Output:
        name = str(request.number)
        if (end := self._sampler.broken_end(name)) is not None:
            self._end(request, keep=False)
            return end
        request.tokens.append(token)
        done = len(request.tokens) - request.num_prompt
        logprob = self._sampler.take(name, token)
        finish = finish_of(token, done, request.params, self._eos)
        if finish is not None:
            self._end(request)
        return Output(request.number, token, logprob, finish, reused=(request.reused or 0) if done == 1 else 0)

    def _fail(self, request: _Request, error: Exception) -> Output:
        self._end(request)
        return Output(request.number, None, finish="error", error=plugins.describe(error))

    def _end(self, request: _Request, *, keep: bool = True) -> None:
        """Forget a request; `keep` as in `PageLedger.release`."""
        del self._requests[request.number]
        self._sampler.remove(str(request.number))
        (self._running if request in self._running else self._waiting).remove(request)
        self._ledger.release(request.table, keep=keep)
        self._restarts = False
