"""Offline, reactive and proactive placement on a stream of batches: one planner that sees different requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool import planner
from moetool.costing.latency import Latency, flows, unit_latency
from moetool.errors import MismatchError, UsageError
from moetool.planner import Problem
from moetool.planning.demand import Batch, Demand, held_out, planned_share, read_batches
from moetool.planning.recall import Recall
from moetool.types import Cluster, ModelSpec

if TYPE_CHECKING:
    from moetool.planning.placing import Setting
    from moetool.predictor import Predictor
    from moetool.trace.reader import Trace

Predict = Callable[[Batch], Demand]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A mode on a stream.

    Attributes:
        mode: `vanilla` (uniform), `offline` (from other requests, once), `reactive` (from the last batch), `proactive`
            (from the coming batch as it will be), `predicted` (from the coming batch as it is predicted to be).
        latency: mean T_comp + T_comm of a layer, over the batches and layers.
        share_of_truth: what the mode gains over vanilla, as a share of what `proactive` gains.
        moved: experts that a GPU gets anew between two batches, mean.
        batches: how many.
    """

    mode: str
    latency: float
    share_of_truth: float
    moved: float
    batches: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def run_stream(
    traces: Sequence["Trace"],
    cluster: Cluster,
    name: str,
    options: Mapping[str, Any],
    *,
    tokens: int,
    batches: int,
    predictor: "Predictor | None" = None,
    setting: "Setting | None" = None,
    latency: Latency | None = None,
) -> list[Mode]:
    """Serve batches of held-out requests, every other one of each trace; the rest is the history.

    Source: DIRECTOR § III and § VIII-B for the modes. The paper's reactive baseline sees the current and recent
    batches; here it sees the last one, as § III compares it. Migration is taken to fit between batches; `moved` says
    how much it is.

    Args:
        tokens: of each request; each GPU gets one request a batch.
        predictor: for the mode `predicted` (`calibrated`); of the held-out requests then only those count that it was
            not trained on, by its card. Without one the mode predicts by `moetool.planning.recall.Recall`.

    Raises:
        UsageError: too few requests for two batches, or for a history; the predictor has seen all of a trace.
        MismatchError: the predictor is of another model.
    """
    from moetool.planning.placing import Setting

    setting = setting or Setting()
    if not traces:
        raise UsageError("no trace to stream; pass --trace DIR")
    for other in traces[1:]:
        other.spec.require_same(traces[0].spec, "a trace", "the first trace")
    latency = latency or unit_latency(cluster, sides=setting.sides)
    uses = planned_share(0.5)
    history = list(read_batches(traces, cluster, tokens, setting.seed, uses))
    allowed = _not_trained_on(predictor) if predictor is not None and predictor.card else None
    coming = list(islice(read_batches(traces, cluster, tokens, setting.seed, held_out(uses), allowed), batches))
    if len(coming) < 2:
        raise UsageError(f"the held-out requests make {len(coming)} batch, expected at least two; give more traces")
    predict: Predict
    if predictor is None:
        predict = Recall(history)
    else:
        traces[0].spec.require_same(predictor.spec, "the trace", "the predictor")
        predict = calibrated(predictor, history)
    return modes(coming, [demand for demand, _ in history], name, options, latency, predict, setting.seed)


def _not_trained_on(predictor: "Predictor") -> "Callable[[Trace], frozenset[int]]":
    from moetool.evaluation import unseen

    return lambda trace: unseen.held_out(predictor.card, trace)


def modes(
    coming: Sequence[Batch],
    history: Sequence[Demand],
    name: str,
    options: Mapping[str, Any],
    latency: Latency,
    predict: Predict | None = None,
    seed: int = 0,
) -> list[Mode]:
    """Each mode on the same batches.

    The reactive mode begins with the offline placement. A prediction by recall remembers the batches that came before.
    """

    def place(demand: Demand) -> np.ndarray:
        return planner.place(name, Problem(demand=demand, latency=latency, seed=seed), dict(options))

    past = replace(history[0], tokens_GLE=np.sum([demand.tokens_GLE for demand in history], axis=0))
    vanilla = planner.place("uniform", Problem(demand=past, latency=latency, seed=seed))
    offline = place(past)
    proactive = [place(demand) for demand, _ in coming]
    plans = {
        "vanilla": [vanilla] * len(coming),
        "offline": [offline] * len(coming),
        "reactive": [offline, *proactive[:-1]],
        "proactive": proactive,
    }
    if predict is not None:
        plans["predicted"] = []
        for batch in coming:
            plans["predicted"].append(place(predict(batch)))
            if isinstance(predict, Recall):
                predict.learn(batch)
    means = {
        mode: float(np.mean([cost(latency, batch[0], plan) for batch, plan in zip(coming, placed, strict=True)]))
        for mode, placed in plans.items()
    }
    gain = means["vanilla"] - means["proactive"]
    return [
        Mode(
            mode=mode,
            latency=means[mode],
            share_of_truth=(means["vanilla"] - means[mode]) / gain if gain else 1.0,
            moved=float(np.mean([(b & ~a).sum() for a, b in pairwise(placed)])),
            batches=len(coming),
        )
        for mode, placed in plans.items()
    ]


def cost(latency: Latency, demand: Demand, placed_GLE: np.ndarray) -> float:
    """T_comp + T_comm of a layer, mean over the layers."""
    layers = range(demand.spec.num_layers)
    return float(
        np.mean([sum(latency.layer(flows(demand.cluster, demand.tokens_GLE[:, i], placed_GLE[:, i]))) for i in layers])
    )


def calibrated(predictor: "Predictor", history: Sequence[Batch]) -> Predict:
    """Predict a coming batch from what its first MoE layer chose, by a predictor that goes on from its own guesses.

    The first layer's experts follow from the prompt nearly alone, so they are taken as known. Each later layer is
    predicted (`rollout`), and each token's expected experts are a mixture of the
    predictor's scores and the mean of the history; the weights of the two are fitted on the history, layer by layer.
    This covers the tokens of prompts; of tokens still to be decoded nothing is known beforehand.

    Source: DIRECTOR § V-A a, whose cascade goes on from its own predictions.
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


def regressed(history: Sequence[Batch], penalty: float = 10.0) -> Predict:
    """Predict a coming batch from what its first MoE layer chose, by ridge regression on the history.

    For each token and later layer the chance of each expert is linear in the experts that the first layer gave to the
    token and in the mean of those it gave to the tokens of its request, which tells what the request is about. The
    first layer is taken as known, as in `calibrated`.

    Args:
        penalty: added to the diagonal of the normal equations.
    """
    spec = history[0][0].spec
    start_L = np.concatenate([[0], np.cumsum(spec.top_k_L)])
    square: Any = 0.0
    product: list[Any] = [0.0] * spec.num_layers
    for _, parts in history:
        for _, rows_TS in parts:
            known_TF = _features(spec, rows_TS)
            square = square + known_TF.T @ known_TF
            for layer in range(1, spec.num_layers):
                chosen_TE = _chosen(rows_TS[:, start_L[layer] : start_L[layer + 1]], spec.num_experts)
                product[layer] = product[layer] + known_TF.T @ chosen_TE
    penalised = square + penalty * np.eye(2 * spec.num_experts + 1)
    weight_LFE = [np.linalg.solve(penalised, product[layer]) for layer in range(1, spec.num_layers)]

    def predict(batch: Batch) -> Demand:
        tokens_GLE = batch[0].tokens_GLE.copy()
        for g, (_, rows_TS) in enumerate(batch[1]):
            known_TF = _features(spec, rows_TS)
            for layer, weight_FE in enumerate(weight_LFE, 1):
                chance_TE = np.clip(known_TF @ weight_FE, 0.0, 1.0)
                chance_TE[:, spec.num_experts_L[layer] :] = 0.0
                tokens_GLE[g, layer] = chance_TE.sum(axis=0)
        return replace(batch[0], tokens_GLE=tokens_GLE)

    return predict


def _features(spec: ModelSpec, rows_TS: np.ndarray) -> np.ndarray:
    """Of each token: its experts in the first layer, their mean over the request, and 1."""
    chosen_TE = _chosen(rows_TS[:, : spec.top_k_L[0]], spec.num_experts)
    mean_TE = np.broadcast_to(chosen_TE.mean(axis=0), chosen_TE.shape)
    return np.concatenate([chosen_TE, mean_TE, np.ones((len(rows_TS), 1))], axis=1)


def _chosen(experts_TK: np.ndarray, num_experts: int) -> np.ndarray:
    chosen_TE = np.zeros((len(experts_TK), num_experts))
    np.put_along_axis(chosen_TE, experts_TK.astype(np.int64), 1.0, axis=1)
    return chosen_TE


def rollout(predictor: "Predictor", batch: Batch) -> np.ndarray:
    """Experts [G, L, E] that a predictor expects of a batch, of which it is told the first MoE layer.

    A layer that the predictor can score from the first is scored from that, one that is too far away from the layers
    before it as predicted.

    Raises:
        MismatchError: the predictor needs more than experts.
    """
    import torch

    from moetool.learning.tokens import Tokens

    if more := sorted(set(predictor.needs) - {"experts"}):
        raise MismatchError(
            f"{predictor.name} needs {', '.join(more)}, and of a batch that has not begun only the first layer's "
            f"experts are known; use one that needs experts alone, such as affinity"
        )
    demand, parts = batch
    spec: ModelSpec = demand.spec
    expected_GLE = demand.tokens_GLE.copy()
    expected_GLE[:, 1:] = 0.0
    gpu_T = np.repeat(np.arange(len(parts)), [len(rows_TS) for _, rows_TS in parts])
    path = np.concatenate([rows_TS[:, : spec.top_k_L[0]] for _, rows_TS in parts]).astype(np.int64)[:, None]
    for layer in range(1, spec.num_layers):
        known = path[:, :1] if predictor.lookahead >= layer else path
        with torch.inference_mode():
            scores_TE = predictor.layer_scores(Tokens(experts_TPK=torch.from_numpy(known)), layer).double()
        top_k = spec.top_k_L[layer]
        chosen = scores_TE.topk(top_k, dim=1).indices.numpy()
        soft_TE = torch.softmax(scores_TE, dim=1).numpy() if bool((scores_TE < 0).any()) else scores_TE.numpy()
        soft_TE = soft_TE / np.maximum(soft_TE.sum(axis=1, keepdims=True), 1e-12) * top_k
        np.add.at(expected_GLE[:, layer], gpu_T, np.minimum(soft_TE, 1.0))
        path = np.concatenate([path, chosen[:, None]], axis=1)
    return expected_GLE
