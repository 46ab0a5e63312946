"""A machine with assumed costs, not measured, for the timeline of a replay."""

from dataclasses import dataclass

from moetool.base.config import POSITIVE, Span, require_within
from moetool.base.types import ModelSpec
from moetool.costing.costs import ComputeCosts, CostProfile, Curve, LoadCosts
from moetool.costing.pricing import TimelineOptions
from moetool.models.libraries import read_machine

_FAR = 4096  # last point of the lines, in tokens; they extend linearly


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedMachine:
    """Costs of a device with host memory: linear, per layer. They are assumptions, not measured.

    The embedded model's experts are so small that loading one costs less than computing it; the papers assume that it
    costs far more. These costs put the embedded model's routing on such a machine.

    Attributes:
        expert_s: seconds of an expert for one token on the device.
        expert_token_s: for each further token.
        dense_s: attention, router and norms of a layer for one token.
        dense_token_s: for each further token.
        shared_s: shared experts of a layer for one token.
        shared_token_s: for each further token.
        load_s: one expert from host memory to the device.
        host_s: an expert for one token on the host; 0: the host computes none.
        host_token_s: for each further token.
        prediction_s: one prediction, search of a policy, or look at a later gate: DuoServe-MoE prints 0.6 ms for 32
            layers, the only figure of the five papers.
        links: rate of links between GPUs and between servers, as a multiple of the experiment's.

    Raises:
        UsageError: one is below 0.
    """

    expert_s: float = 50e-6
    expert_token_s: float = 0.5e-6
    dense_s: float = 200e-6
    dense_token_s: float = 2e-6
    shared_s: float = 0.0
    shared_token_s: float = 0.0
    load_s: float = 1e-3
    host_s: float = 0.0
    host_token_s: float = 0.0
    prediction_s: float = 20e-6
    links: float = 1.0

    def __post_init__(self) -> None:
        require_within(self, "machine: ", **dict.fromkeys(self.__slots__, Span(0)))
        require_within(self, "machine: ", links=POSITIVE)

    def profile(self, spec: ModelSpec) -> tuple[CostProfile, TimelineOptions]:
        """Return the costs as a model's profile, and the machine in it."""
        devices = [self._compute("cuda", self.expert_s, self.expert_token_s)]
        if self.host_s:
            devices.append(self._compute("cpu", self.host_s, self.host_token_s))
        made = CostProfile(
            spec=spec,
            config_only=True,
            num_hidden_layers=spec.num_layers,
            machine=read_machine(),
            load_average=0.0,
            measured_s=0.0,
            compute=tuple(devices),
            loads=(LoadCosts(tier="pinned", threads=1, direct=True, seconds=_flat(self.load_s)),),
        )
        options = TimelineOptions(
            device="cuda", tier="pinned", io_threads=1, prediction_ms=self.prediction_s * 1e3, reuse_residents=True
        )
        return made, options

    def _compute(self, device: str, expert_s: float, expert_token_s: float) -> ComputeCosts:
        return ComputeCosts(
            device=device,
            dtype="float32",
            threads=1,
            expert=_line(expert_s, expert_token_s),
            attention=_flat(0.0),  # in the gate: a batch reads these weights once, not once per request
            prompt_attention=_flat(0.0),
            gate=_line(self.dense_s, self.dense_token_s),
            shared=_line(self.shared_s, self.shared_token_s),
            dense=_line(self.dense_s, self.dense_token_s),
            head=_flat(self.dense_s + self.shared_s),
        )


def _flat(seconds: float) -> Curve:
    return Curve(x=(1.0,), y=(seconds,))


def _line(one_s: float, more_s: float) -> Curve:
    return Curve(x=(1.0, float(_FAR)), y=(one_s, one_s + (_FAR - 1) * more_s))
