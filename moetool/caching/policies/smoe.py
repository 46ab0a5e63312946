"""SMoE: substitutes resident experts for missing ones of similar low score; evicts the lowest mean score."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent, ModelSpec, Phase
from moetool.caching import policy
from moetool.caching.host_split import HostCosts, tokens_of, two_pointers


@dataclass(frozen=True, kw_only=True)
class Options(HostCosts):
    """Options of SMoE.

    Attributes:
        alpha: largest distance from the (k+1)-th highest score, as a share of it, of experts that are replaced or
            replace others; 0 keeps the router's choice.
        window: number of iterations before the last one in mean scores (n of Eq. 3).
        prefetch: whether to prefetch experts with high predicted scores in the next layer.
        predict_from: input of the next router for that prediction: `ahead`, the hidden states at this layer's router;
            `resident`, those after resident and shared experts and the next attention, as in the paper; or `auto`,
            `resident` in a server on one GPU that idles meanwhile (`Policy.beside_gpu`), else `ahead`.
        evict_lower_only: whether a prefetch may evict only experts whose mean score is below the predicted one. The
            paper has no such rule.
    """

    REFUSED: ClassVar[dict[str, str]] = {
        "look": "it is called predict_from",
        "spare": "it is called evict_lower_only",
        "split": "misses are split as in the paper's Algorithm 2",
    }

    alpha: float = 0.3
    window: int = 3
    prefetch: bool = True
    predict_from: Literal["auto", "ahead", "resident"] = "auto"
    evict_lower_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1 or self.window < 0:
            raise UsageError(
                f"policy smoe: alpha is {self.alpha} and window {self.window}, expected an alpha from 0 to 1 and a "
                f"window of 0 or more"
            )


class Policy(policy.Policy):
    """Substitutes, evicts, prefetches and computes on the host by the router's scores. Not lossless unless alpha is 0.

    Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), Algorithms 1 and 2,
    Eq. 3, sections IV and V. Readings and deviations:
        - Algorithm 1 uses one variable under two names, and its bands overlap. Here S is the (k+1)-th highest score of
          a token, and an expert of score s is: top-score (C) if s >= (1+alpha)S; low-score (B) if S < s < (1+alpha)S; a
          candidate (A) if (1-alpha)S < s <= S and it is resident, or in C of any token of the batch. C therefore takes
          a first pass over all tokens. Low-score experts that are resident or in C stay. The others are replaced while
          candidates last, the lowest scores first, by the candidates with the highest scores. The rest are loaded or
          computed on the host. A token always has k experts. Substitutes carry their own scores, by the family's rule.
        - B and C consist of the router's choice, never of a recomputed top-k. A tie, a bias or groups may give a chosen
          expert s <= S. It then counts as low-score within alpha of S, and stays if below. Scores are those before a
          bias for ranking. If the router ranks groups first, candidates and S come from the groups that the token uses.
        - Eq. 3 averages n+1 terms, the last iteration's and n before. The paper does not give n; the default is the
          three iterations of Figure 6. An iteration is a forward. Its score of an expert is the mean over its new
          tokens, or over its prompt tokens if it has no new ones. The lowest score over all layers is evicted, since
          one pool serves all layers.
        - "Elevates the eviction priority" means protection. The event's experts are protected until its last expert is
          computed, and prefetched experts until their layer's router has chosen. They are evicted only if nothing else
          can be.
        - The paper predicts the next layer's scores by a forward through resident and shared experts, the next
          attention and the next gate, since the GPU idles while loads take longer (section IV-C). With `predict_from` =
          `resident`, the default there, a server runs that forward while a layer's misses load, through the experts
          that are resident after substitution, and logs the scores (`moetool.runtime.experts.resident_forward`). A
          trace captured with `--keep resident` holds scores from the residents of its own cache
          (`moetool.runtime.recording.resident_gates`). Elsewhere the next router gets the hidden states at this layer's
          router (the column `ahead`), which is cheaper and may predict worse. Band C of the prediction is prefetched,
          the highest scores first.
        - Algorithm 2 takes its costs from past timings, as `live` does. A server logs the costs it used, so that a
          replay decides alike. Otherwise costs are options, and without them the host computes nothing. Experts are
          ordered by their scores, averaged over the event's tokens. The cost of further tokens is an addition for
          prompts; measured averages have none.
    """

    needs = frozenset({"experts", "logits"})
    lossless = False
    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: object = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self.computes_on_host = options.splits
        self.live_costs = options.splits and options.live
        self._column = "ahead" if options.predict_from == "auto" else options.predict_from
        self.search_lag = 0 if self._column == "resident" else None  # that forward runs while misses load
        self._costs: HostCosts = options.at_first()
        self._scores = ScoreWindow(spec, options.window)
        self._shield: set[int] = set()  # experts of the current event
        self._ahead: dict[int, float] = {}  # experts to prefetch for the next layer, with their predicted scores

    @property
    def columns(self) -> frozenset[str]:
        return super().columns | {self._column} if self.options.prefetch else super().columns

    @classmethod
    def beside_gpu(
        cls,
        spec: ModelSpec,
        options: Mapping[str, Any],
        num_slots: int,
        costs: Callable[[], policy.PartialCosts | None],
    ) -> Mapping[str, Any]:
        """Choose `resident` where the loads of a layer's misses take longer than the forward that they hide."""
        if options.get("predict_from", "auto") != "auto" or not options.get("prefetch", True):
            return options
        if num_slots >= spec.total_experts:  # nothing is missing
            return {**options, "predict_from": "ahead"}
        if (measured := costs()) is None:
            return options
        missing = max(spec.top_k_L) * (1 - num_slots / spec.total_experts)
        idles = missing * measured.load_s >= measured.layer_s
        return {**options, "predict_from": "resident" if idles else "ahead"}

    def route(self, event: GateEvent, resident: Callable[[int], bool]) -> Sequence[Sequence[int]] | None:
        if not self.options.alpha:
            return None
        base = self.spec.expert_key(event.layer, 0)
        here_E = [resident(base + expert) for expert in range(self.spec.num_experts_L[event.layer])]
        return cache_router(self.spec, event, np.array(here_E), self.options.alpha)

    def take_costs(self, load_s: float, host_s: float) -> None:
        self._costs = self._costs.measured(load_s, host_s)

    def on_host(self, event: GateEvent, misses: list[int]) -> Collection[int]:
        base = self.spec.expert_key(event.layer, 0)
        mean_E, tokens_E = _scores(event).mean(axis=0, dtype=np.float64), tokens_of(event, self.spec)
        ranked = sorted(misses, key=lambda key: (-mean_E[key - base], key))
        seconds = [self._costs.seconds(tokens_E[key - base]) for key in ranked]
        return ranked[two_pointers(seconds, self._costs.load_s, finish=False) :]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._scores.see(event)
        self._ahead.clear()
        self._shield = {*hits, *misses}
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        if not self.options.prefetch or event.layer + 1 == self.spec.num_layers:
            return ()
        if self._column == "resident":
            self.partial_forwards += 1
            scores_TE = event.resident_TE
        else:
            self.searches += 1
            scores_TE = None if event.ahead_ATE is None else event.ahead_ATE[0]
        assert scores_TE is not None, f"the policy needs the column {self._column}"
        self._ahead = top_score(self.spec, event.layer + 1, scores_TE, self.options.alpha)
        return list(self._ahead)

    def after_last_expert(self, event: GateEvent) -> Sequence[int]:
        self._shield.clear()
        return ()

    def admit(self, key: int, prefetched: bool) -> None:
        self._scores.admit(key)

    def removed(self, key: int) -> None:
        self._scores.removed(key)

    def evict(self, locked: Collection[int]) -> int:
        key = self._scores.lowest((*locked, *self._shield, *self._ahead))
        if key is None:
            key = self._scores.lowest(locked)
        assert key is not None
        return key

    def evict_for_prefetch(self, key: int, locked: Collection[int]) -> int | None:
        lowest = self._scores.lowest((*locked, *self._shield, *self._ahead))
        if lowest is None or not self.options.evict_lower_only:
            return lowest
        return None if self._scores.mean(lowest) >= self._ahead[key] else lowest


class ScoreWindow:
    """Mean scores of experts over the last iterations, and the resident with the lowest.

    Args:
        window: number of iterations before the last one (n of Eq. 3).
    """

    def __init__(self, spec: ModelSpec, window: int) -> None:
        self._spec = spec
        self._recent_LWE = np.zeros((spec.num_layers, window + 1, spec.num_experts))
        self._seen_L = [0] * spec.num_layers
        size = spec.num_layers * spec.num_experts  # arrays by key
        self._mean_E = np.zeros(size)
        self._standing_E = np.full(size, np.inf)  # mean scores of residents; infinite for others

    def see(self, event: GateEvent) -> None:
        """Add the scores of an event."""
        scores_TE = _scores(event)
        decoded = [i for i, phase in enumerate(event.forward.phase_T) if phase == Phase.DECODE]
        mean_E = (scores_TE[decoded] if decoded else scores_TE).mean(axis=0, dtype=np.float64)
        layer, recent_WE = event.layer, self._recent_LWE[event.layer]
        recent_WE[self._seen_L[layer] % len(recent_WE), : len(mean_E)] = mean_E
        self._seen_L[layer] += 1
        start = self._spec.expert_key(layer, 0)
        span = slice(start, start + self._spec.num_experts)
        self._mean_E[span] = recent_WE[: self._seen_L[layer]].mean(axis=0)
        standing_E = self._standing_E[span]
        standing_E[...] = np.where(np.isfinite(standing_E), self._mean_E[span], np.inf)

    def admit(self, key: int) -> None:
        """Note that `key` is resident."""
        self._standing_E[key] = self._mean_E[key]

    def removed(self, key: int) -> None:
        """Note that `key` is no longer resident."""
        self._standing_E[key] = np.inf

    def mean(self, key: int) -> float:
        """Return the mean score of `key`; 0 before its layer's first event."""
        return float(self._mean_E[key])

    def lowest(self, kept: Iterable[int]) -> int | None:
        """Return the resident outside `kept` with the lowest mean score (ties: lowest key); None without one."""
        standing_E = self._standing_E.copy()
        standing_E[list(kept)] = np.inf
        key = int(standing_E.argmin())
        return key if np.isfinite(standing_E[key]) else None


def cache_router(spec: ModelSpec, event: GateEvent, here_E: np.ndarray, alpha: float) -> list[list[int]] | None:
    """Return the experts of each token after substitution, by Algorithm 1 as in `Policy`; None if none changes.

    Args:
        here_E: whether each expert of the layer is resident.
    """
    experts_TK = np.asarray(event.experts_TK)
    scores_TE = _scores(event)
    num_tokens, num_experts = scores_TE.shape
    top_k = experts_TK.shape[1]
    if top_k == num_experts:
        return None
    chosen_TE = np.zeros((num_tokens, num_experts), bool)
    np.put_along_axis(chosen_TE, experts_TK, True, axis=1)
    if spec.num_groups > 1:
        used_TG = chosen_TE.reshape(num_tokens, spec.num_groups, -1).any(axis=2)
        scores_TE = np.where(used_TG.repeat(num_experts // spec.num_groups, axis=1), scores_TE, 0)
    limit_T1 = np.partition(scores_TE, num_experts - top_k - 1, axis=1)[:, num_experts - top_k - 1, None]
    near_TE = scores_TE > (1 - alpha) * limit_T1
    low_TE = chosen_TE & near_TE & (scores_TE < (1 + alpha) * limit_T1)
    free_E = here_E | (chosen_TE & ~low_TE).any(axis=0)
    missing_TE = low_TE & ~free_E
    candidate_TE = ~chosen_TE & near_TE & (scores_TE <= limit_T1) & free_E
    changing = np.flatnonzero(missing_TE.any(axis=1) & candidate_TE.any(axis=1))
    if not len(changing):
        return None
    routed: list[list[int]] = experts_TK.tolist()
    for token in changing.tolist():
        score_E = scores_TE[token]
        best = sorted(np.flatnonzero(candidate_TE[token]).tolist(), key=lambda e: (-score_E[e], e))
        worst = sorted(np.flatnonzero(missing_TE[token]).tolist(), key=lambda e: (score_E[e], -e))
        count = min(len(best), len(worst))
        stands_for = dict(zip(reversed(worst[:count]), best, strict=False))  # best candidate for the highest score
        routed[token] = [stands_for.get(expert, expert) for expert in routed[token]]
    return routed


def top_score(spec: ModelSpec, layer: int, scores_TE: np.ndarray, alpha: float) -> dict[int, float]:
    """Return the keys of band C of any token by predicted scores, with their mean scores, highest first."""
    scores_TE = scores_TE[:, : spec.num_experts_L[layer]]
    num_experts, top_k = scores_TE.shape[1], spec.top_k_L[layer]
    order_TE = np.argsort(-scores_TE, axis=1, kind="stable")
    if top_k < num_experts:
        limit_T1 = np.take_along_axis(scores_TE, order_TE[:, top_k, None], axis=1)
        high_TK = np.take_along_axis(scores_TE, order_TE[:, :top_k], axis=1) >= (1 + alpha) * limit_T1
        wanted = np.unique(order_TE[:, :top_k][high_TK])
    else:
        wanted = np.arange(num_experts)
    mean_E = scores_TE.mean(axis=0, dtype=np.float64)
    ranked = wanted[np.argsort(-mean_E[wanted], kind="stable")].tolist()
    return {spec.expert_key(layer, expert): float(mean_E[expert]) for expert in ranked}


def choose_alpha(alphas: Sequence[float], tpot_s: Sequence[float], limit_s: float) -> float:
    """Return the smallest alpha whose time per token, by a quadratic fit, is within a limit.

    Args:
        alphas: measured alphas, two or more.
        tpot_s: seconds per token at each.
        limit_s: limit of the seconds per token.

    Raises:
        UsageError: no alpha between the measured ones is fast enough, or too few were measured.

    Source: SMoE, Eq. 5 and section V-C. This is a rule, not the optimum of Eq. 5, which would require a loss that grows
    with alpha; Table IV does not show one.
    """
    if len(set(alphas)) < 2 or len(alphas) != len(tpot_s):
        raise UsageError(
            f"{len(alphas)} alphas and {len(tpot_s)} times are too few for a curve, expected at least two of each"
        )
    made = np.polynomial.Polynomial.fit(alphas, tpot_s, min(2, len(set(alphas)) - 1))
    tried = np.linspace(min(alphas), max(alphas), 1001)
    fast = np.flatnonzero(made(tried) <= limit_s)
    if not len(fast):
        raise UsageError(
            f"no alpha from {min(alphas)} to {max(alphas)} reaches {limit_s:.4g} s per token; the fastest is "
            f"{float(made(tried).min()):.4g} s: allow that, or give more memory"
        )
    return float(tried[fast[0]])


def _scores(event: GateEvent) -> np.ndarray:
    assert event.scores_TE is not None, "the policy needs the column logits"
    return event.scores_TE
