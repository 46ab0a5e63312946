"""Results of a bench of expert parallelism: tables, and DIRECTOR's figures in miniature."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from moetool.base import tables as printed
from moetool.bench.bench_result import BenchResult, Row, table
from moetool.bench.experiment_figure import ExperimentResult


def batch_s(run: Row) -> float:
    """Median seconds of a batch, since single ones take many times as long on a busy machine."""
    return statistics.median(run["batch_s"])


def ratios(row: Row, base: Row) -> list[float]:
    """Ratio of two variants' batch times in each round."""
    return [batch_s(a) / batch_s(b) for a, b in zip(row["rounds"], base["rounds"], strict=False)]


def _over_rounds(of: str | Callable[[Row], float], scale: float = 1.0) -> Callable[[Row], float]:
    """Median over a row's rounds of a value by name, or of a function of a round."""
    return lambda row: scale * statistics.median(run[of] if isinstance(of, str) else of(run) for run in row["rounds"])


def tables(made: BenchResult) -> Iterator[Any]:
    """Tables of variants and migrations, and which values are emulated or counted."""
    o, rows = made.options, {row["name"]: row for row in made.rows}
    base = rows.get("offline", made.rows[0])
    title = f"{o['batches'] - 1} batches of {o['ranks'] * o['seats']} requests, each of {o['tasks']} tasks; "
    yield table(
        f"{title}medians of {o['rounds']} rounds",
        made.rows,
        {
            "variant": ("name", "s"),
            "ms/batch": (_over_rounds(batch_s), "ms"),
            f"x {base['name']}, paired": (lambda row: ratios(row, base), "ratios"),
            "busiest GPU's rows": (_over_rounds("hottest"), ",.0f"),
            "x even": (_over_rounds(lambda run: run["hottest"] * o["ranks"] / run["rows"]), ".3f"),
            "busiest link": (_over_rounds(lambda run: max(map(max, run["sent_GG"]))), "bytes"),
            "sent": (_over_rounds(lambda run: sum(map(sum, run["sent_GG"]))), "bytes"),
            "placed": (lambda row: row["rounds"][0]["placed"], "d"),
        },
    )
    if moving := [row for row in made.rows if any(run["moved_bytes"] for run in row["rounds"])]:
        batch_ms = 1e3 / (o["batches"] - 1)
        yield table(
            "experts migrated per run; times are per batch or per decision",
            moving,
            {
                "variant": ("name", "s"),
                "moved": (_over_rounds("moved_bytes"), "bytes"),
                "in an all-to-all": (_over_rounds("during_exchange"), "bytes"),
                "ms waited before batch": (_over_rounds("ready_s", batch_ms), ",.1f"),
                "ms all-to-alls waited": (_over_rounds("waited_s", batch_ms), ",.1f"),
                "ms waited for a decision": (_over_rounds("decided_s", batch_ms), ",.1f"),
                "ms to predict": (_over_rounds("predict_s", 1e3), ",.0f"),
                "ms to plan": (_over_rounds("plan_s", 1e3), ",.0f"),
                "asked": (lambda row: ", ".join(f"{k} {n}" for k, n in row["rounds"][0]["asked"].items()) or None, "s"),
            },
        )
    if {"stop", "overlap"} <= rows.keys():
        found = ratios(rows["overlap"], rows["stop"])
        yield (
            f"overlap against stop-the-world migration, paired: {statistics.median(found):.3f} of its time "
            f"({min(found):.2f} to {max(found):.2f})"
        )
    yield (
        f"emulated: {1e6 * o['expert_token_s']:g} µs per expert row, {printed.count(o['link_bytes_s'], 'B')}/s out of "
        "a GPU; other times are measured on this machine; rows and bytes are counted"
    )
    costs = made.facts["costs"]
    asked = "".join(
        f"; {name} {1e3 * statistics.median(taken):.3g} ms per prompt token"
        for name, taken in made.facts["token_s"].items()
        if name != "oracle" and all(taken)
    )
    yield (
        f"measured while serving: {1e6 * costs['row_s']:.3g} µs per expert row, "
        f"{printed.count(costs['link_bytes_s'], 'B')}/s of rows, {printed.count(costs['move_bytes_s'], 'B')}/s of "
        f"experts{asked}"
    )


def figures(made: BenchResult) -> dict[str, ExperimentResult]:
    """Batch latency, mean and by batch, for each DIRECTOR figure that the variants cover."""
    founds = {}
    for number in (6, 7, 8, 10, 11):
        rows = [row for row in made.rows if number in row["figures"]]
        if len(rows) < 2:
            continue
        batches = tuple(range(1, len(rows[0]["rounds"][0]["batch_s"]) + 1))
        founds[f"director-figure-{number}"] = ExperimentResult(
            values={row["name"]: ratios(row, rows[0]) for row in rows},
            what=f"batch latency, x {rows[0]['name']}",
            unit="",
            on=f"{made.options['ranks']} ranks, times emulated",
            curves={row["name"]: [(batches, tuple(run["batch_s"])) for run in row["rounds"]] for row in rows},
            axes=("batch", "seconds"),
        )
    return founds
