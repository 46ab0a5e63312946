"""Capture by several processes: whole batches are shared out, and the trace is that of one process.

The batches are fixed by the prompts' order before anything runs. Process i of n takes the batches i, i + n, …; each
writes a trace of its own beside `out`, and the first one joins them, forward by forward, in the order of the batches.
"""

import itertools
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool import durable
from moetool.capture import Captured, CaptureOptions, OpenModel, capture
from moetool.errors import MismatchError, MoetoolError
from moetool.models.loading import load_full
from moetool.prompts import Prompt
from moetool.trace import KEEP, MANIFEST, TokenBatch, Trace
from moetool.trace_writer import TraceWriter


def share_path(out: Path, share: int) -> Path:
    """Where process `share` writes its part."""
    return out.with_name(f"{out.name}.share{share}")


def capture_with_workers(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    workers: int,
    *,
    open_model: OpenModel = load_full,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Captured:
    """Capture with several processes on this machine; arguments and errors are those of `capture`.

    Effects: starts `workers` - 1 processes and captures in this one too; removes their parts at the end.

    Raises:
        MoetoolError: a worker failed; its own message is on stderr.
    """
    durable.require_absent(out, overwrite, MANIFEST)
    context = multiprocessing.get_context("spawn")
    arguments = [(model, prompts, out, options, (i, workers), open_model) for i in range(1, workers)]
    processes = [context.Process(target=_child, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    try:
        first = _work(model, prompts, out, options, (0, workers), open_model, on_progress)
        for i, process in enumerate(processes, start=1):
            process.join()
            if process.exitcode != 0:
                raise MoetoolError(f"worker {i} of {workers} ended with exit code {process.exitcode}; see above")
        return join(out, workers, overwrite, first.seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for i in range(workers):
            shutil.rmtree(share_path(out, i), ignore_errors=True)


def capture_under_torchrun(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    *,
    open_model: OpenModel = load_full,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Captured | None:
    """Capture this process's share under `torchrun` (RANK and WORLD_SIZE are set); `out` must be on a shared disk.

    Returns:
        What was made, in the process of rank 0; None in the others.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    try:
        durable.require_absent(out, overwrite, MANIFEST)
        first = _work(model, prompts, out, options, (rank, world), open_model, on_progress)
        dist.barrier()
        made = join(out, world, overwrite, first.seconds) if rank == 0 else None
        dist.barrier()
        shutil.rmtree(share_path(out, rank), ignore_errors=True)
        return made
    finally:
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether this process was started by torchrun as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(out: Path, shares: int, overwrite: bool = False, seconds: float = 0.0) -> Captured:
    """Join the parts of a shared capture into one trace, the same as one process would have written.

    Args:
        seconds: how long capturing took, for the summary.

    Effects: reads the parts, writes `out` whole or not at all.

    Raises:
        MismatchError: the parts are not of one capture.
    """
    parts = [Trace(share_path(out, i)) for i in range(shares)]
    first = parts[0]
    for part in parts:
        if part.spec != first.spec or part.manifest["composition"] != first.manifest["composition"]:
            raise MismatchError(f"{part.path} and {first.path} are parts of different captures; capture again")
    size = int(first.manifest["composition"].get("size", 1))
    keep = {"topk", *(first.columns & set(KEEP))}
    columns = sorted(first.columns & {"weights", "logits", "hidden", "ahead"})
    requests = sorted((row for part in parts for row in part.requests.to_pylist()), key=lambda row: row["request"])
    forward = 0
    with durable.staged_directory(out, overwrite, MANIFEST) as folder, ExitStack() as stack:
        writer = TraceWriter(folder, first.spec, keep, first.ahead)
        stack.callback(writer.abort)
        forwards = [_Batches(part, columns, size) for part in parts]
        for batch in range(-(-len(requests) // size)):
            source = forwards[batch % shares]
            for rows in source.forwards(batch):
                rows.forward_T = np.full(len(rows), forward, np.int32)
                writer.append(rows)
                forward += 1
            for request, iteration, embedding_D in source.embeddings(batch):
                writer.add_embedding(request, iteration, embedding_D)
        for row in requests:
            writer.add_request(**{name: value for name, value in row.items() if name != "tokens"})
        writer.finish(composition=first.manifest["composition"], provenance=first.manifest["provenance"])
        num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Captured(
        out=out,
        requests=len(requests),
        prompt_tokens=sum(row["prompt_tokens"] for row in requests),
        new_tokens=sum(row["new_tokens"] for row in requests),
        skipped=int(first.manifest["provenance"]["skipped"]),
        bytes=num_bytes,
        seconds=seconds,
    )


class _Batches:
    """One part, read batch by batch: batch b holds the requests b * size to (b + 1) * size - 1."""

    def __init__(self, part: Trace, columns: list[str], size: int) -> None:
        self._size = size
        self._forwards = itertools.groupby(part.recorded_forwards(columns), lambda rows: rows.request_T[0] // size)
        recorded = part.embeddings() if "embeddings" in part.columns else iter(())
        self._embeddings = itertools.groupby(recorded, lambda row: row[0] // size)

    def forwards(self, batch: int) -> Iterator[TokenBatch]:
        """The rows of each forward of the next batch, which must be `batch`."""
        return self._next(self._forwards, batch)

    def embeddings(self, batch: int) -> Iterator[tuple[int, int, np.ndarray]]:
        """The embeddings of the next batch."""
        return self._next(self._embeddings, batch)

    @staticmethod
    def _next(groups: Iterator[tuple[int, Iterator]], batch: int) -> Iterator:
        found, rows = next(groups, (batch, iter(())))
        if found != batch:
            raise MismatchError(f"a part holds batch {found} where {batch} was expected; capture again")
        return rows


def _child(*arguments: Any) -> None:
    """A worker process: its errors are one line, as everywhere."""
    try:
        _work(*arguments)
    except MoetoolError as error:
        print(f"moetool: worker {arguments[4][0]}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _work(
    model: str,
    prompts: list[Prompt],
    out: Path,
    options: CaptureOptions,
    share: tuple[int, int],
    open_model: OpenModel,
    on_progress: Callable[[int], None] | None = None,
) -> Captured:
    """Capture one share, with one thread unless told otherwise: processes that fight over cores are slower."""
    options = replace(options, threads=options.threads or 1)
    part = share_path(out, share[0])
    return capture(
        model, prompts, part, options, share=share, open_model=open_model, overwrite=True, on_progress=on_progress
    )
