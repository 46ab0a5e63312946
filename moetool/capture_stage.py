"""A capture under way: a folder beside its output that survives a kill.

    OUT.stage/capture.json            what the rows depend on (`CapturePlan.facts`)
    OUT.stage/batch-00000012.arrow    a batch that has ended: Arrow streams of its tokens, its iterations' embeddings
                                      where they are kept, and its requests

The rows of a batch depend on those facts and on its number alone. So it does not matter which process forwarded it, or
in which run: the trace is put together from the batches in their order.
"""

import contextlib
import json
import queue
import shlex
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moetool import durable
from moetool.capture_plan import CapturePlan, require_disk
from moetool.errors import MismatchError, MoetoolError, UsageError, first_line
from moetool.trace import MANIFEST, REQUESTS, TokenBatch, embedding_schema, to_array, to_record_batch, to_token_batch
from moetool.trace_writer import TraceWriter

STAGE = ".stage"


def stage_path(out: Path) -> Path:
    """Where a capture into `out` keeps what it has done so far."""
    return out.with_name(out.name + STAGE)


class Stage:
    """The folder of one capture. Reading needs no lock, nor does writing other batches than another process does."""

    def __init__(self, out: Path, plan: CapturePlan) -> None:
        self.out = out
        self.path = stage_path(out)
        self.plan = plan

    def file(self, batch: int) -> Path:
        """Where a batch lies once it has ended."""
        return self.path / f"batch-{batch:08d}.arrow"

    def missing(self) -> list[int]:
        """The batches that have not ended, in their order."""
        there = {path.name for path in self.path.glob("batch-*.arrow")}
        return [batch for batch in range(len(self.plan.batches)) if self.file(batch).name not in there]

    def kept_prompts(self) -> int:
        """Prompts whose rows are there."""
        missing = sum(len(self.plan.batches[batch]) for batch in self.missing())
        return self.plan.num_prompts - missing

    def finished(self) -> bool:
        """Whether `out` is the trace of this very capture already."""
        try:
            manifest = json.loads((self.out / MANIFEST).read_text(encoding="utf-8"))
            facts = manifest["provenance"]["capture"], manifest["requests"]
            return facts == (self.plan.digest, self.plan.num_prompts)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def begin(self, resume: bool) -> None:
        """Make the folder, or take up the one that is there.

        Raises:
            UsageError: one is there and `resume` is false.
            MismatchError: the one that is there is of another capture.
        """
        facts = self.path / "capture.json"
        if self.path.exists() and any(self.path.glob("batch-*.arrow")):
            remove = f"remove what is there: rm -r {shlex.quote(str(self.path))}"
            if not resume:
                raise UsageError(
                    f"{self.path} holds a capture that was stopped; go on with it by the same command and --resume, "
                    f"or {remove}"
                )
            try:
                found = json.loads(facts.read_text(encoding="utf-8"))
                differing = [name for name, value in self.plan.facts.items() if found.get(name) != value]
            except (OSError, ValueError, AttributeError) as error:
                raise MismatchError(f"{facts} is damaged ({first_line(error)}); {remove}") from None
            if differing:
                said = "; ".join(_difference(name, found.get(name), self.plan.facts[name]) for name in differing)
                raise MismatchError(f"{self.path} is of another capture: {said}; give the same again, or {remove}")
            for unfinished in self.path.glob("*" + durable.PARTIAL):
                unfinished.unlink()
            return
        shutil.rmtree(self.path, ignore_errors=True)  # without a batch there is nothing to lose
        self.path.mkdir()
        durable.write_text(facts, json.dumps(self.plan.facts, indent=1) + "\n")

    def remove(self) -> None:
        """Forget the capture."""
        shutil.rmtree(self.path, ignore_errors=True)

    def copy_to(self, writer: TraceWriter) -> None:
        """Give a writer all batches in their order.

        Raises:
            MismatchError: a batch is missing or damaged.
        """
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
) -> Iterator[Stage]:
    """The stage of a capture, held by this process alone; its batches outlive an exception.

    Args:
        resume: go on with what a stopped run of the same command has left, if it has left anything.
        on_note: called with what a person wants to read meanwhile.

    Raises:
        UsageError: `out` exists, or a stage does and `resume` is false.
        MismatchError: the stage is of another capture.
        CapacityError: the disk is too small.
        MoetoolError: whatever failed within the block, with what to do next.
    """
    with durable.alone(out):
        stage = Stage(out, plan)
        if resume and stage.finished():
            yield stage
            return
        durable.require_absent(out, overwrite, MANIFEST)
        try:
            stage.begin(resume)
            missing = stage.missing()
            if len(missing) < len(plan.batches):
                on_note(f"{stage.kept_prompts():,} of {plan.num_prompts:,} prompts are there from an earlier run")
            require_disk(plan, missing, out.parent.resolve(), on_note)
            yield stage
        except BaseException as error:
            kept = stage.kept_prompts()
            if kept == 0:
                stage.remove()
                raise
            if isinstance(error, UsageError | MismatchError):
                raise
            said = (
                f"{kept:,} of {plan.num_prompts:,} prompts are kept in {stage.path}: to go on, repeat the command with "
                "--resume"
            )
            if isinstance(error, MoetoolError):
                raise type(error)(f"{error}; {said}") from error
            if isinstance(error, OSError) and error.strerror:
                raise MoetoolError(f"{error.strerror}: {error.filename or 'the disk'}; {said}") from error
            on_note(said)
            raise


class BatchWriter:
    """Writes batches into a stage from a thread of its own, so that the model need not wait for the disk.

    Within the block rows are taken in; its end waits until all is written, and drops a batch that has not ended.

    Effects: starts one thread, which the end of the block ends.

    Raises:
        MoetoolError: something could not be written, or a router's numbers are not numbers; from any method, since
            writing runs behind.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._plan = stage.plan
        self._schema = stage.plan.schema
        keeps_embeddings = "embeddings" in stage.plan.options.keep
        self._embedding_schema = embedding_schema(stage.plan.spec) if keeps_embeddings else None
        self._embeddings: list[tuple[int, int, np.ndarray]] = []
        self._rows_of: dict[int, int] = {}
        self._open: tuple[Path, Any, Any] | None = None  # of the batch that is being written: path, file, Arrow stream
        self._error: BaseException | None = None
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=8)
        self._thread = threading.Thread(target=self._work, name="batch-writer", daemon=True)

    def __enter__(self) -> "BatchWriter":
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._queue.put(None)
        self._thread.join()
        if error is None:
            self._check()

    def append(self, rows: TokenBatch) -> None:
        """Take in the rows of one forward or several; forwards count from 0 in each batch."""
        self._check()
        self._queue.put(partial(self._write, rows))

    def add_embedding(self, request: int, iteration: int, embedding_D: np.ndarray) -> None:
        """Take in the mean output of the embedding layer over one iteration of a request."""
        self._embeddings.append((request, iteration, embedding_D.astype(np.float16)))

    def end_batch(self, batch: int, new_tokens: list[int]) -> None:
        """All rows of a batch are there; its requests got so many new tokens."""
        self._check()
        self._queue.put(partial(self._finish, batch, new_tokens, self._embeddings))
        self._embeddings = []

    def _check(self) -> None:
        if isinstance(self._error, MoetoolError):
            raise self._error
        if self._error is not None:
            raise MoetoolError(f"cannot write to {self._stage.path}: {first_line(self._error)}") from self._error

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # handed to the thread that appends
                    self._error = error
        if self._open is not None:
            path, file, stream = self._open
            with contextlib.suppress(Exception):
                stream.close()
            with contextlib.suppress(Exception):
                file.close()
            path.unlink(missing_ok=True)

    def _write(self, rows: TokenBatch) -> None:
        record = to_record_batch(rows, self._schema)
        self._require_numbers(record)
        if self._open is None:
            path = self._stage.path / f"{uuid.uuid4().hex}{durable.PARTIAL}"  # several processes write, on any machine
            file = pa.OSFile(str(path), "wb")
            self._open = path, file, pa.ipc.new_stream(file, self._schema)
        self._open[2].write_batch(record)
        for request, count in zip(*np.unique(record["request"].to_numpy(), return_counts=True), strict=True):
            self._rows_of[int(request)] = self._rows_of.get(int(request), 0) + int(count)

    def _finish(self, batch: int, new_tokens: list[int], embeddings: list[tuple[int, int, np.ndarray]]) -> None:
        assert self._open is not None
        path, file, stream = self._open
        stream.close()
        if self._embedding_schema is not None:
            columns = [np.asarray(column) for column in zip(*embeddings, strict=True)]
            arrays = [to_array(column, f.type) for column, f in zip(columns, self._embedding_schema, strict=True)]
            _write_stream(file, pa.RecordBatch.from_arrays(arrays, schema=self._embedding_schema))
        rows = [
            {
                "request": item.request,
                "dataset": item.prompt.dataset,
                "task": item.prompt.task,
                "prompt_id": item.prompt.prompt_id,
                "prompt_tokens": len(item.ids),
                "new_tokens": new,
                "tokens": self._rows_of.pop(item.request),
            }
            for item, new in zip(self._plan.batches[batch], new_tokens, strict=True)
        ]
        _write_stream(file, pa.RecordBatch.from_pylist(rows, schema=REQUESTS))
        file.close()
        durable.sync(path)
        path.rename(self._stage.file(batch))
        durable.sync(self._stage.path)
        self._open = None

    def _require_numbers(self, record: pa.RecordBatch) -> None:
        """Raises: MoetoolError where a router gave no number."""
        spec = self._plan.spec
        for name, widths in (("logits", spec.num_experts_L), ("weights", spec.top_k_L)):
            if name not in record.schema.names:
                continue
            flat = record[name].flatten().to_numpy(zero_copy_only=False)
            if not _has_nan(flat):
                continue
            row, column = divmod(int(np.argmax(np.isnan(flat))), sum(widths))
            layer = spec.layer_ids_L[int(np.searchsorted(np.cumsum(widths), column, side="right"))]
            prompt = self._plan.item(record["request"][row].as_py()).prompt
            raise MoetoolError(
                f"the router of layer {layer} gave {name} that are no numbers (NaN) at position "
                f"{record['position'][row]} of prompt {prompt.prompt_id} of {prompt.dataset}: either the weights are "
                f"damaged or {self._plan.options.dtype} cannot hold what they compute; try another --dtype"
            )


def _write_stream(file: Any, record: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(file, record.schema) as stream:
        stream.write_batch(record)


def _has_nan(values: np.ndarray) -> bool:
    """Whether float16 values have one, by their bits: NumPy has no fast arithmetic on them."""
    return bool(((values.view(np.uint16) & 0x7FFF) > 0x7C00).any())


def _difference(name: str, found: Any, asked: Any) -> str:
    if name == "prompts":
        return "the prompts are others"
    if name == "revision":
        return "the model's weights or config are others"
    return f"{name} was {found}, and is {asked} now"
