"""A checkpoint as other libraries read it: an oracle for moetool's own reading of weights and of counts."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from moetool.base.errors import MismatchError
from moetool.base.json_files import read_json
from moetool.models.checkpoint import Checkpoint
from moetool.models.files.gguf_header import read_gguf_header
from moetool.models.gguf.blocks import GgmlCodec
from moetool.models.gguf.weights import GgufPart, GgufWeights
from moetool.models.weights.format import unpack

OURS = "moetool"
"""Reader of the parts that no other library reads."""
_COMPRESSED = frozenset({"float-quantized", "naive-quantized", "int-quantized", "pack-quantized"}) | {
    f"{kind}-pack-quantized" for kind in ("nvfp4", "mxfp4")
}
_F32 = 0  # of ggml's types
_NEXTN = re.compile(r"(?:.*\.)?(?:nextn|eh_proj|enorm|hnorm|shared_head)\.")
"""Tensors of multi-token prediction blocks only."""


class StoredCounts(NamedTuple):
    """Counts of a model by the tensors in its files.

    Attributes:
        layers: decoder layers, without multi-token prediction blocks.
        experts: routed experts by layer, where known.
    """

    layers: int
    experts: dict[int, int]


class WeightLibrary(Protocol):
    """A library that reads a checkpoint.

    Attributes:
        read_by: the reader of each part: `files` (which ones), `counts`, `names` (which tensors make a weight),
            `numbers` (as stored), `unpacking` of quantized ones.
    """

    name: str
    read_by: dict[str, str]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight by its name in an unquantized checkpoint; in this data type if it is unpacked."""

    def problems(self, checkpoint: Checkpoint, layers: int) -> list[str]:
        """Return where the model as moetool runs it contradicts its files.

        Args:
            layers: decoder layers as served.
        """


def open_library(checkpoint: Checkpoint) -> WeightLibrary:
    """Open a checkpoint with the library of its format: the gguf package, compressed-tensors or safetensors."""
    quantization = checkpoint.quantization
    if isinstance(quantization, GgufWeights):
        return GgufPackage(checkpoint, quantization)
    if quantization is not None and quantization.method == "compressed-tensors":
        raw = checkpoint.raw["quantization_config"]
        groups = list(raw.get("config_groups", {}).values())
        if len(groups) == 1 and (form := groups[0].get("format") or raw.get("format")) in _COMPRESSED:
            return CompressedTensors(checkpoint, groups[0], form)
    return Safetensors(checkpoint)


class GgufPackage:
    """The gguf package. It finds most tensors of a weight by llama.cpp's own table of names.

    Which header values make the config, and the inverse of the converter's changes to tensors, are moetool's.
    """

    name = "the gguf package"

    def __init__(self, checkpoint: Checkpoint, weights: GgufWeights) -> None:
        import gguf

        readers = [gguf.GGUFReader(file) for file in checkpoint.index.files]
        self._fields = readers[0].fields
        self._found = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._weights, self._index = weights, checkpoint.weight_index
        architecture = self._fields["general.architecture"].contents()
        known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
        table = gguf.get_tensor_name_map(known, max(_blocks(self._found), default=0) + 1)
        self._names = {name: self._name(name, table) for part in weights.parts.items() for name in _roles(*part)}
        by_table = sum(found is not None for found in self._names.values())
        self.read_by = {
            "files": OURS,
            "counts": "gguf",
            "names": f"gguf ({by_table} of {len(self._names)} tensors)",
            "numbers": "gguf",
            "unpacking": "gguf",
        }

    def _name(self, name: str, table: Any) -> str | None:
        """The tensor of a weight by llama.cpp's table; None if the table or the file lacks it."""
        found = table.get_name(name, try_suffixes=(".weight", ".bias")) or ""
        return next((stored for stored in (found, f"{found}.weight") if stored in self._found), None)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from gguf import dequantize

        part, shape = self._weights.parts[name], self._index.weights[name].shape
        stored = {}
        for (role, ours), key in zip(part.tensors.items(), _roles(name, part), strict=True):
            tensor = self._found[self._names[key] or ours]
            stored[role] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kinds = tuple((role, _F32) for role in stored)
        if len(kinds) == 1 and part.undo is None and not part.transposed:
            return next(iter(stored.values())).reshape(shape).to(dtype)
        return unpack(GgmlCodec(kinds, part.undo, part.transposed, part.interleaved), stored, shape, dtype)

    def problems(self, checkpoint: Checkpoint, layers: int) -> list[str]:
        from gguf import GGUFValueType

        strings = [GGUFValueType.ARRAY, GGUFValueType.STRING]
        ours, found = read_gguf_header(checkpoint.path).metadata, []
        for key, field in self._fields.items():
            if key.startswith("GGUF."):
                continue
            # moetool keeps only the length of a list of strings
            theirs = len(field.data) if field.types == strings else field.contents()
            if theirs != (read := ours.get(key)):
                found.append(f"header: {key} is {theirs} by {self.name}, and {read} as moetool reads it")
        blocks = _blocks(self._found)
        blocks = {number: leaves for number, leaves in blocks.items() if not any(map(_NEXTN.match, leaves))}
        experts = {
            number: int(self._found[f"blk.{number}.{leaf}"].shape[-1])
            for number, leaves in blocks.items()
            for leaf in leaves
            if re.fullmatch(r"ffn_\w+_exps\.weight|ffn_gate_inp\.weight", leaf)
        }
        return [*found, *_compare(checkpoint, layers, StoredCounts(len(blocks), experts), self.name)]


def _roles(name: str, part: GgufPart) -> list[str]:
    """Names of a weight's tensors in a checkpoint of separate experts' matrices."""
    if "gate_up_proj" in name:
        return [name.replace("gate_up_proj", f"{role}_proj") for role in part.tensors]
    return [name] * len(part.tensors)


def _blocks(names: Iterable[str]) -> dict[int, set[str]]:
    """Names of the tensors within each block of a GGUF file."""
    found: dict[int, set[str]] = {}
    for name in names:
        if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


class Safetensors:
    """The safetensors library, with the files that transformers reads. moetool unpacks quantized numbers."""

    name = "safetensors"

    def __init__(self, checkpoint: Checkpoint) -> None:
        from safetensors import safe_open

        self._path, self._index = checkpoint.path, checkpoint.weight_index
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in weight_files(checkpoint.path):
            file = safe_open(path, framework="pt").__enter__()
            for name in file.keys():  # noqa: SIM118  # it cannot be iterated
                self._files[name] = file
                self._shapes[name] = file.get_slice(name).get_shape()
        self._stored = {
            (tensor.file, tensor.offset): name for name, tensor in checkpoint.index.tensors.items() if tensor.num_bytes
        }
        self.read_by = dict.fromkeys(("files", "counts", "numbers"), "safetensors") | {"names": OURS}
        if checkpoint.quantization is not None:
            self.read_by["unpacking"] = OURS

    def tensor(self, name: str) -> torch.Tensor:
        """Read a stored tensor, in its own data type. Raises: MismatchError: transformers' files lack it."""
        if name not in self._files:
            raise MismatchError(f"{self._path} holds {name} in files that transformers does not read")
        return self._files[name].get_tensor(name)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        weight = self._index.weights[name]
        if weight.format == "dense":
            return self.tensor(name)
        stored = {
            role: self.tensor(self._stored[tensor.file, tensor.offset]).reshape(tensor.shape)
            for role, tensor in weight.tensors.items()
        }
        return unpack(weight.codec, stored, weight.shape, dtype)

    def problems(self, checkpoint: Checkpoint, layers: int) -> list[str]:
        return _compare(checkpoint, layers, _count(self._shapes), self.read_by["counts"])


class CompressedTensors(Safetensors):
    """The compressor of a scheme of compressed-tensors, on tensors that the safetensors library reads."""

    name = "compressed-tensors"

    def __init__(self, checkpoint: Checkpoint, group: Mapping[str, Any], form: str) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme

        super().__init__(checkpoint)
        self._scheme = QuantizationScheme.model_validate(group)
        self._compressor = BaseCompressor.get_value_from_registry(form)
        self.read_by["unpacking"] = self.name

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name in self._files and f"{name}_scale" not in self._files:
            return self.tensor(name)
        stem = name.removesuffix("weight")
        local = {
            stored.removeprefix(stem): self.tensor(stored)
            for stored in self._files
            if stored.startswith(f"{name}_") or stored == name
        }
        value: torch.Tensor = self._compressor.decompress(local, self._scheme)["weight"]
        return value.to(dtype)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that transformers reads."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    index = read_json(folder / "model.safetensors.index.json", advice="download the model again")
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _count(shapes: Mapping[str, Sequence[int]]) -> StoredCounts:
    """Count the decoder's blocks and their experts by names and shapes.

    Of several lists of blocks the decoder's is the largest with names of experts, or else the largest.
    """
    lists: dict[str, dict[int, dict[str, Sequence[int]]]] = {}
    sizes: dict[str, tuple[bool, int]] = {}
    for name, shape in shapes.items():
        if match := re.match(r"(.*?)\.(\d+)\.(.+)", name):
            lists.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = shape
            routed, size = sizes.get(match[1], (False, 0))
            sizes[match[1]] = (routed or "experts." in match[3], size + math.prod(shape))
    blocks = lists[max(sizes, key=sizes.__getitem__)]
    layers = {number: leaves for number, leaves in blocks.items() if not any(map(_NEXTN.match, leaves))}
    experts = {}
    for number, leaves in layers.items():
        numbered = {int(match[1]) for leaf in leaves if (match := re.search(r"\bexperts\.(\d+)\.", leaf))}
        stacked = [leaf for leaf in leaves if re.search(r"\bexperts\.\w+$", leaf) and len(leaves[leaf]) > 2]
        if numbered:
            experts[number] = len(numbered)
        elif stacked:
            experts[number] = leaves[stacked[0]][0]
    return StoredCounts(len(layers), experts)


def _compare(checkpoint: Checkpoint, layers: int, counts: StoredCounts, library: str) -> list[str]:
    """Differences between the served model, of this number of layers, and the counts of its files."""
    found = []
    if layers != counts.layers:
        found.append(f"layers: {counts.layers} in the files by {library}, {layers} as served")
    served = {layer.layer_id: (layer.form.num_experts, layer.num_experts) for layer in checkpoint.layers}
    for number, stored in sorted(counts.experts.items()):
        if stored not in (run := served.get(number, (0,))):
            found.append(f"layer {number}: {stored} experts in the files by {library}, {run[-1]} as served")
    return found
