"""Reuse distances of experts (LRU stack distances).

The distance of a use is the number of other experts used since the last use of the same expert. An LRU pool with more
slots than the distance still holds the expert. So the distribution of distances gives the hit rate of every pool size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetool.trace.reader import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """Stack distances of the uses in a replay: one use for each distinct expert of a forward in a layer.

    Attributes:
        distances: over one pool for all layers, ascending; first uses are left out.
        uses: number of uses, first ones included.
        layer_median_L: median distance within a layer's experts; NaN without reuse.
        layer_high_L: 90th percentile of the distance within a layer.
        prompt_share: mean share of a layer's experts needed by a forward with prompt tokens; None without such
            forwards.
        prompt_tokens: median number of tokens of these forwards.
    """

    distances: np.ndarray
    uses: int
    layer_median_L: np.ndarray
    layer_high_L: np.ndarray
    prompt_share: float | None
    prompt_tokens: int | None

    def share_within(self, slots: int) -> float:
        """Return the hit rate of an LRU pool with this many slots."""
        return float(np.searchsorted(self.distances, slots, side="left")) / self.uses

    def slots_for(self, share: float) -> int | None:
        """Return the fewest slots for which this share of the reuses hits; None without reuse."""
        if not len(self.distances):
            return None
        return int(self.distances[min(len(self.distances) - 1, int(np.ceil(share * len(self.distances))) - 1)]) + 1


def read_reuse(trace: Trace, requests: frozenset[int], *, sequential: bool) -> Reuse:
    """Return the distances over the forwards that `moetool.tuning.replay` replays."""
    spec = trace.spec
    keys: list[int] = []
    starts: list[int] = []
    shares, tokens = [], []
    for info, events in trace.forwards(sequential=sequential, requests=requests):
        for event in events:
            starts.append(len(keys))
            base = event.layer * spec.num_experts
            keys += [base + expert for expert in event.needed]
        if info.prefill:
            shares.append(sum(len(event.needed) for event in events) / spec.total_experts)
            tokens.append(len(info.request_T))
    key_U, start_V = np.array(keys), np.array(starts)
    layer_U = key_U // spec.num_experts
    median_L, high_L = np.full(spec.num_layers, np.nan), np.full(spec.num_layers, np.nan)
    event_U = np.repeat(np.arange(len(start_V)), np.diff([*starts, len(keys)]))
    for layer in range(spec.num_layers):
        mine = layer_U == layer
        first = np.flatnonzero(np.diff(event_U[mine], prepend=-1))
        again = reused(stack_distances(key_U[mine], first))
        if len(again):
            median_L[layer], high_L[layer] = np.quantile(again, (0.5, 0.9), method="inverted_cdf")
    return Reuse(
        distances=reused(stack_distances(key_U, start_V)),
        uses=len(keys),
        layer_median_L=median_L,
        layer_high_L=high_L,
        prompt_share=float(np.mean(shares)) if shares else None,
        prompt_tokens=int(np.median(tokens)) if tokens else None,
    )


def reused(distance_U: np.ndarray) -> np.ndarray:
    """Return the distances of reuses, ascending."""
    return np.sort(distance_U[distance_U >= 0])


def stack_distances(key_U: np.ndarray, start_V: np.ndarray | Sequence[int]) -> np.ndarray:
    """Count distinct other keys between each use and the previous use of its key, up to the start of its event.

    Keys of one event are distinct, used in order, and do not count for each other.

    Args:
        key_U: keys of the experts used, in order.
        start_V: the first use of each event.

    Returns:
        distance_U, -1 for a first use.

    Source: Mattson et al. 1970. The number of distinct keys between two uses i' < i of one key is the number of uses
    between them, minus those whose own last use is also after i': the inversions in the array of last uses.
    """
    num = len(key_U)
    order = np.argsort(key_U, kind="stable")
    last_U = np.full(num, -1)
    same = key_U[order[1:]] == key_U[order[:-1]]
    last_U[order[1:][same]] = order[:-1][same]
    begin_U = np.repeat(start_V, np.diff([*start_V, num]))
    # Sorted by last use within an event, so that no two uses of one event form an inversion.
    arranged = np.lexsort((last_U, begin_U))
    repeats_U = np.empty(num, np.int64)
    repeats_U[arranged] = _larger_before(last_U[arranged])
    return np.where(last_U < 0, -1, begin_U - last_U - 1 - repeats_U)


def _larger_before(values: np.ndarray) -> np.ndarray:
    """Count the larger values before each value, by a merge sort of all pairs of runs at once."""
    num = len(values)
    levels = max(1, num - 1).bit_length()
    padded = np.full(1 << levels, num, np.int64)  # larger than every value, at the end
    padded[:num] = values
    counts = np.zeros(len(padded), np.int64)
    place = np.arange(len(padded))  # origin of each value in the sorted runs
    for level in range(levels):
        width = 1 << level
        runs, places = padded.reshape(-1, 2, width), place.reshape(-1, 2, width)
        number = np.arange(len(runs))[:, None]
        left = (runs[:, 0] + number * (num + 2)).ravel()
        right = (runs[:, 1] + number * (num + 2)).ravel()
        smaller = np.searchsorted(left, right, side="right") - np.repeat(number.ravel() * width, width)
        counts[places[:, 1].ravel()] += width - smaller
        both = runs.reshape(len(runs), -1)
        merged = np.argsort(both, axis=1, kind="stable")
        padded = np.take_along_axis(both, merged, axis=1).ravel()
        place = np.take_along_axis(places.reshape(len(runs), -1), merged, axis=1).ravel()
    return counts[:num]
