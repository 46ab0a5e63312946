"""The page of `moetool evaluate --report`: tables with bars behind shares, and charts of match by distance."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool import __version__, durable
from moetool.evaluation.match_tables import MEANINGS, by_task, overview, phases, scope, tables_of
from moetool.report.drawing import line
from moetool.report.figures.plot import Plot
from moetool.report.html_page import Section, render_page
from moetool.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_page(path: Path, rows: Sequence[Any]) -> None:
    """Write the page of evaluations (`moetool.evaluation.evaluate.Evaluation`), whole or not at all."""
    durable.write_text(path, page(rows))


def page(rows: Sequence[Any]) -> str:
    """Return the page as self-contained HTML."""
    names = ", ".join(dict.fromkeys(row.predictor for row in rows))
    sections = [Section(name="Overview", tables=[overview(rows)])]
    sections += [
        Section(
            name="Unseen task" if group[0].unseen_task else "Known tasks",
            notes=[f"{group[0].trace}: {scope(group)}."],
            plots=[_chart(group, phase) for phase in phases(group)],
            tables=[*tables_of(group), _every_measure(group)],
        )
        for group in by_task(rows)
    ]
    return render_page(
        title="Expert predictors",
        heading="Expert predictors on held-out requests",
        shape=f"{names}; moetool {__version__}",
        facts=list(MEANINGS.items()),
        sections=sections,
    )


def _every_measure(rows: Sequence[Any]) -> TextTable:
    widest = max(len(row.scores[0].recall) for row in rows)
    wider = (f"in {rows[0].top_k + more}" for more in range(1, widest + 1))
    made = []
    for row in rows:
        for phase in ("prefill", "decode"):
            for distance, s in sorted(row.overall(phase).items()):
                numbers = (s.match, s.exact, s.at_least_one, *s.recall, s.calibration_error)
                made.append((row.predictor, phase, str(distance), *(f"{number:.3f}" for number in numbers)))
    return TextTable(
        title="All measures by phase and distance",
        columns=("predictor", "phase", "distance", "match", "exact", "at least one", *wider, "calib. error"),
        rows=tuple(made),
    )


def _chart(rows: Sequence[Any], phase: str) -> Plot:
    """Return a chart of match by distance, a line per predictor."""
    matches = {row.predictor: {d: s.match for d, s in sorted(row.overall(phase).items())} for row in rows}
    known = {name: by_distance for name, by_distance in matches.items() if by_distance}

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        for series, (name, by_distance) in enumerate(known.items()):
            line(axes, list(by_distance), list(by_distance.values()), series, name)
        axes.set(xlabel="distance (layers)", ylabel="match", ylim=(0, 1))
        axes.locator_params(axis="x", integer=True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))

    nearest = ", ".join(f"{name} {next(iter(by_distance.values())):.2f}" for name, by_distance in known.items())
    return Plot(
        key=f"{phase}-{'unseen' if rows[0].unseen_task else 'seen'}",
        title=f"Match in {phase} by distance",
        caption="Share of a token's experts among the predicted ones, by layers ahead of the last computed layer.",
        alt=f"Match in {phase} by distance; at the nearest: {nearest}",
        height=3.2,
        paint=paint,
    )
