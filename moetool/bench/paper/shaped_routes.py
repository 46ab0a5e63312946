"""Routes in the shape of a model with fewer experts a layer."""

from dataclasses import replace

import numpy as np

from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import Workbench
from moetool.costing.machines import read_named_model
from moetool.trace.reader import Trace
from moetool.trace.writer import TraceWriter


def shaped(bench: Workbench, trace: Trace, model: str) -> Trace:
    """Return the routes as of a model with fewer experts a layer: each layer becomes several, of consecutive experts.

    In each of them a token goes to the top-k experts with its highest scores there.

    Args:
        model: name in `recipes/models`; empty: the trace itself.

    Effects: writes a trace into the scratch folder.

    Raises:
        CannotTestError: the trace's layers do not divide into the model's.
        MismatchError: the trace has no logits.
    """
    if not model:
        return trace
    named, spec = read_named_model(model), trace.spec
    trace.require(["logits"], f"routes of {named.name}'s shape")
    if set(spec.num_experts_L) != {spec.num_experts} or spec.num_experts % named.experts:
        raise CannotTestError(
            f"layers of {spec.num_experts} experts do not divide into {named.name}'s of {named.experts}"
        )
    layers = spec.num_layers * spec.num_experts // named.experts
    new = replace(
        spec,
        name=f"{spec.name} in {named.name}'s shape",
        revision=f"{spec.revision} {model}",
        layer_ids_L=tuple(range(layers)),
        num_experts_L=(named.experts,) * layers,
        top_k_L=(named.top_k,) * layers,
        has_logits_L=(False,) * layers,
        expert_bytes_L=(spec.expert_bytes_L[0],) * layers,
    )

    def make() -> Trace:
        out = bench.folder("shaped")
        out.mkdir()
        with TraceWriter(out, new, ["topk"], weights=False) as writer:
            for row in trace.requests.to_pylist():
                writer.add_request(**{name: value for name, value in row.items() if name != "tokens"})
            for batch in trace.batches(["logits"]):
                assert batch.logits_TF is not None
                scores_TLE = batch.logits_TF.reshape(len(batch), layers, named.experts)
                experts_TLK = np.argsort(-scores_TLE, axis=2, kind="stable")[:, :, : named.top_k]
                experts_TS = experts_TLK.reshape(len(batch), -1).astype(np.uint16)
                writer.append(replace(batch, experts_TS=experts_TS, weights_TS=None, logits_TF=None))
            writer.finish(composition=trace.manifest["composition"], provenance={"shape_of": trace.sha256})
        return Trace(out)

    return bench.once(f"shaped {trace.path} {model}", make)
