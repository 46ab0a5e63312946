"""The sampled requests of a report, and their routes in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetool.base.config import Span, require_within
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec, Phase
from moetool.trace.events import router_scores
from moetool.trace.reader import Trace

_SCORED_REQUESTS = 128  # most requests whose router probabilities are read


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Limits of a report's input. A larger trace is sampled by whole requests, as noted on the page.

    Attributes:
        choices: most counted choices of routers (tokens x layers x k).
        uses: most replayed uses (distinct experts of a forward in a layer).
        by: groups to compare: `task`, or the `label` of the prompt file.
        tokenizer: model whose tokenizer gives the text of tokens in the expert atlas (default: token ids).
    """

    choices: int = 40_000_000
    uses: int = 250_000
    seed: int = 0
    tokenizer: str | None = None
    by: str = "task"

    def __post_init__(self) -> None:
        if self.by not in ("task", "label"):
            raise UsageError(f"by is {self.by!r}, expected task or label")
        require_within(self, choices=Span(1), uses=Span(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRoutes:
    """The routes of some requests, request by request, each in the order of its forwards.

    Shapes: Q  tasks (in addition to the letters of `moetool.base.types`)

    Attributes:
        requests: numbers in the trace, ascending.
        tasks: names of the tasks, sorted.
        task_B: task of each request, an index of `tasks`.
        start_B: first row of each request; B + 1 values.
        decode_T: whether a row is a new token.
        iteration_T: iteration of each row.
        experts_TS: experts of each row, as in a trace.
    """

    spec: ModelSpec
    requests: tuple[int, ...]
    tasks: tuple[str, ...]
    task_B: np.ndarray
    start_B: np.ndarray
    decode_T: np.ndarray
    iteration_T: np.ndarray
    experts_TS: np.ndarray

    @property
    def stepwise(self) -> bool:
        """Whether there are new tokens, each an iteration; otherwise each prompt token counts as one."""
        return bool(self.decode_T.any())

    def rows(self, request: int) -> slice:
        return slice(int(self.start_B[request]), int(self.start_B[request + 1]))

    def steps(self, request: int) -> np.ndarray:
        """Return experts_TS of a request's one-token iterations: new tokens, or all tokens if the trace has none."""
        rows = self.rows(request)
        experts_TS: np.ndarray = self.experts_TS[rows]
        return experts_TS[self.decode_T[rows]] if self.stepwise else experts_TS

    def columns(self, layer: int) -> slice:
        """Return the columns of `experts_TS` of a layer."""
        start = sum(self.spec.top_k_L[:layer])
        return slice(start, start + self.spec.top_k_L[layer])

    @property
    def others(self) -> str:
        """Describe the held-out half."""
        return "other requests" if len(self.requests) > 1 else "the later half of the one request"

    def half_T(self) -> np.ndarray:
        """Return the half (0 or 1) of each row: every other request of a task; for a single request, its later rows."""
        half_T = np.zeros(len(self.experts_TS), np.int8)
        for task in range(len(self.tasks)):
            members = np.flatnonzero(self.task_B == task).tolist()
            for place, request in enumerate(members):
                rows = self.rows(request)
                half_T[rows] = place % 2
            if len(members) == 1:
                half_T[(rows.start + rows.stop + 1) // 2 : rows.stop] = 1
        return half_T


def task_names(trace: Trace, by: str = "task") -> dict[int, str]:
    """Return the name of each request: its task (with the dataset if ambiguous) or its label."""
    rows = trace.requests.to_pylist()
    if by == "label":
        return {row["request"]: row["label"] or "no label" for row in rows}
    datasets: dict[str, set[str]] = {}
    for row in rows:
        datasets.setdefault(row["task"], set()).add(row["dataset"])
    return {
        row["request"]: (
            f"{row['dataset']} / {row['task']}" if len(datasets[row["task"]]) > 1 else row["task"] or row["dataset"]
        )
        for row in rows
    }


def choose(tasks: Sequence[str], costs: Sequence[int], limit: int, seed: int) -> list[int]:
    """Choose requests that together cost at most `limit`, evenly from every task; at least one at any cost.

    All are chosen if they fit. Otherwise the tasks take turns with their requests in an order by `seed`, until one does
    not fit.
    """
    if sum(costs) <= limit:
        return list(range(len(tasks)))
    rng = np.random.default_rng(seed)
    turns: list[tuple[int, str, int]] = []
    for task in sorted(set(tasks)):
        members = [place for place, name in enumerate(tasks) if name == task]
        turns += [(turn, task, members[i]) for turn, i in enumerate(rng.permutation(len(members)).tolist())]
    chosen: list[int] = []
    spent = 0
    for _, _, place in sorted(turns):
        spent += costs[place]
        if chosen and spent > limit:
            break
        chosen.append(place)
    return sorted(chosen)


def read_routes(trace: Trace, options: ReportOptions) -> SampledRoutes:
    """Read the routes of as many requests as `options.choices` allows.

    Raises:
        UsageError: the trace has no tokens, or no two of any task.
        MismatchError: it is damaged.
    """
    spec, named = trace.spec, task_names(trace, options.by)
    table = [row for row in trace.requests.to_pylist() if row["tokens"]]
    if not table:
        raise UsageError(f"nothing to report: {trace.path} has no tokens; capture more prompts")
    costs = [row["tokens"] * sum(spec.top_k_L) for row in table]
    chosen = choose([named[row["request"]] for row in table], costs, options.choices, options.seed)
    requests = np.array(sorted(table[place]["request"] for place in chosen))
    parts = []
    for batch in trace.batches():
        mine = np.isin(batch.request_T, requests)
        if mine.any():
            rows = batch.select(mine)
            parts.append((rows.request_T, rows.phase_T == Phase.DECODE, rows.iteration_T, rows.experts_TS))
    request_T, decode_T, iteration_T, experts_TS = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(request_T, kind="stable")
    tasks = sorted({named[request] for request in requests.tolist()})
    routes = SampledRoutes(
        spec=spec,
        requests=tuple(requests.tolist()),
        tasks=tuple(tasks),
        task_B=np.array([tasks.index(named[request]) for request in requests.tolist()]),
        start_B=np.append(np.searchsorted(request_T[order], requests), len(order)),
        decode_T=decode_T[order],
        iteration_T=iteration_T[order],
        experts_TS=experts_TS[order],
    )
    if not routes.half_T().any():
        raise UsageError(f"{trace.path} has one token of each task, too few for a held-out half; capture more prompts")
    return routes


def choose_replayed(routes: SampledRoutes, options: ReportOptions) -> frozenset[int]:
    """Choose requests with at most `options.uses` uses of experts; return their numbers.

    A prompt's uses are bounded from above: its tokens times k, at most every expert of each layer.
    """
    spec, costs = routes.spec, []
    for request in range(len(routes.requests)):
        decode_T = routes.decode_T[routes.rows(request)]
        new = int(decode_T.sum())
        prompt = len(decode_T) - new
        sizes = zip(spec.num_experts_L, spec.top_k_L, strict=True)
        costs.append(sum(new * top_k + min(num_experts, prompt * top_k) for num_experts, top_k in sizes))
    tasks = [routes.tasks[task] for task in routes.task_B.tolist()]
    return frozenset(routes.requests[place] for place in choose(tasks, costs, options.uses, options.seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterEntropy:
    """Entropy of the routers' probabilities over all experts, in bits: means over the requests of a task.

    Attributes:
        num_requests: number of requests read.

    Shapes:
        token_QL: of each token's distribution; request_QL: of the mean distribution of a request's tokens. NaN for a
        task without sampled requests, and for layers whose router has no scores.
    """

    num_requests: int
    token_QL: np.ndarray
    request_QL: np.ndarray


def read_router_entropy(trace: Trace, routes: SampledRoutes, options: ReportOptions) -> RouterEntropy | None:
    """Return the router entropy of the tokens of `SampledRoutes.steps`; None for a trace without logits.

    Scores that are not distributions (sigmoid) are divided by their sum.
    """
    if "logits" not in trace.columns:
        return None
    spec = routes.spec
    tasks = [routes.tasks[task] for task in routes.task_B.tolist()]
    chosen = choose(tasks, [1] * len(tasks), _SCORED_REQUESTS, options.seed)
    place_of = {routes.requests[place]: i for i, place in enumerate(chosen)}
    sum_BLE = np.zeros((len(chosen), spec.num_layers, spec.num_experts))
    bits_BL, tokens_B = np.zeros((len(chosen), spec.num_layers)), np.zeros(len(chosen))
    wide = np.concatenate([[0], np.cumsum(spec.num_experts_L)])
    for batch in trace.batches(["logits"]):
        mine = np.isin(batch.request_T, list(place_of))
        if routes.stepwise:
            mine &= batch.phase_T == Phase.DECODE
        if not mine.any():
            continue
        rows = batch.select(mine)
        assert rows.logits_TF is not None
        place_T = np.array([place_of[request] for request in rows.request_T.tolist()])
        np.add.at(tokens_B, place_T, 1)
        for layer, num_experts in enumerate(spec.num_experts_L):
            logits_TE = rows.logits_TF[:, wide[layer] : wide[layer + 1]].astype(np.float32)
            scores_TE = router_scores(logits_TE, spec.score_function).astype(np.float64)
            chance_TE = scores_TE / np.maximum(scores_TE.sum(axis=1, keepdims=True), 1e-30)
            np.add.at(bits_BL[:, layer], place_T, entropy(chance_TE))
            np.add.at(sum_BLE[:, layer, :num_experts], place_T, chance_TE)
    used_B = tokens_B > 0
    with np.errstate(invalid="ignore"):
        token_BL, request_BL = bits_BL / tokens_B[:, None], entropy(sum_BLE)
    silent_L = ~np.array(spec.has_logits_L)
    token_BL[:, silent_L] = request_BL[:, silent_L] = np.nan
    task_B = routes.task_B[chosen]
    members_QB = [used_B & (task_B == task) for task in range(len(routes.tasks))]
    empty_L = np.full(spec.num_layers, np.nan)
    return RouterEntropy(
        num_requests=int(used_B.sum()),
        token_QL=np.stack([token_BL[mine].mean(axis=0) if mine.any() else empty_L for mine in members_QB]),
        request_QL=np.stack([request_BL[mine].mean(axis=0) if mine.any() else empty_L for mine in members_QB]),
    )


def entropy(counts: np.ndarray) -> np.ndarray:
    """Return the Shannon entropy in bits of counts along the last axis, normalized; 0 where all are 0."""
    total = counts.sum(axis=-1, keepdims=True)
    share = counts / np.maximum(total, np.finfo(np.float64).tiny)
    bits: np.ndarray = -(share * np.log2(np.where(share > 0, share, 1.0))).sum(axis=-1)
    return bits + 0.0  # no minus zero
