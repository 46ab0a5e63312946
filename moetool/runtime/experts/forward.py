"""Run a model's experts from a pool that may be smaller than one event."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base.errors import UsageError
from moetool.base.families import find
from moetool.base.types import ForwardInfo, GateEvent
from moetool.caching.devices import Pool
from moetool.caching.residency import Residency, Step, StepKind
from moetool.models.experts.expert_form import Call, Share
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.families import router_rules
from moetool.models.loading import LoadedModel
from moetool.models.router_hooks import sorted_routes, to_float16, watch
from moetool.runtime.decode_graphs import RecordedExperts
from moetool.runtime.experts.cost_meter import CostMeter
from moetool.runtime.experts.device_stores import Stores
from moetool.runtime.experts.event_window import EventWindow
from moetool.runtime.experts.grouping import by_expert, weighted_sum
from moetool.runtime.experts.host_compute import HostCompute
from moetool.runtime.experts.pooled_experts import PooledExperts
from moetool.runtime.experts.resident_look import ResidentLook
from moetool.runtime.experts.signals import Signals, request_means
from moetool.runtime.experts.store import ExpertStore

_IMPLEMENTATION = "moetool"
ROWS_TOGETHER = 1024
"""Most rows computed together, because the intermediate values of all are held at once."""
_CALLED_WITH_ROUTES = (Call.INTERFACE, Call.EXPERTS)
_MISSES = frozenset({StepKind.LOAD, StepKind.HOST})


class ExpertRuntime:
    """Computes every MoE layer of a model from an `ExpertStore`, by the programs of a `Residency`.

    Experts are computed in the order in which their weights arrive; each expert's tokens always form one product, and
    the weighted sum over a token's experts always follows the order of its top-k. So for one batch composition the
    result is bit-identical under every policy, budget and order of loads. Families that sum in another order get the
    same sum up to rounding.

    The same holds on a GPU without special settings: one stream computes everything, and no operation here has a
    variable summation order (rows are gathered and written, never accumulated). `torch.use_deterministic_algorithms`
    would only add errors in families whose layers have no deterministic form. The exception is a policy that computes
    experts on the host beside a GPU: CPU and GPU round differently, so the result is equal up to rounding.

    If several devices share the experts, each computes its own: inputs are sent to it, and outputs return to the
    model's device, which computes the sum.

    Args:
        loaded: a model whose experts are on the meta device (`load_lazy`).
        residency: that of one device, or a `Fleet`.
        store: made for it (`moetool.runtime.experts.device_stores.open_stores`).
        pooled: whether one product over the pool computes all experts of an event
            (`moetool.runtime.experts.pooled_experts`), instead of one product each (default: on a GPU that has all
            slots).

    Attributes:
        from_pool: whether every expert is computed from the store, by the residency's steps.
        uses_L: how often each layer needed an expert.
        misses_L: how often it was not resident.
        window: the last events.
        recorded: graphs of `compute_by_table` usable in this forward, by layer.
        deferred_events: layers and routes of this forward that the residency receives after it. They are computed
            already, or a CUDA graph is about to compute them.
        on_costs: called with a forward and the seconds of a load and of a host computation that apply from it on.

    Effects: becomes the model's experts implementation, or replaces the forward of experts without that interface; owns
    the store.
    """

    from_pool = True

    def __init__(
        self, loaded: LoadedModel, residency: Pool, store: ExpertStore | Stores, *, pooled: bool | None = None
    ) -> None:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        self.residency = residency
        self.store = store
        self._host = HostCompute(store)
        self.uses_L = [0] * loaded.spec.num_layers
        self.misses_L = [0] * loaded.spec.num_layers
        self._watching: dict[int, OrderedDict[int, Callable[[torch.Tensor], None]]] = {}  # by layer, by handle
        self._info: ForwardInfo | None = None
        self._chosen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._needs = residency.policy.columns
        self._rule = find(loaded.model.config.get_text_config().model_type).rule(
            loaded.model.config.get_text_config(), loaded.layers[0].router
        )
        self.window = EventWindow()
        self._look: ResidentLook | None = None
        self._under_way: set[int] = set()  # loads of the event that begin while a predictor is asked
        self.on_costs: Callable[[int, float, float], None] | None = None
        if residency.policy.live_costs:
            if not isinstance(store, ExpertStore):
                raise UsageError("costs are measured on one device only; leave out policy.live, or the other devices")
            store.meter = CostMeter()
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
        self._pooled: PooledExperts | None = None
        wanted = store.copies.device.type == "cuda" if pooled is None else pooled
        if wanted and self.from_pool and isinstance(residency, Residency) and isinstance(store, ExpertStore):
            self._pooled = PooledExperts(loaded, residency, store, self._host)
        policy = residency.policy
        self._predicts_beside = (
            isinstance(residency, Residency) and self.from_pool and policy.prediction_lag is not None
        )
        self._may_defer = self._needs <= {"experts"} and policy.lossless and not policy.computes_on_host
        self.recorded: Mapping[int, RecordedExperts] = {}
        self.deferred_events: list[tuple[MoeLayer, torch.Tensor]] = []
        self._max_rows = [
            self._layer_max_rows(layer, loaded.model.dtype) if self.from_pool else 0 for layer in loaded.layers
        ]
        if "resident" in self._needs:
            self._look = ResidentLook(
                loaded,
                residency,
                store if self.from_pool else None,
                load_first=self._load_first,
                under_way=self._under_way,
                pooled=self._pooled,
            )
            self._look.require_equal_logits(loaded.model)

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the next forward, and start its first prefetches.

        If the policy uses embeddings, they start after the embedding layer has run.
        """
        self._info = info
        self.deferred_events = []
        self.window.begin(self.residency.counts)
        if (
            isinstance(self.store, ExpertStore)
            and self.store.meter is not None
            and (new := self.store.meter.changed_means())
        ):
            self.residency.policy.take_costs(*new)
            if self.on_costs is not None:
                self.on_costs(info.forward_id, *new)
        if "embeddings" not in self._needs:
            self._start(self.residency.begin_forward(info))
        if self._pooled is not None:
            self._pooled.begin_forward(len(info.request_T))

    def end_forward(self) -> None:
        """End the forward, complete or not, for the residency too, even if it did not receive all events."""
        if (info := self._info) is None:
            return
        try:
            self._report_deferred()
        finally:
            self._info = None
            self.residency.end_forward(info)
            lent = self.residency.lent if isinstance(self.residency, Residency) else 0
            self.window.end(info, self.residency.counts, lent)

    @property
    def defers_events(self) -> bool:
        """Whether the residency receives all events of this forward only after it (`deferred_events`)."""
        return self._defers and not any(self._watching.values())

    def watch_products(self, layer: MoeLayer, on_products: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call `on_products` with the outputs [T, K, D] of a layer's chosen experts, before their weights."""
        watching = self._watching.setdefault(layer.index, OrderedDict())  # a handle refers to it weakly
        handle = RemovableHandle(watching)
        watching[handle.id] = on_products
        return handle

    def watch_looks(self, on_logits: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call `on_logits` with the partial forward's logits [T, E] of each layer except the first."""
        assert self._look is not None, "no partial forward runs"
        return self._look.watch(on_logits)

    def close(self) -> None:
        """End the store's threads and remove the hooks of the model's routers."""
        if self._look is not None:
            self._look.close()
        self._signals.close()
        self._host.close()
        self.store.close()

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [T, D] of a layer's routed experts. Raises: MoetoolError: an expert could not be read."""
        if self._look is not None and self._look.aside is not None:
            return self._look.aside(hidden_TD)
        num_tokens, top_k = index_TK.shape
        recorded = self.recorded.get(layer.index)
        if recorded is not None and not (
            recorded.takes(hidden_TD)
            and self.computes_by_table(layer, index_TK.numel())
            and not self._watching.get(layer.index)
        ):
            recorded = None
        products: torch.Tensor | None = None
        if self._pooled is not None and self._defers:
            if self._info is None:
                raise RuntimeError("the model was called outside a forward that moetool announced")
            self.deferred_events.append((layer, index_TK))
            if recorded is not None:
                return recorded.run(index_TK, weights_TK)
            products = self._pooled.compute_all(layer, hidden_TD, top_k, index_TK)
        else:
            event = self._event(layer, index_TK, weights_TK)
            if (routed := self.residency.route(event)) is not None:
                event, index_TK, weights_TK = self._reroute(event, routed, index_TK, weights_TK)
            if self._look is not None:
                self._look.begin(layer, index_TK, weights_TK)
            if self._pooled is not None:
                steps = [step for step in self._program(layer, event) if not self._is_under_way(step)]
                if recorded is not None and (later := self._pooled.settle(layer, steps)) is not None:
                    output = recorded.run(index_TK, weights_TK)
                    self._pooled.settled(steps, later)
                    return output
                products = self._pooled.compute(layer, steps, hidden_TD, top_k, index_TK)
            else:
                products = self._few_products(layer, event, hidden_TD)
        if products is None:
            products = self._products(layer, event, index_TK, lambda experts, places: hidden_TD[places // top_k])
        for on_products in tuple(self._watching.get(layer.index, {}).values()):
            on_products(products.view(num_tokens, top_k, -1))
        return weighted_sum(products, weights_TK).to(hidden_TD.dtype)

    def compute_by_table(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Like `forward`, with experts in the slots of the device's table; the residency is not involved."""
        assert self._pooled is not None
        products = self._pooled.compute_all(layer, hidden_TD, index_TK.shape[1], index_TK)
        return weighted_sum(products, weights_TK).to(hidden_TD.dtype)

    def computes_by_table(self, layer: MoeLayer, num_rows: int) -> bool:
        """Whether `compute_by_table` may be called for this number of choices."""
        called = layer.form.call in _CALLED_WITH_ROUTES
        return called and self._pooled is not None and self._pooled.table_suffices(layer, num_rows)

    def _event(self, layer: MoeLayer, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> GateEvent:
        """Return the layer's routes as an event for the policy."""
        if self._info is None:
            raise RuntimeError("the model was called outside a forward started by moetool")
        event = GateEvent(
            forward=self._info,
            layer=layer.index,
            experts_TK=tuple(map(tuple, index_TK.tolist())),  # the host waits for the device here, once per layer
            weights_TK=to_float16(weights_TK).astype(np.float32) if "weights" in self._needs else None,
        )
        return self._signals.fill(event)

    def _reroute(
        self, event: GateEvent, routed: Sequence[Sequence[int]], index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[GateEvent, torch.Tensor, torch.Tensor]:
        """Replace the router's experts by the policy's; the weights of a changed token follow from its scores."""
        assert event.scores_TE is not None, "a policy that changes routes needs the logits"
        chosen_TK = torch.tensor(routed, device=index_TK.device, dtype=index_TK.dtype)
        changed_T = (chosen_TK != index_TK).any(dim=1)
        scores_TE = torch.from_numpy(event.scores_TE).to(weights_TK.device)
        made_TK = router_rules.weigh(self._rule, scores_TE, chosen_TK).to(weights_TK.dtype)
        weights_TK = torch.where(changed_T[:, None], made_TK, weights_TK)
        return replace(event, experts_TK=tuple(map(tuple, routed))), chosen_TK, weights_TK

    def _layer_max_rows(self, layer: MoeLayer, dtype: torch.dtype) -> int:
        """Most rows, of this type, of an expert of the layer in `_few_products`."""
        if isinstance(self.store, Stores) or self.store.copies.staged or self.residency.policy.computes_on_host:
            return 0
        files = self.store.files
        layout = files.layout_of(self.residency.policy.spec.expert_key(layer.index, 0))
        return layer.form.max_rows(files.views(self.store.slots[0], layout), dtype)

    def _program(self, layer: MoeLayer, event: GateEvent) -> list[Step]:
        """Return the residency's steps for an event, and count them."""
        self.window.add(event)
        expert_of, needed = self.residency.policy.spec.expert_of, set(event.needed)
        self._under_way.clear()
        if self._look is not None:
            steps = self._look.program(event)
        elif self._predicts_beside and not event.forward.prefill:
            assert isinstance(self.residency, Residency)
            steps = self.residency.event(event, self._load_then_predict)
        else:
            steps = self.residency.event(event)
        self.uses_L[layer.index] += len(needed)
        self.misses_L[layer.index] += sum(step.kind in _MISSES and expert_of(step.key)[1] in needed for step in steps)
        return steps

    def _load_then_predict(self, event: GateEvent, steps: Sequence[Step]) -> GateEvent:
        """A callback of `Residency.event`."""
        self._load_first(steps)
        return event

    def _load_first(self, steps: Sequence[Step]) -> None:
        """Start the loads before an event's first expert."""
        assert isinstance(self.store, ExpertStore)
        first = [(step.key, step.slot) for step in steps if step.kind is StepKind.LOAD]
        self._under_way.update(key for key, _ in first)
        if first and self._pooled is not None:
            self._pooled.moved()
        self.store.load_together(first)

    def _is_under_way(self, step: Step) -> bool:
        """Whether a step of the program is a load that is under way."""
        return step.kind is StepKind.LOAD and step.key in self._under_way

    @property
    def _defers(self) -> bool:
        return self._pooled is not None and self._pooled.complete and self._may_defer

    def _report_deferred(self) -> None:
        """Report the deferred events to the residency with one transfer, and start the loads that it asks for."""
        if not self.deferred_events:
            return
        assert self._pooled is not None and self._info is not None
        deferred, self.deferred_events = self.deferred_events, []
        if (device := deferred[0][1].device).type == "cuda":
            torch.cuda.synchronize(device)  # the forward may have run on another stream
        chosen = torch.cat([index_TK.reshape(-1) for _, index_TK in deferred]).tolist()
        self._pooled.computed_all()
        first = 0
        for layer, index_TK in deferred:
            experts, first = chosen[first : first + index_TK.numel()], first + index_TK.numel()
            top_k = index_TK.shape[1]
            routes = tuple(tuple(experts[i : i + top_k]) for i in range(0, len(experts), top_k))
            event = GateEvent(forward=self._info, layer=layer.index, experts_TK=routes, weights_TK=None)
            self._start([step for step in self._program(layer, event) if step.kind is not StepKind.COMPUTE])

    def _few_products(self, layer: MoeLayer, event: GateEvent, hidden_TD: torch.Tensor) -> torch.Tensor | None:
        """Like `_products`, for experts with few rows: computes all resident ones in one call.

        None if an expert has more rows, or no weights.
        """
        num_rows = sum(map(len, event.experts_TK))
        max_rows = self._max_rows[layer.index]
        if not max_rows or num_rows > ROWS_TOGETHER:
            return None
        places_of: dict[int, list[int]] = {}
        for place, expert in enumerate(chain.from_iterable(event.experts_TK)):
            places_of.setdefault(expert, []).append(place)
        if max(places_of) >= layer.form.num_experts or max(map(len, places_of.values())) > max_rows:
            return None
        assert isinstance(self.store, ExpertStore)
        store, top_k = self.store, num_rows // len(event.experts_TK)
        base = self.residency.policy.spec.expert_key(layer.index, 0)
        together: list[Step] = []
        made: list[tuple[list[int], torch.Tensor]] = []
        beside: list[Step] = []  # loaded on demand but not needed here: the rest of a whole layer

        def compute() -> None:
            shares: list[Share] = []
            places: list[int] = []
            whole = len(together) == len(places_of)
            for step in together:
                its = places_of[step.key - base]
                targets = its if whole else range(len(places), len(places) + len(its))
                shares.append(Share(store.ready(step.key, step.slot), [place // top_k for place in its], targets))
                places += its
            output = layer.form.compute_rows(hidden_TD, shares, len(places))
            made.append((places if not whole else [], output))
            for step in together:
                store.computed(step.slot)
            together.clear()

        steps = self._program(layer, event)
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if step.kind is StepKind.COMPUTE:
                while beside:
                    store.ready(beside[-1].key, beside.pop().slot)
                if together and not store.arrived(step.key, step.slot):
                    compute()  # overlaps the read
                together.append(step)
                continue
            at_once = following is not None and (following.kind, following.key) == (StepKind.COMPUTE, step.key)
            if any(other.slot == step.slot for other in together):
                compute()
            if at_once and not together:
                continue  # `ready` is next and loads it on this thread, sooner than another could
            if not self._is_under_way(step):
                store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)
            if step.kind is StepKind.LOAD and step.key - base not in places_of:
                beside.append(step)
        if together:
            compute()
        if len(made) == 1:
            return made[0][1]
        outputs = made[0][1].new_empty(num_rows, made[0][1].shape[1])
        for places, output in made:
            outputs[places] = output
        return outputs

    def _products(
        self,
        layer: MoeLayer,
        event: GateEvent,
        index_TK: torch.Tensor,
        gather: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D] of each token's experts.

        Args:
            gather: returns rows of an expert's inputs, by expert and position in [T * K].
        """
        choices = by_expert(index_TK)
        rows_of, at_once = choices.split(choices.places), index_TK.numel() <= ROWS_TOGETHER
        x_of = choices.split(gather(choices.experts, choices.places)) if at_once else {}
        products: torch.Tensor | None = None

        def inputs(expert: int, rows: torch.Tensor) -> torch.Tensor:
            return x_of[expert] if at_once else gather(choices.experts[choices.span_of[expert]], rows)

        def put(expert: int, output: torch.Tensor) -> None:
            nonlocal products
            if products is None:
                products = output.new_empty(index_TK.numel(), output.shape[1])
            products[rows_of[expert]] = output

        self._compute(layer, event, rows_of, inputs, put)
        assert products is not None
        return products

    def _compute(
        self,
        layer: MoeLayer,
        event: GateEvent,
        rows_of: Mapping[int, torch.Tensor],
        inputs: Callable[[int, torch.Tensor], torch.Tensor],
        put: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Compute every expert that the event needs, and `put` its output.

        Args:
            rows_of: positions in [T * K], by expert.
            inputs: returns an expert's input for its positions.
        """
        expert_of, num_experts = self.residency.policy.spec.expert_of, layer.form.num_experts
        steps = self._program(layer, event)
        if all(step.kind is StepKind.COMPUTE for step in steps) and not isinstance(self.store, Stores):
            self._compute_resident(layer, steps, rows_of, inputs, put)
            return
        sent: dict[int, torch.Tensor] | None = None  # inputs on other devices, by expert
        on_host = [expert_of(step.key)[1] for step in steps if step.kind is StepKind.HOST]
        begun: list[tuple[int, Callable[[], torch.Tensor]]] = []  # on other devices; written at the end
        beside: list[tuple[int, int]] = []  # loaded on demand but not needed here: the rest of a whole layer
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            if step.kind is StepKind.HOST:
                continue
            expert = expert_of(step.key)[1]
            if step.kind is not StepKind.COMPUTE:
                at_once = following is not None and (following.kind, following.key) == (StepKind.COMPUTE, step.key)
                if at_once and not on_host:
                    continue  # `ready` is next and loads it on this thread, sooner than another could
                if not self._is_under_way(step):
                    self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)
                if step.kind is StepKind.LOAD and expert not in rows_of:
                    beside.append((step.key, step.slot))
                continue
            begun += self._begin_on_host(layer, on_host, rows_of, inputs)  # after loads have started
            if sent is None:
                sent = self._send(layer, steps, rows_of, inputs)
            while beside:
                self.store.ready(*beside.pop())
            if expert in sent:
                x = replace(layer.form, finish=None).compute(sent.pop(expert), self.store.ready(step.key, step.slot))
                self.store.computed(step.slot)
                begun.append((expert, partial(bring, layer, x, rows_of[expert].device)))
                continue
            x = inputs(expert, rows_of[expert])
            if expert < num_experts:
                x = layer.form.compute(x, self.store.ready(step.key, step.slot))
                self.store.computed(step.slot)
            put(expert, x)
        begun += self._begin_on_host(layer, on_host, rows_of, inputs)
        for expert, finished in begun:
            put(expert, finished())

    def _compute_resident(
        self,
        layer: MoeLayer,
        steps: Sequence[Step],
        rows_of: Mapping[int, torch.Tensor],
        inputs: Callable[[int, torch.Tensor], torch.Tensor],
        put: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Compute an event whose experts are all resident, grouping experts with few rows.

        With few rows a call takes longer than its computation (`ExpertForm.compute_each`).
        """
        expert_of, form = self.residency.policy.spec.expert_of, layer.form
        together: list[tuple[int, Step, torch.Tensor]] = []

        def compute() -> None:
            weights = [self.store.ready(step.key, step.slot) for _, step, _ in together]
            outputs = form.compute_each([x for _, _, x in together], weights)
            for (expert, step, _), output in zip(together, outputs, strict=True):
                self.store.computed(step.slot)
                put(expert, output)

        num_rows = 0
        for step in steps:
            expert = expert_of(step.key)[1]
            x = inputs(expert, rows_of[expert])
            if expert >= form.num_experts:
                put(expert, x)
                continue
            if together and num_rows + x.shape[0] > ROWS_TOGETHER:
                compute()
                together, num_rows = [], 0
            together.append((expert, step, x))
            num_rows += x.shape[0]
        if together:
            compute()

    def _send(
        self,
        layer: MoeLayer,
        steps: Sequence[Step],
        rows_of: Mapping[int, torch.Tensor],
        inputs: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Send inputs to the devices that compute them; returns them by expert.

        All are sent before any device computes: a copy between two devices waits for both, so a later copy would make
        the model's device wait for the other's computation.
        """
        sent: dict[int, torch.Tensor] = {}
        if isinstance(self.store, Stores):
            for step in steps:
                if step.kind is StepKind.COMPUTE and (device := self.store.device_of(step.slot)):
                    expert = self.residency.policy.spec.expert_of(step.key)[1]
                    if expert < layer.form.num_experts:
                        sent[expert] = inputs(expert, rows_of[expert]).to(self.store.devices[device])
        return sent

    def _begin_on_host(
        self,
        layer: MoeLayer,
        experts: list[int],
        rows_of: Mapping[int, torch.Tensor],
        inputs: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> Iterator[tuple[int, Callable[[], torch.Tensor]]]:
        """Start to compute `experts` in host memory and empty the list; yields per expert a wait for its output."""
        while experts:
            expert = experts.pop()
            x = inputs(expert, rows_of[expert])
            if expert < layer.form.num_experts:
                key = self.residency.policy.spec.expert_key(layer.index, expert)
                yield expert, self._host.start(layer.form, key, x)
            else:
                yield expert, lambda x=x: x  # type: ignore[misc]

    def _bind(self, layer: MoeLayer) -> None:
        layer.experts.moetool_binding = (self, layer)
        if layer.form.call is Call.INTERFACE:
            return  # transformers dispatches by a name in the config; the instance determines the pool
        forwards: dict[Call, Callable[..., torch.Tensor]] = {
            Call.EXPERTS: self._experts,
            Call.SCALED: self._scaled,
            Call.BLOCK: self._block,
        }
        layer.experts.forward = partial(forwards[layer.form.call], layer)
        if layer.form.call is Call.SCALED:  # its experts do not receive the routes
            watch(layer, lambda *routes: self._chosen.update({layer.index: routes}))

    def _experts(
        self, layer: MoeLayer, hidden: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Experts called as by the interface, except for the shape of the hidden states."""
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        return self.forward(layer, flat_TD, index_TK, weights_TK).view(hidden.shape)

    def _scaled(self, layer: MoeLayer, scaled: torch.Tensor) -> torch.Tensor:
        """Experts that each receive a copy of the hidden states scaled by its weight, [E * T, D] in all; the caller
        sums their outputs (llama4). Copies without a choice are 0, and so are their outputs.
        """
        copies_ETD = scaled.view(layer.num_experts, -1, scaled.shape[-1])
        top_k = layer.top_k
        index_TK, weights_TK = self._chosen.pop(layer.index)
        event = self._event(layer, index_TK, weights_TK)
        places = torch.arange(index_TK.numel(), device=index_TK.device)
        if self._pooled is not None:
            x = copies_ETD[index_TK.reshape(-1), places // top_k]
            products = self._pooled.compute(layer, self._program(layer, event), x, 1, index_TK)
        else:
            products = self._products(layer, event, index_TK, lambda experts, at: copies_ETD[experts, at // top_k])
        output_ETD = torch.zeros_like(copies_ETD)
        output_ETD[index_TK.reshape(-1), places // top_k] = products
        return output_ETD.view(scaled.shape)

    def _block(self, layer: MoeLayer, hidden: torch.Tensor) -> torch.Tensor:
        """A block with its own router that adds a bias to the sum (jetmoe)."""
        flat_TD = hidden.reshape(-1, hidden.shape[-1])
        index_TK, weights_TK = sorted_routes(layer.router(flat_TD), layer.top_k)
        return self.forward(layer, flat_TD, index_TK, weights_TK).view(hidden.shape) + layer.experts.bias

    def _on_embedded(self, embedding_TD: torch.Tensor) -> None:
        if self._info is not None:
            self._info = replace(self._info, embedding_TD=request_means(self._info, embedding_TD))
            self._start(self.residency.begin_forward(self._info))

    def _start(self, steps: list[Any]) -> None:
        if steps and self._pooled is not None:
            self._pooled.moved()
        for step in steps:
            self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)


def bring(layer: MoeLayer, output: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move an expert's output to this device, and apply the family's last operation with local weights."""
    output = output.to(device)
    return output if layer.form.finish is None else layer.form.finish(output)


def _experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation that transformers calls."""
    runtime, layer = module.moetool_binding
    output: torch.Tensor = runtime.forward(layer, hidden_states, top_k_index, top_k_weights)
    return output
