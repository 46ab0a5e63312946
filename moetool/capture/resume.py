"""The stage of a capture: a folder next to its output that survives a kill.

    OUT.stage/capture.json            inputs of the rows (`CapturePlan.facts`)
    OUT.stage/batch-00000012.arrow    a finished batch: Arrow streams of its tokens, its iterations' embeddings
                                      if kept, and its requests

The rows of a batch depend only on those facts and its number, not on the process or run. The trace is assembled from
the batches in order.
"""

import contextlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moetool.base import durable
from moetool.base.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.base.json_files import read_json
from moetool.capture.job import CaptureOptions, CapturePlan, require_disk
from moetool.trace.reader import MANIFEST
from moetool.trace.schemas import to_token_batch
from moetool.trace.writer import TraceWriter

STAGE, FACTS = ".stage", "capture.json"


def stage_path(out: Path) -> Path:
    """Return the folder of a capture's partial results for `out`."""
    return out.with_name(out.name + STAGE)


def stored_facts(out: Path) -> dict[str, Any]:
    """Return the facts of an interrupted or complete capture for `out`; empty if there is none that can be read."""
    try:
        return read_json(stage_path(out) / FACTS, advice="")
    except (OSError, MismatchError):
        pass
    try:
        provenance = read_json(out / MANIFEST, advice="")["provenance"]
        return {name: provenance[name] for name in ("composition", "threads")}
    except (OSError, MismatchError, KeyError, TypeError):
        return {}


def resumed_threads(options: CaptureOptions, out: Path, default: int = 0) -> CaptureOptions:
    """Return options with the threads of an interrupted or complete capture for `out`, where none are given.

    Args:
        default: threads if there is no such capture.
    """
    stored = stored_facts(out).get("threads")
    known = stored if isinstance(stored, int) and stored > 0 else default
    return replace(options, threads=options.threads or known)


class CaptureFolder:
    """The folder of one capture. Reading, and writing distinct batches from several processes, need no lock.

    Attributes:
        finished: whether `out` is already the trace of the capture that is resumed.
    """

    def __init__(self, out: Path, plan: CapturePlan, *, resume: bool = False) -> None:
        self.out = out
        self.path = stage_path(out)
        self.plan = plan
        self.finished = resume and self._is_written()

    def file(self, batch: int) -> Path:
        """Return the path of a finished batch."""
        return self.path / f"batch-{batch:08d}.arrow"

    def missing(self) -> list[int]:
        """Return the unfinished batches, in order."""
        there = {path.name for path in self.path.glob("batch-*.arrow")}
        return [batch for batch in range(len(self.plan.batches)) if self.file(batch).name not in there]

    def kept_prompts(self) -> int:
        """Return the number of prompts with stored rows."""
        missing = sum(len(self.plan.batches[batch]) for batch in self.missing())
        return self.plan.num_prompts - missing

    def _is_written(self) -> bool:
        try:
            manifest = json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
            facts = manifest["provenance"]["capture"], manifest["requests"]
            return facts == (self.plan.digest, self.plan.num_prompts)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def begin(self, resume: bool) -> None:
        """Create the folder, or resume an existing one.

        Raises:
            UsageError: it exists and `resume` is false.
            MismatchError: it exists and is of another capture.
        """
        facts = self.path / FACTS
        if self.path.exists() and any(self.path.glob("batch-*.arrow")):
            remove = f"remove it: rm -r {shlex.quote(str(self.path))}"
            if not resume:
                raise UsageError(
                    f"{self.path} contains an interrupted capture; continue it with the same command and --resume, "
                    f"or {remove}"
                )
            try:
                found = read_json(facts, advice=remove)
                differing = [name for name, value in self.plan.facts.items() if found.get(name) != value]
            except OSError as error:
                raise MismatchError(f"{facts} is damaged ({first_line(error)}); {remove}") from None
            if differing:
                changes = "; ".join(difference(name, found.get(name), self.plan.facts[name]) for name in differing)
                raise MismatchError(f"{self.path} is of another capture: {changes}; give the same again, or {remove}")
            for unfinished in self.path.glob("*" + durable.PARTIAL):
                unfinished.unlink()
            return
        shutil.rmtree(self.path, ignore_errors=True)  # without a batch there is nothing to lose
        self.path.mkdir()
        durable.write_text(facts, json.dumps(self.plan.facts, indent=1) + "\n")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def copy_to(self, writer: TraceWriter) -> None:
        """Copy all batches to a writer, in order. Raises: MismatchError: a batch is missing or damaged."""
        forward = 0
        for batch in range(len(self.plan.batches)):
            try:
                with pa.OSFile(str(self.file(batch))) as file:
                    last = -1
                    for record in pa.ipc.open_stream(file):
                        rows = to_token_batch(record)
                        last = int(rows.forward_T[-1])
                        rows.forward_T = rows.forward_T + np.int32(forward)
                        writer.append(rows)
                    forward += last + 1
                    if "embeddings" in writer.keep:
                        for record in pa.ipc.open_stream(file):
                            values = record["embedding"].flatten().to_numpy(zero_copy_only=False)
                            request_N, iteration_N = (record[name].to_numpy() for name in ("request", "iteration"))
                            writer.add_embeddings(request_N, iteration_N, values.reshape(len(record), -1))
                    for request in pa.ipc.open_stream(file).read_all().to_pylist():
                        writer.add_request(**{name: value for name, value in request.items() if name != "tokens"})
            except (pa.ArrowException, OSError) as error:
                raise MismatchError(
                    f"{self.file(batch)} is missing or damaged ({first_line(error)}); remove it, and repeat the "
                    "command with --resume"
                ) from error


@contextlib.contextmanager
def open_stage(
    out: Path, plan: CapturePlan, *, resume: bool, overwrite: bool, on_note: Callable[[str], None]
) -> Iterator[CaptureFolder]:
    """Open the stage of a capture, locked by this process; its batches survive an exception.

    Args:
        resume: continue an interrupted run of the same command, if there is one.
        on_note: called with messages for the user.

    Raises:
        UsageError: `out` exists, or a stage does and `resume` is false.
        MismatchError: the stage is of another capture.
        CapacityError: the disk is too small.
        MoetoolError: a failure within the block, with the next command.
    """
    with durable.alone(out):
        stage = CaptureFolder(out, plan, resume=resume)
        if stage.finished:
            yield stage
            return
        durable.require_absent(out, overwrite, MANIFEST)
        try:
            stage.begin(resume)
            missing = stage.missing()
            if len(missing) < len(plan.batches):
                on_note(f"{stage.kept_prompts():,} of {plan.num_prompts:,} prompts are already captured")
            require_disk(plan, missing, out.parent.resolve(), on_note)
            yield stage
        except BaseException as error:
            kept = stage.kept_prompts()
            if kept == 0:
                stage.remove()
                raise
            if isinstance(error, UsageError | MismatchError):
                raise
            how = (
                f"{kept:,} of {plan.num_prompts:,} prompts are kept in {stage.path}: repeat the command with --resume "
                "to continue"
            )
            if isinstance(error, MoetoolError):
                raise type(error)(f"{error}; {how}") from error
            if isinstance(error, OSError) and error.strerror:
                raise MoetoolError(f"{error.strerror}: {error.filename or 'the disk'}; {how}") from error
            on_note(how)
            raise


def difference(name: str, found: Any, asked: Any) -> str:
    """Say how a fact of a capture differs."""
    if name in ("prompts", "composition"):
        return "the prompts differ" if name == "prompts" else "the prompts of its batches, or --batch-size, differ"
    if name == "revision":
        return "the model's weights or config differ"
    return f"{name} was {found}, and is {asked} now"
