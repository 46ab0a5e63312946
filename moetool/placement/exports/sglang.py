"""SGLang's `--init-expert-location`: JSON with `physical_to_logical_map` [num_hidden_layers][P] and no other key.

SGLang 0.5.23 raises TypeError for any other key, so the provenance goes to a sidecar. Rows are all hidden layers, those
without experts included. Every row must have every logical id, so rows of layers without experts hold the trivial map.
Rank r owns the slots from r * P/ep up to (r + 1) * P/ep; P = E + `--ep-num-redundant-experts`.
"""

import json
from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.placement.export_slots import equal_slots, write_sidecar
from moetool.placement.plan import PlacementPlan
from moetool.trace.foreign.model_facts import hidden_layers

SUFFIXES = (".json",)


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write a plan; return how to start SGLang with it.

    Raises:
        MismatchError: the plan does not fit this format.
        UsageError: `num_hidden_layers` is too small.
    """
    slots_LGS = equal_slots(plan, "SGLang")
    num_experts, num_slots = plan.spec.num_experts, slots_LGS.shape[1] * slots_LGS.shape[2]
    rows = np.tile(np.arange(num_slots) % num_experts, (hidden_layers(plan.spec, num_hidden_layers), 1))
    rows[list(plan.spec.layer_ids_L)] = slots_LGS.reshape(len(slots_LGS), -1)
    durable.write_text(out, json.dumps({"physical_to_logical_map": rows.tolist()}) + "\n")
    return [
        f"--init-expert-location {out} --ep-size {slots_LGS.shape[1]} "
        f"--ep-num-redundant-experts {num_slots - num_experts}",
        f"{write_sidecar(plan, out)} has its provenance",
        "checked by the loader of SGLang 0.5.23",
    ]
