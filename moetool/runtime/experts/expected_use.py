"""Order in which experts are read into host memory ahead of use."""

from collections.abc import Mapping

import numpy as np

from moetool.base.types import ModelSpec
from moetool.caching.plan import CachePlan

BY_LAYER = "layer by layer"


def read_order(
    spec: ModelSpec, kept: Mapping[int, float], routes_NP: np.ndarray | None, plan: CachePlan | None
) -> tuple[list[int], str]:
    """Keys of all experts, the most used first, and what the order follows; experts of equal use in layer order.

    Args:
        kept: past use that the policy has kept (`moetool.caching.policy.Policy.expected_use`).
        routes_NP: expert keys of earlier tokens (`moetool.runtime.warm_start.kept_routes`), used if `kept` is empty.
        plan: its `uses_LE` are used if nothing is kept.
    """
    keys = [spec.expert_key(layer, expert) for layer, size in enumerate(spec.num_experts_L) for expert in range(size)]
    use, source = dict(kept), "by use in earlier runs"
    if not use and routes_NP is not None:
        found, counts = np.unique(routes_NP[routes_NP >= 0], return_counts=True)
        use = dict(zip(found.tolist(), map(float, counts), strict=True))
    if not use and plan is not None and plan.uses_LE:
        use = {spec.expert_key(layer, e): n for layer, uses_E in enumerate(plan.uses_LE) for e, n in enumerate(uses_E)}
        source = "by use in the plan's trace"
    if not any(use.values()):
        return keys, BY_LAYER
    return sorted(keys, key=lambda key: -use.get(key, 0.0)), source
