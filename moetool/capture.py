"""From a model and prompts to a trace: the prefill and decode of every prompt, with what its routers did."""

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from moetool import __version__, durable
from moetool.errors import CapacityError, MoetoolError, UsageError
from moetool.models.batching import Batcher
from moetool.models.decoding import Batch
from moetool.models.loading import LoadedModel, load_full, load_tokenizer, parse_dtype, use_threads
from moetool.models.recording import GateRecorder
from moetool.models.sequential import Sequential, open_batcher
from moetool.models.spec import locate
from moetool.prompts import Prompt
from moetool.request import SamplingParams
from moetool.trace import TraceWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a capture made.

    Attributes:
        skipped: prompts that were left out because they do not fit into the model's context.
    """

    out: Path
    requests: int
    prompt_tokens: int
    new_tokens: int
    skipped: int
    bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The summary, for --json."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "out": str(self.out)}


def capture(
    model: str,
    prompts: Iterable[Prompt],
    out: Path,
    *,
    max_new_tokens: int = 32,
    batch_size: int = 1,
    keep: Iterable[str] = ("topk", "logits"),
    dtype: str = "float32",
    threads: int = 0,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Captured:
    """Run a model over prompts and record its routers.

    Prompts are forwarded greedily in batches of consecutive ones; the next batch begins when the last request of
    one has ended, so the same call gives the same rows.

    Args:
        model: `reference`, a folder or a hub name.
        keep: columns to record, of `moetool.trace.KEEP`.
        threads: of the arithmetic; see `use_threads`. The same number gives the same rows.
        on_progress: called with the number of prompts that are done.

    Effects: loads the model; writes the trace to `out`, as a whole or not at all.

    Raises:
        UsageError: bad arguments, or `out` exists.
        CapacityError: no prompt fits into the model's context.
        MoetoolError: the disk failed, or a forward did.
    """
    if batch_size < 1 or max_new_tokens < 1:
        raise UsageError(f"--batch-size {batch_size} and --max-new-tokens {max_new_tokens} must both be at least 1")
    durable.require_absent(out, overwrite)
    path = locate(model)
    torch_dtype = parse_dtype(dtype)
    began = time.perf_counter()
    with durable.staged_directory(out, overwrite) as folder:
        loaded = load_full(path, torch_dtype)
        num_threads = use_threads(loaded.model.config.get_text_config(), threads)
        run = _Run(loaded, TraceWriter(folder, loaded.spec, keep), max_new_tokens, batch_size)
        try:
            run.all(list(prompts), load_tokenizer(path), on_progress)
            run.finish(
                {
                    "model": model,
                    "dtype": dtype,
                    "max_new_tokens": max_new_tokens,
                    "threads": num_threads,
                    "versions": {
                        "moetool": __version__,
                        "torch": torch.__version__,
                        "transformers": transformers.__version__,
                        "python": platform.python_version(),
                    },
                }
            )
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except BaseException:
            run.writer.abort()
            raise
    return Captured(
        out=out,
        requests=run.requests,
        prompt_tokens=run.prompt_tokens,
        new_tokens=run.new_tokens,
        skipped=run.skipped,
        bytes=size,
        seconds=time.perf_counter() - began,
    )


class _Run:
    """One capture under way."""

    def __init__(self, loaded: LoadedModel, writer: TraceWriter, max_new_tokens: int, batch_size: int) -> None:
        self.loaded = loaded
        self.writer = writer
        self.requests = self.prompt_tokens = self.new_tokens = self.skipped = 0
        self._params = SamplingParams(max_tokens=max_new_tokens)
        self._batch_size = batch_size
        self._batch: Batch | None = None
        # The embedding's mean over an iteration that came in chunks: (iteration, sum, tokens) by request.
        self._embedding: dict[int, tuple[int, np.ndarray, int]] = {}

    def all(self, prompts: list[Prompt], tokenizer: Any, on_progress: Callable[[int], None] | None) -> None:
        """Forward every prompt."""
        limit = int(self.loaded.model.config.get_text_config().max_position_embeddings)
        encoded: list[tuple[Prompt, list[int]]] = []
        longest = 0
        for prompt in prompts:
            ids: list[int] = tokenizer(prompt.text)["input_ids"]
            longest = max(longest, len(ids))
            if not ids or len(ids) + self._params.max_tokens > limit:
                self.skipped += 1
            else:
                encoded.append((prompt, ids))
        if not encoded:
            raise CapacityError(
                f"none of {len(prompts)} prompts fits: the longest has {longest:,} tokens, {self._params.max_tokens} "
                f"new ones are asked for, and the model's context holds {limit:,}; give shorter prompts"
            )
        width = max(len(ids) for _, ids in encoded) + self._params.max_tokens
        batcher = open_batcher(
            self.loaded.model, max_requests=self._batch_size, kv_tokens=self._batch_size * (width + 16)
        )
        self._batch_size = batcher.max_requests  # 1 for a family that cannot be batched
        recorder = GateRecorder(self.loaded.model, self.loaded.layers, self.writer.keep)
        batcher.on_forward = self._on_forward
        try:
            for start in range(0, len(encoded), self._batch_size):
                self._one_batch(batcher, recorder, encoded[start : start + self._batch_size])
                if on_progress is not None:
                    on_progress(min(start + self._batch_size, len(encoded)))
        finally:
            recorder.close()
            batcher.close()

    def finish(self, provenance: dict[str, Any]) -> None:
        """Write what is left."""
        size = self._batch_size
        composition = {"kind": "sequential"} if size == 1 else {"kind": "batch", "size": size}
        self.writer.finish(composition=composition, provenance={**provenance, "skipped": self.skipped})

    def _one_batch(
        self, batcher: Batcher | Sequential, recorder: GateRecorder, batch: list[tuple[Prompt, list[int]]]
    ) -> None:
        first = self.requests
        new_tokens = [0] * len(batch)
        for i, (_, ids) in enumerate(batch):
            batcher.add(first + i, ids, self._params)
        while not batcher.idle:
            outputs = batcher.step()
            if failed := next((o for o in outputs if o.error is not None), None):
                raise MoetoolError(
                    f"the model failed on prompt {batch[failed.request - first][0].prompt_id}: {failed.error}"
                )
            assert self._batch is not None
            rows, embedding_TD = recorder.take(self._batch)
            self.writer.append(rows)
            if embedding_TD is not None:
                self._add_embeddings(self._batch, embedding_TD)
            for output in outputs:
                new_tokens[output.request - first] += 1
        self._flush_embeddings()
        for i, (prompt, ids) in enumerate(batch):
            self.writer.add_request(
                first + i,
                dataset=prompt.dataset,
                task=prompt.task,
                prompt_id=prompt.prompt_id,
                prompt_tokens=len(ids),
                new_tokens=new_tokens[i],
            )
            self.prompt_tokens += len(ids)
            self.new_tokens += new_tokens[i]
        self.requests += len(batch)

    def _on_forward(self, batch: Batch) -> None:
        self._batch = batch

    def _add_embeddings(self, batch: Batch, embedding_TD: np.ndarray) -> None:
        requests = np.asarray(batch.info.request_T)
        for request in dict.fromkeys(batch.info.request_T):
            mine = requests == request
            iteration = batch.iteration_T[int(np.argmax(mine))]
            total, count = embedding_TD[mine].sum(axis=0), int(mine.sum())
            held = self._embedding.get(request)
            if held is not None and held[0] == iteration:
                total, count = held[1] + total, held[2] + count
            elif held is not None:
                self.writer.add_embedding(request, held[0], held[1] / held[2])
            self._embedding[request] = (iteration, total, count)

    def _flush_embeddings(self) -> None:
        for request, (iteration, total, count) in self._embedding.items():
            self.writer.add_embedding(request, iteration, total / count)
        self._embedding.clear()
