"""Architectures of GGUF files: llama.cpp's tensor names and its changes to tensors.

Tensors are mapped to the names of transformers' modules. tests/golden/gguf holds a file of each, made by llama.cpp's
converter; tests compare it with the original model.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moetool.base.errors import UsageError
from moetool.models.gguf import configs
from moetool.models.gguf.blocks import Undo
from moetool.models.gguf.changes import (
    Concatenated,
    Convolutions,
    FlatExperts,
    Grouped,
    Interleaved,
    Latent,
    Logarithm,
    MinusOne,
    RotaryHalves,
    TensorJoin,
)
from moetool.models.gguf.configs import by_layer
from moetool.models.gguf.metadata import SIGMOID, SOFTMAX, SQUARE_ROOT, Metadata

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
    "token_embd_norm": "model.embedding_norm",
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
_BLOCK_INDEXER = {
    **{f"indexer.{x}_proj": f"self_attn.indexer.{x}_proj" for x in "qk"},
    **{f"indexer.{x}_norm": f"self_attn.indexer.{x}_norm" for x in "qk"},
}
_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}
_DEEPSEEK4 = {
    **{f"output_hc_{x}": f"model.hc_head.hc_{x}!" for x in ("fn", "base", "scale")},
    **{f"hc_attn_{x}": f"attn_hc.{x}!" for x in ("fn", "base", "scale")},
    **{f"hc_ffn_{x}": f"ffn_hc.{x}!" for x in ("fn", "base", "scale")},
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in ("q_a", "q_b", "kv")},
    **{f"attn_output_{x}": f"self_attn.o_{x}_proj" for x in "ab"},
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_sinks": "self_attn.sinks!",
    **{f"attn_compressor_{x}": f"self_attn.compressor.{x}_proj" for x in ("kv", "gate")},
    "attn_compressor_ape": "self_attn.compressor.position_bias!",
    "attn_compressor_norm": "self_attn.compressor.kv_norm",
    **{f"indexer_compressor_{x}": f"self_attn.compressor.indexer.{x}_proj" for x in ("kv", "gate")},
    "indexer_compressor_ape": "self_attn.compressor.indexer.position_bias!",
    "indexer_compressor_norm": "self_attn.compressor.indexer.kv_norm",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer.proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid!",
}
_GEMMA4 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm": "post_feedforward_layernorm",
    **{f"post_ffw_norm_{x}": f"post_feedforward_layernorm_{x}" for x in "12"},
    "layer_output_scale": "layer_scalar!",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale!",
    "ffn_down_exps.scale": "router.per_expert_scale!",
}


def _mamba(module: str) -> dict[str, str]:
    return {
        "ssm_in": f"{module}.in_proj",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_dt": f"{module}.dt_",
        "ssm_a": f"{module}.A_log!",
        "ssm_d": f"{module}.D!",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


_MIXERS = {
    **_mamba("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    **{f"attn_{x}": f"mixer.{x}_proj" for x in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_",
    **{f"ffn_{x}": f"mixer.{x}_proj" for x in ("up", "down")},
    **{f"ffn_{x}_shexp": f"mixer.shared_experts.{x}_proj" for x in ("up", "down")},
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_GRANITE_HYBRID = {
    **_mamba("mamba"),
    "ffn_gate_inp": "block_sparse_moe.router",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_JAMBA = {
    **_mamba("mamba"),
    "output_norm": "model.final_layernorm",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    **{f"ssm_{x}_norm": f"mamba.{x}_layernorm" for x in ("dt", "b", "c")},
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
}
_DELTA = {
    **{f"ssm_{x}": f"self_attn.forget_gate.{x}_proj" for x in ("f_a", "f_b")},
    **{f"ssm_{x}": f"self_attn.{x}_proj" for x in ("g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt": "self_attn.forget_gate.dt_",
    "ssm_a": "self_attn.forget_gate.A_log!",
    "ssm_norm": "self_attn.o_norm",
}
_DBRX = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "attn_norm": "norm_attn_norm.norm_1",
    "attn_qkv": "norm_attn_norm.attn.Wqkv",
    "attn_output": "norm_attn_norm.attn.out_proj",
    "attn_output_norm": "norm_attn_norm.norm_2",
    "ffn_gate_inp": "ffn.router.layer",
}
_LLAMA4 = {
    "ffn_gate_inp": "feed_forward.router",
    **{f"ffn_{x}": f"feed_forward.{x}_proj" for x in ("gate", "up", "down")},
    **{f"ffn_{x}_shexp": f"feed_forward.shared_expert.{x}_proj" for x in ("gate", "up", "down")},
}
_QWEN4 = {
    **{
        f"{tensor}_{leaf}": f"{module}.{part}"
        for tensor, module in (
            ("output_hc", "model.hyper_connection_mixer"),
            ("hc_attn", "attn_hyper_connection"),
            ("hc_ffn", "mlp_hyper_connection"),
        )
        for leaf, part in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    **{f"ple_{x}": f"ple.{x}_proj" for x in ("key", "value")},
    **{f"ple_{x}": f"ple.{x}" for x in ("norm_key", "norm_query", "norm_conv", "conv1d")},
    **{f"indexer.{x}_norm": f"self_attn.indexer.{x}_layernorm" for x in "qk"},
}
_AFMOE = {
    "attn_gate": "self_attn.gate_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    "exp_probs_b": "mlp.expert_",
}

Config = Mapping[str, Any]
Joined = tuple[str, tuple[str, ...], TensorJoin]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """An architecture.

    Attributes:
        family: the `model_type` of transformers.
        within: the `model_type` of the larger model that transformers builds the family in; empty: it stands alone.
        config: further fields of the config.
        names: module names that differ from the usual ones. A final `!` marks a parameter without a suffix, a final
            `_` a prefix of `weight` or `bias`.
        layers: the module that holds the layers.
        experts: the module that holds a layer's experts.
        gated: whether experts have a gate.
        in_config: tensors whose numbers the config holds.
        undo: inverse of llama.cpp's changes, by suffix of the parameter's name.
        joined: parameters of a layer that several tensors make, the leaves of these tensors, and the function.
        interleaved: whether rows of gate and up alternate.
        transposed: whether the family's experts are transposed, as input by output.
        gating: required score function of the router, as ggml's number; None: any.
        in_layer: names in the model of tensors outside the layers that belong to a layer which the header names.
        buffers: numbers of the model that the header holds, by name.
    """

    family: str
    within: str = ""
    config: Callable[[Metadata], Config]
    names: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    experts: str = "mlp.experts"
    gated: bool = True
    in_config: Sequence[str] = ()
    undo: Callable[[Metadata], Mapping[str, Undo]] = lambda meta: {}
    joined: Callable[[Metadata], Sequence[Joined]] = lambda meta: ()
    interleaved: bool = False
    transposed: bool = False
    gating: int | None = None
    in_layer: Callable[[Metadata], Mapping[str, str]] = lambda meta: {}
    buffers: Callable[[Metadata], Mapping[str, list[int]]] = lambda meta: {}

    def path(self, module: str) -> str:
        """A module of the family, as the model has it that transformers builds."""
        return re.sub(r"^model\b", "model.language_model", module) if self.within else module

    def renamed(self, name: str) -> str | None:
        """A tensor's name in the model; None if the architecture lacks it."""
        stem, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        root, module = "", self.path(self.names.get(stem) or _WHOLE.get(stem, ""))
        if stem.startswith("blk."):
            _, layer, leaf = stem.split(".", 2)
            root, module = self.path(f"{self.layers}.{layer}."), self.names.get(leaf) or _LAYER.get(leaf, "")
        if not module:
            return None
        if module.endswith("!"):  # a parameter, not a module
            return root + module[:-1]
        return f"{root}{module}{end or 'bias'}" if module.endswith("_") else f"{root}{module}.{end}"


def _halves(meta: Metadata) -> dict[str, Undo]:
    heads = {"q": meta("attention.head_count"), "k": max(by_layer(meta, "attention.head_count_kv"))}
    return {f"{x}_proj.{end}": RotaryHalves(n) for x, n in heads.items() for end in ("weight", "bias")}


def _mamba_halves(meta: Metadata) -> dict[str, Undo]:
    return {**_halves(meta), "A_log": Logarithm()}


def _fused(leaf: str, module: str) -> Joined:
    """Gate and up of a layer that one projection of the model computes."""
    return f"{module}.weight", (f"ffn_gate{leaf}.weight", f"ffn_up{leaf}.weight"), Concatenated()


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
        **dict.fromkeys(("in_proj_qkv.weight", "linear_attn.conv1d.weight"), grouped(first=queries)),
        "linear_attn.out_proj.weight": grouped(inputs=True),
    }


def _qwen3_next(meta: Metadata) -> Sequence[Joined]:
    undo = Interleaved(meta("ssm.group_count"), meta("ssm.state_size"))
    return [("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), undo)]


def _qwen4(meta: Metadata) -> dict[str, Undo]:
    own = ("hc_norm.weight", "norm_key.weight", "norm_query.weight", "norm_conv.weight")
    return {**_grouped(meta), **dict.fromkeys(own, MinusOne())}


def _n_grams(meta: Metadata) -> str | None:
    """The module that looks n-grams up."""
    layers = meta.get("ple.layers")
    return f"model.layers.{layers[0]}.ple.ple_embedding" if layers else None


def _n_gram_table(meta: Metadata) -> dict[str, str]:
    module = _n_grams(meta)
    return {"per_layer_token_embd.weight": f"{module}.ngram_embedding.weight"} if module else {}


def _n_gram_hashes(meta: Metadata) -> dict[str, list[int]]:
    keys = {
        "layer_multipliers": "layer_multipliers",
        "ngram_heads_offsets": "head_offsets",
        "ngram_heads_vocab_sizes": "head_vocab_sizes",
    }
    module = _n_grams(meta)
    return {f"{module}.{leaf}": meta(f"ple.{key}") for leaf, key in keys.items()} if module else {}


_INDEX = ("self_attn.indexer.index_qk_proj.weight", ("indexer.q_proj.weight", "indexer.k_proj.weight"), Concatenated())
_EXPANDED = ("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), Latent())
_CONVOLVED = ("self_attn.conv1d.weight", tuple(f"ssm_conv1d_{x}.weight" for x in "qkv"), Convolutions())
_FLAT = [
    (f"ffn.experts.mlp.{name}", (f"ffn_{leaf}_exps.weight",), FlatExperts(transposed=leaf == "down"))
    for name, leaf in (("w1", "gate"), ("v1", "up"), ("w2", "down"))
]
_DEEPSEEK = functools.partial(Architecture, config=configs.deepseek, names=_LATENT, joined=lambda meta: [_EXPANDED])
_LLAMA = functools.partial(Architecture, undo=_halves, gating=SOFTMAX)
_QWEN3 = Architecture(family="qwen3_moe", config=configs.qwen, gating=SOFTMAX)
ARCHITECTURES = {
    "afmoe": Architecture(family="afmoe", config=configs.afmoe, names=_AFMOE, gating=SIGMOID),
    "cohere2moe": Architecture(family="cohere2_moe", config=configs.cohere2),
    "dbrx": Architecture(
        family="dbrx",
        config=configs.dbrx,
        names=_DBRX,
        layers="transformer.blocks",
        joined=lambda meta: _FLAT,
        gating=SOFTMAX,
    ),
    "deepseek2": _DEEPSEEK(family="deepseek_v3", gating=SIGMOID),
    "deepseek2-ocr": Architecture(
        family="unlimited_ocr_text", within="unlimited_ocr", config=configs.deepseek_ocr, gating=SOFTMAX
    ),
    "deepseek32": _DEEPSEEK(
        family="deepseek_v32", config=configs.indexed, names={**_LATENT, **_INDEXER}, gating=SIGMOID
    ),
    "deepseek4": Architecture(family="deepseek_v4", config=configs.deepseek4, names=_DEEPSEEK4, gating=SQUARE_ROOT),
    "dots1": Architecture(family="dots1", config=configs.routed, gating=SIGMOID),
    "ernie4_5-moe": Architecture(
        family="ernie4_5_moe", config=configs.ernie, names={"exp_probs_b": "mlp.gate.moe_statics.e_score_correction_"}
    ),
    "exaone-moe": Architecture(family="exaone_moe", config=configs.exaone, gating=SIGMOID),
    "gemma4": Architecture(
        family="gemma4_text",
        config=configs.gemma4,
        names=_GEMMA4,
        experts="experts",
        in_config=("rope_freqs.weight",),
        gating=SOFTMAX,
    ),
    "glm-dsa": _DEEPSEEK(family="glm_moe_dsa", config=configs.indexed, names={**_LATENT, **_INDEXER}, gating=SIGMOID),
    "glm4moe": Architecture(family="glm4_moe", config=configs.glm, gating=SIGMOID),
    "gpt-oss": Architecture(
        family="gpt_oss",
        config=configs.gpt_oss,
        names={"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks!"},
        interleaved=True,
        transposed=True,
    ),
    "granitemoe": _LLAMA(
        family="granitemoe",
        config=configs.granite,
        names={"ffn_gate_inp": "block_sparse_moe.router"},
        experts="block_sparse_moe.experts",
    ),
    "granitehybrid": _LLAMA(
        family="granitemoehybrid",
        config=configs.granite_hybrid,
        names=_GRANITE_HYBRID,
        experts="block_sparse_moe.experts",
        undo=_mamba_halves,
        joined=lambda meta: [_fused("_shexp", "shared_mlp.input_linear")],
    ),
    "hunyuan-moe": Architecture(family="hunyuan_v1_moe", config=configs.hunyuan, names=_HUNYUAN, gating=SOFTMAX),
    "hy_v3": Architecture(
        family="hy_v3", config=configs.hy_v3, names={"exp_probs_b": "mlp.e_score_correction_"}, gating=SIGMOID
    ),
    "jamba": Architecture(
        family="jamba",
        config=configs.jamba,
        names=_JAMBA,
        experts="feed_forward.experts",
        undo=lambda meta: {"mamba.A_log": Logarithm()},
        gating=SOFTMAX,
    ),
    "kimi-linear": Architecture(
        family="kimi_linear",
        config=configs.kimi_linear,
        names={**_LATENT, **_DELTA},
        undo=lambda meta: {"forget_gate.A_log": Logarithm()},
        joined=lambda meta: [_EXPANDED, _CONVOLVED],
        gating=SIGMOID,
    ),
    "laguna": Architecture(
        family="laguna", config=configs.laguna, names={"attn_gate": "self_attn.g_proj"}, gating=SIGMOID
    ),
    "lfm2moe": Architecture(
        family="lfm2_moe", config=configs.lfm2, names=_CONVOLUTIONS, experts="feed_forward.experts", gating=SIGMOID
    ),
    "llama": _LLAMA(family="mixtral", config=configs.local),
    "llama4": Architecture(
        family="llama4_text",
        config=configs.llama4,
        names=_LLAMA4,
        experts="feed_forward.experts",
        in_config=("rope_freqs.weight",),
        transposed=True,
    ),
    "mellum": Architecture(family="mellum", config=configs.mellum, gating=SOFTMAX),
    "mimo2": Architecture(
        family="mimo_v2_flash", config=configs.mimo, names={"attn_sinks": "self_attn.sinks!"}, gating=SIGMOID
    ),
    "minimax-m2": Architecture(
        family="minimax_m2", config=configs.local, names={"exp_probs_b": "mlp.e_score_correction_"}, gating=SIGMOID
    ),
    "minimax-m3": Architecture(
        family="minimax_m3_vl_text",
        config=configs.minimax_m3,
        names=_BLOCK_INDEXER,
        undo=lambda meta: {"norm.weight": MinusOne()},
        joined=lambda meta: [
            _fused("_shexp", "mlp.shared_experts.gate_up_proj"),
            _fused("", "mlp.gate_up_proj"),
        ],
        gating=SIGMOID,
    ),
    "mistral4": _DEEPSEEK(family="mistral4", within="mistral3", config=configs.mistral4, gating=SOFTMAX),
    "nemotron_h_moe": Architecture(
        family="nemotron_h",
        config=configs.nemotron,
        names=_MIXERS,
        experts="mixer.experts",
        gated=False,
        undo=_mamba_halves,
        gating=SIGMOID,
    ),
    "olmoe": Architecture(family="olmoe", config=configs.olmoe, gating=SOFTMAX),
    "qwen2moe": Architecture(family="qwen2_moe", config=configs.qwen, names=_SHARED_EXPERT, gating=SOFTMAX),
    "qwen35moe": Architecture(
        family="qwen3_5_moe_text", config=configs.linear, names={**_SHARED_EXPERT, **_LINEAR}, undo=_grouped
    ),
    "qwen3moe": _QWEN3,
    "qwen3next": Architecture(
        family="qwen3_next",
        config=configs.linear,
        names={**_SHARED_EXPERT, **_LINEAR},
        undo=lambda meta: {**_norms(meta), "linear_attn.A_log": Logarithm()},
        joined=_qwen3_next,
    ),
    "qwen4exp": Architecture(
        family="qwen4_exp_text",
        config=configs.qwen4,
        names={**_SHARED_EXPERT, **_LINEAR, **_QWEN4},
        undo=_qwen4,
        joined=lambda meta: [_INDEX],
        in_layer=_n_gram_table,
        buffers=_n_gram_hashes,
    ),
    "qwen3vlmoe": _QWEN3,  # the text part; for text its three positions are equal
    "step35": Architecture(
        family="step3p5",
        within="step3p7",
        config=configs.step35,
        names={"attn_gate": "self_attn.g_proj"},
        in_config=("rope_freqs.weight",),
        undo=lambda meta: {"norm.weight": MinusOne()},
        gating=SIGMOID,
    ),
}
"""Architectures by `general.architecture`."""
UNREAD = {
    "bailingmoe3": "bailing_hybrid",
    "dots3note": "dots3_note",
    "glm5-next": "glm5_next",
    "granite_swa": "granitemoe_swa",
    "hy_v4": "hy_v4",
    "minimax-01": "minimax",
    "phimoe": "phimoe",
}
"""Architectures that are not read, of families that run in Hugging Face format."""
_LOSSES = {"phimoe": "llama.cpp's converter leaves short_mscale and long_mscale out, factors of its rotary embedding"}
"""Reasons why files of an architecture cannot be read."""
_SCORED_BY_SOFTMAX = _DEEPSEEK(family="deepseek_v2", gating=SOFTMAX)


def find_architecture(meta: Metadata) -> Architecture:
    """The architecture of a file.

    Raises:
        UsageError: it is not supported, has no experts, or its routing differs from its family's.
    """
    found = ARCHITECTURES.get(meta.architecture)
    if found is None and (family := UNREAD.get(meta.architecture)) is not None:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        reason = _LOSSES.get(meta.architecture, "")
        where = "in Hugging Face format" if family in CONFIG_MAPPING else "with a newer transformers"
        raise UsageError(
            f"is of the architecture {meta.architecture!r}, which moetool does not read{reason and f' ({reason})'}; "
            f"use the model {where} (family {family})"
        )
    if found is None:
        raise UsageError(
            f"is of the architecture {meta.architecture!r}, expected one of {', '.join(ARCHITECTURES)}; moetool runs "
            "no family of it, so use another model"
        )
    if not (experts := meta.get("expert_count")) or (experts == 1 and not meta.has("ffn_gate_inp.weight")):
        raise UsageError(f"has no experts (architecture {meta.architecture}); use a mixture-of-experts model")
    if meta.architecture == "deepseek2" and meta.gating == SOFTMAX:
        scaled = meta.get("attention.temperature_scale")  # of Mistral Large 3
        return ARCHITECTURES["mistral4"] if scaled else _SCORED_BY_SOFTMAX
    if found.gating not in (None, meta.gating):
        raise UsageError(
            f"routes with ggml's gating function {meta.gating}, expected {found.gating} of {found.family}; use the "
            "model in Hugging Face format"
        )
    return found
