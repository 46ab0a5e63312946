"""Device memory under each policy, as a share of the whole model: DuoServe's Table 2."""

from collections.abc import Mapping
from dataclasses import dataclass

from moetool.bench.found_figure import Found
from moetool.bench.paper.experiments.policies import PolicyLine
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import MODEL, Workbench
from moetool.caching._policy import parse_options, policy_class
from moetool.learning.predictor import build
from moetool.models.checkpoint import Checkpoint
from moetool.types import ModelSpec

WHOLE = "all experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that need not be available.

    Attributes:
        name: display name.
        layers, experts, top_k, hidden: MoE layers, experts per layer, experts per token, and hidden size.
        expert_bytes: bytes of one expert.
        dense_bytes: bytes of all other weights.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_bytes: int
    dense_bytes: int

    def spec(self) -> ModelSpec:
        """The spec, for policies and predictors."""
        return ModelSpec(
            name=self.name,
            revision="",
            layer_ids_L=tuple(range(self.layers)),
            num_experts_L=(self.experts,) * self.layers,
            top_k_L=(self.top_k,) * self.layers,
            has_logits_L=(True,) * self.layers,
            num_shared_experts=0,
            num_groups=1,
            hidden_size=self.hidden,
            expert_bytes_L=(self.expert_bytes,) * self.layers,
            score_function="softmax",
            renormalize=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        lines: policies by name; a predictor's bytes count with its policy's.
        model: sizes of another model than the embedded one.
    """

    lines: Mapping[str, PolicyLine]
    model: Shape | None = None


def run(bench: Workbench, options: Options) -> Found:
    """Sum dense weights, the slots that a policy uses, and its predictor; the KV cache is the same for all.

    Nothing here varies by seed.

    Raises:
        CannotTestError: only traces were given, which lack the dense weights.
    """
    if options.model is not None:
        spec, dense = options.model.spec(), options.model.dense_bytes
    elif not bench.given:
        checkpoint = Checkpoint.open(MODEL)
        spec, dense = checkpoint.spec, checkpoint.dense_bytes(checkpoint.expert_dtype)
    else:
        raise CannotTestError("dense weights are counted on the model, but only traces were given")
    whole = dense + spec.total_experts * spec.slot_bytes
    values = {WHOLE: [1.0]}
    for name, line in options.lines.items():
        chosen = parse_options(line.policy, line.options)
        slots = policy_class(line.policy).slots_used(spec, chosen, spec.total_experts)
        held = dense + slots * spec.slot_bytes
        if line.predictor:
            held += build(line.predictor, spec, {}).num_bytes
        values[name] = [held / whole]
    return Found(
        values=values,
        what="share of the model on the device",
        exact=True,
        unit="%",
        on=f"{spec.name}: {dense / 1e9:.3g} GB of {whole / 1e9:.3g} GB are dense weights",
    )
