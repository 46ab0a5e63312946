"""Run a model's experts from a pool that may be smaller than one event."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from moetool.base.errors import UsageError
from moetool.base.families import find
from moetool.base.types import ForwardInfo, GateEvent
from moetool.caching.devices import Pool
from moetool.caching.event_counts import EventCounts
from moetool.caching.policy import Policy
from moetool.caching.program import run
from moetool.caching.residency import Step, StepKind
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.families import router_rules
from moetool.models.loading import LoadedModel
from moetool.models.router_hooks import to_float16
from moetool.runtime.decode_graphs import RecordedExperts
from moetool.runtime.experts.binding import bind_experts
from moetool.runtime.experts.cost_meter import CostMeter
from moetool.runtime.experts.device_stores import Store
from moetool.runtime.experts.event_window import EventWindow
from moetool.runtime.experts.grouping import ROWS_TOGETHER, ChoiceRows, RowsByExpert, weighted_sum
from moetool.runtime.experts.host_compute import HostCompute
from moetool.runtime.experts.machines import (
    ExpertMachine,
    ExpertPool,
    ProgramMachine,
    RowMachine,
    StepEvent,
    keeps_experts,
    prefetches_beside,
)
from moetool.runtime.experts.pooled_experts import PooledExperts, PoolMachine
from moetool.runtime.experts.resident_forward import PooledResidentForward
from moetool.runtime.experts.signals import Signals, request_means
from moetool.runtime.experts.slot_tables import ExpertWeights, SlotTables
from moetool.runtime.experts.store import ExpertStore

_CALLED_WITH_ROUTES = (Call.INTERFACE, Call.EXPERTS)
_LOAD = StepKind.LOAD


class RemoteExperts:
    """Computes a model's experts with other machines, of which each holds some.

    Attributes:
        lock: guards residency and store between its threads.
    """

    lock: AbstractContextManager[Any] = nullcontext()

    def compute(self, layer: MoeLayer, event: GateEvent, rows: ChoiceRows) -> None:
        """See `ExpertRuntime.compute`."""
        raise NotImplementedError

    def close(self) -> None:
        """Called first by `ExpertRuntime.close`."""


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
        residency: that of one device, or `DevicePools`.
        store: made for it (`moetool.runtime.experts.device_stores.open_stores`).
        pooled: whether one product over the pool computes all experts of an event
            (`moetool.runtime.experts.pooled_experts`), instead of one product each (default: on a GPU that has all
            slots).
        remote: computes the experts with other machines; None: all are computed here.

    Attributes:
        max_rows_L: most rows of an expert of each layer that shares calls with others on a CPU; 0: none does.
        counts: how often each expert was needed, resident then, and loaded.
        window: the last events.
        recorded: graphs of `compute_by_table` usable in this forward, by layer.
        deferred_events: layers and routes of this forward that the residency receives after it. They are computed
            already, or a CUDA graph is about to compute them.
        on_costs: called with a forward and the seconds of a load and of a host computation that apply from it on.

    Effects: computes the model's experts from now on (`bind_experts`); owns the store.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        residency: Pool,
        store: Store,
        *,
        pooled: bool | None = None,
        remote: RemoteExperts | None = None,
    ) -> None:
        self.residency = residency
        self.store = store
        self._remote, self._lock = remote, nullcontext() if remote is None else remote.lock
        self._pool = ExpertPool(store, HostCompute(store))
        self.counts = EventCounts(loaded.spec)
        self._watching: dict[int, OrderedDict[int, Callable[[torch.Tensor], None]]] = {}  # by layer, by handle
        self._info: ForwardInfo | None = None
        self._needs = residency.policy.columns
        self._rule = find(loaded.model.config.get_text_config().model_type).rule(
            loaded.model.config.get_text_config(), loaded.layers[0].router
        )
        self.window = EventWindow()
        self._resident_forward: PooledResidentForward | None = None
        self.on_costs: Callable[[int, float, float], None] | None = None
        if residency.policy.live_costs:
            if len(store.devices) > 1:
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
        bind_experts(loaded, self)
        self._pooled: PooledExperts | None = None
        one_pool = remote is None and len(store.devices) == 1
        wanted = store.copies.staged if pooled is None else pooled
        if wanted and one_pool:
            self._pooled = PooledExperts(loaded, residency.residencies[0], self._pool)
        policy = residency.policy
        self._predicts_during_loads = one_pool and policy.prediction_lag is not None
        self._may_defer = self._needs <= {"experts"} and policy.lossless and not policy.computes_on_host
        self.recorded: Mapping[int, RecordedExperts] = {}
        self.deferred_events: list[tuple[MoeLayer, torch.Tensor]] = []
        self.max_rows_L = [self._layer_max_rows(layer, loaded.model.dtype) for layer in loaded.layers]
        self._tables: SlotTables | None = None
        on_cpu = one_pool and loaded.device.type == "cpu" and not store.copies.staged and self._pooled is None
        if on_cpu and loaded.model.dtype == torch.bfloat16 and isinstance(store, ExpertStore):
            self._tables = SlotTables(loaded, store)
        if "resident" in self._needs:
            self._resident_forward = PooledResidentForward(
                loaded,
                residency,
                self._pool if remote is None else None,
                load_first=self._load_first,
                pooled=self._pooled,
            )
            self._resident_forward.require_equal_logits(loaded.model)

    def begin_forward(self, info: ForwardInfo) -> None:
        """Announce the next forward, and start its first prefetches.

        If the policy uses embeddings, they start after the embedding layer has run.
        """
        self._info = info
        self.deferred_events = []
        with self._lock:
            self.window.begin(self.residency.counts)
            if self.store.meter is not None and (new := self.store.meter.changed_means()):
                self.residency.policy.take_costs(*new)
                if self.on_costs is not None:
                    self.on_costs(info.forward_id, *new)
            if "embeddings" not in self._needs:
                self._start_first(self.residency.begin_forward(info))
        if self._pooled is not None:
            self._pooled.begin_forward(len(info.request_T))

    def end_forward(self) -> None:
        """End the forward, complete or not, for the residency too, even if it did not receive all events."""
        if (info := self._info) is None:
            return
        with self._lock:
            try:
                self.report_deferred()
            finally:
                self._info = None
                self.residency.end_forward(info)
                self.window.end(info, self.residency.counts, self.residency.reserved_slots)

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

    def watch_partial_logits(self, on_logits: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call `on_logits` with the partial forward's logits [T, E] of each layer except the first."""
        assert self._resident_forward is not None, "no partial forward runs"
        return self._resident_forward.watch(on_logits)

    def close(self) -> None:
        """End the store's threads and remove the hooks of the model's routers."""
        if self._remote is not None:
            self._remote.close()
        if self._resident_forward is not None:
            self._resident_forward.close()
        self._signals.close()
        self._pool.host.close()
        self.store.close()

    def forward(
        self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the output [T, D] of a layer's routed experts. Raises: MoetoolError: an expert could not be read."""
        if self._resident_forward is not None and self._resident_forward.aside is not None:
            return self._resident_forward.aside(hidden_TD)
        num_tokens, top_k = index_TK.shape
        recorded = self._usable_graph(layer, hidden_TD, index_TK)
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
            if self._resident_forward is not None:
                self._resident_forward.begin(layer, index_TK, weights_TK)
            if self._pooled is not None:
                graph = partial(recorded.run, index_TK, weights_TK) if recorded is not None else None
                wave = PoolMachine(self._pooled, layer, hidden_TD, top_k, index_TK, len(event.needed), graph)
                run(self._program(layer, event), wave)
                if wave.output is not None:
                    return wave.output
                products = wave.products()
            elif places_of := self._few_rows(layer, event):
                machine = RowMachine(self._pool, layer, places_of, hidden_TD, self.max_rows_L[layer.index])
                run(self._program(layer, event), machine)
                products = machine.products()
            else:
                products = self._products(layer, event, hidden_TD, top_k)
        for on_products in tuple(self._watching.get(layer.index, {}).values()):
            on_products(products.view(num_tokens, top_k, -1))
        return weighted_sum(products, weights_TK).to(hidden_TD.dtype)

    def native_weights(self, layer: MoeLayer) -> ExpertWeights | None:
        """Return addresses of a layer's experts, if the calls of a recorded step compute them (`runtime.steps`)."""
        return None if self._tables is None else self._tables.weights(layer)

    @property
    def runs_ahead(self) -> bool:
        """Whether a recorded step may compute resident experts before the residency receives their events.

        The decisions are the same, but prefetches start later.
        """
        policy = self.residency.policy
        prefetches = (
            type(policy).after_first_expert is not Policy.after_first_expert
            or type(policy).after_last_expert is not Policy.after_last_expert
        )
        return self._may_defer and (not prefetches or policy.num_slots >= policy.spec.total_experts)

    def locate(self, layer: MoeLayer, given: StepEvent) -> bool:
        """Decide about an event of a recorded step, and locate its experts for the step's calls.

        Returns:
            Whether all are located; otherwise their products are computed.

        Raises:
            MoetoolError: an expert could not be read.
        """
        assert self._tables is not None
        event = self._event(layer, given.index_TK, given.weights_TK)
        if (routed := self.residency.route(event)) is not None:
            event, index_TK, weights_TK = self._reroute(event, routed, given.index_TK, given.weights_TK)
            given.index_TK.copy_(index_TK)
            given.weights_TK.copy_(weights_TK)
        program = self._program(layer, event)
        prefetches = prefetches_beside(program)
        if prefetches is not None and self._tables.hold(layer, program):
            self._start(prefetches)
            return True
        places_of = _places_of(event)
        machine = ProgramMachine(self._pool, layer, self._tables, places_of, given, defers=keeps_experts(program))
        run(program, machine)
        machine.finish()
        return not machine.computed

    def locates(self, layer: MoeLayer) -> bool:
        """Whether `locate` may be called: nothing observes products, and no partial forward runs."""
        watched = self._resident_forward is not None or self._watching.get(layer.index)
        return self.native_weights(layer) is not None and not watched

    def _usable_graph(self, layer: MoeLayer, hidden_TD: torch.Tensor, index_TK: torch.Tensor) -> RecordedExperts | None:
        """Return the layer's recorded graph, if it can compute this call."""
        recorded = self.recorded.get(layer.index)
        if recorded is None or not recorded.takes(hidden_TD) or self._watching.get(layer.index):
            return None
        return recorded if self.computes_by_table(layer, index_TK.numel()) else None

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
        """Most rows, of this type, of an expert of the layer on a `RowMachine`."""
        if self._remote is not None or len(self.store.devices) > 1 or self.store.copies.staged:
            return 0
        files = self.store.files
        layout = files.layout_of(self.residency.policy.spec.expert_key(layer.index, 0))
        return layer.form.max_rows(files.views(self.store.stores[0].slots[0], layout), dtype)

    def _program(self, layer: MoeLayer, event: GateEvent) -> list[Step]:
        """Return the residency's steps for an event, and count them."""
        self.window.add(event)
        self._pool.started.clear()
        if self._resident_forward is not None:
            steps = self._resident_forward.program(event)
        elif self._predicts_during_loads and not event.forward.prefill:
            steps = self.residency.event(event, self._load_first)
        else:
            steps = self.residency.event(event)
        self.counts.add(steps)
        return steps

    def _load_first(self, event: GateEvent, steps: Sequence[Step]) -> GateEvent:
        """Start the loads before an event's first expert; a callback of `Residency.event`."""
        first = [(step.key, step.slot) for step in steps if step.kind is _LOAD]
        self._pool.started.update(key for key, _ in first)
        if first and self._pooled is not None:
            self._pooled.moved()
        self.store.load_together(first)
        return event

    @property
    def _defers(self) -> bool:
        return self._pooled is not None and self._pooled.complete and self._may_defer

    def report_deferred(self) -> None:
        """Report the deferred events to the residency with one transfer, and start the loads that it asks for."""
        if not self.deferred_events:
            return
        assert self._info is not None
        deferred, self.deferred_events = self.deferred_events, []
        if (device := deferred[0][1].device).type == "cuda":
            torch.cuda.synchronize(device)  # the forward may have run on another stream
        chosen = torch.cat([index_TK.reshape(-1) for _, index_TK in deferred]).tolist()
        if self._pooled is not None:
            self._pooled.computed_all()
        first = 0
        for layer, index_TK in deferred:
            experts, first = chosen[first : first + index_TK.numel()], first + index_TK.numel()
            top_k = index_TK.shape[1]
            routes = tuple(tuple(experts[i : i + top_k]) for i in range(0, len(experts), top_k))
            event = GateEvent(forward=self._info, layer=layer.index, experts_TK=routes, weights_TK=None)
            self._start([step for step in self._program(layer, event) if step.kind is not StepKind.COMPUTE])

    def compute(self, layer: MoeLayer, event: GateEvent, rows: RowsByExpert) -> None:
        """Compute every expert that the event needs from the pool, with inputs from `rows` and outputs to it."""
        machine = ExpertMachine(self._pool, layer, event.needed, rows)
        run(self._program(layer, event), machine)
        machine.finish()

    def _few_rows(self, layer: MoeLayer, event: GateEvent) -> dict[int, list[int]] | None:
        """Return the positions of each expert for a `RowMachine`; None if there are too many or one has no weights."""
        if not self.max_rows_L[layer.index] or len(event.experts_TK) * len(event.experts_TK[0]) > ROWS_TOGETHER:
            return None
        places_of = _places_of(event)
        return None if max(places_of) >= layer.form.num_experts else places_of

    def _products(self, layer: MoeLayer, event: GateEvent, x: torch.Tensor, each: int) -> torch.Tensor:
        """Return the unweighted outputs [T * K, D] of each token's experts; choice r is of row r // `each` of `x`."""
        rows = ChoiceRows(event.experts_TK, x, each)
        (self if self._remote is None else self._remote).compute(layer, event, rows)
        return rows.products()

    def scaled_products(
        self, layer: MoeLayer, x: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """See `ComputesExperts`."""
        event = self._event(layer, index_TK, weights_TK)
        if self._pooled is None:
            return self._products(layer, event, x, 1)
        machine = PoolMachine(self._pooled, layer, x, 1, index_TK, len(event.needed))
        run(self._program(layer, event), machine)
        return machine.products()

    def _on_embedded(self, embedding_TD: torch.Tensor) -> None:
        if self._info is not None:
            self._info = replace(self._info, embedding_TD=request_means(self._info, embedding_TD))
            self._start_first(self.residency.begin_forward(self._info))

    def _start_first(self, steps: list[Step]) -> None:
        """Count and start the prefetches before a forward's first event."""
        self.counts.add(steps)
        self._start(steps)

    def _start(self, steps: list[Any]) -> None:
        if steps and self._pooled is not None:
            self._pooled.moved()
        for step in steps:
            self.store.load(step.key, step.slot, prefetch=step.kind is StepKind.PREFETCH)


def _places_of(event: GateEvent) -> dict[int, list[int]]:
    """Positions of each expert among an event's choices, in the order of `ChoiceRows`."""
    places_of: dict[int, list[int]] = {}
    top_k = len(event.experts_TK[0])
    for rank, experts_T in enumerate(zip(*event.experts_TK, strict=True)):
        for token, expert in enumerate(experts_T):
            places_of.setdefault(expert, []).append(token * top_k + rank)
    return places_of
