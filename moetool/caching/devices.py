"""Several devices of one machine that share a model, each with its own pool and policy.

The expert with key k always belongs to device k mod n. Consecutive experts of a layer are on different devices, which
spreads the work of an event. A single device uses `moetool.caching.residency.Residency` directly.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, UsageError
from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.caching.machine_split import MachineSplit
from moetool.caching.policy import MIN_SLOTS, Policy, SharedPredictor, admits_by_value, build_policy
from moetool.caching.residency import Counts, Residency, Step, StepKind

Sink = Callable[[int, int, Step], None]


class DevicePools:
    """The residencies of several devices, with the interface of one.

    Slots are numbered across devices, those of the first device first. A program merges the devices' programs and keeps
    the order of each. On-demand loads that a device can start at once come first. Then the devices compute in turn, so
    that no device's loads wait for another's compute.

    Source: FineMoE (Yu et al., EuroSys 2026), section 5: experts are assigned to the GPUs round robin, and each GPU
    loads and offloads its own. Readings and deviations:
        - The paper does not say in which order experts are assigned. Here it is the order of keys, across layers.
        - Every device has its own policy and pool, and its policy sees the whole route. A policy that weighs the misses
          of a coming layer together (hybrimoe) therefore counts those of other devices. Where the host computes
          experts, each device's policy assumes a host of its own.

    Args:
        residencies: residency of each device, with its share and without a sink.
        sink: as for `Residency`.

    Attributes:
        places: number of slots on all devices; all slot numbers are below this.
        reserved_slots: 0, as slots are reserved on one device only.
    """

    reserved_slots = 0

    def __init__(self, residencies: Sequence[Residency], sink: Sink | None = None) -> None:
        self.residencies = tuple(residencies)
        self.sink = sink
        starts = [0]
        for residency in self.residencies:
            starts.append(starts[-1] + residency.places)
        *self._starts, self.places = starts

    @property
    def policy(self) -> Policy:
        """Return the first device's policy; the others have the same class and options."""
        return self.residencies[0].policy

    @property
    def num_slots(self) -> int:
        return sum(residency.num_slots for residency in self.residencies)

    def slot(self, key: int) -> int | None:
        """See `Residency.slot`."""
        device = key % len(self.residencies)
        own = self.residencies[device].slot(key)
        return None if own is None else self._starts[device] + own

    @property
    def prefill(self) -> Counts:
        return sum((residency.prefill for residency in self.residencies), Counts())

    @property
    def decode(self) -> Counts:
        return sum((residency.decode for residency in self.residencies), Counts())

    @property
    def counts(self) -> Counts:
        return self.prefill + self.decode

    def begin_forward(self, info: ForwardInfo) -> list[Step]:
        return self._emit(info.forward_id, -1, [residency.begin_forward(info) for residency in self.residencies])

    def route(self, event: GateEvent) -> Sequence[Sequence[int]] | None:
        """Return the route of the first device's policy, by the residents of all devices (`Residency.route`)."""
        if self.policy.lossless:
            return None
        count = len(self.residencies)
        return self.policy.route(event, lambda key: key in self.residencies[key % count].slot_of)

    def event(self, event: GateEvent, complete: object = None) -> list[Step]:
        """Return the program of an event (`Residency.event`). `complete` must be None on several devices."""
        assert complete is None, "an event is completed on one device"
        programs = [residency.event(event) for residency in self.residencies]
        return self._emit(event.forward.forward_id, event.layer, programs)

    def end_forward(self, info: ForwardInfo) -> None:
        for residency in self.residencies:
            residency.end_forward(info)

    def end_request(self, request: int) -> None:
        for residency in self.residencies:
            residency.end_request(request)

    def load_into_free_slot(self, key: int) -> Step | None:
        """See `Residency.load_into_free_slot`."""
        device = key % len(self.residencies)
        step = self.residencies[device].load_into_free_slot(key)
        return None if step is None else step._replace(slot=self._starts[device] + step.slot)

    def forget(self, key: int) -> None:
        """See `Residency.forget`."""
        self.residencies[key % len(self.residencies)].forget(key)

    def _emit(self, forward: int, layer: int, programs: list[list[Step]]) -> list[Step]:
        for start, program in zip(self._starts, programs, strict=True):
            program[:] = [step if step.slot < 0 else step._replace(slot=start + step.slot) for step in program]
        steps = _in_turn(programs)
        if self.sink is not None:
            for step in steps:
                self.sink(forward, layer, step)
        return steps


Pool = Residency | DevicePools
"""Cache decisions of a machine with one or several devices."""


class DevicePolicies:
    """Learned states of several devices' policies, as one."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        self._policies = list(policies)
        self.spec: ModelSpec = policies[0].spec

    def state(self) -> dict[str, np.ndarray]:
        """Return the states; each array's name begins with its device."""
        return {
            f"device{device}.{name}": array
            for device, policy in enumerate(self._policies)
            for name, array in policy.state().items()
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the states. Raises: ValueError: the state is of another number of devices."""
        parts: list[dict[str, np.ndarray]] = [{} for _ in self._policies]
        for name, array in state.items():
            device, dot, rest = name.removeprefix("device").partition(".")
            if not dot or not device.isdigit() or int(device) >= len(parts):
                raise ValueError(f"{name} belongs to none of {len(parts)} devices")
            parts[int(device)][rest] = array
        if not all(parts):
            raise ValueError(f"the state lacks device {parts.index({})} of {len(parts)}")
        for policy, part in zip(self._policies, parts, strict=True):
            policy.restore(part)


def own_part(spec: ModelSpec, device: int, devices: int) -> ModelSpec:
    """Return the spec with only one device's experts in each layer: for sizes, never for keys."""
    own_L = [
        sum(spec.expert_key(layer, expert) % devices == device for expert in range(num))
        for layer, num in enumerate(spec.num_experts_L)
    ]
    top_k_L = map(min, spec.top_k_L, own_L)
    return replace(spec, num_experts_L=tuple(own_L), top_k_L=tuple(top_k_L))


def split_slots(spec: ModelSpec, num_slots: int, devices: int) -> list[int]:
    """Split slots as evenly as possible, at most as many on a device as it has experts.

    Raises:
        CapacityError: a device's share is below the smallest legal pool.
    """
    left = [own_part(spec, device, devices).total_experts for device in range(devices)]
    shares = [0] * devices
    for _ in range(min(num_slots, spec.total_experts)):
        device = min((d for d in range(devices) if left[d]), key=shares.__getitem__)
        shares[device] += 1
        left[device] -= 1
    return _legal(shares, spec)


def split_bytes(spec: ModelSpec, budget_bytes: int, devices: int) -> list[int]:
    """Return how many of the largest expert fit into each device's equal share of a budget.

    Raises:
        CapacityError: a device's share is below the smallest legal pool.
    """
    most = budget_bytes // devices // spec.slot_bytes
    return _legal([min(most, own_part(spec, d, devices).total_experts) for d in range(devices)], spec)


def build_policies(
    name: str,
    spec: ModelSpec,
    options: Mapping[str, Any],
    shares: Sequence[int],
    *,
    predictor: Any = None,
    future: Sequence[Sequence[int]] | None = None,
) -> list[Policy]:
    """Build a policy for each device, with its share of the slots; otherwise as `build_policy`.

    The policies share one predictor, which observes each event once.
    """
    if len(shares) == 1:
        return [build_policy(name, spec, options, shares[0], predictor=predictor, future=future)]
    asked = None if predictor is None else SharedPredictor(predictor)
    return [
        build_policy(name, spec, options, fit, predictor=asked, future=future, own=own_part(spec, device, len(shares)))
        for device, fit in enumerate(shares)
    ]


def open_pool(
    policies: Sequence[Policy],
    sink: Sink | None = None,
    *,
    capacity_bytes: Sequence[int] | None = None,
    layer_slots: Sequence[int] = (),
    split: MachineSplit | None = None,
    short: bool = False,
) -> Pool:
    """Open the pool of these policies, one per device.

    Args:
        layer_slots, split, short: as for `Residency`; a split has one device.

    Raises:
        CapacityError: as `Residency`.
        UsageError: several devices share the model, and each layer has its own slots; or the policy admits by value
            what the host computes, and nothing splits misses.
    """
    count = len(policies)
    assert split is None or count == 1
    if split is None and admits_by_value(policies[0].options):
        raise UsageError(
            "admit=value has no effect where all misses are loaded; leave it out, or let the host compute some "
            "(replay --misses host or both; serve beside a GPU with host_compute=auto or on)"
        )
    if layer_slots and count > 1:
        raise UsageError(
            f"a pool per layer works on one device, and {count} devices share the model; use one pool for all layers"
        )
    residencies = [
        Residency(
            policy,
            sink if count == 1 else None,
            capacity_bytes=None if capacity_bytes is None else capacity_bytes[device],
            share=(device, count),
            layer_slots=layer_slots,
            split=split,
            short=short,
        )
        for device, policy in enumerate(policies)
    ]
    return residencies[0] if count == 1 else DevicePools(residencies, sink)


def _legal(shares: list[int], spec: ModelSpec) -> list[int]:
    if min(shares) < MIN_SLOTS:
        raise CapacityError(
            f"{sum(shares)} expert slots of {spec.name} on {len(shares)} devices leave {min(shares)} to one of them, "
            f"and the smallest legal pool has {MIN_SLOTS}; give more memory or set fewer devices"
        )
    return shares


def _in_turn(programs: Sequence[Sequence[Step]]) -> list[Step]:
    """Merge independent programs into one, which keeps the order of each."""
    steps = [step for program in programs for step in program if step.kind is StepKind.HOST]
    queues = [deque(step for step in program if step.kind is not StepKind.HOST) for program in programs]
    for queue in queues:
        while queue and queue[0].kind is StepKind.LOAD:
            steps.append(queue.popleft())
    while any(queues):
        for queue in queues:
            if queue:
                steps.append(queue.popleft())
            while queue and queue[0].kind is not StepKind.COMPUTE:
                steps.append(queue.popleft())
    return steps
