"""Simulated runs as figure files and as a page."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moetool.base import durable, tables
from moetool.base.tables import TextTable
from moetool.report import drawing
from moetool.report.figures.simulation_runs import Run, plots
from moetool.report.html_page import Section, render_page
from moetool.simulation.simulation_results import Simulated, interval, percentile

_EQ4 = (
    "Prism's Eq. 4: seconds that fewer remote calls save over the horizon, against seconds of the moves over links. "
    "As printed, against Eq. 3, which loads every expert at its GPU's own rate."
)


def require_drawable(path: Path, overwrite: bool) -> None:
    """Raises: UsageError unless `save` can write there: a figure file or a folder that does not exist yet."""
    if not path.suffix:
        durable.require_new_file(path / "by-planner.svg", overwrite)
        return
    drawing.require_drawable(path)
    durable.require_new_file(path, overwrite)


def save(path: Path, runs: Sequence[Run]) -> list[Path]:
    """Draw the main figure into a file, or, for a name without a suffix, every figure as SVG and PNG into a folder.

    The main figure shows mean latency and local compute share by the swept value, with 95 % confidence intervals over
    seeds. Without a sweep it shows the local compute share over time and the distribution of latencies.

    Effects: writes the files; returns their paths.
    """
    drawn = plots(runs)
    if path.suffix:
        drawing.save(path, drawn[0].height, drawn[0].paint)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    files = [(plot, path / f"{plot.key}{ending}") for plot in drawn for ending in (".svg", ".png")]
    for plot, file in files:
        drawing.save(file, plot.height, plot.paint)
    return [file for _, file in files]


def page(runs: Sequence[Run], facts: Sequence[tuple[str, str]], shape: str) -> str:
    """Return the page of runs as HTML.

    Args:
        facts: the runs' common settings, as terms and texts.
        shape: the model in words.
    """
    decided = [decision_table(found, ", ".join(at.values())) for at, found in runs if found.migrations]
    return render_page(
        title="A simulated cluster",
        heading=f"Simulated request latency on a cluster of {len(runs[0][1].utilisation_G)} GPUs"
        if len({len(found.utilisation_G) for _, found in runs}) == 1
        else "Simulated request latency on clusters",
        shape=shape,
        facts=facts,
        sections=[
            Section(name="Runs", tables=[_runs_table(runs)]),
            Section(name="Figures", plots=plots(runs)),
            Section(name="Migrations", notes=[_EQ4] if decided else [], tables=decided),
        ],
    )


def _runs_table(runs: Sequence[Run]) -> TextTable:
    """Return a table with a row per combination: means over seeds, with confidence intervals of the latency."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for at, found in runs:
        groups.setdefault(tuple((k, v) for k, v in at.items() if k != "seed"), []).append((at, found))

    def mean(members: list[Run], of: Callable[[Simulated], float]) -> float:
        return statistics.fmean(of(found) for _, found in members)

    def mean_s(members: list[Run]) -> str:
        middle, half = interval([found.mean_s for _, found in members])
        return f"{middle:.4g}" + (f" ± {half:.2g}" if half else "")

    def setting(name: str, members: list[Run]) -> str:
        return members[0][0][name]

    def quantile(p: int, members: list[Run]) -> str:
        return f"{mean(members, lambda found: percentile(found.latencies_s, p)):.4g}"

    columns: dict[str, Callable[[list[Run]], str]] = {
        **{name: partial(setting, name) for name in ("planner", *runs[0][0]) if name != "seed"},
        "seeds": lambda of: f"{len(of)}",
        "requests": lambda of: f"{len(of[0][1].served):,}",
        "mean": mean_s,
        **{f"p{p}": partial(quantile, p) for p in (50, 90, 99)},
        "first token": lambda of: f"{mean(of, lambda found: found.mean_first_s):.4g}",
        "local": lambda of: tables.percent(mean(of, lambda found: found.local)),
        "tokens/s": lambda of: f"{mean(of, lambda found: found.tokens_per_s):,.1f}",
        "busiest GPU": lambda of: tables.percent(mean(of, lambda found: max(found.utilisation_G))),
        "sent": lambda of: tables.count(mean(of, lambda found: found.sent_bytes), "B"),
        "migrations": lambda of: f"{sum(one.made for _, found in of for one in found.migrations)}",
    }
    notes = (
        "mean: with its 95 % interval over seeds; local: local compute share; busiest GPU: its utilization",
        "sent: bytes between servers; migrations: made, in all seeds",
    )
    return tables.table_of("Latency in seconds from arrival", groups.values(), columns, notes=notes)


def decision_table(found: Simulated, title: str) -> TextTable:
    """Return a table of the first thirty decisions of a run."""
    columns: dict[str, Callable[[Any], str]] = {
        "at s": lambda one: f"{one.at_s:,.0f}",
        "calls before": lambda one: f"{one.calls_before:,.0f}",
        "calls after": lambda one: f"{one.calls_after:,.0f}",
        "saved s": lambda one: f"{one.saved_s:,.2f}",
        "cost s": lambda one: f"{one.cost_s:,.2f}",
        "worth it": lambda one: "yes" if one.worth_it else "no",
        "Eq. 3 s": lambda one: f"{one.printed_s:,.2f}",
        "as printed": lambda one: "yes" if one.saved_s > one.printed_s else "no",
        "made": lambda one: "yes" if one.made else "no",
        "copies": lambda one: f"{one.copies:,}",
        "moved": lambda one: tables.count(one.bytes, "B"),
        "done at s": lambda one: "-" if one.done_s is None else f"{one.done_s:,.1f}",
    }
    return tables.table_of(title, found.migrations[:30], columns, num_text=0)


def facts_of(given: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return terms and texts, without those that have no value."""
    return [(name, str(value)) for name, value in given.items() if value not in (None, "", [], {})]
