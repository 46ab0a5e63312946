"""On-demand loads by router score, top or low: SMoE's Table I, Figures 15 and 17."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moetool.base.tables import percent
from moetool.base.types import ForwardInfo, GateEvent
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.experiments.policies import PolicyLine, look_through, measure
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.caching.residency import Step, StepKind
from moetool.trace.reader import Trace
from moetool.tuning.replay import ReplaySetup, decisions

LINKS = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment; only decode counts, one request at a time.

    Attributes:
        data: prompt sets, mixed; a given trace replaces them.
        memory: expert memory, as a share of all experts; per layer for a policy with a partial forward.
        alpha: a chosen expert is low-score below (1 + alpha) times the (k+1)-th highest score.
        measure: `loads`, the shares of low-score and top-score choices that were neither resident nor substituted;
            `time`, each kind's load time per token on the assumed machine, and compute time; `ahead`, the shares of
            prefetched experts with a top score and of those chosen.
    """

    data: tuple[str, ...] = ALL
    lines: Mapping[str, PolicyLine]
    memory: float = 0.375
    alpha: float = 0.3
    measure: Literal["loads", "time", "ahead"] = "loads"


_WHAT = {
    "loads": "share of the router's choices that were loaded",
    "time": "share of the time per output token",
    "ahead": "share of the prefetched experts",
}


@dataclass(slots=True, kw_only=True)
class _Count:
    """Counts over decode, of low-score (0) and top-score (1) choices.

    Attributes:
        chosen, loaded: by kind.
        ahead, ahead_top, ahead_chosen: prefetched experts, and those among them.
    """

    chosen: list[int] = field(default_factory=lambda: [0, 0])
    loaded: list[int] = field(default_factory=lambda: [0, 0])
    ahead: int = 0
    ahead_top: int = 0
    ahead_chosen: int = 0


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Count under every policy, with another part of the prompts per seed.

    Source: SMoE § IV for low scores; Table I's "low-score loading" is on-demand loading of those.
    """
    samples = Samples(bench)
    resident = options.memory if look_through(options.lines) else 0.0
    for fold in bench.folds:
        trace = samples.use(bench.trace(options.data, fold=fold, resident=resident))
        for name, line in options.lines.items():
            counts = _count(bench, trace, line, options, fold)
            for label, value in _values(bench, trace, line, options, counts, fold).items():
                samples.add(f"{name}, {label}" if len(options.lines) > 1 else label, value)
    on = f"decode, replayed, {percent(options.memory, 'g')} of the experts"
    return samples.found(_WHAT[options.measure], "%", on)


def _count(bench: Workbench, trace: Trace, line: PolicyLine, options: Options, fold: int) -> _Count:
    """Iterate over a replay's decisions with their events."""
    trace.require({"logits"}, "telling low scores from top scores")
    history, later = bench.history(trace)
    predictor = bench.predictor(line.predictor, history, seed=fold) if line.predictor else None
    budget = int(options.memory * trace.spec.total_experts) * trace.spec.slot_bytes
    steps: dict[tuple[int, int], list[Step]] = {}
    served = later | frozenset(history.requests["request"].to_pylist())
    setup = ReplaySetup(options={line.policy: line.options}, requests=served, predictor=predictor, sequential=True)
    for forward, layer, step in decisions(trace, line.policy, budget, setup):
        if step.kind is not StepKind.COMPUTE:
            steps.setdefault((forward, layer), []).append(step)
    counts = _Count()
    for info, kinds in _decoded(trace, served, options.alpha):
        if info.request_T[0] not in later:
            continue
        for layer, kind_of in enumerate(kinds):
            for top in kind_of.values():
                counts.chosen[top] += 1
            for kind, key, _, _ in steps.get((info.forward_id, layer), ()):
                target, expert = trace.spec.expert_of(key)
                if kind is StepKind.PREFETCH:
                    counts.ahead += 1
                    counts.ahead_chosen += expert in kinds[target]
                    counts.ahead_top += kinds[target].get(expert, False)
                elif expert in kind_of:
                    counts.loaded[kind_of[expert]] += 1
    if not sum(counts.chosen):
        raise CannotTestError(f"{trace.path} has no new tokens in the measured requests")
    return counts


def _decoded(
    trace: Trace, requests: frozenset[int], alpha: float
) -> Iterator[tuple[ForwardInfo, list[dict[int, bool]]]]:
    """Chosen experts of each decode forward and layer, and whether each score is a top one."""
    for info, events in trace.forwards(sequential=True, columns={"logits"}, requests=requests):
        if not info.prefill:
            yield info, [_kinds(event, alpha) for event in events]


def _kinds(event: GateEvent, alpha: float) -> dict[int, bool]:
    assert event.scores_TE is not None, "logits are recorded"
    (scores_E,), (chosen,) = event.scores_TE, event.experts_TK
    following = float(sorted(scores_E.tolist(), reverse=True)[len(chosen)])
    return {expert: float(scores_E[expert]) >= (1 + alpha) * following for expert in chosen}


def _values(
    bench: Workbench, trace: Trace, line: PolicyLine, options: Options, counts: _Count, fold: int
) -> dict[str, float]:
    if options.measure == "ahead":
        if not counts.ahead:
            raise CannotTestError(f"{line.policy} prefetched nothing on {trace.path}")
        return {"top-score": counts.ahead_top / counts.ahead, "chosen": counts.ahead_chosen / counts.ahead}
    if options.measure == "loads":
        return {
            kind: loaded / max(1, chosen)
            for kind, loaded, chosen in zip(("low-score", "top-score"), counts.loaded, counts.chosen, strict=True)
        }
    measured = measure(bench, trace, line, options.memory, 1, fold)
    low_s, top_s = (loaded * bench.machine.load_s for loaded in counts.loaded)
    compute_s = measured.compute_s
    whole = low_s + top_s + compute_s
    return {"low-score loading": low_s / whole, "top-score loading": top_s / whole, "computing": compute_s / whole}
