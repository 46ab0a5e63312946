"""GGUF files as llama.cpp writes them: config, tensors and weights of the architectures whose layout is known here.

One file holds all. The experts of a layer lie stacked, [experts, out, in / block * bytes], so that one is a contiguous
slice, which is read in place. transformers parses the header and unpacks the blocks.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moetool.errors import MismatchError, UsageError, first_line
from moetool.models.quantization_config import Quantization
from moetool.models.tensor_index import FileStamp, Tensor, TensorIndex
from moetool.models.value_scaling import CHUNK
from moetool.models.weight_format import Codec, Stored, StoredWeight, as_dense

SUFFIX = ".gguf"
_FLOATS = {0: "F32", 1: "F16", 30: "BF16"}  # ggml's numbers of types
_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""Architectures whose tensors llama.cpp renames and stacks, and changes in no other way."""
_NAMES = (
    (r"token_embd\.", "model.embed_tokens."),
    (r"output_norm\.", "model.norm."),
    (r"output\.", "lm_head."),
    (r"blk\.(\d+)\.attn_(q|k|v)\.", r"model.layers.\1.self_attn.\2_proj."),
    (r"blk\.(\d+)\.attn_output\.", r"model.layers.\1.self_attn.o_proj."),
    (r"blk\.(\d+)\.attn_(q|k)_norm\.", r"model.layers.\1.self_attn.\2_norm."),
    (r"blk\.(\d+)\.attn_norm\.", r"model.layers.\1.input_layernorm."),
    (r"blk\.(\d+)\.ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
    (r"blk\.(\d+)\.ffn_gate_inp\.", r"model.layers.\1.mlp.gate."),
    (r"blk\.(\d+)\.ffn_gate_inp_shexp\.", r"model.layers.\1.mlp.shared_expert_gate."),
    (r"blk\.(\d+)\.ffn_(gate|up|down)_shexp\.", r"model.layers.\1.mlp.shared_expert.\2_proj."),
    (r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.", r"model.layers.\1.mlp.experts.*.\2_proj."),
    (r"blk\.(\d+)\.ffn_(gate|up|down)\.", r"model.layers.\1.mlp.\2_proj."),
)


@dataclass(frozen=True, slots=True)
class GgmlCodec:
    """Blocks of a ggml type."""

    ggml_type: int
    transposed: bool = False

    def into(self, stored: Stored, out: torch.Tensor) -> None:
        from transformers.integrations.gguf.dequant import dequantize

        blocks, step = stored["blocks"], max(1, CHUNK // out.shape[-1])
        for first in range(0, len(out), step):
            rows = blocks[first : first + step].contiguous()
            out[first : first + step] = dequantize(rows, self.ggml_type).view(len(rows), -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeights(Quantization):
    """The weights of a GGUF file.

    Attributes:
        types: number of the ggml type of each tensor, by the name that it has in the index.
        shapes: of the weights that the tensors hold.
    """

    types: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    def claim(
        self, tensors: Mapping[str, Tensor], files: Sequence[Path], read: Callable[[Tensor], bytes]
    ) -> dict[str, StoredWeight]:
        found = {}
        for name, tensor in tensors.items():
            whole = self._whole(name, tensor)
            if "*" not in name:
                found[name] = whole
                continue
            count = whole.shape[0]
            for expert in range(count):
                single = whole.share(expert, count, whole.shape[1:])
                single = StoredWeight(
                    name=name.replace("*", str(expert)),
                    shape=single.shape,
                    tensors=single.tensors,
                    codec=single.codec,
                    format=single.format,
                )
                found[single.name] = single
        return found

    def _whole(self, name: str, tensor: Tensor) -> StoredWeight:
        kind = self.types[name]
        if kind in _FLOATS:
            return as_dense(name, tensor)
        codec: Codec = GgmlCodec(kind)
        return StoredWeight(
            name=name, shape=self.shapes[name], tensors={"blocks": tensor}, codec=codec, format=f"gguf_{kind}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """What the header of a GGUF file says.

    Attributes:
        config: of the model, as a config.json would have it.
        content: identifies it.
        index: its tensors, by the names of a Hugging Face checkpoint; `*` stands for an expert.
        weights: how they are stored.
    """

    config: dict[str, Any]
    content: bytes
    index: TensorIndex
    weights: GgufWeights


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        UsageError: its architecture is none that is read, or transformers cannot parse GGUF.
        MismatchError: it is damaged.
    """
    try:
        from transformers.integrations.gguf.reader import GgufHeader, read_gguf_metadata
    except ImportError:
        raise UsageError(f"{path} needs a transformers that reads GGUF files; upgrade it") from None
    stamp = FileStamp.of(path.stat())
    try:
        metadata, _ = read_gguf_metadata(str(path))
    except Exception as error:  # a damaged header fails in any way
        raise MismatchError(f"{path} is not a GGUF file that transformers reads: {first_line(error)}") from None
    architecture = metadata["general.architecture"]
    if architecture not in _TYPES:
        raise UsageError(
            f"{path} is of the architecture {architecture!r}; moetool reads GGUF files of {' and '.join(_TYPES)}: give "
            "the model in Hugging Face format"
        )
    try:
        header = GgufHeader.from_file(str(path))
    except ValueError as error:  # a type of blocks that transformers does not unpack
        raise UsageError(f"cannot read {path}: {first_line(error)}") from None
    except Exception as error:
        raise MismatchError(f"{path} is a damaged GGUF file: {first_line(error)}; download the model again") from None
    try:
        config = _config(metadata, architecture, [info.name for info in header.tensors])
    except Exception as error:
        raise MismatchError(f"{path} is a damaged GGUF file: {first_line(error)}; download the model again") from None
    tensors: dict[str, Tensor] = {}
    types, shapes, end = {}, {}, 0
    for info in sorted(header.tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise MismatchError(f"{path}: {info.name} overlaps the tensor before it; download the model again")
        end = info.offset + info.nbytes
        name = _renamed(info.name)
        if name is None or info.name in ("rope_freqs.weight",):
            continue
        shape = info.shape
        if info.ggml_type not in _FLOATS:
            rows = torch.Size(shape[:-1]).numel()
            shape = (*shape[:-1], info.nbytes // rows)
        tensors[name] = Tensor(
            0, header.data_start + info.offset, info.nbytes, shape, _FLOATS.get(info.ggml_type, "U8")
        )
        types[name], shapes[name] = info.ggml_type, info.shape
    if stamp.num_bytes < header.data_start + end:
        raise MismatchError(
            f"{path} is cut short: it has {stamp.num_bytes:,} bytes, expected {header.data_start + end:,}; download "
            "the model again"
        )
    return GgufFile(
        config=config,
        content=json.dumps([config, sorted(types.items())], sort_keys=True, default=str).encode(),
        index=TensorIndex((path,), (stamp,), tensors),
        weights=GgufWeights(method="gguf", groups=(), types=types, shapes=shapes),
    )


def _renamed(name: str) -> str | None:
    for pattern, target in _NAMES:
        renamed, count = re.subn(f"^{pattern}", target, name)
        if count:
            return renamed
    return None


def _config(metadata: Mapping[str, Any], architecture: str, names: Sequence[str]) -> dict[str, Any]:
    def value(name: str, default: Any = None) -> Any:
        return (
            metadata[f"{architecture}.{name}"] if default is None else metadata.get(f"{architecture}.{name}", default)
        )

    heads, hidden = value("attention.head_count"), value("embedding_length")
    config = {
        "model_type": _TYPES[architecture],
        "architectures": [{"qwen2moe": "Qwen2MoeForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"}[architecture]],
        "vocab_size": metadata["tokenizer.ggml.tokens"],
        "hidden_size": hidden,
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length", hidden // heads),
        "intermediate_size": value("feed_forward_length", value("expert_feed_forward_length")),
        "moe_intermediate_size": value("expert_feed_forward_length"),
        "num_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
        "norm_topk_prob": architecture == "qwen3moe",  # llama.cpp's graph fixes it
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base", 10000.0),
        "max_position_embeddings": value("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }
    if architecture == "qwen2moe":
        config["shared_expert_intermediate_size"] = value("expert_shared_feed_forward_length")
    if (factor := metadata.get(f"{architecture}.rope.scaling.factor")) is not None:
        config["rope_scaling"] = {
            "rope_type": metadata[f"{architecture}.rope.scaling.type"],
            "factor": factor,
            "original_max_position_embeddings": value("rope.scaling.original_context_length"),
        }
    return config
