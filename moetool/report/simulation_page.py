"""Simulated runs as figure files and as a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from moetool import durable, tables
from moetool.report import drawing
from moetool.report.figures.simulation_runs import Run, plots
from moetool.report.sheet import Section, render_sheet
from moetool.simulation.simulation_results import Simulated, interval, percentile
from moetool.tables import TextTable

_EQ4 = "Prism's Eq. 4: seconds that fewer remote calls save over the horizon, against seconds of the moves."


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
    return render_sheet(
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
    names = [name for name in runs[0][0] if name not in ("planner", "seed")]
    rows = []
    for key, members in groups.items():
        at, of = dict(key), [found for _, found in members]
        mean, half = interval([run.mean_s for run in of])

        def over(values: Sequence[float]) -> float:
            return sum(values) / len(values)

        rows.append(
            (
                at["planner"],
                *(at[name] for name in names),
                f"{len(of)}",
                f"{len(of[0].served):,}",
                f"{mean:.3g}" + (f" ± {half:.2g}" if half else ""),
                *(f"{over([percentile(run.latencies_s, p) for run in of]):.3g}" for p in (50, 90, 99)),
                f"{over([run.mean_first_s for run in of]):.3g}",
                tables.percent(over([run.local for run in of])),
                f"{over([run.tokens_per_s for run in of]):,.1f}",
                tables.percent(over([max(run.utilisation_G) for run in of])),
                tables.count(over([run.sent_bytes for run in of]), "B"),
                f"{sum(one.made for run in of for one in run.migrations)}",
            )
        )
    return TextTable(
        title="Latency in seconds from arrival",
        columns=(
            *("planner", *names, "seeds", "requests", "mean", "p50", "p90", "p99", "first token", "local", "tokens/s"),
            *("busiest GPU", "sent", "migrations"),
        ),
        rows=tuple(rows),
        notes=(
            "mean: with its 95 % interval over seeds; local: local compute share; busiest GPU: its utilization",
            "sent: bytes between servers; migrations: made, in all seeds",
        ),
    )


def decision_table(found: Simulated, title: str) -> TextTable:
    """Return a table of the first thirty decisions of a run."""
    return TextTable(
        title=title,
        columns=(
            *("at s", "calls before", "calls after", "saved s", "cost s", "worth it", "made", "copies", "moved"),
            "done at s",
        ),
        rows=[
            [
                f"{one.at_s:,.0f}",
                *(f"{calls:,.0f}" for calls in (one.calls_before, one.calls_after)),
                *(f"{seconds:,.2f}" for seconds in (one.saved_s, one.cost_s)),
                *("yes" if so else "no" for so in (one.worth_it, one.made)),
                *(f"{one.copies:,}", tables.count(one.bytes, "B")),
                "-" if one.done_s is None else f"{one.done_s:,.1f}",
            ]
            for one in found.migrations[:30]
        ],
        num_text=0,
    )


def facts_of(given: Mapping[str, object]) -> list[tuple[str, str]]:
    """Return terms and texts, without those that have no value."""
    return [(name, str(value)) for name, value in given.items() if value not in (None, "", [], {})]
