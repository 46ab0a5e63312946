"""Simulated runs as a figure: over what was swept, or over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.report import drawing
from moetool.report.drawing import line
from moetool.simulation.results import Simulated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = tuple[dict[str, str], Simulated]
_LABELS = {"gpus": "GPUs", "bandwidth": "bandwidth of a link", "gap": "mean gap between a server's requests"}


def save(path: Path, runs: Sequence[Run]) -> None:
    """Draw runs into a file: mean latency and local computing, a line for each mode and each other swept value.

    Over several seeds points are means, with the 95 % confidence interval of a mean (normal). Where nothing but
    modes and seeds was swept, the share of local computing over time and the distribution of latencies are drawn.

    Effects: writes `path`, in the format that its name ends in.
    """
    along = next((name for name in _LABELS if len({at.get(name) for at, _ in runs}) > 1), None)
    drawing.save(path, 3.6, lambda figure: _over_time(figure, runs) if along is None else _swept(figure, runs, along))


def _swept(figure: "Figure", runs: Sequence[Run], along: str) -> None:
    values = list(dict.fromkeys(at[along] for at, _ in runs))
    series: dict[str, dict[str, list[Simulated]]] = {}
    for at, found in runs:
        rest = [value for name, value in at.items() if name not in (along, "seed")]
        series.setdefault(", ".join(rest), {}).setdefault(at[along], []).append(found)
    panels: Any = figure.subplots(1, 2)
    measures = (
        (panels[0], "mean latency, s", lambda found: found.mean_s),
        (panels[1], "computed locally, %", lambda found: 100 * found.local),
    )
    for axes, label, measure in measures:
        for number, (name, points) in enumerate(series.items()):
            found_XR = [[measure(run) for run in points[value]] for value in values]
            mean_X = [float(np.mean(row)) for row in found_XR]
            half_X = [1.96 * float(np.std(row, ddof=1)) / len(row) ** 0.5 if len(row) > 1 else 0.0 for row in found_XR]
            line(axes, np.arange(len(values)), mean_X, number, name)
            if any(half_X):
                low_X = np.subtract(mean_X, half_X)
                axes.fill_between(np.arange(len(values)), low_X, np.add(mean_X, half_X), alpha=0.15, color="#666666")
        axes.set_xticks(range(len(values)), values)
        axes.set_xlabel(_LABELS[along])
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend()


def _over_time(figure: "Figure", runs: Sequence[Run]) -> None:
    panels: Any = figure.subplots(1, 2)
    for number, (at, found) in enumerate(runs):
        name = ", ".join(at.values())
        known = [one for one in found.windows if one.local is not None]
        times = [one.until_s for one in known]
        line(panels[0], times, [100 * (one.local or 0.0) for one in known], number, name)
        shares = 100 * np.arange(1, len(found.served) + 1) / len(found.served)
        line(panels[1], found.latencies_s, shares, number, name, marker="")
    panels[0].set_xlabel("simulated seconds")
    panels[0].set_ylabel("computed locally, %")
    panels[0].set_ylim(bottom=0)
    panels[1].set_xlabel("latency of a request, s")
    panels[1].set_ylabel("requests, %")
    panels[1].set_xscale("log")
    panels[0].legend()
