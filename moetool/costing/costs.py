"""Measured cost curves of one machine, and the profile (one JSON file) that collects them."""

import bisect
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from moetool.base import validation as check
from moetool.base.artefact import Artefact
from moetool.base.errors import MismatchError
from moetool.base.machine import Machine
from moetool.base.types import ModelSpec

TIERS = ("disk", "pinned", "pageable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds against an amount (tokens, bytes): straight between knots.

    Outside its knots the curve continues with the slope of that end. It never falls below zero, nor below its last
    value after the last knot.

    Attributes:
        x: the knots' amounts, rising.
        y: their seconds.
        residual: largest distance of the curve from a fitted median, as a share of that median.
        noise: median distance of a timing from its amount's median, as a share of that median.
        samples: number of timings per measured amount (the least).

    Raises:
        ValueError: there are no knots, the amounts do not rise, or a value is negative or not finite.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    residual: float = 0.0
    noise: float = 0.0
    samples: int = 1

    def __post_init__(self) -> None:
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(f"a curve needs as many values as knots, at least one; found {len(self.x)}, {len(self.y)}")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("the knots of a curve must rise")
        if not all(math.isfinite(value) and value >= 0 for value in (*self.x, *self.y)):
            raise ValueError("the knots and values of a curve must be finite and 0 or more")
        if not all(math.isfinite(value) and value >= 0 for value in (self.residual, self.noise)) or self.samples < 1:
            raise ValueError("residual and noise of a curve must be finite and 0 or more, and its samples 1 or more")

    def __call__(self, amount: float) -> float:
        """Return the seconds for `amount`."""
        x, y = self.x, self.y
        if len(x) == 1:
            return y[0]
        right = min(max(bisect.bisect_right(x, amount), 1), len(x) - 1)
        x0, x1, y0, y1 = x[right - 1], x[right], y[right - 1], y[right]
        seconds = y0 + (y1 - y0) * (amount - x0) / (x1 - x0)
        return max(seconds, y1 if amount > x[-1] else 0.0)

    @classmethod
    def fit(cls, timings: Mapping[float, Sequence[float]], tolerance: float = 0.02) -> "Curve":
        """Fit a curve of few knots, by greedy search, to the median timing of every amount.

        Args:
            timings: measured seconds for each amount.
            tolerance: maximum distance of the curve from a median, as a share of the median.
        """
        amounts = sorted(timings)
        medians = {amount: statistics.median(timings[amount]) for amount in amounts}
        chosen = {amounts[0], amounts[-1]}
        while True:
            x = sorted(chosen)
            curve = cls(x=tuple(x), y=tuple(medians[amount] for amount in x))
            errors = {amount: _relative(curve(amount), medians[amount]) for amount in amounts}
            worst = max(amounts, key=errors.__getitem__)
            if errors[worst] <= tolerance:
                break
            chosen.add(worst)
        spread = [_relative(seconds, medians[amount]) for amount in amounts for seconds in timings[amount]]
        return cls(
            x=curve.x,
            y=curve.y,
            residual=errors[worst],
            noise=statistics.median(spread),
            samples=min(map(len, timings.values())),
        )


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / expected if expected else abs(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCosts:
    """Seconds of compute on one device in one data type, per layer; batch and context in tokens.

    Attributes:
        device: `cpu` or `cuda`.
        dtype: data type of activations and of all weights except the routed experts.
        threads: compute threads on the CPU.
        slot_bytes: bytes of an expert in a slot of the device; 0 where unknown.
        expert: one routed expert in the checkpoint's data type, against its tokens.
        attention: a decoder layer without its MLP or MoE block, for one new token, against the context.
        prompt_attention: the same for a whole prompt, against its tokens.
        gate: the router, against tokens.
        shared: the MoE block without router and routed experts (the shared experts, if any), against tokens.
        dense: the MLP of a layer without experts, against tokens; None if every layer has experts.
        head: embedding, final norm and output projection, against the tokens whose logits are taken.
    """

    device: str
    dtype: str
    threads: int
    slot_bytes: int = 0
    expert: Curve
    attention: Curve
    prompt_attention: Curve
    gate: Curve
    shared: Curve
    dense: Curve | None
    head: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCosts:
    """Seconds between the starts of successive loads, against the bytes of a load, with all threads busy.

    With one thread this is the time of a load; with more, a single load takes longer. Bytes divided by these seconds
    are the rate of the tier.

    Attributes:
        tier: `disk` (to host memory), `pinned` or `pageable` (host memory to the GPU).
        threads: concurrent loads.
        direct: whether reads bypassed the page cache (O_DIRECT); true for the other tiers.
    """

    tier: str
    threads: int
    direct: bool
    seconds: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile(Artefact):
    """The cost curves of one machine for one model.

    Attributes:
        spec: the model, or its shape.
        config_only: whether the profile was made from the config, without the weights.
        num_hidden_layers: number of decoder layers, with and without experts.
        machine: the measured machine.
        load_average: load average at the start: near 0 on an idle machine.
        measured_s: seconds of measuring.
        compute: costs of each device and data type.
        loads: costs of each tier and number of threads.
        predictor: seconds of one prediction against the tokens of the forward, if a predictor was given.
        peer: address of the peer of `link`.
        link: seconds until bytes sent to the peer are received and acknowledged, against bytes.
        link_share, host_share: rates of loads to a GPU and of experts on the host while both run, relative to each
            alone.
        miss_s: fixed seconds of an event with misses, in addition to its loads and experts.
    """

    KIND: ClassVar[str] = "cost_profile"
    WHAT: ClassVar[str] = "profile"
    COMMAND: ClassVar[str] = "moetool profile"
    EXAMPLE: ClassVar[str] = "MODEL"
    INDENT: ClassVar[int | None] = 1

    config_only: bool
    num_hidden_layers: int
    machine: Machine
    load_average: float
    measured_s: float
    compute: tuple[ComputeCosts, ...]
    loads: tuple[LoadCosts, ...]
    predictor: Curve | None = None
    peer: str | None = None
    link: Curve | None = None
    link_share: float = 1.0
    host_share: float = 1.0
    miss_s: float = 0.0

    @property
    def sha256(self) -> str:
        """Identify this profile by its content, wherever it is saved."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def on(self, device: str = "cpu", dtype: str | None = None) -> ComputeCosts:
        """Return the costs on a device in a data type (default: the one that computes a single token's expert fastest).

        Raises:
            MismatchError: the device or data type was not measured.
        """
        found = [costs for costs in self.compute if costs.device == device and dtype in (None, costs.dtype)]
        if not found:
            known = ", ".join(f"{costs.dtype} on {costs.device}" for costs in self.compute)
            raise MismatchError(
                f"the profile has no costs of {dtype or 'any dtype'} on {device}, only of {known}; "
                "measure them with: moetool profile"
            )
        return min(found, key=lambda costs: costs.expert(1))

    def tier(self, tier: str = "disk", threads: int = 1) -> LoadCosts:
        """Return the costs of a tier with the nearest measured number of threads.

        Raises:
            MismatchError: the tier was not measured.
        """
        found = [costs for costs in self.loads if costs.tier == tier]
        if not found:
            known = ", ".join(dict.fromkeys(costs.tier for costs in self.loads))
            raise MismatchError(
                f"the profile has no load costs of tier {tier}, only of {known}; measure them with: moetool profile"
            )
        return min(found, key=lambda costs: (abs(costs.threads - threads), costs.threads))

    def decode_s(self, context: int, device: str = "cpu", dtype: str | None = None) -> float:
        """Return the seconds of decoding one token with every expert resident: the bound of every cache policy."""
        costs, spec = self.on(device, dtype), self.spec
        dense_layers = self.num_hidden_layers - spec.num_layers
        layers = self.num_hidden_layers * costs.attention(context) + costs.head(1)
        layers += spec.num_layers * (costs.gate(1) + costs.shared(1)) + sum(spec.top_k_L) * costs.expert(1)
        return layers + (dense_layers * costs.dense(1) if costs.dense is not None else 0.0)

    def load_all_s(self, tier: str = "disk", threads: int = 1) -> float:
        """Return the seconds of loading every expert that one token uses: the addition if none is resident."""
        seconds = self.tier(tier, threads).seconds
        pairs = zip(self.spec.top_k_L, self.spec.expert_bytes_L, strict=True)
        return sum(top_k * seconds(num_bytes) for top_k, num_bytes in pairs)

    def check(self, spec: ModelSpec) -> None:
        """Check that the profile covers the model's layer shapes; weights and the number of layers may differ.

        Raises:
            MismatchError: the shapes differ.
        """
        expected, found = _shape(spec), _shape(self.spec)
        if not expected <= found:
            raise MismatchError(
                f"the profile is of {self.spec.name} ({_in_words(found)}), but the model is {spec.name} "
                f"({_in_words(expected)}); make a profile of this model with: moetool profile"
            )

    def validate(self) -> None:
        """Refuse impossible values. Curves check themselves.

        Raises:
            MismatchError: nothing was measured, something was measured twice, or a number is impossible.
        """
        self.spec.validate()
        check.require_whole("num_hidden_layers", self.num_hidden_layers, self.spec.num_layers, check.MAX_LAYERS)
        check.require_whole("machine.cores", self.machine.cores, 1)
        check.require_whole("machine.memory_bytes", self.machine.memory_bytes, 0)
        check.require_number("load_average", self.load_average)
        check.require_number("measured_s", self.measured_s)
        check.require_number("miss_s", self.miss_s)
        for name in ("link_share", "host_share"):
            check.require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0 and at most 1")
        check.require(bool(self.compute), "compute", "no costs", "those of a device")
        check.require_distinct("compute", [f"{costs.dtype} on {costs.device}" for costs in self.compute])
        for i, costs in enumerate(self.compute):
            check.require_one_of(f"compute.{i}.device", costs.device, ("cpu", "cuda"))
            check.require_whole(f"compute.{i}.threads", costs.threads, 0)
        check.require_distinct("loads", [f"{loads.tier} with {loads.threads} threads" for loads in self.loads])
        for i, loads in enumerate(self.loads):
            check.require_one_of(f"loads.{i}.tier", loads.tier, TIERS)
            check.require_whole(f"loads.{i}.threads", loads.threads, 1)


def _shape(spec: ModelSpec) -> set[tuple[int, ...]]:
    """Return the parameters that a layer's costs depend on, per kind of MoE layer."""
    return {
        (spec.hidden_size, spec.num_shared_experts, *layer)
        for layer in zip(spec.num_experts_L, spec.top_k_L, spec.expert_bytes_L, strict=True)
    }


def _in_words(shape: set[tuple[int, ...]]) -> str:
    return " and ".join(
        f"{top_k} of {experts} experts of {num_bytes:,} bytes, {shared} shared, hidden size {hidden}"
        for hidden, shared, experts, top_k, num_bytes in sorted(shape)
    )
