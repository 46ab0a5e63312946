"""Accuracy of predictors on held-out prompts."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, MODEL, Workbench
from moetool.models.checkpoint import Checkpoint
from moetool.prompts import gather
from moetool.trace.reader import Trace
from moetool.training.evaluate import Evaluation, evaluate
from moetool.training.tally import MatchScore

_TIMED_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorLine:
    """A predictor of the comparison.

    Attributes:
        fit: options of `moetool.training.training.train`, besides the sizes' epochs.
        data: prompt sets of this line (default: the experiment's).
    """

    predictor: str
    options: Mapping[str, Any] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets; the given trace replaces them.
        measure: `match`, the share of the k experts among the predicted k; `exact`, all k predicted; `one`, at least
            one predicted; `prompt`, the match of predictions for a prompt before it runs; `size`, bytes as a share of
            the routed experts'; `overhead`, prediction time per prompt token as a share of plain transformers' time per
            new token, both measured on one core.
        distance: layers ahead.
        phase: `prefill`, `decode` or `all`.
    """

    data: tuple[str, ...] = ALL
    lines: Mapping[str, PredictorLine]
    measure: Literal["match", "exact", "one", "prompt", "size", "overhead"] = "match"
    distance: int = 1
    phase: Literal["prefill", "decode", "all"] = "all"


_WHAT = {
    "match": "share of a layer's experts among the predicted k",
    "exact": "share of (token, layer) pairs with all k experts predicted",
    "one": "share of (token, layer) pairs with one or more experts predicted",
    "prompt": "share of a layer's experts predicted before the prompt ran",
    "size": "size of the predictor, relative to the routed experts",
    "overhead": "prediction time, relative to the time per new token",
}


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Train each predictor on all parts of the prompts but one, and score it on this part, another one per seed.

    With a given trace, or one seed, training and held-out requests are of one trace.
    """
    samples = Samples(bench)
    for name, one in options.lines.items():
        data = one.data or options.data
        for seed in bench.seeds:
            trace, learned = bench.trace(data, fold=seed), bench.others(data, seed)
            found = _evaluated(bench, learned or trace, samples.use(trace), one, seed)
            if options.measure == "overhead":
                samples.add(name, found.prompt_ms / found.prompt_tokens / _token_ms(bench))
            else:
                samples.add(name, _value(found, options))
    return samples.found(_WHAT[options.measure], "%", "scored on held-out prompts", exact=options.measure == "size")


def _evaluated(bench: Workbench, learned: Trace, trace: Trace, line: PredictorLine, seed: int) -> Evaluation:
    """Evaluate a trained predictor; the same predictor returns the same object."""
    folder = bench.trained(line.predictor, learned, seed=seed, options=line.options, **line.fit)
    return bench.once(f"evaluated {folder} {trace.path}", lambda: evaluate([folder], trace.path)[0])


def _token_ms(bench: Workbench) -> float:
    """Median milliseconds of a new token of the embedded model under plain transformers, on one core."""

    def measure() -> float:
        checkpoint = Checkpoint.open(MODEL)
        texts = gather.load(["encyclopedia"])[: bench.sizes.texts]
        settings = {
            "threads": 1,
            "dtype": "float32",
            "new_tokens": _TIMED_TOKENS,
            "prompts": [text.token_ids(checkpoint.tokenizer, checkpoint.vocab_size) for text in texts],
        }
        command = [sys.executable, "-m", "moetool.bench.plain_generation", str(checkpoint.path), json.dumps(settings)]
        made = subprocess.run(command, check=True, capture_output=True, text=True)
        return 1e3 * float(np.median([seconds / _TIMED_TOKENS for _, seconds in json.loads(made.stdout)]))

    if bench.given:
        raise CannotTestError("a new token is timed on the model, but only traces were given")
    return bench.once("token_ms", measure)


def _value(found: Evaluation, options: Options) -> float:
    if options.measure == "size":
        return found.expert_bytes_share
    if options.measure == "prompt":
        assert found.prompt_prediction is not None, "a predictor that predicts"
        return _score(found.prompt_prediction.scores, options.phase, 0).match
    score = _score(found.scores, options.phase, options.distance)
    return {"match": score.match, "exact": score.exact, "one": score.at_least_one}[options.measure]


def _score(scores: Sequence[MatchScore], phase: str, distance: int) -> MatchScore:
    """The score over all layers. Raises: CannotTestError: nothing was scored."""
    for score in scores:
        if (score.phase, score.distance, score.layer) == (phase, distance, None):
            return score
    raise CannotTestError(f"nothing was predicted {distance} layers ahead in {phase}: the trace has no such tokens")
