"""Results of a bench of a cluster: Prism's tables and Figures 6 and 7 in miniature, and sweeps."""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

from moetool.base import tables as printed
from moetool.bench.bench_result import BenchResult, Row, median, table
from moetool.bench.experiment_figure import Curve, ExperimentResult
from moetool.bench.live_cluster.bench_options import ALONE, REDIRECTED

NAIVE = "redundant"
"""Prism's "Naive Collaboration": experts placed at random and called remotely."""
_WHERES = {
    "processes": "processes",
    "threads": "threads of one process",
    "namespaces": "hosts in network namespaces, with tc tbf links,",
}


def mean_s(run: Row, since_s: float = 0.0, until_s: float = float("inf")) -> float:
    """Mean latency of the requests that arrived in this interval; infinite if none was answered."""
    every = zip(chain(*run["arrived_s"]), chain(*run["latencies"]), strict=True)
    found = [seconds for at_s, seconds in every if since_s <= at_s < until_s]
    return statistics.fmean(found) if found else float("inf")


def shares(run: Row) -> Curve:
    """Seconds after the start, and the local compute share since the previous point."""
    calls = [(w["until_s"], sum(w["local"]), sum(w["local"]) + sum(w["remote"])) for w in run["windows"]]
    known = [(until_s - (run["began_s"] or 0.0), local / every) for until_s, local, every in calls if every]
    return tuple(at_s for at_s, _ in known), tuple(share for _, share in known)


def line_row(line: str, rounds: Sequence[Row], against: Sequence[Row], **more: Any) -> Row:
    """Return the results of a line: medians over its rounds.

    Args:
        rounds: by round: `latencies` in seconds of users' requests and their arrival times `arrived_s`, by server;
            numbers of `failed` and `redirected` requests, and of `other_texts`, answers that differ from the first one
            to the same prompt. With a placement also the `local` compute share, `expected_local` from traces of the
            same prompts without migration, `call_s` of a remote call, `sent_bytes` between servers, `windows` of
            `moetool.cluster.edge.history.ReportHistory` from `began_s`, all `decisions`, and `changed_s`, seconds
            after the start when tasks changed servers.
        against: the rounds of the line that ratios of mean latencies are relative to.
        more: other values, such as `simulated`.
    """
    means = [mean_s(run) for run in rounds]
    ordered = sorted(chain(*chain(*(run["latencies"] for run in rounds))))
    by_server = zip(*(run["latencies"] for run in rounds), strict=True)
    return {
        "line": line,
        "servers_s": [
            statistics.median(statistics.fmean(each) if each else float("inf") for each in one) for one in by_server
        ],
        "mean_s": statistics.median(means),
        "means_s": means,
        "p95_s": ordered[int(0.95 * (len(ordered) - 1))] if ordered else None,
        "ratios": [mine / mean_s(other) for mine, other in zip(means, against, strict=False)],
        **{name: median(rounds, name) for name in ("local", "expected_local", "call_s")},
        **{name: sum(run[name] for run in rounds) for name in ("failed", "other_texts", "redirected")},
        "migrations": sum(decision["made"] for run in rounds for decision in run["decisions"]),
        **more,
        "rounds": list(rounds),
    }


def tables(made: BenchResult) -> Iterator[Any]:
    """Prism's tables, in miniature, and the conditions."""
    facts, options = made.facts, made.options
    first = made.of(shift=None)
    last = first[-1]["line"]
    latencies: Row = {
        "system": ("line", "s"),
        **{
            task: (partial(lambda row, n: row["servers_s"][n], n=n), "seconds") for n, task in enumerate(facts["tasks"])
        },
        "mean": ("mean_s", "seconds"),
        "rounds": (lambda row: f"{min(row['means_s']):.3g} to {max(row['means_s']):.3g}", "s"),
        "p95": ("p95_s", "seconds"),
        f"x {last}": ("ratios", "ratios"),
        "failed": ("failed", "d"),
    }
    how = "mean latency, medians over rounds; ratios within rounds"
    single = [row for row in first if row["line"] in (ALONE, REDIRECTED)]
    placed = [row for row in first if row not in single]
    if single:
        title = "single machines that load experts from disk, and naive collaboration (Prism, Table I)"
        yield table(f"{title}: {how}", [*single, *(row for row in placed if row["line"] == NAIVE)], latencies)
    if placed:
        yield table(f"placements (Prism, Table II): {how}", placed, latencies)
        yield table(
            "local compute share of expert calls: live, from traces of the same requests, and simulated",
            placed,
            {
                "placement": ("line", "s"),
                "live": ("local", ".1%"),
                "by traces": ("expected_local", ".1%"),
                "simulated": ("simulated.local", ".1%"),
                "remote call": ("call_s", "us"),
                "migrations": ("migrations", "d"),
                "simulated latency": ("simulated.mean_s", "seconds"),
            },
        )
    yield (
        f"columns of servers: mean latency by task; rounds: smallest to largest mean; x {last}: mean latency "
        "relative to it; failed: requests without an answer; by traces: expected from the same requests' routes"
    )
    for row in made.of(shift=True):
        (run,) = row["rounds"]
        times, local = shares(run)
        changed_s = run["changed_s"]
        before = [share for at, share in zip(times, local, strict=True) if at <= changed_s]
        after = [share for at, share in zip(times, local, strict=True) if at > changed_s]
        how = f"with migration ({row['migrations']} made)" if run["decisions"] else "without"
        yield (
            f"tasks change servers, {how}: mean {row['mean_s']:.3g} s ({mean_s(run, 0.0, changed_s):.3g} s before, "
            f"{mean_s(run, changed_s):.3g} s after); local share {_mean(before)} before, {_mean(after)} after, "
            f"{_mean(local[-1:])} at the end"
        )
    yield (
        f"{facts['model']}: {', '.join(map(str, facts['slots']))} of {facts['total_experts']} experts on "
        f"{', '.join(facts['tasks'])}; an expert takes {facts['expert_s'] * 1e6:,.0f} µs per token, so links carry "
        f"{printed.count(facts['even_bytes_s'], 'B')}/s; {printed.numbered(options['rounds'], 'round')} of "
        f"{printed.numbered(options['requests'], 'request')} per server; {_WHERES[options['where']]} on one machine"
    )
    if wrong := sum(row["other_texts"] for row in first):
        yield f"{wrong} answers differ from the first to the same prompt: different requests shared their batches"


def figures(made: BenchResult) -> dict[str, ExperimentResult]:
    """Local compute share over time, and before and after a change of tasks."""
    facts = made.facts
    on = f"{facts['model']} on {len(facts['tasks'])} servers"
    time = ("seconds", "computed locally, %")
    founds: dict[str, ExperimentResult] = {}
    if placed := [row for row in made.of(shift=None) if row["rounds"][0]["windows"]]:
        founds["local"] = ExperimentResult(
            values={row["line"]: [run["local"] or 0.0 for run in row["rounds"]] for row in placed},
            what="expert calls computed locally (Prism, Fig. 6)",
            unit="%",
            on=on,
            curves={row["line"]: [_percent(row["rounds"][0])] for row in placed},
            axes=time,
        )
    if changed := made.of(shift=True):
        names = dict(zip(("with migration", "without"), changed, strict=False))
        founds["shift"] = ExperimentResult(
            values={name: row["means_s"] for name, row in names.items()},
            what=f"mean latency, tasks change servers at {changed[0]['rounds'][0]['changed_s']:.0f} s (Prism, Fig. 7)",
            unit="s",
            on=on,
            curves={name: [_percent(row["rounds"][0])] for name, row in names.items()},
            axes=time,
        )
    return founds


def _percent(run: Row) -> Curve:
    times, local = shares(run)
    return times, tuple(100 * share for share in local)


def _mean(values: Sequence[float]) -> str:
    return printed.percent(statistics.fmean(values)) if values else "-"
