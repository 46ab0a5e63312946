"""Compiled loops of `moetool.prediction.token_memory`. Shapes are explained there.

numba compiles them when they are first called and keeps the result on disk. Loops add floating-point numbers in the
written order, so results are bit-identical on all processors.

Each array argument makes a call slower. Loops that run at every event therefore get the arrays of a memory by address,
in one `table` of int64: first sizes, then addresses. All arrays are C-contiguous.
"""

from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

LAYERS, EXPERTS, TOKENS, COLUMNS, NEIGHBOURS, WEIGHTS, HORIZON, COUNT, RUNS = range(9)
"""Sizes in the table: L, experts of a layer, N, P, M, entries of `weight_D` and of `worth_D`, stored tokens, runs."""
SCALES, VALUED, VALUATIONS = range(9, 12)
"""Further numbers in the table: entries of `scale_F`, windows that a valuation updates, valuations so far."""
SHARED_WLN, NOW_WN, LEAST_W, FOUND_W, ITEM_WM, NEAR_WM, USES_AB, BEFORE_N, START_N = range(12, 21)
SOON_NA, WORTH_D, PATH_NP, PAST_A, USE_A, WEIGHT_D, UNUSED_E, KEY_E = range(21, 29)
PASSED_L, SCALE_F, WEIGHT_2, VALUED_W, VALUE_WA = range(29, 34)
"""Addresses in the table. `LEAST_W` holds the fewest experts shared by a similar token of each window (0: unknown),
`PASSED_L` the forwards so far, `SCALE_F` the scale of past use after each number of them, `WEIGHT_2` the weight of past
use and its decay per forward, and `VALUED_W` the valuation that last updated the values of each window in `VALUE_WA`
(-1: none)."""
TABLE_SIZE = 34

_BLOCK = 32  # stored tokens that are skipped together if none of them is similar

_ONE, _NONE = np.float32(1), np.float32(0)  # a Python integer would promote to float64


@intrinsic
def pointer(typing, address):  # type: ignore[no-untyped-def]
    """Return an integer as a pointer for `carray`."""

    def convert(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), convert


def compiled(loop: Any) -> Any:
    """Compile a loop when it is first called; the result is kept on disk."""
    try:
        return numba.njit(cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder for the cache: compiled in each process
        return numba.njit(error_model="numpy")(loop)


@compiled
def record_use(keys, last, before_N, soon_NA, worth_D):  # type: ignore[no-untyped-def]
    """Record, for `last` and the tokens before it, how soon the token after `last` used `keys`."""
    for key in keys:
        if key >= 0:
            item = last
            for worth in worth_D:
                if item < 0 or soon_NA[item, key]:
                    break
                soon_NA[item, key] = worth
                item = before_N[item]


@compiled
def find_runs(before_N, count, start_N):  # type: ignore[no-untyped-def]
    """Put the first token of each run into `start_N`, then `count`; return the number of runs.

    In a run either all tokens have a token before them, at the same distance, or none has. Loops over a run need no
    index per token, and processors do many of its tokens at once.
    """
    runs = 0
    for item in range(count):
        before, last = before_N[item], before_N[item - 1]
        if item == 0 or (before != last + 1 if last >= 0 else before >= 0):
            start_N[runs] = item
            runs += 1
    start_N[runs] = count
    return runs


@compiled
def begin(before_N, old_N, now_N, count):  # type: ignore[no-untyped-def]
    """Begin a token: compare the window of the previous token with those before each stored token."""
    for item in range(count):
        before = before_N[item]
        now_N[item] = old_N[before] if before >= 0 else 0


@compiled
def follow(keys, shared_N, now_N, count, last, stored):  # type: ignore[no-untyped-def]
    """Replace a layer of the window by the chosen `keys`, and record their use before the token `last` (-1: none).

    Args:
        stored: uses_AB, before_N, the runs' start_N, soon_NA and worth_D of the memory.
    """
    uses_AB, before_N, start_N, soon_NA, worth_D = stored
    for run in range(len(start_N) - 1):
        start, before = start_N[run], before_N[start_N[run]]
        if before >= 0:
            run_N = now_N[start : start_N[run + 1]]
            before_S = shared_N[before : before + len(run_N)]
            for item in range(len(run_N)):
                run_N[item] -= before_S[item]
    shared_N[:count] = 0
    for key in keys:
        if key >= 0:
            uses_B = uses_AB[key]
            for bit in range(8):
                shared_B = shared_N[bit * len(uses_B) : (bit + 1) * len(uses_B)]
                for index in range(len(shared_B)):
                    shared_B[index] += (uses_B[index] >> bit) & 1
    for item in range(count):
        now_N[item] += shared_N[item]
    record_use(keys, last, before_N, soon_NA, worth_D)


@compiled
def store(path_P, item, last, path_NP, uses_AB, soon_NA, before_N, after_N):  # type: ignore[no-untyped-def]
    """Overwrite the token `item` by one that follows `last` (-1: none)."""
    bit, index = divmod(item, uses_AB.shape[1])
    for key in path_NP[item]:
        if key >= 0:
            uses_AB[key, index] &= ~np.uint8(1 << bit)
    if before_N[item] >= 0:
        after_N[before_N[item]] = -1
    if after_N[item] >= 0:
        before_N[after_N[item]] = -1
    for column, key in enumerate(path_P):  # one by one: numba compiles checks of two shapes for seconds
        path_NP[item, column] = key
        if key >= 0:
            uses_AB[key, index] |= np.uint8(1 << bit)
    soon_NA[item] = 0
    before_N[item], after_N[item] = last, -1
    if last >= 0:
        after_N[last] = item


@compiled
def nearest(now_N, count, bound, weight_D, item_M, weight_M):  # type: ignore[no-untyped-def]
    """Find the most similar stored tokens, at most M; of equally similar ones those of higher index.

    Args:
        bound: lower bound on the experts shared by each of them.

    Returns:
        Their number, and the fewest experts that one shares if there are M, else 0.
    """
    best, number, item_N = 0, 0, np.empty(count, np.int32)  # the tokens at or above the bound
    for start in range(0, count, _BLOCK):
        now_I = now_N[start : min(count, start + _BLOCK)]
        top = now_I[0]
        for index in range(len(now_I)):
            if now_I[index] > top:
                top = now_I[index]
        if top >= bound:
            best = max(best, top)
            for index in range(len(now_I)):  # without branches
                item_N[number] = start + index
                number += now_I[index] >= bound
    item_N = item_N[:number]
    least = max(best - len(weight_D) + 1, bound, 0)
    number_D = np.zeros(best - least + 1, np.int32)
    for item in item_N:
        if now_N[item] >= least:
            number_D[best - now_N[item]] += 1
    cut, room = 0, len(item_M)
    while cut < len(number_D) and number_D[cut] <= room:
        room -= number_D[cut]
        cut += 1
    full = cut < len(number_D)
    last = best - cut if full and room > 0 else best - cut + 1  # fewest shared experts of those chosen
    found = 0
    for item in item_N[::-1]:
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


@compiled
def weigh(similar, soon_NA, use_A, prior, start, stop, value_A):  # type: ignore[no-untyped-def]
    """Raise `value_A[start:stop]` to the weighted mean of the similar tokens' `soon_NA` and past use, where higher."""
    item_M, weight_M = similar
    found = len(item_M)
    sum_A = np.zeros(stop - start, np.float32)
    total = prior
    for number in range(found):
        total += weight_M[number]
    byte = np.float32(255)
    number, whole = 0, found - found % 4
    while number < whole:  # four rows per pass; each element adds them in order
        one, two, three, four = weight_M[number : number + 4] / byte
        one_A, two_A = soon_NA[item_M[number], start:stop], soon_NA[item_M[number + 1], start:stop]
        three_A, four_A = soon_NA[item_M[number + 2], start:stop], soon_NA[item_M[number + 3], start:stop]
        for index in range(len(sum_A)):
            more = sum_A[index] + one * one_A[index]
            more = more + two * two_A[index]
            more = more + three * three_A[index]
            sum_A[index] = more + four * four_A[index]
        number += 4
    for rest in range(whole, found):
        weight = weight_M[rest] / byte
        soon_A = soon_NA[item_M[rest], start:stop]
        for index in range(len(sum_A)):
            sum_A[index] += weight * soon_A[index]
    for index in range(len(sum_A)):
        value = (sum_A[index] + prior * use_A[start + index]) / total
        value_A[start + index] = max(value_A[start + index], value)


@compiled
def blend(weight, prior, use_E, unused_E):  # type: ignore[no-untyped-def]
    """Shrink `unused_E` toward 1 - past use, which weighs `prior` beside `weight` of the similar tokens."""
    share = prior / (weight + prior)
    for expert in range(len(unused_E)):
        unused_E[expert] += share * (_ONE - use_E[expert] - unused_E[expert])


@compiled
def leave_unused(similar, path_NP, columns, base, unused_E):  # type: ignore[no-untyped-def]
    """Multiply `unused_E` by the share of the similar tokens that do not use each expert of a layer.

    Args:
        columns, base: columns (first, end) of the layer in the paths, and its first key.

    Returns:
        Sum of the weights.
    """
    item_M, weight_M = similar
    found = len(item_M)
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


@compiled
def likely(unused_E, resident_A, base, limit, key_E):  # type: ignore[no-untyped-def]
    """Sort a layer's missing experts below `limit` into `key_E`, the most likely first; return their number."""
    found = 0
    for expert in range(len(unused_E)):
        if unused_E[expert] < limit and not resident_A[base + expert]:
            index = found
            while index > 0 and unused_E[key_E[index - 1] - base] > unused_E[expert]:
                key_E[index] = key_E[index - 1]
                index -= 1
            key_E[index] = base + expert
            found += 1
    return found


@compiled
def note_use(used_E, start, keep, scale, use_A, mean_A):  # type: ignore[no-untyped-def]
    """Update past use of the layer whose keys begin at `start`: decay it, add `used_E`, and scale it."""
    for expert in range(len(used_E)):
        use = use_A[start + expert] * keep
        if used_E[expert]:
            use += 1 - keep
        use_A[start + expert] = use
        mean_A[start + expert] = use_A[start + expert] * scale


@compiled
def weights(table):  # type: ignore[no-untyped-def]
    """Return the weight of past use and its decay per forward."""
    return carray(pointer(table[WEIGHT_2]), (2,), np.float64)


@compiled
def similar_tokens(table, window):  # type: ignore[no-untyped-def]
    """Return the most similar tokens of a window and their weights."""
    found = carray(pointer(table[FOUND_W]), (window + 1,), np.int64)[window]
    shape = (window + 1, table[NEIGHBOURS])
    item_M = carray(pointer(table[ITEM_WM]), shape, np.int32)[window, :found]
    weight_M = carray(pointer(table[NEAR_WM]), shape, np.float32)[window, :found]
    return item_M, weight_M


@compiled
def observe(table, row_R3, path_TP, layer, columns):  # type: ignore[no-untyped-def]
    """Record a layer's choices and find the most similar tokens of each request.

    Args:
        row_R3: see `WindowBatch`.
        path_TP: paths of the tokens. The `columns` (first, end) hold the experts chosen in this layer; they are
            replaced by their keys.
    """
    num_layers, stride, num_tokens, count = table[LAYERS], table[EXPERTS], table[TOKENS], table[COUNT]
    num, (first, end) = num_layers * stride, columns
    passed_L = carray(pointer(table[PASSED_L]), (num_layers,), np.int64)
    passed_L[layer] += 1
    scale = carray(pointer(table[SCALE_F]), (table[SCALES],), np.float64)[min(passed_L[layer], table[SCALES] - 1)]
    base = layer * stride
    used_E = np.zeros(stride, np.bool_)
    for token in range(len(path_TP)):
        for column in range(first, end):
            used_E[path_TP[token, column]] = True
            path_TP[token, column] += np.int32(base)
    past_A = carray(pointer(table[PAST_A]), (num,), np.float32)
    use_A = carray(pointer(table[USE_A]), (num,), np.float32)
    note_use(used_E, base, weights(table)[1], scale, past_A, use_A)
    before_N = carray(pointer(table[BEFORE_N]), (num_tokens,), np.int32)
    start_N = carray(pointer(table[START_N]), (table[RUNS] + 1,), np.int32)
    uses_AB = carray(pointer(table[USES_AB]), (num, (num_tokens + 7) // 8), np.uint8)
    soon_NA = carray(pointer(table[SOON_NA]), (num_tokens, num), np.uint8)
    worth_D = carray(pointer(table[WORTH_D]), (table[HORIZON],), np.uint8)
    stored = uses_AB, before_N, start_N, soon_NA, worth_D
    weight_D = carray(pointer(table[WEIGHT_D]), (table[WEIGHTS],), np.float32)
    for number in range(len(row_R3)):
        window, tail, last = row_R3[number, 0], row_R3[number, 1], row_R3[number, 2]
        most = (window + 1, table[NEIGHBOURS])
        shared_LN = carray(pointer(table[SHARED_WLN]), (window + 1, num_layers, num_tokens), np.uint8)[window]
        now_N = carray(pointer(table[NOW_WN]), (window + 1, num_tokens), np.int16)[window]
        item_M = carray(pointer(table[ITEM_WM]), most, np.int32)[window]
        near_M = carray(pointer(table[NEAR_WM]), most, np.float32)[window]
        least_W = carray(pointer(table[LEAST_W]), (window + 1,), np.int64)
        found_W = carray(pointer(table[FOUND_W]), (window + 1,), np.int64)
        follow(path_TP[tail, first:end], shared_LN[layer], now_N, count, last, stored)
        bound = least_W[window] - (end - first)  # a layer changes no similarity by more
        found_W[window], least_W[window] = nearest(now_N, count, bound, weight_D, item_M, near_M)


@compiled
def value(table, row_R3, start, stop, value_A):  # type: ignore[no-untyped-def]
    """Set `value_A[start:stop]` to the highest value that a request gives."""
    num, num_tokens, prior = table[LAYERS] * table[EXPERTS], table[TOKENS], np.float32(weights(table)[0])
    soon_NA = carray(pointer(table[SOON_NA]), (num_tokens, num), np.uint8)
    use_A = carray(pointer(table[USE_A]), (num,), np.float32)
    value_A[start:stop] = 0
    for number in range(len(row_R3)):
        weigh(similar_tokens(table, row_R3[number, 0]), soon_NA, use_A, prior, start, stop, value_A)


@compiled
def value_all(table, row_R3, value_A):  # type: ignore[no-untyped-def]
    """Like `value` for all experts, with new values only for some requests valued longest ago."""
    num = len(value_A)
    if len(row_R3) <= 1:
        value(table, row_R3, 0, num, value_A)
        return
    num_windows = 0
    for number in range(len(row_R3)):
        num_windows = max(num_windows, row_R3[number, 0] + 1)
    valued_W = carray(pointer(table[VALUED_W]), (num_windows,), np.int64)
    value_WA = carray(pointer(table[VALUE_WA]), (num_windows, num), np.float32)
    table[VALUATIONS] += 1
    for _ in range(min(table[VALUED], len(row_R3))):
        oldest = 0
        for number in range(1, len(row_R3)):
            if valued_W[row_R3[number, 0]] < valued_W[row_R3[oldest, 0]]:
                oldest = number
        valued_W[row_R3[oldest, 0]] = table[VALUATIONS]
        value(table, row_R3[oldest : oldest + 1], 0, num, value_WA[row_R3[oldest, 0]])
    value_A[:] = 0  # the lowest value
    for number in range(len(row_R3)):
        window = row_R3[number, 0]
        if valued_W[window] >= 0:
            row_A = value_WA[window]
            for key in range(num):
                value_A[key] = max(value_A[key], row_A[key])


@compiled
def expect(table, row_R3, columns, base, limit, resident_A):  # type: ignore[no-untyped-def]
    """Set `unused_E` of a layer, and `key_E` to its missing experts below `limit`; return their number.

    Args:
        columns, base: as for `leave_unused`.
    """
    stride, num = table[EXPERTS], table[LAYERS] * table[EXPERTS]
    unused_E = carray(pointer(table[UNUSED_E]), (stride,), np.float32)
    path_NP = carray(pointer(table[PATH_NP]), (table[TOKENS], table[COLUMNS]), np.int32)
    use_A = carray(pointer(table[USE_A]), (num,), np.float32)
    unused_E[:] = 1
    weight = np.float32(0)
    for number in range(len(row_R3)):
        weight += leave_unused(similar_tokens(table, row_R3[number, 0]), path_NP, columns, base, unused_E)
    blend(weight / np.float32(len(row_R3)), np.float32(weights(table)[0]), use_A[base : base + stride], unused_E)
    return likely(unused_E, resident_A, base, limit, carray(pointer(table[KEY_E]), (stride,), np.int64))


@compiled
def least_valued(value_A, near_L, stride, resident_A, key_M):  # type: ignore[no-untyped-def]
    """Put at most M residents of lowest value times nearness into `key_M`, the lowest last; return their number."""
    worth_E = np.empty(stride, np.float32)
    order_E = worth_E.view(np.int32)  # bits of numbers >= 0 have their order and compare faster
    worth_M = np.empty(len(key_M), np.int32)
    never, found = np.int32(0x7F800000), 0  # the bits of infinity
    for layer in range(len(near_L)):
        near, base = near_L[layer], layer * stride
        value_E, resident_E = value_A[base : base + stride], resident_A[base : base + stride]
        for expert in range(stride):
            worth_E[expert] = value_E[expert] * near
        bound = worth_M[0] if found == len(key_M) else never
        least = never
        for expert in range(stride):  # without branches
            order_E[expert] |= never & (np.int32(resident_E[expert]) - np.int32(1))
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
            index = 0
            while index + 1 < found and worth < worth_M[index + 1]:
                key_M[index], worth_M[index] = key_M[index + 1], worth_M[index + 1]
                index += 1
            key_M[index], worth_M[index] = base + expert, worth
            if found == len(key_M):
                bound = worth_M[0]
    return found
