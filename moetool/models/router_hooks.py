"""Hooks that observe a layer's experts, their weights and its router's output, for any family."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base.families import Family
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer

Routes = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the experts [T, K] and their weights [T, K] of one forward of one layer."""


class _Unrecorded(threading.local):
    running = False


_UNRECORDED = _Unrecorded()


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Mark this thread's computation as outside the model's own forward, so that recording hooks skip it."""
    _UNRECORDED.running = True
    try:
        yield
    finally:
        _UNRECORDED.running = False


def is_unrecorded() -> bool:
    """Whether this thread computes outside the model's own forward."""
    return _UNRECORDED.running


def watch(layer: MoeLayer, on_routes: Routes) -> RemovableHandle:
    """Call `on_routes` when the layer has chosen its experts, before they are computed.

    `unrecorded` computation is skipped.

    Most families pass the choice to their experts' module, after grouping, bias and correction; others return it from
    the router in various forms. It is never recomputed from the logits.
    """
    if layer.form.call in (Call.INTERFACE, Call.EXPERTS):

        def before_experts(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            if not is_unrecorded():
                on_routes(args[1], args[2])

        handle: RemovableHandle = layer.experts.register_forward_pre_hook(before_experts)
        return handle
    read = {Call.SCALED: scaled_routes, Call.BLOCK: sorted_routes}[layer.form.call]

    def after_router(module: Any, args: Any, output: Any) -> None:
        if not is_unrecorded():
            on_routes(*read(output, layer.top_k))

    handle = layer.router.register_forward_hook(after_router)
    return handle


def scaled_routes(output: Any, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights from a score for every expert, 0 for those not chosen (llama4)."""
    weights, experts = output[0].topk(top_k, dim=-1)
    return experts, weights


def sorted_routes(output: Any, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights from positions in [T * K], sorted by expert, and each expert's count (jetmoe)."""
    positions, _, weights, sizes, _ = output
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(positions.device)
    experts_TK, weights_TK = torch.empty_like(experts), torch.empty_like(weights)
    experts_TK[positions], weights_TK[positions] = experts, weights
    return experts_TK.view(-1, top_k), weights_TK.view(-1, top_k)


def read_logits(layer: MoeLayer, output: Any, family: Family | None) -> torch.Tensor:
    """Find the logits [T, E] in a router's output."""
    logits: torch.Tensor = output[layer.logits_index] if isinstance(output, tuple) else output
    logits = logits[:, : layer.num_experts]  # zaya has an extra one for no expert
    return logits.log() if family is not None and family.probabilities else logits


def logits_ahead(
    following: Sequence[MoeLayer], args: tuple[Any, ...], kwargs: dict[str, Any], family: Family | None
) -> torch.Tensor:
    """Logits [A, T, E of the widest layer] of later layers' routers on an earlier router's input.

    The routers' hooks do not run. Entries beyond a narrower layer's experts are 0.
    """
    rows = [read_logits(layer, layer.router.forward(*args, **kwargs), family) for layer in following]
    width = max(row.shape[1] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, width - row.shape[1])) for row in rows])


def to_float16(values: torch.Tensor) -> np.ndarray:
    """Convert to a trace's form: float16, saturating."""
    limit = torch.finfo(torch.float16).max
    return values.detach().float().clamp(-limit, limit).half().cpu().numpy()
