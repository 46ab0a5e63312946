"""From a model and prompts to a trace: the prefill and decode of every prompt, with what its routers did."""

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from moetool import __version__, durable
from moetool.errors import CapacityError, MoetoolError, UsageError
from moetool.models.batching import Batcher
from moetool.models.decoding import Batch
from moetool.models.loading import LoadedModel, load_full, load_tokenizer, parse_device, parse_dtype, use_threads
from moetool.models.recording import GateRecorder
from moetool.models.sequential import Sequential, one_at_a_time, open_batcher
from moetool.models.spec import locate
from moetool.prompts import Prompt, tokens_to_decode
from moetool.request import SamplingParams
from moetool.trace import MANIFEST
from moetool.trace_writer import TraceWriter


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

    @property
    def tokens(self) -> int:
        """Rows of the trace: the tokens that were forwarded, all but the last one of each answer."""
        return self.prompt_tokens + self.new_tokens - self.requests

    def to_json(self) -> dict[str, Any]:
        """The summary, for --json."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "out": str(self.out), "tokens": self.tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How prompts are forwarded and what is recorded.

    Attributes:
        max_new_tokens: at most so many tokens are decoded for each prompt, greedily, unless its end comes earlier; None
            leaves it at what `moetool.prompts.tokens_to_decode` says.
        batch_size: prompts that are forwarded together: consecutive ones; the next batch begins when the last
            request of one has ended, so that the same call gives the same rows.
        keep: columns to record, of `moetool.trace.KEEP`.
        ahead: for how many layers the column `ahead` looks ahead.
        device: `cpu` or `cuda`.
        dtype: data type of the model.
        threads: of the arithmetic; see `use_threads`. The same number gives the same rows.
        data: where the prompts come from, an object a source, for the manifest; see `moetool.prompts.Gathered`.
    """

    max_new_tokens: int | None = None
    batch_size: int = 1
    keep: tuple[str, ...] = ("topk", "logits")
    ahead: int = 3
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    data: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise UsageError(f"ahead is {self.ahead}, expected at least 1: the next MoE layer")
        if self.batch_size < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise UsageError(
                f"--batch-size {self.batch_size} and --max-new-tokens {self.max_new_tokens} must both be at least 1"
            )


OpenModel = Callable[[Path, torch.dtype, torch.device], LoadedModel]


def capture(
    model: str,
    prompts: Iterable[Prompt],
    out: Path,
    options: CaptureOptions,
    *,
    share: tuple[int, int] = (0, 1),
    open_model: OpenModel = load_full,
    overwrite: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Captured:
    """Run a model over prompts and record its routers.

    Args:
        model: `reference`, a folder or a hub name.
        share: (i, n) captures the batches i, i + n, i + 2n, … only; requests keep their numbers. See
            `moetool.shares`.
        open_model: how the model comes into memory: whole, or with its experts in a pool.
        on_progress: called with the number of prompts that are done.

    Effects: loads the model; writes the trace to `out`, as a whole or not at all.

    Raises:
        UsageError: bad arguments, or `out` exists.
        CapacityError: no prompt fits into the model's context, or the model not into memory.
        MoetoolError: the disk failed, or a forward did.
    """
    durable.require_absent(out, overwrite, MANIFEST)
    device = parse_device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    path = locate(model)
    began = time.perf_counter()
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        loaded = open_model(path, parse_dtype(options.dtype), device)
        config = loaded.model.config.get_text_config()
        num_threads = use_threads(config, options.threads)
        if one_at_a_time(config):
            options = replace(options, batch_size=1)
        batches, skipped = plan_batches(list(prompts), load_tokenizer(path), config.max_position_embeddings, options)
        run = _Run(loaded, TraceWriter(folder, loaded.spec, options.keep, options.ahead), options)
        try:
            run.all(batches[share[0] :: share[1]], on_progress)
            provenance = {
                "model": model,
                "device": options.device,
                "dtype": options.dtype,
                "max_new_tokens": max(item.max_tokens for batch in batches for item in batch),
                "data": list(options.data),
                "threads": num_threads,
                "skipped": skipped,
                "versions": {
                    "moetool": __version__,
                    "torch": torch.__version__,
                    "transformers": transformers.__version__,
                    "python": platform.python_version(),
                },
            }
            size = options.batch_size
            composition = {"kind": "sequential"} if size == 1 else {"kind": "batch", "size": size}
            run.writer.finish(composition=composition, provenance=provenance)
            num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except BaseException:
            run.writer.abort()
            raise
        finally:
            loaded.close()
    return Captured(
        out=out,
        requests=run.requests,
        prompt_tokens=run.prompt_tokens,
        new_tokens=run.new_tokens,
        skipped=skipped,
        bytes=num_bytes,
        seconds=time.perf_counter() - began,
    )


class Item(NamedTuple):
    """A prompt to forward, as tokens, the number of its request, and how many tokens to decode at most."""

    request: int
    prompt: Prompt
    ids: list[int]
    max_tokens: int


def plan_batches(
    prompts: list[Prompt], tokenizer: Any, max_context: int, options: CaptureOptions
) -> tuple[list[list[Item]], int]:
    """Number the prompts that fit and cut them into batches, before anything runs.

    Returns:
        The batches, and how many prompts were left out.

    Raises:
        CapacityError: none fits.
    """
    items: list[Item] = []
    longest = (0, 0)
    for prompt in prompts:
        ids: list[int] = tokenizer(prompt.text)["input_ids"][: prompt.input_tokens]
        max_tokens = tokens_to_decode(prompt, tokenizer, options.max_new_tokens)
        longest = max(longest, (len(ids), max_tokens))
        if ids and len(ids) + max_tokens <= max_context:
            items.append(Item(len(items), prompt, ids, max_tokens))
    if not items:
        raise CapacityError(
            f"none of {len(prompts)} prompts fits: the longest has {longest[0]:,} tokens, {longest[1]} "
            f"new ones are asked for, and the model's context holds {max_context:,}; give shorter prompts"
        )
    size = options.batch_size
    return [items[start : start + size] for start in range(0, len(items), size)], len(prompts) - len(items)


class _Run:
    """One capture under way."""

    def __init__(self, loaded: LoadedModel, writer: TraceWriter, options: CaptureOptions) -> None:
        self.loaded = loaded
        self.writer = writer
        self.requests = self.prompt_tokens = self.new_tokens = 0
        self._batch_size = options.batch_size
        self._batch: Batch | None = None
        # The embedding's mean over an iteration that came in chunks: (iteration, sum, tokens) by request.
        self._embedding: dict[int, tuple[int, np.ndarray, int]] = {}

    def all(self, batches: list[list[Item]], on_progress: Callable[[int], None] | None) -> None:
        """Forward every batch."""
        if not batches:
            return
        width = max(len(item.ids) + item.max_tokens for batch in batches for item in batch)
        kv_tokens = self._batch_size * (width + 16)
        batcher = open_batcher(self.loaded.model, max_requests=self._batch_size, kv_tokens=kv_tokens)
        recorder = GateRecorder(self.loaded.model, self.loaded.layers, self.writer.keep, self.writer.ahead)
        batcher.on_forward = self._on_forward
        try:
            for batch in batches:
                self._one_batch(batcher, recorder, batch)
                if on_progress is not None:
                    on_progress(self.requests)
        finally:
            recorder.close()
            batcher.close()

    def _one_batch(self, batcher: Batcher | Sequential, recorder: GateRecorder, batch: list[Item]) -> None:
        first = batch[0].request
        new_tokens = [0] * len(batch)
        for item in batch:
            batcher.add(item.request, item.ids, SamplingParams(max_tokens=item.max_tokens))
        while not batcher.idle:
            outputs = batcher.step()
            self.loaded.end_forward()
            if failed := next((o for o in outputs if o.error is not None), None):
                prompt_id = batch[failed.request - first].prompt.prompt_id
                raise MoetoolError(f"the model failed on prompt {prompt_id}: {failed.error}")
            assert self._batch is not None
            rows, embedding_TD = recorder.take(self._batch)
            self.writer.append(rows)
            if embedding_TD is not None:
                self._add_embeddings(self._batch, embedding_TD)
            for output in outputs:
                new_tokens[output.request - first] += 1
        self._flush_embeddings()
        for item, new in zip(batch, new_tokens, strict=True):
            self.writer.add_request(
                item.request,
                dataset=item.prompt.dataset,
                task=item.prompt.task,
                prompt_id=item.prompt.prompt_id,
                prompt_tokens=len(item.ids),
                new_tokens=new,
            )
            self.prompt_tokens += len(item.ids)
            self.new_tokens += new
        self.requests += len(batch)

    def _on_forward(self, batch: Batch) -> None:
        self._batch = batch
        self.loaded.begin_forward(batch.info)

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
