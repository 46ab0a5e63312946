"""Advice on caching, prefetching and placing a model's experts, from a trace alone.

Choices are made on every other request of each task and scored on the rest. With counts, everything that needs the
order of uses is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moetool.base.config import SHARE, Span, require_within
from moetool.base.errors import UsageError
from moetool.base.tables import numbered, percent
from moetool.caching.layer_slots import policy_label
from moetool.caching.policy import MIN_SLOTS
from moetool.trace.expert_counts import ExpertCounts
from moetool.trace.reader import Trace
from moetool.tuning.advice_counts import (
    PlacementGain,
    Stability,
    balance_gain,
    covered,
    halve,
    locality_gain,
    stability,
)
from moetool.tuning.affinity_lookahead import AffinityCounts, Lookahead, look_ahead
from moetool.tuning.candidates import best, servable, too_large
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay, whole_bytes

BANDWIDTHS: dict[str, float] = {
    "pcie3": 12e9,  # x16, as measured with pinned memory
    "pcie4": 25e9,
    "pcie5": 50e9,
    "nvme": 6e9,  # PCIe 4 x4, large reads
    "sata": 0.5e9,
}
DEVICE_MEMORY_BYTES_S = 1e12
POOLS = ("one", "layer")
"""Compared forms of the pool."""
BOUND = "belady"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceOptions:
    """Options of the advice.

    Attributes:
        shares: memory sizes, as shares of all experts.
        policies: cache policies to compare; `auto`: all lossless ones without a predictor.
        bandwidths: bytes/s of links for expert loads, by name.
        compute_s: compute seconds per token (None: the lower bound of reading its experts from device memory at
            `DEVICE_MEMORY_BYTES_S`).
        tokens: maximum tokens to replay from each half, in whole requests except the last.
        ahead_tokens: maximum tokens for the score of prefetching.
    """

    shares: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5, 0.75)
    policies: tuple[str, ...] = ("lru", "lfu", "foresight")
    bandwidths: Mapping[str, float] = field(
        default_factory=lambda: {name: BANDWIDTHS[name] for name in ("pcie4", "nvme")}
    )
    compute_s: float | None = None
    tokens: int = 1000
    ahead_tokens: int = 150

    def __post_init__(self) -> None:
        if not self.shares:
            raise UsageError("shares are empty, expected some")
        require_within(self, shares=SHARE)
        if not all(rate > 0 for rate in self.bandwidths.values()):
            raise UsageError(f"bandwidths are {dict(self.bandwidths)}, expected bytes/s above 0")
        require_within(self, compute_s=Span(0, above=True), tokens=Span(1), ahead_tokens=Span(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchLine:
    """Prefetching over one link: milliseconds per token on demand and with prefetching."""

    link: str
    bytes_s: float
    demand_ms: float
    prefetch_ms: float

    @property
    def gain(self) -> float:
        """Return the speed-up of a token."""
        return self.demand_ms / self.prefetch_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """The best cache for one memory size. Values are on held-out requests unless stated otherwise.

    Attributes:
        share: memory as a share of all experts; `budget_bytes` and `slots` the same in bytes and whole experts.
        pinned: hit rate of pinning the most used experts, by counts.
        pool: form of the pool (`POOLS`).
        policy: best policy on the choosing requests; None for counts.
        hit_rate_chosen, hit_rate, bound: its hit rate on the choosing and on the held-out requests, and Belady's on
            these.
        loads, bound_loads: experts loaded per decoded token, by that policy and by Belady; None without decoded tokens.
        rows: hit rate of every policy.
        lookahead: loads covered by prefetching by affinity.
        prefetch: times for each link.
    """

    share: float
    budget_bytes: int
    slots: int
    pinned: float
    pool: str = POOLS[0]
    policy: str | None = None
    hit_rate_chosen: float | None = None
    hit_rate: float | None = None
    bound: float | None = None
    loads: float | None = None
    bound_loads: float | None = None
    rows: Mapping[str, float] = field(default_factory=dict)
    lookahead: Lookahead | None = None
    prefetch: tuple[PrefetchLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice from a trace.

    Attributes:
        model, shape: name and MoE layers of the model, in words.
        sized: whether the size of an expert is known; else each counts as one byte.
        chosen_on, scored_on: choosing and scoring requests, in words.
        replayed_on: replayed part of `scored_on`, in words; None for counts.
        held_out, replay_held_out: whether counts, and requests to replay, are held out.
        lines: one per memory size.
        stability: stability of hot experts.
        placements: gains of planned placements.
        unknown: one sentence for each unknown, with the reason.
    """

    model: str
    shape: str
    sized: bool
    chosen_on: str
    scored_on: str
    replayed_on: str | None
    held_out: bool
    replay_held_out: bool
    lines: tuple[MemoryLine, ...]
    stability: Stability
    placements: tuple[PlacementGain, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; unknown values are null."""
        return _finite(asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def advise(
    workload: Trace | ExpertCounts,
    options: AdviceOptions | None = None,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Advice:
    """Read a trace, or counts, and advise on caching, prefetching and placement.

    Args:
        on_progress: called with the stage, the amount done and the total.

    Raises:
        UsageError: the trace has no tokens, or a policy is unknown.
        MismatchError: the trace is damaged, or lacks a column that a policy needs.
    """
    options = options or AdviceOptions()
    spec = workload.spec
    on_progress("counting", 0, 1)
    counts, used, held_out = halve(workload)
    if not counts.tokens_QHLE.any():
        raise UsageError(f"nothing to advise on: {workload.path} has no tokens; capture more prompts")
    unknown: list[str] = []
    replayed_on = None
    if not counts.halves:
        lone = "pass" if isinstance(workload, ExpertCounts) else "request"
        unknown.append(f"Nothing is held out: there is one {lone}, so every number is on its own training data.")
    elif not held_out:
        unknown.append(
            "There is one request: counts of its earlier half are scored on its later half, and policies are "
            "replayed on the requests of their choice."
        )
    budgets = [_budget(workload, share) for share in options.shares]
    pinned = covered(spec, counts.chosen_LE, counts.scored_LE, options.shares)
    lines = [
        MemoryLine(share=share, budget_bytes=budget, slots=budget // spec.slot_bytes, pinned=hits)
        for share, budget, hits in zip(options.shares, budgets, pinned, strict=True)
    ]
    if isinstance(workload, ExpertCounts):
        unknown.append(
            "Counts lack the order of uses: the best policy, its distance from Belady's bound, and whether "
            "prefetching pays are unknown. Record routes for these."
        )
    else:
        scored = held_out or used
        lines = _replayed(workload, lines, used, scored, options, unknown, on_progress)
        replayed_on = _words(workload, sample(workload, scored, options.tokens))
    on_progress("placing", 0, 1)
    gains = [balance_gain(counts), locality_gain(counts)]
    if gains[0] is None:
        unknown.append("Balance over GPUs is not planned: the experts of a layer do not divide among 8 GPUs.")
    if gains[1] is None:
        unknown.append("There is one task, so differences between tasks are unknown.")
    return Advice(
        model=spec.name,
        shape=f"{spec.num_layers} MoE layers of {spec.num_experts} experts, top-{max(spec.top_k_L)}",
        sized=spec.sized,
        chosen_on=_words(workload, used),
        scored_on=_words(workload, held_out or used),
        replayed_on=replayed_on,
        held_out=counts.halves,
        replay_held_out=bool(held_out),
        lines=tuple(lines),
        stability=stability(counts),
        placements=tuple(gain for gain in gains if gain is not None),
        unknown=tuple(unknown),
    )


def _budget(workload: Trace | ExpertCounts, share: float) -> int:
    spec = workload.spec
    whole = spec.total_experts * spec.slot_bytes if isinstance(workload, ExpertCounts) else whole_bytes(workload)
    return max(int(share * whole), MIN_SLOTS * spec.slot_bytes)


def _words(workload: Trace | ExpertCounts, requests: frozenset[int]) -> str:
    if isinstance(workload, ExpertCounts):
        return f"{len(requests):,} of {len(workload.requests):,} passes"
    table = workload.requests.to_pylist()
    tokens = sum(row["tokens"] for row in table if row["request"] in requests)
    return f"{numbered(len(requests), 'request')} with {numbered(tokens, 'token')}"


def sample(trace: Trace, requests: frozenset[int], tokens: int) -> frozenset[int]:
    """Sample requests, the tasks taking turns, up to this many tokens; at least one."""
    turns: dict[str, int] = {}
    ordered = []
    for row in trace.requests.to_pylist():
        if row["request"] in requests and row["tokens"]:
            turn = turns[row["task"]] = turns.get(row["task"], -1) + 1
            ordered.append((turn, row["task"], row["request"], row["tokens"]))
    chosen: list[int] = []
    spent = 0
    for _, _, request, size in sorted(ordered):
        if chosen and spent + size > tokens:
            continue
        chosen.append(request)
        spent += size
    return frozenset(chosen)


def _replayed(
    trace: Trace,
    lines: Sequence[MemoryLine],
    used: frozenset[int],
    held_out: frozenset[int],
    options: AdviceOptions,
    unknown: list[str],
    on_progress: Callable[[str, int, int], None],
) -> list[MemoryLine]:
    """Return the lines with the results of replays."""
    names = servable(trace, None) if "auto" in options.policies else list(options.policies)
    names = [name for name in dict.fromkeys(names) if name != BOUND]
    sequential = trace.manifest["composition"]["kind"] != "log"
    chosen_on, scored_on, ahead_on = (
        sample(trace, requests, tokens)
        for requests, tokens in ((used, options.tokens), (held_out, options.tokens), (held_out, options.ahead_tokens))
    )
    fitting = {}
    for line in lines:
        lost = too_large(names, trace.spec, line.budget_bytes, {})
        if fits := tuple(name for name in names if name not in lost):
            fitting[line.budget_bytes] = fits
        else:
            unknown.append(f"No policy fits into {percent(line.share, '.4g')} of the experts: {', '.join(lost)}.")
    rows: dict[tuple[int, str, str], ReplayRow] = {}
    shown: dict[tuple[int, str, str], ReplayRow] = {}
    layered = trace.spec.num_layers * trace.spec.slot_bytes
    for fits in dict.fromkeys(fitting.values()):  # read the trace once for all budgets with the same policies
        budgets = [budget for budget, held in fitting.items() if held == fits]
        for found, policies, requests in ((rows, fits, chosen_on), (shown, (*fits, BOUND), scored_on)):
            for pool in POOLS:
                on_progress("replaying", len(rows) + len(shown), 4 * len(lines) * len(names) + len(lines))
                setup = ReplaySetup(requests=requests, sequential=sequential, pool=pool)
                asked = [name for name in policies if pool == "one" or name != BOUND]
                held = [budget for budget in budgets if pool == "one" or budget >= layered]
                for row in replay(trace, asked, held, setup) if held else ():
                    found[row.budget_bytes, row.policy, pool] = row
    affinity = AffinityCounts(trace, used)
    made = []
    for done, line in enumerate(lines):
        on_progress("looking ahead", done, len(lines))
        if line.budget_bytes not in fitting:
            made.append(line)
            continue
        tried = {(name, pool): row for (budget, name, pool), row in rows.items() if budget == line.budget_bytes}
        choice = best(list(tried.values()))
        pool = next(pool for (_, pool), row in tried.items() if row is choice)
        found_here = {(name, form): row for (budget, name, form), row in shown.items() if budget == line.budget_bytes}
        ahead = look_ahead(trace, affinity, line.budget_bytes, ahead_on, sequential=sequential)
        made.append(_line(trace, line, choice, pool, found_here, ahead, options))
    if all(line.lookahead is None for line in made):
        unknown.append("No forward has a single new token, so prefetching while decoding cannot be scored.")
    return made


def _line(
    trace: Trace,
    line: MemoryLine,
    choice: ReplayRow,
    pool: str,
    found: Mapping[tuple[str, str], ReplayRow],
    ahead: Lookahead | None,
    options: AdviceOptions,
) -> MemoryLine:
    spec, shown, bound = trace.spec, found[choice.policy, pool], found[BOUND, "one"]
    active = sum(k * size for k, size in zip(spec.top_k_L, spec.expert_bytes_L, strict=True))
    compute_s = options.compute_s or active / DEVICE_MEMORY_BYTES_S
    links = []
    for link, bytes_s in options.bandwidths.items() if ahead is not None else ():
        assert ahead is not None
        demand_s, prefetch_s = ahead.seconds(spec.slot_bytes, bytes_s, compute_s)
        links.append(PrefetchLine(link=link, bytes_s=bytes_s, demand_ms=demand_s * 1e3, prefetch_ms=prefetch_s * 1e3))
    decodes = shown.decode_tokens > 0
    return MemoryLine(
        share=line.share,
        budget_bytes=line.budget_bytes,
        slots=shown.slots,
        pinned=line.pinned,
        pool=pool,
        policy=choice.policy,
        hit_rate_chosen=choice.counts.hit_rate,
        hit_rate=shown.counts.hit_rate,
        bound=bound.counts.hit_rate,
        loads=shown.loads_per_decode_token if decodes else None,
        bound_loads=bound.loads_per_decode_token if decodes else None,
        rows={policy_label(name, form): row.counts.hit_rate for (name, form), row in found.items()},
        lookahead=ahead,
        prefetch=tuple(links),
    )
