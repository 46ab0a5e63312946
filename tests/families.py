"""Tiny random models of every family."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moetool.base.types import ModelSpec
from moetool.training.predictor import build
from moetool.training.tokens import Tokens

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_INDEXED = {**_LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LINEAR_FIRST = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}

_OWN: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 1, "num_shared_experts": 1},
    "axk1": _LATENT,
    "axk2": _INDEXED,
    "bailing_hybrid": {**_LATENT, **_LINEAR_FIRST, "num_mtp_layers": 0},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "sliding_window": 16,
    },
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_hidden_layers": 2,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_d_head": 16,
        "mamba_chunk_size": 16,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {**_LATENT, **_LINEAR_FIRST, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"intermediate_size": 16, "intermediate_size_mlp": 48, "moe_layers": [1, 2]},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "moe"],
        "num_hidden_layers": 4,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 16,
    },
    "glm4v_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
        | {"partial_rotary_factor": 0.5}
    },
    "glm5_next_text": {
        **_INDEXED,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "mistral4": {**_LATENT, "head_dim": 16},
    "mistral_large4_text": _INDEXED,
    "inkling2_text": {"unpadded_vocab_size": 64},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen3_vl_moe_text": {"moe_intermediate_size": 24},
    "sarvam_mla": _LATENT,
    "step3p5": {
        **{"layer_types": ["full_attention", *["sliding_attention"] * 2], "sliding_window": 16},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"], "share_expert_dim": 16, "num_sliding_attention_heads": 6},
        **{"swiglu_limits": [0.0, 0.0, 0.5], "swiglu_limits_shared": [0.0, 0.0, 0.75]},
    },
    "unlimited_ocr_text": {"sliding_window": 3},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

_FIRST_DENSE = (
    *("afmoe", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_linear", "laguna", "lfm2_moe"),
    *("llama4_text", "mimo_v2_flash"),
)
DENSE_LAYERS = {name: {0} for name in _FIRST_DENSE} | {"flint": {0, 1}, "jamba": {0, 2}, "nemotron_h": {0, 2}}
"""Dense layers of each tiny model."""


def config(family: str, **changed: Any) -> Any:
    """The config of a tiny model."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **{**_COMMON, **_OWN.get(family, {}), **changed})


def save(family: str, to: Path, *, std: float = 0.2, **changed: Any) -> None:
    """Write a tiny model whose routers, biases and experts all affect its output.

    Args:
        std: standard deviation of weights; 0.2 suits the tiny models' widths, wider ones need less.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(family, **changed), dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("tid2eid"):  # experts by token id
                rows = [torch.randperm(8, generator=draw)[: tensor.shape[1]] for _ in range(len(tensor))]
                tensor.copy_(torch.stack(rows))
            elif name.endswith(("_decay", "slope_rate")):
                continue  # of minimax: other values would let tokens attend to later ones
            elif "bias" in name or (tensor.dim() > 1 and tensor.is_floating_point()):
                tensor.normal_(0, std, generator=draw)
            elif name.endswith("per_expert_scale"):
                tensor.uniform_(0.5, 1.5, generator=draw)
            if name.endswith("balancing_biases"):
                tensor *= 0.05
                tensor[-1] = -1.0  # transformers sets it to this whatever the checkpoint says
    model.save_pretrained(to)


def counted(spec: ModelSpec) -> Any:
    """An affinity predictor of random routes; its accuracy does not matter."""
    made = build("affinity", spec)
    draw = np.random.default_rng(5)
    shape = (64, spec.num_layers, spec.top_k_L[0])
    made.count(Tokens(experts_TPK=torch.from_numpy(draw.integers(0, spec.num_experts, shape))))
    return made


_WITHIN = ("qwen3_vl_moe", "glm4v_moe", "glm5_next", "mistral_large4", "qwen4_exp", "unlimited_ocr")
MULTIMODAL = {
    **{"gemma4": "gemma4_text", "llama4": "llama4_text", "qwen3_5_moe": "qwen3_5_moe_text", "mistral3": "mistral4"},
    "step3p7": "step3p5",
    **{name: f"{name}_text" for name in _WITHIN},
}
"""Families of vision-language models, with the family of their text part."""


def save_multimodal(family: str, to: Path, **changed: Any) -> torch.nn.Module:
    """Write and return a tiny vision-language model, with further values of its text part's config."""
    model = build_multimodal(family, **changed)
    model.save_pretrained(to)  # type: ignore[operator]
    return model


def build_multimodal(family: str, **changed: Any) -> torch.nn.Module:
    """A tiny vision-language model, with further values of its text part's config."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    vision = {
        **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size"), 32),
        **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32),
        **{"num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2},
        **{"image_size": 28, "patch_size": 14, "global_attn_indexes": [0], "mlp_dim": 32},
        **{"output_channels": 32, "downsample_channels": [32, 32]},
    }
    if family == "unlimited_ocr":  # two encoders, one after the other
        vision = {"sam_config": vision, "encoder_config": vision}
    text = config(MULTIMODAL.get(family, f"{family}_text"), **changed).to_dict()
    whole = AutoConfig.for_model(family, text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForImageTextToText.from_config(whole, dtype=torch.float32).eval()
    return model


def require_known(name: str) -> None:
    """Skip a test of a family that the installed transformers lacks."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
