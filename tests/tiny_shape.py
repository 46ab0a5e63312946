"""A shape whose checkpoint takes kilobytes: DeepSeek-V2's family, one dense layer and four of 8 experts."""

import json
from pathlib import Path

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
EXPERT_BYTES = 3 * 32 * 16 * 2


def write_shape(folder: Path) -> str:
    """Write config.json for `--shape`; return its folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)
