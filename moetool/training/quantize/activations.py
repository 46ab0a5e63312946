"""Rounding of the inputs of a model's quantized weights, within a context."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.packed_memory import weights_of
from moetool.training.quantize.folding import is_rounded


def round_tokens(x_TI: torch.Tensor, bits: int) -> torch.Tensor:
    """Round each token's values to 2^bits - 1 evenly spaced levels, scaled by its largest value."""
    steps = 2 ** (bits - 1) - 1
    step_T1 = (x_TI.abs().amax(-1, keepdim=True) / steps).clamp(min=torch.finfo(x_TI.dtype).tiny)
    return (x_TI / step_T1).round() * step_T1


@contextmanager
def rounded_activations(model: Any, layers: list[MoeLayer], bits: int) -> Iterator[None]:
    """Round the inputs of linear modules except gates and output head, and of both products of every expert.

    Effects: hooks those modules and replaces the experts' forwards until the context ends.
    """

    def linear(module: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (round_tokens(args[0], bits), *args[1:])

    with ExitStack() as stack:
        moe = {layer.layer_id: layer for layer in layers}
        for number, decoder_layer in enumerate(model.get_decoder().layers):
            for path, module in decoder_layer.named_modules():
                if is_rounded(path, module, moe.get(number)):
                    stack.callback(module.register_forward_pre_hook(linear).remove)
        for layer in layers:
            own = layer.experts.__dict__.get("forward")  # the forward of packed experts
            layer.experts.forward = _experts_forward(layer, bits)
            stack.callback(_put_back, layer.experts, own)
        yield


def _put_back(experts: Any, forward: Any) -> None:
    del experts.forward
    if forward is not None:
        experts.forward = forward


def _experts_forward(layer: MoeLayer, bits: int) -> Any:
    """Return a forward that computes a layer's experts one after the other on rounded inputs."""

    def forward(hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        output_TD = torch.zeros_like(hidden_TD)
        x_TD = round_tokens(hidden_TD, bits)
        for expert in index_TK.unique().tolist():
            rows, place = torch.where(index_TK == expert)
            up, down = (weight.to(x_TD.dtype) for weight in weights_of(layer, expert))
            middle = layer.form.gate(torch.nn.functional.linear(x_TD[rows], up))
            made = torch.nn.functional.linear(round_tokens(middle, bits), down)
            output_TD.index_add_(0, rows, made * weights_TK[rows, place, None].to(made.dtype))
        return output_TD

    return forward
