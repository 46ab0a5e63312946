"""Plots of pages and files, and shared drawing functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetool.report.drawing import draw, heat, layer_ticks
from moetool.report.trace_measures import TraceMeasures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN_TASKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure for a page or a file.

    Attributes:
        key: name of lower-case letters and hyphens, unique on its page.
        height: height in inches.
    """

    key: str
    title: str
    caption: str
    alt: str
    height: float
    paint: "Callable[[Figure], None]"

    @property
    def svg(self) -> str:
        """The figure as an `<svg>` element."""
        return draw(self.key, self.height, self.alt, self.paint)


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


def maps(
    figure: "Figure", values: Sequence[np.ndarray], high: float, label: str = "", *, columns: int, share: bool = True
) -> "list[Axes]":
    """Draw heat maps from 0 to `high` in rows of `columns`; return their axes.

    Args:
        label: label of the scale at the right of each row; without it no scale is drawn.
        share: whether all have the same axes.
    """
    rows = -(-len(values) // columns)
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False).ravel().tolist()
    for i, axes in enumerate(grid):
        if i >= len(values):
            axes.set_axis_off()
            continue
        last = i % columns == columns - 1 or i == len(values) - 1
        heat(axes, values[i], low=0.0, high=high, label=label if last else "")
    return grid[: len(values)]


def map_height(num_layers: int) -> float:
    """Return the height in inches of a heat map over layers."""
    return min(6.0, 1.4 + 0.1 * num_layers)
