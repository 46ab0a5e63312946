"""Lower a recorded step to a program of compiled functions (`moetool.kernels.cpu.program`)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from moetool.kernels.cpu import step_operations as functions
from moetool.kernels.cpu.activations import BinaryRows, row_job
from moetool.kernels.cpu.attention import AttentionJob, find_attention_kernel, sink_rows, split_heads
from moetool.kernels.cpu.blocks import row_order
from moetool.kernels.cpu.compiled import BLOCK_ROWS
from moetool.kernels.cpu.dots import RowJob
from moetool.kernels.cpu.gates import find_gate_kernel
from moetool.kernels.cpu.inputs import ordering
from moetool.kernels.cpu.matmul import RowWeight, row_weight, takes
from moetool.kernels.cpu.memory import BFLOAT16, BOOLEAN, FLOAT32, INT64
from moetool.kernels.cpu.program import Program
from moetool.kernels.cpu.scaled_weight import kernel_of
from moetool.kernels.cpu.vectors import LANES
from moetool.kernels.norms import find_norm_kernel
from moetool.models.experts.moe_layers import MoeLayer
from moetool.runtime.experts.slot_tables import ExpertWeights
from moetool.runtime.kv.latents import Expansion
from moetool.runtime.steps.recorder import ModuleCall, Operand, Operation, Recording, Unrecordable

_KINDS = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32, torch.int64: INT64, torch.bool: BOOLEAN}
_KINDS |= {torch.complex64: FLOAT32}  # two each
_LINE = 64
_PARALLEL_BYTES = 2**21
"""Smallest products, in bytes of weights, that several threads share: waking them takes as long as 100 kB."""
_UNARY = {
    **{"_to_copy": functions.COPY, "clone": functions.COPY, "neg": functions.NEGATE, "rsqrt": functions.INVERSE_ROOT},
    **{"sigmoid": functions.SIGMOID, "silu": functions.SILU, "bitwise_not": functions.NOT},
    **{"logical_not": functions.NOT},
}
_BINARY = {
    **{"add": functions.ADD, "add_": functions.ADD, "sub": functions.SUBTRACT, "mul": functions.MULTIPLY},
    **{"mul_": functions.MULTIPLY, "div": functions.DIVIDE, "div_": functions.DIVIDE},
}
_EMPTY = ("new_empty", "empty_like")


@dataclass(frozen=True, slots=True)
class PageStrides:
    """Bytes from one token, or head, of a layer's KV cache to the next."""

    key_token: int
    key_head: int
    value_token: int
    value_head: int


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """A layer's experts in a program.

    Attributes:
        first: position of their first call: what is before it computes the routes.
        summed: position of their weighted sum.
        after: position after them; `first` if they have no calls and their module must be called.
        inputs: hidden states, routes and their weights.
        products: outputs of the experts before their weights; None without calls.
        output: what the experts return.
    """

    layer: MoeLayer
    first: int
    summed: int
    after: int
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    products: torch.Tensor | None
    output: torch.Tensor


@dataclass(slots=True)
class LoweredStep:
    """A program and its memory.

    Attributes:
        experts: calls of experts in order.
        routers: calls of routers, with tensors, and `place` as a position in the program.
        pages_L5: for each layer of the model what `step_operations.write_pages` reads.
        room: one number: the address of the room for attention's scores.
        score_bytes: bytes of that room for each key and row of the batch, and in any case.
    """

    program: Program
    recording: Recording
    logits: torch.Tensor
    pages_L5: np.ndarray
    room: np.ndarray
    experts: list[ExpertCall] = field(default_factory=list)
    routers: list[ModuleCall] = field(default_factory=list)
    score_bytes: tuple[int, int] = (0, 0)
    windows: dict[int, int | None] = field(default_factory=dict)


def lower(
    recording: Recording,
    strides_of: Callable[[int], PageStrides],
    experts_of: Callable[[MoeLayer], ExpertWeights | None],
) -> LoweredStep:
    """Lower a recording.

    Args:
        strides_of: strides of a layer's KV cache, by the layer's number in the model.
        experts_of: a layer's experts; None: their module is called.

    Raises:
        Unrecordable: an operation, type or shape that no compiled function supports.
    """
    return _Lowering(recording, strides_of, experts_of).run()


class _Lowering:
    def __init__(
        self,
        recording: Recording,
        strides_of: Callable[[int], PageStrides],
        experts_of: Callable[[MoeLayer], ExpertWeights | None],
    ) -> None:
        self._recording, self._strides_of, self._experts_of = recording, strides_of, experts_of
        self._program = Program()
        self._rows = recording.ids.shape[1]
        self._memory, self._places = _workspace(recording)
        self._program.kept += [self._memory, recording]
        self._scalars: dict[float, int] = {}
        self._ordered: tuple[Any, int] | None = None  # what the rows ordered last are of
        self._others: dict[int, torch.Tensor] = {}  # memory outside the workspace
        self._shared: dict[Any, torch.Tensor] = {}
        layers = 1 + max((op.values["layer"] for op in recording.operations if op.name == "attention"), default=0)
        assert recording.logits is not None
        self._made = LoweredStep(
            program=self._program,
            recording=recording,
            logits=self._view(recording.logits),
            pages_L5=np.zeros((layers, 5), np.int64),
            room=np.zeros(1, np.int64),
        )
        self._program.kept += [self._made.pages_L5, self._made.room]

    def run(self) -> LoweredStep:
        routers = list(self._recording.routers)
        for number, operation in enumerate(self._recording.operations):
            while routers and routers[0].place == number:
                self._mark(routers.pop(0))
            self._lower(operation)
        while routers:
            self._mark(routers.pop(0))
        self._program.close()
        return self._made

    def _lower(self, operation: Operation) -> None:
        name = operation.name
        if name in _EMPTY:
            return
        if name in _UNARY:
            self._operate(_UNARY[name], operation.output, operation.inputs[:1])
        elif name in _BINARY:
            self._binary(operation)
        elif (special := getattr(self, f"_lower{'' if name.startswith('_') else '_'}{name}", None)) is not None:
            special(operation)
        else:
            raise Unrecordable(f"no compiled function for {name}")
        if self._ordered is not None and operation.output.storage == self._ordered[0][0]:
            self._ordered = None

    # -- numbers -----------------------------------------------------------------------------------------------

    def _binary(self, operation: Operation) -> None:
        if operation.values.get("alpha", 1) != 1 or operation.values.get("rounding_mode") is not None:
            raise Unrecordable(f"{operation.name} with alpha or rounding")
        if operation.output.dtype == torch.complex64:
            if operation.name != "mul":
                raise Unrecordable(f"{operation.name} of complex numbers")
            self._call(functions.complex_product, (0,) * 5, operation.output, operation.inputs[:2])
            return
        self._operate(_BINARY[operation.name], operation.output, operation.inputs[:2])

    def _lower_pow(self, operation: Operation) -> None:
        if operation.inputs[1] != 2:
            raise Unrecordable(f"a power of {operation.inputs[1]}")
        self._operate(functions.SQUARE, operation.output, operation.inputs[:1])

    def _lower_masked_fill(self, operation: Operation) -> None:
        self._operate(functions.FILL, operation.output, operation.inputs[:3])

    def _lower_clamp(self, operation: Operation) -> None:
        x, least, most = (*operation.inputs, None, None)[:3]
        least, most = operation.values.get("min", least), operation.values.get("max", most)
        bounds = (-math.inf if least is None else least, math.inf if most is None else most)
        self._operate(functions.CLAMP, operation.output, (x, *bounds))

    def _lower_copy_(self, operation: Operation) -> None:
        self._operate(functions.COPY, operation.output, operation.inputs[1:2])

    def _lower_zeros_like(self, operation: Operation) -> None:
        self._operate(functions.COPY, operation.output, (0.0,))

    _lower_new_zeros = _lower_zeros_like

    def _lower_ones_like(self, operation: Operation) -> None:
        self._operate(functions.COPY, operation.output, (1.0,))

    def _lower_cat(self, operation: Operation) -> None:
        parts, axis = operation.inputs[0], operation.inputs[1] if len(operation.inputs) > 1 else 0
        output, first = operation.output, 0
        axis %= len(output.shape)
        for part in parts:
            if 0 in part.shape:
                continue
            offset = output.offset + first * output.strides[axis]
            target = Operand(output.storage, offset, part.shape, output.strides, output.dtype)
            self._operate(functions.COPY, target, (part,))
            first += part.shape[axis]

    def _lower_stack(self, operation: Operation) -> None:
        parts, axis = operation.inputs[0], operation.inputs[1] if len(operation.inputs) > 1 else 0
        output, strides = operation.output, list(operation.output.strides)
        step = strides.pop(axis % len(output.shape))
        for number, part in enumerate(parts):
            target = Operand(output.storage, output.offset + number * step, part.shape, tuple(strides), output.dtype)
            self._operate(functions.COPY, target, (part,))

    def _lower_sum(self, operation: Operation) -> None:
        self._reduce(functions.SUM, operation)

    def _lower_mean(self, operation: Operation) -> None:
        self._reduce(functions.MEAN, operation)

    def _reduce(self, code: int, operation: Operation) -> None:
        x, axes = operation.inputs[0], operation.inputs[1]
        keep = operation.inputs[2] if len(operation.inputs) > 2 else operation.values.get("keepdim", False)
        if axes is None or len(axes) != 1:
            raise Unrecordable(f"{operation.name} over {axes}")
        axis, output = axes[0] % len(x.shape), operation.output
        rest = [n for n in range(len(x.shape)) if n != axis]
        moved = _arranged(x, [*rest, axis])
        strides = output.strides if not keep else tuple(output.strides[n] for n in rest)
        shape = tuple(x.shape[n] for n in rest)
        target = Operand(output.storage, output.offset, (*shape, 1), (*strides, 0), output.dtype)
        self._operate(code, target, (moved,), sizes=moved.shape)

    def _lower_softmax(self, operation: Operation) -> None:
        x, axis = operation.inputs[:2]
        if axis % len(x.shape) != len(x.shape) - 1:
            raise Unrecordable("a softmax over another dimension than the last")
        self._operate(functions.SOFTMAX, operation.output, (x,), sizes=x.shape)

    def _lower_topk(self, operation: Operation) -> None:
        x, k = operation.inputs[:2]
        axis = operation.inputs[2] if len(operation.inputs) > 2 else -1
        if axis % len(x.shape) != len(x.shape) - 1:
            raise Unrecordable("a top-k over another dimension than the last")
        self._operate(functions.TOP_K, operation.output, (x, operation.values["second"]), sizes=x.shape, k=k)

    def _lower_gather(self, operation: Operation) -> None:
        x, axis, index = operation.inputs[:3]
        if axis % len(x.shape) != len(x.shape) - 1 or x.shape[:-1] != index.shape[:-1]:
            raise Unrecordable("gathering from another dimension than the last")
        self._call(functions.gather, (0, x.dtype.itemsize, 0, 0, 0), operation.output, (x, index), index.shape)

    def _lower_scatter_(self, operation: Operation) -> None:
        x, axis, index, value = operation.inputs[:4]
        if isinstance(value, Operand) or axis % len(x.shape) != len(x.shape) - 1:
            raise Unrecordable("scattering to another dimension than the last")
        output, number = operation.output, self._scratch(operation.output.dtype, 1).fill_(value)
        given = (self._outside(number, (1,), (0,), output.dtype), index)
        self._call(functions.gather, (1, output.dtype.itemsize, 0, 0, 0), output, given, index.shape)

    def _operate(
        self, code: int, output: Operand, inputs: Sequence[Any], *, sizes: Sequence[int] | None = None, k: int = 0
    ) -> None:
        """Add a function of numbers; of the rows of an operand with these `sizes`, if given."""
        chunk = functions.CHUNK if sizes is None else max(sizes[-1], k, 1)
        room = self._reserved("rows", torch.float32, 4 * chunk).data_ptr()
        read = len(inputs) if code < functions.SUM else 1
        self._call(functions.operate, (code, read, room, chunk, k), output, inputs, sizes)

    def _call(
        self,
        function: Any,
        head: Sequence[int],
        output: Operand,
        inputs: Sequence[Any],
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Add a call of a function of operands in four dimensions.

        Args:
            sizes: the dimensions of its loops, the last one alone (default: those of the output).
        """
        shape = tuple(output.shape if sizes is None else sizes)
        operands = [output, *inputs]
        steps = [_steps(each, shape) if isinstance(each, Operand) else (0,) * len(shape) for each in operands]
        merged, steps = _merged(shape, steps, keep_last=sizes is not None)
        job = [0, *head, *merged]
        for each, step in zip(operands, steps, strict=True):
            if isinstance(each, Operand):
                if each.dtype not in _KINDS:
                    raise Unrecordable(f"numbers of type {each.dtype}")
                job += [self._address(each), _KINDS[each.dtype], *step]
            else:
                job += [self._scalar(float(each)), FLOAT32, *step]
        self._program.add(function.address, job)

    # -- products ----------------------------------------------------------------------------------------------

    def _lower_linear(self, operation: Operation) -> None:
        x, bias = operation.inputs
        weight, output = operation.values["weight"], operation.output
        x = self._contiguous(x)
        rows = int(np.prod(x.shape[:-1]))
        known = row_weight(getattr(weight, "stored_weight", weight), x.dtype)
        if known is not None and x.shape[-1] % known.kind.numbers == 0 and x.dtype in (torch.bfloat16, torch.float32):
            if bias is None or not isinstance(weight, torch.Tensor) or takes(weight):  # as `RowLinear` rounds
                self._product(x, known, rows, self._address(output), output.dtype)
                if bias is not None:
                    self._operate(functions.ADD, output, (output, bias))
            else:
                wide = self._reserved("made", torch.float32, rows * output.shape[-1])
                self._product(x, known, rows, wide.data_ptr(), torch.float32)
                strides = _contiguous_strides(output.shape, 4)
                self._operate(functions.ADD, output, (self._outside(wide, output.shape, strides), bias))
            return
        if not isinstance(weight, torch.Tensor) or weight.dtype not in (torch.bfloat16, torch.float32):
            raise Unrecordable("a linear layer whose weight no kernel multiplies")
        if not weight.is_contiguous() or {x.dtype, output.dtype} - {torch.bfloat16, torch.float32}:
            raise Unrecordable("a linear layer in an unusual form")
        self._program.kept.append(weight)
        outputs, width = weight.shape
        widened = self._outside(self._reserved("wide", torch.float32, rows * width), (rows, width), (4 * width, 4))
        rows_x = Operand(x.storage, x.offset, (rows, width), (x.dtype.itemsize * width, x.dtype.itemsize), x.dtype)
        self._operate(functions.COPY, widened, (rows_x,))
        made = self._reserved("made", torch.float32, rows * outputs)
        narrow = int(weight.dtype == torch.bfloat16)
        job = [0, rows, width, outputs, self._address(widened), weight.data_ptr(), narrow, made.data_ptr()]
        self._program.add(functions.small_linear.address, job)
        strides = _contiguous_strides(output.shape, 4)
        self._operate(
            functions.ADD, output, (self._outside(made, output.shape, strides), 0.0 if bias is None else bias)
        )

    def _product(self, x: Operand, weight: RowWeight, rows: int, output: int, dtype: torch.dtype) -> None:
        ordered = self._order((x.storage, x.offset, x.shape), self._address(x), x.dtype, weight, rows)
        job = [*self._head(weight, ordered, output, dtype), weight.values, weight.scale, 0, rows]
        job += [number for row in range(rows) for number in (row, row)]
        kernel = kernel_of(weight.kind)
        self._program.add(kernel.multiply.work.address, job, parallel=_is_large(weight))  # type: ignore[attr-defined]

    def _head(self, weight: RowWeight, ordered: int, output: int, dtype: torch.dtype) -> list[int]:
        ahead = kernel_of(weight.kind).prefetch_bytes
        return [*RowJob(0, ordered, output, int(dtype == torch.bfloat16), ahead, 1), *weight.shape]

    def _order(self, key: Any, address: int, dtype: torch.dtype, weight: RowWeight, rows: int) -> int:
        """Add the ordering of rows for a kernel, unless they were ordered just before; returns their address."""
        key = (*key, weight.kind, dtype)
        if self._ordered is not None and self._ordered[0] == key:
            return self._ordered[1]
        blocks = rows * weight.shape.x_bytes // row_order(weight.kind).num_bytes
        memory = self._reserved("ordered", torch.float32, rows * weight.shape.x_bytes // 4)
        function = ordering(weight.kind, dtype == torch.bfloat16).work  # type: ignore[attr-defined]
        self._program.kept.append(function)
        job = [0, function.address, address, memory.data_ptr(), blocks]
        self._program.add(functions.order.address, job)
        self._ordered = (key, memory.data_ptr())
        return memory.data_ptr()

    def _lower_norm(self, operation: Operation) -> None:
        x, weight = operation.inputs
        x, width = self._contiguous(x), operation.output.shape[-1]
        kernel = find_norm_kernel()
        if kernel is None or x.dtype != torch.bfloat16:
            raise Unrecordable("a norm that no kernel computes")
        addresses = (self._address(x), 2 * width, self._address(weight), 0, self._address(operation.output), 2 * width)
        rows = BinaryRows(*addresses, int(np.prod(x.shape[:-1])), width // LANES)
        self._program.add(kernel.work.address, row_job(rows, operation.values["epsilon"]))  # type: ignore[attr-defined]

    # -- attention ---------------------------------------------------------------------------------------------

    def _lower_attention(self, operation: Operation) -> None:
        query, key, value = operation.inputs
        values = operation.values
        _, heads, rows, width = query.shape
        if query.dtype != torch.bfloat16 or key.strides[-1] != 2 or value.strides[-1] != 2:
            raise Unrecordable("attention to numbers that no kernel reads")
        scaling = width**-0.5 if values.get("scaling") is None else values["scaling"]
        expansion: Expansion | None = values.get("expansion")
        if expansion is not None:
            self._attend_to_latents(operation, expansion, scaling)
            return
        if value.shape[-1] != width or heads % key.shape[1]:
            raise Unrecordable("attention with keys and values of different widths")
        scaled = self._reserved("query", torch.float32, rows * heads * width)
        strides = (0, 4 * width, 4 * heads * width, 4)
        self._operate(functions.MULTIPLY, self._outside(scaled, query.shape, strides), (query, scaling))
        parts = [(key, 0), (value, 0)]
        self._attend(values, scaled, heads, key.shape[1], width, parts, self._address(operation.output))

    def _attend_to_latents(self, operation: Operation, expansion: Expansion, scaling: float) -> None:
        """Absorb the queries, attend to the rows of latents and rotary keys, and expand values from their sums."""
        query, latent, rotary = operation.inputs
        heads, rows = query.shape[1:3]
        weight, (_, nope, rank) = expansion.key_HNR, expansion.key_HNR.shape
        numbers, width = expansion.value_HVR.shape[1], rank + rotary.shape[-1]
        together = nope + numbers
        if nope % 4 or rank % LANES or weight.dtype != torch.bfloat16 or weight.stride() != (together * rank, rank, 1):
            raise Unrecordable("latent attention with weights that no function multiplies")
        self._program.kept.append(weight)
        large = 2 * heads * together * rank >= _PARALLEL_BYTES
        absorbed = self._reserved("query", torch.float32, rows * heads * width)
        job = [0, heads, rows, self._address(query), query.strides[2], query.strides[1], nope, width - rank]
        job += [weight.data_ptr(), together, rank, self._scalar(scaling), absorbed.data_ptr()]
        self._program.add(functions.absorb.address, job, parallel=large)
        sums = self._reserved("sums of latents", torch.bfloat16, rows * heads * width)
        parts = [(latent, 0), (rotary, 2 * rank)]
        self._attend(operation.values, absorbed, heads, 1, width, parts, sums.data_ptr())
        room = self._reserved("latents", torch.float32, heads * rank)
        job = [0, heads, rows, sums.data_ptr(), width, expansion.value_HVR.data_ptr(), together, rank, numbers]
        job += [room.data_ptr(), self._address(operation.output)]
        self._program.add(functions.expand_values.address, job, parallel=large)

    def _attend(
        self,
        values: dict[str, Any],
        scaled: torch.Tensor,
        heads: int,
        kv_heads: int,
        width: int,
        written: Sequence[tuple[Operand, int]],
        output: int,
    ) -> None:
        """Write new keys and values into the KV cache, and attend to it.

        Args:
            scaled: queries, float32 [T, heads, width].
            written: keys and values, each with the bytes of a row of the cache before them.
            output: address, bfloat16 [T, heads, width].
        """
        groups, rows = heads // kv_heads, self._rows
        kernel = find_attention_kernel(groups, width)
        if kernel is None:
            raise Unrecordable(f"attention of heads of {width}")
        layer, each = values["layer"], self._strides_of(values["layer"])
        queries, padded = split_heads(groups)
        parts = groups // queries
        sinks = values.get("sinks")
        sink_TL = sink_rows(sinks, groups)
        self._program.kept.append(sink_TL)
        numbers = AttentionJob(
            0,
            scaled.data_ptr(),
            0,
            0,
            output,
            key_token=each.key_token,
            key_head=each.key_head,
            value_token=each.value_token,
            value_head=each.value_head,
            heads=kv_heads,
            parts=parts,
            sequences=rows,
            sinks=sink_TL.data_ptr(),
            sink_bytes=0 if sinks is None else 4 * LANES,
        )
        job = [0, self._made.pages_L5[layer].ctypes.data, rows, kv_heads]
        for x, offset in written:
            job += [self._address(x), x.strides[2], x.strides[1], 2 * x.shape[-1], offset]
        job += [0, len(numbers), self._made.room.ctypes.data, padded, kv_heads * parts]
        pages = self._program.add(functions.write_pages.address, job)
        parallel = heads * width >= 1024
        sequences = [0] * (5 * rows)
        attended = self._program.add(kernel.work.address, [*numbers, *sequences], parallel=parallel)  # type: ignore[attr-defined]
        self._program.refer(pages + 14, attended)
        tasks = kv_heads * parts
        a_key, always = self._made.score_bytes
        self._made.score_bytes = (max(a_key, 4 * padded * tasks), max(always, 4 * LANES * tasks * rows))
        self._made.windows[layer] = values.get("window")

    # -- experts -----------------------------------------------------------------------------------------------

    def _lower_experts(self, operation: Operation) -> None:
        layer: MoeLayer = operation.values["layer"]
        hidden, index, weights = (self._contiguous(each) for each in operation.inputs)
        first = len(self._program)
        known = self._experts_of(layer)
        summed, products = first, None
        if known is not None and _is_routed(hidden, index, weights):
            summed, products = self._experts(known, hidden, index, weights, operation.output)
        views = (self._view(hidden), self._view(index), self._view(weights))
        self._made.experts.append(
            ExpertCall(layer, first, summed, len(self._program), views, products, self._view(operation.output))
        )
        self._ordered = None

    def _experts(
        self, known: ExpertWeights, hidden: Operand, index: Operand, weights: Operand, output: Operand
    ) -> tuple[int, torch.Tensor]:
        """Add the calls of experts; returns the position of their sum, and their products."""
        rows, k = index.shape
        up, down, most = known.up, known.down, rows * k
        width, inner = down.shape.outputs, up.shape.outputs // 2
        firsts = self._reserved("first", torch.bfloat16, most * 2 * inner)
        gated = self._reserved("gated", torch.bfloat16, most * inner)
        products = self._reserved("products", torch.bfloat16, most * width)
        inner_ordered = self._reserved("inner", torch.float32, most * down.shape.x_bytes // 4)
        chosen = self._reserved("chosen", torch.int64, most)
        self._program.kept.append(known.table_E6)
        ordered = self._order(("experts",), self._address(hidden), hidden.dtype, up, rows)
        self._ordered = None
        head = len(RowJob._fields) + len(up.shape)
        lists = [0] * (3 * most + 1 + 2 * most)
        routes, table = self._address(index), known.table_E6.ctypes.data
        job = [0, routes, rows, k, table, 0, 0, head, chosen.data_ptr()]
        job.append(self._program.header)
        routed = self._program.add(functions.route.address, job)
        up_job = [*self._head(up, ordered, firsts.data_ptr(), torch.bfloat16), *lists]
        large = _is_large(up) or most * up.shape.row_bytes * up.shape.outputs >= _PARALLEL_BYTES
        up_at = self._program.add(kernel_of(up.kind).multiply.work.address, up_job, parallel=large)  # type: ignore[attr-defined]
        start = firsts.data_ptr()
        if known.gate is None:
            gate = find_gate_kernel()
            assert gate is not None
            given = BinaryRows(
                start, 4 * inner, start + 2 * inner, 4 * inner, gated.data_ptr(), 2 * inner, most, inner // LANES
            )
            self._program.add(gate.work.address, row_job(given, 0.0))  # type: ignore[attr-defined]
        else:
            job = [0, routes, most, table, inner, start, *map(self._scalar, known.gate), gated.data_ptr()]
            self._program.add(functions.gate_clamped.address, job)
        function = ordering(down.kind, True).work  # type: ignore[attr-defined]
        self._program.kept.append(function)
        blocks = most * down.shape.x_bytes // row_order(down.kind).num_bytes
        job = [0, function.address, gated.data_ptr(), inner_ordered.data_ptr(), blocks]
        self._program.add(functions.order.address, job)
        down_job = [*self._head(down, inner_ordered.data_ptr(), products.data_ptr(), torch.bfloat16), *lists]
        down_at = self._program.add(kernel_of(down.kind).multiply.work.address, down_job, parallel=large)  # type: ignore[attr-defined]
        if known.gate is not None:
            self._program.add(functions.add_biases.address, [0, routes, most, table, width, products.data_ptr()])
        self._program.refer(routed + 5, up_at)
        self._program.refer(routed + 6, down_at)
        summed = len(self._program)
        factors = self._reserved("weights", torch.float32, most)
        self._operate(functions.COPY, self._outside(factors, weights.shape, (4 * k, 4)), (weights,))
        room = self._reserved("sums", torch.float32, 2 * functions.CHUNK)
        rounds = int(weights.dtype == torch.bfloat16)
        job = [0, room.data_ptr(), rows, k, width, products.data_ptr(), factors.data_ptr(), rounds]
        self._program.add(functions.weighted_sum.address, [*job, self._address(output)])
        return summed, products.view(most, width)

    # -- memory ------------------------------------------------------------------------------------------------

    def _mark(self, call: ModuleCall) -> None:
        seen = [_mapped(each, self._view) for each in (call.args, call.kwargs, call.output)]
        self._made.routers.append(ModuleCall(call.module, len(self._program), *seen))

    def _contiguous(self, x: Operand) -> Operand:
        """The operand, or a contiguous copy of it."""
        strides = _contiguous_strides(x.shape, x.dtype.itemsize)
        if all(a == b for size, a, b in zip(x.shape, x.strides, strides, strict=True) if size > 1):
            return x
        copy = self._scratch(x.dtype, int(np.prod(x.shape)))
        target = self._outside(copy, x.shape, strides, x.dtype)
        self._operate(functions.COPY, target, (x,))
        return target

    def _address(self, operand: Operand) -> int:
        constant = self._recording.constants.get(operand.storage)
        if constant is not None:
            return constant.untyped_storage().data_ptr() + operand.offset
        return self._places[operand.storage] + operand.offset

    def _view(self, operand: Operand) -> torch.Tensor:
        size = operand.dtype.itemsize
        strides = [stride // size for stride in operand.strides]
        constant = self._recording.constants.get(operand.storage)
        if constant is not None:
            return constant.as_strided(operand.shape, strides, operand.offset // size)
        memory = self._others.get(operand.storage, self._memory)
        offset = (self._places[operand.storage] - memory.data_ptr() + operand.offset) // size
        return torch.empty(0, dtype=operand.dtype).set_(memory.untyped_storage(), offset, operand.shape, strides)

    def _outside(
        self,
        memory: torch.Tensor,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> Operand:
        """An operand in other memory than the workspace."""
        number = -1 - len(self._others)
        self._others[number] = memory
        self._places[number] = memory.data_ptr()
        return Operand(number, 0, tuple(shape), tuple(strides), dtype)

    def _scratch(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        memory = torch.zeros(count, dtype=dtype)
        self._program.kept.append(memory)
        return memory

    def _reserved(self, use: str, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Memory that all layers share for one use."""
        memory = self._shared.get((use, count))
        if memory is None:
            memory = self._shared[use, count] = self._scratch(dtype, count)
        return memory

    def _scalar(self, value: float) -> int:
        if value not in self._scalars:
            self._scalars[value] = self._scratch(torch.float32, 1).fill_(value).data_ptr()
        return self._scalars[value]


def _workspace(recording: Recording) -> tuple[torch.Tensor, dict[int, int]]:
    """Memory for all storages that operations write, reused after the last use of each; and their addresses."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, operation in enumerate(recording.operations):
        for operand in tree_leaves((operation.output, operation.inputs, list(operation.values.values()))):
            if isinstance(operand, Operand) and operand.storage in recording.sizes:
                first.setdefault(operand.storage, number)
                last[operand.storage] = number
    for operation in recording.operations:
        if operation.name == "experts":  # observers read routes after the step
            last |= {each.storage: len(recording.operations) for each in operation.inputs[1:]}
    for call in recording.routers:  # hooks read what a router has read and returned
        for operand in tree_leaves((call.args, call.kwargs, call.output)):
            if isinstance(operand, Operand) and operand.storage in last:
                last[operand.storage] = max(last[operand.storage], call.place)
    assert recording.logits is not None
    last[recording.logits.storage] = len(recording.operations)
    ending: dict[int, list[int]] = {}
    for storage, number in last.items():
        ending.setdefault(number, []).append(storage)
    free: list[tuple[int, int]] = []  # bytes, offset
    offsets: dict[int, int] = {}
    size = 0
    starting = sorted(first, key=first.__getitem__)
    number = 0
    for storage in starting:
        while number < first[storage]:
            free += [(_padded(recording.sizes[each]), offsets[each]) for each in ending.get(number, ())]
            number += 1
        wanted = _padded(recording.sizes[storage])
        fitting = min((each for each in free if each[0] == wanted), default=None)
        if fitting is None:
            offsets[storage], size = size, size + wanted
        else:
            free.remove(fitting)
            offsets[storage] = fitting[1]
    memory = torch.zeros(size + _LINE, dtype=torch.uint8)
    base = -(-memory.data_ptr() // _LINE) * _LINE
    return memory, {storage: base + offset for storage, offset in offsets.items()}


def _padded(size: int) -> int:
    return -(-max(size, 1) // _LINE) * _LINE


def _mapped(value: Any, view: Callable[[Operand], torch.Tensor]) -> Any:
    return tree_map_only(Operand, view, value)


def _is_large(weight: RowWeight) -> bool:
    return weight.shape.row_bytes * weight.shape.outputs >= _PARALLEL_BYTES and weight.shape.outputs > BLOCK_ROWS


def _is_routed(hidden: Operand, index: Operand, weights: Operand) -> bool:
    return (
        hidden.dtype == torch.bfloat16
        and index.dtype == torch.int64
        and len(index.shape) == 2
        and weights.shape == index.shape
        and weights.dtype in (torch.bfloat16, torch.float32)
    )


def _contiguous_strides(shape: Sequence[int], size: int) -> tuple[int, ...]:
    return tuple(reversed([*accumulate(reversed(shape), mul, initial=size)]))[1:]


def _arranged(x: Operand, axes: Sequence[int]) -> Operand:
    shape, strides = tuple(x.shape[n] for n in axes), tuple(x.strides[n] for n in axes)
    return Operand(x.storage, x.offset, shape, strides, x.dtype)


def _steps(operand: Operand, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of an operand over the dimensions of a loop; 0 where it is broadcast."""
    missing = len(shape) - len(operand.shape)
    if missing < 0:
        raise Unrecordable("operands of unequal dimensions")
    steps = [0] * missing
    for size, stride in zip(operand.shape, operand.strides, strict=True):
        steps.append(0 if size == 1 else stride)
    return tuple(steps)


def _merged(
    shape: Sequence[int], steps: Sequence[Sequence[int]], keep_last: bool
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Four dimensions for a loop: neighbours that are contiguous in all operands become one.

    Args:
        keep_last: leave the last dimension as it is.

    Raises:
        Unrecordable: more than four dimensions are left.
    """
    axes: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(shape):
        own = [each[axis] for each in steps]
        is_last = keep_last and axis == len(shape) - 1
        if size == 1 and not is_last:
            continue
        if axes and not is_last and all(a == b * size for a, b in zip(axes[-1][1], own, strict=True)):
            axes[-1] = (axes[-1][0] * size, own)
        else:
            axes.append((size, own))
    if len(axes) > 4:
        raise Unrecordable("an operation in more than four dimensions")
    axes = [(1, [0] * len(steps))] * (4 - len(axes)) + axes
    return [size for size, _ in axes], [tuple(own[n] for _, own in axes) for n in range(len(steps))]
