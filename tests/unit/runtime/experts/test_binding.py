"""Experts of a model bound to a computer, beside the model's own."""

from typing import Any

import torch

from moetool.models.checkpoint import Checkpoint
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.loading import load_full
from moetool.runtime.experts.binding import bind_experts


class OneByOne:
    """Computes every choice alone, from the module's own weights."""

    def __init__(self) -> None:
        self.layers: list[int] = []

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        self.layers.append(layer.index)
        experts: Any = layer.experts
        output_TD = torch.zeros_like(hidden_TD)
        for token, (chosen, weights) in enumerate(zip(index_TK.tolist(), weights_TK, strict=True)):
            for expert, weight in zip(chosen, weights, strict=True):
                gate, up = (experts.gate_up_proj[expert] @ hidden_TD[token]).chunk(2)
                product = experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                output_TD[token] += weight * product
        return output_TD

    def scaled_products(self, layer: MoeLayer, *given: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the family's experts receive the routes")


def test_a_bound_computer_computes_every_layer_of_the_model(full: Any) -> None:
    ids = torch.tensor([[5, 17, 300, 41]])
    loaded, computer = load_full(Checkpoint.open("reference"), torch.float32), OneByOne()
    bind_experts(loaded, computer)
    with torch.no_grad():
        expected, found = full.model(ids).logits, loaded.model(ids).logits
    assert computer.layers == [layer.index for layer in loaded.layers]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
