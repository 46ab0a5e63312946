"""Capture runs: prefill and decode every prompt and record its routing.

The prompts' order fixes the batches in advance. Each finished batch is kept on disk (`moetool.capture.resume`), so an
interrupted capture resumes at the first missing one and gives the same trace.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base import durable
from moetool.base.errors import MoetoolError
from moetool.capture.batch_writer import BatchWriter
from moetool.capture.job import CaptureOptions, CapturePlan, Item, plan_capture, provenance, row_bytes
from moetool.capture.resume import CaptureFolder, open_stage
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_full, parse_device, parse_dtype
from moetool.prompts.gather import Prompt
from moetool.runtime.decoding import Batch
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.own_caches import OwnCaches, open_batcher
from moetool.runtime.recording.recorder import GateRecorder
from moetool.runtime.request import SamplingParams
from moetool.trace.reader import MANIFEST, Trace
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter, speller

CHUNK_TOKENS, CHUNK_BYTES = 1024, 1 << 23
"""Rows to convert and write together, unless their batch ends earlier."""

_LOG = logging.getLogger(__name__)

OpenModel = Callable[[Checkpoint, torch.dtype, torch.device], LoadedModel]


def ignore_note(note: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Execution of a capture, without effect on its rows.

    Attributes:
        open_model: loads the model, whole or with its experts in a pool.
        overwrite: replace `out`.
        resume: continue an interrupted run of the same arguments, if there is one.
        on_progress: called with the number of finished prompts.
        on_note: called with messages for the user.
    """

    open_model: OpenModel = load_full
    overwrite: bool = False
    resume: bool = False
    on_progress: Callable[[int], None] | None = None
    on_note: Callable[[str], None] = ignore_note


NEW_RUN = RunSetup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Result of a capture.

    Attributes:
        too_long: number of prompts left out because they exceed the model's context.
        empty: number of prompts left out because they have no token.
        seconds: seconds of this run, without interrupted ones.
    """

    out: Path
    requests: int
    prompt_tokens: int
    new_tokens: int
    too_long: int
    empty: int
    bytes: int
    seconds: float

    @property
    def tokens(self) -> int:
        """Return the rows of the trace: forwarded tokens, all but the last of each answer."""
        return self.prompt_tokens + self.new_tokens - self.requests

    @property
    def skipped(self) -> int:
        """Return the number of prompts left out."""
        return self.too_long + self.empty

    def to_json(self) -> dict[str, Any]:
        """Return the summary, for --json."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "out": str(self.out), "tokens": self.tokens, "skipped": self.skipped}


def capture(
    model: str,
    prompts: Iterable[Prompt],
    out: Path,
    options: CaptureOptions,
    setup: RunSetup = NEW_RUN,
) -> Captured:
    """Run a model over prompts and record its routers.

    Args:
        model: `reference`, a folder or a hub name.

    Effects: loads the model; writes the trace to `out`, whole or not at all. An interruption leaves the finished
    batches in `stage_path(out)`.

    Raises:
        UsageError: an argument is invalid, `out` exists, or an interrupted run exists and `setup.resume` is false.
        MismatchError: the interrupted run had other arguments.
        CapacityError: no prompt fits into the model's context, the model not into memory, or the rows not onto the
            disk.
        MoetoolError: the disk or a forward failed.
    """
    began = time.perf_counter()
    plan = open_plan(model, prompts, out, options, setup)
    with enter_stage(plan, out, setup) as stage:
        if not stage.finished():
            kept, on_progress = stage.kept_prompts(), setup.on_progress
            progress = None if on_progress is None else lambda done: on_progress(kept + done)
            run_batches(stage, stage.missing(), setup.open_model, progress)
        return finish(stage, setup.overwrite, began)


def open_plan(
    model: str,
    prompts: Iterable[Prompt],
    out: Path,
    options: CaptureOptions,
    setup: RunSetup,
) -> CapturePlan:
    """Call `plan_capture`, after cheap checks."""
    parse_dtype(options.dtype)
    parse_device(options.device)
    if not setup.resume:
        durable.require_absent(out, setup.overwrite, MANIFEST)
    plan = plan_capture(Checkpoint.open(model), list(prompts), options, pooled=setup.open_model is not load_full)
    _LOG.info(
        "capture of %s: %d prompts in %d batches of %d, %d too long, %d empty; %s",
        *(plan.spec.name, plan.num_prompts, len(plan.batches), plan.options.batch_size, plan.too_long, plan.empty),
        plan.facts,
    )
    return plan


def enter_stage(plan: CapturePlan, out: Path, setup: RunSetup) -> AbstractContextManager[CaptureFolder]:
    """Call `open_stage` with a run's setup."""
    return open_stage(out, plan, resume=setup.resume, overwrite=setup.overwrite, on_note=setup.on_note)


def run_batches(
    stage: CaptureFolder,
    batches: Sequence[int],
    open_model: OpenModel,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Forward some batches of a capture, and store their rows. Effects: loads the model meanwhile."""
    if not batches:
        return
    plan = stage.plan
    device = parse_device(plan.options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _LOG.info("loading %s in %s on %s", plan.checkpoint.path, plan.options.dtype, device)
    loaded = open_model(plan.checkpoint, parse_dtype(plan.options.dtype), device)
    try:
        with BatchWriter(stage) as writer:
            forward_batches(loaded, plan, batches, writer, on_progress)
    finally:
        loaded.close()


def forward_batches(
    loaded: LoadedModel,
    plan: CapturePlan,
    batches: Sequence[int],
    writer: BatchWriter | None,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Forward some batches of a capture with a loaded model; return the number of new tokens.

    Args:
        writer: receives the rows; None records nothing, to measure the cost of recording.
    """
    run = _Run(loaded, plan, writer)
    try:
        for batch in batches:
            run.batch(batch)
            _LOG.debug("batch %d ended: %d prompts, %d new tokens so far", batch, run.prompts, run.new_tokens)
            if on_progress is not None:
                on_progress(run.prompts)
        return run.new_tokens
    finally:
        run.close()


def finish(stage: CaptureFolder, overwrite: bool, began: float) -> Captured:
    """Assemble the trace from the batches, which must all be finished.

    Args:
        began: start of the capture by `time.perf_counter`.

    Effects: writes the output, whole or not at all, then removes the stage.
    """
    plan, out = stage.plan, stage.out
    if not stage.finished():
        _LOG.info("writing the trace %s from %d batches", out, len(plan.batches))
        keep, ahead, size = plan.options.keep, plan.options.ahead, plan.options.batch_size
        with (
            durable.staged_directory(out, overwrite, MANIFEST, locked=True) as folder,
            TraceWriter(folder, plan.spec, keep, ahead, resident=plan.options.resident) as writer,
        ):
            stage.copy_to(writer)
            composition = {"kind": "sequential"} if size == 1 else {"kind": "batch", "size": size}
            spell = speller(plan.checkpoint.tokenizer)
            writer.finish(composition=composition, provenance=provenance(plan), spell=spell)
    stage.remove()
    trace = Trace(out)
    return Captured(
        out=out,
        requests=len(trace.requests),
        prompt_tokens=sum(trace.requests["prompt_tokens"].to_pylist()),
        new_tokens=sum(trace.requests["new_tokens"].to_pylist()),
        too_long=plan.too_long,
        empty=plan.empty,
        bytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        seconds=time.perf_counter() - began,
    )


class _Run:
    """State of running batches."""

    def __init__(self, loaded: LoadedModel, plan: CapturePlan, writer: BatchWriter | None) -> None:
        self.prompts = self.new_tokens = 0
        self._loaded = loaded
        self._plan = plan
        self._writer = writer
        self._batch: Batch | None = None
        self._first_forward: int | None = None  # of the batch, whose forwards count from 0
        self._chunk_tokens = max(1, min(CHUNK_TOKENS, CHUNK_BYTES // row_bytes(plan.schema)))
        # Mean embedding over a chunked iteration: (iteration, sum, tokens) by request.
        self._embedding: dict[int, tuple[int, np.ndarray, int]] = {}
        size = plan.options.batch_size
        self._batcher: Batcher | OwnCaches = open_batcher(
            loaded.model, max_requests=size, kv_tokens=size * (plan.width + 16)
        )
        self._batcher.on_forward = self._on_forward
        options = plan.options
        self._recorder = (
            None
            if writer is None
            else GateRecorder(loaded.model, loaded.layers, options.keep, options.ahead, resident=options.resident)
        )

    def close(self) -> None:
        """Restore the model."""
        if self._recorder is not None:
            self._recorder.close()
        self._batcher.close()

    def batch(self, number: int) -> None:
        """Forward one batch."""
        items = self._plan.batches[number]
        new_tokens = self._forward(items)
        if self._writer is not None:
            self._flush_embeddings(self._writer)
            self._writer.end_batch(number, new_tokens)
        self.prompts += len(items)
        self.new_tokens += sum(new_tokens)

    def _forward(self, items: list[Item]) -> list[int]:
        """Return the number of new tokens of each prompt."""
        first = items[0].request
        new_tokens = [0] * len(items)
        held_tokens, self._first_forward = 0, None
        if self._recorder is not None:
            self._recorder.begin_batch()
        for item in items:
            self._batcher.add(item.request, item.ids.tolist(), SamplingParams(max_tokens=item.max_tokens))
        while not self._batcher.idle:
            outputs = self._batcher.step()
            self._loaded.end_forward()
            if failed := next((o for o in outputs if o.error is not None), None):
                prompt_id = items[failed.request - first].prompt.prompt_id
                raise MoetoolError(f"the model failed on prompt {prompt_id}: {failed.error}")
            assert self._batch is not None
            if self._recorder is not None:
                self._recorder.hold(self._batch)
                held_tokens += len(self._batch.token_id_T)
                if held_tokens >= self._chunk_tokens:
                    self._record()
                    held_tokens = 0
            for output in outputs:
                new_tokens[output.request - first] += 1
        if held_tokens:
            self._record()
        return new_tokens

    def _record(self) -> None:
        """Write the forwards in the recorder."""
        assert self._recorder is not None and self._writer is not None
        rows, embedding_TD = self._recorder.rows()
        if self._first_forward is None:
            self._first_forward = int(rows.forward_T[0])
        rows.forward_T -= np.int32(self._first_forward)
        self._writer.append(rows)
        if embedding_TD is not None:
            self._add_embeddings(self._writer, rows, embedding_TD)

    def _on_forward(self, batch: Batch) -> None:
        self._batch = batch
        self._loaded.begin_forward(batch.info)

    def _add_embeddings(self, writer: BatchWriter, rows: TokenBatch, embedding_TD: np.ndarray) -> None:
        turns = (np.diff(rows.request_T, prepend=-1) != 0) | (np.diff(rows.forward_T, prepend=-1) != 0)
        starts = np.flatnonzero(turns).tolist()  # starts of each request's tokens in a forward
        keys = zip(rows.request_T[starts].tolist(), rows.iteration_T[starts].tolist(), strict=True)
        for (request, iteration), start, end in zip(keys, starts, [*starts[1:], len(rows)], strict=True):
            count = end - start
            total = embedding_TD[start] if count == 1 else embedding_TD[start:end].sum(axis=0)
            held = self._embedding.get(request)
            if held is not None and held[0] == iteration:
                total, count = held[1] + total, held[2] + count
            elif held is not None:
                writer.add_embedding(request, held[0], held[1] / held[2])
            self._embedding[request] = (iteration, total, count)

    def _flush_embeddings(self, writer: BatchWriter) -> None:
        for request, (iteration, total, count) in self._embedding.items():
            writer.add_embedding(request, iteration, total / count)
        self._embedding.clear()
