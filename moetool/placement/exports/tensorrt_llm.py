"""TensorRT-LLM's `moe_config.load_balancer`: YAML with the experts of every slot by absolute layer index.

Only layers with experts are named. Rank r owns num_slots / ep_size consecutive slots. `layer_updates_per_iter: 0` keeps
the placement fixed.
"""

from pathlib import Path

from moetool.base import durable
from moetool.placement.export_slots import equal_slots
from moetool.placement.plan import PlacementPlan

SUFFIXES = (".yaml", ".yml")


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a plan; return how to start TensorRT-LLM with it. Layers are absolute: `num_hidden_layers` is not needed.

    Raises:
        MismatchError: the plan does not fit this format.
    """
    slots_LGS = equal_slots(plan, "TensorRT-LLM")
    lines = ["initial_global_assignments:"]
    for layer_id, slots_GS in zip(plan.spec.layer_ids_L, slots_LGS, strict=True):
        lines.append(f"  {layer_id}: [{', '.join(map(str, slots_GS.ravel().tolist()))}]")
    lines += [f"num_slots: {slots_LGS.shape[1] * slots_LGS.shape[2]}", "layer_updates_per_iter: 0"]
    durable.write_text(out, "\n".join(lines) + "\n")
    return [
        f"moe_config.load_balancer: {out}, with moe_expert_parallel_size {slots_LGS.shape[1]}",
        "checked against the source of TensorRT-LLM (0004396); not loaded by the engine",
    ]
