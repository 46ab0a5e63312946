"""Relations between the fields of a model's config that its family's code relies on.

transformers checks some of them when it reads a config; this table holds the others. Where one is broken, the code
fails at the first forward at best. Groups that do not divide the experts mix the scores of different tokens.

A relation applies to a family whose config class declares its fields: code reads these fields, and ignores others that
a config.json may hold.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moetool.base.errors import MismatchError, shortened

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "ffn_config.moe_num_experts")
"""Names of the number of routed experts; a point leads into a nested config."""
TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_top_k", "moe_k"),
    *("moe_topk", "ffn_config.moe_top_k"),
)
"""Names of the number of experts that a token uses."""
_NAMES = {
    "experts": EXPERTS,
    "top_k": TOP_K,
    "kv_heads": ("num_key_value_heads", "attn_config.kv_n_heads"),
    "layers": ("num_hidden_layers",),
    "prediction_layers": ("num_nextn_predict_layers", "num_mtp_layers"),
    "window": ("sliding_window",),
}
"""Quantities that families name differently."""
_DEFAULTS = {"prediction_layers": 0, **dict.fromkeys(("sliding_window", "n_group", "topk_group"))}
"""Values of fields that may be missing or null; None breaks the relation."""
_OWN_KEYS = ("deepseek_v4", "hy_v4", "jetmoe")
"""Families that ignore the number of key-value heads."""
_HEADS_BY_LAYER = ("inkling_text", "inkling2_text", "laguna")
"""Families whose layers differ in their heads."""
_GROUPS_OPTIONAL = ("axk2",)
"""Families that route without groups if their number is null."""

Condition = Callable[[Any], bool]


class Relation(NamedTuple):
    """A condition on the values of some fields.

    Attributes:
        fields: fields or quantities; an error names the first one as wrong.
        holds: the condition; takes their values.
        expected: what the first one should be; `{1}` stands for value and name of the second, and so on.
        applies: the configs whose code needs it.
    """

    fields: tuple[str, ...]
    holds: Callable[..., bool]
    expected: str
    applies: Condition = lambda config: True


def _family(*names: str) -> Condition:
    return lambda config: config.model_type in names


def _with_layers(kind: str) -> Condition:
    return lambda config: kind in (getattr(config, "layer_types", None) or ())


def _all(*conditions: Condition) -> Condition:
    return lambda config: all(condition(config) for condition in conditions)


def _routes_by_groups(config: Any) -> bool:
    if not _declares(config, "n_group") or (config.model_type in _GROUPS_OPTIONAL and config.n_group is None):
        return False
    return not _declares(config, "topk_method") or config.topk_method == "group_limited_greedy"


def _has_latents(config: Any) -> bool:
    """Whether keys and values of all heads are made from one latent."""
    return _declares(config, "kv_lora_rank") and config.model_type not in _OWN_KEYS


def _shares_keys(config: Any) -> bool:
    """Whether query heads share key-value heads, equally in all layers."""
    return not _has_latents(config) and config.model_type not in (*_OWN_KEYS, *_HEADS_BY_LAYER)


def _divides(whole: int, part: int) -> bool:
    return part >= 1 and whole % part == 0


def _layers_of(value: Any) -> list[Any]:
    """The values of a field that may be one for all layers."""
    return list(value) if isinstance(value, list | tuple) else [value]


RELATIONS = (
    # Experts per token. Routers with identity experts may also choose those.
    Relation(("experts", "zero_expert_num"), lambda e, zero: e >= 1, "1 or more"),
    Relation(("top_k", "experts", "zero_expert_num"), lambda k, e, zero: 1 <= k <= e + zero, "1 to {1} plus {2}"),
    Relation(
        ("top_k", "experts"),
        lambda k, e: min(_layers_of(k)) >= 1 and max(_layers_of(k)) <= min(_layers_of(e)),
        "1 to {1}",
        lambda config: not _declares(config, "zero_expert_num"),
    ),
    Relation(("top_k",), lambda k: k == 2, "2, which its router always chooses", _family("phimoe")),
    # Groups of experts.
    Relation(
        ("topk_method",), lambda name: name in ("greedy", "group_limited_greedy"), "greedy or group_limited_greedy"
    ),
    Relation(("n_group",), lambda groups: groups >= 1, "1 or more", _routes_by_groups),
    Relation(("experts", "n_group"), _divides, "a multiple of {1}", _routes_by_groups),
    Relation(
        ("experts", "n_group"),
        lambda e, groups: e >= 2 * groups,
        "at least twice {1}, since the two best experts of a group make its score",
        lambda config: _routes_by_groups(config) and not _declares(config, "topk_method"),
    ),
    Relation(("topk_group", "n_group"), lambda chosen, groups: 1 <= chosen <= groups, "1 to {1}", _routes_by_groups),
    Relation(
        ("top_k", "experts", "n_group", "topk_group"),
        lambda k, e, groups, chosen: k <= e // groups * chosen,
        "at most the experts of the chosen groups, by {1}, {2} and {3}",
        _routes_by_groups,
    ),
    # Attention heads.
    Relation(("kv_heads",), lambda kv: kv >= 1, "1 or more", lambda config: config.model_type not in _OWN_KEYS),
    Relation(("num_attention_heads", "kv_heads"), _divides, "a multiple of {1}", _shares_keys),
    Relation(("kv_heads", "num_attention_heads"), lambda kv, n: n // kv <= 1, "{1}", _has_latents),
    Relation(
        ("num_attention_heads_per_layer", "kv_heads"),
        lambda heads, kv: all(_divides(n, kv) for n in heads),
        "multiples of {1}",
        _family("laguna"),
    ),
    Relation(
        ("num_attention_heads", "kv_heads"),
        lambda n, kv: _divides(n, 2 * kv),
        "a multiple of twice {1}, for its sliding layers",
        _all(_family("mimo_v2_flash"), _with_layers("sliding_attention")),
    ),
    Relation(
        ("num_attention_heads", "kv_heads"),
        _divides,
        "a multiple of {1}",
        _all(_family("inkling_text", "inkling2_text"), _with_layers("hybrid")),
    ),
    Relation(
        ("swa_num_attention_heads", "swa_num_key_value_heads"),
        _divides,
        "a multiple of {1}",
        _with_layers("hybrid_sliding"),
    ),
    Relation(("linear_num_value_heads", "linear_num_key_heads"), _divides, "a multiple of {1}"),
    Relation(("kv_lora_rank",), lambda rank: rank >= 1, "1 or more", _has_latents),
    *(
        Relation((name,), lambda size: size >= 1, "1 or more")
        for name in ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads")
    ),
    Relation(("mamba_n_heads", "mamba_n_groups"), _divides, "a multiple of {1}"),
    Relation(("mamba_num_heads", "n_groups"), _divides, "a multiple of {1}"),
    # Widths of heads.
    Relation(("hidden_size", "num_attention_heads"), _divides, "a multiple of {1}", _family("dbrx", "olmoe")),
    Relation(
        ("num_attention_heads", "head_dim", "o_groups"),
        lambda n, width, groups: _divides(n * width, groups),
        "with {1} a multiple of {2}",
    ),
    Relation(
        ("qk_rope_head_dim",),
        lambda width: width % 2 == 0,
        "an even number",
        _family("axk1", "deepseek_v3", "longcat_flash"),
    ),
    Relation(("head_dim",), lambda width: width % 2 == 0, "an even number", _family("gpt_oss")),
    Relation(("qk_nope_head_dim",), lambda width: width % 2 == 0, "an even number", _family("deepseek_v2")),
    # Layers.
    *(
        Relation(
            (name, "layers", "prediction_layers"),
            lambda items, n, more: not isinstance(items, list) or len(items) in (n, n + more),
            "a list with an item for each layer, of {1}",
        )
        for name in ("mlp_layer_types", "indexer_types", "layer_rope_theta", "moe_topk", "num_experts")
    ),
    *(
        Relation((name, "layers"), lambda items, n: all(0 <= i < n for i in items), "numbers from 0 on, below {1}")
        for name in ("mlp_only_layers", "moe_layers")
    ),
    *(
        Relation(
            (name, "layers"),
            lambda first, n: first < n,
            "less than {1}, or no layer has experts",
            lambda config: not _declares(config, "mlp_layer_types"),  # which decides where a family has both
        )
        for name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    ),
    Relation(("moe_layer_end_index", "moe_layer_start_index"), lambda last, first: last >= first, "{1} or more"),
    *(
        Relation((name, "layers"), lambda step, n: 1 <= step <= n, "1 to {1}, or no layer has experts")
        for name in ("decoder_sparse_step", "moe_layer_interval")
    ),
    *(
        Relation(
            ("sliding_window",),
            lambda width: width >= 1,
            f"1 or more, since layer_types has {kind}",
            _with_layers(kind),
        )
        for kind in ("sliding_attention", "hybrid_sliding")
    ),
    Relation(("window",), lambda width: width >= 1, "1 or more, or null", _family("deepseek_v4", "mixtral", "phimoe")),
)
"""All relations, in the order in which they are checked."""


def require_relations(config: Any, raw: dict[str, Any], file: Path) -> None:
    """Refuse a text config that breaks a relation.

    Args:
        raw: the content of its file, by which fields are named.

    Raises:
        MismatchError: with the file, the field, the value found and the value expected.
    """
    names = {*raw, *(name for part in raw.values() if isinstance(part, dict) for name in part)}
    for relation in RELATIONS:
        if not relation.applies(config):
            continue
        found = [_find(config, field, names) for field in relation.fields]
        if any(entry is None for entry in found):
            continue
        entries = [entry for entry in found if entry is not None]
        try:
            holds = relation.holds(*(value for _, value in entries))
        except (TypeError, ValueError):  # such as an item that is no number
            holds = False
        if not holds:
            name, value = entries[0]
            expected = relation.expected.format(*(f"{shortened(value)} ({name})" for name, value in entries))
            raise MismatchError(
                f"{file}: {name}: found {shortened(repr(value))}, expected {expected}; correct it, or download the "
                "model again"
            )


def _find(config: Any, field: str, names: set[str]) -> tuple[str, Any] | None:
    """A field's name in the file and its value; None if the family does not read it or it is null."""
    for name in _NAMES.get(field, (field,)):
        if field not in _DEFAULTS and not _declares(config, name):
            continue
        value = config
        try:
            for part in name.split("."):
                value = getattr(value, part, None)
        except Exception:  # transformers refuses a value that differs by layer
            continue
        if value is not None:
            return _name_in_file(config, name, names), value
    return (_NAMES.get(field, (field,))[0], _DEFAULTS[field]) if field in _DEFAULTS else None


def _declares(config: Any, name: str) -> bool:
    """Whether a family's config class has a field, by this or another name."""
    fields = {field.name for field in dataclasses.fields(config)}
    return name.split(".")[0] in fields or name in config.attribute_map


def _name_in_file(config: Any, name: str, names: set[str]) -> str:
    """Name of a field in a config.json, which may use another one for it."""
    own = config.attribute_map.get(name, name)
    others = (other for other, target in config.attribute_map.items() if target in (own, name))
    return next((found for found in (name, own, *others) if found in names), own)
