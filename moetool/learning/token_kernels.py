"""Compiled loops of `moetool.learning.token_memory`. Shapes are explained there.

numba compiles them when they are first called and keeps the result on disk. No loop adds floating-point numbers in
another order than it says, so all processors compute the same.
"""

from typing import Any

import numba
import numpy as np

_ONE, _NONE = np.float32(1), np.float32(0)  # with a Python integer, numba would go on in float64


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
def nearest(now_N, count, bound, weight_D, item_M, weight_M):  # type: ignore[no-untyped-def]
    """The most similar stored tokens, at most M; of equals those in later places.

    `bound`: all that are chosen are known to share at least so much. Answers their number, and the least that they
    share where there are M, else 0.
    """
    best = 0
    for item in range(count):
        best = max(best, now_N[item])
    least = max(best - len(weight_D) + 1, bound, 0)
    number_D = np.zeros(best - least + 1, np.int32)
    for item in range(count):
        if now_N[item] >= least:
            number_D[best - now_N[item]] += 1
    cut, room = 0, len(item_M)
    while cut < len(number_D) and number_D[cut] <= room:
        room -= number_D[cut]
        cut += 1
    full = cut < len(number_D)
    last = best - cut if full and room > 0 else best - cut + 1  # the least that some of the chosen share
    found = 0
    for item in range(count - 1, -1, -1):
        if now_N[item] < last:
            continue
        less = best - now_N[item]
        if less == cut:
            if room == 0:
                continue
            room -= 1
        item_M[found], weight_M[found] = item, weight_D[less]
        found += 1
    return found, best - cut if full else 0


@_compiled
def weigh(similar, soon_NA, use_A, prior, start, stop, value_A):  # type: ignore[no-untyped-def]
    """Raise `value_A` between `start` and `stop` to the mean of `soon` over the similar tokens and of past use."""
    item_M, weight_M, found = similar
    sum_A = np.zeros(stop - start, np.float32)
    total = prior
    for number in range(found):
        total += weight_M[number]
    byte = np.float32(255)
    number, whole = 0, found - found % 4
    while number < whole:  # four rows a pass over the sums; each place still adds them one after the other
        one, two, three, four = weight_M[number : number + 4] / byte
        one_A, two_A = soon_NA[item_M[number], start:stop], soon_NA[item_M[number + 1], start:stop]
        three_A, four_A = soon_NA[item_M[number + 2], start:stop], soon_NA[item_M[number + 3], start:stop]
        for place in range(len(sum_A)):
            more = sum_A[place] + one * one_A[place]
            more = more + two * two_A[place]
            more = more + three * three_A[place]
            sum_A[place] = more + four * four_A[place]
        number += 4
    for rest in range(whole, found):
        weight = weight_M[rest] / byte
        soon_A = soon_NA[item_M[rest], start:stop]
        for place in range(len(sum_A)):
            sum_A[place] += weight * soon_A[place]
    for place in range(len(sum_A)):
        value = (sum_A[place] + prior * use_A[start + place]) / total
        value_A[start + place] = max(value_A[start + place], value)


@_compiled
def blend(weight, prior, use_E, unused_E):  # type: ignore[no-untyped-def]
    """Shrink `unused_E` to 1 less past use, which counts as `prior` tokens beside similar ones of this weight."""
    share = prior / (weight + prior)
    for expert in range(len(unused_E)):
        unused_E[expert] += share * (_ONE - use_E[expert] - unused_E[expert])


@_compiled
def leave_unused(similar, path_NP, columns, base, unused_E):  # type: ignore[no-untyped-def]
    """Multiply `unused_E` by the share of the similar tokens that do not use each expert of a layer.

    The layer's keys begin at `base` and lie in the `columns` (first, end) of the paths. Answers the sum of weights.
    """
    item_M, weight_M, found = similar
    first, end = columns
    chance_E = np.zeros(len(unused_E), np.float32)
    total = np.float32(0)
    if found == 0:
        return total
    for number in range(found):
        weight = weight_M[number]
        total += weight
        for key in path_NP[item_M[number], first:end]:
            if key >= 0:
                chance_E[key - base] += weight
    for expert in range(len(unused_E)):
        unused_E[expert] *= max(_ONE - chance_E[expert] / total, _NONE)
    return total


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
def note_use(used_E, start, keep, scale, use_A, mean_A):  # type: ignore[no-untyped-def]
    """A forward has used the experts `used_E` of the layer from `start` on: let its past use fade, and scale it."""
    for expert in range(len(used_E)):
        use = use_A[start + expert] * keep
        if used_E[expert]:
            use += 1 - keep
        use_A[start + expert] = use
        mean_A[start + expert] = use_A[start + expert] * scale


@_compiled
def observe(route_TK, layer, columns, batch, past, walks, stored, weight_D):  # type: ignore[no-untyped-def]
    """A layer's router has chosen `route_TK` for the tokens of a forward: all that follows for its requests R.

    Args:
        columns: first and end of the layer in the paths.
        batch: for each request the place of its walk, the row of its last token and its place in the memory (-1: not
            the one after it); the paths of the tokens.
        past: share of past use that is left, scale, and past use as it is and scaled.
        walks: `shared_WLN`, `now_WN`, the least that the similar tokens shared after the last layer (0: not known),
            and the most similar tokens, their weights and number.
        stored: tokens in the memory, and its arrays as for `follow`.
        weight_D: weight of a token by what it shares less than the best.
    """
    place_R, tail_R, last_R, path_TP = batch
    keep, scale, use_A, mean_A = past
    shared_WLN, now_WN, least_W, item_WM, near_WM, found_W = walks
    count, arrays = stored
    stride = len(use_A) // shared_WLN.shape[1]
    base, first = layer * stride, columns[0]
    width = min(columns[1] - first, route_TK.shape[1])
    used_E = np.zeros(stride, np.bool_)
    for token in range(len(route_TK)):
        for choice in range(width):
            used_E[route_TK[token, choice]] = True
            path_TP[token, first + choice] = base + route_TK[token, choice]
    note_use(used_E, base, keep, scale, use_A, mean_A)
    for number in range(len(place_R)):
        walk = place_R[number]
        keys = path_TP[tail_R[number], first : first + width]
        follow(keys, shared_WLN[walk, layer], now_WN[walk], count, last_R[number], arrays)
        bound = least_W[walk] - width  # a layer takes and gives no more
        found_W[walk], least_W[walk] = nearest(now_WN[walk], count, bound, weight_D, item_WM[walk], near_WM[walk])


@_compiled
def value(place_R, walks, tokens, start, stop, value_A):  # type: ignore[no-untyped-def]
    """The highest value that a request gives to each expert between `start` and `stop`.

    `walks`: the most similar tokens, their weights and number; `tokens`: `soon_NA`, past use, and its weight.
    """
    item_WM, near_WM, found_W = walks
    soon_NA, mean_A, prior = tokens
    value_A[start:stop] = 0
    for walk in place_R:
        similar = (item_WM[walk], near_WM[walk], found_W[walk])
        weigh(similar, soon_NA, mean_A, prior, start, stop, value_A)


@_compiled
def merge(place_R, value_WA, value_A):  # type: ignore[no-untyped-def]
    """The highest of the values that these walks had when they were asked last."""
    value_A[:] = value_WA[place_R[0]]
    for walk in place_R[1:]:
        row_A = value_WA[walk]
        for key in range(len(value_A)):
            value_A[key] = max(value_A[key], row_A[key])


@_compiled
def expect(place_R, walks, tokens, columns, base, wanted, unused_E, key_E):  # type: ignore[no-untyped-def]
    """Probability that no request's token uses each expert of a layer, and the absent ones that are likely to be used.

    Arguments as for `leave_unused`, `value` and `likely`; `wanted`: `resident_A` and `limit`.
    """
    item_WM, near_WM, found_W = walks
    path_NP, mean_A, prior = tokens
    resident_A, limit = wanted
    unused_E[:] = 1
    weight = np.float32(0)
    for walk in place_R:
        weight += leave_unused((item_WM[walk], near_WM[walk], found_W[walk]), path_NP, columns, base, unused_E)
    blend(weight / np.float32(len(place_R)), prior, mean_A[base : base + len(unused_E)], unused_E)
    return likely(unused_E, resident_A, base, limit, key_E)


@_compiled
def least_valued(value_A, near_L, stride, resident_A, key_M):  # type: ignore[no-untyped-def]
    """The residents of least value times nearness of their layer, the least last, at most M. Answers their number."""
    worth_E = np.empty(stride, np.float32)
    order_E = worth_E.view(np.int32)  # of numbers not below 0, these have the same order, and are compared faster
    worth_M = np.empty(len(key_M), np.int32)
    never_1 = np.full(1, np.inf, np.float32)
    never = never_1.view(np.int32)[0]
    found = 0
    for layer in range(len(near_L)):
        near, base = near_L[layer], layer * stride
        for expert in range(stride):
            worth = value_A[base + expert] * near
            worth_E[expert] = worth if resident_A[base + expert] else never_1[0]
        bound = worth_M[0] if found == len(key_M) else never
        least = never
        for expert in range(stride):
            least = min(least, order_E[expert])
        if least >= bound:
            continue
        for expert in range(stride):
            worth = order_E[expert]
            if worth >= bound:
                continue
            if found < len(key_M):
                for other in range(found, 0, -1):
                    key_M[other], worth_M[other] = key_M[other - 1], worth_M[other - 1]
                found += 1
            place = 0
            while place + 1 < found and worth < worth_M[place + 1]:
                key_M[place], worth_M[place] = key_M[place + 1], worth_M[place + 1]
                place += 1
            key_M[place], worth_M[place] = base + expert, worth
            if found == len(key_M):
                bound = worth_M[0]
    return found
