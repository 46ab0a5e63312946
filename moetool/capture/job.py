"""Capture plan, made before a model is loaded: prompts as tokens in batches, and their disk space."""

import hashlib
import json
import platform
import shutil
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import transformers

from moetool import __version__
from moetool.errors import CapacityError, UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import use_threads
from moetool.prompts.gather import Prompt, tokens_to_decode
from moetool.runtime.own_caches import own_cache
from moetool.runtime.partial_forward import decoder_layers
from moetool.tables import count, numbered
from moetool.trace.rows import embedding_schema, token_schema
from moetool.trace.writer import token_columns
from moetool.types import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of a capture.

    Attributes:
        max_new_tokens: at most so many tokens are decoded for each prompt, greedily, unless its end comes earlier; None
            leaves it at what `moetool.prompts.gather.tokens_to_decode` says.
        batch_size: prompts that are forwarded together: consecutive ones; the next batch begins when the last
            request of one has ended, so that the same call gives the same rows.
        keep: columns to record, of `KEEP` and `EXTRA` of `moetool.trace.rows`.
        ahead: for how many layers the column `ahead` looks ahead.
        resident: share of a layer's experts that the column `resident` takes to be resident.
        device: `cpu` or `cuda`.
        dtype: data type of the model.
        threads: of the arithmetic; see `use_threads`. The same number gives the same rows.
        data: where the prompts come from, an object a source, for the manifest; see `moetool.prompts.gather.Gathered`.
    """

    max_new_tokens: int | None = None
    batch_size: int = 1
    keep: tuple[str, ...] = ("topk", "logits")
    ahead: int = 3
    resident: float = 0.5
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    data: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.ahead < 1:
            raise UsageError(f"ahead is {self.ahead}, expected at least 1: the next MoE layer")
        if not 0 < self.resident <= 1:
            raise UsageError(f"resident is {self.resident}, expected a share of a layer's experts: above 0, up to 1")
        if self.batch_size < 1 or (self.max_new_tokens is not None and self.max_new_tokens < 1):
            raise UsageError(
                f"--batch-size {self.batch_size} and --max-new-tokens {self.max_new_tokens} must both be at least 1"
            )


class Item(NamedTuple):
    """A prompt to forward, as tokens (int32), the number of its request, and how many tokens to decode at most."""

    request: int
    prompt: Prompt
    ids: "array[int]"
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """A capture, before it runs.

    Attributes:
        checkpoint: of the model.
        options: as they will be used: the batch size of the model's family, the number of threads.
        batches: the prompts that are forwarded together.
        too_long: prompts that are left out because they and their answers exceed the model's context.
        empty: prompts that are left out because they have no token.
        facts: the inputs that determine the rows; captures of equal facts give equal rows.
    """

    checkpoint: Checkpoint
    options: CaptureOptions
    batches: list[list[Item]]
    too_long: int
    empty: int
    facts: dict[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """The model's spec."""
        return self.checkpoint.spec

    @property
    def num_prompts(self) -> int:
        """Prompts that are forwarded."""
        return sum(map(len, self.batches))

    @property
    def digest(self) -> str:
        """Tells captures of other facts from this one."""
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def width(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(item.ids) + item.max_tokens for batch in self.batches for item in batch)

    @property
    def max_new_tokens(self) -> int:
        """Tokens of the longest answer."""
        return max(item.max_tokens for batch in self.batches for item in batch)

    @property
    def ahead(self) -> int:
        """Layers that column `ahead` looks ahead; 0 without it."""
        return self.options.ahead if "ahead" in self.options.keep else 0

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows of tokens."""
        return token_schema(self.spec, token_columns(self.options.keep), self.ahead)

    def item(self, request: int) -> Item:
        """The prompt of a request."""
        size = self.options.batch_size
        return self.batches[request // size][request % size]

    def disk_bytes(self, batches: Iterable[int]) -> tuple[int, int]:
        """Bytes of the rows of these batches, uncompressed: of their prompts alone, and with the longest answers."""
        token, embedding = row_bytes(self.schema), 0
        if "embeddings" in self.options.keep:
            embedding = row_bytes(embedding_schema(self.spec))
        items = [item for batch in batches for item in self.batches[batch]]
        least = sum(token * len(item.ids) + embedding for item in items)
        return least, least + (token + embedding) * sum(item.max_tokens - 1 for item in items)


def plan_capture(
    checkpoint: Checkpoint, prompts: Sequence[Prompt], options: CaptureOptions, *, pooled: bool
) -> CapturePlan:
    """Settle what a capture does.

    Args:
        checkpoint: of the model.
        pooled: whether experts are computed from a pool, whose sums differ from the model's own in their last bits.

    Effects: sets the threads that torch computes with.

    Raises:
        UsageError: bad arguments.
        CapacityError: no prompt fits into the model's context.
    """
    columns = token_columns(options.keep)
    if own_cache(checkpoint.config):
        options = replace(options, batch_size=1)
    options = replace(options, threads=use_threads(checkpoint.config, options.threads))
    spec = checkpoint.spec
    if "resident" in options.keep:
        decoder_layers(checkpoint.skeleton, checkpoint.layers)
    batches, too_long, empty = plan_batches(prompts, checkpoint.tokenizer, checkpoint.max_context, options)
    facts = {
        "model": spec.name,
        "revision": spec.revision,
        "prompts": _digest(batches),
        "max_new_tokens": _lengths(batches),
        "batch_size": options.batch_size,
        "columns": ",".join([*columns, *(name for name in ("embeddings", "text") if name in options.keep)]),
        "ahead": options.ahead if "ahead" in options.keep else 0,
        **({"resident": options.resident} if "resident" in options.keep else {}),
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
        "experts": "in a pool" if pooled else "in memory",
        "moetool": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return CapturePlan(
        checkpoint=checkpoint,
        options=options,
        batches=batches,
        too_long=too_long,
        empty=empty,
        facts=facts,
    )


def plan_batches(
    prompts: Sequence[Prompt], tokenizer: Any, max_context: int | None, options: CaptureOptions
) -> tuple[list[list[Item]], int, int]:
    """Number the prompts that fit and cut them into batches.

    A prompt whose data set wants shorter ones is cut after that many tokens.

    Returns:
        The batches; how many prompts were too long, and how many had no token.

    Raises:
        CapacityError: none fits.
    """
    items: list[Item] = []
    too_long = empty = 0
    longest = (0, 0)
    for prompt in prompts:
        ids = array("i", prompt.token_ids(tokenizer)[: prompt.input_tokens])
        max_tokens = tokens_to_decode(prompt, tokenizer, options.max_new_tokens)
        longest = max(longest, (len(ids), max_tokens))
        if not ids:
            empty += 1
        elif max_context is not None and len(ids) + max_tokens > max_context:
            too_long += 1
        else:
            items.append(Item(len(items), prompt, ids, max_tokens))
    if not items:
        context = "any length" if max_context is None else f"{max_context:,}"
        raise CapacityError(
            f"no prompt fits ({len(prompts):,} in all): the longest has {longest[0]:,} tokens, {longest[1]} "
            f"new ones are asked for, and the model's context holds {context}; give shorter prompts"
        )
    size = options.batch_size
    return [items[start : start + size] for start in range(0, len(items), size)], too_long, empty


def provenance(plan: CapturePlan) -> dict[str, Any]:
    """Entry of the trace's manifest about its capture."""
    options = plan.options
    return {
        "model": plan.checkpoint.name,
        "device": options.device,
        "dtype": options.dtype,
        "max_new_tokens": plan.max_new_tokens,
        "data": list(options.data),
        "threads": options.threads,
        "skipped": plan.too_long + plan.empty,
        "too_long": plan.too_long,
        "empty": plan.empty,
        "capture": plan.digest,
        "versions": {
            "moetool": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def row_bytes(schema: pa.Schema) -> int:
    """Bytes of one row, uncompressed."""
    total = 0
    for field in schema:
        listed = pa.types.is_fixed_size_list(field.type)
        width = field.type.value_type.bit_width * field.type.list_size if listed else field.type.bit_width
        total += width // 8
    return total


def require_disk(plan: CapturePlan, batches: Sequence[int], folder: Path, on_note: Callable[[str], None]) -> None:
    """Say how much disk these batches will take, and refuse them where that cannot be there.

    The rows are written twice, as they come and as the trace, which is put together from them and compressed. How long
    answers will be nobody knows: what would fit only if they were short is begun, since a disk that fills half-way
    loses nothing.

    Args:
        folder: where the trace will lie.
        on_note: called with what there is to say.

    Raises:
        CapacityError: not even the prompts' rows fit.
    """
    least, most = plan.disk_bytes(batches)
    free = shutil.disk_usage(folder).free
    token = row_bytes(plan.schema)
    if least > free:
        raise CapacityError(
            f"{folder} has {count(free, 'B')} free, and the rows of the prompts alone take {count(least, 'B')} "
            f"({token:,} bytes a token); choose another --out, fewer prompts, or fewer columns with --keep"
        )
    size = (
        count(least, "B")
        if least == most
        else f"{count(least, 'B')} to {count(most, 'B')}, depending on answer lengths"
    )
    note = (
        f"{numbered(sum(len(plan.batches[batch]) for batch in batches), 'prompt')}; rows take {token:,} bytes a token "
        f"before compression: {size}. Capture needs twice that on disk; {count(free, 'B')} are free"
    )
    on_note(note if 2 * most <= free else f"{note}. This may not fit; if so, free space and continue with --resume")


def _lengths(batches: list[list[Item]]) -> str:
    """Limit of decoded tokens, per prompt where the data sets define one."""
    limits = [item.max_tokens for batch in batches for item in batch]
    if min(limits) == max(limits):
        return str(limits[0])
    return f"{min(limits)} to {max(limits)} ({hashlib.sha256(json.dumps(limits).encode()).hexdigest()[:12]})"


def _digest(batches: list[list[Item]]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        for item in batch:
            names = (item.prompt.dataset, item.prompt.task, item.prompt.prompt_id, len(item.ids))
            digest.update(json.dumps(names).encode())
            digest.update(item.ids.tobytes())
    return digest.hexdigest()
