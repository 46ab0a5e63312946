"""Measures of routes: popularity, skew, coverage and entropy.

Shapes, in addition to the letters of `moetool.base.types`: Q tasks, H the two halves of each task's requests
(`SampledRoutes.half_T`).
"""

from dataclasses import dataclass

import numpy as np

from moetool.report.sample import SampledRoutes, entropy
from moetool.trace.diff import divergence
from moetool.trace.expert_counts import count_experts
from moetool.tuning.advice_counts import covered

SHARES = tuple(i / 16 for i in range(17))
"""Shares of a layer's experts at which coverage is computed."""
_COVERED_TASKS = 8
_GROWTH_REQUESTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Popularity:
    """Expert popularity.

    Attributes:
        tokens_QHLE: tokens of each half of each task that use an expert.
        uneven_L: tokens of the most used expert over its layer's mean (max / mean; 1 is even).
        gini_L: Gini coefficient of a layer's experts (0 is even).
        uneven_QL, gini_QL: the same for each task.
        tasks_apart_L: Jensen-Shannon divergence in bits between halves of two tasks, mean over the pairs of tasks; NaN
            with one task.
        halves_apart_L: the same between the two halves of one task, mean over the tasks: the level of chance.
    """

    tokens_QHLE: np.ndarray
    uneven_L: np.ndarray
    gini_L: np.ndarray
    uneven_QL: np.ndarray
    gini_QL: np.ndarray
    tasks_apart_L: np.ndarray
    halves_apart_L: np.ndarray

    @property
    def tokens_QLE(self) -> np.ndarray:
        return self.tokens_QHLE.sum(axis=1)

    @property
    def tokens_LE(self) -> np.ndarray:
        return self.tokens_QHLE.sum(axis=(0, 1))


def popularity(routes: SampledRoutes) -> Popularity:
    """Count expert use by task and half."""
    spec, half_T = routes.spec, routes.half_T()
    task_T = np.repeat(routes.task_B, np.diff(routes.start_B))
    tokens_QHLE = np.stack(
        [
            [count_experts(spec, routes.experts_TS[(task_T == task) & (half_T == half)]) for half in (0, 1)]
            for task in range(len(routes.tasks))
        ]
    )
    tokens_LE = tokens_QHLE.sum(axis=(0, 1))
    largest = _largest_tasks(tokens_QHLE)
    pairs = [(a, b) for a in largest for b in largest if a < b]
    across = [(divergence(tokens_QHLE[a, 0], tokens_QHLE[b, 1])) for a, b in pairs]
    skews_QL2 = np.array([_skews(routes, counts_LE) for counts_LE in tokens_QHLE.sum(axis=1)])
    skews_L2 = np.array(_skews(routes, tokens_LE))
    return Popularity(
        tokens_QHLE=tokens_QHLE,
        uneven_L=skews_L2[:, 0],
        gini_L=skews_L2[:, 1],
        uneven_QL=skews_QL2[..., 0],
        gini_QL=skews_QL2[..., 1],
        tasks_apart_L=np.mean(across, axis=0) if across else np.full(spec.num_layers, np.nan),
        halves_apart_L=np.mean([divergence(tokens_QHLE[a, 0], tokens_QHLE[a, 1]) for a in largest], axis=0),
    )


def _skews(routes: SampledRoutes, tokens_LE: np.ndarray) -> list[tuple[float, float]]:
    """Return max / mean and Gini coefficient of each layer."""
    loads = [row[:num] for row, num in zip(tokens_LE, routes.spec.num_experts_L, strict=True)]
    return [(float(load_E.max() / load_E.mean()), gini(load_E)) for load_E in loads]


def gini(load_E: np.ndarray) -> float:
    """Return the Gini coefficient: 0 for equal loads, (n - 1) / n where one of n has all."""
    ordered, num = np.sort(load_E), len(load_E)
    return float(((2 * np.arange(1, num + 1) - num - 1) * ordered).sum() / (num * ordered.sum()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Share of a task's choices taken by the most used experts of each layer, on held-out requests.

    Attributes:
        tasks: number of compared tasks: those with the most tokens.
        own: experts counted on the other half of the same task.
        other: experts counted on another task, mean over pairs; empty with one task.
        mixed: experts counted on the other half of all tasks together.

    Each has a value for every share of `SHARES`, the mean over layers and tasks.
    """

    tasks: int
    own: tuple[float, ...]
    other: tuple[float, ...]
    mixed: tuple[float, ...]


def coverage(routes: SampledRoutes, found: Popularity) -> Coverage:
    """Choose the most used experts of each layer on half 0, and count on half 1."""
    tasks = _largest_tasks(found.tokens_QHLE)
    counted, held = found.tokens_QHLE[tasks, 0], found.tokens_QHLE[tasks, 1]

    def kept(by_LE: np.ndarray, on_LE: np.ndarray) -> list[float]:
        return covered(routes.spec, by_LE, on_LE, SHARES)

    some = [i for i in range(len(tasks)) if held[i].any()]
    own = [kept(counted[i], held[i]) for i in some]
    other = [kept(counted[i], held[j]) for i in range(len(tasks)) for j in some if i != j and counted[i].any()]
    mixed = [kept(counted.sum(axis=0), held[i]) for i in some]
    means = [tuple(np.mean(part, axis=0).tolist()) if part else () for part in (own, other, mixed)]
    return Coverage(tasks=len(tasks), own=means[0], other=means[1], mixed=means[2])


def _largest_tasks(tokens_QHLE: np.ndarray) -> list[int]:
    """Return the tasks with the most tokens, few enough for pairwise comparison, ascending."""
    order = np.argsort(-tokens_QHLE.sum(axis=(1, 2, 3)), kind="stable")[:_COVERED_TASKS]
    return sorted(order.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Entropy of expert use in bits, at the levels of FineMoE's Figure 3.

    Attributes:
        token_L: entropy of one token, which uses k experts equally: log2 k.
        prompt_L: entropy of a whole prompt as one iteration, mean over requests; NaN without such iterations.
        request_QL: entropy of all steps (`SampledRoutes.steps`) of a request, mean over the requests of a task.
        task_QL: entropy of all tokens of a task.
        steps: numbers of steps, ascending.
        growth_QN: entropy of the first steps of a request together, mean over layers and requests; NaN where fewer than
            half of a task's requests have as many steps.
    """

    token_L: np.ndarray
    prompt_L: np.ndarray
    request_QL: np.ndarray
    task_QL: np.ndarray
    steps: tuple[int, ...]
    growth_QN: np.ndarray


def spread(routes: SampledRoutes, found: Popularity) -> Spread:
    """Return the entropies of expert use, request by request.

    Source: FineMoE § 2.4, Figure 3 (b, c). Deviation: (c) uses requests with equally many steps, at most 64 of a task;
    the paper does not specify this.
    """
    spec = routes.spec
    prompts, requests = [], []
    lengths_B = np.array([len(routes.steps(request)) for request in range(len(routes.requests))])
    for request in range(len(lengths_B)):
        rows = routes.rows(request)
        prompt_T = ~routes.decode_T[rows]
        if prompt_T.any() and routes.stepwise:
            prompts.append(entropy(count_experts(spec, routes.experts_TS[rows][prompt_T])))
        steps_TS = routes.steps(request)
        requests.append(entropy(count_experts(spec, steps_TS)) if len(steps_TS) else np.full(spec.num_layers, np.nan))
    request_BL = np.stack(requests)
    most = max(1, int(max(_reached(lengths_B[routes.task_B == task]) for task in range(len(routes.tasks)))))
    steps = sorted({round(step) for step in np.geomspace(1, most, 12)})
    growth_QN = np.full((len(routes.tasks), len(steps)), np.nan)
    for task in range(len(routes.tasks)):
        members = np.flatnonzero(routes.task_B == task)
        reached = _reached(lengths_B[members])
        chosen = members[lengths_B[members] >= max(1, reached)][:_GROWTH_REQUESTS].tolist()
        for i, step in enumerate(steps):
            if step <= reached:
                bits = [entropy(count_experts(spec, routes.steps(request)[:step])).mean() for request in chosen]
                growth_QN[task, i] = np.mean(bits)
    return Spread(
        token_L=np.log2(spec.top_k_L),
        prompt_L=np.mean(prompts, axis=0) if prompts else np.full(spec.num_layers, np.nan),
        request_QL=np.stack([_mean_known(request_BL[routes.task_B == task]) for task in range(len(routes.tasks))]),
        task_QL=entropy(found.tokens_QLE),
        steps=tuple(steps),
        growth_QN=growth_QN,
    )


def _reached(lengths: np.ndarray) -> int:
    """Return the number of steps that half of the requests have."""
    return int(np.sort(lengths)[::-1][(len(lengths) - 1) // 2])


def _mean_known(values_BL: np.ndarray) -> np.ndarray:
    """Return the mean over rows that are not NaN; NaN where all are."""
    known = values_BL[~np.isnan(values_BL).any(axis=1)]
    return known.mean(axis=0) if len(known) else np.full(values_BL.shape[1], np.nan)
