"""Writer of a capture's batches into its stage."""

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from moetool.base import durable
from moetool.base.errors import MoetoolError, first_line
from moetool.capture.resume import CaptureFolder
from moetool.trace.rows import TokenBatch
from moetool.trace.schemas import REQUESTS, embedding_schema, to_array, to_record_batch


class BatchWriter:
    """Writes batches into a stage on its own thread, so that the model need not wait for the disk.

    The end of the block waits for all writes, and drops an unfinished batch.

    Effects: starts one thread, which the end of the block ends.

    Raises:
        MoetoolError: a write failed, or a router's output is NaN; from any method, since writing is asynchronous.
    """

    def __init__(self, stage: CaptureFolder) -> None:
        self._stage = stage
        self._plan = stage.plan
        self._schema = stage.plan.schema
        keeps_embeddings = "embeddings" in stage.plan.options.keep
        self._embedding_schema = embedding_schema(stage.plan.spec) if keeps_embeddings else None
        self._embeddings: list[tuple[int, int, np.ndarray]] = []
        self._rows_of: dict[int, int] = {}
        self._open: tuple[Path, Any, Any] | None = None  # of the current batch: path, file, Arrow stream
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
        """Append the rows of forwards; forwards count from 0 in each batch."""
        self._check()
        self._queue.put(partial(self._write, rows))

    def add_embedding(self, request: int, iteration: int, embedding_D: np.ndarray) -> None:
        """Append the mean output of the embedding layer over one iteration of a request."""
        self._embeddings.append((request, iteration, embedding_D.astype(np.float16)))

    def end_batch(self, batch: int, new_tokens: list[int]) -> None:
        """End a batch, with the numbers of new tokens of its requests."""
        self._check()
        self._queue.put(partial(self._finish, batch, new_tokens, self._embeddings))
        self._embeddings = []

    def flush(self) -> None:
        """Wait until everything so far is written. Raises: MoetoolError: a write failed."""
        written = threading.Event()
        self._queue.put(written.set)
        while not written.wait(0.1) and self._error is None:
            pass
        self._check()

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
                except BaseException as error:  # passed to the appending thread
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
                "prompt_tokens": item.prompt_tokens,
                "new_tokens": new,
                "label": item.prompt.label,
                "pair": item.prompt.pair,
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
        """Raises: MoetoolError where a router's output is NaN."""
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
                f"the router of layer {layer} gave {name} that are NaN at position "
                f"{record['position'][row]} of prompt {prompt.prompt_id} of {prompt.dataset}: either the weights are "
                f"damaged or {self._plan.options.dtype} cannot hold what they compute; try another --dtype"
            )


def _write_stream(file: Any, record: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(file, record.schema) as stream:
        stream.write_batch(record)


def _has_nan(values: np.ndarray) -> bool:
    """Whether float16 values have a NaN, by their bits: NumPy has no fast arithmetic on them."""
    return bool(((values.view(np.uint16) & 0x7FFF) > 0x7C00).any())
