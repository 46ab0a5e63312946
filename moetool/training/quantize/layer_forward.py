"""Forward of a model one decoder layer at a time over stored hidden states, with one layer's experts in memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.loading import LoadedModel

Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(Exception):
    """Stops a forward at the awaited layer."""


class Layerwise:
    """The decoder layers of a model from `load_lazy`, to call in order.

    Each layer gets the model's own arguments: masks and positions are recorded once, from a first block of tokens. All
    blocks must therefore have equal length.

    Attributes:
        layers: decoder layers, dense ones included.
        moe: MoE layers by decoder layer.

    Shapes: blocks ids_NS of N sequences of S tokens; hidden states [1, S, D] per block.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.layers: list[Any] = list(loaded.model.get_decoder().layers)
        self.moe: dict[int, MoeLayer] = {layer.layer_id: layer for layer in loaded.layers}
        if loaded.layers[0].form.call.name == "INTERFACE":
            loaded.model.set_experts_implementation("eager")  # computes expert by expert, in one fixed order
        self._calls: dict[int, Call] = {}

    @torch.no_grad()
    def begin(self, ids_NS: torch.Tensor) -> list[torch.Tensor]:
        """Return the first layer's input for each block. Effects: records the layers' arguments."""
        hidden: list[torch.Tensor] = []
        last = len(self.layers) - 1

        def record(number: int) -> Callable[..., torch.Tensor]:
            def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                if number == 0:
                    hidden.append(hidden_states)
                self._calls[number] = (args, kwargs)
                if number == last or len(hidden) > 1:
                    raise _Stop
                return hidden_states

            return forward

        with self._replaced(record):
            for ids_S in ids_NS:
                with contextlib.suppress(_Stop):
                    self.model(input_ids=ids_S[None], use_cache=False)
        return hidden

    @torch.no_grad()
    def run(self, number: int, hidden_1SD: torch.Tensor) -> torch.Tensor:
        """Return the output of one layer, whose experts must be in memory (`experts`)."""
        args, kwargs = self._calls[number]
        output = self.layers[number](hidden_1SD, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def logits(self, hidden_1SD: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, V] from the last layer's output."""
        with self._replaced(lambda number: lambda hidden_states, *args, **kwargs: hidden_1SD):
            ids = torch.zeros(hidden_1SD.shape[:2], dtype=torch.int64)
            made: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return made

    @contextlib.contextmanager
    def experts(self, number: int) -> Iterator[None]:
        """Hold the routed experts of a layer in memory within the context; no effect for a dense layer."""
        layer = self.moe.get(number)
        if layer is None:
            yield
            return
        files = self.loaded.files
        assert files is not None
        held = files.stacked(layer, self.model.dtype)
        empty = {name: layer.experts._parameters[name] for name in held}
        for name, stacked in held.items():
            layer.experts._parameters[name] = torch.nn.Parameter(stacked, requires_grad=False)
        try:
            yield
        finally:
            layer.experts._parameters.update(empty)

    @contextlib.contextmanager
    def _replaced(self, forward_of: Callable[[int], Callable[..., torch.Tensor]]) -> Iterator[None]:
        """Replace the layers' forwards within the context."""
        for number, layer in enumerate(self.layers):
            layer.forward = forward_of(number)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward
