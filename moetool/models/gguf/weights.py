"""GGUF files of llama.cpp: config, tensors and weights of a model.

A layer's experts are stacked: [experts, out, bytes of a row]. One expert is a contiguous slice of each tensor, and is
read in place.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetool.base.errors import MismatchError, UsageError
from moetool.models.files.gguf_end_tokens import end_tokens
from moetool.models.files.gguf_header import PLAIN, GgufHeader, GgufTensor, read_gguf_header
from moetool.models.files.tensor_index import Tensor, TensorIndex
from moetool.models.gguf.architectures import Architecture, find_architecture
from moetool.models.gguf.blocks import GgmlCodec, Undo
from moetool.models.gguf.changes import FlatExperts
from moetool.models.gguf.configs import common_config
from moetool.models.gguf.metadata import Metadata
from moetool.models.weights.format import StoredWeight, as_dense
from moetool.models.weights.quantization_config import Quantization

_EXPERTS = {
    True: (("gate_up_proj", ("gate", "up")), ("gate_up_proj", ("gate_up",)), ("down_proj", ("down",))),
    False: (("up_proj", ("up",)), ("down_proj", ("down",))),
}
"""Parameters of experts with and without a gate, and the leaves of their tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufPart:
    """Tensors of one weight.

    Attributes:
        tensors: their ggml names, by role.
        undo, interleaved, transposed: see `GgmlCodec`.
    """

    tensors: Mapping[str, str]
    shape: tuple[int, ...]
    undo: Undo | None = None
    interleaved: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeights(Quantization):
    """The weights of a GGUF file.

    Attributes:
        parts: tensors of each weight, by its name.
        kinds: ggml types of its tensors, by ggml's names.
    """

    parts: Mapping[str, GgufPart]
    kinds: Mapping[str, int]

    def claim(
        self, tensors: Mapping[str, Tensor], files: Sequence[Path], read: Callable[[Tensor], bytes]
    ) -> dict[str, StoredWeight]:
        return {name: self._weight(name, part, tensors) for name, part in self.parts.items()}

    def _weight(self, name: str, part: GgufPart, tensors: Mapping[str, Tensor]) -> StoredWeight:
        mine = {role: tensors[stored] for role, stored in part.tensors.items()}
        kinds = tuple((role, self.kinds[stored]) for role, stored in part.tensors.items())
        if len(kinds) == 1 and kinds[0][1] in PLAIN and part.undo is None and not part.transposed:
            (tensor,) = mine.values()
            return as_dense(name, tensor._replace(shape=part.shape))
        codec = GgmlCodec(kinds, part.undo, part.transposed, part.interleaved)
        share = GgmlCodec(kinds, transposed=part.undo.transposed) if isinstance(part.undo, FlatExperts) else None
        return StoredWeight(name=name, shape=part.shape, tensors=mine, codec=codec, format="gguf", share_codec=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """Header of a GGUF file.

    Attributes:
        config: the model's config, as in a config.json.
        contradictions: counts of its header that its tensors contradict; the config follows the tensors.
        content: identity of the model.
        index: its tensors, by ggml's names.
        tokenizer: kind of its tokenizer, and the name of the rule that splits text.
        buffers: see `Architecture`.
    """

    config: dict[str, Any]
    contradictions: list[str]
    content: bytes
    tokenizer: tuple[Any, Any]
    index: TensorIndex
    weights: GgufWeights
    buffers: Mapping[str, list[int]]


def read_gguf(path: Path, *, whole: bool = True) -> GgufFile:
    """Read the header of a GGUF file, or of all files of a split model.

    Args:
        whole: whether the files must have the length in their headers.

    Raises:
        UsageError: its architecture is not supported, or it holds tensors that its architecture lacks.
        MismatchError: it is damaged, or its tensors lack a layer of its header.
    """
    header = read_gguf_header(path)
    if whole:
        header.require_whole()
    name = header.metadata.get("general.architecture")
    shapes = {stored: tensor.shape for stored, tensor in header.tensors.items()}
    meta = Metadata(str(name), header.metadata, shapes, _rope_factors(header))
    try:
        architecture = find_architecture(meta)
        contradictions = meta.contradictions()
        config = {"model_type": architecture.family, **common_config(meta), **architecture.config(meta)}
        parts = _parts(header, meta, architecture)
        buffers = architecture.buffers(meta)
        ends = end_tokens(header.metadata, header.end_ids)
    except UsageError as error:
        raise UsageError(f"{path} {error}") from None
    except KeyError as error:
        raise MismatchError(f"{path} is a damaged GGUF file: it lacks {error}; download the model again") from None
    except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:  # values of the wrong kind
        raise MismatchError(f"{path} is a damaged GGUF file: {error}; download the model again") from None
    kinds = {stored: tensor.kind for stored, tensor in header.tensors.items()}
    tensors = {stored: _tensor(tensor) for stored, tensor in header.tensors.items()}
    # `content` leaves further end tokens out: they change no weight, and revisions stay those of earlier versions.
    if (first := meta.get("ple.eos_token_id")) is not None:  # n-grams begin anew at the first of them
        ends = list(dict.fromkeys([first, *ends]))
    text = config | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    outer = {"model_type": architecture.within, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    return GgufFile(
        config=outer if architecture.within else text,
        contradictions=contradictions,
        content=json.dumps([config, sorted(kinds.items())], sort_keys=True).encode(),
        tokenizer=(header.metadata.get("tokenizer.ggml.model"), header.metadata.get("tokenizer.ggml.pre")),
        index=TensorIndex(header.files, header.stamps, tensors),
        weights=GgufWeights(method="gguf", groups=(), parts=parts, kinds=kinds),
        buffers=buffers,
    )


def _rope_factors(header: GgufHeader) -> tuple[float, ...]:
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None or PLAIN.get(tensor.kind) != "F32":
        return ()
    with header.files[tensor.file].open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    return struct.unpack(f"<{tensor.num_bytes // 4}f", data) if len(data) == tensor.num_bytes else ()


def _tensor(tensor: GgufTensor) -> Tensor:
    if tensor.kind in PLAIN:
        return Tensor(tensor.file, tensor.offset, tensor.num_bytes, tensor.shape, PLAIN[tensor.kind])
    rows = tensor.shape[:-1]
    return Tensor(tensor.file, tensor.offset, tensor.num_bytes, (*rows, tensor.num_bytes // math.prod(rows)), "U8")


def _parts(header: GgufHeader, meta: Metadata, architecture: Architecture) -> dict[str, GgufPart]:
    """Return the weights of the model, and their tensors."""
    left = {
        name: tensor.shape
        for name, tensor in header.tensors.items()
        if name not in architecture.in_config and not _is_prediction_layer(name, meta)
    }
    found = {}
    for layer in range(meta.num_layers):
        block = architecture.path(f"{architecture.layers}.{layer}")
        for target, leaves, undo in architecture.joined(meta):
            names = [f"blk.{layer}.{leaf}" for leaf in leaves]
            if left.keys() >= set(names):
                shape = undo.shape(*(left.pop(name) for name in names))
                tensors = dict(zip(leaves, names, strict=True))
                found[f"{block}.{target}"] = GgufPart(tensors=tensors, shape=shape, undo=undo)
        root = f"{block}.{architecture.experts}"
        for end, suffix in ((".weight", ""), (".bias", "_bias")):
            for target, leaves in _EXPERTS[architecture.gated]:
                names = [f"blk.{layer}.ffn_{leaf}_exps{end}" for leaf in leaves]
                there = left.keys() & set(names)
                if there and (lost := set(names) - there):
                    raise ValueError(f"it holds {min(there)} without {min(lost)}")
                if there:
                    shapes = [left.pop(name) for name in names]
                    tensors = dict(zip(leaves, names, strict=True))
                    found[f"{root}.{target}{suffix}"] = _expert_part(tensors, shapes, architecture)
    changed, in_layer = architecture.undo(meta), architecture.in_layer(meta)
    for name, shape in left.items():
        parameter = in_layer.get(name) or architecture.renamed(name)
        if parameter is None:
            raise UsageError(
                f"holds {name}, which moetool does not support in architecture {meta.architecture}; use the model "
                "in Hugging Face format"
            )
        change = next((change for end, change in changed.items() if parameter.endswith(end)), None)
        found[parameter] = GgufPart(tensors={"blocks": name}, shape=_whole_shape(parameter, shape), undo=change)
    return found


def _is_prediction_layer(name: str, meta: Metadata) -> bool:
    """Whether a tensor belongs to a multi-token prediction layer."""
    return name.startswith("blk.") and int(name.split(".")[1]) >= meta.num_layers


def _expert_part(tensors: dict[str, str], shapes: list[tuple[int, ...]], architecture: Architecture) -> GgufPart:
    """Experts of a layer: [experts, out, in], or [experts, in, out] if transposed."""
    first, *others = tensors.values()
    for name, shape in zip(others, shapes[1:], strict=True):
        if shape != shapes[0]:
            raise ValueError(f"{name} has shape {list(shape)}, expected {list(shapes[0])} as {first}")
    experts, rows, *columns = shapes[0]
    shape = (experts, rows * len(shapes), *columns)
    transposed = architecture.transposed and len(shape) == 3
    return GgufPart(
        tensors=tensors,
        shape=(experts, *shape[:0:-1]) if transposed else shape,
        interleaved=architecture.interleaved,
        transposed=transposed,
    )


def _whole_shape(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a parameter, with the dimensions of size one that llama.cpp omits."""
    if parameter.endswith("forget_gate.A_log"):
        return (1, 1, math.prod(shape), 1)
    if parameter.endswith(("mixer.norm.weight", "mamba.norm.weight", ".D")):
        return (math.prod(shape),)
    if parameter.endswith("A_log") and shape[-1:] == (1,):
        return shape[:-1]
    if parameter.endswith(("conv.weight", "conv1d.weight")) and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if parameter.endswith(("shared_expert_gate.weight", "moe_statics.e_score_correction_bias")):
        return (1, shape[-1])
    return shape
