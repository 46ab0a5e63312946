"""Configs of transformers' families from the headers of GGUF files."""

import math
from collections.abc import Sequence
from typing import Any

from moetool.base.errors import UsageError, shortened
from moetool.models.gguf.metadata import SOFTMAX, Metadata


def common_config(meta: Metadata) -> dict[str, Any]:
    """Config values common to all architectures. Raises: KeyError: the header lacks one."""
    heads, hidden = max(by_layer(meta, "attention.head_count")), meta("embedding_length")
    head_dim = meta.get("attention.key_length", hidden // heads)
    moe = meta.get("expert_feed_forward_length", meta.get("feed_forward_length"))
    if isinstance(top_k := meta("expert_used_count"), list):
        raise UsageError(f"uses {min(top_k)} to {max(top_k)} experts by layer, expected one number for all layers")
    return {
        "vocab_size": meta.values["tokenizer.ggml.tokens"],
        "hidden_size": hidden,
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(by_layer(meta, "attention.head_count_kv")),
        "head_dim": head_dim,
        "intermediate_size": meta.get("feed_forward_length", moe),
        "moe_intermediate_size": moe,
        "num_experts_per_tok": top_k,
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon") or meta("attention.layer_norm_epsilon"),
        "rope_parameters": _rope(meta, head_dim),
        "max_position_embeddings": meta("context_length"),
        "tie_word_embeddings": "output.weight" not in meta.names,
        "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def by_layer(meta: Metadata, key: str) -> list[Any]:
    """A value of each layer, which the header lists or gives once. Raises: KeyError: it is missing."""
    value = meta(key)
    if not isinstance(value, list):
        return [value] * meta.num_layers
    if len(value) < meta.num_layers:
        raise ValueError(f"{meta.architecture}.{key} lists {len(value)} layers, expected {meta.num_layers}")
    return value[: meta.num_layers]


def _sliding(meta: Metadata, full: int = 3) -> dict[str, Any]:
    """Attention windows; without a list, one layer of each four has full attention, that of this number."""
    pattern = meta.get("attention.sliding_window_pattern", 4)
    if isinstance(pattern, list):
        slides = by_layer(meta, "attention.sliding_window_pattern")
    else:
        slides = [layer % pattern != min(full, pattern - 1) for layer in range(meta.num_layers)]
    window = meta.get("attention.sliding_window")
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if window and slide else "full_attention" for slide in slides],
    }


def _sparse_layers(meta: Metadata) -> list[str]:
    return ["sparse" if sparse else "dense" for sparse in meta.layers_with("ffn_gate_inp.weight")]


def _rope(meta: Metadata, head_dim: int) -> dict[str, Any]:
    made = {"rope_type": "default", "rope_theta": meta.get("rope.freq_base", 10000.0)}
    width = meta.get("rope.dimension_count", head_dim)
    if width < head_dim and meta.get("attention.kv_lora_rank") is None:
        made["partial_rotary_factor"] = width / head_dim
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none" or meta.get("rope.scaling.factor", 1.0) == 1.0:
        return made
    if kind not in ("linear", "yarn"):
        raise UsageError(f"its rope scaling is {kind}, expected none, linear or yarn")
    made |= {"rope_type": kind, "factor": meta("rope.scaling.factor")}
    if kind == "yarn":
        made["original_max_position_embeddings"] = meta("rope.scaling.original_context_length")
        for name, key in (
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
            ("attention_factor", "attn_factor"),
            ("attention_factor", "yarn_attn_factor"),  # the name that llama.cpp's converter writes
        ):
            if (value := meta.get(f"rope.scaling.{key}")) is not None:
                made[name] = value
    return made


def qwen(meta: Metadata) -> dict[str, Any]:
    dense = [layer for layer, kind in enumerate(_sparse_layers(meta)) if kind == "dense"]
    return {
        "num_experts": meta.num_experts,
        "norm_topk_prob": meta.architecture != "qwen2moe",  # llama.cpp's graph fixes it
        "mlp_only_layers": dense,
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
    }


def linear(meta: Metadata) -> dict[str, Any]:
    values = meta("ssm.time_step_rank")
    stored = {shape[0] for name, shape in meta.shapes.items() if name.endswith(".ssm_a")}
    if stored != {values}:
        raise UsageError(f"has {values} value heads (ssm.time_step_rank), expected {min(stored)}, the size of ssm_a")
    return {
        **qwen(meta),
        "layer_types": ["full_attention" if full else "linear_attention" for full in meta.layers_with("attn_q.weight")],
        "linear_conv_kernel_dim": meta("ssm.conv_kernel"),
        "linear_key_head_dim": meta("ssm.state_size"),
        "linear_num_key_heads": meta("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": meta("ssm.inner_size") // values,
    }


def qwen4(meta: Metadata) -> dict[str, Any]:
    config = {
        **linear(meta),
        "output_gate_type": "sigmoid",  # llama.cpp's graph fixes it
        "hc_count": meta("hyper_connection.count"),
        "hc_lowrank": meta("hyper_connection.low_rank"),
        "indexer_n_heads": meta("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": meta("attention.indexer.key_length"),
        "indexer_budget": meta("attention.indexer.top_k"),
        "indexer_compress_ratio": max(by_layer(meta, "attention.compress_ratios")),
    }
    layers = meta.get("ple.layers", [])
    if len(layers) > 1:
        raise UsageError(f"has n-gram tables in layers {layers}, expected one with the only hashes of its header")
    if layers:
        size, heads = meta("ple.ngram_size"), meta("ple.heads_per_ngram")
        rows, width = meta.shapes["per_layer_token_embd.weight"]
        config |= {
            "ple_layer_ids": [layers[0] + 1],
            "ngram_size": size,
            "heads_per_ngram": heads,
            "ple_conv_kernel_size": meta("ple.conv_kernel"),
            "ple_embed_dim": width * heads * (size - 1),
            "ngram_vocab_size_base": meta("ple.head_vocab_sizes")[0],
            "make_ngram_vocab_size_divisible_by": rows,
            "eos_token_id": meta("ple.eos_token_id"),
        }
    return config


def routed(meta: Metadata) -> dict[str, Any]:
    """Config of DeepSeek-like families."""
    return {
        "n_routed_experts": meta.num_experts,
        "n_shared_experts": meta.get("expert_shared_count", 0),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
        "n_group": meta.get("expert_group_count", 1),
        "topk_group": meta.get("expert_group_used_count", 1),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "norm_topk_prob": meta.get("expert_weights_norm", False),
    }


def deepseek(meta: Metadata) -> dict[str, Any]:
    rope = meta("rope.dimension_count")
    config = {
        **routed(meta),
        "num_key_value_heads": meta("attention.head_count"),
        "q_lora_rank": meta.get("attention.q_lora_rank"),
        "kv_lora_rank": meta("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": meta.get("attention.key_length_mla", meta("attention.key_length")) - rope,
        "v_head_dim": meta.get("attention.value_length_mla", meta("attention.value_length")),
        "head_dim": rope,
    }
    if (logarithm := meta.get("rope.scaling.yarn_log_multiplier")) is not None:
        both = logarithm * 10  # the two are equal in all checkpoints
        config["rope_parameters"] = {**_rope(meta, rope), "mscale": both, "mscale_all_dim": both}
    if meta.gating == SOFTMAX:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config


def deepseek_ocr(meta: Metadata) -> dict[str, Any]:
    window = meta.get("attention.sliding_window")  # of Unlimited-OCR, over its answer alone; llama.cpp ignores it
    return {
        **routed(meta),
        "mlp_layer_types": _sparse_layers(meta),
        "layer_types": ["reference_sliding_attention" if window else "full_attention"] * meta.num_layers,
        "sliding_window": window or 128,  # no layer uses the default
        "rope_parameters": {"rope_type": "default", "rope_theta": meta("rope.freq_base")},  # its dimension_count is 0
    }


def mistral4(meta: Metadata) -> dict[str, Any]:
    config = deepseek(meta)
    rope, head_dim = meta("rope.dimension_count"), config["qk_nope_head_dim"] + meta("rope.dimension_count")
    scaling = {
        "partial_rotary_factor": rope / head_dim,
        "llama_4_scaling_beta": meta.get("attention.temperature_scale", 0.1),  # of the published model
    }
    return {**config, "head_dim": head_dim, "rope_parameters": {**config["rope_parameters"], **scaling}}


def minimax_m3(meta: Metadata) -> dict[str, Any]:
    sparse = meta.layers_with("indexer.q_proj.weight")
    experts = meta("expert_feed_forward_length")
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": experts,
        "dense_intermediate_size": meta("feed_forward_length"),
        "shared_intermediate_size": experts * meta("expert_shared_count"),
        "routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "mlp_layer_types": _sparse_layers(meta),
        "layer_types": ["minimax_m3_sparse" if indexed else "full_attention" for indexed in sparse],
        "index_n_heads": meta("attention.indexer.head_count"),
        "index_head_dim": meta("attention.indexer.key_length"),
        "index_topk_blocks": meta("attention.indexer.top_k"),
        "index_block_size": meta("attention.indexer.block_size"),
        "index_local_blocks": meta("attention.indexer.local_blocks"),
    }


def _indexer(meta: Metadata) -> dict[str, Any]:
    return {
        "index_n_heads": meta("attention.indexer.head_count"),
        "index_head_dim": meta("attention.indexer.key_length"),
        "index_topk": meta("attention.indexer.top_k"),
    }


def indexed(meta: Metadata) -> dict[str, Any]:
    """Config of DeepSeek-like families with sparse attention; files before GLM-5.2 do not list the indexers."""
    if meta.get("attention.indexer.types") is None:
        indexers = meta.layers_with("indexer.attn_k.weight")
    else:
        indexers = by_layer(meta, "attention.indexer.types")
    return {**deepseek(meta), **_indexer(meta), "indexer_types": ["full" if full else "shared" for full in indexers]}


def deepseek4(meta: Metadata) -> dict[str, Any]:
    (limit, *others) = dict.fromkeys(by_layer(meta, "swiglu_clamp_exp"))
    ratios = by_layer(meta, "attention.compress_ratios")
    if others or not {*ratios} <= {0, 4, 128}:
        raise UsageError(f"compresses keys by {sorted({*ratios})}, expected 0, 4 and 128 with one limit of gates")
    return {
        **routed(meta),
        "scoring_func": "sqrtsoftplus",
        "q_lora_rank": meta("attention.q_lora_rank"),
        "qk_rope_head_dim": meta("rope.dimension_count"),
        "rope_theta": meta("rope.freq_base"),
        "compress_rope_theta": meta("attention.compress_rope_freq_base"),
        "sliding_window": meta("attention.sliding_window"),
        "compress_ratios": ratios,
        "num_hash_layers": meta("hash_layer_count"),
        "hc_mult": meta("hyper_connection.count"),
        "hc_sinkhorn_iters": meta("hyper_connection.sinkhorn_iterations"),
        "hc_eps": meta("hyper_connection.epsilon"),
        "swiglu_limit": limit,
        "o_groups": meta("attention.output_group_count"),
        "o_lora_rank": meta("attention.output_lora_rank"),
        **_indexer(meta),
    }


def gemma4(meta: Metadata) -> dict[str, Any]:
    sliding = _sliding(meta)
    heads = dict(zip(sliding["layer_types"], by_layer(meta, "attention.head_count_kv"), strict=True))
    own_values = meta.layers_with("attn_v.weight")
    rotated = [factor == 1 for factor in meta.rope_factors]  # the others are so large that nothing turns
    return {
        **sliding,
        "num_experts": meta.num_experts,
        "top_k_experts": meta("expert_used_count"),
        "enable_moe_block": True,
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": meta.get("attention.shared_kv_layers", 0),
        "head_dim": meta("attention.key_length_swa"),
        "global_head_dim": meta("attention.key_length"),
        "num_key_value_heads": heads["sliding_attention"],
        "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": not all(own_values),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": meta("rope.freq_base"),
                "partial_rotary_factor": sum(rotated) / len(rotated) if rotated else 0.25,  # of all published models
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": meta("rope.freq_base_swa")},
        },
    }


def nemotron(meta: Metadata) -> dict[str, Any]:
    mixers = {"linear_attention": "ssm_in", "full_attention": "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up"}
    there = {kind: meta.layers_with(f"{leaf}.weight") for kind, leaf in mixers.items()}
    heads = meta("ssm.time_step_rank")
    kinds = [next((kind for kind in there if there[kind][layer]), None) for layer in range(meta.num_layers)]
    if None in kinds:
        raise ValueError(f"blk.{kinds.index(None)} has none of {', '.join(mixers.values())}")
    dense = [meta.shapes[f"blk.{layer}.ffn_up.weight"][0] for layer, kind in enumerate(kinds) if kind == "mlp"]
    return {
        **routed(meta),
        "layers_block_type": kinds,
        "intermediate_size": max(dense, default=meta("expert_feed_forward_length")),
        "moe_shared_expert_intermediate_size": meta("expert_shared_feed_forward_length"),
        "moe_latent_size": meta.get("moe_latent_size"),
        "layer_norm_epsilon": meta("attention.layer_norm_epsilon"),
        "ssm_state_size": meta("ssm.state_size"),
        "conv_kernel": meta("ssm.conv_kernel"),
        "n_groups": meta("ssm.group_count"),
        "mamba_num_heads": heads,
        "mamba_head_dim": meta("ssm.inner_size") // heads,
        "use_conv_bias": meta.has("ssm_conv1d.bias"),
        "use_bias": meta.has("ssm_in.bias"),
        "mlp_bias": meta.has("ffn_up_shexp.bias"),
    }


def _normalized(meta: Metadata) -> None:
    """Raises: UsageError: the scores of a token's experts are not normalized, which the family always does."""
    if not meta.get("expert_weights_norm", True):
        raise UsageError("does not normalize the scores of a token's experts, which its family in transformers does")


def afmoe(meta: Metadata) -> dict[str, Any]:
    _normalized(meta)
    return {
        **_sliding(meta),
        "num_experts": meta.num_experts,
        "num_shared_experts": meta.get("expert_shared_count", 0),
        "num_dense_layers": meta.get("leading_dense_block_count", 0),
        "route_scale": meta.get("expert_weights_scale", 1.0),
        "mup_enabled": True,  # llama.cpp's graph fixes it
    }


def exaone(meta: Metadata) -> dict[str, Any]:
    return {
        **_sliding(meta),
        **routed(meta),
        "num_experts": meta.num_experts,
        "num_shared_experts": meta.get("expert_shared_count", 0),
        "mlp_layer_types": _sparse_layers(meta),
    }


def hy_v3(meta: Metadata) -> dict[str, Any]:
    _normalized(meta)
    return {
        "num_experts": meta.num_experts,
        "num_shared_experts": meta("expert_shared_feed_forward_length") // meta("expert_feed_forward_length"),
        "router_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "mlp_layer_types": _sparse_layers(meta),
    }


def llama4(meta: Metadata) -> dict[str, Any]:
    rope = _rope(meta, meta("attention.key_length"))
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": meta("expert_feed_forward_length"),
        "intermediate_size_mlp": meta("feed_forward_length"),
        "moe_layers": [layer for layer, sparse in enumerate(meta.layers_with("ffn_gate_inp.weight")) if sparse],
        "use_qk_norm": meta.num_experts != 128,  # so llama.cpp tells Maverick from Scout
        "rope_parameters": {**rope, **_llama3(meta.rope_factors, rope["rope_theta"])},
    }


def _llama3(factors: Sequence[float], theta: float) -> dict[str, Any]:
    """llama3's scaling of rotary frequencies by these factors: one from some wavelength on, and a transition to it.

    In the transition, the share of a frequency that stays is linear in it.
    """
    if all(factor == 1 for factor in factors):
        return {}
    scaling = f"scales rotary frequencies by {shortened(str(sorted(set(factors))))}"
    if not all(1 <= factor < math.inf for factor in factors):
        raise UsageError(f"{scaling}, expected finite factors of at least 1; download the model again")
    other = UsageError(f"{scaling}, expected llama3's scaling")
    if (most := factors[-1]) == 1:
        raise other
    turns = [theta ** (-number / len(factors)) / (2 * math.pi) for number in range(len(factors))]
    stays = [(1 / factor - 1 / most) / (1 - 1 / most) for factor in factors]
    between = [number for number, factor in enumerate(factors) if factor not in (1, most)]
    if len(between) == 1:  # its slope is open
        raise UsageError(f"{scaling}, one factor in the transition of llama3's scaling, expected none or several")
    high = 1.0
    if between:
        first, last = between[0], between[-1]
        slope = (stays[first] - stays[last]) / (turns[first] - turns[last])
        high = round(1 + 1 / (slope * turns[first] - stays[first]), 3)  # of numbers in float32
        context = slope * (high - 1)
        expected = [min(1.0, max(0.0, stays[first] + slope * (turn - turns[first]))) for turn in turns]
    else:
        first = factors.index(most)
        context = theta ** ((first - 0.5) / len(factors)) * 2 * math.pi  # between wavelengths of its neighbours
        expected = [float(number < first) for number in range(len(factors))]
    if max(abs(stay - share) for stay, share in zip(stays, expected, strict=True)) > 1e-5:
        raise other
    return {
        "rope_type": "llama3",
        "factor": most,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": round(context),
    }


def mimo(meta: Metadata) -> dict[str, Any]:
    sliding, head_dim = _sliding(meta), meta("attention.key_length")
    heads = dict(zip(sliding["layer_types"], by_layer(meta, "attention.head_count_kv"), strict=True))
    full = heads.get("full_attention", heads.get("sliding_attention", 0) // 2)
    if heads.get("sliding_attention", 2 * full) != 2 * full:
        raise UsageError(f"has {heads} key heads, expected twice as many in layers with a window as in the others")
    rope = _rope(meta, head_dim)
    return {
        **sliding,
        **routed(meta),
        "norm_topk_prob": True,  # llama.cpp's graph fixes it
        "num_key_value_heads": full,
        "v_head_dim": meta("attention.value_length"),
        "attention_value_scale": meta.get("attention.value_scale"),
        "mlp_layer_types": _sparse_layers(meta),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {**rope, "rope_theta": meta.get("rope.freq_base_swa", rope["rope_theta"])},
        },
    }


def step35(meta: Metadata) -> dict[str, Any]:
    _normalized(meta)
    sliding = _sliding(meta)
    heads = dict(zip(sliding["layer_types"], by_layer(meta, "attention.head_count"), strict=True))
    config = {
        **sliding,
        "n_routed_experts": meta.num_experts,
        "num_attention_heads": heads.get("full_attention", max(heads.values())),
        "num_sliding_attention_heads": heads.get("sliding_attention"),
        "share_expert_dim": meta("expert_shared_feed_forward_length"),
        "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id", 0),  # the family needs one
        "moe_router_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "mlp_layer_types": _sparse_layers(meta),
    }
    for name, key in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        if meta.get(key) is not None:
            config[name] = by_layer(meta, key)
    head_dim = meta("attention.key_length")
    rope = _rope(meta, head_dim)
    share = rope.get("partial_rotary_factor", 1.0) / 2  # llama.cpp's graph fixes the half
    half = {**rope, "partial_rotary_factor": share}
    half |= _llama3(meta.rope_factors[: int(head_dim * share) // 2], rope["rope_theta"])
    theta = meta.get("rope.freq_base_swa", rope["rope_theta"])
    return config | {
        "rope_parameters": {"full_attention": half, "sliding_attention": {**rope, "rope_theta": theta}},
    }


def mellum(meta: Metadata) -> dict[str, Any]:
    rope = _rope(meta, meta("attention.key_length"))
    theta = meta.get("rope.freq_base_swa", rope["rope_theta"])
    return {
        **_sliding(meta),
        "num_experts": meta.num_experts,
        "norm_topk_prob": True,  # llama.cpp's graph fixes it
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


def laguna(meta: Metadata) -> dict[str, Any]:
    _normalized(meta)
    head_dim, heads = meta("attention.key_length"), by_layer(meta, "attention.head_count")
    rope = _rope(meta, head_dim)
    sliding = {
        "rope_type": "default",
        "rope_theta": meta.get("rope.freq_base_swa", rope["rope_theta"]),
        "partial_rotary_factor": meta.get("rope.dimension_count_swa", head_dim) / head_dim,
    }
    window = _sliding(meta, full=0)
    return {
        **{key: value for key, value in window.items() if value is not None},  # Laguna-M.1 has no windows
        "num_experts": meta.num_experts,
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if meta.shapes["blk.0.attn_gate.weight"][0] == heads[0] else "per-element",
        "shared_expert_intermediate_size": meta("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": meta.get("expert_weights_scale", 1.0),
        "mlp_layer_types": _sparse_layers(meta),
        "rope_parameters": {"full_attention": rope, "sliding_attention": sliding},
    }


def cohere2(meta: Metadata) -> dict[str, Any]:
    return {
        **_sliding(meta, full=0),
        "num_experts": meta.num_experts,
        "num_shared_experts": meta.get("expert_shared_count", 0),
        "intermediate_size": meta("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": meta.get("feed_forward_length"),
        "mlp_layer_types": _sparse_layers(meta),
        "logit_scale": meta("logit_scale"),
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon"),
        "layer_norm_eps": meta.get("attention.layer_norm_epsilon"),
        "expert_selection_fn": "softmax" if meta.get("expert_gating_func") == SOFTMAX else "sigmoid",
        "norm_topk_prob": meta.get("expert_weights_norm", False),
    }


def glm(meta: Metadata) -> dict[str, Any]:
    return {**routed(meta), "attention_bias": meta.has("attn_q.bias"), "use_qk_norm": meta.has("attn_q_norm.weight")}


def gpt_oss(meta: Metadata) -> dict[str, Any]:
    rope = _rope(meta, meta("attention.key_length"))
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": meta("expert_feed_forward_length"),
        "sliding_window": meta("attention.sliding_window"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def lfm2(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "num_dense_layers": meta("leading_dense_block_count"),
        "norm_eps": meta("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta("shortconv.l_cache"),
        "conv_bias": meta.has("shortconv.in_proj.bias"),
        "use_expert_bias": True,  # llama.cpp's graph needs it
        "norm_topk_prob": True,  # llama.cpp's graph fixes it
        "layer_types": ["full_attention" if full else "conv" for full in meta.layers_with("attn_q.weight")],
    }


def granite(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.num_experts,
        "embedding_multiplier": meta("embedding_scale"),
        "residual_multiplier": meta("residual_scale"),
        "attention_multiplier": meta("attention.scale"),
        "logits_scaling": meta("logit_scale"),
    }


def granite_hybrid(meta: Metadata) -> dict[str, Any]:
    attends = meta.layers_with("attn_q.weight")
    return {
        **granite(meta),
        **_mamba(meta),
        "shared_intermediate_size": meta("expert_shared_feed_forward_length"),
        "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else None,
        "layer_types": ["full_attention" if attention else "linear_attention" for attention in attends],
        "mamba_n_groups": meta("ssm.group_count"),
        "mamba_n_heads": meta("ssm.time_step_rank"),
        "mamba_d_head": meta("ssm.inner_size") // meta("ssm.time_step_rank"),
    }


def jamba(meta: Metadata) -> dict[str, Any]:
    attention = _every(meta.layers_with("attn_q.weight"), "attention")
    experts = _every(meta.layers_with("ffn_gate_inp.weight"), "experts")
    return {
        **_mamba(meta),
        "num_experts": meta.num_experts,
        "mamba_dt_rank": meta("ssm.time_step_rank"),
        **dict(zip(("attn_layer_period", "attn_layer_offset"), attention, strict=True)),
        **dict(zip(("expert_layer_period", "expert_layer_offset"), experts, strict=True)),
    }


def _mamba(meta: Metadata) -> dict[str, Any]:
    return {
        "mamba_d_state": meta("ssm.state_size"),
        "mamba_d_conv": meta("ssm.conv_kernel"),
        "mamba_expand": meta("ssm.inner_size") // meta("embedding_length"),
        "mamba_conv_bias": meta.has("ssm_conv1d.bias"),
        "mamba_proj_bias": meta.has("ssm_in.bias"),
    }


def _every(there: list[bool], what: str) -> tuple[int, int]:
    """Period and first of regularly spaced layers. Raises: UsageError: they are not."""
    layers = [layer for layer, has in enumerate(there) if has]
    first, second = (*layers, 0, 0)[:2]
    period = second - first if second else len(there)
    if layers != [layer for layer in range(len(there)) if layer % period == first]:
        raise UsageError(f"has {what} in layers {layers}, expected layers at equal distances")
    return period, first


def kimi_linear(meta: Metadata) -> dict[str, Any]:
    attends = meta.layers_with("attn_kv_a_mqa.weight")
    return {
        **deepseek(meta),
        "num_local_experts": meta.num_experts,
        "norm_topk_prob": True,  # llama.cpp's graph fixes it
        "mlp_layer_types": _sparse_layers(meta),
        "layer_types": ["full_attention" if latent else "linear_attention" for latent in attends],
        "linear_head_dim": meta("kda.head_dim"),
        "linear_num_heads": meta("attention.head_count"),
        "linear_conv_kernel_dim": meta("ssm.conv_kernel"),
    }


def ernie(meta: Metadata) -> dict[str, Any]:
    return {
        "moe_num_experts": meta.num_experts,
        "moe_k": meta("expert_used_count"),
        "moe_num_shared_experts": meta.get("expert_shared_count", 0),
        "moe_layer_start_index": meta("leading_dense_block_count"),
        "moe_layer_interval": meta.get("interleave_moe_layer_step", 1),
        "moe_layer_end_index": meta.num_layers - 1,
    }


def hunyuan(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "moe_topk": meta("expert_used_count"),
        "intermediate_size": meta("expert_feed_forward_length"),  # of the shared expert too
    }


def dbrx(meta: Metadata) -> dict[str, Any]:
    rope = _rope(meta, meta("embedding_length") // meta("attention.head_count"))
    return {
        "d_model": meta("embedding_length"),
        "n_heads": meta("attention.head_count"),
        "n_layers": meta.num_layers,
        "max_seq_len": meta("context_length"),
        "attn_config": {
            "kv_n_heads": meta("attention.head_count_kv"),
            "clip_qkv": meta("attention.clamp_kqv"),
            "rope_theta": rope["rope_theta"],
        },
        "ffn_config": {
            "ffn_hidden_size": meta("feed_forward_length"),
            "moe_num_experts": meta.num_experts,
            "moe_top_k": meta("expert_used_count"),
        },
    }


def local(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": meta.get("expert_feed_forward_length", meta("feed_forward_length")),
    }


def olmoe(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "norm_topk_prob": False,  # llama.cpp's graph fixes it
        "clip_qkv": meta.get("attention.clamp_kqv"),
    }
