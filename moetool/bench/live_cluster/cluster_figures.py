"""Figures of a cluster bench: Prism's Figs. 6 and 7, and sweeps."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.bench.live_cluster.cluster_results import ClusterBench

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def save_figures(made: ClusterBench, folder: Path) -> list[Path]:
    """Figures that the runs have something for, as SVG files.

    Effects: writes into `folder`.
    """
    from moetool.report import drawing

    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, Callable[[Figure], None]]] = []
    if any(run.windows for run in made.runs):
        wanted.append(("local.svg", lambda figure: _over_time(figure, made)))
    if made.shifts:
        wanted.append(("shift.svg", lambda figure: _shifts(figure, made)))
    if len({(run.gap_s, run.link) for run in made.runs}) > 1:
        wanted.append(("sweep.svg", lambda figure: _sweeps(figure, made)))
    for name, paint in wanted:
        drawing.save(folder / name, 3.6, paint)
    return [folder / name for name, _ in wanted]


def _over_time(figure: "Figure", made: ClusterBench) -> None:
    """Prism's Fig. 6: calls at home over time, of the first round."""
    from moetool.report.drawing import line as draw_line

    axes: Axes = figure.subplots()
    placed = [run for run in made.runs if run.windows and run.number == 0 and run in made.of(run.line)]
    for number, run in enumerate(placed):
        times, shares = run.shares()
        draw_line(axes, times, [100 * share for share in shares], number, run.line)
    axes.set_xlabel("seconds")
    axes.set_ylabel("computed at home, %")
    axes.set_ylim(0, 100)
    axes.legend(ncols=3)


def _shifts(figure: "Figure", made: ClusterBench) -> None:
    """Prism's Fig. 7: with migration and without, when tasks change servers; over time, and by server."""
    from moetool.report.drawing import GREY
    from moetool.report.drawing import line as draw_line

    panels: Any = figure.subplots(1, 3)
    for number, run in enumerate(made.shifts):
        name = "with migration" if number == 0 else "without"
        times, shares = run.shares()
        draw_line(panels[0], times, [100 * share for share in shares], number, name)
        draw_line(panels[1], *run.over_time(made.options.interval_s / 2), number, name)
        panels[2].bar(
            [n + 0.4 * number for n in range(len(made.tasks))],
            [run.server_s(n) for n in range(len(made.tasks))],
            0.38,
            label=name,
            color=("#0072b2", "#d55e00")[number],
        )
        for decision in run.decisions:
            if decision["made"] and decision["done_s"]:
                for panel in panels[:2]:
                    panel.axvline(decision["done_s"] - (run.began_s or 0.0), color=GREY, linestyle=":")
    for panel in panels[:2]:
        panel.axvline(made.shifts[0].changed_s, color=GREY)
        panel.set_xlabel("seconds; line: tasks change\nservers, dotted: migrated")
    panels[0].set_ylabel("computed at home, %")
    panels[0].set_ylim(0, 100)
    panels[0].legend()
    panels[1].set_ylabel("mean latency of who came then, s")
    panels[1].set_ylim(bottom=0)
    panels[2].set_xticks([n + 0.2 for n in range(len(made.tasks))], made.tasks, rotation=15)
    panels[2].set_ylabel("mean latency, s")


def _sweeps(figure: "Figure", made: ClusterBench) -> None:
    from moetool.report.drawing import line as draw_line

    axes = [
        ("mean seconds between a server's requests", sorted(made.options.gaps_s), lambda x: (x, None)),
        (
            "rate of links (1: a hidden state takes as long as an expert)",
            sorted(made.options.links),
            lambda x: (None, x),
        ),
    ]
    axes = [one for one in axes if len(one[1]) > 1]
    panels: Any = figure.subplots(1, len(axes), squeeze=False)[0]
    for panel, (label, values, setting) in zip(panels, axes, strict=True):
        for number, name in enumerate(made.lines):
            found = [[run.mean_s for run in made.of(name, *setting(value))] for value in values]
            draw_line(panel, values, [statistics.median(one) if one else float("nan") for one in found], number, name)
        panel.set_xlabel(label)
        panel.set_ylabel("mean latency, s")
        panel.set_ylim(bottom=0)
    panels[0].legend(ncols=2)
