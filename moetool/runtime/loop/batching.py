"""Continuous batching over pages of the KV cache.

Source: the scheduler of nano-vllm.

Deviations:
- Prompts are forwarded in chunks beside requests that decode (`moetool.runtime.loop.prompt_chunks`).
- Requests run in order of arrival; none overtakes another. Beyond `unreserved`, one begins only if the KV cache holds
  all running ones at full length. A running request that finds no page takes those of the newest one, which begins
  again, from kept pages if there are any, once another has ended.
"""

import contextlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base.errors import MoetoolError, UsageError
from moetool.kernels.cpu.attention import find_attention_kernel
from moetool.kernels.cpu.matmul import MIN_ELEMENTS
from moetool.kernels.cpu.threads import one_thread
from moetool.models.cache_argument import cache_argument
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.transformers_internals import attention_of
from moetool.runtime.decode_graphs import DecodeGraphs
from moetool.runtime.decoding import PAGE_TOKENS, Batch, is_indexed, row_shapes
from moetool.runtime.experts.copies import on_device
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.kv.indexed import indexed_arguments
from moetool.runtime.kv.kept_prefixes import PrefixFile
from moetool.runtime.kv.latents import keep_latents
from moetool.runtime.kv.ledger import PageLedger, PageTable
from moetool.runtime.kv.paged_attention import PAGED, DecodeRows, paged_attention
from moetool.runtime.kv.pages import KvBatch, KvPages
from moetool.runtime.loop.prompt_chunks import PromptChunks
from moetool.runtime.loop.scheduler import Request, Scheduled, Scheduler
from moetool.runtime.request import Output
from moetool.runtime.steps.recorded_steps import RecordedSteps

_LOG = logging.getLogger(__name__)
NARROW_ROWS = 128
"""Most rows of a forward on one thread where all products of a layer are small: waking others takes longer."""
_CROWDED = 0.15
"""Share of free pages below which prompts wait for requests that decode."""


class Batcher(Scheduler):
    """Continuous batching over one KV cache in pages.

    Args:
        model, max_requests: as for `Scheduler`.
        max_batch_tokens: most tokens of one forward; longer prompts come in chunks.
        kv_tokens: tokens in the KV cache, over all requests.
        unreserved: number of requests that begin whatever their length: if the KV cache proves too small, one of them
            restarts. Further requests begin only if the cache holds all at full length.
        max_prompt_wait_s: time limit of a forward with prompt tokens while others decode
            (`moetool.runtime.loop.prompt_chunks.PromptChunks`; 0: chunks have full size).
        prefix_caching: keep the pages of finished requests, and forward only the part of a prompt without a page.
        first_kv_tokens: initial tokens of the KV cache (`PageLedger`); 0: all.

    Attributes:
        kv_bytes: bytes of the KV cache.
        graphs: runs decode steps once they are recorded (`record_steps`).
        recorded: likewise on a CPU.
        fixed_shapes: whether the sequences of a decode step attend in one call, by tensors of fixed shapes; default on
            a GPU, where many calls cost more than padding.

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
        num_pages, first_pages = (-(-tokens // PAGE_TOKENS) for tokens in (kv_tokens, first_kv_tokens))
        chunks = PromptChunks(max_prompt_wait_s, max_batch_tokens)
        super().__init__(model, max_requests, num_pages * PAGE_TOKENS, max_batch_tokens, chunks)
        self._attention = attention_of(model)
        self.graphs: DecodeGraphs | None = None
        self.recorded: RecordedSteps | None = None
        self.fixed_shapes = model.device.type == "cuda" and not is_indexed(model.config.get_text_config())
        self._unreserved = max_requests if unreserved is None else unreserved
        self._restarts = False  # whether a request lost its pages, and none has ended since
        config = model.config.get_text_config()
        shapes = row_shapes(config)
        self._is_narrow = model.device.type == "cpu" and config.hidden_size**2 < MIN_ELEMENTS
        if model.device.type == "cpu" and model.dtype == torch.bfloat16:
            for layer, shape in zip(config.per_layer_config, shapes, strict=True):
                queries = getattr(layer, "num_attention_heads", None) or 0
                if shape.heads and queries and queries % shape.heads == 0:  # no request waits for a compiler
                    find_attention_kernel(queries // shape.heads, shape.key_width)
        self._pages = KvPages(shapes, num_pages, model.dtype, model.device)
        release = self._pages.return_memory
        self._ledger = PageLedger(num_pages, sharing=prefix_caching, first_pages=first_pages, release=release)
        self.kv_bytes = sum(tensor.nbytes for tensor in self._pages.tensors)
        self._arguments = {cache_argument(model): self._pages, "use_cache": True, **indexed_arguments(model)}
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._prefixes: PrefixFile | None = None
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
        super().close()
        self._fixed.clear()
        self.graphs = self.recorded = None
        self._prefixes = None  # it refers to the pages
        self._pages.close()

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

    def record_steps(self, layers: Sequence[MoeLayer], runtime: ExpertRuntime) -> None:
        """Record decode steps: on a CPU as programs, now; on a GPU as CUDA graphs, if their shapes are fixed."""
        if self.fixed_shapes:
            self.graphs = DecodeGraphs(self.model, layers, runtime, self._locate)
        elif self.model.device.type == "cpu":
            self.recorded = RecordedSteps(self.model, layers, runtime, self._pages)

    def step(self) -> list[Output]:
        """Run one forward (`Scheduler.step`), on a stream of its own on a GPU."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return super().step()

    def _schedule(self) -> Scheduled:
        """Choose the requests of the next forward and the number of tokens of each, and give them pages.

        Requests that decode come first, then prompts that have begun, then waiting ones.
        """
        self._ledger.begin_forward()
        decoding = [request for request in self._running if request.decodes]
        room = min(self.max_batch_tokens, self._chunks.tokens(decoding=bool(decoding)) + len(decoding))
        crowded = self._ledger.free_share < _CROWDED
        batch: Scheduled = []
        for request in [*decoding, *(request for request in self._running if not request.decodes)]:
            if not room or (crowded and batch and not request.decodes):
                break
            count = min(len(request.tokens) - request.num_cached, room)
            if request in self._running and self._make_room(request, count, batch):
                batch.append((request, count))
                room -= count
        while self._waiting and room and not (crowded and batch) and self._may_begin(self._waiting[0]):
            request = self._waiting[0]
            request.cache = request.cache or PageTable(request.most_tokens)
            held = 0 if request.params.return_routes else self._ledger.match(request.cache, request.tokens)
            count = min(len(request.tokens) - held, room)
            if not self._ledger.reserve(request.cache, held + count):
                self._ledger.release(request.cache)
                break
            request.num_cached, request.num_to_prefill = held, len(request.tokens)
            if request.reused is None:
                request.reused = held
            self._running.append(self._waiting.pop(0))
            batch.append((request, count))
            room -= count
        return batch

    def _may_begin(self, request: Request) -> bool:
        if not self._running:
            return True
        if self._restarts or len(self._running) >= self.max_requests:
            return False
        pages = sum(-(-other.most_tokens // PAGE_TOKENS) for other in (*self._running, request))
        return len(self._running) < self._unreserved or pages <= self._ledger.num_pages

    def _make_room(self, request: Request, count: int, batch: Scheduled) -> bool:
        """Give a running request pages for its next tokens, if need be from newer ones; returns whether there are any.

        Without them it waits for another forward, or to begin again.
        """
        while not self._ledger.reserve(request.cache, request.num_cached + count):
            scheduled = [other for other, _ in batch]  # compared by identity
            newest = next(other for other in reversed(self._running) if other not in scheduled)
            assert len(self._running) > 1, "a request alone fits: it passed check"
            self._running.remove(newest)
            self._waiting.insert(0, newest)
            self._ledger.release(newest.cache)
            newest.num_cached = newest.num_to_prefill = 0
            self._restarts = True
            if newest is request:
                return False
        return True

    def _forward(self, batch: Scheduled, composed: Batch) -> torch.Tensor:
        kv_batch, inputs = self._inputs(batch, composed)
        self._pages.batch = kv_batch
        inputs |= {"kv_batch": kv_batch, **self._arguments}
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
        return logits_BV.float()  # only the batch's last request can be without a new token

    def _inputs(self, batch: Scheduled, composed: Batch) -> tuple[KvBatch, dict[str, Any]]:
        """The batch for attention, and the model's inputs: of a step of fixed shapes always in the same memory."""
        query_ends = list(accumulate((count for _, count in batch), initial=0))
        key_ends = list(accumulate((request.num_cached + count for request, count in batch), initial=0))
        rows = [request.cache.rows[: request.num_cached + count] for request, count in batch]
        arrays = {
            "tokens": np.array(composed.token_id_T),
            "positions": np.array(composed.info.position_T),
            "write_rows": np.concatenate([row[-count:] for row, (_, count) in zip(rows, batch, strict=True)]),
            "kept": np.array(query_ends[1:]) - 1,
            "key_ends": np.array(key_ends),
            "key_rows": np.concatenate(rows),
        }
        device = self.model.device
        if device.type == "cpu":  # without a copy: key rows may be many
            tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        else:
            packed = on_device(torch.from_numpy(np.concatenate(list(arrays.values()))), device)
            tensors = dict(zip(arrays, packed.split([len(array) for array in arrays.values()]), strict=True))
        if self.fixed_shapes and query_ends[-1] == len(batch) and key_ends[-1] <= self.kv_tokens:
            for name, values in tensors.items():  # recorded steps read as many key rows as the cache has
                size = self.kv_tokens if name == "key_rows" else self.max_requests + 1
                memory = self._fixed.setdefault(name, torch.zeros(size, dtype=torch.int64, device=device))
                memory[: len(values)].copy_(values)
                tensors[name] = memory if name == "key_rows" else memory[: len(values)]
        kv_batch = KvBatch(self._pages, query_ends, key_ends, tensors["write_rows"], tensors["key_rows"])
        inputs = {"input_ids": tensors["tokens"][None], "position_ids": tensors["positions"][None]}
        return kv_batch, inputs | ({"logits_to_keep": tensors["kept"]} if self._keeps_logits else {})

    def _room(self, batch: KvBatch) -> int:
        """Padded keys of a sequence, if all have one new token and attend in one call, otherwise 0.

        0 too if lengths differ so much that the gathered keys would exceed the cache.
        """
        if not self.fixed_shapes or batch.query_ends[-1] != (count := len(batch.query_ends) - 1):
            return 0
        longest = max(end - first for first, end in pairwise(batch.key_ends))
        room = min(DecodeRows.room_for(longest), self.kv_tokens)
        return room if room * count <= self.kv_tokens else 0

    def _locate(self, inputs: dict[str, Any], room: int) -> dict[str, Any]:
        """Add the rows of its keys to the inputs of a decode step."""
        batch: KvBatch = inputs["kv_batch"]
        ends = self._fixed["key_ends"][: len(batch.key_ends)]
        rows = DecodeRows.of(batch.key_rows, ends, room, self.model.dtype)
        return {**inputs, "kv_batch": replace(batch, decode=rows)}

    def _note(self, request: Request) -> None:
        self._ledger.register(request.cache, request.tokens, request.num_cached)

    def _release(self, request: Request, finish: str | None) -> None:
        if request.cache is not None:
            self._ledger.release(request.cache, keep=finish != "error")
        self._restarts = False
