"""Compiled loops of `moetool.learning.token_memory`. Shapes are explained there.

numba compiles them when they are first called and keeps the result on disk. No loop adds floating-point numbers in
another order than it says, so all processors compute the same.
"""

from typing import Any

import numba
import numpy as np


def _compiled(loop: Any) -> Any:
    try:
        return numba.njit(cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder to keep it in: compiled in each process
        return numba.njit(error_model="numpy")(loop)


@_compiled
def settle(keys, last, before_N, soon_NA, worth_D):  # type: ignore[no-untyped-def]
    """The token after `last` uses `keys`: note how soon that was for `last` and the tokens before it."""
    for key in keys:
        if key >= 0:
            item = last
            for worth in worth_D:
                if item < 0 or soon_NA[item, key]:
                    break
                soon_NA[item, key] = worth
                item = before_N[item]


@_compiled
def begin(before_N, old_N, now_N, count):  # type: ignore[no-untyped-def]
    """A token begins: its window is that of the token before, and so is each stored token's."""
    for item in range(count):
        before = before_N[item]
        now_N[item] = old_N[before] if before >= 0 else 0


@_compiled
def follow(keys, shared_N, now_N, count, last, stored):  # type: ignore[no-untyped-def]
    """A layer's router has chosen `keys`: they take the place of the last token's in the window.

    Where it is the token after `last` (not -1), `settle` follows. `stored` has the arrays of the memory.
    """
    uses_AN, before_N, soon_NA, worth_D = stored
    for item in range(count):
        before = before_N[item]
        if before >= 0:
            now_N[item] -= shared_N[before]
    shared_N[:count] = 0
    for key in keys:
        if key >= 0:
            uses_N = uses_AN[key]
            for item in range(count):
                shared_N[item] += uses_N[item]
    for item in range(count):
        now_N[item] += shared_N[item]
    settle(keys, last, before_N, soon_NA, worth_D)


@_compiled
def store(path_P, item, last, path_NP, uses_AN, soon_NA, before_N, after_N):  # type: ignore[no-untyped-def]
    """Put a token that follows `last` (-1: none) in the place of another."""
    for key in path_NP[item]:
        if key >= 0:
            uses_AN[key, item] = 0
    if before_N[item] >= 0:
        after_N[before_N[item]] = -1
    if after_N[item] >= 0:
        before_N[after_N[item]] = -1
    path_NP[item] = path_P
    for key in path_P:
        if key >= 0:
            uses_AN[key, item] = 1
    soon_NA[item] = 0
    before_N[item], after_N[item] = last, -1
    if last >= 0:
        after_N[last] = item


@_compiled
def nearest(now_N, count, weight_W, item_M, weight_M):  # type: ignore[no-untyped-def]
    """The most similar stored tokens, at most M; of equals those in later places. Answers their number."""
    best = 0
    for item in range(count):
        best = max(best, now_N[item])
    least = max(best - len(weight_W) + 1, 0)
    number_W = np.zeros(best - least + 1, np.int64)
    for item in range(count):
        if now_N[item] >= least:
            number_W[best - now_N[item]] += 1
    cut, room = 0, len(item_M)
    while cut < len(number_W) and number_W[cut] <= room:
        room -= number_W[cut]
        cut += 1
    found = 0
    for item in range(count - 1, -1, -1):
        less = best - now_N[item]
        if less < cut or (less == cut and room > 0 and less < len(number_W)):
            if less == cut:
                room -= 1
            item_M[found], weight_M[found] = item, weight_W[less]
            found += 1
    return found


@_compiled
def weigh(similar, soon_NA, use_A, prior, start, stop, value_A):  # type: ignore[no-untyped-def]
    """Raise `value_A` between `start` and `stop` to the mean of `soon` over the similar tokens and of past use."""
    item_M, weight_M, found = similar
    sum_A = np.zeros(stop - start, np.float32)
    total = prior
    for number in range(found):
        weight = weight_M[number]
        total += weight
        weight /= np.float32(255)
        soon_A = soon_NA[item_M[number], start:stop]
        for place in range(len(sum_A)):
            sum_A[place] += weight * soon_A[place]
    for place in range(len(sum_A)):
        value = (sum_A[place] + prior * use_A[start + place]) / total
        value_A[start + place] = max(value_A[start + place], value)


@_compiled
def leave_unused(similar, path_NP, columns, use_A, prior, base, unused_E):  # type: ignore[no-untyped-def]
    """Multiply `unused_E` by the probability that a token does not use each expert of a layer.

    The layer's keys begin at `base` and lie in the `columns` (first, end) of the paths.
    """
    item_M, weight_M, found = similar
    first, end = columns
    chance_E = prior * use_A[base : base + len(unused_E)]
    total = prior
    for number in range(found):
        weight = weight_M[number]
        total += weight
        for key in path_NP[item_M[number], first:end]:
            if key >= 0:
                chance_E[key - base] += weight
    for expert in range(len(unused_E)):
        unused_E[expert] *= max(1 - chance_E[expert] / total, np.float32(0))


@_compiled
def likely(unused_E, resident_A, base, limit, key_E):  # type: ignore[no-untyped-def]
    """The absent experts of a layer that stay unused with less than `limit`, the likeliest first. Their number."""
    found = 0
    for expert in range(len(unused_E)):
        if unused_E[expert] < limit and not resident_A[base + expert]:
            place = found
            while place > 0 and unused_E[key_E[place - 1] - base] > unused_E[expert]:
                key_E[place] = key_E[place - 1]
                place -= 1
            key_E[place] = base + expert
            found += 1
    return found


@_compiled
def note_use(keys, start, stop, keep, scale, use_A, mean_A):  # type: ignore[no-untyped-def]
    """A forward has used `keys` of the layer between `start` and `stop`: let its past use fade, and scale it."""
    for key in range(start, stop):
        use_A[key] *= keep
    for key in keys:
        use_A[key] += 1 - keep
    for key in range(start, stop):
        mean_A[key] = use_A[key] * scale


@_compiled
def least_valued(value_A, near_L, stride, resident_A, key_M):  # type: ignore[no-untyped-def]
    """The residents of least value times nearness of their layer, the least last, at most M. Answers their number."""
    worth_M = np.empty(len(key_M), np.float32)
    found = 0
    for layer in range(len(near_L)):
        near = near_L[layer]
        for key in range(layer * stride, (layer + 1) * stride):
            if not resident_A[key]:
                continue
            worth = value_A[key] * near
            if found == len(key_M):
                if worth >= worth_M[0]:
                    continue
                place = 0
            else:
                for other in range(found, 0, -1):
                    key_M[other], worth_M[other] = key_M[other - 1], worth_M[other - 1]
                place = 0
                found += 1
            while place + 1 < found and worth < worth_M[place + 1]:
                key_M[place], worth_M[place] = key_M[place + 1], worth_M[place + 1]
                place += 1
            key_M[place], worth_M[place] = key, worth
    return found
