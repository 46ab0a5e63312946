"""vllm-ascend's `expert_map_path`: JSON with a list of layers, each a list of devices with their experts.

Layers with experts are numbered from 0. Every device must have equally many experts, none of them twice (vllm-ascend
issue 9151).
"""

import json
from pathlib import Path

from moetool.base import durable
from moetool.placement.export_slots import equal_slots
from moetool.placement.plan import PlacementPlan

SUFFIXES = (".json",)


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a plan; return how to start vllm-ascend with it. Its layers are those with experts only.

    Raises:
        MismatchError: the plan does not fit this format.
    """
    slots_LGS = equal_slots(plan, "vllm-ascend")
    layers = [
        {
            "layer_id": layer,
            "device_count": len(slots_GS),
            "device_list": [{"device_id": g, "device_expert": slots.tolist()} for g, slots in enumerate(slots_GS)],
        }
        for layer, slots_GS in enumerate(slots_LGS)
    ]
    durable.write_text(out, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n")
    redundant = slots_LGS.shape[1] * slots_LGS.shape[2] - plan.spec.num_experts
    config = {"eplb_config": {"expert_map_path": str(out), "num_redundant_experts": redundant}}
    return [f"--additional-config '{json.dumps(config)}'", "checked by the loader of vllm-ascend 0.23.0.post1"]
