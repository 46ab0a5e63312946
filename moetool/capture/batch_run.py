"""Forward the batches of a capture: every prompt of a batch, then its answers, a chosen number of requests together."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from moetool.base.errors import MoetoolError
from moetool.base.json_files import JsonRecord
from moetool.base.tables import count, percent, significant
from moetool.base.types import Phase
from moetool.capture.batch_writer import BatchWriter
from moetool.capture.decode_width import PROBE_STEPS, DecodeWidth
from moetool.capture.job import CapturePlan, Item, row_bytes
from moetool.models.loading import LoadedModel
from moetool.models.router_hooks import watch
from moetool.runtime.decoding import Batch
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.request import SamplingParams
from moetool.runtime.sizing import pages
from moetool.trace.rows import TokenBatch

_ROWS_TOGETHER, _BYTES_TOGETHER = 1024, 1 << 23
"""Rows to convert and write together, unless their batch ends earlier."""

OnProgress = Callable[[int, int, str], None]
"""Called with the tokens forwarded so far, all tokens, and what was read, for display."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertReads(JsonRecord):
    """Experts that a capture read.

    Attributes:
        experts: experts read from disk.
        host_experts: experts copied from host memory.
        waiting_share: share of the time of forwards that the model waited for experts.
        tokens: tokens forwarded meanwhile.
    """

    experts: int
    disk_bytes: int
    host_experts: int
    host_bytes: int
    waiting_share: float
    tokens: int

    @classmethod
    def total(cls, reads: "Sequence[ExpertReads]") -> "ExpertReads":
        """Return the reads of several processes; the mean share of waiting is by tokens."""
        counts = {name: sum(getattr(one, name) for one in reads) for name in cls.__slots__ if name != "waiting_share"}
        waiting = sum(one.waiting_share * one.tokens for one in reads) / max(1, counts["tokens"])
        return cls(**counts, waiting_share=waiting)

    def describe(self) -> str:
        host = f", {count(self.host_bytes, 'B')} from host memory" if self.host_bytes else ""
        return (
            f"{count(self.experts)} experts read ({count(self.disk_bytes, 'B')}{host}; "
            f"{significant(self.experts / max(1, self.tokens), 3)} per token), "
            f"{percent(self.waiting_share)} of the time waiting for them"
        )


def progress_note(tokens: int, seconds: float, reads: ExpertReads | None) -> str:
    """Describe the rate of a run, and its reads."""
    note = f"{significant(tokens / max(seconds, 1e-9), 3)} tokens/s"
    if reads is not None and reads.tokens:
        read = count(reads.disk_bytes + reads.host_bytes, "B")
        note += f", {reads.experts / reads.tokens:.2f} experts/token, {read} read"
    return note


class BatchRun:
    """Forwards batches of a capture with a loaded model.

    Args:
        writer: receives the rows; None records nothing.
        on_progress: called after each forward, and after each layer of the first.

    Attributes:
        prompts: prompts of the finished batches.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        plan: CapturePlan,
        writer: BatchWriter | None,
        on_progress: OnProgress | None = None,
        done_tokens: int = 0,
    ) -> None:
        self.prompts = self.new_tokens = 0
        self._loaded = loaded
        self._plan = plan
        self._writer = writer
        self._on_progress, self._done_tokens, self._total_tokens = on_progress, done_tokens, plan.num_tokens
        self._tokens, self._forward_seconds, self._began = 0, 0.0, time.perf_counter()
        self._batch: Batch | None = None
        self._first_forward: int | None = None  # of the batch, whose forwards count from 0
        self._rows_together = max(1, min(_ROWS_TOGETHER, _BYTES_TOGETHER // row_bytes(plan.schema)))
        # Mean embedding over a chunked iteration: (iteration, sum, tokens) by request.
        self._embedding: dict[int, tuple[int, np.ndarray, int]] = {}
        self._composition = composition = plan.composition
        self._chunk_tokens = max(composition.most, composition.chunk_tokens)
        self._dense_bytes = plan.checkpoint.dense_token_bytes(loaded.model.dtype)
        self._batcher = open_batcher(
            loaded.model,
            max_requests=composition.most,
            kv_tokens=composition.kv_tokens + 16,
            max_batch_tokens=self._chunk_tokens,
        )
        self._batcher.on_forward = self._on_forward
        pool = loaded.pool
        if isinstance(self._batcher, Batcher) and isinstance(pool, ExpertRuntime) and loaded.device.type == "cpu":
            self._batcher.record_steps(loaded.layers, pool)
        options = plan.options
        self._recorder = (
            None
            if writer is None
            else GateRecorder(loaded.model, loaded.layers, options.keep, options.ahead, resident=options.resident)
        )
        # The first forward may read every expert, which takes a while.
        shown = loaded.layers[1:] if on_progress is not None else []
        self._first_layers = [watch(layer, partial(self._on_layer, layer.index)) for layer in shown]

    def close(self) -> None:
        """Restore the model."""
        self._unwatch_layers()
        if self._recorder is not None:
            self._recorder.close()
        self._batcher.close()

    def reads(self) -> ExpertReads | None:
        """Return what was read so far; None if every expert was in memory from the start."""
        if not isinstance(self._loaded.pool, ExpertRuntime):
            return None
        stats = self._loaded.pool.store.stats
        return ExpertReads(
            experts=stats.reads,
            disk_bytes=stats.bytes_read,
            host_experts=stats.host_hits,
            host_bytes=stats.host_bytes,
            waiting_share=min(1.0, stats.stall_seconds / max(self._forward_seconds, 1e-9)),
            tokens=self._tokens,
        )

    def batch(self, number: int) -> None:
        items = self._plan.batches[number]
        decoded = self._forward(items)
        new_tokens = [
            item.answer_tokens or (new if item.max_tokens else 0) for item, new in zip(items, decoded, strict=True)
        ]
        if self._writer is not None:
            self._flush_embeddings(self._writer)
            self._writer.end_batch(number, new_tokens)
        self.prompts += len(items)
        self.new_tokens += sum(new_tokens)

    def _forward(self, items: list[Item]) -> list[int]:
        """Return the number of sampled tokens of each prompt."""
        first = items[0].request
        new_tokens = [0] * len(items)
        held_tokens, self._first_forward = 0, None
        waiting, running = deque(items), dict[int, int]()  # tokens at full length of those that run
        slots = 0 if self._recorder is None else self._composition.slots
        width = DecodeWidth(self._plan.spec, slots, [item.request for item in items], self._dense_bytes)
        if self._recorder is not None:
            self._recorder.begin_batch()
        unread = 0  # prompts that have begun, without a new token
        while waiting or running:
            free = self._composition.room_tokens - sum(running.values())
            if not running or (width.width >= len(running) and free >= self._composition.refill_tokens):
                unread += self._begin(waiting, running)
            self._batcher.max_batch_tokens = self._chunk_tokens if unread else width.width
            began = time.perf_counter()
            outputs = self._batcher.step()
            self._loaded.end_forward()
            self._forward_seconds += time.perf_counter() - began
            if failed := next((o for o in outputs if o.error is not None), None):
                prompt_id = items[failed.request - first].prompt.prompt_id
                raise MoetoolError(f"the model failed on prompt {prompt_id}: {failed.error}")
            assert self._batch is not None
            for output in outputs:
                new_tokens[output.request - first] += 1
                unread -= new_tokens[output.request - first] == 1
                if output.finish is not None:  # what an early end leaves out is done too
                    del running[output.request]
                    self._done_tokens += max(
                        0, items[output.request - first].max_tokens - new_tokens[output.request - first]
                    )
            self._report(len(self._batch.token_id_T))
            if self._recorder is not None:
                self._recorder.hold(self._batch)
                held_tokens += len(self._batch.token_id_T)
                choosing = not width.fixed and (not unread or held_tokens >= PROBE_STEPS)
                if held_tokens >= self._rows_together or choosing:
                    width.observe(self._record(), len(running))
                    held_tokens = 0
        if held_tokens:
            self._record()
        return new_tokens

    def _begin(self, waiting: deque[Item], running: dict[int, int]) -> int:
        """Begin as many waiting prompts as may run at full length; returns their number."""
        before, free = len(waiting), self._composition.room_tokens - sum(running.values())
        while waiting and len(running) < self._composition.most:
            item = waiting[0]
            free -= (tokens := pages(item.full_tokens))
            if running and free < 0:
                break
            running[item.request] = tokens
            self._batcher.add(item.request, item.ids.tolist(), SamplingParams(max_tokens=max(1, item.max_tokens)))
            waiting.popleft()
        return before - len(waiting)

    def _on_layer(self, index: int, experts: Tensor, weights: Tensor) -> None:
        """Report the share of a forward that this many layers are."""
        assert self._batch is not None and self._on_progress is not None
        tokens = len(self._batch.token_id_T) * index // len(self._loaded.layers)
        note = progress_note(tokens, time.perf_counter() - self._began, None)
        self._on_progress(self._done_tokens + tokens, self._total_tokens, note)

    def _unwatch_layers(self) -> None:
        while self._first_layers:
            self._first_layers.pop().remove()

    def _report(self, tokens: int) -> None:
        """Count and report tokens of a forward."""
        self._unwatch_layers()
        self._tokens += tokens
        self._done_tokens += tokens
        if self._on_progress is not None:
            note = progress_note(self._tokens, time.perf_counter() - self._began, self.reads())
            self._on_progress(self._done_tokens, self._total_tokens, note)

    def _record(self) -> TokenBatch:
        """Write the forwards in the recorder, and return their rows."""
        assert self._recorder is not None and self._writer is not None
        rows, embedding_TD = self._recorder.rows()
        if self._first_forward is None:
            self._first_forward = int(rows.forward_T[0])
        rows.forward_T -= np.int32(self._first_forward)
        if self._plan.options.answers:
            self._mark_answers(rows)
        self._writer.append(rows)
        if embedding_TD is not None:
            self._add_embeddings(self._writer, rows, embedding_TD)
        return rows

    def _mark_answers(self, rows: TokenBatch) -> None:
        """Number the tokens of given answers as if they had been decoded one by one."""
        for request in np.unique(rows.request_T).tolist():
            mine = rows.request_T == request
            answer = mine & (rows.position_T >= self._plan.item(request).prompt_tokens)
            rows.phase_T[answer] = Phase.DECODE
            rows.iteration_T[answer] = 1 + rows.position_T[answer] - self._plan.item(request).prompt_tokens

    def _on_forward(self, batch: Batch) -> None:
        self._batch = batch
        self._loaded.begin_forward(batch.info)

    def _add_embeddings(self, writer: BatchWriter, rows: TokenBatch, embedding_TD: np.ndarray) -> None:
        turns = np.zeros(len(rows), bool)
        for column in (rows.request_T, rows.forward_T, rows.iteration_T):
            turns |= np.diff(column, prepend=-1) != 0
        starts = np.flatnonzero(turns).tolist()  # starts of each request's tokens in a forward
        keys = zip(rows.request_T[starts].tolist(), rows.iteration_T[starts].tolist(), strict=True)
        for (request, iteration), start, end in zip(keys, starts, [*starts[1:], len(rows)], strict=True):
            size = end - start
            total = embedding_TD[start] if size == 1 else embedding_TD[start:end].sum(axis=0)
            held = self._embedding.get(request)
            if held is not None and held[0] == iteration:
                total, size = held[1] + total, held[2] + size
            elif held is not None:
                writer.add_embedding(request, held[0], held[1] / held[2])
            self._embedding[request] = (iteration, total, size)

    def _flush_embeddings(self, writer: BatchWriter) -> None:
        for request, (iteration, total, size) in self._embedding.items():
            writer.add_embedding(request, iteration, total / size)
        self._embedding.clear()
