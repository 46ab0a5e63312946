"""Matplotlib figures as inline SVG: system fonts, no external references."""

import html
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base import durable
from moetool.base.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILES = (".svg", ".png", ".pdf")
"""Suffixes of figure files."""
WIDTH = 10.0
"""Width of a full-column figure in inches; at 72 units an inch, type of 9 units looks like 12 pixels at 960."""
STYLES: tuple[tuple[str, Any, str], ...] = (
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", "-.", "^"),
    ("#cc79a7", ":", "D"),
    ("#8a6d00", (0, (6, 1.5)), "v"),
    ("#222222", (0, (1, 1)), "x"),
)
"""Colour, line and marker of each series: Okabe and Ito's colours, darkened to read on white."""
GREY = "#666666"
_THEMED = {colour: f"c{i}" for i, (colour, _, _) in enumerate(STYLES)}
_THEMED |= {"#000000": "ink", "#dddddd": "rule", GREY: "muted"}
_NUMBERS = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",
    "svg.hashsalt": "moetool",
}


def draw(key: str, height: float, alt: str, paint: Callable[["Figure"], None]) -> str:
    """Return an `<svg>` element with an alternative text.

    Args:
        key: prefix of every id, so that figures of one page share none; unused ids are removed.
        height: height in inches of a figure `WIDTH` wide.
        paint: draws into a given figure.
    """
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    return _inline(key, _painted(height, paint, format="svg", metadata=unsaid).decode(), alt)


def require_drawable(path: Path) -> None:
    """Raises: UsageError unless the suffix is a supported figure format."""
    if path.suffix not in FILES:
        raise UsageError(f"{path} is not a supported figure format; use {', '.join(FILES)}")


def save(path: Path, height: float, paint: Callable[["Figure"], None]) -> None:
    """Save a figure as a file in the format of its suffix. Raises: UsageError: the suffix is not .svg, .png or .pdf."""
    require_drawable(path)
    dated = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    metadata = {dated: None} if dated else None
    durable.write_bytes(path, _painted(height, paint, format=path.suffix[1:], dpi=150, metadata=metadata))


def _painted(height: float, paint: Callable[["Figure"], None], **options: Any) -> bytes:
    """Return a figure as a file; `options` are those of matplotlib's `savefig`."""
    import matplotlib
    from matplotlib.figure import Figure

    # From the defaults, not the user's matplotlibrc: the same trace gives the same page.
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_NUMBERS)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        paint(figure)
        drawn = io.BytesIO()
        figure.savefig(drawn, **options)
    return drawn.getvalue()


def _inline(key: str, svg: str, alt: str) -> str:
    """Convert an SVG file to a part of an HTML page."""
    view = re.search(r'viewBox="([^"]+)"', svg)
    assert view is not None, "matplotlib gives its figures a viewBox"
    body = svg[svg.index("<g id=") : svg.rindex("</svg>")]  # without prologue, metadata and rules for the whole page
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', body))
    body = re.sub(r' id="([^"]+)"', lambda found: f' id="{key}-{found[1]}"' if found[1] in used else "", body)
    body = body.replace("url(#", f"url(#{key}-").replace('xlink:href="#', f'href="#{key}-')
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"\n\s*", " ", body)
    for colour, name in _THEMED.items():  # the page defines these names for light and dark mode
        body = body.replace(f": {colour}", f": var(--{name})")
    body = re.sub(r"(<path [^>]*)fill: #ffffff", r"\1fill: var(--paper)", body)
    return f'<svg viewBox="{view[1]}" role="img" aria-label="{html.escape(alt)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'


def heat(axes: "Axes", values_YX: np.ndarray, *, low: float, high: float, label: str = "", **extent: Any) -> None:
    """Draw a heat map with its scale; NaN shows the page, values above `high` have the lightest colour.

    Args:
        label: label of the scale; without it no scale is drawn.
    """
    import matplotlib

    colours = matplotlib.colormaps["cividis"].with_extremes(bad=(0, 0, 0, 0))
    image = axes.imshow(
        values_YX, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="none", rasterized=True, **extent
    )
    axes.grid(visible=False)
    if label:
        figure = axes.figure
        over = "max" if (values_YX > high * 1.001).any() else "neither"
        figure.colorbar(image, ax=axes, label=label, extend=over, fraction=0.03, pad=0.01)


def scale_top(maps: Sequence[np.ndarray], least: float) -> float:
    """Return the upper end of a heat map's scale: the 99.5th percentile, at least `least`."""
    values = np.concatenate([values.ravel() for values in maps])
    known = values[~np.isnan(values)]
    return max(least, float(np.quantile(known, 0.995))) if len(known) else least


def layer_ticks(layer_ids: Sequence[int], most: int = 14) -> tuple[list[int], list[str]]:
    """Return places and absolute ids of evenly spaced layers for an axis."""
    step = max(1, -(-len(layer_ids) // most))
    places = list(range(0, len(layer_ids), step))
    return places, [str(layer_ids[place]) for place in places]


def line(axes: "Axes", x: Sequence[float] | np.ndarray, y: Any, series: int, label: str, **more: Any) -> None:
    """Draw a line in the style of a series, with markers if it has few points."""
    colour, dashes, marker = STYLES[series % len(STYLES)]
    given = {"color": colour, "linestyle": dashes, "marker": marker if len(x) <= 32 else "", "label": label, **more}
    axes.plot(x, y, **given)


def logarithmic(axes: "Axes", which: str = "x") -> None:
    """Set a logarithmic axis, x or y, with ticks at 1, 2 and 5 times powers of ten, written as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
