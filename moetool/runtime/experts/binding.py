"""Connection of a model's experts to the object that computes them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.loading import LoadedModel
from moetool.models.router_hooks import sorted_routes, watch

_IMPLEMENTATION = "moetool"


class ComputesExperts(Protocol):
    """Computes the experts of a model's layers."""

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [T, D] of a layer's routed experts. Raises: MoetoolError: an expert could not be read."""

    def scaled_products(
        self, layer: MoeLayer, x: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D] of each token's experts, whose inputs [T * K, D] are scaled."""


def bind_experts(loaded: LoadedModel, computer: ComputesExperts) -> None:
    """Let `computer` compute a model's experts.

    Effects: becomes the model's experts implementation, or replaces the forward of experts without that interface.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _interface)
    loaded.model.set_experts_implementation(_IMPLEMENTATION)
    for layer in loaded.layers:
        layer.experts.moetool_binding = (computer, layer)
        if layer.form.call is Call.EXPERTS:
            layer.experts.forward = partial(_experts, computer, layer)
        elif layer.form.call is Call.BLOCK:
            layer.experts.forward = partial(_block, computer, layer)
        elif layer.form.call is Call.SCALED:
            layer.experts.forward = _scaled(computer, layer)


def _interface(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation that transformers calls by its name in the config; the instance has the computer."""
    computer, layer = module.moetool_binding
    return computer.forward(layer, hidden_states, top_k_index, top_k_weights)


def _experts(
    computer: ComputesExperts, layer: MoeLayer, hidden: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Experts called as by the interface, except for the shape of the hidden states."""
    flat_TD = hidden.reshape(-1, hidden.shape[-1])
    return computer.forward(layer, flat_TD, index_TK, weights_TK).view(hidden.shape)


def _block(computer: ComputesExperts, layer: MoeLayer, hidden: torch.Tensor) -> torch.Tensor:
    """A block with its own router that adds a bias to the sum (jetmoe)."""
    index_TK, weights_TK = sorted_routes(layer.router(hidden.reshape(-1, hidden.shape[-1])), layer.top_k)
    return _experts(computer, layer, hidden, index_TK, weights_TK) + layer.experts.bias


def _scaled(computer: ComputesExperts, layer: MoeLayer) -> Callable[[torch.Tensor], torch.Tensor]:
    """Experts that each receive a copy of the hidden states scaled by its weight, [E * T, D] in all (llama4).

    The caller sums their outputs. Copies without a choice are 0, and so are their outputs. The experts do not receive
    the routes, which are the router's last ones.
    """
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(index_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        chosen[:] = [(index_TK, weights_TK)]

    def forward(scaled: torch.Tensor) -> torch.Tensor:
        copies_ETD = scaled.view(layer.num_experts, -1, scaled.shape[-1])
        index_TK, weights_TK = chosen.pop()
        places = torch.arange(index_TK.numel(), device=index_TK.device)
        at = index_TK.reshape(-1), places // layer.top_k
        output_ETD = torch.zeros_like(copies_ETD)
        output_ETD[at] = computer.scaled_products(layer, copies_ETD[at], index_TK, weights_TK)
        return output_ETD.view(scaled.shape)

    watch(layer, keep)
    return forward
