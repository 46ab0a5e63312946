"""Record what a model's modules compute in one forward, as a list of operations on memory.

A view takes no operation: every operand says where it lies in its storage. Linear layers, norms, attention and experts
are single operations; their modules do not run. Embeddings and rotary frequencies stay modules, called before the list
runs.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from moetool.kernels import norms
from moetool.kernels.cpu.matmul import RowLinear
from moetool.models.cache_argument import cache_argument
from moetool.models.experts.expert_form import Call
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.packed_linear import PackedLinear


class Unrecordable(Exception):
    """A model computes something that a recorded step does not support."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor's place in memory.

    Attributes:
        offset: bytes from the storage's start to its first number.
        shape, strides: sizes, and bytes between neighbours, by dimension.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its name, written and read operands, and other arguments.

    Attributes:
        name: of an ATen operator without namespace and overload, or `linear`, `norm`, `attention`, `experts`.
        output: what it writes; of several results the first.
        inputs: operands and numbers, in the operator's order.
        values: further arguments by name.
    """

    name: str
    output: Operand
    inputs: tuple[Any, ...]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module that hooks may observe, or that runs before the list.

    Attributes:
        place: number of operations before the call's end.
        args, kwargs, output: its arguments and result, with operands, or with the tensors of a call before the list.
    """

    module: Any
    place: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(slots=True)
class Recording:
    """A forward's operations in order.

    Attributes:
        ids, positions: [1, T] int64, written before each run.
        before: calls whose results are written into the same tensors before each run.
        routers: calls of the layers' routers.
        constants: tensors that stay where they are, by storage.
        sizes: bytes of each storage that operations write.
        logits: the result.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    operations: list[Operation] = field(default_factory=list)
    before: list[ModuleCall] = field(default_factory=list)
    routers: list[ModuleCall] = field(default_factory=list)
    constants: dict[int, torch.Tensor] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    logits: Operand | None = None


def record_step(model: Any, layers: Sequence[MoeLayer], rows: int) -> Recording:
    """Record a decode step of so many sequences with one new token each.

    Args:
        model: in bfloat16 on a CPU; its attention function passes its arguments to `record_attention` of `recorder`.
        rows: T.

    Raises:
        Unrecordable: a module uses a calling convention that is not supported.
    """
    ids, positions = torch.ones(1, rows, dtype=torch.int64), torch.arange(rows, dtype=torch.int64)[None]
    recorder = Recorder(Recording(ids, positions))
    # In inference mode, torch dispatches composed operators whole.
    modes = (torch.inference_mode(False), torch.no_grad(), _without_hooks(model), _replaced(model, layers, recorder))
    with contextlib.ExitStack() as stack:
        for mode in (*modes, _Functions(recorder), recorder):
            stack.enter_context(mode)
        given = {"input_ids": ids, "position_ids": positions, cache_argument(model): _passing_cache(model.config)}
        logits = model(**given, use_cache=True, recorder=recorder).logits
    recorder.recording.logits = recorder.operand(logits)
    return recorder.recording


class Recorder(TorchDispatchMode):
    """Records operations of the model that runs under it."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self._number: dict[int, int] = {}  # of a storage
        self._kept: list[Any] = []  # so that no other storage gets its address
        self._changing: set[int] = set()  # storages whose numbers differ from step to step
        self.changes(recording.ids)
        self.changes(recording.positions)

    def changes(self, tensor: torch.Tensor) -> None:
        """Declare that a tensor is written before each run."""
        self._changing.add(self.operand(tensor).storage)

    def operand(self, tensor: torch.Tensor) -> Operand:
        """A tensor's place; of a tensor that no operation has written, a constant."""
        storage = tensor.untyped_storage()
        number = self._number.setdefault(storage._cdata, len(self._number))
        if number not in self.recording.sizes and number not in self.recording.constants:
            self.recording.constants[number] = tensor
        self._kept.append(storage)
        size = tensor.dtype.itemsize
        strides = tuple(stride * size for stride in tensor.stride())
        return Operand(number, int(tensor.storage_offset()) * size, tuple(tensor.shape), strides, tensor.dtype)

    def emit(self, name: str, output: torch.Tensor, inputs: Sequence[Any], values: dict[str, Any]) -> None:
        """Record an operation that writes the whole of `output`."""
        operands = tuple(self.operand(each) if isinstance(each, torch.Tensor) else each for each in inputs)
        self.recording.operations.append(Operation(name, self._written(output), operands, values))

    def record_attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, values: dict[str, Any]
    ) -> torch.Tensor:
        """Record attention [1, T, H, V] over the module's layer of the KV cache, new keys and values included.

        Args:
            values: `scaling`, `window`, `sinks` and `expansion`, that of latents in place of keys and values.
        """
        with _disable_current_modes():
            expansion = values.get("expansion")
            width = value.shape[3] if expansion is None else expansion.value_HVR.shape[1]
            output = query.new_zeros(1, query.shape[2], query.shape[1], width)
            self.emit("attention", output, (query, key, value), {"layer": module.layer_idx, **values})
        return output

    def _written(self, tensor: torch.Tensor) -> Operand:
        operand = self.operand(tensor)
        self._changing.add(operand.storage)
        self.recording.constants.pop(operand.storage, None)
        self.recording.sizes[operand.storage] = tensor.untyped_storage().nbytes()
        return operand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        read = {self.operand(each).storage for each in given}
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        name, mutated = func._schema.name.partition("::")[2], func._schema.is_mutable
        if not read & self._changing:
            return result  # constants
        if not tensors:
            raise Unrecordable(f"{name} depends on computed numbers")
        if not mutated and all(self._number.get(each.untyped_storage()._cdata) in read for each in tensors):
            return result  # views
        if mutated and self.operand(tensors[0]).storage not in self.recording.sizes:
            raise Unrecordable(f"{name} changes a constant")
        inputs, values = (tree_map_only(torch.Tensor, self.operand, each) for each in (args, kwargs))
        targets = list(map(self._written, tensors))
        if len(targets) > 1:
            values["second"] = targets[1]
        self.recording.operations.append(Operation(name, targets[0], tuple(inputs), values))
        return result


class _Functions(TorchFunctionMode):
    """Records `torch.nn.functional.linear` as one operation."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and isinstance(args[1], torch.Tensor):
            return _linear(self._recorder, *args)
        return func(*args, **(kwargs or {}))


def _linear(recorder: Recorder, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    with _disable_current_modes():
        outputs = weight.out_features if isinstance(weight, PackedLinear) else weight.shape[0]
        output = x.new_zeros(*x.shape[:-1], outputs)
        recorder.emit("linear", output, (x, bias), {"weight": weight})
    return output


def _norm(recorder: Recorder, module: Any, x: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        output = torch.zeros_like(x, memory_format=torch.contiguous_format)
        recorder.emit("norm", output, (x, module.weight), {"epsilon": module.variance_epsilon})
    return output


def _experts(
    recorder: Recorder, layer: MoeLayer, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    with _disable_current_modes():
        output = hidden.new_zeros(hidden.shape)
        recorder.emit("experts", output, (hidden, index, weights), {"layer": layer})
    return output


def _call_before(recorder: Recorder, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module for real; its results are written before each run."""
    with _disable_current_modes():
        output = forward(*args, **kwargs)
        for tensor in tree_leaves(output):
            recorder.changes(tensor)
        recorder.recording.before.append(ModuleCall(module, 0, args, kwargs, output))
    return output


def _call_router(recorder: Recorder, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    with _disable_current_modes():
        seen = tree_map_only(torch.Tensor, recorder.operand, (args, kwargs, output))
        recorder.recording.routers.append(ModuleCall(module, len(recorder.recording.operations), *seen))
    return output


def _passing_cache(config: Any) -> Any:
    """A cache that keeps nothing: attention receives new keys and values only."""
    from transformers import DynamicCache

    class PassingCache(DynamicCache):
        def update(self, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return key, value

    return PassingCache(config=config)


@contextlib.contextmanager
def _replaced(model: Any, layers: Sequence[MoeLayer], recorder: Recorder) -> Iterator[None]:
    """Let modules that are one operation record it instead of computing."""
    if any(layer.form.call not in (Call.INTERFACE, Call.EXPERTS) for layer in layers):
        raise Unrecordable("experts are not called with routes")
    kept: list[tuple[Any, Callable[..., Any] | None]] = []

    def replace(module: Any, forward: Callable[..., Any]) -> None:
        kept.append((module, module.__dict__.get("forward")))
        module.forward = forward

    try:
        for module in model.modules():
            if isinstance(module, RowLinear):
                replace(module, lambda x, m=module: _linear(recorder, x, m.weight, m.bias))
            elif isinstance(module, PackedLinear):
                replace(module, lambda x, m=module: _linear(recorder, x, m, m.bias))
            elif norms.is_norm(module) and norms.suits_a_cpu(module.weight):
                replace(module, partial(_norm, recorder, module))
            elif module is model.get_input_embeddings() or type(module).__name__.endswith("RotaryEmbedding"):
                replace(module, partial(_call_before, recorder, module, module.forward))
        for layer in layers:
            replace(layer.experts, partial(_experts, recorder, layer))
            replace(layer.router, partial(_call_router, recorder, layer.router, layer.router.forward))
        yield
    finally:
        for module, forward in reversed(kept):
            del module.forward
            if forward is not None:
                module.forward = forward


@contextlib.contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    kept = [(module, module._forward_pre_hooks, module._forward_hooks) for module in model.modules()]
    try:
        for module, _, _ in kept:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for module, before, after in kept:
            module._forward_pre_hooks, module._forward_hooks = before, after
