"""Record the routing of a transformers model that the caller runs."""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool import __version__
from moetool.base import durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import ForwardInfo, ModelSpec, Phase
from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import MoeLayer, moe_layers, spec_of
from moetool.models.files.tensor_index import has_weights
from moetool.runtime.decoding import Batch
from moetool.runtime.recording.recorder import GateRecorder
from moetool.trace.reader import MANIFEST
from moetool.trace.rows import TokenBatch
from moetool.trace.writer import TraceWriter, speller

KEEP = ("topk", "logits", "embeddings", "hidden", "ahead", "scores", "logits32", "norms", "text")
_HELD_TOKENS = 1024
_SPECS: "weakref.WeakKeyDictionary[Any, ModelSpec]" = weakref.WeakKeyDictionary()


class ModelRecorder:
    """Recording of a `record` block so far.

    Attributes:
        requests: sequences so far.
        tokens: forwarded tokens, without padding.
    """

    def __init__(self, recorder: GateRecorder, writer: TraceWriter, task: str, *, drop_tokens: bool = False) -> None:
        self.requests = self.tokens = 0
        self._recorder, self._writer = recorder, writer
        self._task, self._drop_tokens = task, drop_tokens
        self._tasks: list[str] = []  # task of every request
        self._forwards = 0
        self._mine_B = np.zeros(0, np.int64)  # the requests of the running batch, by its rows
        self._iteration_B, self._length_B, self._prompt_tokens_B = np.zeros((3, 0), np.int64)
        self._prompt_tokens: list[int] = []  # of every request in earlier batches
        self._length: list[int] = []
        self._pending: tuple[Batch, np.ndarray] | None = None
        self._kept: list[np.ndarray] = []
        self._held = 0

    def label(self, task: str) -> None:
        """Set the task of later sequences."""
        self._task = task

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook that runs before a forward of the model."""
        self._recorder.discard()  # data of a failed forward
        ids, real_BS, seen = _inputs(args, kwargs)
        num_rows, width = real_BS.shape
        if seen == 0:
            self._begin(num_rows)
        elif num_rows != len(self._mine_B):
            raise MismatchError(
                f"a forward continues {len(self._mine_B)} sequences with {num_rows} rows (beam search, or a cache of "
                f"another batch), expected as many; record without beam search"
            )
        else:
            self._iteration_B += 1 if width == 1 else self._iteration_B > 0
        length_B = real_BS.sum(axis=1)
        prompt_B = self._iteration_B == 0
        position_BS = self._length_B[:, None] + np.cumsum(real_BS, axis=1) - 1
        self._prompt_tokens_B += length_B * prompt_B
        self._length_B += length_B
        # Arrays instead of tuples: only the recorder reads them, and it needs arrays.
        about: dict[str, Any] = {
            "request_T": np.repeat(self._mine_B, width),
            "phase_T": np.repeat(np.where(prompt_B, Phase.PREFILL, Phase.DECODE), width),
            "position_T": position_BS.ravel(),
        }
        tokens: dict[str, Any] = {
            "token_id_T": np.full(real_BS.size, -1) if self._drop_tokens else ids.ravel(),
            "iteration_T": np.repeat(self._iteration_B, width),
        }
        batch = Batch(info=ForwardInfo(forward_id=self._forwards, **about), **tokens)
        self._pending = batch, real_BS.ravel()

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """Hook that runs after a forward of the model."""
        if self._pending is None:
            return
        batch, real_T = self._pending
        self._pending = None
        self._recorder.hold(batch)
        self._kept.append(real_T)
        self._held += len(real_T)
        self._forwards += 1
        self.tokens += int(real_T.sum())
        if self._held >= _HELD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Pass buffered forwards to the writer."""
        if not self._kept:
            return
        rows, embeddings_TD = self._recorder.rows()
        keep_T = np.concatenate(self._kept)
        self._kept, self._held = [], 0
        if embeddings_TD is not None:
            self._write_embeddings(rows.select(keep_T), embeddings_TD[keep_T])
        self._writer.append(rows.select(keep_T))

    def finish(self, dataset: str, provenance: dict[str, Any], spell: Callable[[int], str] | None = None) -> None:
        """Write buffered forwards and the requests; `spell` returns a token's text."""
        self.flush()
        self._end_batch()
        for request in range(self.requests):
            rows = self._length[request]
            self._writer.add_request(
                request,
                dataset=dataset,
                task=self._tasks[request],
                prompt_id=str(request),
                prompt_tokens=self._prompt_tokens[request],
                new_tokens=rows - self._prompt_tokens[request],
            )
        self._writer.finish(composition={"kind": "log"}, provenance=provenance, spell=spell)

    def _begin(self, num_rows: int) -> None:
        self._end_batch()
        self._mine_B = np.arange(self.requests, self.requests + num_rows)
        self._iteration_B, self._length_B, self._prompt_tokens_B = np.zeros((3, num_rows), np.int64)
        self._tasks += [self._task] * num_rows
        self.requests += num_rows

    def _end_batch(self) -> None:
        self._prompt_tokens += self._prompt_tokens_B.tolist()
        self._length += self._length_B.tolist()

    def _write_embeddings(self, rows: TokenBatch, embeddings_TD: np.ndarray) -> None:
        """Write the mean embedding of each request's tokens in each forward."""
        pairs = np.stack([rows.forward_T, rows.request_T])
        keys, first, place_T = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        means_ND = np.zeros((keys.shape[1], embeddings_TD.shape[1]), np.float32)
        np.add.at(means_ND, place_T.ravel(), embeddings_TD)
        means_ND /= np.bincount(place_T.ravel())[:, None]
        self._writer.add_embeddings(keys[1], rows.iteration_T[first], means_ND)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """Token ids [B, S] (-1 with embeddings only), the mask of non-padding tokens, and tokens in the cache."""
    ids, embeds = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    given = embeds if ids is None else ids
    if given is None:
        raise MismatchError("a forward has neither input_ids nor inputs_embeds, expected one of a language model")
    shape = given.shape[:2]
    cache = kwargs.get("cache", kwargs.get("past_key_values"))  # transformers 5.24 renamed it
    seen = int(cache.get_seq_length()) if cache is not None else 0
    mask = kwargs.get("attention_mask")
    real_BS = np.ones(shape, bool)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        real_BS = mask[:, -shape[1] :].cpu().numpy() > 0
    token_ids = np.full(shape, -1, np.int32) if ids is None else ids.cpu().numpy().astype(np.int32)
    return token_ids, real_BS, seen


def _spec(model: Any, layers: list[MoeLayer]) -> ModelSpec:
    """The spec of the model's checkpoint folder, if it has one; else of the model in memory.

    Effects: keeps it while the model lives, because identifying a checkpoint takes longer than a short block.
    """
    if (known := _SPECS.get(model)) is None:
        known = _SPECS[model] = _found_spec(model, layers)
    return known


def _found_spec(model: Any, layers: list[MoeLayer]) -> ModelSpec:
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if (folder / "config.json").is_file():
        with Checkpoint.open(str(folder), weights=has_weights(folder)) as checkpoint:
            return checkpoint.spec
    parameters = dict(model.named_parameters())
    sizes = []
    for layer in layers:
        tensors = [parameters[f"{layer.path}.{name}"] for name in layer.form.parameters]
        sizes.append(sum(t.numel() * t.element_size() for t in tensors) // layer.form.num_experts)
    revision = hashlib.sha256(("in memory " + model.config.to_json_string(use_diff=False)).encode()).hexdigest()
    return spec_of(model, layers, name=str(folder) or "model", revision=revision, expert_bytes_L=tuple(sizes))


@contextlib.contextmanager
def record(
    model: Any,
    out: str | Path,
    *,
    keep: Sequence[str] = ("topk",),
    task: str = "recorded",
    drop_tokens: bool = False,
    tokenizer: Any = None,
    overwrite: bool = False,
) -> Iterator[ModelRecorder]:
    """Record the routing of the model's forwards in a `with` block as a trace.

    A forward without earlier keys and values begins one request per row; later forwards continue them. Padding, by the
    attention mask, is left out. Any call of the model is recorded, `generate` included.

        with moetool.record(model, "trace"):
            model.generate(**tokenizer(["Hello"], return_tensors="pt"))

    Args:
        model: a causal language model of transformers, of a family that moetool knows (`moetool models`).
        out: folder of the trace; it appears there whole at the end of the block, or not at all.
        keep: columns to record besides experts and weights, from `KEEP`.
        task: task of the requests; the recorder's `label` changes it.
        drop_tokens: leave out token ids, because they reveal the text.
        tokenizer: tokenizer of the model; needed to keep `text`.
        overwrite: replace an existing trace.

    Yields:
        The recorder, with its counts.

    Effects: adds hooks to the model, which the end of the block removes.

    Raises:
        UsageError: the model is no MoE that can be hooked, `keep` has an unknown column, `out` exists, or nothing ran.
        MismatchError: the rows of a batch change while it decodes (beam search).
    """
    if unknown := set(keep) - set(KEEP):
        raise UsageError(f"cannot keep {', '.join(sorted(unknown))}: known are {', '.join(KEEP)}")
    if "text" in keep and (tokenizer is None or drop_tokens):
        raise UsageError("to keep text, pass the tokenizer to record and do not set drop_tokens")
    if not hasattr(model, "config"):
        raise UsageError(f"{type(model).__name__} is not a transformers model, expected a causal language model")
    out = Path(out)
    durable.require_absent(out, overwrite, MANIFEST)
    layers = moe_layers(model)
    spec = _spec(model, layers)
    with durable.staged_directory(out, overwrite, MANIFEST) as folder:
        recorder = GateRecorder(model, layers, keep)
        writer = TraceWriter(folder, spec, keep)
        running = ModelRecorder(recorder, writer, task, drop_tokens=drop_tokens)
        handles = [
            model.register_forward_pre_hook(running.before, with_kwargs=True),
            model.register_forward_hook(running.after),
        ]
        try:
            yield running
            if not running.tokens:
                raise UsageError("nothing was recorded: the block ran no forward of this model")
            running.finish(
                "recorded",
                {"model": spec.name, "versions": {"moetool": __version__}, "recorded": "in code"},
                None if tokenizer is None else speller(tokenizer),
            )
        except BaseException:
            writer.abort()
            raise
        finally:
            recorder.close()
            for handle in handles:
                handle.remove()
