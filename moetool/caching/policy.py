"""The interface of cache policies, and policies by name.

A policy decides what to prefetch, in which order to load misses, and what to evict; `moetool.caching.residency` turns
these decisions into programs. Experts are Python integers, the keys `ModelSpec.expert_key(layer, expert)`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moetool.base import config, plugins
from moetool.base.errors import CapacityError, UsageError, unknown_name
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec

_ADMISSIONS = ("published", "value")
MIN_SLOTS = 2
"""The smallest legal pool: one expert being computed and one in flight."""


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """Options of policies that admit every miss as published, or by value.

    Attributes:
        admit: `published`, or `value`: an expert that the host computed gets a slot only if it is worth more than the
            evicted one. A policy's use of slots is else the same.

    Raises:
        UsageError: an unknown value.
    """

    admit: str = "published"

    def __post_init__(self) -> None:
        if self.admit not in _ADMISSIONS:
            raise unknown_name("admission", self.admit, _ADMISSIONS)


def admits_by_value(options: Any) -> bool:
    """Whether these are options of a policy that admits by value what the host computed."""
    return isinstance(options, AdmissionOptions) and options.admit == "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialCosts:
    """Seconds on which the choice of a partial forward depends, measured on a device.

    Attributes:
        load_s: one expert from host memory.
        layer_s: a layer's partial forward of one token, its resident experts not included.

    Raises:
        UsageError: one is not above 0.
    """

    load_s: float
    layer_s: float

    def __post_init__(self) -> None:
        config.require_within(self, "costs of partial forwards: ", load_s=config.POSITIVE, layer_s=config.POSITIVE)


class Policy:
    """A cache policy; the defaults load on demand and prefetch nothing.

    A policy file defines a frozen dataclass `Options` and a subclass `Policy` of this class. It learns of residents by
    `admit` and `removed`, does no I/O and reads no clock.

    Class attributes:
        needs: required trace columns: `experts`; `weights`, `logits`, `hidden` and `ahead` fill the fields of that name
            of an event (`logits` its scores), `embeddings` that of a forward.
        needs_predictor: whether it requires a trained predictor.
        needs_future: whether it must know the coming events (replay only), which `foresee` passes first.
        in_order: whether experts are loaded and computed one by one, residents first, without overlap.
        lossless: whether it keeps the model's routes, so that logits are bit-identical to those of any other lossless
            policy for the same batch composition; only other policies may `route`.
        computes_on_host: whether misses may be computed in host memory (`on_host`); its options may override.
        live_costs: whether it decides by costs measured while it runs (`take_costs`); its options may override.
        prefetch_distance: layers ahead that it prefetches (0: none); an option `distance` overrides it.
        prediction_lag: events between the gate at which the predictor starts in its own thread and the event whose
            first expert waits for the result; None: the predictor runs in the caller's thread.
        search_lag: the same for the policy's own searches and partial forwards.

    Attributes:
        own: the spec; where devices share a model, its sizes count only this device's experts per layer. Keys always
            come from `spec`.
        searches: predictions that it has made without a predictor: searches of its memory, looks at later gates.
        partial_forwards: forwards of a layer through resident experts to the next gate, which it has predicted by.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"experts"})
    needs_predictor: ClassVar[bool] = False
    needs_future: ClassVar[bool] = False
    in_order: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    computes_on_host: bool = False
    live_costs: bool = False
    prefetch_distance: ClassVar[int] = 0
    prediction_lag: int | None = None
    search_lag: int | None = None
    searches: int = 0
    partial_forwards: int = 0

    def __init__(self, spec: ModelSpec, options: Any, num_slots: int, predictor: Any = None) -> None:
        self.spec = spec
        self.options = options
        self.num_slots = num_slots
        self.predictor = predictor
        self.own = spec

    @property
    def distance(self) -> int:
        """Return the number of layers ahead that it prefetches, by its options."""
        return int(getattr(self.options, "distance", self.prefetch_distance))

    @property
    def columns(self) -> frozenset[str]:
        """Return the trace columns that it and its predictor need."""
        return self.needs if self.predictor is None else self.needs | self.predictor.needs

    @classmethod
    def min_slots(cls, spec: ModelSpec, options: Any) -> int:
        """Return the fewest slots that the policy supports; `build_policy` refuses fewer."""
        return MIN_SLOTS

    @classmethod
    def slots_used(cls, spec: ModelSpec, options: Any, num_slots: int) -> int:
        """Return how many of the `num_slots` the policy uses (default: all)."""
        return num_slots

    @classmethod
    def beside_gpu(
        cls, spec: ModelSpec, options: Mapping[str, Any], num_slots: int, costs: Callable[[], PartialCosts | None]
    ) -> Mapping[str, Any]:
        """Return the options for a server on one GPU (default: the same).

        Args:
            costs: returns what the choice depends on, measured there; None if its model cannot run partial forwards.
        """
        return options

    @classmethod
    def reloads(cls, spec: ModelSpec, num_slots: int) -> bool:
        """Whether it loads every needed expert anew at each event, so that lru, in one pool, never loads more."""
        return False

    @classmethod
    def state_bytes(cls, spec: ModelSpec, options: Any) -> int:
        """Return the bytes of host memory for its state, if considerable."""
        return 0

    @classmethod
    def uses(cls, predictor: Any = None) -> bool:
        """Whether it uses this predictor; with None: whether it can use any predictor."""
        return cls.needs_predictor

    @property
    def compiles(self) -> bool:
        """Whether compiled code can decide its events, with the same decisions (`moetool.caching.compiled_events`)."""
        return False

    @property
    def compiled_memory(self) -> np.ndarray | None:
        """Return the table of its `moetool.prediction.token_memory.TokenMemory`; None without one."""
        return None

    def compile_into(self, table: memoryview) -> Mapping[int, Any]:
        """Return its fields of a pool's table (`moetool.caching.event_kernels`): numbers, and arrays for addresses.

        Called before the first forward, if it `compiles`. From then on nobody calls `gate`, `after_first_expert`,
        `admit`, `removed` and `evict`.
        """
        raise NotImplementedError

    def foresee(self, events: Sequence[Sequence[int]]) -> None:
        """Receive the keys that each coming event needs, in order; called only if `needs_future`."""

    def begin_request(self, request: int) -> None:
        """Note the first appearance of a request."""

    def begin_forward(self, info: ForwardInfo) -> Sequence[int]:
        """Begin a forward; return prefetches before its first MoE layer, most wanted first."""
        return ()

    def route(self, event: GateEvent, resident: Callable[[int], bool]) -> Sequence[Sequence[int]] | None:
        """Return experts to use instead of the router's choice [T, K]; None keeps the choice.

        Called first at an event, only if not `lossless`. Each expert replaces the one at its position in `experts_TK`;
        its weight follows from its own score by the family's rule.

        Args:
            resident: whether the expert with this key is in a slot.
        """
        return None

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        """Return the misses to compute on the host, in host memory and without a slot.

        Called only if `computes_on_host`; `gate` gets the remaining misses.
        """
        return ()

    def take_costs(self, load_s: float, host_s: float) -> None:
        """Update the seconds of a load and of an expert on the host; called only between forwards."""

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        """Return the misses (ascending keys) in the order in which to load them.

        The result may include experts that the event does not need, such as the rest of the layer. Once every miss has
        its slot, they are loaded on demand as slots permit, and the event's next expert is computed only after them.
        They count as loaded ahead.
        """
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        """Return prefetches after the event's first expert, most wanted first.

        A prefetch gets a slot only after every miss of the event.
        """
        return ()

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        """Return residents to evict at once, after the event's last expert."""
        return ()

    def admit(self, key: int, prefetched: bool) -> None:
        """Note that `key` got a slot."""

    def removed(self, key: int) -> None:
        """Note that `key` lost its slot."""

    def evict(self, locked: Collection[int]) -> int:
        """Return the resident to evict for an on-demand load, not in `locked`; `removed` follows."""
        raise NotImplementedError("the policy has no method evict")

    def evict_among(self, candidates: Sequence[int], residents: Collection[int]) -> int:
        """Return the candidate to evict for an on-demand load, where each layer has its own slots.

        Args:
            candidates: residents that may be evicted, layer by layer; never empty.
        """
        return self.evict(set(residents).difference(candidates))

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        """Return the resident to evict for a prefetch of `key`, or None if `key` is worth less than all of them."""
        return self.evict(locked)

    def evict_among_for_prefetch(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        """Like `evict_for_prefetch`, where each layer has its own slots; arguments as for `evict_among`."""
        return self.evict_for_prefetch(key, set(residents).difference(candidates))

    def worth(self, keys: Sequence[int]) -> Sequence[float]:
        """Return what a slot for each of the event's misses is worth, on any scale; called after `gate`.

        Called only if a stage above the policy splits misses (`moetool.caching.machine_split`).
        """
        return [0.0] * len(keys)

    def evict_for_admission(self, key: int, locked: Collection[int]) -> int | None:
        """Return the resident to evict for `key`, which the host has computed, or None if `key` is worth less."""
        return self.evict(locked)

    def evict_among_for_admission(self, key: int, candidates: Sequence[int], residents: Collection[int]) -> int | None:
        """Like `evict_for_admission`, where each layer has its own slots; arguments as for `evict_among`."""
        return self.evict_among(candidates, residents)

    def end_forward(self, info: ForwardInfo) -> None:
        """Note the end of a forward."""

    def end_request(self, request: int) -> None:
        """Note that a request has finished or was cancelled."""

    def expected_use(self) -> Mapping[int, float]:
        """Return the past use of experts by key, in relative numbers; empty if the policy keeps none."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """Return the learned state for `restore`, without the residents."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the learned state of an earlier run of the same model and policy; only before the first forward.

        Raises:
            ValueError: the arrays are not those of `state`.
        """


class SharedPredictor:
    """Shares one predictor among concurrent runs: each prediction is computed once."""

    is_shared = True

    def __init__(self, predictor: Any) -> None:
        self.spec: ModelSpec = predictor.spec
        self.needs: frozenset[str] = predictor.needs
        self.lookahead: int = predictor.lookahead
        self.maps: Any = getattr(predictor, "maps", None)  # only for predictors that search expert maps
        self._predictor = predictor
        self.routes = getattr(predictor, "routes", None)
        self._observed: GateEvent | None = None
        self._scores: dict[int, np.ndarray] = {}

    def observe(self, event: GateEvent) -> None:
        if event is not self._observed:
            self._observed = event
            self._scores.clear()
            self._predictor.observe(event)

    def scores(self, layer: int) -> np.ndarray:
        if layer not in self._scores:
            self._scores[layer] = self._predictor.scores(layer)
        return self._scores[layer]


def slots_within(spec: ModelSpec, budget_bytes: int) -> int:
    """Return how many expert slots a budget holds, at most the model's number of experts.

    Raises:
        CapacityError: not even the smallest legal pool fits.
    """
    num_slots = min(budget_bytes // spec.slot_bytes, spec.total_experts)
    if num_slots < MIN_SLOTS:
        raise CapacityError(
            f"a budget of {budget_bytes:,} bytes holds {num_slots} expert slots of {spec.slot_bytes:,} bytes, and the "
            f"smallest legal pool has {MIN_SLOTS}; give it at least {MIN_SLOTS * spec.slot_bytes:,} bytes"
        )
    return num_slots


def policy_class(name: str) -> type[Policy]:
    """Return the `Policy` of a plugin. Raises: UsageError: there is no such policy."""
    return plugins.load("policy", name).Policy


def parse_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return a policy's `Options` with these values.

    Raises:
        UsageError: there is no such policy or option, or a value is invalid.
    """
    return config.parse(plugins.load("policy", name).Options, options, f"policy {name}")


def computes_on_host(name: str, options: Mapping[str, Any]) -> bool:
    """Whether a policy with these options computes misses on the host by its own choice. Raises as `parse_options`."""
    return policy_class(name).computes_on_host or getattr(parse_options(name, options), "splits", False)


def require_slots(
    name: str, spec: ModelSpec, options: Mapping[str, Any], num_slots: int, *, own: ModelSpec | None = None
) -> None:
    """Raise CapacityError if a policy with these options needs more slots than fit (`own`: as for `build_policy`)."""
    fewest = policy_class(name).min_slots(spec if own is None else own, parse_options(name, options))
    if num_slots < fewest:
        each = "" if own is None else " on each device"
        raise CapacityError(
            f"policy {name} needs at least {fewest} expert slots of {spec.name} ({fewest * spec.slot_bytes:,} "
            f"bytes){each}, and {num_slots} fit; give it more memory or choose another policy"
        )


def build_policy(
    name: str,
    spec: ModelSpec,
    options: Mapping[str, Any],
    num_slots: int,
    *,
    predictor: Any = None,
    future: Sequence[Sequence[int]] | None = None,
    own: ModelSpec | None = None,
) -> Policy:
    """Build a policy for a model, for replay, planning and serving alike.

    Args:
        options: values for the policy's `Options`; the rest keep their defaults.
        num_slots: number of slots that fit; the policy may use fewer.
        predictor: a `moetool.training.predictor.Predictor` of the same model, for policies that predict.
        future: keys of every coming event, known in a replay only.
        own: value of `Policy.own`, for one device of several.

    Raises:
        UsageError: the policy or an option is unknown, a required predictor or the required future is missing, or the
            policy routes and a router has no scores.
        MismatchError: the predictor is of another model.
        CapacityError: the policy needs more slots than fit.
    """
    kind = policy_class(name)
    chosen = parse_options(name, options)
    sizes = spec if own is None else own
    require_slots(name, spec, options, num_slots, own=own)
    if not kind.lossless and not all(spec.has_logits_L):
        raise UsageError(
            f"policy {name} needs the scores of every router, but {spec.name} has routers without; choose another"
        )
    if predictor is not None:
        spec.require_same(predictor.spec, "the model", "the predictor")
    elif kind.needs_predictor:
        raise UsageError(f"policy {name} needs a predictor and got none; train one and pass it with --predictor DIR")
    policy = kind(spec, chosen, kind.slots_used(sizes, chosen, num_slots), predictor)
    policy.own = sizes
    if kind.needs_future:
        if future is None:
            raise UsageError(
                f"policy {name} needs future requests, so it works in replay only; choose another to serve"
            )
        policy.foresee(future)
    return policy
