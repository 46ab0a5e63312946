"""Loss of text quality from substituted experts: SMoE's Table IV, with cross-entropy instead of accuracy."""

from dataclasses import dataclass

from moetool.base.tables import percent
from moetool.bench.experiment_figure import Curve, ExperimentResult
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.measuring.alpha import AlphaOptions, AlphaPoint, plan_alpha
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.runtime.budget import divide_with_slots
from moetool.runtime.serve_options import ServeOptions

_ALPHAS = (0.35, 0.6)  # besides 0
_MEMORY = 0.375  # share of the experts in memory
_TOKENS = 48  # per text
_ANY_S = 1e6  # seconds per token that every alpha meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets; their prompts and answers are the text.
    """

    data: tuple[str, ...] = ALL


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Feed texts token by token at each alpha, with other texts per seed.

    Raises:
        CannotTestError: only traces were given, and texts need the model.
    """
    if bench.given:
        raise CannotTestError("texts need the model, but only traces were given")
    checkpoint = Checkpoint.open(MODEL)
    spec = checkpoint.spec
    serve = ServeOptions(kv_tokens=2048, threads=1)
    budget = divide_with_slots(checkpoint, serve, int(_MEMORY * spec.total_experts))
    sets = [gather.load([name]) for name in options.data]
    texts = [f"{p.text} {p.answer or ''}" for several in zip(*sets, strict=False) for p in several]
    chosen = AlphaOptions(alphas=_ALPHAS, tokens=_TOKENS, texts=bench.sizes.texts, rounds=1)
    values: dict[str, list[float]] = {}
    curves: dict[str, list[Curve]] = {}
    for seed in bench.seeds:
        mine = texts[seed :: len(bench.seeds)]
        points: list[AlphaPoint] = []
        plan_alpha(checkpoint, mine, budget, _ANY_S, serve=serve, options=chosen, on_points=points.extend)
        for point in points:
            values.setdefault(f"alpha {point.alpha:g}", []).append(point.nats)
        alphas = tuple(point.alpha for point in points)
        curves.setdefault("mean of the texts", []).append((alphas, tuple(point.nats for point in points)))
    return ExperimentResult(
        values=values,
        what="cross-entropy per token",
        unit="nats",
        on=f"{MODEL} live, {bench.sizes.texts} texts of {_TOKENS} tokens, {percent(_MEMORY, 'g')} of experts",
        traces=len(bench.seeds),
        curves=curves,
        axes=("alpha", "cross-entropy per token, nats"),
    )
