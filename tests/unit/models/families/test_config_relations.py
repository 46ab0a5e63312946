"""Fields of a config that contradict one another are refused before weights are read, in every family that needs it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from moetool.base import assets
from moetool.base.errors import MismatchError
from moetool.base.families import FAMILIES
from moetool.models.checkpoint import Checkpoint
from moetool.models.tested_formats import UNLISTED
from tests import families
from tests.command_line import exit_code
from tests.refusals import refused

KNOWN = sorted({*(name for name, family in FAMILIES.items() if not family.refused), *UNLISTED})
_GROUPS = (
    *("bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "hy_v4", "kimi_linear", "mimo_v2_flash", "nemotron_h", "solar_open"),
)
_BY_GROUP = {"topk_method": "group_limited_greedy"}


def _write(family: str, folder: Path, **changed: Any) -> Path:
    """Write the tiny config of a family with further values, unchecked."""
    folder.mkdir(exist_ok=True)
    values = families.config(family).to_dict()
    (folder / "config.json").write_text(json.dumps({**values, **changed}))
    return folder


def _refusal(family: str, folder: Path, **changed: Any) -> str:
    with pytest.raises(MismatchError) as caught:
        Checkpoint(_write(family, folder, **changed), weights=False)
    said = str(caught.value)
    assert str(folder / "config.json") in said and "\n" not in said
    return said


@pytest.mark.parametrize("family", KNOWN)
def test_the_tiny_and_the_default_config_of_a_family_are_accepted(family: str, tmp_path: Path) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    families.require_known(family)
    try:
        default = CONFIG_MAPPING[family]()
    except Exception:  # it has no default that transformers accepts
        default = None
    for config in filter(None, (default, families.config(family) if family != "dots3_note_text" else None)):
        config.save_pretrained(tmp_path)
        Checkpoint(tmp_path, weights=False)


def test_the_shapes_of_published_models_are_accepted() -> None:
    shapes = [*assets.path("recipes", "shapes").glob("*/config.json")]
    assert len(shapes) >= 2
    for file in shapes:
        Checkpoint(file.parent, weights=False)


@pytest.mark.parametrize("family", _GROUPS)
def test_groups_divide_the_experts_of_every_family_that_routes_by_them(family: str, tmp_path: Path) -> None:
    """transformers runs 24 tokens with 8 experts in 3 groups, and mixes their scores."""
    families.require_known(family)
    model = AutoModelForCausalLM.from_config(families.config(family, n_group=3, num_expert_group=3))
    model(torch.zeros(1, 24, dtype=torch.long))
    changed = {"num_expert_group" if family in ("bailing_hybrid", "kimi_linear") else "n_group": 3}
    said = _refusal(family, tmp_path, **changed)
    assert f"found 8, expected a multiple of 3 ({next(iter(changed))})" in said


@pytest.mark.parametrize(
    ("family", "changed", "field", "expected"),
    [
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "n_routed_experts: found 8", "twice 8 (n_group)"),
        ("deepseek_v3", {"n_group": 0}, "n_group: found 0", "1 or more"),
        ("deepseek_v3", {"n_group": None}, "n_group: found None", "1 or more"),
        ("dots1", {"topk_group": None}, "topk_group: found None", "1 to 2 (n_group)"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "topk_group: found 3", "1 to 2 (n_group)"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 0}, "topk_group: found 0", "1 to 2 (n_group)"),
        (
            "deepseek_v3",
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok: found 3",
            "8 (n_routed_experts), 4 (n_group) and 1 (topk_group)",
        ),
        (
            "deepseek_v3",
            {"n_group": 3, "topk_method": "noaux_tc"},
            "n_routed_experts: found 8",
            "multiple of 3 (n_group)",
        ),
        ("deepseek_v2", {**_BY_GROUP, "n_group": 3}, "n_routed_experts: found 8", "multiple of 3 (n_group)"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: found 'noaux_tc'", "greedy"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok: found 9", "1 to 8 (num_local_experts)"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok: found 1", "2, which its router always chooses"),
        ("longcat_flash", {"n_routed_experts": 0}, "n_routed_experts: found 0", "1 or more"),
        ("longcat_flash", {"moe_topk": 11}, "moe_topk: found 11", "1 to 8 (n_routed_experts) plus 2 (zero_expert_num)"),
        (
            "dbrx",
            {"ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 9}},
            "ffn_config.moe_top_k: found 9",
            "1 to 8 (ffn_config.moe_num_experts)",
        ),
        ("hunyuan_v1_moe", {"moe_topk": [2, 9, 2]}, "moe_topk: found [2, 9, 2]", "1 to 8"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 2]}, "moe_topk: found [2, 2]", "3 (num_hidden_layers)"),
        (
            "qwen3_moe",
            {"num_key_value_heads": 3},
            "num_attention_heads: found 4",
            "multiple of 3 (num_key_value_heads)",
        ),
        ("qwen3_moe", {"num_key_value_heads": 0}, "num_key_value_heads: found 0", "1 or more"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank: found 0", "1 or more"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads: found 2", "4 (num_attention_heads)"),
        ("mimo_v2_flash", {"num_key_value_heads": 4}, "num_attention_heads: found 4", "twice 4 (num_key_value_heads)"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 4]}, "num_attention_heads_per_layer: found [4, 5", "of 2"),
        ("inkling_text", {"swa_num_key_value_heads": 3}, "swa_num_attention_heads: found", "of 3"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads: found 3", "of 2 (linear_num_key_heads)"),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: found 0", "1 or more"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim: found 0", "1 or more"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_heads: found 4", "of 3 (mamba_n_groups)"),
        ("nemotron_h", {"n_groups": 3}, "mamba_num_heads: found 4", "of 3 (n_groups)"),
        ("olmoe", {"hidden_size": 42}, "hidden_size: found 42", "of 4 (num_attention_heads)"),
        ("deepseek_v4", {"o_groups": 3}, "num_attention_heads: found 4", "3 (o_groups)"),
        ("gpt_oss", {"head_dim": 3}, "head_dim: found 3", "even"),
        ("deepseek_v2", {"qk_nope_head_dim": 3}, "qk_nope_head_dim: found 3", "even"),
        ("inkling_text", {"unpadded_vocab_size": 0}, "unpadded_vocab_size: found 0", "1 to"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: found 7", "even"),
        ("hy_v3", {"mlp_layer_types": ["dense", *["sparse"] * 3]}, "mlp_layer_types: found", "3 (num_hidden_layers)"),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 2}, "indexer_types: found", "3 (num_hidden_layers)"),
        ("granitemoe_swa", {"layer_rope_theta": [1e4] * 2}, "layer_rope_theta: found", "3 (num_hidden_layers)"),
        ("qwen3_moe", {"mlp_only_layers": [7]}, "mlp_only_layers: found [7]", "3 (num_hidden_layers)"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers: found [-1]", "3 (num_hidden_layers)"),
        ("llama4_text", {"moe_layers": [1, 3]}, "moe_layers: found [1, 3]", "3 (num_hidden_layers)"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace: found 3", "3 (num_hidden_layers)"),
        ("lfm2_moe", {"num_dense_layers": 3}, "num_dense_layers: found 3", "3 (num_hidden_layers)"),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, "moe_layer_start_index: found 3", "3 (num_hidden_layers)"),
        (
            "ernie4_5_moe",
            {"moe_layer_start_index": 2, "moe_layer_end_index": 1},
            "moe_layer_end_index: found 1",
            "2 (moe_layer_start_index)",
        ),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval: found 0", "1 to 3"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: found 0", "1 to 3 (num_hidden_layers)"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: found None", "1 or more"),
        ("deepseek_v4", {"sliding_window": 0}, "sliding_window: found 0", "1 or more"),
        ("afmoe", {"layer_types": ["full_attention"] * 4}, "`num_hidden_layers` (3)", "`layer_types` (4)"),
    ],
)
def test_a_contradiction_is_named_with_both_fields(
    family: str, changed: dict[str, Any], field: str, expected: str, tmp_path: Path
) -> None:
    families.require_known(family)
    said = _refusal(family, tmp_path, **changed)
    assert field in said and expected in said.replace(field, "", 1)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 3, "topk_group": 4}),  # greedy routing ignores groups
        ("qwen3_moe", {"n_group": 3, "topk_group": 7}),  # the family has no groups
        ("deepseek_v4", {"num_key_value_heads": 3}),
        ("deepseek_v3", {"num_key_value_heads": 8}),  # each head has keys of its own, whatever this says
        ("deepseek_v32", {"first_k_dense_replace": 9}),  # mlp_layer_types decides
        ("hy_v3", {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_nextn_predict_layers": 1}),
        ("ernie4_5_moe", {"moe_layer_end_index": 9}),
        ("mixtral", {"sliding_window": None}),
        ("longcat_flash", {"moe_topk": 10}),
    ],
)
def test_a_field_that_the_code_ignores_may_say_anything(family: str, changed: dict[str, Any], tmp_path: Path) -> None:
    families.require_known(family)
    Checkpoint(_write(family, tmp_path, **changed), weights=False)
    AutoModelForCausalLM.from_config(families.config(family, **changed))(torch.zeros(1, 8, dtype=torch.long))


def test_a_nested_text_config_is_checked(tmp_path: Path) -> None:
    text = {**families.config("qwen3_5_moe_text").to_dict(), "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": text}))
    with refused(MismatchError, "num_attention_heads", "4", "3"):
        Checkpoint(tmp_path, weights=False)


@pytest.mark.parametrize("command", ["verify", "capture"])
def test_commands_refuse_before_they_read_weights(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10 experts in 4 groups, as after pruning. The folder has no weights: reading them would be another error."""
    folder = _write("deepseek_v3", tmp_path / "m", n_routed_experts=10, n_group=4, topk_group=2)
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "one"}\n')
    options = ("--data", "prompts.jsonl", "--out", "t") if command == "capture" else ()
    assert exit_code(monkeypatch, command, folder, *options) == MismatchError.exit_code == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "n_routed_experts: found 10, expected a multiple of 4 (n_group)" in said


def test_a_gguf_file_is_named_itself(tmp_path: Path) -> None:
    content = bytearray((Path(__file__).parents[3] / "golden" / "gguf" / "qwen3moe.gguf").read_bytes())
    key = b"qwen3moe.attention.head_count_kv"
    at = content.find(key) + len(key) + 4  # after the number of its type
    assert content[at - 4 : at] == (4).to_bytes(4, "little")
    content[at : at + 4] = (3).to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(content)
    with refused(MismatchError, "m.gguf", "num_attention_heads", "3"):
        Checkpoint(tmp_path / "m.gguf", weights=False)
