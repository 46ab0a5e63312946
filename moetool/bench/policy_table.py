"""Replay every policy with several budgets on several traces, cold and warm: loads per needed expert, and the bound."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moetool.base.errors import UsageError, unknown_name
from moetool.base.tables import TextTable, percent
from moetool.bench.bench_result import BenchResult, Row, recorded
from moetool.bench.experiment_figure import ExperimentResult
from moetool.caching.layer_slots import policy_label
from moetool.caching.policy import slots_within
from moetool.trace.reader import Trace
from moetool.tuning.candidates import servable, too_large
from moetool.tuning.replay import ReplayRow, ReplaySetup
from moetool.tuning.replay_jobs import replay_with_jobs

BOUND = "belady"
BY_LAYER = ("lru", "lfu", "lfru", "foresight")
"""Policies that also run with a pool per layer."""
WHOLE_LAYERS = ("layerwise", "moesys")
"""Policies that load every layer whole in every forward, whatever ran before: replayed from the cold start alone."""
STARTS = {
    "cold": "from an empty pool",
    "task": "after other requests of the task",
    "others": "after requests of other tasks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTableOptions:
    """Options of the bench.

    Attributes:
        shares: budgets as shares of all experts.
        tokens: approximate tokens of each trace that count, in whole requests; as many warm pools and memories.
        starts: names of `STARTS`: what a replay has seen before the tokens that count.
        task: task that counts (default: each trace's last one).
        jobs: processes of a replay; 0: one per processor for a large one.

    Raises:
        UsageError: a share is not above 0 and at most 1, or a start is unknown.
    """

    shares: tuple[float, ...]
    tokens: int
    starts: tuple[str, ...] = tuple(STARTS)
    task: str | None = None
    jobs: int = 0

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise UsageError(
                f"budgets are {list(self.shares)}, expected shares of all experts, above 0% and up to 100%"
            )
        if unknown := [name for name in self.starts if name not in STARTS]:
            raise unknown_name("start", unknown[0], STARTS)


def bench_policies(
    traces: Sequence[Path],
    options: PolicyTableOptions,
    on_trace: Callable[[int], object] = lambda number: None,
    file: Path | None = None,
) -> BenchResult:
    """Replay every lossless policy that needs no training, and the bound.

    The same requests of one task count under each start (`choose_requests`). A row is one policy with one budget on one
    trace from one start: its name, with `by layer` for equal slots per layer; `hit_rate`, the share of needed experts
    that were resident; `loaded`, loads (on-demand and prefetch) per needed expert: with equal expert sizes, moved
    bytes / needed bytes; `within`, half of its 95 % interval over requests; `hosted`, the share that the host computed
    instead.

    Args:
        on_trace: called after each trace.
        file: see `BenchResult`.

    Raises:
        UsageError: two traces have one name, or a trace has no such task.
    """
    if len({path.name for path in traces}) < len(traces):
        raise UsageError("two traces have the same directory name; rename one")
    with recorded("policies", options, file) as made:
        for number, path in enumerate(traces, start=1):
            trace = Trace(path)
            chosen = choose_requests(trace, options.tokens, options.task)
            made.notes += [f"{path.name}: {note}" for note in chosen.notes(options.starts)]
            for start in options.starts:
                for row in _rows(trace, start, chosen, options):
                    made.add(**row)
            on_trace(number)
    return made


def _start(row: Row) -> str:
    return row.get("start", "cold")  # results of 0.1 have no other


def tables(made: BenchResult) -> Iterator[Any]:
    """A table per trace: fewest loads at the middle budget first, on the device or computed on the host."""
    shares, starts = sorted(set(made.options["shares"])), made.options.get("starts", ["cold"])
    middle = shares[len(shares) // 2]
    for trace in dict.fromkeys(row["trace"] for row in made.rows):
        cells = {(row["policy"], _start(row), row["share"]): row for row in made.of(trace=trace)}
        mine = [start for start in starts if any(key[1] == start for key in cells)]

        def loads(policy: str, cells: dict[Any, Row] = cells, start: str = mine[-1]) -> float:
            row = cells.get((policy, start, middle))
            return 2.0 if row is None else row["loaded"] + row["hosted"]

        yield TextTable(
            title=f"{trace}: loads per needed expert ± 95 % interval over requests, by share of the experts in memory",
            columns=("policy", *(f"{start} {percent(share)}" for start in mine for share in shares)),
            rows=[
                [policy, *(_spelled(cells.get((policy, start, share))) for start in mine for share in shares)]
                for policy in sorted(dict.fromkeys(policy for policy, _, _ in cells), key=loads)
            ],
            notes=(
                *(f"{start}: {STARTS[start]}" for start in mine),
                f"{' and '.join(WHOLE_LAYERS)} load every layer whole, whatever ran before: cold only",
            ),
        )


def figures(made: BenchResult) -> dict[str, ExperimentResult]:
    """Loads by share of the experts in memory: a figure per trace and start, of policies that load the fewest."""
    found = {}
    for trace, start in dict.fromkeys((row["trace"], _start(row)) for row in made.rows):
        rows = [row for row in made.of(trace=trace) if _start(row) == start]
        shares = sorted({row["share"] for row in rows})
        whole = {
            name: [row for row in rows if row["policy"] == name]
            for name in dict.fromkeys(row["policy"] for row in rows)
        }
        whole = {name: mine for name, mine in whole.items() if len(mine) == len(shares) and mine[0]["loaded"]}
        order = sorted(whole, key=lambda name: sum(row["loaded"] for row in whole[name]))[:_DRAWN]
        curves = {name: [(tuple(shares), tuple(row["loaded"] for row in whole[name]))] for name in order}
        found[f"policies-{trace}-{start}"] = ExperimentResult(
            values={name: [whole[name][len(shares) // 2]["loaded"]] for name in order},
            what=f"loads per needed expert with {percent(shares[len(shares) // 2])} of the experts in memory",
            unit="",
            on=f"{trace}, {STARTS[start]}",
            curves=curves,
            axes=("share of the experts in memory", "loads per needed expert"),
            exact=True,
        )
    return found


_DRAWN = 6  # policies of a figure


def _spelled(row: Row | None) -> str:
    if row is None:
        return "-"
    within = "" if row.get("within") is None else f" ± {row['within']:.3f}".replace("0.", ".")
    hosted = f" + {row['hosted']:.3f} on the host" if row["hosted"] else ""
    return f"{row['loaded']:.3f}{within}{hosted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRequests:
    """The requests of a trace that count, and those that run before them, all in the order of the trace.

    Attributes:
        counted: its requests that count.
        before: by start, the requests that run before them; none for a start that the trace has no requests for.
        half: tokens of the first half of the one request of a trace, which then is its own start `task`; 0 for others.
    """

    task: str
    counted: tuple[int, ...]
    before: dict[str, tuple[int, ...]]
    half: int
    tokens: dict[int, int]

    def size(self, requests: Sequence[int]) -> int:
        """Return the tokens of some requests."""
        return sum(self.tokens[request] for request in requests)

    def notes(self, starts: Sequence[str]) -> Iterator[str]:
        """Say which requests count, and which starts there are none for."""
        yield f"{len(self.counted)} requests of {self.task or 'no task'} count, {self.size(self.counted):,} tokens"
        for start in starts:
            if start == "task" and self.half:
                yield f"task: one request, so its first {self.half:,} tokens run before, and the others count"
            elif start != "cold" and not self.before[start]:
                yield f"{start}: no such requests before these"
            elif start != "cold":
                before = self.before[start]
                yield f"{start}: {len(before)} requests run before, {self.size(before):,} tokens"


def choose_requests(trace: Trace, tokens: int, task: str | None = None) -> ChosenRequests:
    """Choose evenly spaced requests: of the later half of a task's to count, of its earlier half and of other tasks.

    Args:
        tokens: approximate tokens of each choice; at least one request.
        task: the task that counts (default: the last one).

    Raises:
        UsageError: there is no such task.
    """
    rows = [row for row in trace.requests.to_pylist() if row["tokens"]]
    names = list(dict.fromkeys(row["task"] for row in rows))
    if not rows or (task is not None and task not in names):
        raise unknown_name(f"task of {trace.path}:", task or "", names)
    task = names[-1] if task is None else task
    sizes = {row["request"]: row["tokens"] for row in rows}
    mine = [row["request"] for row in rows if row["task"] == task]
    counted = spaced_requests(mine[len(mine) // 2 :], sizes, tokens)
    first = list(sizes).index(counted[0])
    earlier = list(sizes)[:first]
    before = {
        "cold": (),
        "task": spaced_requests(mine[: len(mine) // 2], sizes, tokens),
        "others": spaced_requests([request for request in earlier if request not in mine], sizes, tokens),
    }
    half = sizes[mine[0]] // 2 if len(rows) == 1 else 0
    return ChosenRequests(task=task, counted=counted, before=before, half=half, tokens=sizes)


def spaced_requests(requests: Sequence[int], sizes: dict[int, int], tokens: int) -> tuple[int, ...]:
    """Return evenly spaced requests of about this number of tokens, at least one if there are any."""
    whole = sum(sizes[request] for request in requests)
    count = max(1, round(len(requests) * min(1.0, tokens / whole))) if whole else 0
    return tuple(requests[int((i + 0.5) * len(requests) / count)] for i in range(count))


def _rows(trace: Trace, start: str, chosen: ChosenRequests, options: PolicyTableOptions) -> Iterator[Row]:
    before = chosen.before[start]
    warm = chosen.half if start == "task" and chosen.half else chosen.size(before)
    if start != "cold" and not warm:
        return
    spec = trace.spec
    requests = frozenset((*before, *chosen.counted))
    setup = ReplaySetup(requests=requests, sequential=True, warm_tokens=warm, pool_unit="slots", jobs=options.jobs)
    names = [name for name in servable(trace, None) if start == "cold" or name not in WHOLE_LAYERS]
    for share in options.shares:
        budget = max(2, round(share * spec.total_experts)) * spec.slot_bytes

        def row(name: str, found: ReplayRow, share: float = share) -> Row:
            counts = found.counts
            return {
                "trace": trace.path.name,
                "start": start,
                "policy": name,
                "share": share,
                "slots": found.slots,
                "needed": counts.needed,
                "hit_rate": counts.hit_rate,
                "loaded": counts.loads / counts.needed,
                "within": _half_interval([(each.loads, each.needed) for each in found.requests]),
                "hosted": counts.hosted / counts.needed,
            }

        lost = too_large(names, spec, budget, {})
        fit = [name for name in names if name not in lost]
        yield from (row(found.policy, found) for found in replay_with_jobs(trace, [*fit, BOUND], [budget], setup))
        if slots_within(spec, budget) >= spec.num_layers:
            for found in replay_with_jobs(trace, BY_LAYER, [budget], replace(setup, pool="layer")):
                yield row(policy_label(found.policy, "layer"), found)


def _half_interval(requests: Sequence[tuple[int, int]]) -> float | None:
    """Return half of the 95 % interval of loads per needed expert over requests, by the variance of a ratio's mean."""
    if len(requests) < 2:
        return None
    from scipy.special import stdtrit

    loads_R, needed_R = np.array(requests, float).T
    count, ratio = len(requests), loads_R.sum() / needed_R.sum()
    spread = math.sqrt(count / (count - 1) * float(((loads_R - ratio * needed_R) ** 2).sum())) / float(needed_R.sum())
    return float(stdtrit(count - 1, 0.975)) * spread
