"""Figures of pages, and shared drawing functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetool.report.drawing import draw, layer_ticks
from moetool.report.trace_measures import TraceMeasures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_TASKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A figure of the page.

    Attributes:
        section: heading of its section.
        title: heading of the figure.
        svg: the `<svg>` element.
        caption: explanation of the figure.
    """

    section: str
    title: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """A figure for a page or a file.

    Attributes:
        key: name of lower-case letters and hyphens.
        title: heading of the figure.
        caption: explanation of the figure.
        alt: alternative text.
        height: height in inches.
        paint: draws the figure.
    """

    key: str
    title: str
    caption: str
    alt: str
    height: float
    paint: "Callable[[Figure], None]"

    def on(self, section: str) -> Picture:
        """Return the figure for a page."""
        svg = draw(self.key, self.height, self.alt, self.paint)
        return Picture(section=section, title=self.title, svg=svg, caption=self.caption)


def relative(tokens_LE: np.ndarray, num_experts_L: Sequence[int]) -> np.ndarray:
    """Return uses of each expert over the mean of its layer (1 is even); NaN beyond a layer's experts."""
    relative_LE = np.full(tokens_LE.shape, np.nan)
    for layer, num_experts in enumerate(num_experts_L):
        load_E = tokens_LE[layer, :num_experts]
        relative_LE[layer, :num_experts] = load_E / max(load_E.mean(), 1e-30)
    return relative_LE


def drawn_tasks(made: TraceMeasures) -> list[int]:
    """Return the tasks with the most tokens that a figure has room for, ascending."""
    tokens_Q = made.popularity.tokens_QLE.sum(axis=(1, 2))
    return sorted(np.argsort(-tokens_Q, kind="stable")[:DRAWN_TASKS].tolist())


def some_tasks(made: TraceMeasures) -> str:
    """Return a note if not all tasks are drawn."""
    all_tasks = len(made.routes.tasks)
    return f" The {DRAWN_TASKS} tasks of {all_tasks} with the most tokens are drawn." if all_tasks > DRAWN_TASKS else ""


def layer_axis(axes: "Axes", made: TraceMeasures, most: int = 14) -> None:
    """Mark at most `most` layers under a figure by their absolute ids."""
    axes.set_xticks(*layer_ticks(made.routes.spec.layer_ids_L, most))
    axes.set_xlabel("MoE layer")


def map_height(num_layers: int) -> float:
    """Return the height in inches of a heat map over layers."""
    return min(6.0, 1.4 + 0.1 * num_layers)
