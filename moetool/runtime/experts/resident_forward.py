"""A server's partial forward: the next router's logits after resident experts, while misses load."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moetool.base.errors import UsageError
from moetool.base.families import own_cache
from moetool.base.types import GateEvent
from moetool.caching.devices import Pool
from moetool.caching.policy import PartialCosts, Policy
from moetool.caching.residency import Step
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.loading import LoadedModel
from moetool.models.router_hooks import is_unrecorded, to_float16
from moetool.runtime.experts.binding import bind_experts
from moetool.runtime.experts.copies import copy_seconds, is_staged
from moetool.runtime.experts.grouping import weighted_sum
from moetool.runtime.experts.machines import ExpertPool
from moetool.runtime.experts.partial_forward import PartialForward
from moetool.runtime.experts.pooled_experts import PooledExperts
from moetool.runtime.kept_costs import kept_costs
from moetool.runtime.kv.paged_attention import plain_arguments
from moetool.trace.events import next_scores

_ROUNDS = 5


def options_beside_gpu(
    kind: type[Policy], options: Mapping[str, Any], loaded: LoadedModel, slots: int
) -> Mapping[str, Any]:
    """Return a policy's options, as `Policy.beside_gpu` if this model is on a GPU.

    Effects: may bind the model's experts, and keep measured costs (`kept_costs`); call it before a runtime binds them.
    """
    if not is_staged(loaded.device):
        return options
    return kind.beside_gpu(loaded.spec, options, slots, partial(partial_costs, loaded))


def partial_costs(loaded: LoadedModel) -> PartialCosts | None:
    """Return the costs of partial forwards of this model, kept or measured; None if it cannot run them.

    Effects: see `options_beside_gpu`.
    """
    try:
        return kept_costs(loaded, PartialCosts, {}, partial(_measured, loaded))
    except UsageError:
        return None


def _measured(loaded: LoadedModel) -> PartialCosts:
    """Try partial forwards of a few tokens, and time those of one token.

    Raises:
        UsageError: this model cannot run them.
    """
    if len(loaded.layers) < 2:
        raise UsageError("the model has one MoE layer, so no next router")
    if own_cache(loaded.model.config.get_text_config()):
        raise UsageError("each request of this family runs its own forward")
    tried = _AttendedForward(loaded)
    logits: list[torch.Tensor] = []
    seconds: list[float] = []

    def identity(layer: MoeLayer, hidden_TD: torch.Tensor, *routes: torch.Tensor) -> torch.Tensor:
        if not is_unrecorded() and len(logits) < len(loaded.layers) - 1:
            began = _finished_at(loaded.device)
            logits.append(tried.after_attention(len(logits)))
            seconds.append(_finished_at(loaded.device) - began)
        return hidden_TD

    bind_experts(loaded, SimpleNamespace(forward=identity))
    try:
        tried.require_equal(loaded.model, logits)
        fastest = float("inf")
        for _ in range(_ROUNDS):
            logits.clear()
            seconds.clear()
            with torch.inference_mode():
                token = torch.zeros(1, 1, dtype=torch.int64, device=loaded.device)
                loaded.model(input_ids=token, use_cache=False, **plain_arguments(loaded.model))
            fastest = min(fastest, sum(seconds) / len(seconds))  # other processes only add
    finally:
        tried.close()
    assert loaded.files is not None
    return PartialCosts(load_s=copy_seconds(loaded.device, loaded.files.stored_bytes), layer_s=fastest)


def _finished_at(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class _AttendedForward(PartialForward):
    """A partial forward whose attention gets the arguments of the layer before."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded.model, loaded.layers)
        self._attended: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        for part in self._layers:
            self._handles.append(part.attention.register_forward_pre_hook(self._on_attention, with_kwargs=True))

    def after_attention(self, i: int) -> torch.Tensor:
        """Return the logits [T, E] of MoE layer i + 1, before layer i computes its experts."""
        return self.through(i, *self._attended)

    def _on_attention(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._attended = args, kwargs


class PooledResidentForward(_AttendedForward):
    """Fills `GateEvent.resident_TE` of a running model, as in its log.

    Resident experts are the event's experts with a slot when the router chose, after substitution. The next layer's
    attention receives this layer's arguments: masks and positions are those of the whole forward. On a GPU the partial
    forward has its own stream, so that it does not wait for the model stream's loads.

    Args:
        pool: the experts; None if they are not all in it.
        load_first: starts an event's first loads.
        pooled: computes the experts of an event together, if set.

    Attributes:
        aside: computes the experts' output during the partial forward; None otherwise.

    Effects: see `PartialForward`; allocates a stream on a GPU.

    Raises:
        UsageError: this model or pool does not support it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        residency: Pool,
        pool: ExpertPool | None,
        *,
        load_first: Callable[[GateEvent, Sequence[Step]], object],
        pooled: PooledExperts | None,
    ) -> None:
        predictor = residency.policy.predictor
        why = ""
        if pool is None or len(pool.store.devices) > 1:
            why = "the experts are not all in one device's pool"
        elif predictor is not None and "resident" in predictor.needs:
            why = "the predictor is needed before it can run; choose another predictor"
        elif own_cache(loaded.model.config.get_text_config()):
            why = "each request of this family runs its own forward"
        if why:
            raise UsageError(
                f"cannot run a partial forward through resident experts (the column resident): {why}; set "
                f"policy.predict_from=ahead, or replay a trace captured with --keep topk,logits,resident"
            )
        assert pool is not None
        super().__init__(loaded)
        self.aside: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._residency = residency
        self._store, self._under_way = pool.store, pool.started
        self._spec = residency.policy.spec
        self._routes: tuple[MoeLayer, torch.Tensor, torch.Tensor] | None = None  # routes of the current event
        self._load_first = load_first
        self._pooled = pooled
        self._watchers: OrderedDict[int, Callable[[torch.Tensor], None]] = OrderedDict()
        self._stream = torch.cuda.Stream(loaded.device) if loaded.device.type == "cuda" else None

    def require_equal_logits(self, model: Any) -> None:
        """Check the partial forward with experts that return their input; `model` must call them already.

        Raises:
            UsageError: the partial forward and the routers give different logits.
        """
        partial_logits: list[torch.Tensor] = []

        def identity(hidden_TD: torch.Tensor) -> torch.Tensor:
            if not is_unrecorded() and len(partial_logits) < len(self._layers) - 1:
                partial_logits.append(self._logits(len(partial_logits)).to(hidden_TD.device))
            return hidden_TD

        self.aside = identity
        try:
            self.require_equal(model, partial_logits)
        finally:
            self.aside = None

    def watch(self, on_logits: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call `on_logits` with the logits [T, E] of each layer but the first."""
        handle = RemovableHandle(self._watchers)
        self._watchers[handle.id] = on_logits
        return handle

    def begin(self, layer: MoeLayer, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> None:
        """Begin a layer's event with these experts and weights."""
        self._routes = layer, index_TK, weights_TK

    def program(self, event: GateEvent) -> list[Step]:
        """Return the residency's program for the current event; its first loads have started."""
        last = event.layer + 1 == self._spec.num_layers
        return self._residency.event(event, None if last else self._fill)

    def _fill(self, event: GateEvent, steps: Sequence[Step]) -> GateEvent:
        assert self._routes is not None
        layer, index_TK, weights_TK = self._routes
        self._load_first(event, steps)
        keys = {expert: self._spec.expert_key(event.layer, expert) for expert in event.needed}
        slot_of = {key: slot for key in keys.values() if (slot := self._residency.slot(key)) is not None}
        here = {e: key for e, key in keys.items() if key in slot_of and key not in self._under_way}

        def resident_sum(hidden_TD: torch.Tensor) -> torch.Tensor:
            if self._pooled is not None:
                slots = {expert: slot_of[key] for expert, key in here.items()}
                products = self._pooled.compute_some(layer, slots, hidden_TD, index_TK)
                return weighted_sum(products, weights_TK).to(hidden_TD.dtype)
            out_TD = torch.zeros_like(hidden_TD)
            for expert, key in here.items():
                rows, ranks = torch.where(index_TK == expert)
                x = layer.form.compute(hidden_TD[rows], self._store.ready(key, slot_of[key]))
                out_TD[rows] += (x * weights_TK[rows, ranks, None]).to(out_TD.dtype)
            return out_TD

        self.aside = resident_sum
        try:
            logits_TE = self._logits(event.layer)
        finally:
            self.aside = None
        for on_logits in tuple(self._watchers.values()):
            on_logits(logits_TE)
        wide_TE = torch.nn.functional.pad(logits_TE, (0, self._spec.num_experts - logits_TE.shape[1]))
        return replace(event, resident_TE=next_scores(self._spec, event.layer, to_float16(wide_TE)))

    def _logits(self, i: int) -> torch.Tensor:
        """Return the logits [T, E] of MoE layer i + 1 on the CPU, before layer i computes its experts."""
        if self._stream is None:
            return self.after_attention(i)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            return self.after_attention(i).cpu()  # waits for this stream only
