"""Running the experts of a model from a pool that may be smaller than one event."""

from typing import Any

import torch
import torch.nn.functional as F

from moetool.models.loading import LoadedModel
from moetool.residency import Residency, StepKind
from moetool.serving.store import ExpertStore
from moetool.types import ForwardInfo, GateEvent

_IMPLEMENTATION = "moetool"


class ExpertRuntime:
    """Computes every MoE layer of a model by the programs of a `Residency`, out of an `ExpertStore`.

    The products of the experts are made in whatever order their weights arrive; each expert's tokens always form
    one product, and the weighted sum over a token's experts is always taken in the order of its top-k. So for one
    composition of the batch the result is the same to the bit under every policy, budget and order of loads.

    Args:
        loaded: a model whose experts are on the meta device (`load_lazy`).

    Effects: becomes the model's experts implementation; owns the store.
    """

    def __init__(self, loaded: LoadedModel, residency: Residency, store: ExpertStore) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.residency = residency
        self.store = store
        self._info: ForwardInfo | None = None
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _experts_forward)
        loaded.model.set_experts_implementation(_IMPLEMENTATION)
        for layer in loaded.layers:
            # transformers dispatches by a name on the config; the instance says whose pool serves it.
            layer.experts.moetool_binding = (self, layer.index)

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the forward that is about to run, and start its first prefetches."""
        self._info = info
        self._start(self.residency.begin_forward(info))

    def end_forward(self) -> None:
        """The forward is over, complete or not."""
        if self._info is not None:
            self.residency.end_forward(self._info)
            self._info = None

    def close(self) -> None:
        """End the store's threads."""
        self.store.close()

    def forward(
        self, module: Any, layer: int, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The output [T, D] of one MoE layer's routed experts.

        Raises:
            MoetoolError: an expert could not be read.
        """
        if self._info is None:
            raise RuntimeError("the model was called outside a forward that moetool announced")
        num_tokens, top_k = index_TK.shape
        event = GateEvent(
            forward=self._info,
            layer=layer,
            experts_TK=tuple(map(tuple, index_TK.tolist())),
        )
        rows_of = _rows_by_expert(index_TK)
        products = hidden_TD.new_empty(num_tokens * top_k, hidden_TD.shape[1])
        beside: list[tuple[int, int]] = []  # loaded on demand though nothing here needs it: a whole layer's rest
        for step in self.residency.event(event):
            expert = self.residency.policy.spec.expert_of(step.key)[1]
            if step.kind is StepKind.COMPUTE:
                while beside:
                    self.store.ready(*beside.pop())
                gate_up, down = self.store.ready(step.key, step.slot)
                rows = rows_of[expert]
                products[rows] = _expert(module, hidden_TD[rows // top_k], gate_up, down)
            else:
                self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)
                if step.kind is StepKind.LOAD and expert not in rows_of:
                    beside.append((step.key, step.slot))
        products *= weights_TK.reshape(-1, 1)
        return products.view(num_tokens, top_k, -1).sum(dim=1).to(hidden_TD.dtype)

    def _start(self, steps: list[Any]) -> None:
        for step in steps:
            self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)


def _expert(module: Any, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One gated expert, by the module's own activation. Weights are widened to the type of `x` where they differ."""
    return F.linear(module._apply_gate(F.linear(x, gate_up.to(x.dtype))), down.to(x.dtype))


def _rows_by_expert(index_TK: torch.Tensor) -> dict[int, torch.Tensor]:
    """For each expert the places, in [T * K], that chose it, ascending."""
    ids, places = torch.sort(index_TK.reshape(-1), stable=True)
    experts, counts = torch.unique_consecutive(ids, return_counts=True)
    return dict(zip(experts.tolist(), places.split(counts.tolist()), strict=True))


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation that transformers calls."""
    runtime, layer = module.moetool_binding
    output: torch.Tensor = runtime.forward(module, layer, hidden_states, top_k_index, top_k_weights)
    return output
