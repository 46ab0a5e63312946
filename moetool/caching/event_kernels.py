"""Compiled events of a pool under LRU, LFU, LFRU or foresight, with the decisions of `moetool.caching.residency`.

A pool is one `table` of int64: sizes, counters, then addresses of its arrays (`moetool.caching.compiled_events` makes
them). `run` takes the experts of each token as int32 at an address and writes the program's steps (loads, prefetches,
slots, evictions) into an array, so that other compiled code can decide without Python. All arrays are C-contiguous, and
nothing checks bounds.

Shapes:
    A  experts of the model, L * E, by key     L  layers     P  slots     F  fields     S  steps, at most 3 A
"""

import hashlib
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import carray

from moetool.base.tables import line_if_slow
from moetool.caching import split_kernels as splits
from moetool.prediction import token_kernels as tokens
from moetool.prediction.token_kernels import pointer
from moetool.prediction.token_memory import COMPILING

LRU, LFU, FORGETFUL_LFU, LFRU = map(np.int64, range(4))
"""Policies without a memory: values of KIND."""
KIND, LAYERS, EXPERTS, CAPACITY, BY_LAYER = range(5)
"""Sizes: L, E, slots without reserved ones, whether layers have own slots (`OWN_L`)."""
ROOM, FREE, RESIDENTS, BEYOND, CLOCK, PHASE, FORWARD = range(5, 12)
"""State: free slots of the capacity and all, residents, layers with more than their own slots, admissions and uses so
far, phase and number of the forward."""
TOKENS, STRIDE, WIDTH, ROUTES, LAYER, STOP, STEPS = range(12, 19)
"""Events: tokens, int32 numbers from one token's experts to the next one's, experts of a token in the layer if there is
one, address of the first layer's, first layer, last layer + 1; and the number of steps."""
REFRESH, PREFETCH, EVENT_SLOTS, VALUE_AGE, CROWDED, MISSES, ORDER, REQUESTS, ROWS, SEEN = range(19, 29)
"""Foresight: options, slots, and the state of `moetool.caching.policies.foresight.Policy`."""
SLOT_A, ADMITTED_A, UNUSED_A, HELD_A, NEEDED_E, FREE_P, STEP_S6, COUNT_26, COLUMN_L = range(29, 38)
"""Addresses of int32 slots (-1: none), int64 times of admission, bool prefetched and unused, uint8 marks (`_LOCKED`,
`_WANTED`), int32 scratch, int32 free slots, int64 steps (forward, layer, kind, key, slot, evicted), int64 counts by
phase in the order of `moetool.caching.residency.Counts`, and int64 first column of each layer in a token's row, then
the width of a row."""
OWN_L, HELD_L, USED_A, NEXT_A, LAST_A, USES, USES_A = range(38, 45)
"""Own slots of each layer and its residents, both int64; without a memory: int64 time of the last use; int32 next and
last resident by that time, with a sentinel at A (LRU); number of uses, and int64 uses of each expert."""
VALUE_A, NEAR_LL, VALUED_L, RESIDENT_A, ORDER_M, KEY_E, UNUSED_E, FLOAT_2, ROW_R3, PATH_TP = range(45, 55)
"""Foresight: the arrays of the policy, in their types; uint8 `VALUED_L`; float64 options
waste and limit."""
SPLIT, WORTH_E, STAMP = range(55, 58)
"""Whether the split of misses is active (0: all are loaded), and the address of float32 scratch."""
TABLE_SIZE = 58

COMPUTE, LOAD, AHEAD, HOST = map(np.int64, range(4))
"""Kinds of steps, as in `moetool.caching.residency.StepKind`."""
KEPT, PREFETCHED, MISSED, PREFETCH_LOADS, WASTED, HOSTED = map(np.int64, range(6))
"""Counts by their place in `moetool.caching.residency.Counts`."""
RANKED, MORE = 32, 8
"""Foresight: most victims in one ranking; victims beyond the misses, since some are locked and prefetches evict too."""

# Typed, since numba compiles a function for each type of its arguments, and a literal's type is another.
_FREE, _LOCKED, _WANTED, _HELD = map(np.int64, range(4))
_ONE, _NOBODY = np.int64(1), np.int64(-1)


def _inlined(loop: Any) -> Any:
    """Compile as part of the functions that call it."""
    return numba.njit(error_model="numpy")(loop)


@_inlined
def _field(table, at, layer):  # type: ignore[no-untyped-def]
    """Return a count by layer: int64 [L], of which one is read or written."""
    return carray(pointer(table[at]), (layer + 1,), np.int64)


@_inlined
def _keys(table):  # type: ignore[no-untyped-def]
    """Return the number of keys, and the slot and marks of each."""
    num = table[LAYERS] * table[EXPERTS]
    slot_A = carray(pointer(table[SLOT_A]), (num,), np.int32)
    held_A = carray(pointer(table[HELD_A]), (num,), np.uint8)
    return num, slot_A, held_A


@_inlined
def _step(table, layer, kind, key, slot, evicted):  # type: ignore[no-untyped-def]
    """Append a step to the program."""
    number = table[STEPS]
    step_6 = carray(pointer(table[STEP_S6]), (number + 1, 6), np.int64)[number]
    step_6[0], step_6[1], step_6[2] = table[FORWARD], layer, kind
    step_6[3], step_6[4], step_6[5] = key, slot, evicted
    table[STEPS] = number + 1


@_inlined
def _count(table, field, number):  # type: ignore[no-untyped-def]
    carray(pointer(table[COUNT_26]), (2, 6), np.int64)[table[PHASE], field] += number


@_inlined
def _unlink(table, num, key):  # type: ignore[no-untyped-def]
    """Take a resident out of the order of use (LRU)."""
    next_A = carray(pointer(table[NEXT_A]), (num + 1,), np.int32)
    last_A = carray(pointer(table[LAST_A]), (num + 1,), np.int32)
    next_A[last_A[key]], last_A[next_A[key]] = next_A[key], last_A[key]


@_inlined
def _use(table, num, key):  # type: ignore[no-untyped-def]
    """Note a use; with LRU, of a resident that is not linked."""
    table[USES] += 1
    carray(pointer(table[USED_A]), (num,), np.int64)[key] = table[USES]
    if table[KIND] == LRU:
        next_A = carray(pointer(table[NEXT_A]), (num + 1,), np.int32)
        last_A = carray(pointer(table[LAST_A]), (num + 1,), np.int32)
        last = last_A[num]
        next_A[last], last_A[key], next_A[key], last_A[num] = key, last, num, key
    else:
        carray(pointer(table[USES_A]), (num,), np.int64)[key] += 1


@_inlined
def _goes_first(table, num, key, other):  # type: ignore[no-untyped-def]
    """Whether a resident is evicted before another (LRU, LFU, LFRU)."""
    used_A = carray(pointer(table[USED_A]), (num,), np.int64)
    if table[KIND] == LRU:
        return used_A[key] < used_A[other]
    uses_A = carray(pointer(table[USES_A]), (num,), np.int64)
    if table[KIND] == LFRU:
        clock = table[USES] + 1
        return uses_A[key] / (clock - used_A[key]) < uses_A[other] / (clock - used_A[other])
    return uses_A[key] < uses_A[other] or (uses_A[key] == uses_A[other] and used_A[key] < used_A[other])


@_inlined
def _place(table, memory, layer, key, ahead):  # type: ignore[no-untyped-def]
    """Give an expert a free slot, that of the last evicted one if any."""
    num, slot_A, _ = _keys(table)
    table[ROOM] -= 1
    table[FREE] -= 1
    table[RESIDENTS] += 1
    slot = carray(pointer(table[FREE_P]), (table[FREE] + 1,), np.int32)[table[FREE]]
    slot_A[key] = slot
    carray(pointer(table[RESIDENT_A]), (num,), np.bool_)[key] = True
    carray(pointer(table[UNUSED_A]), (num,), np.bool_)[key] = ahead
    table[CLOCK] += 1
    carray(pointer(table[ADMITTED_A]), (num,), np.int64)[key] = table[CLOCK]
    held_L = _field(table, HELD_L, layer)
    held_L[layer] += 1
    if table[BY_LAYER] and held_L[layer] == _field(table, OWN_L, layer)[layer] + 1:
        table[BEYOND] += 1
    if memory is None and (table[KIND] == LRU or table[KIND] == LFRU):
        _use(table, num, key)
    return np.int64(slot)


@_inlined
def _give_up(table, memory, key):  # type: ignore[no-untyped-def]
    """Take an expert's slot."""
    num, slot_A, _ = _keys(table)
    layer = key // table[EXPERTS]
    carray(pointer(table[FREE_P]), (table[FREE] + 1,), np.int32)[table[FREE]] = slot_A[key]
    table[FREE] += 1
    table[ROOM] += 1
    table[RESIDENTS] -= 1
    slot_A[key] = -1
    carray(pointer(table[RESIDENT_A]), (num,), np.bool_)[key] = False
    held_L = _field(table, HELD_L, layer)
    held_L[layer] -= 1
    if table[BY_LAYER] and held_L[layer] == _field(table, OWN_L, layer)[layer]:
        table[BEYOND] -= 1
    unused_A = carray(pointer(table[UNUSED_A]), (num,), np.bool_)
    if unused_A[key]:
        unused_A[key] = False
        _count(table, WASTED, _ONE)
    if memory is None:
        if table[KIND] == LRU:
            _unlink(table, num, key)
        elif table[KIND] != LFU:
            carray(pointer(table[USES_A]), (num,), np.int64)[key] = 0
            if table[KIND] == FORGETFUL_LFU:
                carray(pointer(table[USED_A]), (num,), np.int64)[key] = 0


@_inlined
def _batch(table, memory):  # type: ignore[no-untyped-def]
    """Return the rows and paths of the forward's tokens (foresight)."""
    row_R3 = carray(pointer(table[ROW_R3]), (table[REQUESTS], 3), np.int64)
    path_TP = carray(pointer(table[PATH_TP]), (table[ROWS], memory[tokens.COLUMNS]), np.int32)
    return row_R3, path_TP


@_inlined
def _arrays(table):  # type: ignore[no-untyped-def]
    """Return foresight's values, nearness after this event's layer, and residents."""
    num, layers = table[LAYERS] * table[EXPERTS], table[LAYERS]
    value_A = carray(pointer(table[VALUE_A]), (num,), np.float32)
    near_L = carray(pointer(table[NEAR_LL]), (layers, layers), np.float32)[table[LAYER]]
    resident_A = carray(pointer(table[RESIDENT_A]), (num,), np.bool_)
    return value_A, near_L, resident_A


@_inlined
def _rank(table, memory, kept):  # type: ignore[no-untyped-def]
    """`Policy._rank` of foresight; `kept`: marks of experts that are no victims."""
    num, _, held_A = _keys(table)
    row_R3, _ = _batch(table, memory)
    value_A, near_L, resident_A = _arrays(table)
    if table[VALUE_AGE] >= table[REFRESH]:
        tokens.value_all(memory, row_R3, value_A)
        table[VALUE_AGE] = 0
    num_held = 0
    if kept:
        for key in range(num):
            if held_A[key] & kept:
                resident_A[key] = False
                num_held += 1
    most = RANKED if num_held else min(RANKED, table[MISSES] + MORE)
    order_M = carray(pointer(table[ORDER_M]), (RANKED,), np.int64)
    table[ORDER] = tokens.least_valued(value_A, near_L, table[EXPERTS], resident_A, order_M[:most])
    if num_held:
        for key in range(num):
            if held_A[key] & kept:
                resident_A[key] = True


@_inlined
def _looks_ahead(table):  # type: ignore[no-untyped-def]
    return table[PREFETCH] and not table[CROWDED] and table[LAYER] + 1 < table[LAYERS]


@_inlined
def _is_worth(table, key, victim):  # type: ignore[no-untyped-def]
    """`Policy._is_worth` of foresight."""
    stride = table[EXPERTS]
    value_A, near_L, _ = _arrays(table)
    unused_E = carray(pointer(table[UNUSED_E]), (stride,), np.float32)
    layer, expert = divmod(victim, stride)
    unused = np.float64(unused_E[key % stride])
    value = np.float64(value_A[victim] * near_L[layer])
    needed = 1.0 - np.float64(unused_E[expert]) if layer == table[LAYER] + 1 else 0.0
    pays = (1.0 - unused) * (1.0 - needed)
    waste = carray(pointer(table[FLOAT_2]), (2,), np.float64)[0]
    return pays > (1.0 - pays) * waste + unused * value


@_inlined
def _victim(table, memory, kept):  # type: ignore[no-untyped-def]
    """`Policy.evict`: the resident to evict of one pool; experts with marks of `kept` are none."""
    num, slot_A, held_A = _keys(table)
    if memory is None and table[KIND] != LRU:
        best = _NOBODY
        for key in range(num):
            if slot_A[key] >= 0 and not held_A[key] & kept and (best < 0 or _goes_first(table, num, key, best)):
                best = np.int64(key)
        return best
    if memory is None:
        next_A = carray(pointer(table[NEXT_A]), (num + 1,), np.int32)
        key = next_A[num]
        while held_A[key] & kept:
            key = next_A[key]
        return np.int64(key)
    order_M = carray(pointer(table[ORDER_M]), (RANKED,), np.int64)
    if table[ORDER] == 0:
        _rank(table, memory, _FREE)
    while table[ORDER] > 0:
        table[ORDER] -= 1
        key = order_M[table[ORDER]]
        if slot_A[key] >= 0 and not held_A[key] & kept:
            return np.int64(key)
    _rank(table, memory, kept)
    table[ORDER] -= 1
    return order_M[table[ORDER]]


@_inlined
def _may_evict(table, layer, claims):  # type: ignore[no-untyped-def]
    """Whether `claims` (a layer; -1: none) may evict a layer's experts, where layers have own slots."""
    held, own = _field(table, HELD_L, layer)[layer], _field(table, OWN_L, layer)[layer]
    return held > own or (layer == claims and held >= own)


@_inlined
def _victim_among(table, memory, kept, claims):  # type: ignore[no-untyped-def]
    """`Policy.evict_among`: the resident to evict for a layer, where layers have own slots; -1: none."""
    num, slot_A, held_A = _keys(table)
    stride, layers = table[EXPERTS], table[LAYERS]
    start, stop = (claims, claims + 1) if claims >= 0 and table[BEYOND] == 0 else (0, layers)
    admitted_A = carray(pointer(table[ADMITTED_A]), (num,), np.int64)
    best = _NOBODY
    if memory is None:
        for layer in range(start, stop):
            if not _may_evict(table, layer, claims):
                continue
            before = best
            for key in range(layer * stride, (layer + 1) * stride):
                if slot_A[key] < 0 or held_A[key] & kept:
                    continue
                first = best < 0 or _goes_first(table, num, key, best)
                if not first and best != before and admitted_A[key] < admitted_A[best]:
                    first = not _goes_first(table, num, best, key)  # equal: the longest resident one
                if first:
                    best = np.int64(key)
        return best
    first, last = -1, -1
    for layer in range(start, stop):
        if _may_evict(table, layer, claims):
            for key in range(layer * stride, (layer + 1) * stride):
                if slot_A[key] >= 0 and not held_A[key] & kept:
                    first, last = (layer if first < 0 else first), layer
                    break
    if first < 0:
        return _NOBODY
    value_A, near_L, _ = _arrays(table)
    valued_L = carray(pointer(table[VALUED_L]), (layers,), np.uint8)
    known = True
    for layer in range(first, last + 1):
        known = known and valued_L[layer] != 0
    if not known:
        end = last + 1 + (1 if first == last and last == table[LAYER] and _looks_ahead(table) else 0)
        row_R3, _ = _batch(table, memory)
        tokens.value(memory, row_R3, first * stride, end * stride, value_A)
        valued_L[first:end] = 1
    least = 0.0
    for layer in range(first, last + 1):
        if not _may_evict(table, layer, claims):
            continue
        near = np.float64(1) if first == last else np.float64(near_L[layer])
        before = best
        for key in range(layer * stride, (layer + 1) * stride):
            if slot_A[key] < 0 or held_A[key] & kept:
                continue
            worth = np.float64(value_A[key]) * near
            if best < 0 or worth < least or (worth == least and best != before and admitted_A[key] < admitted_A[best]):
                best, least = np.int64(key), worth
    return best


@_inlined
def _prefetch(table, memory, split, layer, locked, key_E, start, stop):  # type: ignore[no-untyped-def]
    """Prefetch as many keys of the next layer as slots permit; return the place of the first one that waits."""
    stride = table[EXPERTS]
    _, slot_A, held_A = _keys(table)
    at = start
    while at < stop:
        key = key_E[at]
        if slot_A[key] >= 0:
            at += 1
            held_A[key] |= _WANTED
            continue
        evicted, layer_of = _NOBODY, key // stride
        if table[ROOM] < 1:
            if table[BY_LAYER]:
                evicted = _victim_among(table, memory, _HELD, layer_of)
                if evicted < 0:
                    return at  # until another expert of the event is computed
            else:
                kept = locked
                for other in range((layer + 1) * stride, (layer + 2) * stride):
                    kept += held_A[other] != 0
                if kept >= table[RESIDENTS]:
                    return at
                evicted = _victim(table, memory, _HELD)
            if not _is_worth(table, key, evicted):
                if not table[BY_LAYER]:
                    carray(pointer(table[ORDER_M]), (RANKED,), np.int64)[table[ORDER]] = evicted
                    table[ORDER] += 1
                at += 1
                continue
            _give_up(table, memory, evicted)
        at += 1
        held_A[key] |= _WANTED
        slot = _place(table, memory, layer_of, key, True)
        _step(table, layer, AHEAD, key, slot, evicted)
        _count(table, PREFETCH_LOADS, _ONE)
        if split is not None and table[SPLIT]:
            splits.note(split, key, evicted)
    return at


@_inlined
def _expect(table, memory, layer):  # type: ignore[no-untyped-def]
    """`Policy.after_first_expert` of foresight; return the number of expected keys."""
    if memory is None or not _looks_ahead(table):
        return np.int64(0)
    row_R3, _ = _batch(table, memory)
    column_L = carray(pointer(table[COLUMN_L]), (layer + 3,), np.int64)
    limit = np.float32(carray(pointer(table[FLOAT_2]), (2,), np.float64)[1])
    _, _, resident_A = _arrays(table)
    columns = column_L[layer + 1], column_L[layer + 2]
    return np.int64(tokens.expect(memory, row_R3, columns, (layer + 1) * table[EXPERTS], limit, resident_A))


@_inlined
def _host(table, memory, split, layer, queued, misses):  # type: ignore[no-untyped-def]
    """Let the split choose the misses of the host; take them out of the misses, and return their number."""
    stride = table[EXPERTS]
    queue_E, miss_E, token_E, host_E = carray(pointer(table[NEEDED_E]), (4, stride), np.int32)
    worth_E = carray(pointer(table[WORTH_E]), (stride,), np.float32)
    worth_E[:misses] = 0
    if memory is not None and misses:
        value_A, _, _ = _arrays(table)
        valued_L = carray(pointer(table[VALUED_L]), (table[LAYERS],), np.uint8)
        if not valued_L[layer]:
            end = layer + 1 + (1 if _looks_ahead(table) else 0)
            row_R3, _ = _batch(table, memory)
            tokens.value(memory, row_R3, layer * stride, end * stride, value_A)
            valued_L[layer:end] = 1
        for at in range(misses):
            worth_E[at] = value_A[miss_E[at]]
    single = table[TOKENS] == 1
    hosted = splits.choose(split, single, token_E, queue_E[:queued], miss_E[:misses], worth_E, host_E)
    left, at = 0, 0
    for number in range(misses):
        if at < hosted and miss_E[number] == host_E[at]:
            _step(table, layer, HOST, np.int64(host_E[at]), _NOBODY, _NOBODY)
            worth_E[at] = worth_E[number]
            at += 1
        else:
            miss_E[left] = miss_E[number]
            left += 1
    _count(table, HOSTED, hosted)
    return hosted


@_inlined
def _admit(table, memory, split, layer, key):  # type: ignore[no-untyped-def]
    """Give an expert that the host has computed a slot, unless it is worth less than the evicted one."""
    num, _, held_A = _keys(table)
    stride, evicted = table[EXPERTS], _NOBODY
    if table[ROOM] < 1:
        if table[BY_LAYER]:
            evicted = _victim_among(table, memory, _HELD, layer)
            if evicted < 0:
                return
        else:
            kept = 0
            for other in range(layer * stride, min((layer + 2) * stride, num)):
                kept += held_A[other] != 0
            if kept >= table[RESIDENTS]:
                return
            evicted = _victim(table, memory, _HELD)
        if memory is not None:
            value_A, near_L, _ = _arrays(table)
            if value_A[key] * near_L[layer] <= value_A[evicted] * near_L[evicted // stride]:
                if not table[BY_LAYER]:
                    carray(pointer(table[ORDER_M]), (RANKED,), np.int64)[table[ORDER]] = evicted
                    table[ORDER] += 1
                return
        _give_up(table, memory, evicted)
    held_A[key] |= _WANTED
    slot = _place(table, memory, layer, key, True)
    _step(table, layer, AHEAD, key, slot, evicted)
    _count(table, PREFETCH_LOADS, _ONE)
    splits.note(split, key, evicted)


@_inlined
def _admit_hosted(table, memory, split, layer, hosted):  # type: ignore[no-untyped-def]
    """Admit experts that the host has computed, the most worthy first, while the link takes them."""
    stride = table[EXPERTS]
    host_E = carray(pointer(table[NEEDED_E]), (4, stride), np.int32)[3]
    worth_E = carray(pointer(table[WORTH_E]), (stride,), np.float32)
    for _ in range(hosted):
        if not splits.admits(split, table[ROOM] >= 1):
            return
        best = -1
        for at in range(hosted):
            if host_E[at] >= 0 and (best < 0 or worth_E[at] > worth_E[best]):
                best = at
        key = np.int64(host_E[best])
        host_E[best] = -1
        _admit(table, memory, split, layer, key)


@_inlined
def _gate(table, memory, layer, routes, stride_of_row, width, num_needed):  # type: ignore[no-untyped-def]
    """`Policy.gate` of foresight."""
    row_R3, path_TP = _batch(table, memory)
    column_L = carray(pointer(table[COLUMN_L]), (layer + 2,), np.int64)
    first = column_L[layer]
    width = min(width, column_L[layer + 1] - first)
    for token in range(table[ROWS]):
        for column in range(width):
            path_TP[token, first + column] = routes[token * stride_of_row + column]
    tokens.observe(memory, row_R3, path_TP, layer, (first, first + width))
    carray(pointer(table[VALUED_L]), (table[LAYERS],), np.uint8)[:] = 0
    table[SEEN] += 1
    table[VALUE_AGE] += 1
    table[CROWDED] = num_needed * table[LAYERS] > table[EVENT_SLOTS]
    table[ORDER] = 0


@_inlined
def _run(table, memory, split, layer, address, row, width):  # type: ignore[no-untyped-def]
    """Append the program of an event to the steps; arguments as `ROUTES`, `STRIDE` and `WIDTH`."""
    stride, base = table[EXPERTS], layer * table[EXPERTS]
    num, slot_A, held_A = _keys(table)
    num_tokens = table[TOKENS]
    routes = carray(pointer(address), ((num_tokens - 1) * row + width,), np.int32)
    unused_A = carray(pointer(table[UNUSED_A]), (num,), np.bool_)
    table[LAYER] = layer
    # Needed experts in ascending order: residents first in `queue_E`, which is computed in order; then the misses.
    queue_E, miss_E, token_E, _ = carray(pointer(table[NEEDED_E]), (4, stride), np.int32)
    token_E[:] = 0
    for token in range(num_tokens):
        for column in range(width):
            token_E[routes[token * row + column]] += 1
    queued, misses, hosted, ahead = 0, 0, 0, 0
    for expert in range(stride):
        if token_E[expert]:
            key = base + expert
            if slot_A[key] >= 0:
                queue_E[queued] = key
                queued += 1
                held_A[key] |= _LOCKED
                if unused_A[key]:
                    unused_A[key] = False
                    ahead += 1
            else:
                miss_E[misses] = key
                misses += 1
    _count(table, KEPT, queued - ahead)
    _count(table, PREFETCHED, ahead)
    table[MISSES] = misses
    if memory is None:
        for at in range(queued):
            if table[KIND] == LRU:
                _unlink(table, num, np.int64(queue_E[at]))
            _use(table, num, np.int64(queue_E[at]))
        if table[KIND] == LFU or table[KIND] == FORGETFUL_LFU:
            for at in range(misses):
                _use(table, num, np.int64(miss_E[at]))
    else:
        _gate(table, memory, layer, routes, row, width, queued + misses)
    if split is not None and table[SPLIT]:
        hosted = _host(table, memory, split, layer, queued, misses)
        misses -= hosted
    _count(table, MISSED, misses)

    by_layer, locked, loaded, computed = table[BY_LAYER], queued, 0, 0
    key_E = carray(pointer(table[KEY_E]), (stride,), np.int64)
    expected, asked = _NOBODY, np.int64(0)
    while loaded < misses or computed < queued:
        while loaded < misses:
            evicted = _NOBODY
            if table[ROOM] < 1 and by_layer:
                evicted = _victim_among(table, memory, _LOCKED, layer)
                if evicted < 0:
                    break
            elif locked + 1 > table[CAPACITY]:
                break  # full of experts that are still to be computed
            elif table[ROOM] < 1:
                evicted = _victim(table, memory, _LOCKED)
            if evicted >= 0:
                _give_up(table, memory, evicted)
            key = np.int64(miss_E[loaded])
            loaded += 1
            slot = _place(table, memory, layer, key, False)
            _step(table, layer, LOAD, key, slot, evicted)
            held_A[key] |= _LOCKED
            locked += 1
            queue_E[queued] = key
            queued += 1
        key = np.int64(queue_E[computed])
        computed += 1
        _step(table, layer, COMPUTE, key, np.int64(slot_A[key]), _NOBODY)
        held_A[key] &= _WANTED
        locked -= 1
        if memory is not None:
            if expected < 0:
                expected = _expect(table, memory, layer)
            if asked < expected and loaded == misses:
                asked = _prefetch(table, memory, split, layer, locked, key_E, asked, expected)
    if expected < 0:  # the host computes every expert
        expected = _expect(table, memory, layer)
        if expected > 0:
            _prefetch(table, memory, split, layer, locked, key_E, asked, expected)
    if split is not None and hosted:
        _admit_hosted(table, memory, split, layer, hosted)
    if expected > 0 or hosted:
        held_A[base : base + 2 * stride] = 0


def _entries(stamp: int) -> tuple[Any, ...]:
    """Compile the functions that Python calls; the result is kept on disk.

    Args:
        stamp: identifies the source of `token_kernels` and `split_kernels`. numba compiles anew when a closure's value
            changes; the source of functions that it inlines from other files does not count.

    Raises:
        RuntimeError: there is no folder to keep the result in, and compiling takes longer than a small replay.
    """

    def run(table, memory, split):  # type: ignore[no-untyped-def]
        table[STAMP], table[STEPS] = stamp, 0
        first, stop = table[LAYER], table[STOP]
        column_L = carray(pointer(table[COLUMN_L]), (stop + 1,), np.int64)
        for layer in range(first, stop):
            width = table[WIDTH] if stop - first == 1 else column_L[layer + 1] - column_L[layer]
            routes = table[ROUTES] + 4 * (column_L[layer] - column_L[first])
            _run(table, memory, split, layer, routes, table[STRIDE], width)
        return table[STEPS]

    def place(table, memory, key, prefetched):  # type: ignore[no-untyped-def]
        table[STAMP] = stamp
        return _place(table, memory, key // table[EXPERTS], key, prefetched)

    def give_up(table, memory, key):  # type: ignore[no-untyped-def]
        table[STAMP] = stamp
        if key < 0:
            key = _victim_among(table, memory, _FREE, _NOBODY) if table[BY_LAYER] else _victim(table, memory, _FREE)
        _give_up(table, memory, key)

    def choose(split, single, token_E, hit_N, miss_N, worth_N, host_N):  # type: ignore[no-untyped-def]
        split[splits.STAMP] = stamp
        return splits.choose(split, single, token_E, hit_N, miss_N, worth_N, host_N)

    def note(split, key, evicted):  # type: ignore[no-untyped-def]
        split[splits.STAMP] = stamp
        splits.note(split, key, evicted)

    entries = (run, place, give_up, choose, note)
    return tuple(numba.njit(cache=True, error_model="numpy")(entry) for entry in entries)


_source = Path(tokens.__file__).read_bytes() + Path(splits.__file__).read_bytes()
run, place, give_up, choose, note = _entries(int.from_bytes(hashlib.blake2b(_source, digest_size=7).digest()))
"""Each takes a table and foresight's memory (None: without), `run` also the table of a split of misses (None: without,
and its code is not compiled). `run` runs the events of some layers and returns the number of their steps. Between
events, `place` gives an expert a free slot and returns it, and `give_up` evicts an expert (-1: the policy's choice).
`choose` and `note` are those of a split alone."""


@line_if_slow(COMPILING)
def compile_for(memory: np.ndarray | None, split: np.ndarray | None) -> None:
    """Compile `run` for a policy, so that no request waits for it; say so if it takes long."""
    run.compile(tuple(numba.typeof(table) for table in (np.zeros(1, np.int64), memory, split)))


@line_if_slow(COMPILING)
def compile_split() -> None:
    """Compile `choose` and `note` for the arguments of Python."""
    table, worth, num = numba.typeof(np.zeros(1, np.int64)), numba.typeof(np.zeros(1)), numba.int64
    choose.compile((table, numba.boolean, table, table, table, worth, table))
    note.compile((table, num, num))
