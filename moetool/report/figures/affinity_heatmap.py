"""Figures of the affinity of one layer to the next."""

from typing import TYPE_CHECKING

import numpy as np

from moetool.report.drawing import GREY, line, scale_top
from moetool.report.figures.plot import Plot, layer_axis, maps
from moetool.report.trace_measures import TraceMeasures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def affinity_maps(made: TraceMeasures) -> Plot | None:
    """Return heat maps of some pairs of layers; None with one layer."""
    if not made.lifts:
        return None
    spec = made.routes.spec
    layers = sorted(made.lifts)
    values = [made.lifts[layer] for layer in layers]
    high = scale_top(values, 2.0)
    per_row = min(3, len(layers))

    def paint(figure: "Figure") -> None:
        drawn = maps(figure, values, high, "times as likely", columns=per_row, share=False)
        for layer, axes in zip(layers, drawn, strict=True):
            axes.set_title(f"held-out match {made.affinity.match_M[layer]:.2f}")
            axes.set_xlabel(f"expert of layer {spec.layer_ids_L[layer + 1]}")
            axes.set_ylabel(f"expert of layer {spec.layer_ids_L[layer]}")

    names = [f"{spec.layer_ids_L[layer]} to {spec.layer_ids_L[layer + 1]}" for layer in layers]
    return Plot(
        title=f"Expert affinity, as lift over popularity: layers {', '.join(names)}",
        key="affinity-maps",
        height=3.0 * -(-len(layers) // per_row),
        alt=f"Heat maps of {', '.join(names)}.",
        paint=paint,
        caption="For tokens that used the expert on the left: how many times likelier each expert of the next layer is "
        "than over all tokens. 1 everywhere: the next layer does not depend on this one. Blank: experts with fewer "
        "than 20 tokens. The pairs have the strongest, median and weakest held-out match.",
    )


def affinity(made: TraceMeasures) -> Plot:
    """Return lines of the share of experts predicted by the previous layer and token, by layer."""
    found, spec = made.affinity, made.routes.spec
    places = np.arange(spec.num_layers)

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        if len(found.match_M):
            line(axes, places[1:], found.match_M, 0, "by affinity to the previous layer")
            line(axes, places[1:], found.popular_M, 2, "by popularity")
            axes.plot(places[1:], found.chance_M, color=GREY, linestyle=":", label="by chance, k / E")
        line(axes, places, found.repeat_L, 1, "used by the previous token too")
        axes.set(ylabel="share of the k experts", ylim=(0, 1))
        layer_axis(axes, made)
        axes.legend(loc="upper center", ncols=4)

    mean = f"{np.nanmean(found.match_M):.2f}" if len(found.match_M) else "-"
    return Plot(
        title="Share of a layer's k experts predicted by the previous layer, and by the previous token",
        key="affinity",
        height=2.8,
        alt=f"Lines by layer: affinity finds {mean} of the experts on average.",
        paint=paint,
        caption="Counted on one half of the requests and scored on the other (DuoServe-MoE § 4.1, Eqs. 2 and 3). The "
        "gap between affinity and popularity is what prefetching can gain; the previous token shows what a cache of "
        "recent experts gains.",
    )
