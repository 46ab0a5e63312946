"""Cache plans from keyword values, passed to the right argument of `plan_cache`."""

from dataclasses import fields
from typing import Any

from moetool.caching.plan import CachePlan
from moetool.trace.reader import Trace
from moetool.tuning.cache_planning import CacheSearch, DeviceBudget, PlanPredictor, plan_cache


def choose_cache(trace: Trace, device_memory_bytes: int, **values: Any) -> CachePlan:
    """A plan for a device's memory; `values` are fields of the budget, the search and the predictor."""

    def take(kind: type) -> dict[str, Any]:
        return {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}

    budget = DeviceBudget(device_memory_bytes, **take(DeviceBudget))
    predictor = PlanPredictor(**take(PlanPredictor))
    search = CacheSearch(**take(CacheSearch))
    assert not values, values
    return plan_cache(trace, budget, search, predictor)
