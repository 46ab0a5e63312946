"""Running the experts of a model from a pool that may be smaller than one event."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from moetool.fleet import Pool
from moetool.models.expert_form import Call
from moetool.models.families import find
from moetool.models.loading import LoadedModel
from moetool.models.routing import sorted_routes, to_float16, watch
from moetool.models.signals import Signals, request_means
from moetool.models.spec import MoeLayer
from moetool.residency import Step, StepKind
from moetool.serving.on_host import HostCompute
from moetool.serving.store import ExpertStore
from moetool.serving.stores import Stores
from moetool.types import ForwardInfo, GateEvent

_IMPLEMENTATION = "moetool"
_MANY_ROWS = 1024
"""Choices of one layer above which computing takes so long that asking for it does not matter."""
_MISSES = frozenset({StepKind.LOAD, StepKind.HOST})


class ExpertRuntime:
    """Computes every MoE layer of a model by the programs of a `Residency`, out of an `ExpertStore`.

    The products of the experts are made in whatever order their weights arrive; each expert's tokens always form
    one product, and the weighted sum over a token's experts is always taken in the order of its top-k. So for one
    composition of the batch the result is the same to the bit under every policy, budget and order of loads.
    Families that sum in another order of their own get the same sum to within rounding.

    On a GPU that holds too, with nothing switched on for it: all computing goes through one stream, and none of the
    operations here adds in an order of its own there (rows are gathered and written, never accumulated).
    `torch.use_deterministic_algorithms` would add nothing but errors in families whose own layers have no such form.
    The exception are experts that a policy has computed on the host beside a GPU: a processor rounds otherwise, so
    the result is then the same to within rounding.

    Where several devices share the experts, each computes its own: their inputs are sent to it and their outputs come
    back to the model's device, where the sum is taken.

    Args:
        loaded: a model whose experts are on the meta device (`load_lazy`).
        residency: that of one device, or a `Fleet`.
        store: made for it (`moetool.serving.stores.open_stores`).

    Attributes:
        uses_L: how often each layer needed an expert.
        misses_L: how often it was not resident then.

    Effects: becomes the model's experts implementation, and the forward of experts that have no such interface;
        owns the store.
    """

    def __init__(self, loaded: LoadedModel, residency: Pool, store: ExpertStore | Stores) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.residency = residency
        self.store = store
        self._host = HostCompute(store)
        self.uses_L = [0] * loaded.spec.num_layers
        self.misses_L = [0] * loaded.spec.num_layers
        self._info: ForwardInfo | None = None
        self._chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._needs = residency.policy.columns
        self._rule = find(loaded.model.config.get_text_config().model_type).rule(
            loaded.model.config.get_text_config(), loaded.layers[0].router
        )
        self._signals = Signals(
            loaded.model,
            loaded.layers,
            loaded.spec,
            self._needs,
            ahead=residency.policy.distance,
            on_embedded=self._on_embedded,
        )
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _experts_forward)
        loaded.model.set_experts_implementation(_IMPLEMENTATION)
        for layer in loaded.layers:
            self._bind(layer)

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the forward that is about to run, and start its first prefetches.

        Where the policy looks at embeddings they start when the embedding layer has run.
        """
        self._info = info
        if "embeddings" not in self._needs:
            self._start(self.residency.begin_forward(info))

    def end_forward(self) -> None:
        """The forward is over, complete or not."""
        if self._info is not None:
            self.residency.end_forward(self._info)
            self._info = None

    def close(self) -> None:
        """End the store's threads and leave the model's routers alone."""
        self._signals.close()
        self._host.close()
        self.store.close()

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """The output [T, D] of one MoE layer's routed experts.

        Raises:
            MoetoolError: an expert could not be read.
        """
        num_tokens, top_k = index_TK.shape
        event = self._event(layer, index_TK, weights_TK)
        if (routed := self.residency.route(event)) is not None:
            event, index_TK, weights_TK = self._reroute(event, routed, index_TK, weights_TK)
        products = self._products(layer, event, index_TK, lambda experts, places: hidden_TD[places // top_k])
        weighted = products * weights_TK.reshape(-1, 1)  # in the wider type of the two
        return weighted.view(num_tokens, top_k, -1).sum(dim=1).to(hidden_TD.dtype)

    def _event(self, layer: MoeLayer, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> GateEvent:
        """What the policy is told of the layer's choice."""
        if self._info is None:
            raise RuntimeError("the model was called outside a forward that moetool announced")
        event = GateEvent(
            forward=self._info,
            layer=layer.index,
            experts_TK=tuple(map(tuple, index_TK.tolist())),  # here the host waits for the device, once a layer
            weights_TK=to_float16(weights_TK).astype(np.float32) if "weights" in self._needs else None,
        )
        return self._signals.fill(event)

    def _reroute(
        self, event: GateEvent, routed: Sequence[Sequence[int]], index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[GateEvent, torch.Tensor, torch.Tensor]:
        """Put the policy's experts in place of the router's; the weights of a changed token follow from its scores."""
        assert event.scores_TE is not None, "a policy that routes needs the logits"
        chosen_TK = torch.tensor(routed, device=index_TK.device, dtype=index_TK.dtype)
        changed_T = (chosen_TK != index_TK).any(dim=1)
        scores_TE = torch.from_numpy(event.scores_TE).to(weights_TK.device)
        made_TK = self._rule.weigh(scores_TE, chosen_TK).to(weights_TK.dtype)
        weights_TK = torch.where(changed_T[:, None], made_TK, weights_TK)
        return replace(event, experts_TK=tuple(map(tuple, routed))), chosen_TK, weights_TK

    def _products(
        self,
        layer: MoeLayer,
        event: GateEvent,
        index_TK: torch.Tensor,
        inputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The output [T * K, D] of each token's experts, not yet weighted.

        Args:
            inputs: gives what the experts get, by expert and place in [T * K].
        """
        rows = _rows_by_expert(index_TK)
        x_of = rows.split(inputs(rows.experts, rows.places))
        expert_of, num_experts = self.residency.policy.spec.expert_of, layer.form.num_experts
        steps = self.residency.event(event)
        self.uses_L[layer.index] += len(event.needed)
        self.misses_L[layer.index] += sum(step.kind in _MISSES and expert_of(step.key)[1] in x_of for step in steps)
        if len(rows.places) <= _MANY_ROWS and all(step.kind is StepKind.COMPUTE for step in steps):
            resident = self._resident(layer, steps, x_of)
            if resident is not None:
                return rows.restore(resident)
        sent: dict[int, torch.Tensor] | None = None  # inputs on other devices, by expert
        products: torch.Tensor | None = None

        def put(expert: int, output: torch.Tensor) -> None:
            nonlocal products
            if products is None:
                products = output.new_empty(index_TK.numel(), output.shape[1])
            products[rows.span_of[expert]] = output

        on_host = [expert_of(step.key)[1] for step in steps if step.kind is StepKind.HOST]
        begun: list[tuple[int, Callable[[], torch.Tensor]]] = []  # elsewhere, to be put in their place at the end
        beside: list[tuple[int, int]] = []  # loaded on demand though nothing here needs it: a whole layer's rest
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if step.kind is StepKind.HOST:
                continue
            expert = expert_of(step.key)[1]
            if step.kind is not StepKind.COMPUTE:
                at_once = following is not None and (following.kind, following.key) == (StepKind.COMPUTE, step.key)
                if at_once and not on_host:
                    continue  # `ready` is next and loads it on this thread, sooner than another could
                self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)
                if step.kind is StepKind.LOAD and expert not in x_of:
                    beside.append((step.key, step.slot))
                continue
            begun += self._begin_on_host(layer, on_host, x_of)  # now that loads are under way
            if sent is None:
                sent = self._send(layer, steps, x_of)
            while beside:
                self.store.ready(*beside.pop())
            if expert in sent:
                x = replace(layer.form, finish=None).compute(sent.pop(expert), self.store.ready(step.key, step.slot))
                self.store.computed(step.slot)
                begun.append((expert, partial(_bring, layer, x, index_TK.device)))
                continue
            x = x_of[expert]
            if expert < num_experts:
                x = layer.form.compute(x, self.store.ready(step.key, step.slot))
                self.store.computed(step.slot)
            put(expert, x)
        begun += self._begin_on_host(layer, on_host, x_of)
        for expert, finished in begun:
            put(expert, finished())
        assert products is not None
        return rows.restore(products)

    def _resident(
        self, layer: MoeLayer, steps: Sequence[Step], x_of: Mapping[int, torch.Tensor]
    ) -> torch.Tensor | None:
        """The output of an event whose experts are all in their slots, by expert; None where other devices have some.

        For few rows an expert takes longer to ask for than to compute, so they are asked for together.
        """
        expert_of, num_experts = self.residency.policy.spec.expert_of, layer.form.num_experts
        slot_of = {expert_of(step.key)[1]: (step.key, step.slot) for step in steps}
        experts = [expert for expert in x_of if expert < num_experts]
        if isinstance(self.store, Stores) and any(self.store.device_of(slot_of[expert][1]) for expert in experts):
            return None
        weights = [self.store.ready(*slot_of[expert]) for expert in experts]
        outputs = layer.form.compute_each([x_of[expert] for expert in experts], weights) if experts else []
        for expert in experts:
            self.store.computed(slot_of[expert][1])
        return torch.cat([*outputs, *(x for expert, x in x_of.items() if expert >= num_experts)])

    def _send(
        self,
        layer: MoeLayer,
        steps: Sequence[Step],
        x_of: Mapping[int, torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """The inputs of the experts that other devices compute, by expert, on those devices.

        All at once, before anything is computed there: a copy between two devices waits for both, so that a later one
        would have the model's device wait for what the other was asked to compute.
        """
        sent: dict[int, torch.Tensor] = {}
        if isinstance(self.store, Stores):
            for step in steps:
                if step.kind is StepKind.COMPUTE and (device := self.store.device_of(step.slot)):
                    expert = self.residency.policy.spec.expert_of(step.key)[1]
                    if expert < layer.form.num_experts:
                        sent[expert] = x_of[expert].to(self.store.devices[device])
        return sent

    def _begin_on_host(
        self,
        layer: MoeLayer,
        experts: list[int],
        x_of: Mapping[int, torch.Tensor],
    ) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
        """Begin to compute `experts` in host memory and empty the list; gives what waits for each one's output."""
        while experts:
            expert = experts.pop()
            x = x_of[expert]
            if expert < layer.form.num_experts:
                key = self.residency.policy.spec.expert_key(layer.index, expert)
                yield expert, self._host.start(layer.form, key, x)
            else:
                yield expert, lambda x=x: x  # type: ignore[misc]

    def _bind(self, layer: MoeLayer) -> None:
        if layer.form.call is Call.INTERFACE:
            # transformers dispatches by a name on the config; the instance says whose pool serves it.
            layer.experts.moetool_binding = (self, layer)
            return
        forwards: dict[Call, Callable[..., torch.Tensor]] = {
            Call.EXPERTS: self._experts,
            Call.SCALED: self._scaled,
            Call.BLOCK: self._block,
        }
        layer.experts.forward = partial(forwards[layer.form.call], layer)
        if layer.form.call is Call.SCALED:  # its experts are not told who chose them
            watch(layer, lambda *routes: self._chosen.update({layer.index: routes}))

    def _experts(
        self, layer: MoeLayer, hidden: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Experts that are called as the interface calls them, but for the shape of the hidden states."""
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        return self.forward(layer, flat_TD, index_TK, weights_TK).view(hidden.shape)

    def _scaled(self, layer: MoeLayer, scaled: torch.Tensor) -> torch.Tensor:
        """Experts that get one copy [E * T, D] of the hidden states each, by its weight, and whose outputs are summed
        by the caller (llama4). Copies that nobody chose are 0, and so are their outputs.
        """
        copies_ETD = scaled.view(layer.num_experts, -1, scaled.shape[-1])
        top_k = layer.top_k
        index_TK, weights_TK = self._chosen.pop(layer.index)
        event = self._event(layer, index_TK, weights_TK)
        products = self._products(layer, event, index_TK, lambda experts, places: copies_ETD[experts, places // top_k])
        output_ETD = torch.zeros_like(copies_ETD)
        places = torch.arange(index_TK.numel(), device=index_TK.device)
        output_ETD[index_TK.reshape(-1), places // top_k] = products
        return output_ETD.view(scaled.shape)

    def _block(self, layer: MoeLayer, hidden: torch.Tensor) -> torch.Tensor:
        """A block that routes by itself and adds a bias to the sum (jetmoe)."""
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        index_TK, weights_TK = sorted_routes(layer.router(flat_TD), layer.top_k)
        return self.forward(layer, flat_TD, index_TK, weights_TK).view(hidden.shape) + layer.experts.bias

    def _on_embedded(self, embedding_TD: torch.Tensor) -> None:
        if self._info is not None:
            self._info = replace(self._info, embedding_TD=request_means(self._info, embedding_TD))
            self._start(self.residency.begin_forward(self._info))

    def _start(self, steps: list[Any]) -> None:
        for step in steps:
            self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)


def _bring(layer: MoeLayer, output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An expert's output from where it was computed, and what the family does with it, by weights that are here."""
    output = output.to(device)
    return output if layer.form.finish is None else layer.form.finish(output)


class _Rows(NamedTuple):
    """Who chose each expert: the choices of a layer in the order of their experts.

    Attributes:
        experts: the expert of each choice.
        places: where the choice stands in [T * K].
        span_of: an expert's choices.
    """

    experts: torch.Tensor
    places: torch.Tensor
    span_of: dict[int, slice]

    def split(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """Each expert's part of what has a row for each choice."""
        return {expert: x[span] for expert, span in self.span_of.items()}

    def restore(self, x: torch.Tensor) -> torch.Tensor:
        """From a row for each choice, by expert, to where the choices stand."""
        restored = torch.empty_like(x)
        restored[self.places] = x
        return restored


def _rows_by_expert(index_TK: torch.Tensor) -> _Rows:
    """The choices by expert; those of one expert are the first choices first, then by token.

    So do the families' own loops order them, and where a row lies can change its last bit.
    """
    # On the CPU: on a GPU every question of how many would wait for the answer.
    num_tokens, top_k = index_TK.shape
    ids, order = torch.sort(index_TK.cpu().T.reshape(-1), stable=True)
    places = order % num_tokens * top_k + order // num_tokens
    span_of: dict[int, slice] = {}
    start = 0
    for expert, run in groupby(ids.tolist()):
        stop = start + sum(1 for _ in run)
        span_of[expert] = slice(start, stop)
        start = stop
    return _Rows(ids.to(index_TK.device), places.to(index_TK.device), span_of)


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation that transformers calls."""
    runtime, layer = module.moetool_binding
    output: torch.Tensor = runtime.forward(layer, hidden_states, top_k_index, top_k_weights)
    return output
