"""Architectures of GGUF files: llama.cpp's tensor names, its changes to tensors, and configs.

Tensors are mapped to the names of transformers' modules. tests/golden/gguf holds a file of each, made by llama.cpp's
converter; tests compare it with the original model.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.base.errors import UsageError
from moetool.models.gguf.blocks import Undo
from moetool.models.gguf.changes import Grouped, Interleaved, Latent, Logarithm, MinusOne, RotaryHalves, TensorJoin

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_",
    **{f"ffn_{x}_shexp": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")},
}
_SHARED_EXPERT = {
    **{f"ffn_{x}_shexp": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LATENT = {
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in ("q_a", "q_b", "kv_b")},
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
}
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **{f"ffn_{x}_shexp": f"mlp.shared_mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_dt": "linear_attn.dt_",
    "ssm_a": "linear_attn.A_log!",
}
_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_",
    **{f"shortconv.{x}": f"conv.{x}" for x in ("conv", "in_proj", "out_proj")},
}
_SOFTMAX, _SIGMOID = 1, 2


class Metadata:
    """Values of a header, by keys below its architecture.

    Args:
        values: all header values.
        shapes: shapes of the tensors, by name.

    Attributes:
        names: names of the tensors.
    """

    def __init__(self, architecture: str, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.architecture = architecture
        self.values = values
        self.shapes = shapes
        self.names = shapes.keys()

    def __call__(self, key: str) -> Any:
        """Return a value. Raises: KeyError: it is missing."""
        return self.values[f"{self.architecture}.{key}"]

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def has(self, leaf: str) -> bool:
        """Whether any layer has this tensor."""
        return any(_leaf(name) == leaf for name in self.names)

    @functools.cached_property
    def num_layers(self) -> int:
        """Decoder layers, counted from the tensors: blocks without multi-token prediction (`nextn.*`).

        Raises: ValueError: one is missing, or a prediction block is not behind them.
        """
        layers = sum(not predicting for predicting in self._blocks.values())
        for number in range(layers):
            if self._blocks.get(number, True):
                problem = "is a prediction block (nextn)" if number in self._blocks else "is missing"
                raise ValueError(f"blk.{number} {problem}, expected {layers} layers in front of all prediction blocks")
        return layers

    @functools.cached_property
    def _blocks(self) -> dict[int, bool]:
        """Numbers of the blocks, and whether each is a multi-token prediction block."""
        found: dict[int, bool] = {}
        for name in self.names:
            if leaf := _leaf(name):
                number = int(name.split(".", 2)[1])
                found[number] = found.get(number, False) or leaf.startswith("nextn.")
        return found

    @functools.cached_property
    def num_experts(self) -> int:
        """Routed experts of a layer, counted from the routers and the stacked experts.

        Raises: ValueError: tensors differ.
        """
        counted = {
            name: shape[0]
            for name, shape in self.shapes.items()
            if _counts_experts(_leaf(name)) and int(name.split(".")[1]) < self.num_layers
        }
        if not counted:
            raise ValueError("it holds neither a router (ffn_gate_inp) nor stacked experts (ffn_*_exps)")
        (first, expected), *others = sorted(counted.items())
        for name, count in others:
            if count != expected:
                raise ValueError(f"{name} is of {count} experts, expected {expected} as {first}")
        return expected

    def contradictions(self) -> list[str]:
        """Counts that the header gives and the tensors contradict.

        Raises: ValueError: the tensors lack layers of the header.
        """
        blocks, predicting = int(self("block_count")), int(self.get("nextn_predict_layers", 0))
        found = []
        if (layers := blocks - predicting) != self.num_layers:
            said = f"{layers} layers (block_count {blocks}, nextn_predict_layers {predicting})"
            if layers > self.num_layers and blocks != len(self._blocks):
                raise ValueError(f"its header counts {said}, but it holds tensors of {self.num_layers}")
            found.append(f"{said}, its tensors {self.num_layers}")
        if (experts := int(self("expert_count"))) != self.num_experts:
            found.append(f"{experts} experts (expert_count), its tensors {self.num_experts}")
        return found

    @property
    def gating(self) -> int:
        """Score function of the router, as ggml's number."""
        return int(self.get("expert_gating_func", _SIGMOID if self.has("exp_probs_b.bias") else _SOFTMAX))


def _leaf(name: str) -> str:
    """A tensor's name within its block; empty outside blocks."""
    return "".join(name.split(".", 2)[2:]) if name.startswith("blk.") else ""


def _counts_experts(leaf: str) -> bool:
    return leaf == "ffn_gate_inp.weight" or (leaf.startswith("ffn_") and leaf.endswith("_exps.weight"))


Config = Mapping[str, Any]
Joined = tuple[str, tuple[str, ...], TensorJoin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture.

    Attributes:
        family: the `model_type` of transformers.
        config: further fields of the config.
        names: module names within a layer that differ from the usual ones. A final `!` marks a parameter without a
            suffix, a final `_` a prefix of `weight` or `bias`.
        experts: the module that holds a layer's experts.
        undo: inverse of llama.cpp's changes, by suffix of the parameter's name.
        joined: parameters of a layer that several tensors make, the leaves of these tensors, and the function.
        interleaved: whether rows of gate and up alternate and matrices are transposed.
        embedding_norm: name of the last norm if the file calls it `token_embd_norm`.
        gating: required score function of the router, as ggml's number; None: any.
    """

    family: str
    config: Callable[[Metadata], Config]
    names: Mapping[str, str] = field(default_factory=dict)
    experts: str = "mlp.experts"
    undo: Callable[[Metadata], Mapping[str, Undo]] = lambda meta: {}
    joined: Callable[[Metadata], Sequence[Joined]] = lambda meta: ()
    interleaved: bool = False
    embedding_norm: str = ""
    gating: int | None = None

    def renamed(self, name: str) -> str | None:
        """A tensor's name in the model; None if the architecture lacks it."""
        stem, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        root, module = "", self.embedding_norm if stem == "token_embd_norm" else _WHOLE.get(stem, "")
        if stem.startswith("blk."):
            _, layer, leaf = stem.split(".", 2)
            root, module = f"model.layers.{layer}.", self.names.get(leaf) or _LAYER.get(leaf, "")
        if not module:
            return None
        if module.endswith("!"):  # a parameter, not a module
            return root + module[:-1]
        return f"{root}{module}{end}" if module.endswith("_") else f"{root}{module}.{end}"


def common_config(meta: Metadata) -> dict[str, Any]:
    """Config values common to all architectures. Raises: KeyError: the header lacks one."""
    heads, hidden = meta("attention.head_count"), meta("embedding_length")
    key_value_heads = meta("attention.head_count_kv")
    head_dim = meta.get("attention.key_length", hidden // heads)
    moe = meta.get("expert_feed_forward_length", meta.get("feed_forward_length"))
    return {
        "vocab_size": meta.values["tokenizer.ggml.tokens"],
        "hidden_size": hidden,
        "num_hidden_layers": meta.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(key_value_heads) if isinstance(key_value_heads, list) else key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": meta.get("feed_forward_length", moe),
        "moe_intermediate_size": moe,
        "num_experts_per_tok": meta("expert_used_count"),
        "rms_norm_eps": meta("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(meta, head_dim),
        "max_position_embeddings": meta("context_length"),
        "tie_word_embeddings": "output.weight" not in meta.names,
        "bos_token_id": meta.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.values.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.values.get("tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


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
        ):
            if (value := meta.get(f"rope.scaling.{key}")) is not None:
                made[name] = value
    return made


def _qwen(meta: Metadata) -> dict[str, Any]:
    dense = [i for i in range(meta.num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in meta.names]
    return {
        "num_experts": meta.num_experts,
        "norm_topk_prob": meta.architecture != "qwen2moe",  # llama.cpp's graph fixes it
        "mlp_only_layers": dense,
        "shared_expert_intermediate_size": meta.get("expert_shared_feed_forward_length"),
    }


def _linear(meta: Metadata) -> dict[str, Any]:
    values, layers = meta("ssm.time_step_rank"), range(meta.num_layers)
    return {
        **_qwen(meta),
        "layer_types": [
            "full_attention" if f"blk.{i}.attn_q.weight" in meta.names else "linear_attention" for i in layers
        ],
        "linear_conv_kernel_dim": meta("ssm.conv_kernel"),
        "linear_key_head_dim": meta("ssm.state_size"),
        "linear_num_key_heads": meta("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": meta("ssm.inner_size") // values,
    }


def _routed(meta: Metadata) -> dict[str, Any]:
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


def _deepseek(meta: Metadata) -> dict[str, Any]:
    rope = meta("rope.dimension_count")
    config = {
        **_routed(meta),
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
    if meta.gating == _SOFTMAX:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config


def _glm(meta: Metadata) -> dict[str, Any]:
    return {
        **_routed(meta),
        "attention_bias": meta.has("attn_q.bias"),
        "use_qk_norm": meta.has("attn_q_norm.weight"),
    }


def _gpt_oss(meta: Metadata) -> dict[str, Any]:
    rope = _rope(meta, meta("attention.key_length"))
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": meta("expert_feed_forward_length"),
        "sliding_window": meta("attention.sliding_window"),
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _lfm2(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "num_dense_layers": meta("leading_dense_block_count"),
        "norm_eps": meta("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": meta("shortconv.l_cache"),
        "conv_bias": meta.has("shortconv.in_proj.bias"),
        "use_expert_bias": meta.has("exp_probs_b.bias"),
        "norm_topk_prob": True,  # llama.cpp's graph fixes it
        "layer_types": [
            "full_attention" if f"blk.{i}.attn_q.weight" in meta.names else "conv" for i in range(meta.num_layers)
        ],
    }


def _granite(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.num_experts,
        "embedding_multiplier": meta("embedding_scale"),
        "residual_multiplier": meta("residual_scale"),
        "attention_multiplier": meta("attention.scale"),
        "logits_scaling": meta("logit_scale"),
    }


def _ernie(meta: Metadata) -> dict[str, Any]:
    return {
        "moe_num_experts": meta.num_experts,
        "moe_k": meta("expert_used_count"),
        "moe_num_shared_experts": meta.get("expert_shared_count", 0),
        "moe_layer_start_index": meta("leading_dense_block_count"),
        "moe_layer_interval": meta.get("interleave_moe_layer_step", 1),
        "moe_layer_end_index": meta.num_layers - 1,
    }


def _hunyuan(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "moe_topk": meta("expert_used_count"),
        "intermediate_size": meta("expert_feed_forward_length"),  # of the shared expert too
    }


def _local(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.num_experts,
        "intermediate_size": meta.get("expert_feed_forward_length", meta("feed_forward_length")),
    }


def _olmoe(meta: Metadata) -> dict[str, Any]:
    return {
        "num_experts": meta.num_experts,
        "norm_topk_prob": False,  # llama.cpp's graph fixes it
        "clip_qkv": meta.get("attention.clamp_kqv"),
    }


def _halves(meta: Metadata) -> dict[str, Undo]:
    heads = {"q": meta("attention.head_count"), "k": meta("attention.head_count_kv")}
    return {f"{x}_proj.{end}": RotaryHalves(n) for x, n in heads.items() for end in ("weight", "bias")}


def _norms(meta: Metadata) -> dict[str, Undo]:
    return dict.fromkeys(("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight"), MinusOne())


def _grouped(meta: Metadata) -> dict[str, Undo]:
    keys = int(meta("ssm.group_count"))
    each, queries = meta("ssm.time_step_rank") // keys, 2 * meta("ssm.state_size") * keys
    grouped = functools.partial(Grouped, keys, each)
    return {
        **_norms(meta),
        "linear_attn.A_log": grouped(logarithm=True),
        **dict.fromkeys(("dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight"), grouped()),
        **dict.fromkeys(("in_proj_qkv.weight", "conv1d.weight"), grouped(first=queries)),
        "linear_attn.out_proj.weight": grouped(inputs=True),
    }


def _qwen3_next(meta: Metadata) -> Sequence[Joined]:
    undo = Interleaved(meta("ssm.group_count"), meta("ssm.state_size"))
    return [("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), undo)]


_DEEPSEEK = functools.partial(
    Architecture,
    config=_deepseek,
    names=_LATENT,
    joined=lambda meta: [("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), Latent())],
)
_LLAMA = functools.partial(Architecture, undo=_halves, gating=_SOFTMAX)
_QWEN3 = Architecture(family="qwen3_moe", config=_qwen, gating=_SOFTMAX)
ARCHITECTURES = {
    "deepseek2": _DEEPSEEK(family="deepseek_v3", gating=_SIGMOID),
    "dots1": Architecture(family="dots1", config=_routed, gating=_SIGMOID),
    "ernie4_5-moe": Architecture(
        family="ernie4_5_moe", config=_ernie, names={"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_"}
    ),
    "glm4moe": Architecture(family="glm4_moe", config=_glm, gating=_SIGMOID),
    "gpt-oss": Architecture(
        family="gpt_oss",
        config=_gpt_oss,
        names={"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks!"},
        interleaved=True,
    ),
    "granitemoe": _LLAMA(
        family="granitemoe",
        config=_granite,
        names={"ffn_gate_inp": "block_sparse_moe.router"},
        experts="block_sparse_moe.experts",
    ),
    "hunyuan-moe": Architecture(family="hunyuan_v1_moe", config=_hunyuan, names=_HUNYUAN, gating=_SOFTMAX),
    "lfm2moe": Architecture(
        family="lfm2_moe",
        config=_lfm2,
        names=_CONVOLUTIONS,
        experts="feed_forward.experts",
        embedding_norm="model.embedding_norm",
        gating=_SIGMOID,
    ),
    "llama": _LLAMA(family="mixtral", config=_local),
    "minimax-m2": Architecture(
        family="minimax_m2", config=_local, names={"exp_probs_b": "mlp.e_score_correction_"}, gating=_SIGMOID
    ),
    "olmoe": Architecture(family="olmoe", config=_olmoe, gating=_SOFTMAX),
    "qwen2moe": Architecture(family="qwen2_moe", config=_qwen, names=_SHARED_EXPERT, gating=_SOFTMAX),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text", config=_linear, names={**_SHARED_EXPERT, **_LINEAR}, undo=_grouped
    ),
    "qwen3moe": _QWEN3,
    "qwen3next": Architecture(
        family="qwen3_next",
        config=_linear,
        names={**_SHARED_EXPERT, **_LINEAR},
        undo=lambda meta: {**_norms(meta), "linear_attn.A_log": Logarithm()},
        joined=_qwen3_next,
    ),
    "qwen3vlmoe": _QWEN3,  # the text part; for text its three positions are equal
}
"""Architectures by `general.architecture`."""
_SCORED_BY_SOFTMAX = _DEEPSEEK(family="deepseek_v2", gating=_SOFTMAX)


def find_architecture(meta: Metadata) -> Architecture:
    """The architecture of a file.

    Raises:
        UsageError: it is not supported, has no experts, or its routing differs from its family's.
    """
    found = ARCHITECTURES.get(meta.architecture)
    if found is None:
        raise UsageError(
            f"is of the architecture {meta.architecture!r}, expected one of {', '.join(ARCHITECTURES)}; use the model "
            "in Hugging Face format"
        )
    if not meta.get("expert_count"):
        raise UsageError(f"has no experts (architecture {meta.architecture}); use a mixture-of-experts model")
    if meta.architecture == "deepseek2" and meta.gating == _SOFTMAX:
        return _SCORED_BY_SOFTMAX
    if found.gating not in (None, meta.gating):
        raise UsageError(
            f"routes with ggml's gating function {meta.gating}, expected {found.gating} of {found.family}; use the "
            "model in Hugging Face format"
        )
    return found
