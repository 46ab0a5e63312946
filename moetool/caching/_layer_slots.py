"""Slots guaranteed to each layer: equal shares of the pool or of half of it, or shares by gained hits."""

from collections.abc import Collection, Sequence

import numpy as np

from moetool.errors import CapacityError, unknown_name
from moetool.types import ModelSpec

SHARES = {"layer": 1.0, "mixed": 0.5}
"""Forms of a pool with slots per layer, and the guaranteed share of the slots."""
POOL_FORMS = {"one": "one pool", "layer": "equal slots per layer", "mixed": "half of the slots per layer"}
"""Forms of a pool by option value, and their names for tables."""


def require_pool_form(name: str, form: str, known: Collection[str] = tuple(POOL_FORMS)) -> None:
    """Raise UsageError if an option's form of a pool is unknown."""
    if form not in known:
        raise unknown_name(name, form, known)


def equal_slots(spec: ModelSpec, num_slots: int, share: float = 1.0) -> tuple[int, ...]:
    """Return equal slots for each layer, up to one more or less, and at most its experts.

    Args:
        share: guaranteed share of the slots; any layer may use the others.

    Raises:
        CapacityError: a layer would get none.
    """
    return by_value(spec, int(num_slots * share), [1 / np.arange(1, size + 1) for size in spec.num_experts_L])


def by_value(spec: ModelSpec, num_slots: int, gain_LE: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return one slot for each layer, and the others where they gain most.

    Args:
        gain_LE: gain of the first, second, ... slot of each layer. If a later slot of a layer gains more than an
            earlier one, both count by their mean.

    Raises:
        CapacityError: a layer would get none.
    """
    if num_slots < spec.num_layers:
        raise CapacityError(
            f"{num_slots} expert slots are too few for {spec.num_layers} layers of {spec.name} with slots of their "
            f"own; use one pool for all layers, or give at least {spec.num_layers * spec.slot_bytes:,} bytes"
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
    """Return slots in the same proportions for a smaller pool; unchanged if they fit.

    Raises:
        CapacityError: as `by_value`.
    """
    if sum(layer_slots) <= num_slots:
        return tuple(layer_slots)
    return by_value(
        spec,
        num_slots,
        [slots / np.arange(1, size + 1) for slots, size in zip(layer_slots, spec.num_experts_L, strict=True)],
    )


def _falling(gains_E: np.ndarray) -> list[float]:
    """Return the nearest non-increasing numbers, by pooling adjacent violators."""
    blocks: list[tuple[float, int]] = []  # sum and length
    for gain in gains_E.tolist():
        total, length = gain, 1
        while blocks and blocks[-1][0] * length <= total * blocks[-1][1]:
            before, count = blocks.pop()
            total, length = total + before, length + count
        blocks.append((total, length))
    return [total / length for total, length in blocks for _ in range(length)]
