"""Scores of predictors on held-out requests, with the counting predictors as baselines.

`moetool.training.tally` scores predictions by distance, phase and layer; `moetool.training.prompt_scoring` scores
predictions for whole pending requests.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moetool.base.errors import UsageError, unknown_name
from moetool.base.json_files import JsonRecord
from moetool.costing.costs import CostProfile
from moetool.prediction.unseen_requests import Part, Unseen, in_time, unseen_by_all
from moetool.trace.reader import Trace
from moetool.training.prediction_time import prompt_time, step_time
from moetool.training.predictor import Predictor, build, load_predictor
from moetool.training.prompt_scoring import PromptPrediction, judge
from moetool.training.tally import MatchScore, MatchTally
from moetool.training.tokens import Picker, read, stream

BASELINES = ("popularity", "affinity")
DISTANCES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(JsonRecord):
    """One predictor on the held-out requests of one trace.

    Attributes:
        path: folder of the predictor; for a baseline, of the predictor that it accompanies.
        baseline: source of a baseline's counts; None for others.
        unseen_task: whether the trace was given as one of an unseen task.
        requests, num_skipped, undecided: as in `moetool.prediction.unseen_requests.Unseen`.
        num_requests: number of scored requests.
        num_tokens: number of scored tokens.
        top_k: K of the model.
        parameters: number of trained parameters.
        size_bytes: parameters and buffers in memory.
        expert_bytes_share: `size_bytes` as a share of the model's routed experts.
        step_ms: median time to observe and predict all layers of one token, on the CPU, in milliseconds.
        prompt_ms: the same for a pending request: to predict it from its prompt, or else to observe it; median over
            some prompts.
        prompt_tokens: median length of those prompts.
        decode_step_ms: time of one token with every expert in memory, by the profile.
        training_s, training_tokens: its training time and number of training tokens; None for a baseline.
        training_share: share of the training tokens in their trace.
        epochs: number of training epochs; None without training.
        scores: for each distance of `DISTANCES` that the predictor supports: first over all layers and phases, then by
            phase and layer.
        prompt_prediction: predictions from prompts alone; None where unsupported, and where only the end of a request
            is scored.
    """

    predictor: str
    path: str
    baseline: str | None
    trace: str
    unseen_task: bool
    requests: str
    num_requests: int
    num_skipped: int
    undecided: int
    num_tokens: int
    top_k: int
    parameters: int
    size_bytes: int
    expert_bytes_share: float
    step_ms: float
    prompt_ms: float
    prompt_tokens: float
    decode_step_ms: float | None
    training_s: float | None
    training_tokens: int | None
    training_share: float | None
    epochs: int | None
    scores: tuple[MatchScore, ...]
    prompt_prediction: PromptPrediction | None

    def overall(self, phase: str = "all") -> dict[int, MatchScore]:
        """Return the score over all layers of a phase, by distance."""
        return {s.distance: s for s in self.scores if s.phase == phase and s.layer is None}


def evaluate(
    paths: Sequence[Path],
    trace: Path,
    unseen_task: Path | None = None,
    profile: CostProfile | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: Callable[[str, int, int], None] = lambda activity, done, total: None,
) -> list[Evaluation]:
    """Score predictors, and the counting predictors from the same training requests as baselines.

    All are scored on the same requests, which none has seen. On its training trace a predictor has not seen its test
    requests; on another trace of the model, those with new prompts. On the training trace the baselines are counted
    again; elsewhere they come from the predictor's buffers, if present.

    Args:
        unseen_task: a trace of a task that no predictor was trained on, scored in addition.
        profile: profile of this machine and the traces' model, for the shares of times.
        options: options by predictor name, instead of the trained ones.
        on_progress: called with the activity, and the tokens scored so far and in all.

    Returns:
        One evaluation per predictor, in the order of `paths`, each followed by its baselines that are not listed yet;
        then the same on `unseen_task`.

    Raises:
        UsageError: no such trace or predictor; no request of the trace is unseen by all.
        MismatchError: the trace or profile is of another model, the trace lacks a column that a predictor needs, or a
            file is damaged.
        MoetoolError: a predictor gives scores that are not finite.
    """
    predictors = [load_predictor(path, options) for path in paths]
    names = [predictor.name for predictor in predictors]
    for name in options or {}:
        if name not in names:
            raise unknown_name("predictor", name, names)
    sources = [Trace(folder) for folder in (trace, unseen_task) if folder is not None]
    for source in sources:
        if profile is not None:
            profile.check(source.spec)
        for predictor, path in zip(predictors, paths, strict=True):
            source.spec.require_same(predictor.spec, f"the trace {source.path}", f"the predictor {path}")
            source.require(predictor.needs, predictor.name)
    if unseen_task is not None:
        for predictor in predictors:
            _require_unseen(predictor, sources[1])
    evaluations: list[Evaluation] = []
    kept: dict[tuple[Any, ...], tuple[Predictor, str]] = {}
    for number, source in enumerate(sources):
        unseen = unseen_by_all([predictor.card for predictor in predictors], source)
        listed = {(predictor.name, *_made_from(predictor)) for predictor in predictors}
        for predictor, path in zip(predictors, paths, strict=True):
            scored = partial(
                _evaluate,
                path=path,
                trace=source,
                unseen=unseen,
                card=predictor.card,
                profile=profile,
                on_progress=on_progress,
            )
            evaluations.append(scored(predictor, unseen_task=number == 1))
            for name in BASELINES:
                key = (name, *_made_from(predictor))
                counted = kept.get(key) or _baseline(name, predictor, source)
                if key not in listed and counted:
                    listed.add(key)
                    kept[key] = counted
                    evaluations.append(
                        replace(
                            scored(counted[0], unseen_task=number == 1),
                            baseline=counted[1],
                            training_s=None,
                            training_tokens=None,
                            training_share=None,
                            epochs=None,
                        )
                    )
    return evaluations


def _made_from(predictor: Predictor) -> tuple[str, tuple[int, ...]]:
    """Return the trace and the requests that a predictor was trained on."""
    return predictor.card["trace"]["sha256"], tuple(predictor.card["requests"]["train"])


def _require_unseen(predictor: Predictor, trace: Trace) -> None:
    if predictor.card["trace"]["sha256"] == trace.sha256:
        raise UsageError(
            f"{trace.path} is the trace that {predictor.name} was trained on, expected one of an unseen task; "
            f"give it as --trace"
        )


def _baseline(name: str, predictor: Predictor, trace: Trace) -> tuple[Predictor, str] | None:
    """Return a counting predictor from the training data of `predictor`, and the source of its counts."""
    baseline = build(name, predictor.spec)
    if predictor.card["trace"]["sha256"] == trace.sha256:
        spans, requests = in_time(predictor.card, trace), predictor.card["requests"]["train"]
        baseline.count(read(trace, baseline.needs, requests if spans is None else spans["train"], Path()))
        return baseline.eval(), f"the same {'tokens' if spans else f'{len(requests)} training requests'}"
    state = predictor.state_dict()
    if not baseline.state_dict().keys() <= state.keys():
        return None
    baseline.load_state_dict({key: state[key] for key in baseline.state_dict()})
    return baseline.eval(), f"the buffers of {predictor.name}"


def _evaluate(
    predictor: Predictor,
    *,
    path: Path,
    trace: Trace,
    unseen: Unseen,
    card: dict[str, Any],
    profile: CostProfile | None,
    unseen_task: bool,
    on_progress: Callable[[str, int, int], None],
) -> Evaluation:
    part = unseen.part
    distances = [d for d in DISTANCES if d < predictor.num_layers and d <= predictor.reach(trace.ahead)]
    tally = MatchTally(predictor, distances)
    requests = frozenset(part)
    done, total = 0, sum(row["tokens"] for row in trace.requests.to_pylist() if row["request"] in requests)

    def passed(num_tokens: int) -> None:
        nonlocal done
        done += num_tokens
        on_progress(f"scoring {predictor.name} (tokens)", min(done, total), total)

    passed(0)
    if predictor.remembers or predictor.incremental:
        # A copy, so that online state of one trace does not leak.
        _replay(copy.deepcopy(predictor), trace, part, tally, passed)
    else:
        for tokens in stream(trace, predictor.needs, part):
            tally.add(tokens)
            passed(len(tokens))
    prompt_s, prompt_tokens = prompt_time(predictor, trace, requests)
    context = round(tally.num_tokens / len(requests))
    return Evaluation(
        predictor=predictor.name,
        path=str(path),
        baseline=None,
        trace=str(trace.path),
        unseen_task=unseen_task,
        requests=unseen.requests,
        num_requests=len(requests),
        num_skipped=unseen.num_skipped,
        undecided=unseen.undecided,
        num_tokens=tally.num_tokens,
        top_k=predictor.top_k,
        parameters=sum(parameter.numel() for parameter in predictor.parameters()),
        size_bytes=predictor.num_bytes,
        expert_bytes_share=predictor.num_bytes / trace.spec.all_experts_bytes,
        step_ms=1e3 * step_time(predictor, trace, requests),
        prompt_ms=1e3 * prompt_s,
        prompt_tokens=prompt_tokens,
        decode_step_ms=None if profile is None else 1e3 * profile.decode_s(context),
        training_s=card["seconds"],
        training_tokens=card["tokens"]["train"],
        training_share=card["tokens"]["train"] / card["trace"]["tokens"],
        epochs=card["fit"].get("epochs"),
        scores=tally.scores(),
        prompt_prediction=judge(predictor, trace, requests)
        if predictor.predicts_prompts and unseen.requests != "end"
        else None,
    )


def _replay(
    predictor: Predictor, trace: Trace, part: Part, tally: MatchTally, on_tokens: Callable[[int], None]
) -> None:
    """Score a predictor during replay, request by request and forward by forward.

    For a request split in time it also observes the earlier tokens. `on_tokens` is called with those of each forward.
    """
    columns, picker = predictor.needs - {"experts"}, Picker(part)
    for info, events in trace.forwards(sequential=True, columns=columns, requests=frozenset(part)):
        mine = torch.from_numpy(picker.mask(np.array(info.request_T)))
        phase_T = torch.tensor(info.phase_T)[mine]
        true_LTK = [torch.tensor(event.experts_TK)[mine] for event in events]
        for event in events:
            predictor.observe(event)
            for distance in tally.distances if len(phase_T) else ():
                if (layer := event.layer + distance) < predictor.num_layers:
                    scores_TE = torch.from_numpy(predictor.scores(layer))[mine]
                    tally.count(distance, layer, scores_TE, true_LTK[layer], phase_T)
        on_tokens(len(info.request_T))
