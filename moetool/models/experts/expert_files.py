"""Expert locations in the weight files, direct reads, and the experts' form in slots."""

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moetool.base.errors import MismatchError
from moetool.base.types import ModelSpec
from moetool.models.conversion import TensorSource
from moetool.models.experts.moe_layers import MoeLayer
from moetool.models.experts.packed_slot import PackedSlot, packed_slot
from moetool.models.experts.scaled_slot import ScaledSlot, scaled_slot
from moetool.models.experts.stored_expert import DenseSlot, StoredLayout, Weight, layout_of
from moetool.models.files.tensor_index import FLOATS, Tensor
from moetool.models.shards import Shards
from moetool.models.weight_index import WeightIndex
from moetool.models.weights.format import STORED_DTYPES, DenseTransposed, StoredWeight
from moetool.models.weights.gptq import in_even_groups
from moetool.models.weights.quantization_config import Quantization

SlotForm = DenseSlot | PackedSlot | ScaledSlot
"""Forms of an expert in a slot, other than its stored one."""


class ByteRun(NamedTuple):
    """A byte range of a read and its position `target` in memory; `source` is relative to the read's start."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read: `num_bytes` at `offset` of a shard, cut into pieces of an expert."""

    file: int
    offset: int
    num_bytes: int
    pieces: tuple[ByteRun, ...]


class ExpertWeights:
    """The stored weights of a model's experts, by transformers' rules.

    An expert consists of separate tensors or of parts of stacked ones (`moetool.models.conversion`).

    Args:
        index: the weights of the checkpoint.
        sources: the tensors of each parameter.
        path: path of the checkpoint, for errors.
    """

    def __init__(self, index: WeightIndex, sources: Mapping[str, TensorSource], path: Path) -> None:
        self._weights = index.weights
        self._file_of = index.file_of
        self._sources = sources
        self._path = path

    def layout(self, layer: MoeLayer) -> StoredLayout:
        """Memory layout of a layer's stored experts. Raises: see `of`."""
        return layout_of(self.of(layer, 0))

    def of(self, layer: MoeLayer, expert: int) -> list[list[StoredWeight]]:
        """Weights of an expert: for each part of its form, those concatenated in it.

        Raises:
            MismatchError: a tensor is missing, differs from the config in shape or type, or needs a computation from
                others.
        """
        return [
            [block for name in part.parameters for block in self._share(layer, name, part.share, expert)]
            for part in layer.form.parts
        ]

    def _share(self, layer: MoeLayer, parameter: str, share: tuple[int, ...], expert: int) -> list[StoredWeight]:
        """Weights, or parts of weights, that make one expert's share of a parameter."""
        name = f"{layer.path}.{parameter}"
        source = self._sources.get(name)
        if source is None:
            raise MismatchError(
                f"no tensor in the weight files of {self._path} matches {name}: one is missing, or transformers "
                "does not read this layout; download the model again"
            )
        if source.converter is None:
            whole = self._take(next(iter(source.names)), tuple(layer.experts.get_parameter(parameter).shape))
            try:
                return [whole.share(expert, layer.form.num_experts, share)]
            except ValueError as error:
                raise MismatchError(
                    f"{self._file_of(whole)}: {whole.name} cannot be read by expert: {error}; download the model again"
                ) from None
        if (step := _transposing(source.converter)) is not None:
            whole = self._transposed(source.tensor_names[0], layer, parameter, step.check_dims)
            return [whole.share(expert, layer.form.num_experts, share)]
        if not (stacks := _is_stacking(source.converter)) and not _is_joining(source.converter):
            steps = ", ".join(type(step).__name__ for step in source.converter.operations)
            raise MismatchError(
                f"{self._path}: {name} has to be computed from its tensors ({steps}), so its experts cannot be read "
                "one by one; save the model again by transformers: save_pretrained(..., save_original_format=False)"
            )
        patterns = source.converter.source_patterns  # e.g. gate and up, concatenated
        rows = (share[0] // len(patterns), *share[1:])
        weights = []
        for pattern in patterns:
            if pattern not in source.names:
                raise MismatchError(f"{self._path}: {name} lacks the tensors {pattern}; download the model again")
            tensor = source.names[pattern][0]
            if stacks:
                weights.append(self._take(_numbered(tensor, expert), rows))
            else:
                count = layer.form.num_experts
                weights.append(self._take(tensor, (count, *rows)).share(expert, count, rows))
        return weights

    def _transposed(self, name: str, layer: MoeLayer, parameter: str, by_shape: bool) -> StoredWeight:
        """Transpose a stacked weight [experts, in, out]; with `by_shape` only if its shape requires it."""
        shape = tuple(layer.experts.get_parameter(parameter).shape)
        weight = self._weights.get(name)
        if weight is None or (by_shape and weight.shape == shape) or weight.format != "dense":
            return self._take(name, shape)
        stored = self._take(name, (shape[0], *shape[:0:-1])).tensors["weight"]
        return replace(weight, shape=shape, tensors={"transposed": stored}, codec=DenseTransposed())

    def _take(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        weight = self._weights.get(name)
        if weight is None:
            raise MismatchError(f"{name} is missing from the weight files of {self._path}; download the model again")
        if weight.shape != shape:
            raise MismatchError(
                f"{self._file_of(weight)}: {name} has shape {list(weight.shape)}, expected {list(shape)} by "
                "the config; correct it, or download the model again"
            )
        for tensor in weight.tensors.values():
            if weight.format == "dense" and tensor.dtype not in FLOATS:
                raise MismatchError(
                    f"{self._file_of(weight)}: {name} is stored as {tensor.dtype}, expected one of {', '.join(FLOATS)}"
                )
        return weight

    def require_alike(self, weight: StoredWeight, first: StoredWeight, expert: int) -> None:
        """Raises: MismatchError: an expert's weight is stored differently from the first expert's."""
        at = f"{self._file_of(weight)}: {weight.name} (expert {expert})"
        if (weight.format, weight.codec, set(weight.tensors)) != (first.format, first.codec, set(first.tensors)):
            raise MismatchError(
                f"{at} is stored as {weight.format} of {', '.join(weight.tensors)}, and that of expert 0 as "
                f"{first.format} of {', '.join(first.tensors)}, or otherwise packed; moetool serves models whose "
                "experts of one layer are all stored alike"
            )
        for role, tensor in weight.tensors.items():
            expected = first.tensors[role]
            if tensor.dtype != expected.dtype:
                raise MismatchError(
                    f"{at} is stored as {tensor.dtype}, expected {STORED_DTYPES[expected.dtype]} as in expert 0"
                )
            if tensor.shape != expected.shape:
                raise MismatchError(
                    f"{at} has {role} of shape {list(tensor.shape)}, expected {list(expected.shape)} as in expert 0"
                )


def stored_bytes(layer: MoeLayer, quantization: Quantization | None, dtype: torch.dtype) -> int:
    """Bytes of a layer's expert in a checkpoint without weights, from the config.

    Args:
        dtype: data type of unquantized weights.
    """
    total = 0
    parts = layer.form.parts
    matrices = [part.shape for part in parts if len(part.shape) == 2]
    for part in parts:
        first = part is parts[0]
        leaf = "gate_proj" if first else "down_proj"
        format = None if quantization is None else quantization.format_of(f"{layer.path}.0.{leaf}")
        if format is None or len(part.shape) != 2:
            total += torch.Size(part.shape).numel() * dtype.itemsize
            continue
        rows, columns = part.shape[::-1] if layer.form.up_transposed else part.shape
        inner = matrices[1][0] if layer.form.down_transposed else matrices[1][1]
        blocks = 2 if first and rows == 2 * inner else 1  # gate and up are separate matrices
        total += blocks * format.stored_bytes(rows // blocks, columns, dtype.itemsize)
    return total


class ExpertFiles:
    """Reads single experts of a model into memory, and writes them into slots.

    Memory holds an expert as stored: its tensors contiguous, in fixed order. A slot holds the same, unless this CPU
    computes from it and it is not sent elsewhere. Then it holds the fastest form:

    - 4-bit integers in the order of `moetool.kernels.cpu.int4`, if that can multiply them;
    - other numbers of up to eight bits as stored, if `moetool.kernels.cpu.compiled` can multiply them;
    - everything else unpacked.

    Args:
        weights: the stored weights of the experts.
        fastest: compute data type of this CPU, for slots with the fastest form; None: slots hold experts as stored.

    Attributes:
        reads: byte ranges of each expert, by key.
        stored_bytes: bytes of one expert as stored.
        shapes: shapes of an expert's parts.
        converts: whether slots differ from the stored form.
        num_layouts: layouts that `views` distinguishes.

    Raises:
        MismatchError: see `ExpertWeights.of`; or the experts of one layer differ in their stored form.
    """

    def __init__(
        self,
        shards: Shards,
        layers: Sequence[MoeLayer],
        spec: ModelSpec,
        weights: ExpertWeights,
        *,
        fastest: torch.dtype | None = None,
    ) -> None:
        self.shards = shards
        self.spec = spec
        self._weights = weights
        self.shapes = tuple(part.shape for part in layers[0].form.parts)
        self.reads: dict[int, tuple[Read, ...]] = {}
        self._layouts: list[StoredLayout] = []
        self._layout_L: list[int] = []
        for layer in layers:
            if tuple(part.shape for part in layer.form.parts) != self.shapes:
                raise MismatchError(
                    f"the experts of layer {layer.layer_id} differ in shape from those of layer "
                    f"{layers[0].layer_id}; moetool serves models whose experts all have one shape"
                )
            self._index(layer)
        self._forms = slot_forms(self._layouts, self.shapes, fastest)
        if any(isinstance(form, PackedSlot) for form in self._forms) and not all(map(self._in_even_groups, layers)):
            dense = _dense_slot(self._layouts, self.shapes, torch.bfloat16)
            self._forms = tuple(dense if isinstance(form, PackedSlot) else form for form in self._forms)
        self.stored_bytes = max(layout.num_bytes for layout in self._layouts)
        self.slot_bytes = bytes_of_slots(self._layouts, self._forms)
        self.converts = any(form is not None for form in self._forms)
        alike = self.converts and len(set(self._forms)) == 1
        self.num_layouts = 1 if alike else len(self._layouts)
        self._scratch = threading.local()

    def has_weights(self, key: int) -> bool:
        """Whether an expert has weights to load; others return their input."""
        return key in self.reads

    def read_stored(self, key: int, memory: torch.Tensor) -> int:
        """Read the expert `key` into memory (uint8 [stored_bytes]).

        Returns:
            Bytes read; 0 for an expert without weights.

        Raises:
            OSError: the disk failed.
        """
        total = 0
        for read in self.reads.get(key, ()):
            data = torch.frombuffer(self.shards.read(read.file, read.offset, read.num_bytes), dtype=torch.uint8)
            for source, target, num_bytes in read.pieces:
                memory[target : target + num_bytes].copy_(data[source : source + num_bytes])
            total += read.num_bytes
        return total

    def fill(self, key: int, memory: torch.Tensor, slot: torch.Tensor) -> None:
        """Write the expert `key` from memory into a slot (uint8 [slot_bytes]) on the CPU."""
        number = self._layout_L[key // self.spec.num_experts]
        layout, form = self._layouts[number], self._forms[number]
        if form is None:
            slot[: layout.num_bytes].copy_(memory[: layout.num_bytes])
        elif self.has_weights(key):
            form.fill(layout, memory, slot)

    def read_into(self, key: int, slot: torch.Tensor) -> int:
        """Read the expert `key` into a slot. Returns and raises like `read_stored`."""
        if self._forms[self._layout_L[key // self.spec.num_experts]] is None:
            return self.read_stored(key, slot)
        memory: torch.Tensor | None = getattr(self._scratch, "memory", None)
        if memory is None:
            with torch.inference_mode(False):  # it may be used outside that mode later
                memory = self._scratch.memory = torch.empty(self.stored_bytes, dtype=torch.uint8)
        num_bytes = self.read_stored(key, memory)
        self.fill(key, memory, slot)
        return num_bytes

    def layout_of(self, key: int) -> int:
        """Number of the layout of an expert's views, below `num_layouts`."""
        return self._layout_L[key // self.spec.num_experts] if self.num_layouts > 1 else 0

    def stored_layout(self, key: int) -> StoredLayout:
        """Layout of an expert in memory as stored."""
        return self._layouts[self._layout_L[key // self.spec.num_experts]]

    def views(self, slot: torch.Tensor, layout: int = 0) -> tuple[Weight, ...]:
        """Parts of the expert in a slot, in the order of `ExpertForm.parts`.

        Args:
            layout: see `layout_of`.
        """
        form = self._forms[layout]
        return self._layouts[layout].views(slot, self.shapes) if form is None else form.views(slot)

    def stacked(self, layer: MoeLayer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Read all experts of a layer, unpacked: tensors [E, ...] by the first parameter of each part.

        Raises:
            OSError: the disk failed.
        """
        slot = torch.empty(self.slot_bytes, dtype=torch.uint8)
        views = self.views(slot, self.layout_of(self.spec.expert_key(layer.index, 0)))
        found = {
            part.parameters[0]: torch.empty((layer.form.num_experts, *part.shape), dtype=dtype)
            for part in layer.form.parts
        }
        for expert in range(layer.form.num_experts):
            self.read_into(self.spec.expert_key(layer.index, expert), slot)
            for whole, view in zip(found.values(), views, strict=True):
                whole[expert] = view.to(dtype)
        return found

    def _in_even_groups(self, layer: MoeLayer) -> bool:
        """Whether all groups of the first expert's weights have one size."""
        for weight in chain.from_iterable(self._weights.of(layer, 0)):
            if (order := weight.tensors.get("order")) is not None:
                data = self.shards.read(order.file, order.offset, order.num_bytes)
                if not in_even_groups(data, weight.tensors["scale"].shape[0]):
                    return False
        return True

    def _index(self, layer: MoeLayer) -> None:
        """Find a layer's experts, which must share one stored form."""
        first = self._weights.of(layer, 0)
        layout = layout_of(first)
        if layout not in self._layouts:
            self._layouts.append(layout)
        self._layout_L.append(self._layouts.index(layout))
        for expert in range(layer.form.num_experts):
            parts = self._weights.of(layer, expert)
            pairs = zip(chain.from_iterable(parts), chain.from_iterable(first), strict=True)
            for weight, other in pairs:
                self._weights.require_alike(weight, other, expert)
            located = [(parts[f.part][f.block].tensors[f.role], f.offset) for f in layout.fields]
            self.reads[self.spec.expert_key(layer.index, expert)] = _coalesce(located)


def slot_forms(
    layouts: Sequence[StoredLayout], shapes: tuple[tuple[int, ...], ...], fastest: torch.dtype | None
) -> tuple[SlotForm | None, ...]:
    """The slot form of each layout's experts; None: as stored.

    Args:
        shapes: shapes of an expert's parts.
        fastest: as for `ExpertFiles`.
    """
    if fastest is None:
        return (None,) * len(layouts)
    found: list[SlotForm | None] = []
    for layout in layouts:
        packed = packed_slot(layout) if fastest == torch.bfloat16 else None
        found.append(packed or scaled_slot(layout, shapes, fastest))
    as_stored = all(layout.packed for layout, form in zip(layouts, found, strict=True) if form is None)
    rest = None if as_stored else _dense_slot(layouts, shapes, fastest)
    return tuple(form or rest for form in found)


def bytes_of_slots(layouts: Sequence[StoredLayout], forms: Sequence[SlotForm | None]) -> int:
    """Bytes of a slot that holds an expert of any layout."""
    pairs = zip(layouts, forms, strict=True)
    return max(layout.num_bytes if form is None else form.num_bytes for layout, form in pairs)


def _dense_slot(layouts: Sequence[StoredLayout], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> DenseSlot:
    transposed = tuple(
        all(codec.transposed for layout in layouts for codec in layout.codecs[part]) for part in range(len(shapes))
    )
    return DenseSlot(shapes, transposed, dtype)


def _is_stacking(converter: Any) -> bool:
    """Whether a conversion only stacks whole tensors of single experts."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _is_joining(converter: Any) -> bool:
    """Whether a conversion only joins the rows of stacked tensors."""
    return [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations] == [("Concatenate", 1)]


def _transposing(converter: Any) -> Any | None:
    """Return a conversion's only step if it transposes a stacked tensor of matrices."""
    first, *more = converter.operations
    if type(first).__name__ == "Transpose" and not more and {first.dim0, first.dim1} == {1, 2}:
        return first
    return None


def _numbered(name: str, expert: int) -> str:
    """Name of the same tensor of another expert: the last number between dots is the expert's."""
    return re.sub(r"^(.*)\.\d+\.", lambda match: f"{match[1]}.{expert}.", name)


def _coalesce(parts: list[tuple[Tensor, int]]) -> tuple[Read, ...]:
    """Join adjacent parts of one file into one read."""
    reads: list[Read] = []
    for tensor, target in sorted(parts, key=lambda part: (part[0].file, part[0].offset)):
        last = reads[-1] if reads else None
        if last is not None and last.file == tensor.file and last.offset + last.num_bytes == tensor.offset:
            piece = ByteRun(last.num_bytes, target, tensor.num_bytes)
            reads[-1] = Read(last.file, last.offset, last.num_bytes + tensor.num_bytes, (*last.pieces, piece))
        else:
            reads.append(Read(tensor.file, tensor.offset, tensor.num_bytes, (ByteRun(0, target, tensor.num_bytes),)))
    return tuple(reads)
