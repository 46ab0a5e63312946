"""Replay every policy with several budgets on several traces: hits and bytes, against the bound."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moetool import tables
from moetool.caching._changing import PolicyChoice
from moetool.caching._policy import slots_within
from moetool.errors import UsageError
from moetool.json_files import JsonRecord
from moetool.trace.reader import Trace
from moetool.tuning.candidates import servable, too_large
from moetool.tuning.replay import ReplayRow, ReplaySetup, replay

BOUND = "belady"
KNOWN = "known_routes"
BY_LAYER = ("lru", "lfu", "lfru", "least_stale", "foresight")
"""Policies that also run with a pool per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCell:
    """One policy with one budget on one trace.

    Attributes:
        policy: its name, with `by layer` for equal slots per layer.
        share: share of all experts that the budget holds.
        hit_rate: share of needed experts that were resident.
        loaded: loads (on-demand and prefetch) per needed expert; with equal expert sizes, moved bytes / needed bytes.
        hosted: share of needed experts that the host computed instead of loading.
    """

    trace: str
    policy: str
    share: float
    slots: int
    needed: int
    hit_rate: float
    loaded: float
    hosted: float = 0.0

    @property
    def touched(self) -> float:
        """Loaded or computed on the host: experts read either way."""
        return self.loaded + self.hosted


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTable(JsonRecord):
    """The cells, with their command, and the share of tokens that warmed pools and memories."""

    command: str
    tokens: int
    warm: float
    cells: tuple[PolicyCell, ...]


def bench_policies(
    traces: Sequence[Path],
    shares: Sequence[float],
    *,
    tokens: int,
    warm: float = 0.0,
    command: str = "",
    on_trace: Callable[[int], object] = lambda number: None,
) -> PolicyTable:
    """Replay every lossless policy that needs no training, the bound, and foresight with known routes.

    Args:
        shares: budgets as shares of all experts.
        tokens: approximate tokens of each trace's first requests, at least one request.
        warm: share of these tokens, the first ones, that count in no cell.
        on_trace: called after each trace.

    Raises:
        UsageError: a share is not above 0 and at most 1, `warm` is not below 1, or two traces have one name.
    """
    if not shares or not all(0 < share <= 1 for share in shares):
        raise UsageError(f"budgets are {list(shares)}, expected shares of all experts, above 0% and up to 100%")
    if not 0 <= warm < 1:
        raise UsageError(f"warm is {warm}, expected a share of the tokens below 100%")
    if len({path.name for path in traces}) < len(traces):
        raise UsageError("two traces have the same directory name; rename one")
    cells: list[PolicyCell] = []
    for number, path in enumerate(traces, start=1):
        cells += _cells(Trace(path), shares, tokens, warm)
        on_trace(number)
    return PolicyTable(command=command, tokens=tokens, warm=warm, cells=tuple(cells))


def print_policies(made: PolicyTable) -> None:
    """Print a table per trace: fewest bytes at the middle budget first, loaded or computed on the host."""
    for trace, group in itertools.groupby(made.cells, key=lambda cell: cell.trace):
        cells = list(group)
        shares = sorted({cell.share for cell in cells})
        rows: dict[str, dict[float, PolicyCell]] = {}
        for cell in cells:
            rows.setdefault(cell.policy, {})[cell.share] = cell
        middle = shares[len(shares) // 2]
        ranked = sorted(rows.items(), key=lambda item: item[1][middle].touched if middle in item[1] else 2.0)
        tables.print_table(
            f"{trace}: loads per needed expert (hit rate), by share of the experts in memory",
            ("policy", *(tables.percent(share) for share in shares)),
            [[name, *(_spelled(found.get(share)) for share in shares)] for name, found in ranked],
        )


def _spelled(cell: PolicyCell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.loaded:.3f}{f' + {cell.hosted:.3f} on the host' if cell.hosted else ''} ({cell.hit_rate:.3f})"


def _cells(trace: Trace, shares: Sequence[float], tokens: int, warm: float) -> list[PolicyCell]:
    spec = trace.spec
    budgets = [max(2, round(share * spec.total_experts)) * spec.slot_bytes for share in shares]
    requests, total = _first(trace, tokens)
    setup = ReplaySetup(requests=requests, warm_tokens=round(warm * total), pool_unit="slots")
    names = servable(trace, None)
    found: list[PolicyCell] = []
    for share, budget in zip(shares, budgets, strict=True):
        lost = too_large(names, spec, budget, {})
        fit = [name for name in names if name not in lost]
        rows = replay(trace, [*fit, BOUND], [budget], setup)
        found += [_cell(trace, share, row.policy, row) for row in rows]
        for title, layers in (("next layer", 1), ("next token", spec.num_layers)):
            (row,) = replay(trace, [KNOWN], [budget], replace(setup, options={KNOWN: {"layers": layers}}))
            found.append(_cell(trace, share, f"foresight, {title} known", row))
        if slots_within(spec, budget) >= spec.num_layers:
            rows = replay(trace, BY_LAYER, [budget], replace(setup, pool="layer"))
            found += [_cell(trace, share, PolicyChoice(row.policy, "layer").name, row) for row in rows]
    return found


def _cell(trace: Trace, share: float, name: str, row: ReplayRow) -> PolicyCell:
    counts = row.counts
    return PolicyCell(
        trace=trace.path.name,
        policy=name,
        share=share,
        slots=row.slots,
        needed=counts.needed,
        hit_rate=counts.hit_rate,
        loaded=counts.loads / counts.needed,
        hosted=counts.hosted / counts.needed,
    )


def _first(trace: Trace, tokens: int) -> tuple[frozenset[int], int]:
    """The first requests with about this number of tokens in all, and their number of tokens."""
    chosen: list[int] = []
    total = 0
    for request, count in zip(*(trace.requests[name].to_pylist() for name in ("request", "tokens")), strict=True):
        if chosen and total + count > tokens:
            break
        chosen.append(request)
        total += count
    return frozenset(chosen), total
