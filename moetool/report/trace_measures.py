"""The measures of a trace for its report, as numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from moetool.base.config import parse_bytes
from moetool.caching.policy import MIN_SLOTS
from moetool.report.measures import SHARES, Coverage, Popularity, Spread, coverage, popularity, spread
from moetool.report.reuse import Reuse, read_reuse
from moetool.report.sample import (
    ReportOptions,
    RouterEntropy,
    SampledRoutes,
    choose_replayed,
    read_router_entropy,
    read_routes,
)
from moetool.report.transitions import Affinity, affinity, lift
from moetool.trace.reader import Trace
from moetool.tuning.candidates import too_large
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay, whole_bytes

BUDGETS = ("6.25%", "12.5%", "25%", "50%", "75%")
POLICIES = ("lru", "lfu")
BOUND = "belady"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMeasures:
    """Measures of a trace.

    Attributes:
        info: `Trace.describe` of it.
        routes: the counted routes; all measures but `reuse` and `rows` are of these requests.
        replayed: numbers of the requests behind `reuse` and `rows`.
        sequential: whether they were replayed one after the other or as recorded.
        lifts: `affinity.lift` of some layers, by the layer's index (in JSON by its absolute id).
        rows: rows of `moetool.tuning.replay`, by policy and budget; `BOUND` is the last policy.
        whole_bytes: the budget that holds every expert.
    """

    info: dict[str, Any]
    routes: SampledRoutes
    popularity: Popularity
    coverage: Coverage
    spread: Spread
    router: RouterEntropy | None
    affinity: Affinity
    lifts: dict[int, np.ndarray]
    reuse: Reuse
    replayed: tuple[int, ...]
    replayed_tokens: int
    sequential: bool
    rows: tuple[ReplayRow, ...]
    whole_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as a JSON object; unknown values are null."""
        routes, reuse = self.routes, self.reuse
        return {
            "trace": self.info,
            "tasks": list(routes.tasks),
            "counted": {"requests": len(routes.requests), "tokens": len(routes.experts_TS)},
            "replayed": {
                "requests": list(self.replayed),
                "tokens": self.replayed_tokens,
                "order": "sequential" if self.sequential else "recorded",
            },
            "popularity": {"tokens_QLE": plain(self.popularity.tokens_QLE), **plain(self.popularity, "tokens_QHLE")},
            "coverage": {"shares": list(SHARES), **plain(self.coverage)},
            "entropy": plain(self.spread),
            "router_entropy": plain(self.router),
            "affinity": {
                **plain(self.affinity),
                "lift_EE": {str(routes.spec.layer_ids_L[layer]): plain(lifts) for layer, lifts in self.lifts.items()},
            },
            "reuse": {
                **plain(reuse, "distances"),
                "slots_for": {str(share): reuse.slots_for(share) for share in (0.5, 0.75, 0.9, 0.99)},
                "lru_hit_rate": [
                    {"slots": slots, "hit_rate": reuse.share_within(slots)} for slots in curve_slots(routes)
                ],
            },
            "replay": [row.to_json() for row in self.rows],
        }


def plain(value: Any, *without: str) -> Any:
    """Return a dataclass of arrays as JSON values: five decimals, null for NaN."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if f.name not in without}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 5) if np.isfinite(value) else None
    return value


def curve_slots(routes: SampledRoutes) -> list[int]:
    """Return pool sizes from 0 to every expert, in at most 256 steps."""
    total = routes.spec.total_experts
    return sorted({round(total * i / 256) for i in range(257)})


def measure(
    trace: Trace,
    *,
    policies: Sequence[str] = POLICIES,
    budgets: Sequence[str] = (),
    policy_options: Mapping[str, Mapping[str, Any]] | None = None,
    options: ReportOptions | None = None,
    on_progress: Callable[[int], None] = lambda percent: None,
) -> TraceMeasures:
    """Measure a trace for `moetool.report.trace_page`.

    Args:
        policies: policies to replay, in addition to Belady's bound.
        budgets: expert memory, in bytes or as shares of all experts (default: those of `BUDGETS` that hold two experts
            and the policies' minimum).
        policy_options: by policy, as in `moetool.tuning.replay`.
        on_progress: called with the completed percentage.

    Raises:
        UsageError: the trace has no tokens, or a policy is unknown or needs a predictor.
        MismatchError: the trace lacks a column that a policy needs, or is damaged.
        CapacityError: a budget is too small for a policy.
    """
    options = options or ReportOptions()
    spec = trace.spec
    routes = read_routes(trace, options)
    found = popularity(routes)
    chained = affinity(routes)
    on_progress(10)
    router = read_router_entropy(trace, routes, options)
    on_progress(20)
    replayed = choose_replayed(routes, options)
    sequential = trace.manifest["composition"]["kind"] != "log"
    reuse = read_reuse(trace, replayed, sequential=sequential)
    on_progress(30)
    whole = whole_bytes(trace)
    names = list(dict.fromkeys([*(name for name in policies if name != BOUND), BOUND]))
    chosen = [parse_bytes(text, whole) for text in budgets or BUDGETS]
    if not budgets:
        roomy = [budget for budget in chosen if budget >= MIN_SLOTS * spec.slot_bytes]
        chosen = [budget for budget in roomy if not too_large(names, spec, budget, policy_options or {})] or [whole]
    rows: list[ReplayRow] = []
    setup = ReplaySetup(requests=replayed, sequential=sequential, options=policy_options or {})
    for done, name in enumerate(names):
        rows += replay(trace, [name], chosen, setup)
        on_progress(30 + 70 * (done + 1) // len(names))
    ends = dict(zip(routes.requests, np.diff(routes.start_B).tolist(), strict=True))
    return TraceMeasures(
        info=trace.describe(),
        routes=routes,
        popularity=found,
        coverage=coverage(routes, found),
        spread=spread(routes, found),
        router=router,
        affinity=chained,
        lifts={layer: lift(routes, layer) for layer in _telling_pairs(chained)},
        reuse=reuse,
        replayed=tuple(sorted(replayed)),
        replayed_tokens=sum(ends[request] for request in replayed),
        sequential=sequential,
        rows=tuple(rows),
        whole_bytes=whole,
    )


def _telling_pairs(chained: Affinity) -> list[int]:
    """Return the layers with the strongest, median and weakest affinity to the next by held-out match."""
    order = np.argsort(-np.nan_to_num(chained.match_M), kind="stable").tolist()
    return sorted({order[0], order[len(order) // 2], order[-1]}) if order else []
