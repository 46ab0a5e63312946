"""Results of a bench as a figure: values with their spread over runs, and curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.report.drawing import STYLES, line, logarithmic, save
from moetool.simulation.simulation_results import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = tuple[tuple[float, ...], tuple[float, ...]]
_BAR = 0.27  # inches per bar
_LEAST = 2.6  # least height in inches of a figure with curves
_MARKED = 12  # most points of a line with markers
_FEW = 5  # bars that fill the least height; fewer are not drawn thicker
_FAR = 50  # ratio of abscissae above which an axis is logarithmic
_TITLE, _ABSCISSA, _ORDINATE = 150, 50, 24  # characters per line of a title and of axis labels
_UNEVEN = 12  # ratio of means above which points on a logarithmic axis replace bars


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentResult:
    """Results of an experiment.

    Attributes:
        values: values by compared name, one per seed; all have the same seeds, so that they pair.
        what: quantity of the values, as an axis label without unit.
        unit: unit of the values: `s`, `%` (for shares), or another suffix.
        on: description of the measurement, for display.
        curves: lines of a figure, one per seed, or one over all: abscissae and ordinates.
        axes: labels of the curves' axes.
        exact: whether the values are counted, so that one run decides.
        traces: number of independent traces (0: not counted); fewer than three decide nothing.
        experts: experts per layer of the measured traces, and those that a token uses; zeros without traces.
        expert_bytes: bytes of all experts of the measured model; 0: none was measured.
        best: by name, per seed, the value that no exact policy with that memory betters on that machine.
        highest_best: whether higher values are better.
        whole_layers: names whose policy moves all experts of a layer, so that experts per layer and token decide.
    """

    values: Mapping[str, Sequence[float]]
    what: str
    unit: str
    on: str
    curves: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    axes: tuple[str, str] = ("", "")
    exact: bool = False
    traces: int = 0
    experts: tuple[int, int] = (0, 0)
    expert_bytes: int = 0
    best: Mapping[str, Sequence[float]] = field(default_factory=dict)
    highest_best: bool = False
    whole_layers: tuple[str, ...] = ()


def draw_all(folder: Path, founds: Mapping[str, ExperimentResult]) -> list[Path]:
    """Draw results as SVG files by name; returns their paths. Effects: writes into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.svg" for name in founds]
    for path, found in zip(paths, founds.values(), strict=True):
        draw(path, found.what, found)
    return paths


def draw(path: Path, title: str, found: ExperimentResult) -> None:
    """Draw into a file, in the format of its suffix. Effects: writes `path`."""
    runs, rows = len(next(iter(found.values.values()))), len(found.values)

    def paint(figure: "Figure") -> None:
        panels: Any = figure.subplots(1, 2 if found.curves else 1, squeeze=False)[0]
        _values(panels[0], found)
        if found.curves:
            _curves(panels[1], found)
        spread = f"; mean and 95 % interval of {runs} runs" if runs > 1 else ""
        figure.suptitle(fill(f"{title}: {found.on}{spread}", _TITLE), x=0.005, ha="left", fontsize=8)

    save(path, max(_LEAST if found.curves else 0.0, 1.1 + _BAR * rows), paint)


def _values(axes: "Axes", found: ExperimentResult) -> None:
    """Draw bars from 0, or points on a logarithmic axis if the smallest bar would be invisible."""
    names = list(found.values)
    means, halves = zip(*(interval(each) for each in found.values.values()), strict=True)
    scale, unit = (100, "%") if found.unit == "%" else (1, found.unit)
    if unit == "s" and max(means) < 1:
        scale, unit = 1000, "ms"
    values = [scale * mean for mean in means]
    errors = [scale * (half or 0.0) for half in halves]
    places = range(len(names))
    series = {name: STYLES[number % len(STYLES)][0] for number, name in enumerate(found.curves)}
    # A sweep's values are named by their curve and the point, in any order: "director, 4 GPUs".
    colours = [
        next((colour for curve, colour in series.items() if f", {curve}, " in f", {name}, "), STYLES[0][0])
        for name in names
    ]
    if min(values) > 0 and max(values) > _UNEVEN * min(values):
        # An interval that reaches below 0 ends at the axis.
        below = [min(error, 0.9 * value) for value, error in zip(values, errors, strict=True)]
        axes.errorbar(values, places, xerr=[below, errors], fmt="none", ecolor="#222222")
        axes.scatter(values, places, c=colours, zorder=3)
        logarithmic(axes)
    else:
        axes.barh(places, values, xerr=errors, height=0.7, color=colours, ecolor="#222222")
        if min(values) >= 0:  # an interval that reaches below 0 ends at the axis
            axes.set_xlim(left=0)
    axes.set_yticks(places, names)
    margin = 0.6 + (max(0, _FEW - len(names)) / 2 if found.curves else 0)
    axes.set_ylim(len(names) - 1 + margin, -margin)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(fill(f"{found.what}, {unit}" if unit else found.what, _ABSCISSA if found.curves else _TITLE))


def _curves(axes: "Axes", found: ExperimentResult) -> None:
    from matplotlib.ticker import MaxNLocator

    series = [curves for curves in found.curves.values() if curves]
    ordinates = [y for curves in series for _, ys in curves for y in ys]
    ordinate, scale = found.axes[1], 1
    if ordinate.endswith(", s") and max(ordinates, default=1) < 1:
        ordinate, scale = ordinate.removesuffix("s") + "ms", 1000
    for number, (name, curves) in enumerate(found.curves.items()):
        x, means, halves = average([(x, tuple(scale * y for y in ys)) for x, ys in curves])
        line(axes, x, means, number, name, **({"marker": ""} if len(x) > _MARKED else {}))
        if halves is not None:
            low, high = np.subtract(means, halves), np.add(means, halves)
            axes.fill_between(x, low, high, color=STYLES[number % len(STYLES)][0], alpha=0.15, linewidth=0)
    abscissae = [x for curves in series for xs, _ in curves for x in xs]
    if abscissae and min(abscissae) > 0 and max(abscissae) > _FAR * min(abscissae):
        logarithmic(axes)
    elif all(x == round(x) for x in abscissae):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(found.axes[0])
    axes.set_ylabel(fill(ordinate, _ORDINATE))
    lowest, highest = min(ordinates, default=0.0), max(ordinates, default=0.0)
    if ordinate.endswith("%"):
        axes.set_ylim(0, 103)
    elif lowest > 0 and highest > _UNEVEN * lowest:
        logarithmic(axes, "y")
    elif axes.get_ylim()[0] < 0 <= lowest:
        axes.set_ylim(bottom=0)  # an interval that reaches below 0 ends at the axis
    if len(found.curves) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def average(curves: Sequence[Curve]) -> tuple[list[float], list[float], list[float] | None]:
    """Return the common abscissae of curves, the mean ordinates there, and half of their 95 % intervals.

    A single curve has no intervals. Without common points the first curve represents all.
    """
    shared = sorted(set.intersection(*(set(x) for x, _ in curves)))
    if len(curves) == 1 or not shared:
        x, y = curves[0]
        return list(x), list(y), None
    known = [dict(zip(x, y, strict=True)) for x, y in curves]
    spread = [interval([each[x] for each in known]) for x in shared]
    return shared, [mean for mean, _ in spread], [half or 0.0 for _, half in spread]
