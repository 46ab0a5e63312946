"""Figures of reuse, and of the hit rates of cache policies."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.tables import percent
from moetool.report.drawing import GREY, line
from moetool.report.figures.plot import Plot, layer_axis
from moetool.report.trace_measures import BOUND, TraceMeasures, curve_slots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AT_ONCE: dict[str, Any] = {"drawstyle": "steps-post"}  # hits rise only at whole numbers of slots


def distances(made: TraceMeasures) -> Plot:
    """Return the curve of LRU stack distances over all layers."""
    reuse, total = made.reuse, made.routes.spec.total_experts
    slots = curve_slots(made.routes)
    half, most = reuse.slots_for(0.5), reuse.slots_for(0.9)

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        shares = [100 * reuse.share_within(n) for n in slots]
        line(axes, slots, shares, 0, "share of reuses within this distance", **AT_ONCE)
        axes.axhline(100 * len(reuse.distances) / reuse.uses, color=GREY, linestyle=":", label="all uses but the first")
        cliff = (made.routes.spec.num_layers - 1) * max(made.routes.spec.top_k_L)
        if cliff < total:
            axes.axvline(cliff, color=GREY, linestyle="--", linewidth=1.0, label=f"(L-1) k = {cliff}")
        axes.set(xlabel="distinct experts used since, of all layers", ylabel="% of uses")
        axes.set(xlim=(0, total), ylim=(0, 100))
        axes.legend(loc="lower right")

    return Plot(
        title="Reuse distance: distinct experts used before an expert is used again",
        key="distances",
        height=2.8,
        alt=f"Curve: half of the reuses within {half} experts, 90 % within {most}.",
        paint=paint,
        caption="LRU stack distance over all layers: also the hit rate of LRU with that many slots in one pool. At "
        "batch 1, LRU hits nothing with (L-1) k slots or fewer: a token passes all other layers before it returns.",
    )


def layer_distances(made: TraceMeasures) -> Plot:
    """Return lines of LRU stack distances within each layer."""
    reuse, spec = made.reuse, made.routes.spec
    known = reuse.layer_median_L[~np.isnan(reuse.layer_median_L)]
    typical = f"{np.median(known):.0f}" if len(known) else "no"
    places = np.arange(spec.num_layers)

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        line(axes, places, reuse.layer_high_L, 1, "90 % of the reuses at or below")
        line(axes, places, reuse.layer_median_L, 0, "half of the reuses at or below")
        axes.plot(places, spec.num_experts_L, color=GREY, linestyle=":", label="experts of the layer")
        axes.set(ylabel="distinct experts of the layer", ylim=(0, None))
        layer_axis(axes, made)
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)

    return Plot(
        title="Reuse distance within each layer",
        key="layer-distances",
        height=2.5,
        alt=f"Lines by layer. In the median layer half of the reuses are within {typical} experts of it.",
        paint=paint,
        caption="Slots that each layer needs for these hit rates, in a pool with slots per layer.",
    )


def budgets(made: TraceMeasures) -> Plot:
    """Return curves of hit rates by memory, with Belady's bound."""
    names = list(dict.fromkeys(row.policy for row in made.rows))
    total = made.routes.spec.total_experts

    def curve(name: str) -> tuple[list[float], list[float]]:
        mine = [row for row in made.rows if row.policy == name]
        return [_share(made, row.budget_bytes) for row in mine], [100 * row.counts.hit_rate for row in mine]

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        slots = curve_slots(made.routes)
        x, y = [100 * n / total for n in slots], [100 * made.reuse.share_within(n) for n in slots]
        axes.plot(x, y, color="#bbbbbb", **AT_ONCE, linewidth=1.0, label="lru, by reuse distance in slots")
        for series, name in enumerate(name for name in names if name != BOUND):
            line(axes, *curve(name), series, name)
        line(axes, *curve(BOUND), 5, f"{BOUND}: knows the future", linewidth=2.2)
        axes.set(xlabel="memory for experts, % of all", ylabel="hit rate, %", xlim=(0, 100), ylim=(0, 100))
        axes.legend(loc="lower right")

    best = max((row for row in made.rows), key=lambda row: (row.budget_bytes, row.counts.hit_rate))
    return Plot(
        title="Hit rate of cache policies by expert memory",
        key="budgets",
        height=3.6,
        alt=f"Curves of {', '.join(names)}; the highest is {best.policy} with {percent(best.counts.hit_rate, '.0f')} "
        f"at {_share(made, best.budget_bytes):.0f} % of the experts. The table below has the numbers.",
        paint=paint,
        caption="As in moetool replay. Belady evicts the expert with the farthest next use: the fewest loads without "
        "prefetching. A policy that prefetches may have more hits, but not fewer loads.",
    )


def _share(made: TraceMeasures, budget_bytes: int) -> float:
    return 100 * budget_bytes / made.whole_bytes
