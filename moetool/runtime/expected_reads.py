"""Division of memory between KV cache and expert slots by the experts that a turn of a chat is expected to read.

A slot saves misses; a token of KV cache saves forwarding a conversation again. Turns are assumed as follows: the
conversation has between `SHORTEST` tokens and the longest expected, evenly on a logarithmic scale; the turn adds
`TURN_PROMPT` tokens and `TURN_ANSWER` new ones; one turn in eight begins with the whole text as its prompt. A
conversation that outgrows the KV cache is forwarded whole at each turn.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from moetool.base import assets
from moetool.base.errors import CapacityError
from moetool.base.types import ModelSpec
from moetool.runtime.memory_share import MemoryShare, fixed_share
from moetool.runtime.sizing import LEAST_CONTEXT, Footprint, MemorySplit, divide

SHORTEST = 256
TURN_PROMPT, TURN_ANSWER = 128, 256
_BEGINNING = 1 / 8  # turns without a cached prefix
_NEAR = 0.02  # share of further loads that a longer context is worth
_LENGTHS, _CANDIDATES, _POINTS = 16, 32, 32
LEAST_TOKENS = 128
"""Fewest kept tokens whose routes give a miss curve."""
_MOST_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCurve:
    """Loads for each needed expert by the share of the experts that have slots, piecewise linear.

    Attributes:
        shares: shares of the experts that have slots, ascending from 0 to 1.
        loads: loads per needed expert at each share.
        source: origin of the curve, for display.
    """

    shares: tuple[float, ...]
    loads: tuple[float, ...]
    source: str

    def at(self, share: float) -> float:
        """Loads for each needed expert."""
        right = min(max(bisect_right(self.shares, share), 1), len(self.shares) - 1)
        (start, stop), (first, last) = self.shares[right - 1 : right + 1], self.loads[right - 1 : right + 1]
        return first + (last - first) * (share - start) / (stop - start)


PUBLISHED = MissCurve(
    shares=(0, 0.125, 0.25, 0.5, 1), loads=(1, 0.614, 0.418, 0.207, 0), source="misses of DeepSeek-V2-Lite's routes"
)
"""Misses of foresight with equal slots per layer on task law (`moetool bench policies`, `moetool guide benchmarks`)."""


def published_curves() -> list[MissCurve]:
    """Misses on published routes of several models (`data/miss_curves.json`, which `docs/miss_curves.py` computes)."""
    return [_read_curve(curve) for curve in _published()]


def nearest_curve(spec: ModelSpec) -> MissCurve:
    """The published curve of the model with the nearest number of experts a layer, then the nearest top-k."""

    def distance(curve: Mapping[str, Any]) -> tuple[float, float]:
        experts, top_k = curve["num_experts"], curve["top_k"]
        return abs(math.log(spec.num_experts / experts)), abs(math.log(max(spec.top_k_L) / top_k))

    return _read_curve(min(_published(), key=distance))


def _published() -> list[dict[str, Any]]:
    content = json.loads(assets.path("data", "miss_curves.json").read_text(encoding="utf-8"))
    return [{**curve, "policy": content["policy"]} for curve in content["curves"]]


def _read_curve(curve: Mapping[str, Any]) -> MissCurve:
    source = f"{curve['policy']} on {curve['tokens']:,} tokens of {curve['model']}'s routes"
    return MissCurve(shares=tuple(curve["shares"]), loads=tuple(curve["loads"]), source=source)


def miss_curve(spec: ModelSpec, routes_NP: np.ndarray) -> MissCurve | None:
    """Misses of LRU with equal slots per layer over the newest tokens of one model's routes; None if they are too few.

    Args:
        routes_NP: expert keys of each token, layer after layer; -1: unknown.

    Source: stack distances (Mattson et al., 1970). Deviation: all experts that a token needs in a layer count against
        the slots before it, and the first quarter of the tokens only fills them.
    """
    routes_NP = routes_NP[(routes_NP >= 0).all(axis=1)][-_MOST_TOKENS:]
    if len(routes_NP) < LEAST_TOKENS:
        return None
    hits_S, needed = np.zeros(_POINTS), 0
    for layer, (start, stop) in enumerate(pairwise(accumulate(spec.top_k_L, initial=0))):
        stack: list[int] = []  # most recently used first
        depth_count = np.zeros(spec.num_experts_L[layer] + 1)
        for row, keys in enumerate(routes_NP[:, start:stop].tolist()):
            depths = [stack.index(key) for key in keys if key in stack]
            if row >= len(routes_NP) // 4:
                needed += len(keys)
                for depth in depths:
                    depth_count[depth] += 1
            stack = keys + [key for key in stack if key not in keys]
        slots_S = np.arange(_POINTS) * spec.num_experts_L[layer] // _POINTS
        hits_S += np.concatenate([[0], np.cumsum(depth_count)])[slots_S]
    return MissCurve(
        shares=(*(np.arange(_POINTS) / _POINTS).tolist(), 1.0),
        loads=(*(1 - hits_S / needed).tolist(), 0.0),
        source="misses of this model's last tokens",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSplit:
    """A division of memory and what it is expected to read.

    Attributes:
        split: weights, activations, KV cache and slots at full size.
        share: slots that prompts and the KV cache borrow.
        loads: expected loads of experts per turn.
        others: tokens of KV cache and expected loads of the smallest and the largest cache that were compared.
    """

    split: MemorySplit
    share: MemoryShare
    loads: float
    others: tuple[tuple[int, float], ...] = ()


def best_split(
    model: Footprint,
    memory_bytes: int,
    *,
    kv_tokens: int | None,
    chunk_tokens: int | None,
    longest: int,
    curve: MissCurve = PUBLISHED,
    share: Callable[[MemorySplit], MemoryShare] = fixed_share,
) -> ExpectedSplit:
    """Choose the largest KV cache whose expected loads per turn exceed the minimum by at most `_NEAR`.

    Args:
        memory_bytes, chunk_tokens: as for `divide`.
        kv_tokens: fixed by the user; None: chosen, at least `LEAST_CONTEXT`.
        longest: tokens of the longest expected conversation, limited by the model's context.
        share: slots that prompts and the KV cache borrow, in a given division.

    Raises:
        CapacityError: as for `divide`.
    """
    context = min(model.max_context, longest)
    least = min(context, LEAST_CONTEXT)
    sizes = [least + (context - least) * i // _CANDIDATES for i in range(_CANDIDATES + 1)]
    found: list[ExpectedSplit] = []
    for size in sorted(set(sizes)) if kv_tokens is None else [kv_tokens]:
        try:
            split = divide(model, memory_bytes, kv_tokens=size, chunk_tokens=chunk_tokens)
        except CapacityError:
            if not found:
                raise
            break
        made = share(split)
        found.append(ExpectedSplit(split=split, share=made, loads=expected_loads(model, split, made, curve, context)))
    most = (1 + _NEAR) * min(one.loads for one in found)
    best = next(one for one in reversed(found) if one.loads <= most)
    if kv_tokens is not None:
        return best
    ends = tuple((one.split.kv_tokens, one.loads) for one in (found[0], found[-1]))
    return replace(best, others=ends)


def expected_loads(model: Footprint, split: MemorySplit, share: MemoryShare, curve: MissCurve, longest: int) -> float:
    """Expected loads of experts per turn, answer included."""
    first = split.kv_tokens - share.kv_tokens
    shortest = min(SHORTEST, longest)
    total = 0.0
    for number in range(_LENGTHS):
        length = shortest * (longest / shortest) ** ((number + 0.5) / _LENGTHS)
        grown = max(0, int(min(length, split.kv_tokens)) - first)
        slots = share.slots - share.slots_for_cache(grown)
        new = min(TURN_PROMPT, length) if length <= split.kv_tokens else length
        total += TURN_ANSWER * model.token_experts * curve.at(slots / model.num_experts)
        total += (1 - _BEGINNING) * _prompt_loads(model, share, slots, new)
        total += _BEGINNING * _prompt_loads(model, share, slots, length)
    return total / _LENGTHS


def _prompt_loads(model: Footprint, share: MemoryShare, slots: int, tokens: float) -> float:
    """Loads of experts without slots for a prompt whose tokens choose experts uniformly."""
    chunks = max(1.0, tokens / share.chunk_tokens)
    unused = (1 - model.token_experts / model.num_experts) ** (tokens / chunks)
    kept = max(0, slots - share.slots_for_forward(int(tokens / chunks)))
    return chunks * (1 - unused) * (model.num_experts - kept)
