"""Small operations on numbers at addresses: everything in a layer but products, norms, gates and attention.

Each takes one job of int64 and runs on the calling thread. Numbers are computed in float32 and rounded to the type of
the output, as torch computes bfloat16. numba is imported with this module, and keeps what it compiled on disk.
"""

from typing import Any

import numba
import numpy as np
from numba import types

from moetool.kernels.cpu.memory import (
    BFLOAT16,
    FLOAT32,
    INT64,
    called,
    called_on_threads,
    dot_bfloat16,
    dot_float32,
    floats,
    fused,
    longs,
    octets,
    ordered_by,
    power_of_two,
    rounded,
    shorts,
    widened,
)
from moetool.kernels.cpu.threads import next_task_of

CHUNK = 512
"""Most numbers of a row that are computed together, unless an operation needs whole rows."""
TABLE = 6
"""Numbers of an expert in a table."""
OPERAND = 6
"""Numbers of an operand in a job: address, type, and bytes between neighbours in four dimensions."""
(COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE, NEGATE, SQUARE, INVERSE_ROOT, SIGMOID, SILU, NOT, CLAMP, FILL) = range(13)
"""Functions of numbers."""
SUM, MEAN, SOFTMAX, TOP_K = range(13, 17)
"""Functions of rows."""
_job = types.void(types.CPointer(types.int64))
_compiled = numba.cfunc(_job, nopython=True, error_model="numpy", cache=True)
_inner = numba.njit(error_model="numpy", cache=True)
_next_task = next_task_of()


@_inner
def _read(address: Any, kind: Any, step: Any, count: Any, numbers: Any) -> None:
    """Read numbers with a distance in bytes as float32."""
    if kind == BFLOAT16:
        if step == 2:
            shorts_at = shorts(address)
            for i in range(count):
                numbers[i] = widened(shorts_at[i])
        else:
            for i in range(count):
                numbers[i] = widened(shorts(address + i * step)[0])
    elif kind == FLOAT32:
        if step == 4:
            floats_at = floats(address)
            for i in range(count):
                numbers[i] = floats_at[i]
        else:
            for i in range(count):
                numbers[i] = floats(address + i * step)[0]
    elif kind == INT64:
        for i in range(count):
            numbers[i] = np.float32(longs(address + i * step)[0])
    else:
        for i in range(count):
            numbers[i] = np.float32(octets(address + i * step)[0])


@_inner
def _write(address: Any, kind: Any, step: Any, count: Any, numbers: Any) -> None:
    if kind == BFLOAT16:
        if step == 2:
            shorts_at = shorts(address)
            for i in range(count):
                shorts_at[i] = rounded(numbers[i])
        else:
            for i in range(count):
                shorts(address + i * step)[0] = rounded(numbers[i])
    elif kind == FLOAT32:
        if step == 4:
            floats_at = floats(address)
            for i in range(count):
                floats_at[i] = numbers[i]
        else:
            for i in range(count):
                floats(address + i * step)[0] = numbers[i]
    elif kind == INT64:
        for i in range(count):
            longs(address + i * step)[0] = np.int64(numbers[i])
    else:
        for i in range(count):
            octets(address + i * step)[0] = np.uint8(numbers[i] != 0)


@_inner
def _exponential(x: Any) -> Any:
    """exp(x) within 1 ulp, by the polynomial of SLEEF, which torch uses; 0 below -87, infinity above 88."""
    given = x
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(x * np.float32(1.442695040888963407359924681) + np.float32(0.5))
    rest = fused(whole, np.float32(-0.693145751953125), x)
    rest = fused(whole, np.float32(-1.428606765330187045e-06), rest)
    u = np.float32(0.000198527617612853646278381)
    u = fused(u, rest, np.float32(0.00139304355252534151077271))
    u = fused(u, rest, np.float32(0.00833336077630519866943359))
    u = fused(u, rest, np.float32(0.0416664853692054748535156))
    u = fused(u, rest, np.float32(0.166666671633720397949219))
    u = fused(u, rest, np.float32(0.5))
    u = np.float32(1.0) + fused(rest * rest, u, rest)
    made = u * power_of_two(np.int32(whole))
    made = np.float32(0.0) if given < np.float32(-87.0) else made
    made = np.float32(np.inf) if given > np.float32(88.0) else made
    return made if given == given else given


@_inner
def _apply(code: Any, count: Any, a: Any, b: Any, c: Any, made: Any) -> None:
    one = np.float32(1.0)
    if code == COPY:
        for i in range(count):
            made[i] = a[i]
    elif code == ADD:
        for i in range(count):
            made[i] = a[i] + b[i]
    elif code == SUBTRACT:
        for i in range(count):
            made[i] = a[i] - b[i]
    elif code == MULTIPLY:
        for i in range(count):
            made[i] = a[i] * b[i]
    elif code == DIVIDE:
        for i in range(count):
            made[i] = a[i] / b[i]
    elif code == NEGATE:
        for i in range(count):
            made[i] = -a[i]
    elif code == SQUARE:
        for i in range(count):
            made[i] = a[i] * a[i]
    elif code == INVERSE_ROOT:
        for i in range(count):
            made[i] = one / np.sqrt(a[i])
    elif code == SIGMOID:
        for i in range(count):
            made[i] = one / (one + _exponential(-a[i]))
    elif code == SILU:
        for i in range(count):
            made[i] = a[i] / (one + _exponential(-a[i]))
    elif code == NOT:
        for i in range(count):
            made[i] = one - a[i]
    elif code == CLAMP:
        for i in range(count):
            made[i] = c[i] if a[i] > c[i] else (b[i] if a[i] < b[i] else a[i])
    else:
        for i in range(count):
            made[i] = c[i] if b[i] != 0 else a[i]


@_inner
def _of_row(code: Any, count: Any, numbers: Any, made: Any) -> Any:
    """A function of a whole row; returns the number of its results. Sums are those of float64, rounded once."""
    total = 0.0
    if code == SOFTMAX:
        greatest = numbers[0]
        for i in range(count):
            greatest = max(greatest, numbers[i])
        for i in range(count):
            made[i] = _exponential(numbers[i] - greatest)
        for i in range(count):
            total += np.float64(made[i])
        divisor = np.float32(total)
        for i in range(count):
            made[i] = made[i] / divisor
        return count
    for i in range(count):
        total += np.float64(numbers[i])
    made[0] = np.float32(total if code == SUM else total / count)
    return 1


@_inner
def _top_of_row(k: Any, count: Any, numbers: Any, made: Any, indices: Any, step: Any) -> None:
    """The greatest numbers in falling order, of equal ones the first; of a row without numbers, any."""
    for rank in range(k):
        best = -1
        for i in range(count):
            if numbers[i] == numbers[i] and (best < 0 or numbers[i] > numbers[best]):
                best = i
        best = max(best, 0)
        made[rank] = numbers[best]
        longs(indices + rank * step)[0] = best
        numbers[best] = np.float32(np.nan)


@_compiled
def operate(job: Any) -> None:
    """Compute row by row a function of numbers, or of whole rows.

    Job: -, code, inputs, scratch, numbers at a time, k, four sizes, output, inputs. Indices of a top-k follow the one
    input. Scratch has room for four times the numbers at a time.
    """
    code, inputs, room, chunk = job[1], job[2], job[3], job[4]
    a, b, c, made = floats(room), floats(room + 4 * chunk), floats(room + 8 * chunk), floats(room + 12 * chunk)
    for n0 in range(job[6]):
        for n1 in range(job[7]):
            for n2 in range(job[8]):
                for first in range(0, job[9], chunk):
                    count = min(chunk, job[9] - first)
                    for each in range(inputs):
                        at = 10 + OPERAND * (1 + each)
                        place = job[at] + n0 * job[at + 2] + n1 * job[at + 3] + n2 * job[at + 4] + first * job[at + 5]
                        _read(place, job[at + 1], job[at + 5], count, floats(room + 4 * chunk * each))
                    if code < SUM:
                        _apply(code, count, a, b, c, made)
                    elif code < TOP_K:
                        count = _of_row(code, count, a, made)
                    else:
                        indices = job[22] + n0 * job[24] + n1 * job[25] + n2 * job[26]
                        _top_of_row(job[5], count, a, made, indices, job[27])
                        count = job[5]
                    place = job[10] + n0 * job[12] + n1 * job[13] + n2 * job[14] + first * job[15]
                    _write(place, job[11], job[15], count, made)


@_compiled
def gather(job: Any) -> None:
    """Numbers of the last dimension by index, or to it. Job: -, to it, bytes of a number, -, -, -, as of `operate`.

    Operands: output, input, indices. To the last dimension of the output, one number is written.
    """
    for n0 in range(job[6]):
        for n1 in range(job[7]):
            for n2 in range(job[8]):
                for n3 in range(job[9]):
                    index = longs(job[22] + n0 * job[24] + n1 * job[25] + n2 * job[26] + n3 * job[27])[0]
                    source = job[16] + n0 * job[18] + n1 * job[19] + n2 * job[20] + (0 if job[1] else index) * job[21]
                    target = job[10] + n0 * job[12] + n1 * job[13] + n2 * job[14] + (index if job[1] else n3) * job[15]
                    old, new = octets(source), octets(target)
                    for i in range(job[2]):
                        new[i] = old[i]


@_compiled
def complex_product(job: Any) -> None:
    """Products of complex numbers, each two float32. Job: -, -, -, -, -, -, as of `operate`."""
    for n0 in range(job[6]):
        for n1 in range(job[7]):
            for n2 in range(job[8]):
                for n3 in range(job[9]):
                    x = floats(job[16] + n0 * job[18] + n1 * job[19] + n2 * job[20] + n3 * job[21])
                    y = floats(job[22] + n0 * job[24] + n1 * job[25] + n2 * job[26] + n3 * job[27])
                    z = floats(job[10] + n0 * job[12] + n1 * job[13] + n2 * job[14] + n3 * job[15])
                    real, imaginary = x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]
                    z[0], z[1] = real, imaginary


@_compiled
def small_linear(job: Any) -> None:
    """Products of rows with a weight of any shape, in float32.

    Job: -, rows, inputs, outputs, x, weight, whether it is in bfloat16, output.
    """
    inputs, outputs, narrow = job[2], job[3], job[6]
    vectors = inputs // 16
    size = 2 if narrow else 4
    for row in range(job[1]):
        x = job[4] + 4 * row * inputs
        for n in range(outputs):
            place = job[5] + n * inputs * size
            total = dot_bfloat16(x, place, vectors) if narrow else dot_float32(x, place, vectors)
            for i in range(16 * vectors, inputs):
                other = widened(shorts(place)[i]) if narrow else floats(place)[i]
                total = fused(floats(x)[i], other, total)
            floats(job[7])[row * outputs + n] = total


@_compiled
def order(job: Any) -> None:
    """Order rows for a kernel of products. Job: -, function, x, ordered, blocks."""
    ordered_by(job[1], job[2], job[3], job[4])


@_compiled
def write_pages(job: Any) -> None:
    """Write new keys and values into the KV cache, and make its addresses known to the attention that follows.

    Job: -, layer's row of pages, rows, heads; for keys and values each their address, bytes per row and head, bytes
    of a head, and of the cache's before them; job of attention, first of its sequences, room of scores, numbers of a
    key's scores, tasks.

    The layer's row of pages: key and value addresses, rows to write, positions, and per row the first key and the
    number of keys.
    """
    layer = longs(job[1])
    rows, heads = job[2], job[3]
    attention = longs(job[14])
    written, spans = longs(layer[2]), longs(layer[4])
    for row in range(rows):
        for head in range(heads):
            for part in range(2):
                at = 4 + 5 * part
                source = job[at] + row * job[at + 1] + head * job[at + 2]
                token, step = attention[5 + 2 * part], attention[6 + 2 * part]
                target = layer[part] + written[row] * token + head * step + job[at + 4]
                old, new = shorts(source), shorts(target)
                for i in range(job[at + 3] // 2):
                    new[i] = old[i]
    attention[2], attention[3] = layer[0], layer[1]
    room = longs(job[16])[0]
    for row in range(rows):
        at = job[15] + 5 * row
        keys = spans[2 * row + 1]
        bytes_a_task = 4 * (keys * job[17] + 16)
        attention[at] = row
        attention[at + 1] = layer[3] + 8 * spans[2 * row]
        attention[at + 2] = keys
        attention[at + 3] = room
        attention[at + 4] = bytes_a_task
        room += bytes_a_task * job[18]


@_compiled
def absorb(job: Any) -> None:
    """Multiply queries by the weights that expand keys from latents, head by head, and by a factor.

    Job: next task, heads, rows, query, its bytes per row and head, numbers without and with rotation, weight (bfloat16
    [rows of a head, rank] by head), rows of a head, rank, address of the factor, output (float32 [rows, heads, rank +
    numbers with rotation]).
    """
    heads, rows, nope, rotary, rank = job[1], job[2], job[6], job[7], job[10]
    factor = floats(job[11])[0]
    head = _next_task(job)
    while head < heads:
        for row in range(rows):
            query = shorts(job[3] + row * job[4] + head * job[5])
            output = floats(job[12] + 4 * (row * heads + head) * (rank + rotary))
            for i in range(rank):
                output[i] = np.float32(0.0)
            for first in range(0, nope, 4):
                weight = job[8] + 2 * (head * job[9] + first) * rank
                w0, w1 = shorts(weight), shorts(weight + 2 * rank)
                w2, w3 = shorts(weight + 4 * rank), shorts(weight + 6 * rank)
                q0, q1 = widened(query[first]), widened(query[first + 1])
                q2, q3 = widened(query[first + 2]), widened(query[first + 3])
                for i in range(rank):
                    total = fused(q1, widened(w1[i]), fused(q0, widened(w0[i]), output[i]))
                    output[i] = fused(q3, widened(w3[i]), fused(q2, widened(w2[i]), total))
            for i in range(rank):
                output[i] *= factor
            for i in range(rotary):
                output[rank + i] = widened(query[nope + i]) * factor
        head = _next_task(job)


@_compiled
def expand_values(job: Any) -> None:
    """Multiply weighted sums of latents by the weights that expand values, head by head.

    Job: next task, heads, rows, sums (bfloat16 [rows, heads, width]), width, weight of the first head's values, rows of
    a head, rank, numbers of a value, scratch (float32 [heads, rank]), output (bfloat16 [rows, heads, numbers]).
    """
    heads, rows, width, rank, numbers = job[1], job[2], job[4], job[7], job[8]
    head = _next_task(job)
    while head < heads:
        room = job[9] + 4 * head * rank
        for row in range(rows):
            _read(job[3] + 2 * (row * heads + head) * width, BFLOAT16, 2, rank, floats(room))
            output = shorts(job[10] + 2 * (row * heads + head) * numbers)
            for n in range(numbers):
                output[n] = rounded(dot_bfloat16(room, job[5] + 2 * (head * job[6] + n) * rank, rank // 16))
        head = _next_task(job)


@_compiled
def route(job: Any) -> None:
    """Make the jobs of a layer's products from its routes: each expert once, in order of first choice.

    Job: -, routes, rows, k, table, jobs of both products, their numbers before the lists, scratch, the program's
    header. The table has `TABLE` addresses for each expert: of the first weight and its scales, of the second, and of
    both biases. Experts whose address is 0 are left out, or end the run.
    """
    routes, rows, k, table = longs(job[1]), job[2], job[3], longs(job[4])
    first, second, head, experts, header = longs(job[5]), longs(job[6]), job[7], longs(job[8]), longs(job[9])
    count = 0
    if header[4]:
        for place in range(rows * k):
            if table[TABLE * routes[place]] == 0:
                header[1] = 0
                return
    for place in range(rows * k):
        expert = routes[place]
        if table[TABLE * expert] == 0:
            continue
        known = False
        for each in range(count):
            known = known or experts[each] == expert
        if not known:
            experts[count] = expert
            count += 1
    first[5] = count
    second[5] = count
    starts = head + 2 * count
    pairs = starts + count + 1
    made = 0
    for each in range(count):
        expert = experts[each]
        at = TABLE * expert
        first[head + each], first[head + count + each] = table[at], table[at + 1]
        second[head + each], second[head + count + each] = table[at + 2], table[at + 3]
        first[starts + each], second[starts + each] = made, made
        for place in range(rows * k):
            if routes[place] == expert:
                first[pairs + 2 * made], first[pairs + 2 * made + 1] = place // k, place
                second[pairs + 2 * made], second[pairs + 2 * made + 1] = place, place
                made += 1
    first[starts + count], second[starts + count] = made, made


@_compiled
def gate_clamped(job: Any) -> None:
    """The gate of gpt-oss, of products to which biases are added, each operation rounded as torch rounds it.

    Job: -, routes, their number, table of experts, numbers of a result, products (bfloat16, gate and up alternating),
    addresses of alpha and of the limit, output (bfloat16).
    """
    routes, table, width = longs(job[1]), longs(job[3]), job[4]
    alpha, limit = floats(job[6])[0], floats(job[7])[0]
    one = np.float32(1.0)
    for place in range(job[2]):
        if table[TABLE * routes[place]] == 0:
            continue
        bias, both = shorts(table[TABLE * routes[place] + 4]), shorts(job[5] + 4 * place * width)
        output = shorts(job[8] + 2 * place * width)
        for i in range(width):
            gate = widened(rounded(widened(both[2 * i]) + widened(bias[2 * i])))
            up = widened(rounded(widened(both[2 * i + 1]) + widened(bias[2 * i + 1])))
            gate = limit if gate > limit else gate
            up = limit if up > limit else (-limit if up < -limit else up)
            power = _exponential(-widened(rounded(gate * alpha)))
            gated = widened(rounded(gate * widened(rounded(one / (one + power)))))
            output[i] = rounded(widened(rounded(up + one)) * gated)


@_compiled
def add_biases(job: Any) -> None:
    """Add the second bias of experts to their products. Job: -, routes, their number, table, width, products."""
    routes, table, width = longs(job[1]), longs(job[3]), job[4]
    for place in range(job[2]):
        if table[TABLE * routes[place]] == 0:
            continue
        bias, products = shorts(table[TABLE * routes[place] + 5]), shorts(job[5] + 2 * place * width)
        for i in range(width):
            products[i] = rounded(widened(products[i]) + widened(bias[i]))


@_compiled
def weighted_sum(job: Any) -> None:
    """Sum over each row's experts in the order of its routes, as torch multiplies and sums.

    Job: -, scratch, rows, k, width, products (bfloat16), weights (float32), whether torch rounds their products to
    bfloat16, output (bfloat16).
    """
    room, rows, k, width, rounds = job[1], job[2], job[3], job[4], job[7]
    total, high, weights = floats(room), floats(room + 4 * CHUNK), floats(job[6])
    for row in range(rows):
        for begin in range(0, width, CHUNK):
            count = min(CHUNK, width - begin)
            for i in range(count):
                total[i] = np.float32(0.0)
                high[i] = np.float32(0.0)
            for rank in range(k):
                factor = weights[row * k + rank]
                product = shorts(job[5] + 2 * ((row * k + rank) * width + begin))
                if rounds:
                    for i in range(count):
                        total[i] += widened(rounded(widened(product[i]) * factor))
                else:
                    for i in range(count):
                        total[i] += widened(product[i]) * factor
                if rank % 16 == 15:
                    for i in range(count):
                        high[i] += total[i]
                        total[i] = np.float32(0.0)
            output = shorts(job[8] + 2 * (row * width + begin))
            for i in range(count):
                output[i] = rounded(total[i] + high[i])


@_compiled
def run(job: Any) -> None:
    """Call functions one after the other.

    Job: first call, end, `GOMP_parallel` or 0, threads, whether missing experts end the run. At the end, the first
    number is the call after the last one, or that of the routes with a missing expert.

    A call: numbers to the next one, function, whether it may use several threads, and its job.
    """
    at, start, threads = job[0], job[2], job[3]
    while at < job[1]:
        job[0] = at
        call = longs(at)
        call[3] = 0  # the first task
        if call[2] and start and threads > 1:
            called_on_threads(start, call[1], at + 24, threads)
        else:
            called(call[1], at + 24)
        at += 8 * call[0]
    if job[1]:
        job[0] = at
