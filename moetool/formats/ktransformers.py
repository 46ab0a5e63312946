"""KTransformers' frequency table: a `.pt` file with `logical_count` [num_hidden_layers, E], like SGLang's recorder.

KTransformers keeps the experts with the highest counts of the whole table on its GPU, so what it can take from a plan
is not which GPU has which expert but the counts that the plan was made from. They are read again from the plan's
traces, without the requests that the plan held out; layers without experts have zeros. The reader is in `sglang-kt`,
and was not looked at.
"""

import io
from pathlib import Path

import numpy as np

from moetool import durable
from moetool.demand import loads, numbers, planned_share
from moetool.errors import MismatchError
from moetool.expert_counts import open_workload
from moetool.model_facts import hidden_layers
from moetool.placement_plan import PlacementPlan


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write the counts behind a plan; gives what they are.

    Raises:
        MismatchError: a trace of the plan has changed, the plan names none or does not say which requests it was made
            from, or its layers differ in width.
        UsageError: a trace is gone, or `num_hidden_layers` is too small.
    """
    if not plan.traces:
        raise MismatchError("KTransformers takes counts, and this plan names no trace to count; plan from a trace")
    if len(set(plan.spec.num_experts_L)) > 1:
        raise MismatchError(f"KTransformers has one width for all layers, but {plan.spec.name} has several")
    count_LE = np.zeros((hidden_layers(plan.spec, num_hidden_layers), plan.spec.num_experts))
    for reference in plan.traces:
        trace = open_workload(Path(reference.path))
        if trace.sha256 != reference.sha256:
            raise MismatchError(f"{reference.path} is not the trace that the plan was made from; plan again")
        uses = planned_share(plan.split)
        requests = numbers(trace)
        planned = [request for place, request in enumerate(requests) if uses(reference.server, place)]
        if len(planned) != reference.requests:
            raise MismatchError(
                f"the plan was made from {reference.requests} of the {len(requests)} requests of {reference.path} and "
                f"does not say which; plan again"
            )
        for _, tokens_LE in loads(trace, frozenset(planned)):
            count_LE[list(plan.spec.layer_ids_L)] += tokens_LE
    import torch

    buffer = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(count_LE.astype(np.int32))}, buffer)
    durable.write_bytes(out, buffer.getvalue())
    return [f"{out}: counts of {plan.spec.num_layers} layers x {plan.spec.num_experts} experts"]
