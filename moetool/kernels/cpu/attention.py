"""Attention of new tokens, one per sequence, over a paged KV cache in bfloat16, in place on a CPU.

torch's attention needs gathered keys and values, and stays far below memory bandwidth for one query
(`tests/bench/test_decode_attention.py`).
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from moetool.kernels.cpu.activations import compiled
from moetool.kernels.cpu.threads import PoolCall, next_task_of, on_pool
from moetool.kernels.cpu.vectors import LANES, Vectors


class AttentionJob(NamedTuple):
    """The first numbers of a call; `_PER_SEQUENCE` more follow for each sequence.

    These are its row of queries, and the address and the number of its keys' positions (int64). Then follow the address
    of scratch memory for scores (float32) and its bytes per task.

    Attributes:
        next_task: 0; the threads increment it.
        query: address, float32 [T, H, D], scaled.
        key, value: addresses in the cache.
        output: address, bfloat16 [T, H, D].
        key_token, key_head, value_token, value_head: bytes from one token, or head, of the cache to the next.
        heads: KV heads.
        parts: tasks that share a KV head.
        sinks: address of the scores of each task's sinks (`sink_rows`).
        sink_bytes: from one task of a sequence to the next; 0: all have the same.
    """

    next_task: int
    query: int
    key: int
    value: int
    output: int
    key_token: int
    key_head: int
    value_token: int
    value_head: int
    heads: int
    parts: int
    sequences: int
    sinks: int
    sink_bytes: int


_PLACES = {name: place for place, name in enumerate(AttentionJob._fields)}
_PER_SEQUENCE = 5
_LINE = 64
_AHEAD = 16
"""Tokens between a key or value and the one that is prefetched. Over 4,000 keys of Qwen3-30B-A3B's shape the kernel
takes 0.6 of its time without prefetching (two threads)."""
_MOST_QUERIES = LANES
"""Query heads of a task."""
_NO_SINKS = torch.full((1, LANES), -math.inf, dtype=torch.float32)


class OneQuery(NamedTuple):
    """A sequence with one new token.

    Attributes:
        row: row of its token in the batch.
        first, end: range of its keys in the list of positions.
    """

    row: int
    first: int
    end: int


def attend_one_query(
    query_HTD: torch.Tensor,
    views: Sequence[torch.Tensor],
    positions: torch.Tensor,
    sequences: Sequence[OneQuery],
    scaling: float | None,
    output_THD: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write the attention of some rows of a batch. A row's result is bit-identical in any batch.

    Args:
        query_HTD: bfloat16.
        views: keys and values of the layer in the cache, bfloat16 [., KV heads, D], where `supports` holds.
        positions: positions in the cache of the keys of all sequences.
        scaling: factor on the scores (default: 1 / sqrt(D)).
        output_THD: bfloat16, contiguous; other rows stay as they are.
        sinks: as in `sink_rows`.
    """
    num_heads, _, width = query_HTD.shape
    key, value = views
    groups = num_heads // key.shape[1]
    queries, padded = split_heads(groups)
    kernel = find_attention_kernel(groups, width)
    assert kernel is not None
    scaled_THD = query_HTD.transpose(0, 1).float().mul_(width**-0.5 if scaling is None else scaling).contiguous()
    positions = positions.to(torch.int64)
    parts = groups // queries
    tasks = key.shape[1] * parts
    rooms = [(each.end - each.first) * padded + LANES for each in sequences]  # one vector after the last score
    scores = torch.empty(tasks * sum(rooms), dtype=torch.float32)
    item = key.element_size()
    sink_TL = sink_rows(sinks, groups)
    job = [
        *AttentionJob(
            0,
            scaled_THD.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            output_THD.data_ptr(),
            key_token=key.stride(0) * item,
            key_head=key.stride(1) * item,
            value_token=value.stride(0) * item,
            value_head=value.stride(1) * item,
            heads=key.shape[1],
            parts=parts,
            sequences=len(sequences),
            sinks=sink_TL.data_ptr(),
            sink_bytes=0 if sinks is None else 4 * LANES,
        )
    ]
    room, index = scores.data_ptr(), positions.data_ptr()
    for each, size in zip(sequences, rooms, strict=True):
        job += (each.row, index + 8 * each.first, each.end - each.first, room, 4 * size)
        room += 4 * size * tasks
    kernel(job, torch.get_num_threads())


def sink_rows(sinks: torch.Tensor | None, groups: int) -> torch.Tensor:
    """Scores of attention sinks, float32 [tasks of a sequence, LANES], minus infinity where there are none.

    Args:
        sinks: for each query head the score of a further key, whose value is 0; None: there are none.
        groups: query heads per KV head.
    """
    if sinks is None:
        return _NO_SINKS
    scores = sinks.detach().float().view(-1, split_heads(groups)[0])
    return torch.nn.functional.pad(scores, (0, LANES - scores.shape[1]), value=-math.inf)


def supports(query: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the kernel computes attention of queries [1, H, T, D] over a layer's cache [., KV heads, D]."""
    return (
        view.dtype == query.dtype == torch.bfloat16
        and view.device.type == "cpu"
        and view.stride(-1) == 1
        and view.shape[-1] == query.shape[-1]
        and find_attention_kernel(query.shape[1] // view.shape[1], view.shape[-1]) is not None
    )


@functools.cache
def find_attention_kernel(groups: int, width: int) -> PoolCall | None:
    """Return the compiled kernel for a number of query heads per KV head and the width of a head.

    None if the width is not a multiple of 16, or numba is missing or does not compile it for this CPU.
    """
    if width % LANES:
        return None
    return compiled("attention", lambda: _compile(groups, width))


def split_heads(groups: int) -> tuple[int, int]:
    """Query heads of a task, and the power of two that they are padded to."""
    queries = max(each for each in range(1, _MOST_QUERIES + 1) if groups % each == 0)
    return queries, 1 << (queries - 1).bit_length()


def _compile(groups: int, width: int) -> PoolCall:
    import numba
    from numba import types

    next_task = next_task_of()
    queries, padded = split_heads(groups)
    attend = _attention(queries, padded, width)
    heads_at, parts_at, sequences_at = _PLACES["heads"], _PLACES["parts"], _PLACES["sequences"]
    first_sequence = len(_PLACES)

    @numba.cfunc(types.void(types.CPointer(types.int64)), nopython=True, error_model="numpy")
    def work(job: Any) -> None:
        each = job[heads_at] * job[parts_at]
        task = next_task(job)
        while task < job[sequences_at] * each:
            attend(job, first_sequence + task // each * _PER_SEQUENCE, task % each)
            task = next_task(job)

    return on_pool(work)


def _attention(queries: int, padded: int, width: int) -> Any:
    """Return numba's `attend(job, place, part)`: one task of the sequence at that place of the job."""
    from numba.core import types
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _Attention(Vectors(builder), queries, padded, width).generate(*arguments)
        return context.get_dummy_value()

    @intrinsic
    def attend(typing_context: Any, job: Any, place: Any, part: Any) -> Any:
        return types.void(job, types.int64, types.int64), generate

    return attend


class _Attention:
    """The code of a task: `queries` query heads of one KV head, over the keys of one sequence."""

    def __init__(self, vectors: Vectors, queries: int, padded: int, width: int) -> None:
        self._v, self._queries, self._padded = vectors, queries, padded
        self._planes = width // LANES

    def generate(self, job: Any, place: Any, part: Any) -> None:
        """Scores, their softmax without its denominator, and the values' sums by blocks of columns."""
        v, builder = self._v, self._v.builder

        def number(at: Any) -> Any:
            return builder.load(builder.gep(job, [at]))

        def field(name: str) -> Any:
            return number(v.number(_PLACES[name]))

        row, index, num_keys, room, room_bytes = (number(builder.add(place, v.number(n))) for n in range(_PER_SEQUENCE))
        parts = field("parts")
        first = builder.add(builder.mul(row, builder.mul(field("heads"), parts)), part)  # task of the batch
        first = v.times(first, self._queries * self._planes * LANES)
        query = builder.add(field("query"), v.times(first, 4))
        output = builder.add(field("output"), v.times(first, 2))
        head = builder.sdiv(part, parts)
        self._index, self._num_keys = index, num_keys
        self._scores = scores = builder.add(room, builder.mul(part, room_bytes))
        key = builder.add(field("key"), builder.mul(head, field("key_head")))
        value = builder.add(field("value"), builder.mul(head, field("value_head")))
        self._score(key, field("key_token"), query)
        num_scores = v.times(num_keys, self._padded)
        v.store(v.all(v.float32, -math.inf), builder.add(scores, v.times(num_scores, 4)))
        vectors = builder.sdiv(builder.add(num_scores, v.number(LANES - 1)), v.number(LANES))
        sinks = v.load(builder.add(field("sinks"), builder.mul(part, field("sink_bytes"))), v.floats)
        inverse = builder.fdiv(v.all(v.float32, 1.0), self._softmax(scores, vectors, sinks))
        step, value_token = max(1, LANES // self._queries), field("value_token")
        for plane in range(0, self._planes, step):
            planes = range(plane, min(plane + step, self._planes))
            self._sum_values(value, value_token, planes, inverse, output)

    def _score(self, key: Any, token: Any, query: Any) -> None:
        """Write the dot products of every key with the queries."""
        v, builder = self._v, self._v.builder
        with self._each(self._num_keys) as n:
            row = self._row(key, token, n, range(self._planes))
            numbers = [self._widened(row, plane) for plane in range(self._planes)]
            products = [self._dot(numbers, self._at(query, 4 * LANES * self._planes * g)) for g in range(self._queries)]
            v.store(self._lane_sums(products), builder.add(self._scores, v.times(n, 4 * self._padded)))

    def _sum_values(self, value: Any, token: Any, planes: range, inverse: Any, output: Any) -> None:
        """Write some planes of the output."""
        v, builder = self._v, self._v.builder
        sums = [[self._place(v.all(v.float32, 0.0)) for _ in planes] for _ in range(self._queries)]
        with self._each(self._num_keys) as n:
            row = self._row(value, token, n, planes)
            numbers = [self._widened(row, plane) for plane in planes]
            at = builder.add(self._scores, v.times(n, 4 * self._padded))
            for g, places in enumerate(sums):
                weight = v.broadcast(v.load(self._at(at, 4 * g), v.float32))
                for place, number in zip(places, numbers, strict=True):
                    builder.store(v.multiply_add(weight, number, builder.load(place)), place)
        for g, places in enumerate(sums):
            factor = v.shuffled(inverse, [g] * LANES)
            for plane, place in zip(planes, places, strict=True):
                target = self._at(output, 2 * LANES * (g * self._planes + plane))
                v.store(v.bfloat16(builder.fmul(builder.load(place), factor)), target, 2)

    def _softmax(self, scores: Any, vectors: Any, sinks: Any) -> Any:
        """Replace scores by their exponentials; returns the sums, that of query `lane % padded` in each lane.

        Sinks count in the sums alone.
        """
        v, builder = self._v, self._v.builder
        greatest = self._place(sinks)
        with self._each(vectors) as n:
            each = v.load(builder.add(scores, v.times(n, 4 * LANES)), v.floats)
            builder.store(self._greater(each, builder.load(greatest)), greatest)
        top = self._folded(builder.load(greatest), self._greater)
        total = self._place(v.exponential(builder.fsub(sinks, top)))
        with self._each(vectors) as n:
            at = builder.add(scores, v.times(n, 4 * LANES))
            power = v.exponential(builder.fsub(v.load(at, v.floats), top))
            v.store(power, at)
            builder.store(builder.fadd(builder.load(total), power), total)
        return self._folded(builder.load(total), builder.fadd)

    def _dot(self, numbers: list[Any], query: Any) -> Any:
        """Sixteen partial sums of the dot product of a key with a query."""
        v, builder = self._v, self._v.builder
        chains: list[Any] = [None, None]
        for plane, number in enumerate(numbers):
            other = v.load(self._at(query, 4 * LANES * plane), v.floats)
            chain = chains[plane % 2]
            chains[plane % 2] = builder.fmul(number, other) if chain is None else v.multiply_add(number, other, chain)
        return chains[0] if chains[1] is None else builder.fadd(*chains)

    def _lane_sums(self, products: list[Any]) -> Any:
        """The sums of the elements of each vector, and zeros up to `padded`."""
        v, builder = self._v, self._v.builder
        held = products + [v.all(v.float32, 0.0)] * (self._padded - len(products))
        lanes, sums = LANES, 1  # lanes of a sum, and sums in a vector
        while lanes > 1:
            lanes //= 2
            halves = [[2 * lanes * n + half * lanes + i for n in range(sums) for i in range(lanes)] for half in (0, 1)]
            if len(held) > 1:
                both = [[*half, *(LANES + place for place in half)] for half in halves]
                held = [
                    builder.fadd(*(v.merged(a, b, half) for half in both))
                    for a, b in zip(held[::2], held[1::2], strict=True)
                ]
                sums *= 2
            else:
                held = [builder.fadd(*(v.shuffled(held[0], half) for half in halves))]
        return held[0]

    def _folded(self, vector: Any, combine: Any) -> Any:
        """Combine the lanes that belong to the same query; every one of them gets the result."""
        distance = LANES // 2
        while distance >= self._padded:
            turned = [(lane + distance) % LANES for lane in range(LANES)]
            vector = combine(vector, self._v.shuffled(vector, turned))
            distance //= 2
        return vector

    def _greater(self, a: Any, b: Any) -> Any:
        builder = self._v.builder
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    def _widened(self, row: Any, plane: int) -> Any:
        v = self._v
        return v.widened(v.load(self._at(row, 2 * LANES * plane), v.of(v.int16), 2))

    def _row(self, start: Any, token: Any, n: Any, planes: range) -> Any:
        """Return the address of a key or value; prefetch planes of a later one, as hardware does not."""
        v, builder = self._v, self._v.builder
        later = builder.add(n, v.number(_AHEAD))
        later = builder.select(builder.icmp_signed("<", later, self._num_keys), later, n)
        own, other = (
            builder.add(start, builder.mul(v.load(builder.add(self._index, v.times(each, 8)), v.int64, 8), token))
            for each in (n, later)
        )
        for offset in range(2 * LANES * planes.start // _LINE * _LINE, 2 * LANES * planes.stop, _LINE):
            v.prefetch(self._at(other, offset))
        return own

    def _at(self, address: Any, offset: int) -> Any:
        return self._v.builder.add(address, self._v.number(offset))

    def _place(self, value: Any) -> Any:
        """A variable with a first value."""
        from numba.core import cgutils

        place = cgutils.alloca_once(self._v.builder, value.type)
        self._v.builder.store(value, place)
        return place

    @contextlib.contextmanager
    def _each(self, count: Any) -> Iterator[Any]:
        """A loop; as a context it gives the number of the round."""
        from numba.core import cgutils

        with cgutils.for_range(self._v.builder, count) as loop:
            yield loop.index
