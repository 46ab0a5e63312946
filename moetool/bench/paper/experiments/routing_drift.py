"""Change of the experts' selection frequency from batch to batch: DIRECTOR's Figure 2."""

from dataclasses import dataclass

import numpy as np

from moetool.base.types import ModelSpec
from moetool.bench.experiment_figure import ExperimentResult
from moetool.bench.paper.samples import Samples
from moetool.bench.paper.verdict import CannotTestError
from moetool.bench.paper.workbench import ALL, Workbench
from moetool.trace.expert_counts import count_experts
from moetool.trace.reader import Trace

_DEPTH, _SHOWN = 0.75, 3  # of the figure: a layer, as a share of all, and its most used experts
BATCHES, CHANCE = "batch to batch", "by chance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the experiment.

    Attributes:
        data: prompt sets, mixed; given traces replace them.
    """

    data: tuple[str, ...] = ALL
    batch: int = 6


def run(bench: Workbench, options: Options) -> ExperimentResult:
    """Share of a layer's calls that move to other experts from one batch to the next, mean over layers and batches.

    It is half the sum of absolute differences of the experts' shares. By chance: the same tokens in random batches of
    the same sizes, which leaves the noise of finite batches. Each seed has another trace.

    Source: DIRECTOR § III, Finding 1, whose figure shows one layer.
    """
    samples = Samples(bench)
    for seed in bench.seeds:
        trace = samples.use(bench.trace(options.data, fold=seed))
        batches = _batches(trace, options.batch)
        rng = np.random.default_rng(seed)
        mixed_TS = rng.permutation(np.concatenate(batches))
        dealt = np.split(mixed_TS, np.cumsum([len(rows_TS) for rows_TS in batches])[:-1])
        shares = _shares(trace.spec, batches)
        samples.add(BATCHES, changed(shares))
        samples.add(CHANCE, changed(_shares(trace.spec, dealt)))
        if not samples.curves:  # of one trace, since other prompts use other experts
            shares_BE = shares[:, round(_DEPTH * (trace.spec.num_layers - 1))]
            for expert in np.argsort(-shares_BE.mean(axis=0))[:_SHOWN].tolist():
                samples.draw(f"expert {expert}", range(1, len(batches) + 1), 100 * shares_BE[:, expert])
    what, on = "calls that move to other experts between batches", f"batches of {options.batch} requests"
    return samples.found(what, "%", on, axes=("batch", "% of the layer's calls"))


def changed(shares_BLE: np.ndarray) -> float:
    """Mean distance of consecutive batches: half the sum of absolute differences of their shares."""
    return float(np.abs(np.diff(shares_BLE, axis=0)).sum(axis=2).mean() / 2)


def _batches(trace: Trace, size: int) -> list[np.ndarray]:
    """Routes [T, S] of batches of this number of requests, in trace order; an incomplete last batch is dropped."""
    parts: dict[int, list[np.ndarray]] = {}
    for rows in trace.batches():
        for request in np.unique(rows.request_T).tolist():
            parts.setdefault(request, []).append(rows.experts_TS[rows.request_T == request])
    requests = [np.concatenate(each) for each in parts.values()]
    made = [np.concatenate(requests[i : i + size]) for i in range(0, len(requests) - size + 1, size)]
    if len(made) < 2:
        raise CannotTestError(f"{trace.path} makes {len(made)} batch of {size} requests, expected two")
    return made


def _shares(spec: ModelSpec, batches: list[np.ndarray]) -> np.ndarray:
    """Each expert's share [B, L, E] of its layer's calls."""
    counts_BLE = np.stack([count_experts(spec, rows_TS) for rows_TS in batches]).astype(np.float64)
    return counts_BLE / counts_BLE.sum(axis=2, keepdims=True)
