"""Figures of expert use: by layer, by task, and its imbalance."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from moetool.base.tables import percent
from moetool.report.drawing import GREY, STYLES, heat, layer_ticks, line, scale_top
from moetool.report.figures.plot import Plot, drawn_tasks, layer_axis, map_height, maps, relative, some_tasks
from moetool.report.measures import SHARES
from moetool.report.trace_measures import TraceMeasures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def popularity(made: TraceMeasures) -> Plot:
    """Return a heat map of all layers and experts."""
    spec = made.routes.spec
    values_LE = relative(made.popularity.tokens_LE, spec.num_experts_L)
    high = scale_top([values_LE], 1.5)
    layer, expert = np.unravel_index(int(np.nanargmax(values_LE)), values_LE.shape)
    alt = (
        f"Heat map of {spec.num_layers} layers by {spec.num_experts} experts. Most used: expert {expert} of layer "
        f"{spec.layer_ids_L[layer]}, {values_LE[layer, expert]:.1f} times the mean of its layer."
    )

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        heat(axes, values_LE, low=0.0, high=high, label="uses / mean of the layer")
        axes.set_yticks(*layer_ticks(spec.layer_ids_L, 16))
        axes.set(xlabel="expert", ylabel="MoE layer")

    return Plot(
        title="Expert popularity, relative to the mean of its layer",
        key="popularity",
        height=map_height(spec.num_layers),
        alt=alt,
        paint=paint,
        caption="All tasks. 1 is an even share; the scale ends at the 99.5th percentile. A layer of one colour is used "
        "evenly. Light spots are experts that a cache should keep and a cluster should replicate.",
    )


def by_task(made: TraceMeasures) -> Plot | None:
    """Return bars of each task in the layer where tasks differ most; None with one task."""
    tasks, found, spec = drawn_tasks(made), made.popularity, made.routes.spec
    if len(tasks) < 2:
        return None
    layer = int(np.nanargmax(found.tasks_apart_L))
    num_experts = spec.num_experts_L[layer]
    loads = {made.routes.tasks[task]: found.tokens_QLE[task, layer, :num_experts] for task in tasks}
    tops = [f"{name}: expert {load_E.argmax()}" for name, load_E in loads.items()]
    return Plot(
        title=f"Which experts each task uses in layer {spec.layer_ids_L[layer]} (as Prism's Figure 2)",
        key="by-task",
        height=0.5 + 0.95 * len(tasks),
        alt=f"Bars. Most used, {'; '.join(tops)}.",
        paint=partial(_bars, loads=loads, sharex=True),
        caption="Share of the task's choices that each expert takes, in the layer where tasks differ most; the dashed "
        f"line is an even share. A server with this task alone has this load.{some_tasks(made)}",
    )


def _bars(figure: "Figure", loads: Mapping[str, np.ndarray], sharex: bool) -> None:
    """Draw a row of bars for each load: the experts' shares of its choices."""
    rows = figure.subplots(len(loads), 1, sharex=sharex, sharey=True, squeeze=False)[:, 0]
    for axes, (title, load_E) in zip(rows, loads.items(), strict=True):
        share_E = 100 * load_E / max(load_E.sum(), 1)
        axes.bar(np.arange(len(load_E)), share_E, width=0.85, color=STYLES[0][0], linewidth=0)
        axes.axhline(100 / len(load_E), color="#222222", linestyle="--", linewidth=0.9)
        axes.set(title=title, ylabel="share, %", xlim=(-0.7, len(load_E) - 0.3))
        axes.grid(visible=False, axis="x")
    rows[-1].set_xlabel("expert")


def by_layer(made: TraceMeasures) -> Plot | None:
    """Return bars of two layers of one task; None with one layer."""
    spec, found = made.routes.spec, made.popularity
    if spec.num_layers < 2:
        return None
    task = int(found.tokens_QLE.sum(axis=(1, 2)).argmax())
    uneven_L = found.gini_QL[task]
    layers = [int(uneven_L.argmax()), int(uneven_L.argmin())]
    loads = {
        f"layer {spec.layer_ids_L[layer]}: Gini {uneven_L[layer]:.2f}": found.tokens_QLE[
            task, layer, : spec.num_experts_L[layer]
        ]
        for layer in layers
    }
    return Plot(
        title=f"The most and the least skewed layer of task {made.routes.tasks[task]} (as Prism's Figure 3)",
        key="by-layer",
        height=2.7,
        alt=f"Bars of {' and of '.join(loads)}.",
        paint=partial(_bars, loads=loads, sharex=False),
        caption="Share of the task's choices. A skewed layer needs few experts in memory, an even one most of them. "
        "Layers should therefore get different shares of memory.",
    )


def task_maps(made: TraceMeasures) -> Plot | None:
    """Return a heat map for each task; None with one task."""
    tasks, spec = drawn_tasks(made), made.routes.spec
    if len(tasks) < 2:
        return None
    values = [relative(made.popularity.tokens_QLE[task], spec.num_experts_L) for task in tasks]
    high = scale_top(values, 1.5)
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)

    def paint(figure: "Figure") -> None:
        drawn = maps(figure, values, high, columns=columns)
        for task, axes in zip(tasks, drawn, strict=True):
            axes.set_title(made.routes.tasks[task])
            axes.set_yticks(*layer_ticks(spec.layer_ids_L, 8))
        drawn[(rows - 1) * columns].set(xlabel="expert", ylabel="MoE layer")

    return Plot(
        title="Expert popularity by task, relative to the mean of its layer",
        key="task-maps",
        height=0.4 + rows * min(3.2, 1.2 + 0.06 * spec.num_layers),
        alt=f"Heat maps of {', '.join(made.routes.tasks[task] for task in tasks)}.",
        paint=paint,
        caption=f"One scale, from 0 (dark) to {high:.1f} times the mean (light).{some_tasks(made)}",
    )


def tasks_apart(made: TraceMeasures) -> Plot | None:
    """Return lines of the divergence between tasks, and within one; None with one task."""
    found = made.popularity
    if len(made.routes.tasks) < 2:
        return None
    places = np.arange(made.routes.spec.num_layers)

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        line(axes, places, found.tasks_apart_L, 0, "halves of two tasks (mean over pairs)")
        line(axes, places, found.halves_apart_L, 1, "two halves of one task")
        axes.set_ylim(bottom=0)
        axes.set_ylabel("divergence, bits")
        layer_axis(axes, made)
        axes.legend(loc="best")

    return Plot(
        title="Divergence of expert use between tasks",
        key="tasks-apart",
        height=2.4,
        alt=f"Lines by layer: between tasks {found.tasks_apart_L.mean():.3f} bits on average, within one task "
        f"{found.halves_apart_L.mean():.3f}.",
        paint=paint,
        caption="Jensen-Shannon divergence of the shares of a layer's experts: 0 if equal, 1 if no expert is "
        "shared. The lower line compares two halves of one task's requests: differences by chance.",
    )


def skew(made: TraceMeasures) -> Plot:
    """Return lines of max / mean and Gini coefficient by layer."""
    found, spec, tasks = made.popularity, made.routes.spec, drawn_tasks(made)
    places = np.arange(spec.num_layers)

    def paint(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        for axes, whole_L, each_QL, title in (
            (left, found.uneven_L, found.uneven_QL, "most used expert / mean of the layer"),
            (right, found.gini_L, found.gini_QL, "Gini coefficient"),
        ):
            if len(tasks) > 1:
                for series, task in enumerate(tasks):
                    name = made.routes.tasks[task]
                    line(axes, places, each_QL[task], series, name, linewidth=1.0, marker="")
            axes.plot(places, whole_L, color="#222222", linewidth=2.2, label="all tasks")
            axes.set_title(title)
            axes.set_ylim(bottom=0)
            layer_axis(axes, made, 10)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    return Plot(
        title="Load imbalance of each layer",
        key="skew",
        height=3.1,
        alt=f"Lines by layer. All tasks: max over mean {found.uneven_L.min():.1f} to {found.uneven_L.max():.1f}, Gini "
        f"{found.gini_L.min():.2f} to {found.gini_L.max():.2f}.",
        paint=paint,
        caption="Left: load of the busiest GPU relative to the mean, with one expert per GPU. Right: 0 is even; near 1 "
        f"few experts take all. One task is usually more skewed than all together.{some_tasks(made)}",
    )


def coverage(made: TraceMeasures) -> Plot:
    """Return curves of coverage by the most used experts, on other requests."""
    found = made.coverage
    x = 100 * np.array(SHARES)
    others = "other requests" if len(made.routes.requests) > 1 else "the earlier half of the request"
    others += " of the same task" if found.other else ""
    tasks = f" and the {found.tasks} tasks with the most tokens" if found.tasks > 1 else ""

    def paint(figure: "Figure") -> None:
        axes = figure.add_subplot()
        line(axes, x, 100 * np.array(found.own), 0, f"chosen by {others}")
        if found.other:
            line(axes, x, 100 * np.array(found.mixed), 2, "chosen by other requests of all tasks")
            line(axes, x, 100 * np.array(found.other), 1, "chosen by another task")
        axes.plot(x, x, color=GREY, linestyle=":", label="random experts")
        axes.set(xlabel="experts kept of each layer, %", ylabel="choices covered, %", xlim=(0, 100), ylim=(0, 100))
        axes.legend(loc="lower right")

    quarter = SHARES.index(0.25)
    return Plot(
        title="Held-out coverage of each layer's most used experts",
        key="coverage",
        height=3.2,
        alt=f"Lines. A quarter of the experts covers {percent(found.own[quarter], '.0f')} of a task.",
        paint=paint,
        caption="Hit rate of a cache with pinned experts, or the local share of a server that holds them. Experts are "
        "chosen on one half of each task's requests and counted on the other (a single request: on its later half). "
        f"Mean over layers{tasks}.",
    )
