"""Offline, reactive and proactive placement on a stream of batches: one planner with different observations."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.json_files import JsonRecord
from moetool.base.types import ModelSpec
from moetool.placement import planner
from moetool.placement.decide import SEES, Decision, InForce, Observed, ReplacementCosts, Replanner, decide
from moetool.placement.demand import Batch, Demand
from moetool.placement.latency import Latency, layers_s
from moetool.placement.planner import Problem
from moetool.placement.recall import Recall

if TYPE_CHECKING:
    from moetool.prediction.predictor import Predictor

Predict = Callable[[Batch], Demand]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementModeScore(JsonRecord):
    """A mode on a stream.

    Attributes:
        mode: `vanilla` (uniform), `offline` (from other requests, once), `reactive` (from the last batch), `proactive`
            (from the true coming batch), `predicted` (from the predicted coming batch).
        latency: mean T_comp + T_comm of a layer, over the batches and layers.
        share_of_truth: the mode's gain over vanilla, as a share of that of `proactive`.
        moved: mean number of experts copied between two batches.
    """

    mode: str
    latency: float
    share_of_truth: float
    moved: float
    batches: int


def modes(
    coming: Sequence[Batch],
    history: Sequence[Demand],
    name: str,
    options: Mapping[str, Any],
    latency: Latency,
    predict: Predict | None = None,
    seed: int = 0,
) -> list[PlacementModeScore]:
    """Score each mode on the same batches.

    Source: DIRECTOR § III and § VIII-B for the modes. The paper's reactive baseline sees the current and recent
    batches; here it sees the last one, as in § III. Migration is assumed to fit between batches; `moved` reports its
    size.
    """
    past = replace(history[0], tokens_GLE=np.sum([demand.tokens_GLE for demand in history], axis=0))
    problem = Problem(demand=past, latency=latency, seed=seed)
    begins = {"vanilla": planner.place("uniform", problem), "offline": planner.place(name, problem, dict(options))}
    replanner = Replanner(planner=name, options=options, seed=seed, weighs="latency", always=True)
    costs = ReplacementCosts(latency=latency, call_s=latency.ways)  # sending a token counts 1 each way
    known: dict[int, np.ndarray] = {}
    plans: dict[str, list[np.ndarray]] = {}
    for mode, sees in SEES.items():
        if sees != "prediction" or predict is not None:
            begin_GLE = begins.get(mode, begins["offline"])
            served = follow(sees, coming, begin_GLE, costs, replanner, predict, known)
            plans[mode] = [placed_GLE for placed_GLE, _ in served]

    def mean(placed: Sequence[np.ndarray]) -> float:
        spent = [
            layers_s(latency, demand.cluster, demand.tokens_GLE, placed_GLE)
            for (demand, _), placed_GLE in zip(coming, placed, strict=True)
        ]
        return float(np.mean(spent)) / past.spec.num_layers

    means = {mode: mean(placed) for mode, placed in plans.items()}
    gain = means["vanilla"] - means["proactive"]
    return [
        PlacementModeScore(
            mode=mode,
            latency=means[mode],
            share_of_truth=(means["vanilla"] - means[mode]) / gain if gain else 1.0,
            moved=float(np.mean([(b & ~a).sum() for a, b in pairwise(placed)])),
            batches=len(coming),
        )
        for mode, placed in plans.items()
    ]


def follow(
    sees: str,
    coming: Sequence[Batch],
    placed_GLE: np.ndarray,
    costs: ReplacementCosts,
    replanner: Replanner,
    predict: Predict | None = None,
    known: dict[int, np.ndarray] | None = None,
) -> Iterator[tuple[np.ndarray, Decision | None]]:
    """Serve batches in a mode; yield for each its placement, and the decision before it.

    Prediction by recall remembers earlier batches.

    Args:
        sees: value of `SEES`.
        placed_GLE: initial placement.
        known: placements by identity of their demand, shared by modes with equal observations.
    """
    spec, cluster = coming[0][0].spec, coming[0][0].cluster
    known = {} if known is None else known
    last: Demand | None = None
    for batch in coming:
        seen = {"past": last, "queue": batch[0]}.get(sees)
        if sees == "prediction" and predict is not None:
            seen = predict(batch)
        decision: Decision | None = None
        if seen is not None:
            in_force = InForce(spec=spec, cluster=cluster, placed_GLE=placed_GLE)
            tokens = float(seen.tokens_GLE.sum()) / sum(spec.top_k_L)
            observed = Observed(tokens_GLE=seen.tokens_GLE, horizon_tokens=tokens, source=sees)
            decision = decide(observed, in_force, costs, replanner, known.get(id(seen)))
            if sees != "prediction":  # not kept alive, so its identity may be reused
                known[id(seen)] = decision.placed_GLE
            placed_GLE = decision.placed_GLE if decision.made else placed_GLE
        yield placed_GLE, decision
        if isinstance(predict, Recall) and sees == "prediction":
            predict.learn(batch)
        last = batch[0]


def calibrated(predictor: "Predictor", history: Sequence[Batch]) -> Predict:
    """Predict a coming batch from its first MoE layer's experts, by a predictor that continues from its own output.

    The first layer's experts depend almost only on the prompt, so they count as known. Each later layer is predicted
    (`rollout`). A token's expected experts are a mixture of the predictor's scores and the mean of the history. Its
    weights are fitted on the history, layer by layer. This covers prompt tokens only: decoded tokens are unknown in
    advance.

    Source: DIRECTOR § V-A a, whose cascade continues from its own predictions.
    """
    spec = history[0][0].spec
    mean_LE = np.mean([demand.tokens_GLE.mean(axis=0) for demand, _ in history], axis=0)
    rolled = [rollout(predictor, batch) for batch in history]
    weight_L = np.ones(spec.num_layers)
    for layer in range(1, spec.num_layers):
        shape = (mean_LE[layer] / max(1e-9, mean_LE[layer].sum()))[None]
        guess = np.concatenate([r[:, layer] - r[:, layer].sum(axis=1, keepdims=True) * shape for r in rolled])
        truth = np.concatenate(
            [t - t.sum(axis=1, keepdims=True) * shape for t in (d.tokens_GLE[:, layer] for d, _ in history)]
        )
        energy = float((guess * guess).sum())
        weight_L[layer] = float((guess * truth).sum()) / energy if energy else 0.0

    def predict(batch: Batch) -> Demand:
        guess_GLE = rollout(predictor, batch)
        total_GL = guess_GLE.sum(axis=2, keepdims=True)
        shape_LE = mean_LE / np.maximum(1e-9, mean_LE.sum(axis=1, keepdims=True))
        prior_GLE = total_GL * shape_LE
        mixed = prior_GLE + weight_L[None, :, None] * (guess_GLE - prior_GLE)
        return replace(batch[0], tokens_GLE=np.maximum(0.0, mixed))

    return predict


def rollout(predictor: "Predictor", batch: Batch) -> np.ndarray:
    """Return the experts [G, L, E] that a predictor expects of a batch with a known first MoE layer.

    A layer within reach of the first is scored from it; a farther one from predicted layers.

    Raises:
        MismatchError: the predictor needs more than experts.
    """
    if more := sorted(set(predictor.needs) - {"experts"}):
        raise MismatchError(
            f"{predictor.name} needs {', '.join(more)}, but of a pending batch only the first layer's experts "
            f"are known; use one that needs only experts, e.g. affinity"
        )
    demand, parts = batch
    spec: ModelSpec = demand.spec
    expected_GLE = demand.tokens_GLE.copy()
    expected_GLE[:, 1:] = 0.0
    gpu_T = np.repeat(np.arange(len(parts)), [len(rows_TS) for _, rows_TS in parts])
    first_TK = np.concatenate([rows_TS[:, : spec.top_k_L[0]] for _, rows_TS in parts])
    for layer, share_TE in enumerate(predictor.continue_path(first_TK), start=1):
        np.add.at(expected_GLE[:, layer], gpu_T, share_TE)
    return expected_GLE
