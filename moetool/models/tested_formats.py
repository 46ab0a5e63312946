"""Weight formats tested with each family, against the format's own library or writer."""

from moetool.models.families import FAMILIES, INFERRED, WITHIN_OTHERS
from moetool.models.gguf_architectures import ARCHITECTURES

FORMATS = ("dense", "fp8_block", "fp8_scaled", "mxfp4", "nvfp4", "gptq", "awq", "int4", "gguf")

_QUANTIZED = {
    "deepseek_v3": ("fp8_block", "awq", "int4"),
    "deepseek_v32": ("fp8_block",),
    "glm4_moe": ("fp8_scaled", "awq", "int4"),
    "glm_moe_dsa": ("fp8_block",),
    "gpt_oss": ("mxfp4",),
    "mimo_v2_flash": ("fp8_block",),
    "minimax_m2": ("fp8_block", "awq"),
    "mixtral": ("gptq", "awq"),
    "qwen3_moe": ("fp8_block", "fp8_scaled", "mxfp4", "nvfp4", "gptq", "awq", "int4"),
    "qwen3_5_moe_text": ("fp8_block",),
    "qwen3_next": ("fp8_block", "int4"),
}
_GGUF = {"deepseek_v2", "glm4_moe_lite", *(architecture.family for architecture in ARCHITECTURES.values())}
"""The first two also have the architecture `deepseek2`."""
INFERRED_AND_RUN = (
    *("aria_text", "granitemoe_swa", "hy_v4", "inkling_text", "kolibri1", "minimax_m3_vl_text", "qwen4_exp_text"),
)
"""Inferred families with tested logits."""
WITHIN_AND_RUN = ("glm4v_moe_text", "glm5_next_text", "mistral4", "mistral_large4_text", "qwen3_vl_moe_text")
"""The same for families within multimodal models."""
UNLISTED = tuple(sorted({*INFERRED, *INFERRED_AND_RUN, *WITHIN_OTHERS} - {*FAMILIES}))
"""Inferred families that are known to work."""


def format_table() -> dict[str, dict[str, bool]]:
    """Tested pairs of family and weight format."""
    table = {}
    for name in sorted({*FAMILIES, *UNLISTED}):
        family = FAMILIES.get(name)
        runs = name in (*INFERRED_AND_RUN, *WITHIN_AND_RUN) if family is None or family.inferred else not family.refused
        tested = {*_QUANTIZED.get(name, ()), *(["dense"] if runs else []), *(["gguf"] if name in _GGUF else [])}
        table[name] = {format: format in tested for format in FORMATS}
    return table
