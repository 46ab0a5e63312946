"""Results of a bench of a cluster, and Prism's tables of them."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from moetool import tables
from moetool.bench.live_cluster.bench_options import ALONE, REDIRECTED, ClusterBenchOptions
from moetool.json_files import JsonRecord

NAIVE = "redundant"
"""Prism's "Naive Collaboration": experts placed at random and called remotely."""


@dataclass(slots=True, kw_only=True)
class LineRun:
    """Results of a line in one round.

    Attributes:
        gap_s, link: the setting (`ClusterBenchOptions`).
        latencies: latencies in seconds of users' requests, by server.
        arrived_s: their arrival times after the start, in the same order.
        failed: requests without an answer.
        redirected: requests that another server answered.
        other_texts: answers that differ from the first one to the same prompt.
        local: local compute share; None for single servers.
        expected_local: the same from traces of the same prompts, without migration.
        call_s: measured seconds of a remote call.
        sent_bytes: bytes sent between servers.
        windows: windows of `moetool.cluster.edge.history.Chronicle`.
        began_s: start of the first window.
        decisions: all migration decisions.
        changed_s: seconds after the start when tasks changed servers; None: they did not.
    """

    line: str
    number: int
    gap_s: float
    link: float
    latencies: list[list[float]]
    arrived_s: list[list[float]]
    failed: int
    redirected: int
    other_texts: int
    local: float | None = None
    expected_local: float | None = None
    call_s: float | None = None
    sent_bytes: float = 0.0
    windows: list[dict[str, Any]] = field(default_factory=list)
    began_s: float | None = None
    decisions: list[dict[str, Any]] = field(default_factory=list)
    changed_s: float | None = None

    @property
    def mean_s(self) -> float:
        """Mean latency of all requests; infinite if none was answered."""
        return self.between_s(0.0, float("inf"))

    def server_s(self, n: int) -> float:
        """Mean latency of one server's requests; infinite if none was answered."""
        return statistics.fmean(self.latencies[n]) if self.latencies[n] else float("inf")

    def between_s(self, since_s: float, until_s: float) -> float:
        """Mean latency of the requests that arrived in this interval; infinite if none was answered."""
        every = zip(chain(*self.arrived_s), chain(*self.latencies), strict=True)
        found = [seconds for at_s, seconds in every if since_s <= at_s < until_s]
        return statistics.fmean(found) if found else float("inf")

    def shares(self) -> tuple[list[float], list[float]]:
        """Seconds after the start, and the local compute share since the previous point."""
        times, shares = [], []
        for window in self.windows:
            local, calls = sum(window["local"]), sum(window["local"]) + sum(window["remote"])
            if calls:
                times.append(window["until_s"] - (self.began_s or 0.0))
                shares.append(local / calls)
        return times, shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The simulation of a line.

    Attributes:
        by_server: mean latency by the server's name.
    """

    line: str
    gap_s: float
    link: float
    mean_s: float
    by_server: dict[str, float]
    local: float


@dataclass(slots=True, kw_only=True)
class ClusterBench(JsonRecord):
    """All results.

    Attributes:
        slots: expert slots of each server.
        total_experts: number of experts.
        expert_s: profiled seconds of an expert for one token.
        even_bytes_s: link rate at which sending a hidden state takes as long.
        runs: every line in every round and setting.
        shifts: runs with and without migration in which tasks change servers.
    """

    model: str
    command: str
    tasks: tuple[str, ...]
    lines: tuple[str, ...]
    options: ClusterBenchOptions
    slots: tuple[int, ...]
    total_experts: int
    expert_s: float
    even_bytes_s: float
    machine: Any
    load_before: float | None
    load_after: float | None = None
    runs: list[LineRun] = field(default_factory=list)
    shifts: list[LineRun] = field(default_factory=list)
    simulated: list[Simulation] = field(default_factory=list)

    def of(self, line: str, gap_s: float | None = None, link: float | None = None) -> list[LineRun]:
        """Rounds of a line in a setting (default: the tables')."""
        gap_s = self.options.gaps_s[0] if gap_s is None else gap_s
        link = self.options.links[0] if link is None else link
        return [run for run in self.runs if (run.line, run.gap_s, run.link) == (line, gap_s, link)]

    def paired(self, line: str, against: str) -> list[float]:
        """Ratio of mean latency to another line's, by round."""
        others = {run.number: run.mean_s for run in self.of(against)}
        return [run.mean_s / others[run.number] for run in self.of(line) if run.number in others]

    def row(self, line: str) -> dict[str, Any]:
        """A row of Prism's tables: medians over rounds, and the smallest and largest round means."""
        runs = self.of(line)
        ordered = sorted(seconds for run in runs for server in run.latencies for seconds in server)
        ratios = self.paired(line, self.lines[-1])
        simulated = next((one for one in self.simulated if one.line == line), None)
        return {
            "line": line,
            "servers_s": [statistics.median(run.server_s(n) for run in runs) for n in range(len(self.tasks))],
            "mean_s": statistics.median(run.mean_s for run in runs),
            "least_s": min(run.mean_s for run in runs),
            "most_s": max(run.mean_s for run in runs),
            "p95_s": ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratios": ratios,
            "local": _median([run.local for run in runs]),
            "expected_local": _median([run.expected_local for run in runs]),
            "call_s": _median([run.call_s for run in runs]),
            "migrations": sum(decision["made"] for run in runs for decision in run.decisions),
            "failed": sum(run.failed for run in runs),
            "other_texts": sum(run.other_texts for run in runs),
            "redirected": sum(run.redirected for run in runs),
            "simulated_s": None if simulated is None else simulated.mean_s,
            "simulated_local": None if simulated is None else simulated.local,
        }

    def to_json(self) -> dict[str, Any]:
        """Rows and raw values."""
        values = super(ClusterBench, self).to_json()
        load = [values.pop("load_before"), values.pop("load_after")]
        rows = [self.row(line) for line in self.lines]
        return {"kind": "cluster_bench", **values, "load": load, "rows": rows}


_WHERES = {
    "processes": "processes",
    "threads": "threads of one process",
    "namespaces": "hosts in network namespaces, with tc tbf links,",
}


def print_cluster_bench(made: ClusterBench) -> None:
    """Print Prism's tables, in miniature."""
    rows = {line: made.row(line) for line in made.lines}
    first = [rows[line] for line in (ALONE, REDIRECTED, NAIVE) if line in rows]
    if {ALONE, REDIRECTED} & rows.keys():
        title = "single machines that load experts from disk, and naive collaboration (Prism, Table I)"
        _print_latencies(made, title, first)
    placed = [rows[line] for line in made.lines if line not in (ALONE, REDIRECTED)]
    if placed:
        _print_latencies(made, "placements (Prism, Table II)", placed)
        columns: dict[str, Callable[[dict[str, Any]], str]] = {
            "placement": lambda row: row["line"],
            "live": lambda row: _percent(row["local"]),
            "by traces": lambda row: _percent(row["expected_local"]),
            "simulated": lambda row: _percent(row["simulated_local"]),
            "remote call": lambda row: "-" if row["call_s"] is None else f"{row['call_s'] * 1e6:,.0f} µs",
            "migrations": lambda row: str(row["migrations"]),
            "simulated latency": lambda row: _seconds(row["simulated_s"]),
        }
        title = "local compute share of expert calls: live, from traces of the same requests, and simulated"
        tables.table_of(title, placed, columns).print()
    tables.print_paragraph(
        f"columns of servers: mean latency by task; rounds: smallest to largest mean; x {made.lines[-1]}: mean latency "
        "relative to it; failed: requests without an answer; by traces: expected from the same requests' routes"
    )
    settings = list(dict.fromkeys((run.gap_s, run.link) for run in made.runs))
    if len(settings) > 1:
        tables.print_table(
            "mean latency and local compute share by gap between requests and link rate",
            ["system", *(f"{gap_s:g} s, x{link:g}" for gap_s, link in settings)],
            [[line, *(_cell(made.of(line, gap_s, link)) for gap_s, link in settings)] for line in made.lines],
        )
    for run in made.shifts:
        times, shares = run.shares()
        changed_s = run.changed_s or 0.0
        before = [share for at, share in zip(times, shares, strict=True) if at <= changed_s]
        after = [share for at, share in zip(times, shares, strict=True) if at > changed_s]
        moved = sum(decision["made"] for decision in run.decisions)
        how = f"with migration ({moved} made)" if run.decisions else "without"
        tables.print_paragraph(
            f"tasks change servers, {how}: mean {run.mean_s:.3g} s ({run.between_s(0.0, changed_s):.3g} s before, "
            f"{run.between_s(changed_s, float('inf')):.3g} s after); local share {_percent(_mean(before))} before, "
            f"{_percent(_mean(after))} after, {_percent(shares[-1] if shares else None)} at the end"
        )
    slots = ", ".join(map(str, made.slots))
    tables.print_paragraph(
        f"{made.model}: {slots} of {made.total_experts} experts on {', '.join(made.tasks)}; an expert takes "
        f"{made.expert_s * 1e6:,.0f} µs per token, so links carry {tables.count(made.even_bytes_s, 'B')}/s; "
        f"{tables.numbered(made.options.rounds, 'round')} of "
        f"{tables.numbered(made.options.requests, 'request')} per server; "
        f"{_WHERES[made.options.where]} on one machine; load "
        f"{_load(made.load_before)} to {_load(made.load_after)}"
    )
    if wrong := sum(row["other_texts"] for row in rows.values()):
        tables.print_paragraph(
            f"{wrong} answers differ from the first to the same prompt: different requests shared their batches"
        )


def _load(average: float | None) -> str:
    return "-" if average is None else f"{average:.1f}"


def _print_latencies(made: ClusterBench, title: str, rows: list[dict[str, Any]]) -> None:
    def server(n: int, row: dict[str, Any]) -> str:
        return _seconds(row["servers_s"][n])

    def ratio(row: dict[str, Any]) -> str:
        ratios = row["ratios"]
        return f"{row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-"

    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "system": lambda row: row["line"],
        **{task: partial(server, n) for n, task in enumerate(made.tasks)},
        "mean": lambda row: _seconds(row["mean_s"]),
        "rounds": lambda row: f"{row['least_s']:.3g} to {row['most_s']:.3g}",
        "p95": lambda row: _seconds(row["p95_s"]),
        f"x {made.lines[-1]}": ratio,
        "failed": lambda row: str(row["failed"]),
    }
    tables.table_of(f"{title}: mean latency, medians over rounds; ratios within rounds", rows, columns).print()


def _cell(runs: list[LineRun]) -> str:
    if not runs:
        return "-"
    local = _median([run.local for run in runs])
    return _seconds(statistics.median(run.mean_s for run in runs)) + (
        "" if local is None else f", {tables.percent(local)}"
    )


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _percent(value: float | None) -> str:
    return "-" if value is None else tables.percent(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} s"
