"""Watching which experts a layer really uses, and with what weights, whatever its family."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moetool.models.expert_form import Call
from moetool.models.spec import MoeLayer

Routes = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the experts [T, K] and their weights [T, K] of one forward of one layer."""


def watch(layer: MoeLayer, on_routes: Routes) -> RemovableHandle:
    """Call `on_routes` whenever the layer has chosen its experts, before they are computed.

    Most families hand the choice to their experts' module, after grouping, bias and correction; the others return it
    from the router in a form of their own. It is never computed again from the logits.
    """
    if layer.form.call in (Call.INTERFACE, Call.EXPERTS):

        def before_experts(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            on_routes(args[1], args[2])

        handle: RemovableHandle = layer.experts.register_forward_pre_hook(before_experts)
        return handle
    read = {Call.SCALED: scaled_routes, Call.BLOCK: sorted_routes}[layer.form.call]

    def after_router(module: Any, args: Any, output: Any) -> None:
        on_routes(*read(output, layer.top_k))

    handle = layer.router.register_forward_hook(after_router)
    return handle


def scaled_routes(output: Any, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights from a score for every expert, 0 for those not chosen (llama4)."""
    weights, experts = output[0].topk(top_k, dim=-1)
    return experts, weights


def sorted_routes(output: Any, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights from places in [T * K], sorted by expert, and the number of each expert's (jetmoe)."""
    places, _, weights, sizes, _ = output
    experts = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(places.device)
    experts_TK, weights_TK = torch.empty_like(experts), torch.empty_like(weights)
    experts_TK[places], weights_TK[places] = experts, weights
    return experts_TK.view(-1, top_k), weights_TK.view(-1, top_k)
