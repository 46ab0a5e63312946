"""vLLM's placement: refused, since no release reads one.

vLLM 0.33 starts from the identity map, which its EPLB rearranges; it loads neither a placement nor counts.
"""

from pathlib import Path

from moetool.base.errors import MismatchError
from moetool.placement.plan import PlacementPlan


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Raise MismatchError."""
    raise MismatchError(
        "vLLM 0.33 reads no initial expert map (open pull requests 49572, 41141 and 53022 would); start it with "
        "--enable-eplb, or export to sglang, tensorrt_llm or vllm_ascend"
    )
