"""Worth of each layer's slots, by the reuse of its experts."""

from collections.abc import Collection

import numpy as np

from moetool.trace.reader import Trace


def reuse_LE(trace: Trace, requests: Collection[int]) -> np.ndarray:
    """Return the hits added by the first, second, ... slot of each layer in its own LRU pool, float64 [L, E].

    Args:
        requests: requests to count, one after the other.
    """
    spec = trace.spec
    hits_LE = np.zeros((spec.num_layers, spec.num_experts))
    order_L: list[list[int]] = [[] for _ in range(spec.num_layers)]  # most recently used first
    for _, events in trace.forwards(sequential=True, requests=frozenset(requests)):
        for event in events:
            order = order_L[event.layer]
            needed = list(event.needed)
            for expert in needed:
                if expert in order:
                    hits_LE[event.layer, order.index(expert)] += 1
            order_L[event.layer] = needed + [expert for expert in order if expert not in event.needed]
    return hits_LE
