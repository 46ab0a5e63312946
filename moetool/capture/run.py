"""Capture runs: prefill and decode every prompt and record its routing.

The composition fixes the batches in advance (`moetool.capture.composition`). Each finished batch is kept on disk
(`moetool.capture.resume`), so an interrupted capture resumes at the first missing one and gives the same trace.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moetool.base import durable
from moetool.base.tables import aligned
from moetool.capture.automatic import CaptureMemory, CaptureSetup, choose
from moetool.capture.batch_run import BatchRun, ExpertReads, OnProgress
from moetool.capture.batch_writer import BatchWriter
from moetool.capture.composition import Composition, stored_composition
from moetool.capture.estimate import Lengths
from moetool.capture.job import CaptureOptions, CapturePlan, plan_capture, provenance, read_prompts
from moetool.capture.resume import CaptureFolder, open_stage, resumed_threads, stored_facts
from moetool.measuring.fit import spoken
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import LoadedModel, load_full, parse_device, parse_dtype
from moetool.prompts.gather import Prompt
from moetool.trace.reader import MANIFEST, Trace
from moetool.trace.writer import TraceWriter, speller

_MOST_REFUSED = 20  # lines about prompts that are left out

_LOG = logging.getLogger(__name__)

OpenModel = Callable[[Checkpoint, torch.dtype, torch.device], LoadedModel]


def ignore_note(note: str) -> None:
    """Ignore a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Execution of a capture, without effect on its rows.

    Attributes:
        memory: wishes for memory and policy.
        open_model: loads the model instead, whole or with its experts in a pool of its own choice.
        overwrite: replace `out`.
        resume: continue an interrupted run of the same arguments, if there is one.
        on_progress: called after each forward (`OnProgress`).
        on_note: called with messages for the user.
    """

    memory: CaptureMemory = field(default_factory=CaptureMemory)
    open_model: OpenModel | None = None
    overwrite: bool = False
    resume: bool = False
    on_progress: OnProgress | None = None
    on_note: Callable[[str], None] = ignore_note


NEW_RUN = RunSetup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Result of a capture.

    Attributes:
        too_long: number of prompts left out because they exceed the model's context.
        empty: number of prompts left out because they have no token.
        refused: why prompts were left out that the model cannot read.
        tokens: rows of the trace: forwarded tokens, all but the last of each answer.
        seconds: seconds of this run, without interrupted ones.
        reads: reads of this run, of all nodes; None: every expert was in memory.
    """

    out: Path
    requests: int
    prompt_tokens: int
    new_tokens: int
    too_long: int
    empty: int
    refused: tuple[str, ...]
    tokens: int
    bytes: int
    seconds: float
    reads: ExpertReads | None = None

    @property
    def skipped(self) -> int:
        """Return the number of prompts left out."""
        return self.too_long + self.empty + len(self.refused)

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__}
        reads = None if self.reads is None else self.reads.to_json()
        return {**values, "out": str(self.out), "skipped": self.skipped, "reads": reads}


def capture(
    model: str, prompts: Iterable[Prompt], out: Path, options: CaptureOptions, setup: RunSetup = NEW_RUN
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
    plan, chosen = open_plan(model, prompts, out, options, setup)
    with enter_stage(plan, chosen, out, setup) as stage:
        reads = None
        if not stage.finished:
            reads = run_batches(stage, stage.missing(), chosen.open_model, setup.on_progress)
        return finish(stage, setup.overwrite, began, reads)


def open_plan(
    model: str, prompts: Iterable[Prompt], out: Path, options: CaptureOptions, setup: RunSetup
) -> "tuple[CapturePlan, ChosenRun]":
    """Plan a capture, after cheap checks, as its interrupted run was composed; returns how it runs too."""
    if options.dtype is not None:
        parse_dtype(options.dtype)
    if options.device is not None:
        parse_device(options.device)
    if setup.resume:
        options = resumed_threads(options, out)
    else:
        durable.require_absent(out, setup.overwrite, MANIFEST)
    checkpoint = Checkpoint.open(model)
    read = read_prompts(prompts, checkpoint, options)
    composition = stored_composition(stored_facts(out), len(read.items)) if setup.resume else None
    if options.batch_size is not None and composition is not None and composition.most != options.batch_size:
        composition = None  # the stage refuses the difference
    if setup.memory.composition is None:
        setup = replace(setup, memory=replace(setup.memory, composition=composition))
    chosen = choose_run(checkpoint, read.lengths, options, setup)
    plan = plan_capture(checkpoint, read, chosen.options, pooled=chosen.pooled, composition=chosen.composition)
    _LOG.info(
        "capture of %s: %d prompts in %d batches, %d too long, %d empty, %d refused; %s",
        *(plan.spec.name, plan.num_prompts, len(plan.batches), plan.too_long, plan.empty, len(plan.refused)),
        plan.facts,
    )
    return plan, chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRun:
    """How a machine runs a capture.

    Attributes:
        options: with device and data type.
        composition: the prompts that run together; None: batches of `options.batch_size`.
        open_model: loads the model.
        setup: what was chosen, and why; None: by the caller.
    """

    options: CaptureOptions
    composition: Composition | None
    open_model: OpenModel
    setup: CaptureSetup | None = None

    @property
    def pooled(self) -> bool:
        """Whether experts are computed from a pool."""
        return self.open_model is not load_full

    def notes(self, checkpoint: Checkpoint, folder: Path) -> list[str]:
        """Describe the choices with their reasons, and the time of a large capture. Args: as of `cost_here`."""
        if self.setup is None:
            return []
        choices = [*self.setup.choices]
        if (cost := self.setup.cost_here(checkpoint, folder)) is not None:
            seconds = f"{spoken(cost.read_s)} of reading, {spoken(cost.compute_s)} of computing"
            choices.append(("time", seconds, f"at most, at rates measured here and in {folder}"))
        if self.pooled:
            return aligned(choices)
        return [*aligned(choices), "every expert is in memory, because column resident needs a second forward"]


def choose_run(checkpoint: Checkpoint, lengths: Lengths, options: CaptureOptions, setup: RunSetup) -> ChosenRun:
    """Choose what the user has not set, for this machine. Raises: as `moetool.capture.automatic.choose`."""
    if setup.open_model is not None:
        return ChosenRun(options=options, composition=setup.memory.composition, open_model=setup.open_model)
    given = {"device": options.device, "dtype": options.dtype}
    given = {name: value for name, value in given.items() if value is not None}
    chosen = choose(checkpoint, lengths, given, memory=setup.memory, batch_size=options.batch_size)
    composition, open_model = chosen.composition, chosen.open_model
    if "resident" in options.keep and setup.memory.device_memory_bytes is None:
        composition, open_model = replace(composition, slots=0), load_full
    return ChosenRun(
        options=replace(options, device=chosen.options.device, dtype=chosen.options.dtype),
        composition=composition,
        open_model=open_model,
        setup=chosen,
    )


def left_out(refused: Sequence[str]) -> list[str]:
    """Return notes on prompts that are left out, from why they were refused."""
    notes = [f"left out: {why}" for why in refused[:_MOST_REFUSED]]
    more = len(refused) - _MOST_REFUSED
    return notes if more <= 0 else [*notes, f"left out: {more:,} more prompts"]


@contextmanager
def enter_stage(plan: CapturePlan, chosen: ChosenRun, out: Path, setup: RunSetup) -> Iterator[CaptureFolder]:
    """Call `open_stage` with a run's setup; notes follow once the output is known to be writable."""
    with open_stage(out, plan, resume=setup.resume, overwrite=setup.overwrite, on_note=setup.on_note) as stage:
        for note in (*chosen.notes(plan.checkpoint, out.absolute().parent), *left_out(plan.refused)):
            setup.on_note(note)
        yield stage


def run_batches(
    stage: CaptureFolder, batches: Sequence[int], open_model: OpenModel, on_progress: OnProgress | None = None
) -> ExpertReads | None:
    """Forward some batches of a capture, and store their rows; returns what was read.

    Effects: loads the model meanwhile.
    """
    if not batches:
        return None
    loaded = load(stage.plan, open_model)
    try:
        with BatchWriter(stage) as writer:
            return forward_batches(loaded, stage.plan, batches, writer, on_progress)
    finally:
        loaded.close()


def load(plan: CapturePlan, open_model: OpenModel) -> LoadedModel:
    device, dtype = parse_device(plan.options.device or "cpu"), parse_dtype(plan.options.dtype or "float32")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _LOG.info("loading %s in %s on %s", plan.checkpoint.path, dtype, device)
    return open_model(plan.checkpoint, dtype, device)


def forward_batches(
    loaded: LoadedModel,
    plan: CapturePlan,
    batches: Sequence[int],
    writer: BatchWriter | None,
    on_progress: OnProgress | None = None,
) -> ExpertReads | None:
    """Forward some batches of a capture with a loaded model; returns what was read.

    Args:
        writer: receives the rows; None records nothing, to measure the cost of recording.
    """
    with closing(BatchRun(loaded, plan, writer, on_progress, plan.num_tokens - plan.tokens_of(batches))) as run:
        for batch in batches:
            run.batch(batch)
            _LOG.debug("batch %d ended: %d prompts, %d new tokens so far", batch, run.prompts, run.new_tokens)
        return run.reads()


def finish(stage: CaptureFolder, overwrite: bool, began: float, reads: ExpertReads | None = None) -> Captured:
    """Assemble the trace from the batches, which must all be finished.

    Args:
        began: start of the capture by `time.perf_counter`.
        reads: what this run read.

    Effects: writes the output, whole or not at all, then removes the stage.
    """
    plan, out = stage.plan, stage.out
    if not stage.finished:
        _LOG.info("writing the trace %s from %d batches", out, len(plan.batches))
        keep, ahead = plan.options.keep, plan.options.ahead
        with (
            durable.staged_directory(out, overwrite, MANIFEST, locked=True) as folder,
            TraceWriter(folder, plan.spec, keep, ahead, resident=plan.options.resident) as writer,
        ):
            stage.copy_to(writer)
            size = plan.composition.most
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
        refused=plan.refused,
        tokens=trace.num_tokens,
        bytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        seconds=time.perf_counter() - began,
        reads=reads,
    )
