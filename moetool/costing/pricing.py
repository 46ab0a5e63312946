"""Costs of a forward's parts by a `CostProfile`, in whole nanoseconds, each curve evaluated once."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from moetool.base.config import Span, require_within
from moetool.base.errors import MismatchError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.host_split import HostCosts
from moetool.caching.machine_split import SplitCosts
from moetool.caching.policy import parse_options
from moetool.costing.costs import ComputeCosts, CostProfile, Curve

_SEVERAL = 8  # host costs of an expert are fitted at 1 and at this many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineOptions:
    """Settings of `--set timeline.NAME=VALUE`: the measured machine.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: data type of everything except the experts (default: the one that computes an expert fastest).
        io_threads: threads that read experts; rounded to the nearest measured number.
        tier: location of experts that are not on the device: `disk`, or `pinned` or `pageable` host memory.
        prediction_ms: milliseconds of one prediction, also of a policy's own search or look at a later gate (default:
            the profile's curve; without one, searches are free).
        synchronous: whether the experts of a layer wait for all earlier prefetches, as in systems that prefetch
            synchronously. `moetool serve` does not wait.
        reuse_residents: whether a partial forward reuses the outputs of resident and shared experts, as in SMoE's
            Figure 9, and begins after them. `moetool serve` computes them again.
    """

    device: str = "cpu"
    dtype: str | None = None
    io_threads: int = 2
    tier: str = "disk"
    prediction_ms: float | None = None
    synchronous: bool = False
    reuse_residents: bool = False

    def __post_init__(self) -> None:
        require_within(self, io_threads=Span(1), prediction_ms=Span(0, below=True))


class ForwardCosts(NamedTuple):
    """Nanoseconds of a forward without its routed experts.

    Attributes:
        before_L: parts before the experts of each MoE layer: dense layers, attention, gate.
        after: part after the experts of a layer: shared experts.
        rest: parts after the last MoE layer: dense layers, head.
    """

    before_L: tuple[int, ...]
    after: int
    rest: int


class _Nanoseconds(dict[int, int]):
    """A curve as a table that is filled on use."""

    def __init__(self, seconds: Callable[[float], float]) -> None:
        self._seconds = seconds

    def __missing__(self, amount: int) -> int:
        value = self[amount] = round(self._seconds(amount) * 1e9)
        return value


class Prices:
    """The costs of one model on one machine.

    The profile measures single requests. Requests of one forward attend one after the other, as in the server. The
    saving of their shared projections is not counted, so large batches look slower than they are. A later chunk of a
    long prompt costs the difference of the prompt with and without it. A disk read for a GPU and the following copy run
    in sequence. An expert that the host computes is in host memory. Experts of all layers cost as much as those of the
    first.

    Raises:
        MismatchError: the profile is of another model, or lacks the device, data type or tier.
    """

    def __init__(self, profile: CostProfile, spec: ModelSpec, options: TimelineOptions) -> None:
        profile.check(spec)
        self.spec = spec
        self.options = options
        self._profile = profile
        costs = profile.on(options.device, options.dtype)
        self.host_is_device = options.device == "cpu"
        host = costs if self.host_is_device else _host_costs(profile, options.dtype)
        self._device, self._host = costs, host
        self._expert = _Nanoseconds(costs.expert)
        self._host_expert = _Nanoseconds(host.expert) if host is not None else None
        self._attention, self._prompt = _Nanoseconds(costs.attention), _Nanoseconds(costs.prompt_attention)
        self._gate, self._shared, self._head = (_Nanoseconds(c) for c in (costs.gate, costs.shared, costs.head))
        self._dense = _Nanoseconds(costs.dense or (lambda tokens: 0.0))
        known = _prediction(profile, options)
        self._prediction = _Nanoseconds(known or _refuse_prediction)
        self._search = _Nanoseconds(known or (lambda tokens: 0.0))
        self.link_share, self.host_share = profile.link_share, profile.host_share
        self.miss_ns = round(profile.miss_s * 1e9)
        self._loads: dict[str, list[int]] = {}
        self.load_ns(options.tier, 0)  # refuses a tier without costs
        ids = spec.layer_ids_L
        self._dense_before_L = tuple(b - a - 1 for a, b in itertools.pairwise((-1, *ids)))
        same = profile.spec.layer_ids_L == ids
        self._dense_after = max(0, profile.num_hidden_layers - ids[-1] - 1) if same else 0
        self._info: ForwardInfo | None = None
        self._forward = ForwardCosts((), 0, 0)
        self._event: GateEvent | None = None
        self._experts: dict[int, int] = {}
        self._tokens: dict[int, int] = {}

    def load_ns(self, tier: str, layer: int) -> int:
        """Return the nanoseconds of loading a layer's expert from a tier.

        Raises:
            MismatchError: the tier was not measured.
        """
        if tier not in self._loads:
            curves = [self._profile.tier(tier, self.options.io_threads).seconds]
            if tier == "disk" and not self.host_is_device:
                curves.append(self._profile.tier("pinned").seconds)
            sizes = self.spec.expert_bytes_L
            self._loads[tier] = [round(sum(curve(size) for curve in curves) * 1e9) for size in sizes]
        return self._loads[tier][layer]

    def prediction_ns(self, tokens: int) -> int:
        """Return the nanoseconds of one prediction for a forward of `tokens` tokens.

        Raises:
            MismatchError: no prediction time is known.
        """
        return self._prediction[tokens]

    def search_ns(self, tokens: int) -> int:
        """Return the nanoseconds of a policy's own search, or look at a later gate; 0 without a prediction time."""
        return self._search[tokens]

    def partial_forward_ns(self, event: GateEvent) -> int:
        """Return the nanoseconds from a layer's experts to the next gate, if as many experts as needed are resident.

        With `reuse_residents` those that it takes beyond the layer itself.
        """
        forward = self.forward(event.forward)
        experts = 0 if self.options.reuse_residents else forward.after + sum(self.experts(event).values())
        return experts + forward.before_L[event.layer + 1]

    def forward(self, info: ForwardInfo) -> ForwardCosts:
        """Return the nanoseconds of a forward without its routed experts."""
        if info is not self._info:
            self._info, self._forward = info, self._price(info)
        return self._forward

    def experts(self, event: GateEvent) -> dict[int, int]:
        """Return the nanoseconds of each expert of an event on the device, by key."""
        if event is not self._event:
            self._event = event
            base = event.layer * self.spec.num_experts
            if len(event.experts_TK) == 1:
                self._tokens = {base + expert: 1 for expert in event.needed}
            else:
                chosen = Counter(itertools.chain.from_iterable(event.experts_TK))
                self._tokens = {base + expert: tokens for expert, tokens in chosen.items()}
            self._experts = {key: self._expert[tokens] for key, tokens in self._tokens.items()}
        return self._experts

    def host_expert_ns(self, event: GateEvent, key: int) -> int:
        """Return the nanoseconds of an expert on the host.

        Raises:
            MismatchError: experts were not measured on the host.
        """
        if self._host_expert is None:
            raise _no_host_costs()
        self.experts(event)
        return self._host_expert[self._tokens[key]]

    def host_costs(self) -> dict[str, float]:
        """Return options of `moetool.caching.host_split.HostCosts`; empty if the host computes no experts."""
        if self.host_is_device or self._host_expert is None:
            return {}
        one, many = self._host_expert[1], self._host_expert[_SEVERAL]
        return {
            "load_s": self.load_ns(self.options.tier, 0) / 1e9,
            "host_s": one / 1e9,
            "host_token_s": max(0, many - one) / (_SEVERAL - 1) / 1e9,
        }

    def split_costs(self) -> SplitCosts | None:
        """Return the costs of a split between link and host; None without a device beside the host.

        Raises:
            MismatchError: experts were not measured on the host.
        """
        if self.host_is_device:
            return None
        if self._host is None or self._host_expert is None or not self._host_expert[1]:
            raise _no_host_costs()
        on_disk = self.options.tier == "disk"
        load_s = self.load_ns("pinned" if on_disk else self.options.tier, 0) / 1e9
        return SplitCosts(
            load_s=load_s,
            host_s=self._host_expert[1] / 1e9,
            host_knots=_knots(self._host.expert),
            device_s=self._expert[1] / 1e9,
            device_knots=_knots(self._device.expert),
            layer_s=(self._attention[1] + self._gate[1] + self._shared[1]) / 1e9,
            link_share=self.link_share,
            host_share=self.host_share,
            disk_s=max(0.0, self.load_ns("disk", 0) / 1e9 - load_s) if on_disk else 0.0,
        )

    def _price(self, info: ForwardInfo) -> ForwardCosts:
        tokens = len(info.request_T)
        requests = set(info.request_T)
        if len(requests) == tokens:
            attention = sum(self._attention[position + 1] for position in info.position_T)
        else:
            attention = self._attend(info)
        layer = attention + self._dense[tokens]
        block = attention + self._gate[tokens]
        return ForwardCosts(
            tuple(dense * layer + block for dense in self._dense_before_L),
            self._shared[tokens],
            self._dense_after * layer + self._head[len(requests)],
        )

    def _attend(self, info: ForwardInfo) -> int:
        """Return the attention of one layer, if a request has several tokens."""
        places: dict[int, list[int]] = {}
        for request, position in zip(info.request_T, info.position_T, strict=True):
            places.setdefault(request, []).append(position)
        total = 0
        for positions in places.values():
            start, end = min(positions), max(positions) + 1
            if len(positions) == 1:
                total += self._attention[end]
            else:
                added = self._prompt[end] - self._prompt[start] if start else 0
                total += max(self._prompt[len(positions)], added)
        return total


def with_host_costs(
    policies: Iterable[str], options: Mapping[str, Mapping[str, Any]], prices: Prices | None
) -> dict[str, Mapping[str, Any]]:
    """Return the policies' options, with costs of link and host for policies that use them and lack them."""
    made = dict(options)
    costs = {} if prices is None else prices.host_costs()
    for name in policies if costs else ():
        given = made.get(name, {})
        chosen = parse_options(name, given)
        if isinstance(chosen, HostCosts) and not chosen.load_s:
            made[name] = {**given, **costs}
    return made


def _knots(curve: Curve) -> tuple[tuple[float, float], ...]:
    """Return the knots of a curve above one token, and one more for its slope at the end, in whole nanoseconds."""
    tokens = [amount for amount in curve.x if amount > 1]
    return tuple((amount, round(curve(amount) * 1e9) / 1e9) for amount in (*tokens, max(1, curve.x[-1]) + 1))


def _host_costs(profile: CostProfile, dtype: str | None) -> ComputeCosts | None:
    """Return the CPU costs on a machine with a GPU, in the GPU's data type if measured."""
    found = [costs for costs in profile.compute if costs.device == "cpu"]
    return min(found, key=lambda costs: (costs.dtype != dtype, costs.expert(1)), default=None)


def _prediction(profile: CostProfile, options: TimelineOptions) -> Callable[[float], float] | None:
    """Return the seconds of a prediction against tokens; None if they are unknown."""
    if options.prediction_ms is None:
        return profile.predictor
    seconds = options.prediction_ms / 1e3
    return lambda tokens: seconds


def _no_host_costs() -> MismatchError:
    return MismatchError(
        "the profile has no costs of experts on the cpu, which computes some; measure them with: moetool profile"
    )


def _refuse_prediction(tokens: float) -> float:
    raise MismatchError(
        "the profile has no time of a prediction, and the policy predicts; measure it with: moetool profile MODEL "
        "--predictor DIR, or give it with --set timeline.prediction_ms=…"
    )
