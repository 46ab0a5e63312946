"""KTransformers' frequency table: a `.pt` file with `logical_count` [num_hidden_layers, E], like SGLang's recorder.

KTransformers keeps the experts with the highest counts of the whole table on its GPU. The export therefore writes the
counts behind a plan instead of its placement. They are read again from the plan's traces, without held-out requests;
layers without experts have zeros. A trace or counts need no plan. Deviation: the reader in `sglang-kt` was not tested.
"""

import io
from pathlib import Path

import numpy as np

from moetool import durable
from moetool.errors import MismatchError
from moetool.formats._model_facts import hidden_layers
from moetool.placement._demand import loads, numbers, planned_share
from moetool.placement._placement_plan import PlacementPlan
from moetool.trace.expert_counts import Counted, open_workload


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
    durable.write_bytes(out, _packed(count_LE))
    return [f"{out}: counts of {plan.spec.num_layers} layers x {plan.spec.num_experts} experts"]


def write_counts(counted: Counted, out: Path, num_hidden_layers: int | None = None) -> list[str]:
    """Write the sum of all passes; return notes on the additions.

    Raises:
        MismatchError: the layers differ in width.
        UsageError: `num_hidden_layers` is too small.
    """
    spec = counted.spec
    if len(set(spec.num_experts_L)) > 1:
        raise MismatchError(f"KTransformers needs one width for all layers, but {spec.name} has several")
    count_LE = np.zeros((hidden_layers(spec, num_hidden_layers), spec.num_experts))
    count_LE[list(spec.layer_ids_L)] = counted.counts_WLE.sum(axis=0)
    out.write_bytes(_packed(count_LE))
    return [f"{len(count_LE)} layers, zeros in those without experts; KTransformers keeps the highest counts of all"]


def _packed(count_LE: np.ndarray) -> bytes:
    import torch

    dtype = np.int32 if count_LE.max(initial=0) < 2**31 else np.int64
    buffer = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(count_LE.astype(dtype))}, buffer)
    return buffer.getvalue()
