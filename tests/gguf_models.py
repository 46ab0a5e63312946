"""GGUF files of tiny models, with the models that they encode."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moetool.models.checkpoint import Checkpoint
from tests import families

_SCALES = {
    "Q4_0": {0: 4e-3},
    "Q4_1": {0: 3e-3, 2: -2e-2},
    "Q5_0": {0: 2e-3},
    "Q5_1": {0: 1.5e-3, 2: -2e-2},
    "Q8_0": {0: 3e-4},
    "Q2_K": {80: 8e-4, 82: 1.2e-3},
    "Q3_K": {108: 4e-4},
    "Q4_K": {0: 1e-4, 2: 8e-4},
    "Q5_K": {0: 5e-5, 2: 8e-4},
    "Q6_K": {208: 2e-5},
    "IQ4_NL": {0: 2.5e-4},
    "IQ4_XS": {0: 1.4e-5},
    "IQ1_S": {0: 3e-3},
    "IQ2_XXS": {0: 4e-4},
    "IQ2_XS": {0: 4e-4},
    "IQ2_S": {0: 4e-4},
    "IQ3_XXS": {0: 1.6e-4},
    "IQ3_S": {0: 1.5e-4},
    "TQ1_0": {52: 2.5e-2},
    "TQ2_0": {64: 2.5e-2},
}
"""Block types: positions of their float16 scales, and the magnitude of random ones."""
_LACK_QUANTIZERS = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ1_M", "NVFP4"} | {
    kind for kind in _SCALES if kind.startswith(("IQ1", "IQ2", "IQ3"))
}
TYPES: Mapping[str, str | tuple[str, ...]] = {"gate": "Q4_0", "up": "Q8_0", "down": "Q4_1"}
ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen2_moe": "qwen2moe"}


def written(
    family: str,
    folder: Path,
    types: Mapping[str, str | tuple[str, ...]] = TYPES,
    width: int = 64,
    spelled: Path | None = None,
    **changed: int,
) -> tuple[Path, Path]:
    """Write a GGUF file of a tiny model with the gguf package's writer and quantizers, and its twin in safetensors.

    Args:
        types: block types of experts (several alternate by layer) and of `dense` weights.
        width: hidden size, twice the experts' intermediate size.
        spelled: model whose tokenizer and vocabulary size the file gets; None: a dummy vocabulary.
        changed: further values of the config.
    """
    sizes = {"hidden_size": width, "moe_intermediate_size": width // 2, "shared_expert_intermediate_size": 32} | changed
    families.save(family, folder / "dense", norm_topk_prob=family == "qwen3_moe", **sizes)
    config = Checkpoint.open(folder / "dense").config
    architecture = ARCHITECTURES[family]
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if spelled is not None:
        add_tokenizer(writer, spelled)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = load_file(folder / "dense" / "model.safetensors")
    meant: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            layer, leaf = name.split(".")[2], name.split(".")[6].removesuffix("_proj")
            stacks.setdefault(f"blk.{layer}.ffn_{leaf}_exps.weight", [])
            continue
        kind = (
            str(types.get("dense", "Q8_0"))
            if tensor.dim() == 2 and "norm" not in name and ".gate." not in name
            else "F32"
        )
        meant[name] = _add(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), tensor, kind)
    for stacked in stacks:
        layer, leaf = stacked.split(".")[1], stacked.split("_")[1]
        root = f"model.layers.{layer}.mlp.experts"
        single = [f"{root}.{e}.{leaf}_proj.weight" for e in range(config.num_experts)]
        kinds = types[leaf]
        kind = kinds if isinstance(kinds, str) else kinds[int(layer) % len(kinds)]
        values = _add(writer, stacked, torch.stack([tensors[name] for name in single]), kind)
        meant |= dict(zip(single, values, strict=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copytree(folder / "dense", folder / "twin")
    save_file({n: t.contiguous() for n, t in meant.items()}, folder / "twin" / "model.safetensors", {"format": "pt"})
    return folder / "m.gguf", folder / "twin"


def rewritten(
    path: Path,
    to: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray | None] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """Write a copy of a GGUF file with other header values and tensors.

    Args:
        values: whole numbers or lists of strings by key; None removes one.
        tensors: tensors in float32 by name; None removes one.
        kinds: block types of some of them.
    """
    reader, tensors = gguf.GGUFReader(path), tensors or {}
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")) and field.name not in values:
            first, *more = field.types
            writer.add_key_value(field.name, field.contents(), first, more[0] if more else None)
    for key, value in values.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, numbers in tensors.items():
        if numbers is not None:
            _add(writer, name, torch.from_numpy(numbers), (kinds or {}).get(name, "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def spelled(path: Path, to: Path, model: Path, rule: str | None = "refact") -> Path:
    """Write a copy of a GGUF file with the embedded model's tokenizer, as `add_tokenizer`."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            first, *more = field.types
            writer.add_key_value(field.name, field.contents(), first, more[0] if more else None)
    add_tokenizer(writer, model, rule)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def add_tokenizer(writer: Any, model: Path, rule: str | None = "refact") -> None:
    """Write the embedded model's tokenizer, whose pre-tokenizer is `refact`; None writes no pre-tokenizer."""
    content = json.loads((model / "tokenizer.json").read_text())
    added = content["added_tokens"]
    vocabulary = content["model"]["vocab"] | {token["content"]: token["id"] for token in added}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {token["content"]: "CONTROL" if token["special"] else "USER_DEFINED" for token in added}
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType[kinds.get(token, "NORMAL")] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_chat_template((model / "chat_template.jinja").read_text())


def _add(writer: Any, name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Write a tensor; return it as the gguf package reads it back."""
    quantized = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, tensor.numpy())
        return tensor
    blocks = (
        random_blocks(tensor.shape, quantized) if kind in _LACK_QUANTIZERS else gguf.quantize(tensor.numpy(), quantized)
    )
    writer.add_tensor(name, blocks, raw_dtype=quantized)
    return torch.from_numpy(np.ascontiguousarray(gguf.dequantize(blocks, quantized))).view(tensor.shape)


def random_blocks(shape: Sequence[int], kind: Any) -> np.ndarray:
    """Random blocks whose values are as large as trained weights."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(int(np.prod(shape)))
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // values, num_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = draw.integers(116, 124, blocks.shape[:-1])
    if kind.name == "NVFP4":
        blocks[..., :4] = draw.integers(1, 32, (*blocks.shape[:-1], 4))
    if kind.name == "IQ1_M":  # a float16 in the upper four bits of four int16
        scale = (3e-3 * draw.uniform(0.5, 1.5, blocks.shape[:-1])).astype(np.float16).view(np.uint16)
        for part in range(4):
            blocks[..., 49 + 2 * part] &= 15
            blocks[..., 49 + 2 * part] |= ((scale >> 4 * part & 15) << 4).astype(np.uint8)
    for place, size in _SCALES.get(kind.name, {}).items():
        scale = (size * draw.uniform(0.5, 1.5, blocks.shape[:-1])).astype(np.float16)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
