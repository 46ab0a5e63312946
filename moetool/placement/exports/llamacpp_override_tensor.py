"""llama.cpp's `--override-tensor` (`-ot`): the layers whose experts stay in host memory.

llama.cpp stacks the experts of a layer in one tensor each for gate, up and down, so `-ot` moves whole layers and never
single experts. Every layer computes equally many experts per token, so only the number of layers on the device matters.
Forks with an expert cache keep the hottest experts of every layer instead (`llamacpp_moe_profile`).
"""

from pathlib import Path

from moetool.base.errors import CapacityError
from moetool.caching.plan import CachePlan


def write_cache_plan(plan: CachePlan, out: Path) -> list[str]:
    """Write the option for the first layers that fit into the plan's budget; return how to use it.

    Raises:
        CapacityError: no whole layer fits.
    """
    spec, left = plan.spec, plan.budget_bytes
    resident = []
    for layer, num, size in zip(spec.layer_ids_L, spec.num_experts_L, spec.expert_bytes_L, strict=True):
        if num * size > left:
            break
        resident.append(layer)
        left -= num * size
    first = spec.num_experts_L[0] * spec.expert_bytes_L[0]
    if not resident:
        raise CapacityError(
            f"{plan.budget_bytes:,} bytes hold no whole layer of {spec.name} ({first:,} bytes), but -ot moves whole "
            f"layers; use a fork with an expert cache: moetool trace export TRACE --format llamacpp_moe_profile"
        )
    host = [layer for layer in spec.layer_ids_L if layer not in resident]
    pattern = f"blk\\.({'|'.join(map(str, host))})\\.ffn_.*_exps\\.=CPU" if host else ""
    out.write_text(f"-ngl 99 -ot '{pattern}'\n" if host else "-ngl 99\n", encoding="ascii")
    return [
        f"experts of {len(resident)} of {spec.num_layers} layers on the GPU, those of the others in host memory",
        "-ot moves whole layers, so the use of single experts does not matter",
    ]
