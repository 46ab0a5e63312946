"""Weight formats tested with each family, against the format's own library or writer."""

from moetool.base.families import FAMILIES, INFERRED, WITHIN_OTHERS
from moetool.models.gguf.architectures import ARCHITECTURES

FORMATS = ("dense", "fp8_block", "fp8_scaled", "mxfp4", "nvfp4", "gptq", "awq", "int4", "gguf")

BY_EXPERT = (
    *("afmoe", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
    *("exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "hy_v3"),
    *("kimi_linear", "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "mixtral"),
    *("olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open"),
)
"""Families whose files hold one tensor per expert and matrix."""
BY_EXPERT_FORMATS = ("fp8_block", "fp8_scaled", "nvfp4", "gptq", "awq", "int4")
"""The formats that all of them are tested with."""
RELEASED = ("deepseek_v4", "minimax_m3_vl_text", "mistral_large4_text", "step3p5")
"""Further families tested in the layout of their release, with experts in FP8 (DeepSeek V4's in 4 bits beside it)."""
NVFP4_RELEASED = ("nemotron_h",)
"""Further families tested in NVFP4 as ModelOpt releases them."""
_MXFP4 = ("gpt_oss", "qwen3_moe")
_GGUF = {"deepseek_v2", "glm4_moe_lite", *(architecture.family for architecture in ARCHITECTURES.values())}
"""The first two also have the architecture `deepseek2`."""
INFERRED_AND_RUN = (
    *("aria_text", "granitemoe_swa", "hy_v4", "inkling_text", "kolibri1", "minimax_m3_vl_text", "qwen4_exp_text"),
)
"""Inferred families with tested logits."""
WITHIN_AND_RUN = (
    *("glm4v_moe_text", "glm5_next_text", "mistral4", "mistral_large4_text", "qwen3_vl_moe_text", "step3p5"),
    "unlimited_ocr_text",
)
"""The same for families within multimodal models."""
UNLISTED = tuple(sorted({*INFERRED, *INFERRED_AND_RUN, *WITHIN_OTHERS} - {*FAMILIES}))
"""Inferred families that are known to work."""


def format_table() -> dict[str, dict[str, bool]]:
    """Tested pairs of family and weight format."""
    table = {}
    for name in sorted({*FAMILIES, *UNLISTED}):
        family = FAMILIES.get(name)
        runs = name in (*INFERRED_AND_RUN, *WITHIN_AND_RUN) if family is None or family.inferred else not family.refused
        tested = {
            *(BY_EXPERT_FORMATS if name in BY_EXPERT else ()),
            *(["dense"] if runs else []),
            *(["fp8_block"] if name in RELEASED else []),
            *(["nvfp4"] if name in NVFP4_RELEASED else []),
            *(["mxfp4"] if name in _MXFP4 else []),
            *(["gguf"] if name in _GGUF else []),
        }
        table[name] = {format: format in tested for format in FORMATS}
    return table
