"""Training of a reference model: from text to a plain transformers checkpoint with its card."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from moetool import durable
from moetool.errors import MismatchError, MoetoolError, UsageError
from moetool.json_files import read_json
from moetool.models.loading import use_threads
from moetool.models.location import REFERENCE, locate
from moetool.reference.card import DomainMeasures, measure, readme
from moetool.reference.data import Domain, TextBatches, read_domains, text_files, training_documents
from moetool.reference.model import build, new_config, open_checkpoint
from moetool.reference.tokenizer import learn_tokenizer, tokenizer_of
from moetool.reference.training_recipe import Recipe
from moetool.reference.training_state import Progress, State, require_room

MARKER = "training.json"
STATE = ".training"
"""Suffix of the folder with the state of an unfinished run, next to the result."""

_ARCHITECTURE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
    *("tie_word_embeddings",),
)


def train(
    recipe: Recipe,
    data: Path,
    out: Path,
    *,
    start: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Train a model and write it, with its card, to `out`.

    Args:
        data: a folder of text files, one per domain.
        start: name or folder of the checkpoint to continue from; None begins with new weights.
        resume: continue from the state of a killed run. The losses are those of an uninterrupted run.
        overwrite: replace `out` and an existing state.
        on_progress: called with the activity, the amount done and the total.

    Effects: writes `out`, whole or not at all. Saves the run's state to `out.training` at intervals and removes it at
    the end. Sets the number of torch's threads.

    Returns:
        The content of training.json.

    Raises:
        UsageError: an input is missing or invalid, or a result or a state exists.
        MismatchError: the state to resume is of another run, or `start` is not of the recipe's architecture.
        CapacityError: the disk has no room for the state.
        MoetoolError: a loss is not finite, or a write fails; the last saved state stays.
    """
    durable.require_absent(out, overwrite, MARKER)
    folder = out.with_name(out.name + STATE)
    _require_state(folder, resume, overwrite)
    text_files(data)
    source = locate(start or REFERENCE)
    if start is not None and recipe.data.tokenizer == "new":
        raise UsageError(f"data.tokenizer is new, but the weights of {source} have their own; leave one of them out")
    model, tokenizer, tokenizer_files = _begin(recipe, data, source, from_checkpoint=start is not None)
    threads = use_threads(model.config, recipe.fit.threads)
    domains = read_domains(
        data, tokenizer, recipe.data.held_out, lambda done, total: on_progress("reading bytes of text", done, total)
    )
    batches = TextBatches(
        domains,
        length=recipe.fit.sequence_length,
        batch_size=recipe.fit.batch_size,
        steps=recipe.fit.max_steps,
        mixing=recipe.data.mixing,
        seed=recipe.seed,
    )
    state = State(
        folder,
        {
            "recipe": recipe.to_json(),
            "data": {domain.name: domain.sha256 for domain in domains},
            "start": None if start is None else _weights_sha256(source),
            "tokenizer": hashlib.sha256(tokenizer_files["tokenizer.json"]).hexdigest(),
            "threads": threads,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "torch": torch.__version__,
        },
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if resume:
            progress = state.load(model)
        else:
            state.remove()
            progress = Progress()
        require_room(out.parent, model)
        if start is not None and progress.start is None:
            progress.start = measure(model, domains, recipe, on_progress).to_json()
        from moetool.reference.steps import run_steps  # Lightning takes seconds to import

        run_steps(model, batches, recipe, progress, state, on_progress)
        model.to(torch.bfloat16).to(torch.float32)  # score the weights as they are saved
        measured = measure(model, domains, recipe, on_progress)
        facts = _facts(recipe, domains, batches, progress, measured, threads)
        if start is not None:
            facts["continues"] = _history(start, source)
        with durable.staged_directory(out, overwrite, MARKER) as staged:
            _write(staged, out.name, model, tokenizer_files, facts)
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        rest = f"continue from {folder} with --resume" if folder.exists() else "choose another --out"
        raise MoetoolError(f"cannot write {out}: {error}; free space; {rest}") from error
    state.remove()
    return facts


def _require_state(folder: Path, resume: bool, overwrite: bool) -> None:
    durable.put_back(folder)
    if folder.exists() and not (resume or overwrite):
        raise UsageError(
            f"{folder} holds the state of an unfinished run; continue with --resume, or start again with --overwrite"
        )
    if resume and not folder.exists():
        raise UsageError(f"there is nothing to resume: {folder} does not exist; leave --resume out")


def _begin(recipe: Recipe, data: Path, source: Path, *, from_checkpoint: bool) -> tuple[Any, Any, Mapping[str, bytes]]:
    """Return the model before its first step, its tokenizer, and the tokenizer's files by name."""
    if recipe.data.tokenizer == "new":
        documents = training_documents(data, recipe.data.held_out)
        tokenizer, files = learn_tokenizer(documents, recipe.data.vocabulary, source)
    else:
        tokenizer, files = tokenizer_of(source)
    config = new_config(recipe.model, tokenizer)
    if not from_checkpoint:
        return build(config, recipe.seed), tokenizer, files
    model = open_checkpoint(source)
    require_same_architecture(source, model.config, config)
    return model, tokenizer, files


def _write(folder: Path, name: str, model: Any, tokenizer_files: Mapping[str, bytes], facts: Mapping[str, Any]) -> None:
    _save(model, folder)
    for file, content in tokenizer_files.items():
        (folder / file).write_bytes(content)
    (folder / MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(readme(name, model, facts), encoding="utf-8")


def require_same_architecture(source: Path, found: Any, expected: Any) -> None:
    """Raise MismatchError if a checkpoint is not of the recipe's architecture."""
    for name in _ARCHITECTURE:
        if getattr(found, name) != getattr(expected, name):
            raise MismatchError(
                f"{source} has {name} {getattr(found, name)}, but the recipe has {getattr(expected, name)}; continue "
                "with the recipe that it was made with, or change [model]"
            )


def _save(model: Any, folder: Path) -> None:
    """Write a plain checkpoint in bf16. Effects: leaves the model in bf16."""
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder)


def _weights_sha256(folder: Path) -> str:
    """Return the sha256 of a checkpoint's weights; with several shards, the sha256 of theirs."""
    hashes = [durable.sha256_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _history(start: str, source: Path) -> dict[str, Any]:
    """Return facts about the checkpoint that a run began from."""
    try:
        earlier = read_json(source / MARKER, advice="")
    except (OSError, MismatchError):
        earlier = {}
    if not isinstance(earlier, dict):
        earlier = {}
    tokens, before = earlier.get("tokens"), earlier.get("continues")
    return {
        "name": start if start == REFERENCE else source.name,
        "sha256": _weights_sha256(source),
        "tokens": tokens if isinstance(tokens, int) else None,
        **({"continues": before} if isinstance(before, dict) else {}),
    }


def _facts(
    recipe: Recipe,
    domains: Sequence[Domain],
    batches: TextBatches,
    progress: Progress,
    measured: DomainMeasures,
    threads: int,
) -> dict[str, Any]:
    """Return the content of training.json."""
    fit = recipe.fit
    tokens = fit.max_steps * fit.batch_size * fit.sequence_length
    return {
        "tokens": tokens,
        "steps": fit.max_steps,
        "minutes": round(progress.seconds / 60, 1),
        "tokens_per_second": round(tokens / max(progress.seconds, 1e-9)),
        "recipe": recipe.to_json(),
        "threads": threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "domains": {
            domain.name: {
                "source": recipe.sources.get(domain.name),
                "sha256": domain.sha256,
                "bytes": domain.num_bytes,
                "documents": domain.num_documents,
                "held_out_documents": domain.num_held_out,
                "train_tokens": len(domain.train_N),
                "share_of_batches": round(float(share), 4),
            }
            for domain, share in zip(domains, batches.share_D, strict=True)
        },
        "held_out": measured.to_json(),
        "held_out_of_start": progress.start,
        "loss": _curve(progress.losses),
    }


def _curve(losses: Sequence[float], points: int = 100) -> list[float]:
    """Return at most `points` means of the losses, over equal numbers of steps."""
    size = max(1, -(-len(losses) // points))
    parts = [losses[at : at + size] for at in range(0, len(losses), size)]
    return [round(sum(part) / len(part), 4) for part in parts]
