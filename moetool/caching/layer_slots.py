"""Slots guaranteed to each layer: equal shares of the pool or of half of it."""

from collections.abc import Collection, Sequence

from moetool.base.errors import CapacityError, unknown_name
from moetool.base.types import ModelSpec

SHARES = {"layer": 1.0, "mixed": 0.5}
"""Forms of a pool with slots per layer, and the guaranteed share of the slots."""
POOL_FORMS = {"one": "one pool", "layer": "equal slots per layer", "mixed": "half of the slots per layer"}
"""Forms of a pool by option value, and their names for tables."""


def policy_label(policy: str, form: str) -> str:
    """Return the name of a policy and of its form of a pool, for tables."""
    return policy + {"one": "", "layer": " by layer"}.get(form, f", {form}")


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
    return _dealt(spec, int(num_slots * share), [1] * spec.num_layers)


def scaled_down(spec: ModelSpec, layer_slots: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return slots in the same proportions for a smaller pool; unchanged if they fit.

    Raises:
        CapacityError: a layer would get none.
    """
    return tuple(layer_slots) if sum(layer_slots) <= num_slots else _dealt(spec, num_slots, layer_slots)


def _dealt(spec: ModelSpec, num_slots: int, weight_L: Sequence[int]) -> tuple[int, ...]:
    """Return one slot for each layer, and the others in proportion to the weights, at most a layer's experts."""
    if num_slots < spec.num_layers:
        raise CapacityError(
            f"{num_slots} expert slots are too few for {spec.num_layers} layers of {spec.name} with slots of their "
            f"own; use one pool for all layers, or give at least {spec.num_layers * spec.slot_bytes:,} bytes"
        )
    slots_L = [1] * spec.num_layers
    offers = sorted(
        (-weight / (rank + 1), rank, layer)
        for layer, weight in enumerate(weight_L)
        for rank in range(1, spec.num_experts_L[layer])
    )
    for _, _, layer in offers[: num_slots - spec.num_layers]:
        slots_L[layer] += 1
    return tuple(slots_L)
