"""Slots guaranteed to each layer: equal, half of that, or by the hits they gain."""

from collections.abc import Collection, Sequence

import numpy as np

from moetool.errors import CapacityError, unknown_name
from moetool.types import ModelSpec

SHARES = {"layer": 1.0, "mixed": 0.5}
"""Forms of a pool in which each layer has its own slots, and the share of the slots that is guaranteed."""
POOL_FORMS = {"one": "one pool", "layer": "equal slots per layer", "mixed": "half of the slots per layer"}
"""Every form of a pool that serves, as options name it, in words for tables."""


def require_pool_form(name: str, form: str, known: Collection[str] = tuple(POOL_FORMS)) -> None:
    """Raises: UsageError where the option of this name has an unknown form of a pool."""
    if form not in known:
        raise unknown_name(name, form, known)


def equal_slots(spec: ModelSpec, num_slots: int, share: float = 1.0) -> tuple[int, ...]:
    """The same number of slots for each layer, give or take one, and none more than it has experts.

    Args:
        share: of the slots that is guaranteed; the others go to whichever layer asks first.

    Raises:
        CapacityError: a layer would get none.
    """
    return by_value(spec, int(num_slots * share), [1 / np.arange(1, size + 1) for size in spec.num_experts_L])


def by_value(spec: ModelSpec, num_slots: int, gain_LE: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Slots where they bring the most, one for each layer first.

    Args:
        gain_LE: value of the first, second, ... slot of each layer. Where a later slot of a layer is worth more
            than an earlier one, both count by their mean.

    Raises:
        CapacityError: a layer would get none.
    """
    if num_slots < spec.num_layers:
        raise CapacityError(
            f"{num_slots} expert slots are too few for the {spec.num_layers} layers of {spec.name}, each with its own; "
            f"use one pool for all layers, or give at least {spec.num_layers * spec.slot_bytes:,} bytes"
        )
    slots_L = np.ones(spec.num_layers, int)
    offers = sorted(
        (-gain, rank, layer)
        for layer, gains_E in enumerate(gain_LE)
        for rank, gain in enumerate(_falling(gains_E[: spec.num_experts_L[layer]]))
        if rank
    )
    for _, _, layer in offers[: num_slots - spec.num_layers]:
        slots_L[layer] += 1
    return tuple(slots_L.tolist())


def scaled_down(spec: ModelSpec, layer_slots: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """The same proportions in a smaller pool; unchanged where it holds them. Raises: CapacityError as `by_value`."""
    if sum(layer_slots) <= num_slots:
        return tuple(layer_slots)
    return by_value(
        spec,
        num_slots,
        [slots / np.arange(1, size + 1) for slots, size in zip(layer_slots, spec.num_experts_L, strict=True)],
    )


def _falling(gains_E: np.ndarray) -> list[float]:
    """The nearest numbers that never rise (by pooling adjacent violators)."""
    blocks: list[tuple[float, int]] = []  # sum and length
    for gain in gains_E.tolist():
        total, length = gain, 1
        while blocks and blocks[-1][0] * length <= total * blocks[-1][1]:
            before, count = blocks.pop()
            total, length = total + before, length + count
        blocks.append((total, length))
    return [total / length for total, length in blocks for _ in range(length)]
