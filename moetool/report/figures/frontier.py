"""The frontier of memory and latency of a cache plan, for a page or a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from moetool.base import durable
from moetool.caching.plan import CachePlan
from moetool.report.drawing import GREY, line, save
from moetool.report.figures.plot import Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def frontier_plot(plan: CachePlan) -> Plot:
    """Return the figure of time or bytes per token by memory, on choosing and held-out requests.

    Milliseconds if the plan was made with a profile, else megabytes. A point is labelled where the policy changes.
    """
    points = sorted(plan.frontier, key=lambda point: point["device_memory_bytes"])
    timed = all(point["tpot_used_s"] is not None for point in points)
    chosen_by, held_out = ("tpot_used_s", "tpot_held_out_s") if timed else ("bytes_used", "bytes_held_out")
    scale = 1e3 if timed else 1e-6
    unit = "ms/decode token" if timed else "MB/decode token"
    memory_mb = [point["device_memory_bytes"] / 1e6 for point in points]

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        for series, (name, label) in enumerate(((chosen_by, "chosen on"), (held_out, "held out"))):
            values = [float("nan") if point[name] is None else scale * point[name] for point in points]
            line(axes, memory_mb, values, series, label)
        before = None
        for point, x in zip(points, memory_mb, strict=True):
            if point["chosen"]:
                axes.axvline(x, color=GREY, linestyle=":", label="the plan")
            if point["policy"] != before:  # labels of one policy in a row would overlap
                at = (x, scale * point[chosen_by])
                axes.annotate(point["policy"], at, xytext=(3, 5), textcoords="offset points", fontsize=8)
            before = point["policy"]
        if plan.target_tpot_s is not None and timed:
            axes.axhline(scale * plan.target_tpot_s, color=GREY, linestyle="--", label="target")
        axes.set(
            title=f"{plan.spec.name}: the best policy by memory",
            xlabel="device memory, MB",
            ylabel=unit,
            ylim=(0, None),
        )
        axes.margins(x=0.08)
        axes.legend(loc="upper right")

    return Plot(
        key="frontier",
        title=f"{'Time per token' if timed else 'Bytes loaded'} by device memory, {unit}",
        caption="The best policy for each memory size, chosen on one half of the requests and tested on the other. A "
        "point is labelled where the policy changes.",
        alt="; ".join(f"{x:,.0f} MB: {point['policy']}" for point, x in zip(points, memory_mb, strict=True)),
        height=4.0,
        paint=paint,
    )


def draw_frontier(path: Path, plan: CachePlan) -> None:
    """Draw the frontier into a file.

    Effects: writes the file, whole or not at all.

    Raises:
        UsageError: the suffix is not a supported figure format.
    """
    durable.require_writable(path)
    plot = frontier_plot(plan)
    save(path, plot.height, plot.paint)
