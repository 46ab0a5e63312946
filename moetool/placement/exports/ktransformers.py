"""KTransformers' frequency table: a `.pt` file with `logical_count` [num_hidden_layers, E], like SGLang's recorder.

The format (`moetool.trace.formats.ktransformers`) holds counts, so the export writes the counts behind a plan instead
of its placement. They are read again from the plan's traces, without held-out requests; layers without experts have
zeros. A trace or counts need no plan.
"""

from pathlib import Path

import numpy as np

from moetool.base import durable
from moetool.base.errors import MismatchError
from moetool.placement.demand import loads, numbers, planned_share
from moetool.placement.plan import PlacementPlan
from moetool.trace.expert_counts import open_workload
from moetool.trace.foreign.model_facts import hidden_layers
from moetool.trace.formats.ktransformers import table

SUFFIXES = (".pt",)


def write_plan(plan: PlacementPlan, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write the counts behind a plan; return notes on them.

    Raises:
        MismatchError: a trace of the plan has changed, the plan names no trace, its requests are unknown, or its layers
            differ in width.
        UsageError: a trace is missing, or `num_hidden_layers` is too small.
    """
    if not plan.traces:
        raise MismatchError("KTransformers takes counts, but this plan names no trace to count; plan from a trace")
    if len(set(plan.spec.num_experts_L)) > 1:
        raise MismatchError(f"KTransformers needs one width for all layers, but {plan.spec.name} has several")
    count_LE = np.zeros((hidden_layers(plan.spec, num_hidden_layers), plan.spec.num_experts))
    for reference in plan.traces:
        trace = open_workload(Path(reference.path))
        if trace.sha256 != reference.sha256:
            raise MismatchError(f"{reference.path} is not the trace that the plan was made from; plan again")
        uses = planned_share(plan.split, {reference.server: trace})
        requests = numbers(trace)
        planned = [request for place, request in enumerate(requests) if uses(reference.server, place)]
        if len(planned) != reference.requests:
            raise MismatchError(
                f"the plan was made from {reference.requests} of the {len(requests)} requests of {reference.path} and "
                f"does not say which; plan again"
            )
        for _, tokens_LE in loads(trace, frozenset(planned)):
            count_LE[list(plan.spec.layer_ids_L)] += tokens_LE
    durable.write_bytes(out, table(count_LE))
    return [
        f"{out}: counts of {plan.spec.num_layers} layers x {plan.spec.num_experts} experts",
        "checked against the source of KTransformers; not loaded by the engine",
    ]
