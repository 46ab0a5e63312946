"""Replay every policy with several budgets on several traces: hits and bytes, against the bound."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetool.base.errors import UsageError
from moetool.base.tables import TextTable, percent
from moetool.bench.bench_result import BenchResult, Row, recorded
from moetool.caching.policy import slots_within
from moetool.caching.policy_changes import PolicyChoice
from moetool.trace.reader import Trace
from moetool.tuning.candidates import servable, too_large
from moetool.tuning.replay import ReplayRow, ReplaySetup
from moetool.tuning.replay_jobs import replay_with_jobs

BOUND = "belady"
BY_LAYER = ("lru", "lfu", "lfru", "foresight")
"""Policies that also run with a pool per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTableOptions:
    """Options of the bench.

    Attributes:
        shares: budgets as shares of all experts.
        tokens: approximate tokens of each trace's first requests, at least one request.
        warm: share of these tokens, the first ones, that count in no cell.
        jobs: processes of a replay; 0: one per processor for a large one.

    Raises:
        UsageError: a share is not above 0 and at most 1, or `warm` is not below 1.
    """

    shares: tuple[float, ...]
    tokens: int
    warm: float = 0.0
    jobs: int = 0

    def __post_init__(self) -> None:
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise UsageError(
                f"budgets are {list(self.shares)}, expected shares of all experts, above 0% and up to 100%"
            )
        if not 0 <= self.warm < 1:
            raise UsageError(f"warm is {self.warm}, expected a share of the tokens below 100%")


def bench_policies(
    traces: Sequence[Path],
    options: PolicyTableOptions,
    on_trace: Callable[[int], object] = lambda number: None,
    file: Path | None = None,
) -> BenchResult:
    """Replay every lossless policy that needs no training, and the bound.

    A row is one policy with one budget on one trace: its name, with `by layer` for equal slots per layer; `hit_rate`,
    the share of needed experts that were resident; `loaded`, loads (on-demand and prefetch) per needed expert: with
    equal expert sizes, moved bytes / needed bytes; `hosted`, the share that the host computed instead.

    Args:
        on_trace: called after each trace.
        file: see `BenchResult`.

    Raises:
        UsageError: two traces have one name.
    """
    if len({path.name for path in traces}) < len(traces):
        raise UsageError("two traces have the same directory name; rename one")
    with recorded("policies", options, file) as made:
        for number, path in enumerate(traces, start=1):
            for row in _rows(Trace(path), options):
                made.add(**row)
            on_trace(number)
    return made


def tables(made: BenchResult) -> Iterator[Any]:
    """A table per trace: fewest bytes at the middle budget first, loaded or computed on the host."""
    shares = sorted(set(made.options["shares"]))
    middle = shares[len(shares) // 2]
    for trace in dict.fromkeys(row["trace"] for row in made.rows):
        cells = {(row["policy"], row["share"]): row for row in made.of(trace=trace)}

        def reads(policy: str, cells: dict[Any, Row] = cells) -> float:
            row = cells.get((policy, middle))
            return 2.0 if row is None else row["loaded"] + row["hosted"]

        yield TextTable(
            title=f"{trace}: loads per needed expert (hit rate), by share of the experts in memory",
            columns=("policy", *map(percent, shares)),
            rows=[
                [policy, *(_spelled(cells.get((policy, share))) for share in shares)]
                for policy in sorted(dict.fromkeys(policy for policy, _ in cells), key=reads)
            ],
        )


def _spelled(row: Row | None) -> str:
    if row is None:
        return "-"
    hosted = f" + {row['hosted']:.3f} on the host" if row["hosted"] else ""
    return f"{row['loaded']:.3f}{hosted} ({row['hit_rate']:.3f})"


def _rows(trace: Trace, options: PolicyTableOptions) -> Iterator[Row]:
    spec = trace.spec
    requests, total = first_requests(trace, options.tokens)
    setup = ReplaySetup(
        requests=requests, warm_tokens=round(options.warm * total), pool_unit="slots", jobs=options.jobs
    )
    names = servable(trace, None)
    for share in options.shares:
        budget = max(2, round(share * spec.total_experts)) * spec.slot_bytes

        def row(name: str, found: ReplayRow, share: float = share) -> Row:
            counts = found.counts
            return {
                "trace": trace.path.name,
                "policy": name,
                "share": share,
                "slots": found.slots,
                "needed": counts.needed,
                "hit_rate": counts.hit_rate,
                "loaded": counts.loads / counts.needed,
                "hosted": counts.hosted / counts.needed,
            }

        lost = too_large(names, spec, budget, {})
        fit = [name for name in names if name not in lost]
        yield from (row(found.policy, found) for found in replay_with_jobs(trace, [*fit, BOUND], [budget], setup))
        if slots_within(spec, budget) >= spec.num_layers:
            for found in replay_with_jobs(trace, BY_LAYER, [budget], replace(setup, pool="layer")):
                yield row(PolicyChoice(found.policy, "layer").name, found)


def first_requests(trace: Trace, tokens: int) -> tuple[frozenset[int], int]:
    """Return the first requests with about this number of tokens in all, and their number of tokens."""
    chosen: list[int] = []
    total = 0
    for request, count in zip(*(trace.requests[name].to_pylist() for name in ("request", "tokens")), strict=True):
        if chosen and total + count > tokens:
            break
        chosen.append(request)
        total += count
    return frozenset(chosen), total
