"""Training recipes of reference models: a TOML file and its checks."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moetool.bounded_read import read_toml
from moetool.config import POSITIVE, Span, parse, require_within
from moetool.errors import UsageError
from moetool.json_files import JsonRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """Options of text and batches.

    Attributes:
        held_out: share of each domain's documents to hold out, chosen by their hash.
        held_out_tokens: maximum number of held-out tokens to score per domain, evenly spaced.
        tokenizer: tokenizer of new weights: that of the embedded reference model, or a new one learned from the
            training documents.
        vocabulary: number of tokens of a new tokenizer.
        mixing: a domain's share of the batches is its tokens to this power: 1 weighs all text equally, 0 all domains.
    """

    held_out: float = 0.05
    held_out_tokens: int = 32768
    tokenizer: Literal["reference", "new"] = "reference"
    vocabulary: int = 4096
    mixing: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The architecture, of Qwen3's mixture-of-experts family; every layer is an MoE layer.

    Attributes:
        balance: weight of the balancing loss.
    """

    hidden_size: int = 192
    num_layers: int = 8
    num_experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 1024
    balance: float = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """Options of gradient descent.

    Attributes:
        max_steps: number of batches.
        batch_size: sequences in a batch.
        sequence_length: tokens of a sequence.
        learning_rate: peak learning rate, after the warm-up.
        schedule: after the warm-up, `cosine` falls to 0; `wsd` stays constant, then falls linearly over `decay`.
        warm_up: share of the steps over which the rate rises.
        decay: share of the steps at the end over which `wsd` falls; 1 minus `warm_up` gives a linear decay.
        weight_decay: AdamW's weight decay, on matrices only.
        clip: maximum norm of the gradient.
        precision: data type of the products; weights and sums are float32.
        threads: compute threads (0 = automatic). Another number changes the last digits.
        save_every: steps between saved states that a killed run can resume from.
    """

    max_steps: int = 2000
    batch_size: int = 16
    sequence_length: int = 256
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warm_up: float = 0.05
    decay: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    threads: int = 0
    save_every: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(JsonRecord):
    """A training run without its text and its starting checkpoint.

    Attributes:
        seed: seed of the first weights and of the batches.
        sources: by domain, origin and licence of its text, for the card.
    """

    seed: int = 0
    data: TextOptions = field(default_factory=TextOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    fit: GradientOptions = field(default_factory=GradientOptions)
    sources: dict[str, str] = field(default_factory=dict)


def read_recipe(path: Path, settings: Mapping[str, Any]) -> Recipe:
    """Read a recipe, with some of its values replaced.

    Args:
        settings: values to replace, nested as in the recipe: {"fit": {"max_steps": 10}}.

    Raises:
        UsageError: the file cannot be read, or has an unknown key or an invalid value.
    """
    try:
        values = read_toml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the recipe {path}: {error}") from None
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            values[name] = {**values[name], **value}
        else:
            values[name] = value
    sections = {"data": TextOptions, "model": ModelOptions, "fit": GradientOptions}
    for name, kind in sections.items():  # by section, so that the error for a wrong key names the nearest one
        if name in values:
            parse(kind, values[name], name)
    recipe = parse(Recipe, values, "recipe")
    _check(recipe)
    return recipe


def _check(recipe: Recipe) -> None:
    """Raise UsageError if a value is invalid."""
    data, model, fit = recipe.data, recipe.model, recipe.fit
    one, finite = Span(1), Span(0, below=True)
    widths = {name: one for name in asdict(model) if name not in ("balance", "head_dim")}
    require_within(data, "data.", held_out_tokens=Span(2), held_out=Span(0, 1), mixing=Span(0, 1))
    require_within(model, "model.", **widths, head_dim=Span(2), balance=finite)
    require_within(fit, "fit.", max_steps=one, batch_size=one, sequence_length=Span(2), save_every=one, threads=Span(0))
    require_within(fit, "fit.", warm_up=Span(0, 1), decay=Span(0, 1), weight_decay=finite)
    require_within(fit, "fit.", learning_rate=POSITIVE, clip=POSITIVE)
    if model.top_k > model.num_experts:
        raise UsageError(f"model.top_k is {model.top_k}, expected at most the {model.num_experts} of model.num_experts")
    if model.num_heads % model.num_kv_heads or model.head_dim % 2:
        raise UsageError(
            f"model.num_heads is {model.num_heads}, expected a multiple of model.num_kv_heads, {model.num_kv_heads}, "
            f"and model.head_dim, {model.head_dim}, to be even"
        )
    if fit.sequence_length > model.max_positions:
        raise UsageError(
            f"fit.sequence_length is {fit.sequence_length}, expected at most model.max_positions, {model.max_positions}"
        )


def same_so_far(one: GradientOptions, other: GradientOptions, steps: int) -> bool:
    """Return whether two runs have the same first steps, though their numbers of steps may differ.

    With the schedule `wsd`, the number of steps can change until the learning rate begins to fall.
    """
    schedule = {"max_steps", "learning_rate", "schedule", "warm_up", "decay", "save_every"}
    rest = [{n: v for n, v in asdict(fit).items() if n not in schedule} for fit in (one, other)]
    return (
        rest[0] == rest[1]
        and steps <= min(one.max_steps, other.max_steps)
        and all(learning_rate(one, step) == learning_rate(other, step) for step in range(steps))
    )


def learning_rate(fit: GradientOptions, step: int) -> float:
    """Return the learning rate of a step, counted from 0."""
    warm_up = round(fit.warm_up * fit.max_steps)
    if step < warm_up:
        return fit.learning_rate * (step + 1) / warm_up
    left = (fit.max_steps - step) / (fit.max_steps - warm_up)
    if fit.schedule == "wsd":
        decay = round(fit.decay * fit.max_steps)
        return fit.learning_rate * min(1.0, (fit.max_steps - step) / max(1, min(decay, fit.max_steps - warm_up)))
    return fit.learning_rate * 0.5 * (1 - math.cos(math.pi * left))
