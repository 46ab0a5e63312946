"""The card of a reference model: its loss on each domain, and how its routing differs between them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moetool.models.spec import moe_layers
from moetool.reference.data import Domain, held_out_rows
from moetool.reference.training_recipe import Recipe
from moetool.tables import percent

_ROWS = 16  # rows per forward


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainMeasures:
    """Scores of a model on the held-out text.

    Attributes:
        cross_entropy: by domain, in nats per token.
        tokens: by domain, the number of scored predictions.
        between_L: Jensen-Shannon divergence of each layer's expert use, as a mean over pairs of domains.
        within_L: the same between two halves of one domain, as a mean over the domains: the level of chance.
        busiest: the busiest expert's load as a multiple of the mean, as a mean over the layers.

    Units: divergences in bits.
    """

    cross_entropy: dict[str, float]
    tokens: dict[str, int]
    between_L: list[float]
    within_L: list[float]
    busiest: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values, rounded to their precision."""
        return {
            "cross_entropy": {name: round(value, 4) for name, value in self.cross_entropy.items()},
            "tokens": self.tokens,
            "between": [round(value, 4) for value in self.between_L],
            "within": [round(value, 4) for value in self.within_L],
            "busiest": round(self.busiest, 3),
        }


@torch.no_grad()
def measure(
    model: Any,
    domains: Sequence[Domain],
    recipe: Recipe,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> DomainMeasures:
    """Score a model on every domain's held-out text, in float32.

    The halves of a domain are its even and its odd rows.
    """
    length = recipe.fit.sequence_length
    rows = {d.name: torch.from_numpy(held_out_rows(d, length, recipe.data.held_out_tokens)) for d in domains}
    total = sum(rows_RL[:, 1:].numel() for rows_RL in rows.values())
    cross_entropy, done = {}, 0
    layers = moe_layers(model)
    use_DHLE = np.zeros((len(domains), 2, len(layers), model.config.num_experts))
    chosen: list[Tensor] = []
    hooks = [
        layer.experts.register_forward_pre_hook(lambda module, args: chosen.append(args[1].clone())) for layer in layers
    ]
    training = model.training
    model.eval()
    try:
        for number, (name, rows_RL) in enumerate(rows.items()):
            loss = 0.0
            for half in range(2):
                for at in range(half, len(rows_RL), 2 * _ROWS):
                    rows_BL = rows_RL[at : at + 2 * _ROWS : 2]
                    chosen.clear()
                    scores = model(rows_BL[:, :-1], use_cache=False).logits.flatten(0, 1)
                    loss += float(nn.functional.cross_entropy(scores, rows_BL[:, 1:].flatten(), reduction="sum"))
                    for layer, index_TK in enumerate(chosen):
                        counts_E = torch.bincount(index_TK.flatten(), minlength=use_DHLE.shape[-1])
                        use_DHLE[number, half, layer] += counts_E.numpy()
                    done += rows_BL[:, 1:].numel()
                    on_progress("scoring held-out tokens", done, total)
            cross_entropy[name] = loss / rows_RL[:, 1:].numel()
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    between_L, within_L = divergences(use_DHLE)
    share_LE = _shares(use_DHLE.sum(1)).mean(0)
    return DomainMeasures(
        cross_entropy=cross_entropy,
        tokens={name: rows_RL[:, 1:].numel() for name, rows_RL in rows.items()},
        between_L=between_L,
        within_L=within_L,
        busiest=float((share_LE.max(-1) * share_LE.shape[-1]).mean()),
    )


def divergences(use_DHLE: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the divergence of expert use by layer: between domains, and between the halves of each domain.

    Args:
        use_DHLE: number of uses of each expert of each layer by each domain's halves.

    Returns:
        Mean Jensen-Shannon divergence over pairs of domains (0 for one domain), and the mean over domains of the
        divergence between their halves (without domains that have an empty half).

    Units: bits.
    """
    share_DLE = _shares(use_DHLE.sum(1))
    pairs = list(combinations(range(len(share_DLE)), 2))
    between_L = np.zeros(use_DHLE.shape[2])
    if pairs:
        between_L = np.mean([jensen_shannon(share_DLE[a], share_DLE[b]) for a, b in pairs], axis=0)
    whole = use_DHLE.sum((2, 3)).all(1)
    halves_DHLE = _shares(use_DHLE[whole])
    within_L = np.zeros(use_DHLE.shape[2])
    if len(halves_DHLE):
        within_L = jensen_shannon(halves_DHLE[:, 0], halves_DHLE[:, 1]).mean(0)
    return between_L.tolist(), within_L.tolist()


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence of distributions along the last axis, in bits."""
    middle = (p + q) / 2
    return (_kullback_leibler(p, middle) + _kullback_leibler(q, middle)) / 2


def _kullback_leibler(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    ratio = np.divide(p, q, out=np.ones_like(p), where=p > 0)
    return (p * np.log2(ratio)).sum(-1)


def _shares(use: np.ndarray) -> np.ndarray:
    return use / np.maximum(use.sum(-1, keepdims=True), 1)


def readme(name: str, model: Any, facts: Mapping[str, Any]) -> str:
    """Return the card in Markdown.

    Args:
        facts: contents of training.json.
    """
    config, fit, held_out, start = model.config, facts["recipe"]["fit"], facts["held_out"], facts["held_out_of_start"]
    parameters = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    columns = ["domain", "source and licence", "bytes", "documents (held out)", "share of batches"]
    columns += ["cross-entropy", *(["before"] if start else [])]
    rows = []
    for domain, about in facts["domains"].items():
        row = [
            domain,
            about["source"] or "not said",
            f"{about['bytes']:,}",
            f"{about['documents']:,} ({about['held_out_documents']:,})",
            percent(about["share_of_batches"]),
            f"{held_out['cross_entropy'][domain]:.3f}",
            *([f"{start['cross_entropy'][domain]:.3f}"] if start else []),
        ]
        rows.append(row)
    table = "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])
    by_layer = {part: ", ".join(f"{value:.2f}" for value in held_out[part]) for part in ("between", "within")}
    return f"""# {name}

A small Mixture-of-Experts language model with learned, task-dependent routing, for demos, tests and comparisons without
a network. Not a useful writer.

| | |
|---|---|
| architecture | {config.architectures[0]}: {config.num_hidden_layers} layers, {config.num_experts} experts, \
top-{config.num_experts_per_tok}, hidden {config.hidden_size}, expert width {config.moe_intermediate_size}, \
{config.num_attention_heads} heads ({config.num_key_value_heads} KV), head {config.head_dim}, \
{config.max_position_embeddings:,} positions, {config.vocab_size:,} tokens, {parameters:.2f} M parameters, bf16 |
| training | {facts["tokens"]:,} tokens in {facts["steps"]:,} steps of {fit["batch_size"]} sequences of \
{fit["sequence_length"]}; AdamW {fit["learning_rate"]:g}, {fit["schedule"]}, balancing loss \
{facts["recipe"]["model"]["balance"]:g}, products in {fit["precision"]}; seed {facts["recipe"]["seed"]}; \
{facts["minutes"]:,.0f} minutes on {facts["threads"]} thread{"s" if facts["threads"] > 1 else ""} |
| routing | mean Jensen-Shannon divergence of expert use between domains {by_layer["between"]} bits by layer; between \
two halves of one domain {by_layer["within"]}; the busiest expert of a layer has {held_out["busiest"]:.2f} times the \
mean load |
{_origin(facts)}
## Text

{table}

The cross-entropy is in nats per token, on documents that were held out by their hash, at most \
{max(held_out["tokens"].values()):,} tokens per domain in sequences of {fit["sequence_length"]}, in float32.\
{_caveat(facts) if start else ""}
"""


def _origin(facts: Mapping[str, Any]) -> str:
    earlier = facts.get("continues")
    if not earlier:
        return ""
    seen = f", {earlier['tokens']:,} tokens old" if earlier["tokens"] else ""
    return f"| continues | {earlier['name']}{seen}, sha256 `{earlier['sha256'][:12]}` |\n"


def _caveat(facts: Mapping[str, Any]) -> str:
    return f""" The column "before" is the checkpoint that this run began from, {facts["continues"]["name"]}, on the
same documents. This run did not see them; that one may have been trained on some of them, unless it was made from the
same text with the same share held out."""
