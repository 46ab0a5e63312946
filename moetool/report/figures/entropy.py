"""Figures of the entropy of expert use: FineMoE's Figure 3."""

from typing import TYPE_CHECKING

import numpy as np

from moetool.report.drawing import GREY, heat, layer_ticks, line, scale_top
from moetool.report.figures.plot import Plot, drawn_tasks, layer_axis, map_height, relative, some_tasks
from moetool.report.sample import entropy
from moetool.report.trace_measures import TraceMeasures
from moetool.trace.expert_counts import count_experts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def levels(made: TraceMeasures) -> Plot:
    """Return heat maps of one iteration of a request and of all iterations."""
    routes, spec = made.routes, made.routes.spec
    lengths = [len(routes.steps(request)) for request in range(len(routes.requests))]
    request = int(np.argsort(lengths, kind="stable")[len(lengths) // 2])  # of median length
    steps_TS = routes.steps(request)
    if not len(steps_TS):
        request = int(np.argmax(lengths))
        steps_TS = routes.steps(request)
    fine, coarse = count_experts(spec, steps_TS[len(steps_TS) // 2][None]), count_experts(spec, steps_TS)
    bits = [float(entropy(counts_LE).mean()) for counts_LE in (fine, coarse)]
    steps = "iterations" if routes.stepwise else "tokens"

    def paint(figure: "Figure") -> None:
        sides = figure.subplots(1, 2, sharey=True)
        titles = (f"one of its {steps}: {bits[0]:.1f} bits", f"all {len(steps_TS)} {steps}: {bits[1]:.1f} bits")
        for axes, counts_LE, title in zip(sides, (fine, coarse), titles, strict=True):
            values_LE = relative(counts_LE, spec.num_experts_L)
            heat(axes, values_LE, low=0.0, high=scale_top([values_LE], 1.0))
            axes.set_yticks(*layer_ticks(spec.layer_ids_L, 12))
            axes.set(xlabel="expert", title=title)
        sides[0].set_ylabel("MoE layer")

    return Plot(
        title=f"Request {routes.requests[request]} of task {routes.tasks[routes.task_B[request]]}, fine and coarse "
        "(as FineMoE's Figure 3 a)",
        key="levels",
        height=map_height(spec.num_layers),
        alt=f"Two heat maps: {bits[0]:.1f} bits for one, {bits[1]:.1f} bits for all.",
        paint=paint,
        caption="Each map from 0 (dark) to its most used experts (light). One iteration uses few experts. Their sum "
        "over a request is blurred and says less about the next iteration.",
    )


def spread(made: TraceMeasures) -> Plot:
    """Return lines of entropy by layer, and by the number of summed iterations."""
    found, routes, tasks = made.spread, made.routes, drawn_tasks(made)
    places = np.arange(routes.spec.num_layers)

    def paint(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2)
        for series, task in enumerate(tasks):
            line(left, places, found.request_QL[task], series, routes.tasks[task])
            line(right, found.steps, found.growth_QN[task], series, routes.tasks[task])
        handles, labels = left.get_legend_handles_labels()
        left.plot(places, np.log2(routes.spec.num_experts_L), color=GREY, linestyle=":", label="even use: log2 E")
        left.plot(places, found.token_L, color=GREY, linewidth=2.2, label="one token: log2 k")
        if made.reuse.prompt_tokens is not None and made.reuse.prompt_tokens > 1 and routes.stepwise:
            left.plot(places, found.prompt_L, color=GREY, linestyle="--", label="a prompt, as one iteration")
        left.set(title="(b) by layer: one request (coarse), one token (fine)", ylabel="entropy, bits", ylim=(0, None))
        left.legend(handles=left.get_lines()[len(tasks) :], loc="lower right")
        layer_axis(left, made, 10)
        right.set_xscale("log")
        ticks = [step for i, step in enumerate(found.steps) if i % 2 == 0]
        right.set_xticks(ticks, [str(tick) for tick in ticks])
        right.minorticks_off()
        right.set(title="(c) several together, mean over layers", ylim=(0, None))
        right.set_xlabel("iterations of one token" if routes.stepwise else "tokens of the prompt")
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    return Plot(
        title="Entropy of expert use, by layer and by iterations (as FineMoE's Figure 3 b and c)",
        key="spread",
        height=3.5,
        alt=f"Lines by task: one token {found.token_L.mean():.1f} bits, one request "
        f"{np.nanmean(found.request_QL):.1f} bits on average.",
        paint=paint,
        caption="Entropy of the choices over a layer's experts: n bits mean that effectively 2^n experts are used. One "
        "token's k experts have log2 k bits. Higher is harder to predict. (c) ends where fewer than half of a task's "
        f"requests are that long.{some_tasks(made)}",
    )


def router(made: TraceMeasures) -> Plot | None:
    """Return lines of the entropy of the routers' probabilities; None without logits."""
    if made.router is None:
        return None
    found, tasks = made.router, drawn_tasks(made)
    places = np.arange(made.routes.spec.num_layers)

    def paint(figure: "Figure") -> None:
        sides = figure.subplots(1, 2, sharey=True)
        for axes, values_QL, title in zip(
            sides,
            (found.token_QL, found.request_QL),
            ("of one token (fine)", "of the mean over a request (coarse)"),
            strict=True,
        ):
            for series, task in enumerate(tasks):
                line(axes, places, values_QL[task], series, made.routes.tasks[task])
            axes.plot(places, np.log2(made.routes.spec.num_experts_L), color=GREY, linestyle=":", label="log2 E")
            axes.set(title=title, ylim=(0, None))
            layer_axis(axes, made, 10)
        sides[0].set_ylabel("entropy, bits")
        figure.legend(*sides[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)

    return Plot(
        title="Entropy of the routers' own probabilities over all experts",
        key="router",
        height=3.2,
        alt=f"Lines by task: one token {np.nanmean(found.token_QL):.1f} bits, the mean over a request "
        f"{np.nanmean(found.request_QL):.1f} bits.",
        paint=paint,
        caption=f"From the logits of {found.num_requests} requests. Expert maps hold them (FineMoE § 4.1). "
        "They show how sure the router is; the chosen experts alone do not.",
    )
