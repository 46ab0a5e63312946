"""Record the next router's logits as if only resident experts were computed: the column `resident`.

A second, smaller forward runs at every MoE layer but the first (`moetool.runtime.experts.partial_forward`). In
addition:

- This module decides which experts are resident, not a serving cache: in each layer the most recently used ones, up to
  `share`. A batch starts with the layer's first experts, so that rows depend on their batch alone. Within a forward,
  experts are ordered by their number of tokens, the most used last, then by id.
- Omitted experts get weight 0, so recording costs about a second forward; a server's cost falls with the number of
  resident experts.
"""

from collections.abc import Callable
from typing import Any

import torch

from moetool.base.errors import UsageError
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.router_hooks import is_unrecorded
from moetool.runtime.experts.partial_forward import PartialForward


def resident_counts(num_experts_L: tuple[int, ...], share: float) -> tuple[int, ...]:
    """Number of resident experts of each layer, at least one."""
    return tuple(max(1, round(share * num_experts)) for num_experts in num_experts_L)


class ResidentForward(PartialForward):
    """Hooks on a model's layers that run the second forward.

    Args:
        share: share of a layer's experts that are resident.
        on_logits: called with the logits [T, E] of each MoE layer but the first, before that layer runs.

    Effects: adds hooks, which `close` removes; runs a few tokens to check that the second forward with every expert
    resident matches the routers.

    Raises:
        UsageError: the layers are not of the usual shape, or the experts are not in memory.
    """

    def __init__(
        self, model: Any, layers: list[MoeLayer], share: float, on_logits: Callable[[torch.Tensor], None]
    ) -> None:
        if any(parameter.is_meta for layer in layers for parameter in layer.experts.parameters()):
            raise UsageError(
                "cannot keep resident while experts are loaded when needed: the second forward would load them in "
                "another order; capture without --device-memory, or leave resident out of --keep"
            )
        super().__init__(model, layers)
        partial_logits: list[torch.Tensor] = []
        self._on_logits: Callable[[torch.Tensor], None] = partial_logits.append
        self._kept_L = tuple(layer.num_experts for layer in layers)
        self._used_L: list[list[int]] = []  # residents of each layer, most recently used last
        self._here_L: list[torch.Tensor | None] = [None] * len(layers)  # residents when the router chose
        for i, part in enumerate(self._layers):
            self._handles.append(part.layer.experts.register_forward_pre_hook(self._on_experts(i)))
            if i:
                self._handles.append(part.attention.register_forward_pre_hook(self._on_attention(i), with_kwargs=True))
        try:
            self.begin()
            self.require_equal(model, partial_logits)
        except BaseException:
            self.close()
            raise
        self._kept_L, self._on_logits = resident_counts(self._kept_L, share), on_logits
        self.begin()

    def begin(self) -> None:
        """Begin a batch with the first experts of each layer resident."""
        self._used_L = [list(range(kept))[::-1] for kept in self._kept_L]

    def _on_experts(self, i: int) -> Callable[..., Any]:
        def hook(module: Any, args: tuple[Any, ...]) -> Any:
            _, index_TK, weights_TK = args[:3]
            if is_unrecorded():
                here_E = self._here_L[i]
                assert here_E is not None
                return (args[0], index_TK, weights_TK * here_E[index_TK], *args[3:])
            here_E = torch.zeros(self._layers[i].layer.num_experts, dtype=weights_TK.dtype)
            here_E[self._used_L[i]] = 1
            self._here_L[i] = here_E.to(weights_TK.device)
            self._use(i, index_TK)
            return None

        return hook

    def _use(self, i: int, index_TK: torch.Tensor) -> None:
        """Update the residents of a layer after an event."""
        tokens_E = torch.bincount(index_TK.reshape(-1).cpu()).tolist()
        needed = sorted((e for e, tokens in enumerate(tokens_E) if tokens), key=lambda e: (tokens_E[e], -e))
        rest = set(needed)
        self._used_L[i] = [*(e for e in self._used_L[i] if e not in rest), *needed][-self._kept_L[i] :]

    def _on_attention(self, i: int) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._on_logits(self.through(i - 1, args, kwargs))

        return hook
