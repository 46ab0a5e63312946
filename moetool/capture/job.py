"""The plan of a capture before the model is loaded: prompts as tokens in batches, and disk space."""

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
from moetool.base.config import Span, require_within
from moetool.base.errors import CapacityError, MismatchError, UsageError
from moetool.base.tables import count, numbered
from moetool.base.types import ModelSpec
from moetool.capture.composition import Composition, compose
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import use_threads
from moetool.prompts.gather import Prompt, tokens_to_decode
from moetool.runtime.experts.partial_forward import decoder_layers
from moetool.trace.schemas import embedding_schema, token_schema
from moetool.trace.writer import token_columns

CHUNK_TOKENS = 512
"""Prompt tokens of one forward where no memory was divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of a capture.

    Attributes:
        max_new_tokens: maximum tokens to decode greedily per prompt; 0: forward prompts only (default: by
            `moetool.prompts.gather.tokens_to_decode`).
        answers: forward each prompt with its data set's own answer, in one pass, instead of decoding. Rows are those of
            a model that gave this answer.
        batch_size: consecutive prompts per batch, which decode together (default: automatic, see
            `moetool.capture.automatic`). The next batch begins after the last request of the previous one, so that the
            same composition gives the same rows.
        keep: columns to record, from `KEEP` and `EXTRA` of `moetool.trace.rows`.
        ahead: number of layers that the column `ahead` looks ahead.
        resident: share of a layer's experts that the column `resident` assumes resident.
        device: `cpu` or `cuda` (default: automatic).
        dtype: data type of the model (default: the checkpoint's).
        threads: compute threads; see `use_threads`. The same number gives the same rows.
        data: origins of the prompts, one object per source, for the manifest; see
            `moetool.prompts.gather.GatheredPrompts`.
    """

    max_new_tokens: int | None = None
    answers: bool = False
    batch_size: int | None = None
    keep: tuple[str, ...] = ("topk", "logits")
    ahead: int = 3
    resident: float = 0.5
    device: str | None = None
    dtype: str | None = None
    threads: int = 0
    data: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        require_within(self, ahead=Span(1), batch_size=Span(1), max_new_tokens=Span(0))
        if not 0 < self.resident <= 1:
            raise UsageError(f"resident is {self.resident}, expected a share of a layer's experts: above 0, up to 1")


class Item(NamedTuple):
    """A prompt as tokens (int32), the number of its request, and its limit of decoded tokens.

    The last `answer_tokens` - 1 tokens are its given answer without its last token, which a decoded one is not
    forwarded either.
    """

    request: int
    prompt: Prompt
    ids: "array[int]"
    max_tokens: int
    answer_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of the prompt alone."""
        return len(self.ids) - max(0, self.answer_tokens - 1)

    @property
    def full_tokens(self) -> int:
        """Return the most tokens of its KV cache."""
        return len(self.ids) + max(1, self.max_tokens)


class ReadPrompts(NamedTuple):
    """Prompts as tokens, the numbers of those that are too long or empty, and why others were refused."""

    items: list[Item]
    too_long: int
    empty: int
    refused: tuple[str, ...]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Return forwarded tokens of each prompt, and most tokens with its answer."""
        return [(len(item.ids), item.full_tokens) for item in self.items]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePlan:
    """A capture, before it runs.

    Attributes:
        options: final options, with device, data type and number of threads.
        batches: prompts of each batch.
        composition: the batches' sizes, KV cache and forwards.
        too_long: number of prompts left out because prompt and answer exceed the model's context.
        empty: number of prompts left out because they have no token.
        refused: why prompts were left out that the model cannot read.
        facts: inputs that determine the rows; equal facts give equal rows.
    """

    checkpoint: Checkpoint
    options: CaptureOptions
    batches: list[list[Item]]
    too_long: int
    empty: int
    facts: dict[str, Any]
    composition: Composition
    refused: tuple[str, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def num_prompts(self) -> int:
        return sum(map(len, self.batches))

    @property
    def num_tokens(self) -> int:
        """Return the most tokens to forward."""
        return sum(map(_forwarded, self.batches))

    def tokens_of(self, batches: Iterable[int]) -> int:
        """Return the most tokens to forward in these batches."""
        return sum(_forwarded(self.batches[batch]) for batch in batches)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    @property
    def max_new_tokens(self) -> int:
        """Return the most tokens of an answer."""
        return max(item.max_tokens for batch in self.batches for item in batch)

    @property
    def ahead(self) -> int:
        """Return the layers that column `ahead` looks ahead; 0 without it."""
        return self.options.ahead if "ahead" in self.options.keep else 0

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the rows of tokens."""
        return token_schema(self.spec, token_columns(self.options.keep), self.ahead)

    def item(self, request: int) -> Item:
        batch = next(batch for batch in self.batches if batch and batch[-1].request >= request)
        return batch[request - batch[0].request]

    def disk_bytes(self, batches: Iterable[int]) -> tuple[int, int]:
        """Return uncompressed bytes of these batches' rows: prompts alone, and with the longest answers."""
        token, embedding = row_bytes(self.schema), 0
        if "embeddings" in self.options.keep:
            embedding = row_bytes(embedding_schema(self.spec))
        items = [item for batch in batches for item in self.batches[batch]]
        least = sum(token * len(item.ids) + embedding for item in items)
        return least, least + (token + embedding) * sum(max(0, item.max_tokens - 1) for item in items)


def plan_capture(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt] | ReadPrompts,
    options: CaptureOptions,
    *,
    pooled: bool,
    composition: Composition | None = None,
) -> CapturePlan:
    """Plan a capture.

    Args:
        options: device and data type are by default `cpu` and `float32` here.
        pooled: whether experts are computed from a pool, whose sums differ from the model's in the last bits.
        composition: prompts that run together (default: batches of `options.batch_size`, by default one prompt).

    Effects: sets torch's number of threads.

    Raises:
        UsageError: an argument is invalid.
        CapacityError: no prompt fits into the model's context.
        MismatchError: the model can read none of the prompts.
    """
    columns = token_columns(options.keep)
    threads = use_threads(checkpoint.config, options.threads)
    options = replace(options, threads=threads, device=options.device or "cpu", dtype=options.dtype or "float32")
    if "resident" in options.keep:
        decoder_layers(checkpoint.skeleton, checkpoint.layers)
    read = prompts if isinstance(prompts, ReadPrompts) else read_prompts(prompts, checkpoint, options)
    if composition is None:
        size = options.batch_size or 1
        composition = compose(read.lengths, batch_size=size, kv_tokens=1, chunk_tokens=CHUNK_TOKENS)
    batches = [read.items[start:end] for start, end in composition.bounds()]
    facts = {
        "prompts": _digest(batches),
        "max_new_tokens": _lengths(batches),
        **({"answers": True} if options.answers else {}),
        "composition": composition.to_json(),
        "columns": ",".join([*columns, *(name for name in ("embeddings", "text") if name in options.keep)]),
        "ahead": options.ahead if "ahead" in options.keep else 0,
        **({"resident": options.resident} if "resident" in options.keep else {}),
        **machine_facts(checkpoint, options, pooled=pooled),
    }
    return CapturePlan(
        checkpoint=checkpoint,
        options=options,
        batches=batches,
        composition=composition,
        too_long=read.too_long,
        empty=read.empty,
        refused=read.refused,
        facts=facts,
    )


def machine_facts(checkpoint: Checkpoint, options: CaptureOptions, *, pooled: bool) -> dict[str, Any]:
    """Return the facts in which all machines of a capture must agree."""
    return {
        "model": checkpoint.spec.name,
        "revision": checkpoint.spec.revision,
        "device": options.device,
        "dtype": options.dtype,
        "threads": options.threads,
        "experts": "in a pool" if pooled else "in memory",
        "moetool": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def read_prompts(prompts: Iterable[Prompt], checkpoint: Checkpoint, options: CaptureOptions) -> ReadPrompts:
    """Read prompts as tokens, and number those that the model can forward.

    A prompt beyond its data set's limit is cut. A prompt without an answer has none to forward.

    Raises:
        CapacityError: no prompt fits.
        MismatchError: the model can read none of the prompts.
    """
    tokenizer, max_context = checkpoint.tokenizer, checkpoint.max_context
    items: list[Item] = []
    refused: list[str] = []
    too_long = empty = number = 0
    longest = (0, 0)
    for prompt in prompts:
        number += 1
        try:
            ids = array("i", prompt.token_ids(tokenizer, checkpoint.vocab_size, prompt.input_tokens))
            answer = _answer(prompt, checkpoint, options) if options.answers and ids else []
        except MismatchError as error:
            refused.append(str(error))
            continue
        max_tokens = 0 if options.answers else tokens_to_decode(prompt, tokenizer, options.max_new_tokens)
        longest = max(longest, (len(ids), max_tokens or len(answer)))
        ids.extend(answer[:-1])
        if not ids:
            empty += 1
        elif max_context is not None and len(ids) + max_tokens > max_context:
            too_long += 1
        else:
            items.append(Item(len(items), prompt, ids, max_tokens, len(answer)))
    if not items and refused and not (too_long or empty):
        raise MismatchError(refused[0])
    if not items:
        context = "any length" if max_context is None else f"{max_context:,}"
        raise CapacityError(
            f"no prompt fits ({number:,} in all): the longest has {longest[0]:,} tokens, {longest[1]:,} "
            f"new ones are requested, but the model's context holds {context}; give shorter prompts or a smaller "
            "--max-new-tokens"
        )
    return ReadPrompts(items, too_long, empty, tuple(refused))


def _answer(prompt: Prompt, checkpoint: Checkpoint, options: CaptureOptions) -> list[int]:
    """Return the tokens of a prompt's own answer. Raises: MismatchError: the model does not embed a token."""
    ids: list[int] = checkpoint.tokenizer(prompt.answer or "", add_special_tokens=False)["input_ids"]
    ids = ids[: options.max_new_tokens]
    prompt.require_embedded(ids, checkpoint.vocab_size)
    return ids


def provenance(plan: CapturePlan) -> dict[str, Any]:
    """Return the manifest's entry about the capture."""
    options = plan.options
    return {
        "model": plan.checkpoint.name,
        "device": options.device,
        "dtype": options.dtype,
        "max_new_tokens": plan.max_new_tokens,
        "data": list(options.data),
        "threads": options.threads,
        "skipped": plan.too_long + plan.empty + len(plan.refused),
        "too_long": plan.too_long,
        "empty": plan.empty,
        "refused": len(plan.refused),
        "capture": plan.digest,
        "composition": plan.composition.to_json(),
        "versions": {
            "moetool": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def row_bytes(schema: pa.Schema) -> int:
    """Return the uncompressed bytes of one row."""
    total = 0
    for field in schema:
        listed = pa.types.is_fixed_size_list(field.type)
        width = field.type.value_type.bit_width * field.type.list_size if listed else field.type.bit_width
        total += width // 8
    return total


def require_disk(plan: CapturePlan, batches: Sequence[int], folder: Path, on_note: Callable[[str], None]) -> None:
    """Report the disk space of these batches, and refuse them if it is insufficient.

    Rows are written twice: in batches, and compressed in the trace. The length of answers is unknown. A capture that
    fits only with short answers is started, since a full disk loses nothing.

    Args:
        on_note: called with messages.

    Raises:
        CapacityError: the prompts' rows alone do not fit.
    """
    least, most = plan.disk_bytes(batches)
    free = shutil.disk_usage(folder).free
    token = row_bytes(plan.schema)
    if least > free:
        raise CapacityError(
            f"{folder} has {count(free, 'B')} free, but the rows of the prompts alone take {count(least, 'B')} "
            f"({token:,} bytes/token); choose another --out, fewer prompts, or fewer columns with --keep"
        )
    size = (
        count(least, "B")
        if least == most
        else f"{count(least, 'B')} to {count(most, 'B')}, depending on answer lengths"
    )
    note = (
        f"{numbered(sum(len(plan.batches[batch]) for batch in batches), 'prompt')}; rows take {token:,} bytes/token "
        f"before compression: {size}. Capture needs twice that on disk; {count(free, 'B')} are free"
    )
    on_note(note if 2 * most <= free else f"{note}. This may not fit; if so, free space and continue with --resume")


def _forwarded(items: Iterable[Item]) -> int:
    return sum(len(item.ids) + max(0, item.max_tokens - 1) for item in items)


def _lengths(batches: list[list[Item]]) -> str:
    """Return the limits of decoded tokens, per prompt if the data sets define them."""
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
