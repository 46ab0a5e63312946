"""Cache plans from keyword values, passed to the right argument of `plan_cache`."""

from dataclasses import fields
from typing import Any

from moetool.base.errors import CapacityError
from moetool.base.types import ModelSpec
from moetool.caching.plan import CachePlan
from moetool.trace.reader import Trace
from moetool.tuning.cache_planning import CacheSearch, DeviceBudget, PlanPredictor, Room, plan_cache


def fixed_parts(
    spec: ModelSpec,
    device_memory_bytes: int,
    *,
    dense_bytes: int = 0,
    kv_bytes: int = 0,
    kv_tokens: int = 0,
    slot_bytes: int | None = None,
) -> DeviceBudget:
    """A device on which dense weights and KV cache always take the same bytes."""
    each, fixed = slot_bytes or spec.slot_bytes, dense_bytes + kv_bytes

    def divide(memory: int, predictor: int) -> Room:
        slots = (memory - fixed - predictor) // each
        if slots < 2:
            raise CapacityError(f"{memory:,} bytes hold {slots} expert slots, expected at least 2")
        return Room(
            slots=min(slots, spec.total_experts), dense_bytes=dense_bytes, kv_bytes=kv_bytes, kv_tokens=kv_tokens
        )

    return DeviceBudget(
        device_memory_bytes=device_memory_bytes,
        least_bytes=fixed + 2 * each,
        most_bytes=fixed + spec.total_experts * each,
        slot_bytes=each,
        divide=divide,
    )


def choose_cache(trace: Trace, device_memory_bytes: int, **values: Any) -> CachePlan:
    """A plan for a device's memory; `values` are fields of `fixed_parts`, the search and the predictor."""

    def take(names: set[str]) -> dict[str, Any]:
        return {name: values.pop(name) for name in sorted(names & values.keys())}

    budget = fixed_parts(
        trace.spec, device_memory_bytes, **take({"dense_bytes", "kv_bytes", "kv_tokens", "slot_bytes"})
    )
    predictor = PlanPredictor(**take({field.name for field in fields(PlanPredictor)}))
    search = CacheSearch(**take({field.name for field in fields(CacheSearch)}))
    assert not values, values
    return plan_cache(trace, budget, search, predictor)
