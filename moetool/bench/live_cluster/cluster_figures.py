"""Figures of a cluster bench: Prism's Figs. 6 and 7, and sweeps."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from moetool.bench.live_cluster.cluster_results import ClusterBench, LineRun
from moetool.bench.paper.found_figure import draw_all
from moetool.bench.paper.verdict import Curve, Found

_TIME = ("seconds", "computed locally, %")


def save_figures(made: ClusterBench, folder: Path) -> list[Path]:
    """Draw the figures of the runs as SVG files. Effects: writes into `folder`."""
    founds: dict[str, Found] = {}
    placed = {run.line: run for run in made.runs if run.windows and run.number == 0 and run in made.of(run.line)}
    if placed:
        local = {name: [run.local or 0.0 for run in made.of(name)] for name in placed}
        curves = {name: [_shares(run)] for name, run in placed.items()}
        founds["local"] = _found(made, "expert calls computed locally (Prism, Fig. 6)", "%", local, curves, _TIME)
    if made.shifts:
        runs = dict(zip(("with migration", "without"), made.shifts, strict=False))
        means = {name: [run.mean_s] for name, run in runs.items()}
        title = f"mean latency, tasks change servers at {made.shifts[0].changed_s or 0.0:.0f} s (Prism, Fig. 7)"
        founds["shift"] = _found(made, title, "s", means, {name: [_shares(run)] for name, run in runs.items()}, _TIME)
    for name, points, axis in (
        ("gaps", [(gap_s, made.options.links[0]) for gap_s in made.options.gaps_s], "seconds between requests"),
        ("links", [(made.options.gaps_s[0], link) for link in made.options.links], "rate of links"),
    ):
        if len(points) > 1:
            x = tuple(point[name == "links"] for point in points)
            swept = {line: [(x, tuple(_median_s(made.of(line, *point)) for point in points))] for line in made.lines}
            first = {line: [run.mean_s for run in made.of(line)] for line in made.lines}
            founds[f"sweep-{name}"] = _found(made, "mean latency", "s", first, swept, (axis, "mean latency, s"))
    return draw_all(folder, founds)


def _found(
    made: ClusterBench,
    what: str,
    unit: str,
    values: dict[str, list[float]],
    curves: dict[str, list[Curve]],
    axes: tuple[str, str],
) -> Found:
    return Found(
        values=values, what=what, unit=unit, on=f"{made.model} on {len(made.tasks)} servers", curves=curves, axes=axes
    )


def _shares(run: LineRun) -> Curve:
    times, shares = run.shares()
    return tuple(times), tuple(100 * share for share in shares)


def _median_s(runs: Sequence[LineRun]) -> float:
    return statistics.median(run.mean_s for run in runs) if runs else float("nan")
