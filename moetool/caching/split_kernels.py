"""Compiled split of an event's misses between link and host, with the decisions of `moetool.caching.machine_split`.

A split is one `split` table of int64: sizes and state, then addresses (`CompiledSplit` fills it). Sums are in the order
of the Python code, so that decisions are bit-identical. All arrays are C-contiguous, and nothing checks bounds.

Shapes:
    A  experts of the model, by key     N  misses of the event, those to load first     Q  transfers of the link
"""

from typing import Any

import numba
import numpy as np
from numba import carray

from moetool.prediction.token_kernels import pointer

BOTH, IN_MEMORY, HOST_KNOTS, DEVICE_KNOTS, KEYS, EXPERTS, QUEUED, HELD = range(8)
"""Whether some misses are loaded, experts that host memory holds (-1: all), numbers of knots, A, experts of a layer;
state: transfers in the queue, experts in host memory now."""
COST_8, HOST_K2, DEVICE_K2, KEY_Q, LEFT_Q, QUEUED_A, NEXT_A, LAST_A = range(8, 16)
"""Addresses of float64 costs, float64 knots, int64 keys and float64 seconds of the queue, uint8 marks of the queued,
int32 next and last expert in host memory by its last read, with a sentinel at A (next -1: not in memory)."""
WORK_3, FLOAT_3N, INT_4N, MARK_3N, SIDE_22N = range(16, 21)
"""Scratch: float64 seconds of residents, of transfers before the misses and of those after; rows by miss (`_rows`); and
float64 starts and seconds of the work of both sides."""
STAMP, TABLE_SIZE = 21, 22
"""Place of the stamp of the source (`moetool.caching.event_kernels`), and the size of a table."""
LOAD_S, HOST_S, DEVICE_S, LAYER_S, START_S, LINK_SHARE, HOST_SHARE, DISK_S = range(8)
"""Places of `moetool.caching.machine_split.SplitCosts` in COST_8."""
FEW, FEW_WITH_READS, MOST_QUEUED = 10, 8, 2  # as in `moetool.caching.machine_split`


def _inlined(loop: Any) -> Any:
    """Compile as part of the functions that call it."""
    return numba.njit(error_model="numpy")(loop)


@_inlined
def _costs(split):  # type: ignore[no-untyped-def]
    return carray(pointer(split[COST_8]), (8,), np.float64)


@_inlined
def _rows(split):  # type: ignore[no-untyped-def]
    """Return the scratch: seconds on the host, on the device and until in memory; places of misses not on disk, of
    those on disk, of all as they get into memory, and keys; marks: loaded, tried as loaded, on disk."""
    num = split[EXPERTS]
    float_3N = carray(pointer(split[FLOAT_3N]), (3, num), np.float64)
    int_4N = carray(pointer(split[INT_4N]), (4, num), np.int64)
    return float_3N, int_4N, carray(pointer(split[MARK_3N]), (3, num), np.uint8)


@_inlined
def _seconds(tokens, one_s, knots, address):  # type: ignore[no-untyped-def]
    if tokens == 1 or knots == 0:
        return one_s
    knot_K2 = carray(pointer(address), (knots, 2), np.float64)
    left, left_s, at = 1.0, one_s, 0
    while at + 1 < knots and knot_K2[at, 0] < tokens:
        left, left_s = knot_K2[at, 0], knot_K2[at, 1]
        at += 1
    return max(0.0, left_s + (knot_K2[at, 1] - left_s) * (tokens - left) / (knot_K2[at, 0] - left))


@_inlined
def _together(cost_8, link_s, host_s):  # type: ignore[no-untyped-def]
    link, host = link_s / cost_8[LINK_SHARE], host_s / cost_8[HOST_SHARE]
    if link <= host:
        return link, link + host_s - link * cost_8[HOST_SHARE]
    return host + link_s - host * cost_8[LINK_SHARE], host


@_inlined
def _ends(split, link_s, host_s, device_s):  # type: ignore[no-untyped-def]
    """`EventWork._ends`."""
    cost_8, waiting_s = _costs(split), carray(pointer(split[WORK_3]), (3,), np.float64)[2]
    arrived, host_end = link_s, 0.0
    if host_s:
        arrived, host_end = _together(cost_8, link_s, host_s + cost_8[START_S])
        if waiting_s:
            host_end = _together(cost_8, link_s + waiting_s, host_s + cost_8[START_S])[1]
    return max(device_s, arrived + cost_8[DEVICE_S] if link_s else 0.0, host_end), host_end


@_inlined
def _ends_of(split, num, on_disk, loaded_N):  # type: ignore[no-untyped-def]
    """`EventWork.ends` of the misses that are marked as loaded."""
    float_3N, _, _ = _rows(split)
    resident_s, before_s, _ = carray(pointer(split[WORK_3]), (3,), np.float64)
    host_s, device_s, loads = 0.0, 0.0, 0
    for i in range(num):
        if loaded_N[i]:
            device_s += float_3N[1, i]
            loads += 1
        else:
            host_s += float_3N[0, i]
    device_s = resident_s + device_s
    if not on_disk:
        return _ends(split, before_s + _costs(split)[LOAD_S] * loads, host_s, device_s)
    return _ends_with_reads(split, num, loaded_N, device_s)


@_inlined
def _ends_with_reads(split, num, loaded_N, device_s):  # type: ignore[no-untyped-def]
    """`EventWork._ends_with_reads`."""
    cost_8 = _costs(split)
    float_3N, int_4N, _ = _rows(split)
    before_s = carray(pointer(split[WORK_3]), (3,), np.float64)[1]
    work_22N = carray(pointer(split[SIDE_22N]), (2, 2, split[EXPERTS] + 1), np.float64)
    first, last, ends, rate = np.zeros(2, np.int64), np.zeros(2, np.int64), np.zeros(2), np.ones(2)
    work_22N[0, 0, 0], work_22N[0, 1, 0], last[0] = 0.0, before_s, 1
    loads = 0
    for at in range(num):
        i = int_4N[2, at]
        side = 0 if loaded_N[i] else 1
        loads += 1 - side
        if side == 1 and last[1] == 0:
            work_22N[1, 0, 0], work_22N[1, 1, 0], last[1] = 0.0, cost_8[START_S], 1
        work_22N[side, 0, last[side]] = float_3N[2, i]
        work_22N[side, 1, last[side]] = float_3N[0, i] if side else cost_8[LOAD_S]
        last[side] += 1
    now = 0.0
    while first[0] < last[0] or first[1] < last[1]:
        together = True
        for side in range(2):
            together = together and first[side] < last[side] and work_22N[side, 0, first[side]] <= now
        rate[0], rate[1] = (cost_8[LINK_SHARE], cost_8[HOST_SHARE]) if together else (1.0, 1.0)
        passed = np.inf
        for side in range(2):
            if first[side] < last[side]:
                at_s, left_s = work_22N[side, 0, first[side]], work_22N[side, 1, first[side]]
                passed = min(passed, left_s / rate[side] if at_s <= now else at_s - now)
        for side in range(2):
            if first[side] < last[side] and work_22N[side, 0, first[side]] <= now:
                left_s = work_22N[side, 1, first[side]]
                if left_s / rate[side] > passed:
                    work_22N[side, 1, first[side]] = left_s - passed * rate[side]
                else:
                    ends[side] = now + passed
                    first[side] += 1
        now += passed
    arrived = ends[0] + cost_8[DEVICE_S] if loads or before_s else 0.0
    return max(device_s, arrived, ends[1]), ends[1]


@_inlined
def _load_from_disk(split, on_disk, link_s, host_s, link_share, host_share, loaded_N):  # type: ignore[no-untyped-def]
    """`EventWork._loaded_from_disk`: mark the experts on disk that the link would finish first."""
    cost_8, read_s = _costs(split), 0.0
    float_3N, int_4N, _ = _rows(split)
    compares = link_share > 0.0 and host_share > 0.0
    if compares:
        link_s, host_s = link_s / link_share, (host_s + cost_8[START_S]) / host_share
    for at in range(on_disk):
        i = int_4N[1, at]
        loads = link_share > 0.0
        if compares:
            read_s += cost_8[DISK_S]
            by_link, by_host = max(link_s, read_s) + cost_8[LOAD_S], max(host_s, read_s) + float_3N[0, i]
            loads = by_link <= by_host
            link_s, host_s = (by_link, host_s) if loads else (link_s, by_host)
        loaded_N[i] = loads


@_inlined
def _try_all(split, num, on_disk, best_N, trial_N, least):  # type: ignore[no-untyped-def]
    """`EventWork._best`."""
    float_3N, _, _ = _rows(split)
    resident_s, before_s, _ = carray(pointer(split[WORK_3]), (3,), np.float64)
    for number in range(1 << num):
        host_s, device_s, loads = 0.0, 0.0, 0
        for i in range(num):
            trial_N[i] = number >> i & 1
            if trial_N[i]:
                device_s += float_3N[1, i]
                loads += 1
            else:
                host_s += float_3N[0, i]
        if max(before_s + _costs(split)[LOAD_S] * loads, host_s, resident_s + device_s) < least:
            end = _ends_of(split, num, on_disk, trial_N)[0]
            if end < least:
                best_N[:num], least = trial_N[:num], end


@_inlined
def _load(split, num, on_disk):  # type: ignore[no-untyped-def]
    """`EventWork.loaded`, as marks [N]. Args: on_disk: number of misses on disk."""
    cost_8 = _costs(split)
    float_3N, int_4N, mark_3N = _rows(split)
    best_N, trial_N = mark_3N[0], mark_3N[1]
    device_s, link_s, _ = carray(pointer(split[WORK_3]), (3,), np.float64)
    here, resident_s, host_s, least, device_ends = num - on_disk, device_s, 0.0, np.inf, False
    for at in range(here):
        host_s += float_3N[0, int_4N[0, at]]
    best_N[:num] = 0
    for count in range(here + 1):
        if count:
            link_s += cost_8[LOAD_S]
            host_s -= float_3N[0, int_4N[0, count - 1]]
            device_s += float_3N[1, int_4N[0, count - 1]]
        if on_disk:
            for number in range(4):
                link_share = cost_8[LINK_SHARE] if number == 1 else 0.0 if number == 2 else 1.0
                host_share = cost_8[HOST_SHARE] if number == 1 else 0.0 if number == 3 else 1.0
                for at in range(here):
                    trial_N[int_4N[0, at]] = at < count
                _load_from_disk(split, on_disk, link_s, host_s, link_share, host_share, trial_N)
                end = _ends_of(split, num, on_disk, trial_N)[0]
                if end <= least:
                    best_N[:num], least = trial_N[:num], end
            continue
        end = _ends(split, link_s, host_s if count < here else 0.0, device_s)[0]
        if end <= least:
            for i in range(num):
                best_N[i] = i < count
            least = end
        if count and end <= device_s:
            device_ends = True
            first, last = 0, count
            while first < last:  # `EventWork._for_device`
                middle = (first + last) // 2
                loaded_s = 0.0
                for i in range(num):
                    trial_N[i] = i < middle or i >= num - count + middle
                    if trial_N[i]:
                        loaded_s += float_3N[1, i]
                end = _ends_of(split, num, on_disk, trial_N)[0]
                if end < least:
                    best_N[:num], least = trial_N[:num], end
                if resident_s + loaded_s < end:
                    first = middle + 1
                else:
                    last = middle
    if num <= (FEW_WITH_READS if on_disk else FEW if device_ends else 0):
        _try_all(split, num, on_disk, best_N, trial_N, least)
    return best_N


@_inlined
def _queue(split):  # type: ignore[no-untyped-def]
    """Return the link's queue: keys, seconds, and marks by key."""
    num = split[KEYS]
    key_Q = carray(pointer(split[KEY_Q]), (num,), np.int64)
    left_Q = carray(pointer(split[LEFT_Q]), (num,), np.float64)
    return key_Q, left_Q, carray(pointer(split[QUEUED_A]), (num,), np.uint8)


@_inlined
def _leave(split, place):  # type: ignore[no-untyped-def]
    """Take a transfer out of the queue."""
    key_Q, left_Q, queued_A = _queue(split)
    queued_A[key_Q[place]] = 0
    split[QUEUED] -= 1
    for at in range(place, split[QUEUED]):
        key_Q[at], left_Q[at] = key_Q[at + 1], left_Q[at + 1]


@_inlined
def _find(split, key):  # type: ignore[no-untyped-def]
    """Return the place of a queued key."""
    key_Q, _, _ = _queue(split)
    place = 0
    while key_Q[place] != key:
        place += 1
    return place


@_inlined
def _append(split, key):  # type: ignore[no-untyped-def]
    """Queue a transfer, or begin it anew in its place."""
    key_Q, left_Q, queued_A = _queue(split)
    place = split[QUEUED]
    if queued_A[key]:
        place = _find(split, key)
    else:
        split[QUEUED] += 1
        queued_A[key] = 1
    key_Q[place], left_Q[place] = key, _costs(split)[LOAD_S]


@_inlined
def _advance(split, seconds, host_s):  # type: ignore[no-untyped-def]
    """`MachineSplit._advance`."""
    _, left_Q, _ = _queue(split)
    left = seconds - min(host_s, seconds) * (1 - _costs(split)[LINK_SHARE])
    while split[QUEUED] and left > 0:
        if left_Q[0] > left:
            left_Q[0] = left_Q[0] - left
            return
        left -= left_Q[0]
        _leave(split, 0)


@_inlined
def _hold(split, key):  # type: ignore[no-untyped-def]
    """Note that host memory has read an expert now."""
    num = split[KEYS]
    next_A = carray(pointer(split[NEXT_A]), (num + 1,), np.int32)
    last_A = carray(pointer(split[LAST_A]), (num + 1,), np.int32)
    if next_A[key] >= 0:
        next_A[last_A[key]], last_A[next_A[key]] = next_A[key], last_A[key]
    else:
        split[HELD] += 1
    last = last_A[num]
    next_A[last], last_A[key], next_A[key], last_A[num] = key, last, num, key


@_inlined
def _drop(split):  # type: ignore[no-untyped-def]
    """Drop the experts that host memory has no room for."""
    num = split[KEYS]
    next_A = carray(pointer(split[NEXT_A]), (num + 1,), np.int32)
    last_A = carray(pointer(split[LAST_A]), (num + 1,), np.int32)
    while split[HELD] > split[IN_MEMORY]:
        key = next_A[num]
        next_A[num], last_A[next_A[key]] = next_A[key], num
        next_A[key] = -1
        split[HELD] -= 1


@_inlined
def note(split, key, evicted):  # type: ignore[no-untyped-def]
    """`MachineSplit.note` of one prefetch."""
    key_Q, _, queued_A = _queue(split)
    if evicted >= 0 and queued_A[evicted] and key_Q[0] != evicted:
        _leave(split, _find(split, evicted))
    _append(split, key)
    if split[IN_MEMORY] >= 0:
        _hold(split, key)
        _drop(split)


@_inlined
def admits(split, free):  # type: ignore[no-untyped-def]
    """`MachineSplit.admits`."""
    return free or split[QUEUED] <= MOST_QUEUED


@_inlined
def choose(split, single, token_E, hit_N, miss_N, worth_N, host_N):  # type: ignore[no-untyped-def]
    """`MachineSplit.choose`: write the misses that the host computes, in ascending order; return their number.

    Args:
        single: whether the event has one token.
        hit_N, miss_N: keys of residents and misses, in ascending order.
        worth_N: worth of each miss.
    """
    cost_8, stride, num = _costs(split), split[EXPERTS], len(miss_N)
    float_3N, int_4N, mark_3N = _rows(split)
    key_Q, left_Q, queued_A = _queue(split)
    _advance(split, cost_8[LAYER_S], 0.0)
    # Ranks of misses: most tokens first, then the most worthy.
    order_N = int_4N[0]
    for i in range(num):
        at = i
        tokens = np.int64(1) if single else np.int64(token_E[miss_N[i] % stride])
        while at > 0:
            other = order_N[at - 1]
            others = np.int64(1) if single else np.int64(token_E[miss_N[other] % stride])
            if tokens < others or (tokens == others and worth_N[i] <= worth_N[other]):
                break
            order_N[at] = other
            at -= 1
        order_N[at] = i
    ranked_N = int_4N[3]
    for i in range(num):
        ranked_N[i] = miss_N[order_N[i]]
    resident_s = cost_8[DEVICE_S] * len(hit_N)
    if not single:
        resident_s = 0.0
        for key in hit_N:
            resident_s += _seconds(token_E[key % stride], cost_8[DEVICE_S], split[DEVICE_KNOTS], split[DEVICE_K2])
    on_disk, read_s, cold_N = 0, 0.0, mark_3N[2]
    for i in range(num):
        tokens = np.int64(1) if single else np.int64(token_E[ranked_N[i] % stride])
        float_3N[0, i] = _seconds(tokens, cost_8[HOST_S], split[HOST_KNOTS], split[HOST_K2])
        float_3N[1, i] = _seconds(tokens, cost_8[DEVICE_S], split[DEVICE_KNOTS], split[DEVICE_K2])
        cold_N[i] = 0
        if split[IN_MEMORY] >= 0:
            cold_N[i] = carray(pointer(split[NEXT_A]), (split[KEYS],), np.int32)[ranked_N[i]] < 0
            on_disk += cold_N[i]
    if split[IN_MEMORY] >= 0:
        for i in range(num):
            _hold(split, ranked_N[i])
        _drop(split)
    queued, late = split[QUEUED], 0
    running = key_Q[0] if queued else np.int64(-1)
    for i in range(len(hit_N)):
        late += queued_A[hit_N[i]] and hit_N[i] != running
    work_3 = carray(pointer(split[WORK_3]), (3,), np.float64)
    work_3[0], work_3[1] = resident_s, (left_Q[0] if queued else 0.0) + cost_8[LOAD_S] * late
    work_3[2] = cost_8[LOAD_S] * max(0, queued - late - 1)
    here, cold = 0, 0
    for i in range(num):
        if cold_N[i]:
            read_s += cost_8[DISK_S]
        float_3N[2, i] = read_s if cold_N[i] else 0.0
        if cold_N[i]:
            int_4N[1, cold] = i
            cold += 1
        else:
            int_4N[0, here] = i
            here += 1
    for i in range(num):  # those on disk come later, unless reads take no time
        at = i
        while at > 0 and float_3N[2, int_4N[2, at - 1]] > float_3N[2, i]:
            int_4N[2, at] = int_4N[2, at - 1]
            at -= 1
        int_4N[2, at] = i
    best_N = mark_3N[0]
    best_N[:num] = 0
    if split[BOTH]:
        _load(split, num, on_disk)
    _queue_loads(split, hit_N, ranked_N[:num], best_N)
    end, host_end = _ends_of(split, num, on_disk, best_N)
    _advance(split, end, host_end)
    hosted = 0
    for i in range(num):
        if not best_N[i]:
            place = hosted
            while place > 0 and host_N[place - 1] > ranked_N[i]:
                host_N[place] = host_N[place - 1]
                place -= 1
            host_N[place] = ranked_N[i]
            hosted += 1
    return hosted


@_inlined
def _queue_loads(split, hit_N, key_N, loaded_N):  # type: ignore[no-untyped-def]
    """Queue loads behind the running transfer and late prefetches, before those that wait."""
    key_Q, left_Q, queued_A = _queue(split)
    waiting = split[QUEUED]
    for i in range(len(key_N)):
        if loaded_N[i]:
            _append(split, key_N[i])
    moved, at = 0, 1
    while at + moved < waiting:
        key, late = key_Q[at], False
        for hit in hit_N:
            late = late or hit == key
        if late:
            at += 1
            continue
        left_s = left_Q[at]
        _leave(split, at)
        queued_A[key] = 1
        key_Q[split[QUEUED]], left_Q[split[QUEUED]] = key, left_s
        split[QUEUED] += 1
        moved += 1
