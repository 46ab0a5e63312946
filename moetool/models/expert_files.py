"""Where each expert lies in the safetensors shards, and reading one without the page cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moetool.errors import MismatchError
from moetool.models import packed_product
from moetool.models.checkpoint import Source
from moetool.models.packed import Block, PackedWeight
from moetool.models.shards import DTYPES, OTHER_DTYPES, PackedTensors, Shards, Tensor
from moetool.models.spec import MoeLayer
from moetool.types import ModelSpec


class Piece(NamedTuple):
    """A run of bytes of a read that belongs at `target` in the slot; `source` counts from the read's start."""

    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read: `num_bytes` at `offset` of a shard, cut into pieces of a slot."""

    file: int
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """A tensor of an expert and its place in a slot.

    Attributes:
        part: number among the form's parts.
        block: number among the tensors that lie one under the other in that part.
        role: `weight`, or for packed ones `words`, `zero` or `scale`.
        columns: inputs of a packed weight.
    """

    part: int
    block: int
    role: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    columns: int = 0

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


_ROLES = ("words", "zero", "scale", "weight")  # the order in a slot; words come first so that all are aligned


class ExpertFiles:
    """Reads any one expert of a model into a slot.

    A slot holds the parts of the family's `ExpertForm` one after the other, in the checkpoint's data type, whatever
    order the files have. An expert is read from tensors of its own or out of stacked ones; what makes what is
    transformers' to say (`moetool.models.checkpoint`). Packed experts stay packed: the slot holds the words of all
    parts, then zero points, then scales.

    Args:
        sources: what makes each parameter, from `moetool.models.checkpoint.sources`.
        products: whether packed experts are put into the order that `moetool.models.packed_product` computes with,
            where it can: for slots that are computed with on this processor, in bfloat16, and are not sent elsewhere.

    Raises:
        MismatchError: a tensor is missing, has another shape or type than the config says, or would have to be
            computed from others before it can be used.
    """

    def __init__(
        self,
        shards: Shards,
        layers: list[MoeLayer],
        spec: ModelSpec,
        sources: dict[str, Source],
        *,
        products: bool = False,
    ) -> None:
        self.shards = shards
        self.spec = spec
        self._sources = sources
        self._reads: dict[int, tuple[Read, ...]] = {}
        form = layers[0].form
        self._shapes = [part.shape for part in form.parts]
        self._fields: list[_Field] = []
        self.slot_bytes = 0
        for part, block, role, tensor, columns in self._tensors(layers[0], 0):
            dtype = _dtype(tensor, f"{layers[0].path}.{form.parts[part].parameters[0]}")
            offset = -(-self.slot_bytes // dtype.itemsize) * dtype.itemsize
            field = _Field(
                part=part, block=block, role=role, shape=tensor.shape, dtype=dtype, offset=offset, columns=columns
            )
            self._fields.append(field)
            self.slot_bytes = offset + field.num_bytes
        self._roles: list[dict[str, list[_Field]]] = [{} for _ in form.parts]
        for field in self._fields:
            self._roles[field.part].setdefault(field.role, []).append(field)
        if any("weight" in roles and "words" in roles for roles in self._roles):
            raise MismatchError(
                f"{layers[0].path} packs a part of each expert's first product and not the rest; moetool serves models "
                "whose experts are packed as a whole"
            )
        self._tile = packed_product.tile_rows() if products and self._multiplied() else 0
        self._arranged = {f.offset: f for f in self._fields if f.role == "words"} if self._tile else {}
        for layer in layers:
            if [part.shape for part in layer.form.parts] != self._shapes:
                raise MismatchError(
                    f"the experts of layer {layer.layer_id} have other shapes than those of layer "
                    f"{layers[0].layer_id}; moetool serves models whose experts all have one shape"
                )
            for expert in range(layer.form.num_experts):
                self._reads[spec.expert_key(layer.index, expert)] = _coalesce(self._find(layer, expert))

    def read_into(self, key: int, slot: torch.Tensor) -> int:
        """Fill a slot (uint8 [slot_bytes]) with the expert `key`.

        Returns:
            The bytes that were read; 0 for an expert without weights.

        Raises:
            OSError: the disk failed.
        """
        total = 0
        for read in self._reads.get(key, ()):
            data = torch.frombuffer(self.shards.read(read.file, read.offset, read.num_bytes), dtype=torch.uint8)
            for source, target, num_bytes in read.pieces:
                field, piece = self._arranged.get(target), data[source : source + num_bytes]
                if field is None:
                    slot[target : target + num_bytes].copy_(piece)
                else:
                    packed = piece.view(field.shape[0], -1)
                    packed_product.arrange(packed, slot[target : target + num_bytes], self._tile)
            total += read.num_bytes
        return total

    def views(self, slot: torch.Tensor) -> tuple[torch.Tensor | PackedWeight, ...]:
        """The parts of the expert in a slot, as `ExpertForm.parts` orders them."""
        parts: list[torch.Tensor | PackedWeight] = []
        for shape, roles in zip(self._shapes, self._roles, strict=True):
            if "weight" in roles:
                parts.append(_lying_together(slot, roles["weight"]).view(shape))
                continue
            words, bits = roles["words"], self.shards.bits
            # Tensors that lie together are unpacked together, unless zero points end inside a word between them.
            together = "zero" not in roles or all(field.shape[0] * bits % 32 == 0 for field in words[:-1])
            blocks = [slice(None)] if together else [slice(i, i + 1) for i in range(len(words))]
            made = [
                Block(
                    _lying_together(slot, words[block]),
                    _lying_together(slot, roles["scale"][block]),
                    _lying_together(slot, roles["zero"][block]) if "zero" in roles else None,
                    words[0].columns,
                    self._tile,
                )
                for block in blocks
            ]
            parts.append(PackedWeight(tuple(made), bits))
        return tuple(parts)

    def stacked(self, layer: MoeLayer, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All experts of a layer in memory, unpacked: tensors [E, ...] by the first parameter of each part.

        Raises:
            OSError: the disk failed.
        """
        slot = torch.empty(self.slot_bytes, dtype=torch.uint8)
        views = self.views(slot)
        found = {
            part.parameters[0]: torch.empty((layer.form.num_experts, *part.shape), dtype=dtype)
            for part in layer.form.parts
        }
        for expert in range(layer.form.num_experts):
            self.read_into(self.spec.expert_key(layer.index, expert), slot)
            for whole, view in zip(found.values(), views, strict=True):
                whole[expert] = view.to(dtype)
        return found

    def _multiplied(self) -> bool:
        """Whether every part is packed in a way that `packed_product` takes."""
        if self.shards.bits != 4 or any("words" not in roles or "zero" in roles for roles in self._roles):
            return False
        return all(
            packed_product.multiplies(words.shape[0], words.columns, scale.shape[1], scale.dtype)
            for roles in self._roles
            for words, scale in zip(roles["words"], roles["scale"], strict=True)
        )

    def _find(self, layer: MoeLayer, expert: int) -> list[tuple[Tensor, int]]:
        """The expert's tensors (or its parts of stacked ones) with their places in the slot."""
        tensors = self._tensors(layer, expert)
        where = [(part, block, role) for part, block, role, _, _ in tensors]
        if where != [(field.part, field.block, field.role) for field in self._fields]:
            raise MismatchError(
                f"expert {expert} of layer {layer.layer_id} is packed otherwise than expert 0 of the first MoE layer; "
                "moetool serves models whose experts are all stored alike"
            )
        found = []
        for (part, _, _, tensor, _), field in zip(tensors, self._fields, strict=True):
            name = f"{layer.path}.{layer.form.parts[part].parameters[0]} of expert {expert}"
            if (DTYPES | OTHER_DTYPES).get(tensor.dtype) != field.dtype:
                raise MismatchError(
                    f"{name} is stored as {tensor.dtype}, expected {field.dtype} as in the first MoE layer"
                )
            if tensor.shape != field.shape:
                raise MismatchError(
                    f"{name} has {field.role} of shape {list(tensor.shape)}, expected {list(field.shape)} as in the "
                    "first MoE layer"
                )
            found.append((tensor, field.offset))
        return found

    def _tensors(self, layer: MoeLayer, expert: int) -> list[tuple[int, int, str, Tensor, int]]:
        """The expert's tensors in the order of a slot: part, block, role, tensor, and inputs where it is packed."""
        found = []
        for number, part in enumerate(layer.form.parts):
            blocks = [t for name in part.parameters for t in self._share(layer, name, part.share, expert)]
            for i, tensor in enumerate(blocks):
                if isinstance(tensor, Tensor):
                    found.append((number, i, "weight", tensor, 0))
                    continue
                roles = {"words": tensor.words, "zero": tensor.zero, "scale": tensor.scale}
                found += [(number, i, role, t, tensor.columns) for role, t in roles.items() if t is not None]
        return sorted(found, key=lambda item: _ROLES.index(item[2]))

    def _share(
        self, layer: MoeLayer, parameter: str, share: tuple[int, ...], expert: int
    ) -> Sequence[Tensor | PackedTensors]:
        """The tensors, or parts of tensors, that make one expert's share of a parameter."""
        name = f"{layer.path}.{parameter}"
        source = self._source(name)
        if source.converter is None:
            whole = self._take(next(iter(source.names)), tuple(layer.experts.get_parameter(parameter).shape))
            size = torch.Size(share).numel() * _dtype(whole, name).itemsize
            return [Tensor(whole.file, whole.offset + expert * size, size, share, whole.dtype)]
        if not _is_stacking(source.converter):
            steps = ", ".join(type(step).__name__ for step in source.converter.operations)
            raise MismatchError(
                f"{name} has to be computed from its tensors ({steps}), so its experts cannot be read one by one; "
                "save the model again with transformers' save_pretrained"
            )
        patterns = source.converter.source_patterns  # gate and up, say: one under the other
        rows = (share[0] // len(patterns), *share[1:])
        tensors: list[Tensor | PackedTensors] = []
        for pattern in patterns:
            if pattern not in source.names:
                raise MismatchError(f"{name} lacks the tensors {pattern}; download the model again")
            stored = _numbered(source.names[pattern][0], expert)
            tensor = self._take(stored, rows)
            tensors.append(self.shards.packed.get(stored, tensor))
        return tensors

    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            raise MismatchError(
                f"no tensor in the weight files of {self.spec.name} makes {name}: one is missing, or this is a layout "
                "that transformers does not read; download the model again"
            )
        return source

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.shards.tensors.get(name)
        if tensor is None:
            raise MismatchError(f"{name} is missing from the weight files; download the model again")
        if tensor.shape != shape:
            raise MismatchError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)} by the config")
        return tensor


def _lying_together(slot: torch.Tensor, fields: list[_Field]) -> torch.Tensor:
    """Tensors that follow each other in a slot, as one: one under the other."""
    first = fields[0]
    flat = slot[first.offset : first.offset + sum(field.num_bytes for field in fields)]
    return flat.view(first.dtype).view(sum(field.shape[0] for field in fields), *first.shape[1:])


def _dtype(tensor: Tensor, name: str) -> torch.dtype:
    if tensor.dtype not in DTYPES and tensor.dtype != "I32":  # words of packed weights
        raise MismatchError(f"{name} is stored as {tensor.dtype}, expected one of {', '.join(DTYPES)}")
    return (DTYPES | OTHER_DTYPES)[tensor.dtype]


def _is_stacking(converter: Any) -> bool:
    """Whether a conversion only lays whole tensors of single experts side by side."""
    steps = [(type(step).__name__, getattr(step, "dim", None)) for step in converter.operations]
    return steps in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def _numbered(name: str, expert: int) -> str:
    """The name of the same tensor of another expert: the last number between dots is the expert's."""
    return re.sub(r"^(.*)\.\d+\.", lambda match: f"{match[1]}.{expert}.", name)


def _coalesce(parts: list[tuple[Tensor, int]]) -> tuple[Read, ...]:
    """Join parts that lie side by side in one file into one read."""
    reads: list[Read] = []
    for tensor, target in sorted(parts, key=lambda part: (part[0].file, part[0].offset)):
        last = reads[-1] if reads else None
        if last is not None and last.file == tensor.file and last.offset + last.num_bytes == tensor.offset:
            piece = Piece(last.num_bytes, target, tensor.num_bytes)
            reads[-1] = Read(last.file, last.offset, last.num_bytes + tensor.num_bytes, (*last.pieces, piece))
        else:
            reads.append(Read(tensor.file, tensor.offset, tensor.num_bytes, (Piece(0, target, tensor.num_bytes),)))
    return tuple(reads)
