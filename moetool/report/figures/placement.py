"""Figures of placements: experts of each GPU, load balance, traffic between servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moetool.base.tables import percent
from moetool.placement.demand import per_server
from moetool.placement.plan import PlacementPlan
from moetool.placement.planning import PlannerRow
from moetool.report.drawing import STYLES, heat, layer_ticks, scale_top
from moetool.report.figures.plot import Plot, map_height, maps, relative

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_MAPS = 16
_COLUMNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A plan in a report.

    Attributes:
        name: `before` or `after`, or the planner's name.
        row: score on the traces; None without traces.
        flow_LGG: tokens of each layer that start on GPU j and are computed on GPU k; None without traces.
    """

    name: str
    plan: PlacementPlan
    row: PlannerRow | None = None
    flow_LGG: np.ndarray | None = None

    @property
    def label(self) -> str:
        """Name and planner, or the planner alone."""
        return self.name if self.name == self.plan.planner else f"{self.name}: {self.plan.planner}"


def plots(plans: Sequence[Placed], tokens_LE: np.ndarray | None) -> dict[str, list[Plot]]:
    """Return the figures of each section.

    Args:
        tokens_LE: uses of each expert; None without traces.
    """
    held = [plot for placed in plans for plot in (holders(placed, tokens_LE), copies(placed)) if plot is not None]
    worked = [plot for plot in (balance(plans), local(plans), traffic(plans)) if plot is not None]
    return {
        "Placement": held,
        "Load": [plot for plot in worked if plot.key == "balance"],
        "Traffic between servers": [plot for plot in worked if plot.key != "balance"],
    }


def holders(placed: Placed, tokens_LE: np.ndarray | None) -> Plot | None:
    """Return a map of layers and experts per GPU, or per server with many GPUs; None with many servers."""
    plan = placed.plan
    cluster, spec, placed_GLE = plan.cluster, plan.spec, plan.placed_GLE
    names = [f"{cluster.servers[n].name}, GPU {g}" for g, n in enumerate(cluster.server_G)]
    if len(names) > _MOST_MAPS:
        placed_GLE = per_server(cluster, placed_GLE) > 0
        names = [server.name for server in cluster.servers]
    if len(names) > _MOST_MAPS:
        return None
    wanted_LE = np.ones(placed_GLE.shape[1:]) if tokens_LE is None else relative(tokens_LE, spec.num_experts_L)
    values = [np.where(held_LE, wanted_LE, np.nan) for held_LE in placed_GLE]
    high = 1.0 if tokens_LE is None else scale_top(values, 1.5)
    rows, columns = -(-len(names) // _COLUMNS), min(_COLUMNS, len(names))

    def paint(figure: "Figure") -> None:
        drawn = maps(figure, values, high, "" if tokens_LE is None else "uses / mean", columns=columns)
        for axes, name, held_LE in zip(drawn, names, placed_GLE, strict=True):
            axes.set_title(f"{name}: {int(held_LE.sum()):,}")
            axes.set_yticks(*layer_ticks(spec.layer_ids_L, 8))
        drawn[(rows - 1) * columns].set(xlabel="expert", ylabel="MoE layer")

    says = "; ".join(f"{name} {int(held_LE.sum())}" for name, held_LE in zip(names, placed_GLE, strict=True))
    colour = "location of each expert" if tokens_LE is None else "popularity in the cluster, relative to the layer"
    return Plot(
        key=f"holders-{placed.name.replace(' ', '-')}",
        title=f"Expert placement: {placed.label}",
        caption=f"Colour: {colour}; blank: not placed there. Above each map: its number of experts in all layers.",
        alt=f"Experts held: {says}.",
        height=0.4 + rows * min(3.0, 1.3 + 0.05 * spec.num_layers),
        paint=paint,
    )


def copies(placed: Placed) -> Plot | None:
    """Return a map of the number of copies of each expert; None if all have one."""
    plan = placed.plan
    count_LE = plan.placed_GLE.sum(axis=0).astype(np.float64)
    if count_LE.max() < 2:
        return None
    count_LE[count_LE == 0] = np.nan  # beyond a layer's experts

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        most = int(np.nanmax(count_LE))
        heat(axes, count_LE, low=1.0, high=float(most), label="GPUs that hold it")
        figure.axes[-1].set_yticks(range(1, most + 1, max(1, most // 8)))
        axes.set_yticks(*layer_ticks(plan.spec.layer_ids_L))
        axes.set(xlabel="expert", ylabel="MoE layer")

    return Plot(
        key=f"copies-{placed.name.replace(' ', '-')}",
        title=f"Copies of each expert: {placed.label}",
        caption="More copies serve more tokens locally and take memory from other experts.",
        alt=f"{np.nanmean(count_LE):.2f} copies on average, {np.nanmax(count_LE):.0f} at most.",
        height=map_height(plan.spec.num_layers),
        paint=paint,
    )


def balance(plans: Sequence[Placed]) -> Plot | None:
    """Return maps of tokens per GPU and layer, over the mean of the GPUs; None without traces."""
    known = [(placed, placed.flow_LGG.sum(axis=1)) for placed in plans if placed.flow_LGG is not None]
    if not known or len(known[0][0].plan.cluster.gpus) < 2:
        return None
    values = [load_LG / np.maximum(load_LG.mean(axis=1, keepdims=True), 1e-30) for _, load_LG in known]
    high = scale_top(values, 1.5)

    def paint(figure: "Figure") -> None:
        panels = maps(figure, values, high, "load / mean", columns=len(values))
        for axes, (placed, _), map_LG in zip(panels, known, values, strict=True):
            axes.set_title(f"{placed.name}: slowest GPU {map_LG.max(axis=1).mean():.2f} times the mean")
            axes.set_yticks(*layer_ticks(placed.plan.spec.layer_ids_L))
            axes.set_xlabel("GPU")
            axes.locator_params(axis="x", integer=True)
        panels[0].set_ylabel("MoE layer")

    return Plot(
        key="balance",
        title="Tokens computed by each GPU in each layer",
        caption="Relative to the mean over GPUs; 1 is balanced. The slowest GPU sets a layer's time.",
        alt="; ".join(
            f"{placed.name}: the slowest GPU has {map_LG.max(axis=1).mean():.2f} times the mean"
            for (placed, _), map_LG in zip(known, values, strict=True)
        ),
        height=map_height(known[0][0].plan.spec.num_layers) + 0.4,
        paint=paint,
    )


def local(plans: Sequence[Placed]) -> Plot | None:
    """Return bars of each server's local compute share; None without traces, or with one server."""
    known = [(placed, placed.row.score) for placed in plans if placed.row is not None]
    if not known or len(known[0][0].plan.cluster.servers) < 2:
        return None
    names = [server.name for server in known[0][0].plan.cluster.servers]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        width = 0.8 / len(known)
        for number, (placed, found) in enumerate(known):
            at = np.arange(len(names) + 1) + (number - (len(known) - 1) / 2) * width
            shares = [100 * (share or 0.0) for share in found.local_N] + [100 * found.local]
            bars = axes.bar(at, shares, width * 0.92, color=STYLES[number][0], label=placed.name)
            if len(names) <= 12:
                axes.bar_label(bars, fmt="%.1f", fontsize=8)
        if len(names) <= 24:
            axes.set_xticks(range(len(names) + 1), [*names, "all"], rotation=0 if len(names) <= 6 else 40)
        else:
            axes.set_xlabel("server; all servers at the right")
        axes.set_ylabel("computed locally, %")
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside right upper")

    return Plot(
        key="local",
        title="Local compute share: expert calls that the request's own server computes",
        caption="Prism's local compute ratio, by the server at which requests arrive.",
        alt="; ".join(f"{placed.name}: {percent(found.local)} of all" for placed, found in known),
        height=2.8,
        paint=paint,
    )


def traffic(plans: Sequence[Placed]) -> Plot | None:
    """Return a map of traffic between servers per plan; None without traces, or with one server."""
    known = [(placed, _sent(placed)) for placed in plans if placed.flow_LGG is not None]
    if not known or len(known[0][0].plan.cluster.servers) < 2:
        return None
    names = [server.name for server in known[0][0].plan.cluster.servers]
    unit = unit_of(known[0][0].plan)
    high = max(float(np.nanmax(sent_NN)) for _, sent_NN in known) or 1.0

    def paint(figure: "Figure") -> None:
        panels = maps(figure, [sent_NN for _, sent_NN in known], high, unit, columns=len(known))
        for axes, (placed, sent_NN) in zip(panels, known, strict=True):
            axes.set_title(f"{placed.name}: {np.nansum(sent_NN):,.1f} {unit} in total")
            axes.set_xlabel("to")
            if len(names) > 12:
                continue
            axes.set_xticks(range(len(names)), names, rotation=0 if len(names) <= 4 else 35)
            axes.set_yticks(range(len(names)), names)
            for i, j in np.argwhere(np.isfinite(sent_NN)).tolist():
                dark = sent_NN[i, j] < 0.55 * high
                axes.text(j, i, f"{sent_NN[i, j]:,.1f}", ha="center", va="center", color="white" if dark else "#111111")
        panels[0].set_ylabel("from")

    return Plot(
        key="traffic",
        title=f"Traffic between servers, {unit}",
        caption="Dispatch and combine traffic of these traces' requests."
        if unit == "MB"
        else "Dispatch and combine traffic in tokens; bytes need the model's hidden size, which is unknown. ",
        alt="; ".join(f"{placed.name}: {np.nansum(sent_NN):,.1f} {unit}" for placed, sent_NN in known),
        height=1.0 + min(3.5, 0.55 * len(names)),
        paint=paint,
    )


def unit_of(plan: PlacementPlan) -> str:
    """Return the unit of traffic: bytes need the model's hidden size."""
    return "MB" if plan.spec.hidden_size > 0 else "thousand tokens"


def _sent(placed: Placed) -> np.ndarray:
    """Return [from, to] in `unit_of`, dispatch and combine together; NaN from a server to itself."""
    assert placed.flow_LGG is not None and placed.row is not None
    cluster = placed.plan.cluster
    flow_NN = per_server(cluster, per_server(cluster, placed.flow_LGG.sum(axis=0)).T).T
    sent_NN = (flow_NN + flow_NN.T) / 1e3
    known = [sent for _, _, sent in placed.row.score.link_bytes if sent is not None]
    if known:
        others = ~np.eye(len(flow_NN), dtype=bool)
        sent_NN[others] = np.array(known) / 1e6
    np.fill_diagonal(sent_NN, np.nan)
    return sent_NN
