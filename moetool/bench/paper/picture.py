"""What an experiment found as a figure: a bar for each value with its spread, and its curves, if it has any."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.bench.paper.recipe import Claim
from moetool.bench.paper.verdict import Found, interval
from moetool.report.drawing import STYLES, line, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BAR = 0.27  # inches
_FAR = 50  # times the least abscissa, from which an axis is logarithmic


def draw(path: Path, claim: Claim, found: Found) -> None:
    """Draw into a file, in the format that its name ends in.

    Effects: writes `path`.
    """
    rows = list(found.values)

    def paint(figure: "Figure") -> None:
        panels: Any = figure.subplots(1, 2 if found.curves else 1, squeeze=False)[0]
        measured = str(claim.options.get("measure", claim.experiment)).replace("_", " ")
        _bars(panels[0], rows, [found.values[name] for name in rows], found.unit, measured)
        if found.curves:
            for number, (name, (x, y)) in enumerate(found.curves.items()):
                line(panels[1], x, y, number, name)
            panels[1].set_xlabel(found.axes[0])
            abscissae = [each for x, _ in found.curves.values() for each in x]
            if abscissae and min(abscissae) > 0 and max(abscissae) > _FAR * min(abscissae):
                panels[1].set_xscale("log")
            panels[1].set_ylabel(found.axes[1])
            panels[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
            if found.axes[1].endswith("%"):
                panels[1].set_ylim(bottom=0)
        figure.suptitle(f"{claim.id}: {found.on}", x=0.005, ha="left", fontsize=8)

    save(path, max(2.4, 1.0 + _BAR * len(rows)), paint)


def _bars(axes: "Axes", names: Sequence[str], values: Sequence[Sequence[float]], unit: str, what: str) -> None:
    scale = 100 if unit == "%" else 1
    means, halves = zip(*(interval(each) for each in values), strict=True)
    places = range(len(names))
    colour = STYLES[0][0]
    errors = [scale * (half or 0.0) for half in halves]
    axes.barh(places, [scale * mean for mean in means], xerr=errors, height=0.7, color=colour, ecolor="#222222")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{what}, {unit}" if unit else what)
