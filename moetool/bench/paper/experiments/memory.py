"""Device memory under each policy, as a share of the whole model: DuoServe's Table 2."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.experiments.policies import PolicyLine
from moetool.bench.paper.workbench import Workbench
from moetool.caching.policy import parse_options, policy_class
from moetool.costing.machines import read_named_model
from moetool.training.predictor import build

WHOLE = "all experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        lines: policies by name; a predictor's bytes count with its policy's.
        model: model of `recipes/models`.
        dense_bytes: bytes of all weights but the routed experts.
    """

    lines: Mapping[str, PolicyLine]
    model: str
    dense_bytes: int


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Sum dense weights, the slots that a policy uses, and its predictor; the KV cache is the same for all.

    Nothing here varies by seed.

    Raises:
        UsageError: the model is unknown.
    """
    spec, dense = read_named_model(options.model).spec(), options.dense_bytes
    whole = dense + spec.total_experts * spec.slot_bytes
    values = {WHOLE: [1.0]}
    for name, line in options.lines.items():
        chosen = parse_options(line.policy, line.options)
        slots = policy_class(line.policy).slots_used(spec, chosen, spec.total_experts)
        held = dense + slots * spec.slot_bytes
        if line.predictor:
            held += build(line.predictor, spec, {}).num_bytes
        values[name] = [held / whole]
    return ExperimentResult(
        values=values,
        what="share of the model on the device",
        exact=True,
        unit="%",
        on=f"{spec.name}: {dense / 1e9:.3g} GB of {whole / 1e9:.3g} GB are dense weights",
    )
