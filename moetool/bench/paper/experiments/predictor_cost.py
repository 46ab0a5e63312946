"""Prediction cost at the shape of an unavailable model: DuoServe's § 6.4."""

import statistics
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from moetool.base.types import ForwardInfo, GateEvent, ModelSpec
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.workbench import Workbench
from moetool.costing.machines import read_named_model
from moetool.training.predictor import Predictor, build

_STEPS = 20  # timed tokens of a round; one before them warms up


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        predictor: with default options and random weights.
        model: model of `recipes/models`.
        measure: `time`, milliseconds to predict all layers of a token, wall time on one thread; `bytes`, megabytes of
            parameters and statistics.
    """

    predictor: str
    model: str
    measure: Literal["time", "bytes"] = "time"


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Observe every layer of random tokens and score the next one; one value per round instead of per seed.

    Effects: sets torch's number of threads to one, and back.
    """
    spec = read_named_model(options.model).spec()
    predictor = build(options.predictor, spec, {}).eval()
    if options.measure == "bytes":
        values = {options.predictor: [predictor.num_bytes / 1e6]}
        on = f"{options.predictor} for {spec.name}, counted"
        return ExperimentResult(values=values, what="parameters and statistics", unit="MB", on=on, exact=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = [_token_s(predictor, spec, seed) for seed in range(bench.sizes.rounds)]
    finally:
        torch.set_num_threads(threads)
    return ExperimentResult(
        values={options.predictor: [1e3 * each for each in seconds]},
        what="time to predict the layers of a token",
        unit="ms",
        on=f"{options.predictor} for {spec.name}, live on one core, medians of {_STEPS} tokens",
    )


def _token_s(predictor: Predictor, spec: ModelSpec, seed: int) -> float:
    """Median seconds to observe the layers of a token and to score each next one."""
    rng = np.random.default_rng(seed)
    seconds = []
    for step in range(_STEPS + 1):
        info = ForwardInfo(forward_id=step, request_T=(0,), phase_T=(1,), position_T=(step,))
        chosen = [
            tuple(rng.permutation(num)[:k].tolist()) for num, k in zip(spec.num_experts_L, spec.top_k_L, strict=True)
        ]
        events = [GateEvent(forward=info, layer=layer, experts_TK=(row,)) for layer, row in enumerate(chosen)]
        began = time.perf_counter()
        for event in events:
            predictor.observe(event)
            if event.layer + 1 < spec.num_layers:
                predictor.scores(event.layer + 1)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
