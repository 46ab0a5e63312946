"""What a server holds on the device under each policy, as a share of the whole model: DuoServe's Table 2."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetool.bench.paper.experiments.policies import Line
from moetool.bench.paper.stage import MODEL, Stage
from moetool.bench.paper.verdict import CannotTestError, Found
from moetool.models.spec import checkpoint_dtype, dense_bytes, locate, read_spec
from moetool.policy import parse_options, policy_class
from moetool.predictor import build

WHOLE = "all experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is counted.

    Attributes:
        lines: policies by name; a predictor's bytes count with its policy's.
    """

    lines: Mapping[str, Line]


def run(stage: Stage, options: Options) -> Found:
    """Dense weights, the slots that a policy makes use of, and its predictor; keys and values are the same for all.

    Nothing here varies by seed.

    Raises:
        CannotTestError: traces were given, which do not tell the dense weights.
    """
    if stage.given:
        raise CannotTestError("dense weights are counted on the model itself, and only traces of one were given")
    path = locate(MODEL)
    spec = read_spec(path)
    dense = dense_bytes(path, checkpoint_dtype(path))
    whole = dense + spec.total_experts * spec.slot_bytes
    values = {WHOLE: [1.0]}
    for name, line in options.lines.items():
        chosen = parse_options(line.policy, line.options)
        slots = policy_class(line.policy).slots_used(spec, chosen, spec.total_experts)
        held = dense + slots * spec.slot_bytes
        if line.predictor:
            held += build(line.predictor, spec, line.predictor_options).num_bytes
        values[name] = [held / whole]
    return Found(values=values, unit="%", on=f"{MODEL}: {dense / 1e6:.1f} MB of {whole / 1e6:.1f} MB are dense weights")
