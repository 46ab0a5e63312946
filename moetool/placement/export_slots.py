"""Common parts of placement exporters: equal slots, distinct experts per rank, a sidecar."""

import json
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.errors import MismatchError
from moetool.placement.plan import PlacementPlan


def equal_slots(plan: PlacementPlan, format: str) -> np.ndarray:
    """Return the experts of a plan as [L, G, S], with S slots of each layer on every GPU; GPUs are ranks in order.

    Raises:
        MismatchError: the plan has unequal slots, or layers of different width, which the format cannot hold.
    """
    plan.validate()
    if len(set(plan.spec.num_experts_L)) > 1:
        raise MismatchError(f"{format} needs one number of experts for all layers, but {plan.spec.name} has several")
    first = len(plan.experts_LG[0][0])
    for layer, gpus in enumerate(plan.experts_LG):
        for g, experts in enumerate(gpus):
            if len(set(experts)) != first:
                raise MismatchError(
                    f"{format} needs equal slots on every rank in every layer, but this plan has {first} on GPU 0 in "
                    f"MoE layer 0 and {len(experts)} on GPU {g} in layer {layer}; plan with uniform, eplb or director "
                    f"on equal GPUs whose memory holds a multiple of {plan.spec.num_layers} experts"
                )
    return np.array(plan.experts_LG, np.int64)


def write_sidecar(plan: PlacementPlan, out: Path) -> Path:
    """Write the provenance of a plan for formats that cannot hold it."""
    path = out.with_name(out.name + ".about.json")
    about = {
        "spec": plan.spec.to_json(),
        "planner": plan.planner,
        "options": plan.options,
        "seed": plan.seed,
        "traces": [trace.sha256 for trace in plan.traces],
    }
    durable.write_text(path, json.dumps(about, indent=1) + "\n")
    return path
