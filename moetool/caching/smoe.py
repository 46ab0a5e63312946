"""SMoE: experts of low score give way to resident ones of nearly the same score; the lowest mean score goes first."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moetool.caching import _policy as policy
from moetool.caching._host_split import HostCosts, tokens_of, two_pointers
from moetool.errors import UsageError
from moetool.types import GateEvent, ModelSpec, Phase


@dataclass(frozen=True, kw_only=True)
class Options(HostCosts):
    """Options of SMoE.

    Attributes:
        alpha: how far from the (k+1)-th highest score, as a share of it, an expert may lie to be replaced or to replace
            another; 0 leaves the router's choice as it is.
        window: earlier iterations whose scores count, besides the last one's.
        prefetch: whether the experts that the next layer's router seems to give a high score are loaded ahead.
        look: whether that is what the next router says of the hidden states that this layer's router got (`ahead`), or
            after a forward through resident and shared experts and the next attention (`resident`), as the paper has
            it.
        split: by which sum a miss goes to the link or to the host: the `sums` so far, as printed, or what they
            `finish` with the expert at hand.
    """

    alpha: float = 0.3
    window: int = 3
    prefetch: bool = True
    look: Literal["ahead", "resident"] = "ahead"
    split: Literal["sums", "finish"] = "sums"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1 or self.window < 0:
            raise UsageError(
                f"policy smoe: alpha is {self.alpha} and window {self.window}, expected 0 to 1 and 0 or more"
            )


class Policy(policy.Policy):
    """Substitutes, evicts, prefetches and computes on the host by the router's scores. Not lossless unless alpha is 0.

    Source: SMoE (Zhu et al., "Enabling MoE on the Edge via Importance-Driven Expert Scheduling"), Algorithms 1 and 2,
    Eq. 3, sections IV and V. Readings and deviations:
        - Algorithm 1 uses one variable under two names and its bands overlap. Here, with S the (k+1)-th highest score
          of a token: top-score experts C, s >= (1+alpha)S; low-score experts B, S < s < (1+alpha)S; candidates A,
          (1-alpha)S < s <= S and resident, or in C of any token of the batch, which takes a first pass over all
          tokens. Low-score experts that are resident or in C stay. As many of the others as there are candidates are
          replaced, those of the lowest score, by the candidates of the highest; the rest are loaded or computed on
          the host. A token always has k experts, and its substitutes carry their own scores, by the family's rule.
        - B and C are made of the experts that the router chose, never of a top-k computed again. It may have chosen
          one with s <= S, by a tie, a bias or its groups: within alpha of S such an expert counts as low-score, below
          it stays. The scores are those before any bias that the router adds to rank by. Where it ranks groups
          first, only experts of the groups that the token uses are candidates, and S is among them.
        - Eq. 3 averages n+1 terms: the last iteration's and n before. n is not printed; the default is the three
          iterations of Figure 6. An iteration is a forward; its score of an expert is the mean over its new tokens,
          or over its prompt tokens where there are no others. One pool serves all layers, so the lowest of all
          layers goes first.
        - "Elevates the eviction priority" means that it protects: the event's experts, until its last is computed.
          What was prefetched is protected until its layer's router has chosen. Only where nothing else can go do they.
        - The paper predicts the next layer's scores by a forward through the resident and shared experts, the next
          attention and the next gate. With `look` = `resident` a server runs that forward while a layer's misses are
          on their way, through the experts that are resident after substitution (`moetool.runtime.resident_look`), and
          its log holds what was said. A trace captured with `--keep resident` holds what is said with residents of a
          cache of its own (`moetool.runtime.resident_gates`). Unless told otherwise, the next router is asked about the
          hidden states that this layer's router got (the column `ahead`), which takes less and may say worse. Band C
          of the prediction is prefetched, the highest scores first.
        - A prefetch takes the place of no expert whose mean score is at least as high as the predicted one.
        - Algorithm 2 takes its costs from past timings, as `live` does; a server logs which were in force, so that a
          replay decides the same. Otherwise they are options, and without them the host computes nothing. Its order is
          that of the scores, averaged over the event's tokens. A cost for further tokens is an addition, since prompts
          use an expert with many; averages have none.
    """

    needs = frozenset({"experts", "logits"})
    lossless = False
    prefetch_distance = 1

    def __init__(self, spec: ModelSpec, options: Options, num_slots: int, predictor: object = None) -> None:
        super().__init__(spec, options, num_slots, predictor)
        self.computes_on_host = options.splits
        self.live_costs = options.splits and options.live
        self._costs: HostCosts = options.at_first()
        self._scores = ScoreWindow(spec, options.window)
        self._shield: set[int] = set()  # what the current event needs
        self._ahead: dict[int, float] = {}  # prefetched, or about to be, for the next layer, with the predicted score

    @property
    def columns(self) -> frozenset[str]:
        return super().columns | {self.options.look} if self.options.prefetch else super().columns

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
        return ranked[two_pointers(seconds, self._costs.load_s, finish=self.options.split == "finish") :]

    def gate(self, event: GateEvent, hits: list[int], misses: list[int]) -> Sequence[int]:
        self._scores.see(event)
        self._ahead.clear()
        self._shield = {*hits, *misses}
        return misses

    def after_first_expert(self, event: GateEvent) -> Sequence[int]:
        if not self.options.prefetch or event.layer + 1 == self.spec.num_layers:
            return ()
        if self.options.look == "resident":
            scores_TE = event.resident_TE
        else:
            scores_TE = None if event.ahead_ATE is None else event.ahead_ATE[0]
        assert scores_TE is not None, "a policy that looks ahead needs the column"
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
        return None if lowest is None or self._scores.mean(lowest) >= self._ahead[key] else lowest


class ScoreWindow:
    """The mean score of every expert over the last iterations, and the resident with the lowest.

    Args:
        window: iterations before the last one that count (n of Eq. 3).
    """

    def __init__(self, spec: ModelSpec, window: int) -> None:
        self._spec = spec
        self._recent_LWE = np.zeros((spec.num_layers, window + 1, spec.num_experts))
        self._seen_L = [0] * spec.num_layers
        size = spec.num_layers * spec.num_experts  # one place for each key
        self._mean_E = np.zeros(size)
        self._standing_E = np.full(size, np.inf)  # the mean of residents

    def see(self, event: GateEvent) -> None:
        """Take in the scores of an event."""
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
        """`key` is resident."""
        self._standing_E[key] = self._mean_E[key]

    def removed(self, key: int) -> None:
        """`key` is resident no more."""
        self._standing_E[key] = np.inf

    def mean(self, key: int) -> float:
        """The mean score of `key`; 0 before its layer's first event."""
        return float(self._mean_E[key])

    def lowest(self, kept: Iterable[int]) -> int | None:
        """The resident with the lowest mean score that is not one of `kept`, of several the lowest key; or None."""
        standing_E = self._standing_E.copy()
        standing_E[list(kept)] = np.inf
        key = int(standing_E.argmin())
        return key if np.isfinite(standing_E[key]) else None


def cache_router(spec: ModelSpec, event: GateEvent, here_E: np.ndarray, alpha: float) -> list[list[int]] | None:
    """The experts of each token after substitution (Algorithm 1, as `Policy` reads it); None where none changes.

    Args:
        here_E: which experts of the layer are resident.
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
        stands_for = dict(zip(reversed(worst[:count]), best, strict=False))  # the best for the highest of them
        routed[token] = [stands_for.get(expert, expert) for expert in routed[token]]
    return routed


def top_score(spec: ModelSpec, layer: int, scores_TE: np.ndarray, alpha: float) -> dict[int, float]:
    """Keys of a layer's experts in band C of any token by predicted scores, the highest mean score first, with it."""
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


def choose_alpha(alphas: Sequence[float], tpot_s: Sequence[float], limit_s: float, degree: int = 2) -> float:
    """The smallest alpha whose time per token, by a polynomial through measured ones, is within a limit.

    Source: SMoE, Eq. 5 and section V-C. It is a rule and not the optimum that Eq. 5 names: that takes the loss to grow
        with alpha, which the paper's Table IV does not show.

    Args:
        alphas: where the time was measured, two or more.
        tpot_s: seconds per token there.
        limit_s: the longest that a token may take.
        degree: of the polynomial, or one less than the number of different alphas where that is smaller.

    Raises:
        UsageError: no alpha between the measured ones is fast enough, or too few were measured.
    """
    if len(set(alphas)) < 2 or len(alphas) != len(tpot_s):
        raise UsageError(
            f"{len(alphas)} alphas and {len(tpot_s)} times are too few for a curve, expected two of each or more"
        )
    made = np.polynomial.Polynomial.fit(alphas, tpot_s, min(degree, len(set(alphas)) - 1))
    tried = np.linspace(min(alphas), max(alphas), 1001)
    fast = np.flatnonzero(made(tried) <= limit_s)
    if not len(fast):
        raise UsageError(
            f"no alpha from {min(alphas)} to {max(alphas)} brings a token to {limit_s:.4g} s; the fastest is "
            f"{float(made(tried).min()):.4g} s: allow that, or give more memory"
        )
    return float(tried[fast[0]])


def _scores(event: GateEvent) -> np.ndarray:
    assert event.scores_TE is not None, "a policy that looks at scores needs the logits"
    return event.scores_TE
