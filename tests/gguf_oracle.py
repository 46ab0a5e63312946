"""GGUF files of tiny models by llama.cpp's converter, with the dense models that they come from.

Weights are exact in float16 and derived from their names. So a model can be made again anywhere, and compared with the
converted file bit by bit. `python -m tests.gguf_oracle LLAMA_CPP FOLDER` converts all of them; the files in
tests/golden/gguf are its output.
"""

import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import families

_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}
_LATENT = {"first_k_dense_replace": 1, "q_lora_rank": 16, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 0.7},
}
_PLAIN_YARN = {key: value for key, value in _YARN.items() if "mscale" not in key}
_ONE_FACTOR = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 128},
    **{"low_freq_factor": 1.0, "high_freq_factor": 1.0},
}
_SMOOTH = {**_ONE_FACTOR, "factor": 2.0, "high_freq_factor": 32.0}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_VISION_ROPE = {**_PLAIN_ROPE, "mrope_section": [2, 1, 1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("mixtral", {"intermediate_size": 16}),
    "qwen2moe": ("qwen2_moe", {"norm_topk_prob": False}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3vlmoe": ("qwen3_moe", {"norm_topk_prob": True, "rope_parameters": _VISION_ROPE}),
    "olmoe": ("olmoe", {"norm_topk_prob": False, "rms_norm_eps": 1e-5, "intermediate_size": 16}),
    "glm4moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "num_nextn_predict_layers": 0}),
    "deepseek2-softmax": ("deepseek_v2", {**_LATENT, "norm_topk_prob": False, "topk_method": "group_limited_greedy"}),
    "deepseek2-sigmoid": (
        "deepseek_v3",
        {**_LATENT, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "rope_parameters": _YARN},
    ),
    "deepseek2-lite": ("glm4_moe_lite", {**_LATENT, "routed_scaling_factor": 1.8}),
    "deepseek2-ocr": (
        "unlimited_ocr_text",
        {
            **{"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4, "layer_types": ["full_attention"] * 2},
            **{"n_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5},
        },
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {"intermediate_size": 16}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 32}),
    "minimax-m2": ("minimax_m2", {"intermediate_size": 16, "rotary_dim": 4}),
    "lfm2moe": ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "qwen35moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 4}),
    "qwen4exp": (
        "qwen4_exp_text",
        {
            **{"layer_types": ["linear_attention", "indexed_attention"], "output_gate_type": "sigmoid"},
            **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "hc_lowrank": 8},
            "linear_num_value_heads": 4,
            **{"indexer_budget": 8, "indexer_compress_ratio": 4, "indexer_head_dim": 8, "indexer_kv_heads": 1},
            **{"indexer_n_heads": 2, "ple_layer_ids": [1], "ngram_vocab_size_base": 50, "heads_per_ngram": 2},
            **{"split_ngram_parts": 4, "rope_parameters": {**_VISION_ROPE, "partial_rotary_factor": 1.0}},
        },
    ),
    "qwen3next": ("qwen3_next", {"linear_num_value_heads": 4}),
    "granitemoe": ("granitemoe", {"intermediate_size": 16, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "granitehybrid": (
        "granitemoehybrid",
        {
            **{"intermediate_size": 16, "embedding_multiplier": 3.0, "logits_scaling": 2.0, "mamba_n_groups": 2},
            **{"attention_multiplier": 0.25, "residual_multiplier": 0.5},
        },
    ),
    "jamba": (
        "jamba",
        {"num_hidden_layers": 3, "intermediate_size": 16, "attn_layer_period": 3, "attn_layer_offset": 2},
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **{"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
            **{"n_group": 1, "routed_scaling_factor": 2.5},
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 5000.0, "clip_qkv": 0.5},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "dots1": ("dots1", {"norm_topk_prob": True}),
    "afmoe": ("afmoe", {"num_hidden_layers": 4, "mup_enabled": True, "sliding_window": 8, "route_scale": 2.5}),
    "cohere2moe": (
        "cohere2_moe",
        {
            **{"expert_selection_fn": "sigmoid", "intermediate_size": 16, "prefix_dense_intermediate_size": 48},
            **{"num_hidden_layers": 3, "num_shared_experts": 1, "sliding_window": 8},
        },
    ),
    "deepseek32": ("deepseek_v32", {**_LATENT, "mlp_layer_types": ["dense", "sparse"], "rope_parameters": _YARN}),
    "deepseek4": (
        "deepseek_v4",
        {
            **{"num_hidden_layers": 3, "intermediate_size": 32, "moe_intermediate_size": 32, "sliding_window": 8},
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "rope_parameters": _PLAIN_YARN,  # of layers that compress
        },
    ),
    "exaone-moe": ("exaone_moe", {"num_hidden_layers": 4, "num_shared_experts": 1, "sliding_window": 8}),
    "gemma4": ("gemma4_text", {"sliding_window": 8, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "glm-dsa": ("glm_moe_dsa", {**_LATENT, "indexer_types": ["full", "shared"]}),
    "hy_v3": ("hy_v3", {"num_shared_experts": 1, "router_scaling_factor": 2.5}),
    "laguna": (
        "laguna",
        {
            **{"num_hidden_layers": 4, "sliding_window": 8, "moe_routed_scaling_factor": 2.5},
            "layer_types": ["full_attention", *["sliding_attention"] * 3],
            "num_attention_heads_per_layer": [4, 4, 2, 4],
            "rope_parameters": {
                "full_attention": {**_PLAIN_YARN, "partial_rotary_factor": 0.5, "attention_factor": 0.9},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "llama4": (
        "llama4_text",
        {
            **{"num_hidden_layers": 4, "moe_layers": [1, 3], "interleave_moe_layer_step": 2, "num_experts_per_tok": 1},
            **{"attention_chunk_size": 8192, "rope_parameters": _ONE_FACTOR},
        },
    ),
    "mimo2": (
        "mimo_v2_flash",
        {
            **{"sliding_window": 8, "attention_value_scale": 0.75, "num_key_value_heads": 1, "v_head_dim": 4},
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "minimax-m3": (
        "minimax_m3_vl_text",
        {
            **{"num_hidden_layers": 3, "layer_types": ["full_attention", *["minimax_m3_sparse"] * 2]},
            **{"mlp_layer_types": ["dense", "sparse", "sparse"], "dense_intermediate_size": 48},
            "intermediate_size": 16,
            **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
            **{"rotary_dim": 4, "rope_parameters": {**_PLAIN_ROPE, "partial_rotary_factor": 0.5}},
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_LATENT,
            "first_k_dense_replace": 0,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "step35": (
        "step3p5",
        {
            **{"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 8, "moe_router_scaling_factor": 2.5},
            "rope_parameters": {
                "full_attention": {**_SMOOTH, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "mellum": ("mellum", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}),
    "nemotron_h_moe": (
        "nemotron_h",
        {"num_hidden_layers": 4, "n_groups": 2, "routed_scaling_factor": 2.5, "moe_latent_size": 16},
    ),
    "ernie4_5-moe": ("ernie4_5_moe", {"moe_num_experts": 4}),
}
"""Family and changes to the config of `tests.families`, by file name."""
_CALLED = {
    "qwen3vlmoe": "Qwen3VLMoeForConditionalGeneration",
    "minimax-m3": "MiniMaxM3SparseForCausalLM",
    "deepseek2-ocr": "UnlimitedOCRForCausalLM",
}
"""The converter class of a model that is the text part of a larger one."""
_WITHIN = {"mistral4": "mistral3", "step3p5": "step3p7", "unlimited_ocr_text": "unlimited_ocr"}
"""Families that transformers builds only within another."""
_HASHED = {"compress_ratios": [0, 4, 128], "num_hash_layers": 1, "qk_rope_head_dim": 2, "rope_theta": 10000.0}
"""Values of DeepSeek-V4's published config that transformers writes otherwise."""
_WINDOWS = {
    **{"hybrid_layer_pattern": [0, 1], "layernorm_epsilon": 1e-5, "topk_method": "noaux_tc"},
    **{"swa_head_dim": 8, "swa_v_head_dim": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2},
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "swa_rope_theta": 5000.0,
}
"""Values of MiMo-V2-Flash's published config that transformers writes otherwise."""
_BLOCKS = {
    "sparse_attention_config": {
        **{"sparse_num_index_heads": 2, "sparse_index_dim": 8, "sparse_topk_blocks": 2},
        **{"sparse_block_size": 4, "sparse_local_block": 1},
    },
    **{"moe_layer_freq": [0, 1, 1], "n_shared_experts": 1, "scoring_func": "sigmoid"},
}
"""Values of MiniMax-M3's published config that transformers writes otherwise."""
_DELTA = {
    **{"num_experts": 4, "num_experts_per_token": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "head_dim": 8, "short_conv_kernel_size": 4},
    "moe_router_activation_func": "sigmoid",
}
"""Values of Kimi-Linear's published config that transformers writes otherwise."""
_STEP = {
    **{"num_attention_groups": 2, "moe_num_experts": 4, "moe_top_k": 2, "norm_expert_weight": True},
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
    **{"moe_layers_enum": "1,2", "partial_rotary_factors": [0.5, 1.0, 1.0], "rope_theta": [10000.0, 5000.0, 5000.0]},
    "rope_parameters": _SMOOTH,
}
"""Values of Step-3.7-Flash's published config that transformers writes otherwise."""
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]) / 16
"""Numbers of 4 bits, times a scale of 2 ** -4."""
_BY_LAYER = {"moe_intermediate_size": 16, "moe_topk": 2, "num_shared_expert": 1}
"""Values that are lists in HunYuan's published config."""


def build(name: str) -> Any:
    """The dense model that a file was converted from."""
    from transformers import AutoModelForCausalLM

    family, changed = MODELS[name]
    if family in _WITHIN:
        model = _whole(_WITHIN[family], changed)
        for part in [name for name, _ in model.model.named_children() if name != "language_model"]:
            setattr(model.model, part, None)
        for parameter in [name for name, _ in model.model.named_parameters(recurse=False)]:
            setattr(model.model, parameter, None)
        config = model.config
    else:
        config = families.config(family, **{**_SMALL, **changed})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored = model.state_dict()
    for key, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        if name == "deepseek4" and ".experts." in key:  # published in 4 bits
            tensor.data.copy_(_E2M1[(_numbers(key, tensor) * 512).long() % 16])
        elif tensor.is_floating_point() and key in stored:
            tensor.data.copy_(_numbers(key, tensor))
        elif key.endswith("tid2eid"):
            rows = torch.arange(len(tensor))[:, None] + torch.arange(tensor.shape[1])
            tensor.data.copy_(rows % config.n_routed_experts)
    return model


def _whole(family: str, changed: dict[str, Any]) -> Any:
    """A vision-language model, with values of the config of its text part."""
    return families.build_multimodal(family, tie_word_embeddings=False, **{**_SMALL, **changed})


def _numbers(name: str, like: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/512 below 1/2; for norms, plus one."""
    bits = np.arange(like.numel(), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 20)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    values = torch.from_numpy(((bits >> np.uint64(40)) % np.uint64(511)).astype(np.float32) - 255) / 512
    one = like.dim() == 1 and name.endswith("norm.weight")
    return values.view(like.shape) + one


def convert(llama_cpp: Path, name: str, to: Path) -> Path:
    """Convert a model by llama.cpp's script, without a tokenizer."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    import gguf
    from conversion import ModelBase, get_model_class

    model = build(name)
    folder = to / f"{name}-dense"
    if name == "minimax-m3":  # published with the names of the whole model
        model = _whole("minimax_m3_vl", MODELS[name][1])
        alone = build(name).state_dict()
        parts = {key.replace("model.", "model.language_model.", 1): part for key, part in alone.items()}
        assert not model.load_state_dict(parts, strict=False).unexpected_keys
    model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(model.config.get_text_config().vocab_size)}  # gemma4 drops rows of no token
    if name == "deepseek2-ocr":
        _name_class(folder / "config.json", _CALLED[name])
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    if name in PUBLISHED:
        _publish(folder / "model.safetensors", PUBLISHED[name])
    if name == "deepseek4":
        _publish_experts(folder / "model.safetensors")
    kind = get_model_class(_CALLED.get(name, model.config.architectures[0]))
    kind = kind.Mistral4Model if name == "mistral4" else kind

    class Converted(kind):  # type: ignore[misc, valid-type]
        model_arch = kind.model_arch
        no_mtp = True

        def set_vocab(self) -> None:
            self.gguf_writer.add_tokenizer_model("gpt2")
            self.gguf_writer.add_token_list([f"t{i}" for i in range(len(vocabulary))])

    file = to / f"{name}.gguf"
    with torch.inference_mode():
        hparams = ModelBase.load_hparams(folder, False)
        if name == "hunyuan-moe":
            hparams |= {key: [value] * 2 for key, value in _BY_LAYER.items()}
        if name == "mimo2":
            hparams |= _WINDOWS
        if name == "minimax-m3":
            hparams |= _BLOCKS
        if name == "qwen4exp":  # as published
            hparams["layer_types"] = ["linear_attention", "full_attention"]
        if name == "granitehybrid":
            hparams["layer_types"] = ["mamba", "attention"]
        if name == "kimi-linear":
            hparams |= _DELTA
        if name == "deepseek2-ocr":
            hparams |= {"first_k_dense_replace": 1, "qk_rope_head_dim": 0}  # as published; DeepSeek-OCR has no window
            del hparams["text_config"]["sliding_window"]
        if name == "step35":
            hparams |= _STEP
        if name == "deepseek4":
            hparams |= {**_HASHED, "rope_parameters": _PLAIN_YARN}
        Converted(folder, gguf.LlamaFileType.MOSTLY_F16, file, eager=True, hparams=hparams).write()
    return file


def _name_class(config: Path, name: str) -> None:
    """Write the class of a model's publication into its config, by which the converter knows the architecture."""
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": [name]}))


PUBLISHED = {
    "deepseek4": {
        "model.hc_head.hc_": "hc_head_",
        "model.embed_tokens.": "embed.",
        "model.": "",
        "attn.norm.": "attn.kv_norm.",
    },
    "kimi-linear": {"layers.0.block_sparse_moe.": "layers.0.mlp."},
}
"""Parts of names as transformers writes them, and as models are published."""


def _publish(file: Path, names: Mapping[str, str]) -> None:
    """Give tensors the names of a model's publication."""
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(file).items():
        for theirs, published in names.items():
            name = name.replace(theirs, published, 1)
        tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def _publish_experts(file: Path) -> None:
    """Store experts in 4 bits with a scale for 32 of them, as in DeepSeek-V4's publication."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        codes = (tensors[name][..., None] == _E2M1).int().argmax(-1).to(torch.uint8)
        tensors[name] = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
        scale = torch.full((len(codes), codes.shape[1] // 32), 123, dtype=torch.uint8)
        tensors[name.removesuffix("weight") + "scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(tensors, file, {"format": "pt"})


def split(whole: Path, to: Path) -> list[Path]:
    """Split a model's GGUF file in three: `m-00001-of-00003.gguf` and so on."""
    import gguf

    reader = gguf.GGUFReader(whole)
    files = [to / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for number, file in enumerate(files):
        writer = gguf.GGUFWriter(file, "qwen3moe")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kinds = field.types
                writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1] if len(kinds) > 1 else None)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::3]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files


if __name__ == "__main__":
    for made in sys.argv[3:] or MODELS:
        print(convert(Path(sys.argv[1]), made, Path(sys.argv[2])))
