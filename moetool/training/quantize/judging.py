"""Comparison of a saved replica with its model, layer by layer over the same tokens."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.models.router_hooks import Routes, watch
from moetool.training.quantize.layer_forward import Layerwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Scores of a replica against its model.

    Attributes:
        tokens: number of compared tokens.
        kl: mean over tokens of the Kullback-Leibler divergence of the replica's next token from the model's, in nats.
        top1: share of the tokens with the same likeliest next token.
        match: mean share of a token's experts that the replica's gates choose too.
        match_L: the same for each MoE layer.
        logits: logits of the replica on the first block, [S, V].
    """

    tokens: int
    kl: float
    top1: float
    match: float
    match_L: tuple[float, ...]
    logits: torch.Tensor

    def to_json(self) -> dict[str, Any]:
        """Return the scores, for a card."""
        return {name: getattr(self, name) for name in ("tokens", "kl", "top1", "match", "match_L")}


@torch.no_grad()
def judge(
    model: Checkpoint,
    replica: Checkpoint,
    ids_NS: torch.Tensor,
    dtype: torch.dtype,
    on_layer: Callable[[int], None] | None = None,
) -> Judgement:
    """Compare two checkpoints of one shape on blocks of tokens.

    Memory holds the dense weights of both checkpoints, and the experts of one layer of one of them.

    Args:
        on_layer: called with the number of finished layers.

    Raises:
        MismatchError: the files of a checkpoint do not fit its model.
    """
    with contextlib.ExitStack() as stack:
        pair = []
        for checkpoint in (model, replica):
            loaded = load_lazy(checkpoint, dtype)
            stack.callback(loaded.close)
            pair.append(Layerwise(loaded))
        return _judge(pair, ids_NS, on_layer)


@torch.no_grad()
def logits_of(checkpoint: Checkpoint, ids_1S: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the logits [S, V] of a checkpoint, run layer by layer."""
    loaded = load_lazy(checkpoint, dtype)
    try:
        layerwise = Layerwise(loaded)
        (state,) = layerwise.begin(ids_1S)
        for number in range(len(layerwise.layers)):
            with layerwise.experts(number):
                state = layerwise.run(number, state)
        return layerwise.logits(state)
    finally:
        loaded.close()


def _judge(pair: list[Layerwise], ids_NS: torch.Tensor, on_layer: Callable[[int], None] | None) -> Judgement:
    states = [layerwise.begin(ids_NS) for layerwise in pair]
    matches: list[float] = []
    for number in range(len(pair[0].layers)):
        chosen = []
        for which, layerwise in enumerate(pair):
            routes: list[torch.Tensor] = []
            with layerwise.experts(number), contextlib.ExitStack() as stack:
                if (moe := layerwise.moe.get(number)) is not None:
                    stack.callback(watch(moe, _keeping(routes)).remove)
                states[which] = [layerwise.run(number, hidden) for hidden in states[which]]
            chosen.append(routes)
        if chosen[0]:
            true_TK, found_TK = (torch.cat(routes) for routes in chosen)
            matches.append((true_TK[:, :, None] == found_TK[:, None, :]).any(-1).double().mean().item())
        if on_layer is not None:
            on_layer(number + 1)
    kl, same, first = 0.0, 0, None
    for true_1SD, found_1SD in zip(*states, strict=True):
        true_SV, found_SV = (
            layerwise.logits(state).double().log_softmax(-1)
            for layerwise, state in zip(pair, (true_1SD, found_1SD), strict=True)
        )
        kl += (true_SV.exp() * (true_SV - found_SV)).sum().item()
        same += int((true_SV.argmax(-1) == found_SV.argmax(-1)).sum())
        if first is None:
            first = pair[1].logits(found_1SD)
    assert first is not None
    return Judgement(
        tokens=ids_NS.numel(),
        kl=kl / ids_NS.numel(),
        top1=same / ids_NS.numel(),
        match=sum(matches) / len(matches),
        match_L=tuple(matches),
        logits=first,
    )


def _keeping(into: list[torch.Tensor]) -> Routes:
    return lambda index_TK, weights_TK: into.append(index_TK)
