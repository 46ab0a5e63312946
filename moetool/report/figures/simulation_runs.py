"""Figures of simulated runs: by swept value, time, planner, round and link."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moetool.base.tables import percent
from moetool.report.drawing import GREY, STYLES, line, logarithmic
from moetool.report.figures.plot import Plot, maps
from moetool.simulation.simulation_results import Simulated, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Run = tuple[dict[str, str], Simulated]
_AXES = {"gpus": "GPUs", "bandwidth": "bandwidth of a link", "gap": "mean gap between a server's requests"}
_MOST_LINES, _MOST_SERVERS = 6, 40
_WIDEST = 0.2  # bar, of the distance between groups


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Return all figures with data in these runs, the main one first."""
    along = _along(runs)
    drawn = [over_time(runs) if along is None else swept(runs, along), by_planner(runs), relative_along(runs, along)]
    return [plot for plot in (*drawn, by_round(runs), utilisation(runs), links(runs)) if plot is not None]


def _along(runs: Sequence[Run]) -> str | None:
    """Return the axis of lines: the first swept amount."""
    return next((name for name in _AXES if len({at.get(name) for at, _ in runs}) > 1), None)


def _values(runs: Sequence[Run], name: str) -> list[str]:
    return list(dict.fromkeys(at[name] for at, _ in runs if name in at))


def _series(at: dict[str, str], *without: str) -> str:
    """Return the name of a run's line: its settings without the given ones."""
    return ", ".join(value for name, value in at.items() if name not in without)


def swept(runs: Sequence[Run], along: str) -> Plot:
    """Return mean latency and local compute share, a line per planner and other swept value (as Prism's Figure 8)."""
    values = _values(runs, along)
    series: dict[str, dict[str, list[Simulated]]] = {}
    for at, found in runs:
        series.setdefault(_series(at, along, "seed"), {}).setdefault(at[along], []).append(found)
    measures: tuple[tuple[str, Callable[[Simulated], float]], ...] = (
        ("mean latency, s", lambda found: found.mean_s),
        ("computed locally, %", lambda found: 100 * found.local),
    )

    def paint(figure: "Figure") -> None:
        panels: Any = figure.subplots(1, 2)
        for axes, (label, measure) in zip(panels, measures, strict=True):
            bands = {name: [[measure(run) for run in points[x]] for x in values] for name, points in series.items()}
            _bands(axes, bands, values)
            axes.set(xlabel=_AXES[along], ylabel=label)
            axes.set_ylim(bottom=0)
        panels[0].legend()

    return Plot(
        key="swept",
        title=f"Latency and local compute share by {_AXES[along]} (as Prism's Figure 8)",
        caption="Mean latency per request, and the share of expert calls that the request's own server computes."
        + _spread_of(runs),
        alt=f"Lines over {', '.join(values)} for {', '.join(series)}.",
        height=3.6,
        paint=paint,
    )


def _bands(axes: "Axes", series: Mapping[str, Sequence[Sequence[float]]], values: Sequence[str]) -> None:
    """Draw lines of means over named points, with confidence intervals."""
    places = np.arange(len(values))
    for number, (name, found_XR) in enumerate(series.items()):
        mean_X, half_X = np.array([(mean, half or 0.0) for mean, half in map(interval, found_XR)]).T
        line(axes, places, mean_X, number, name)
        if half_X.any():
            colour = STYLES[number % len(STYLES)][0]
            axes.fill_between(places, mean_X - half_X, mean_X + half_X, alpha=0.15, color=colour, linewidth=0)
    axes.set_xticks(places, values)


def _spread_of(runs: Sequence[Run]) -> str:
    seeds = len(_values(runs, "seed"))
    return f" Means over {seeds} seeds, with the 95 % confidence interval of a mean." if seeds > 1 else ""


def over_time(runs: Sequence[Run]) -> Plot:
    """Return local compute share over time (as Prism's Figures 6 and 7a), and the distribution of latencies."""
    drawn = _one_seed(runs)

    def paint(figure: "Figure") -> None:
        panels: Any = figure.subplots(1, 2)
        for number, (at, found) in enumerate(drawn):
            known = [one for one in found.windows if one.local is not None]
            times = [one.until_s for one in known]
            line(panels[0], times, [100 * (one.local or 0.0) for one in known], number, _series(at, "seed"))
            shares = 100 * np.arange(1, len(found.served) + 1) / len(found.served)
            line(panels[1], found.latencies_s, shares, number, _series(at, "seed"), marker="")
        panels[0].set(xlabel="simulated seconds", ylabel="computed locally, %")
        panels[0].set_ylim(bottom=0)
        panels[0].set_xlim(0, 1.05 * max((one.until_s for _, found in drawn for one in found.windows), default=1.0))
        panels[1].set(xlabel="latency per request, s", ylabel="requests, %")
        logarithmic(panels[1])
        panels[0].legend()

    return Plot(
        key="over-time",
        title="Local compute share over time, and latencies (as Prism's Figures 6 and 7)",
        caption="Left: the share of expert calls that the request's own server computes, window by window. Right: the "
        f"share of requests with at most this latency.{_which_seed(runs)}",
        alt="; ".join(f"{_series(at, 'seed')}: mean latency {found.mean_s:.3g} s" for at, found in drawn),
        height=3.6,
        paint=paint,
    )


def _one_seed(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of the first seed; if there are too many, those of the first swept values."""
    found = [run for run in runs if run[0].get("seed") == runs[0][0].get("seed")]
    if len(found) > _MOST_LINES:
        found = [run for run in found if _series(run[0], "planner") == _series(runs[0][0], "planner")]
    return found[:_MOST_LINES]


def _which_seed(runs: Sequence[Run]) -> str:
    """Return a note on the drawn runs if not all are drawn."""
    first, drawn = runs[0][0], _one_seed(runs)
    same = [name for name in first if name != "planner" and len(_values(runs, name)) > 1]
    shown = ", ".join(f"{name} {first[name]}" for name in same if {at[name] for at, _ in drawn} == {first[name]})
    return f" Runs of {shown}." if shown else ""


def run_ratios(runs: Sequence[Run]) -> dict[str, dict[str, list[float]]]:
    """Return mean latencies relative to the first planner with the same seed, by group and planner.

    The settings `lookahead` and `migrate` belong to the planner, not to the group.
    """
    first = next(iter(_values(runs, "planner")))
    own = ("planner", "lookahead", "migrate")
    base: dict[tuple[str, str], float] = {}
    for at, found in runs:
        if at["planner"] == first:
            base.setdefault((_series(at, *own, "seed"), at.get("seed", "")), found.mean_s)
    ratios: dict[str, dict[str, list[float]]] = {}
    for at, found in runs:
        group = _series(at, *own, "seed")
        name = ", ".join(at[part] for part in own if part in at)
        ratios.setdefault(group, {}).setdefault(name, []).append(found.mean_s / base[group, at.get("seed", "")])
    return ratios


def by_planner(runs: Sequence[Run]) -> Plot | None:
    """Return bars of relative latency by planner (as DIRECTOR's Figures 7, 10 and 11); None for a single bar."""
    ratios = run_ratios(runs)
    names = list(dict.fromkeys(name for group in ratios.values() for name in group))
    if len(names) < 2:
        return None
    none = [float("nan")]  # no such bar in a group
    means = {name: [interval(group.get(name, none)) for group in ratios.values()] for name in names}

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        width = min(0.8 / len(names), _WIDEST)
        spread = any(half for found in means.values() for _, half in found)
        for number, (name, found) in enumerate(means.items()):
            at = np.arange(len(ratios)) + (number - (len(names) - 1) / 2) * width
            colour = STYLES[number % len(STYLES)][0]
            bars = axes.bar(at, [mean for mean, _ in found], width * 0.92, color=colour, label=name)
            if len(names) * len(ratios) <= 12:
                axes.bar_label(bars, fmt="%.3f", label_type="center" if spread else "edge", padding=2, fontsize=8)
            if spread:
                mean, half = [m for m, _ in found], [h or 0.0 for _, h in found]
                axes.errorbar(at, mean, yerr=half, fmt="none", ecolor="#222222", capsize=3, elinewidth=1)
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set_xlim(-0.5, len(ratios) - 0.5)
        axes.set_xticks(range(len(ratios)), list(ratios))
        axes.set_ylabel(f"latency / {names[0]}")
        axes.grid(visible=False, axis="x")
        figure.legend(loc="outside right upper")

    return Plot(
        key="by-planner",
        title=f"Latency relative to {names[0]} (as DIRECTOR's Figures 7, 10 and 11)",
        caption="Mean latency per request relative to the first planner, on the same requests." + _spread_of(runs),
        alt="; ".join(
            f"{group + ': ' if group else ''}"
            + ", ".join(f"{name} {interval(row)[0]:.3f}" for name, row in made.items())
            for group, made in ratios.items()
        ),
        height=3.2,
        paint=paint,
    )


def relative_along(runs: Sequence[Run], along: str | None) -> Plot | None:
    """Return lines of relative latency over an amount (DIRECTOR's Figure 9); None without a sweep or with one
    planner."""
    if along is None or len(_values(runs, "planner")) < 2:
        return None
    values = _values(runs, along)
    by_value = {value: run_ratios([run for run in runs if run[0][along] == value]) for value in values}
    series: dict[str, list[list[float]]] = {}
    for value, groups in by_value.items():
        for group, planners in groups.items():
            rest = ", ".join(part for part in group.split(", ") if part and part != value)
            for name, ratios in planners.items():
                series.setdefault(f"{name}{', ' if rest else ''}{rest}", []).append(ratios)
    first = _values(runs, "planner")[0]

    def paint(figure: "Figure") -> None:
        axes = figure.subplots()
        _bands(axes, series, values)
        axes.set(xlabel=_AXES[along], ylabel=f"latency / {first}")
        figure.legend(loc="outside right upper")

    return Plot(
        key="relative",
        title=f"Latency relative to {first}, by {_AXES[along]} (as DIRECTOR's Figure 9)",
        caption="Mean latency per request relative to the first planner, on the same requests." + _spread_of(runs),
        alt="; ".join(
            f"{name}: {', '.join(f'{interval(row)[0]:.3f}' for row in rows)}" for name, rows in series.items()
        ),
        height=3.2,
        paint=paint,
    )


def rounds(found: Simulated) -> list[float]:
    """Return the mean latency from the start of requests that begin together, in the order of their start."""
    began: dict[float, list[float]] = {}
    for one in found.served:
        began.setdefault(one.started_s, []).append(one.finished_s - one.started_s)
    return [float(np.mean(began[at_s])) for at_s in sorted(began)]


def _numbered(figure: "Figure", lines: Sequence[tuple[dict[str, str], np.ndarray]], xlabel: str, ylabel: str) -> None:
    """Draw a line per run over 1, 2, ..."""
    axes = figure.subplots()
    for number, (at, values) in enumerate(lines):
        line(axes, np.arange(1, len(values) + 1), values, number, _series(at, "seed"))
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.locator_params(axis="x", integer=True)
    figure.legend(loc="outside right upper")


def by_round(runs: Sequence[Run]) -> Plot | None:
    """Return latency batch by batch (as DIRECTOR's Figure 8); None where requests do not begin together."""
    made = [(at, rounds(found), len(found.served)) for at, found in _one_seed(runs)]
    drawn = [(at, series) for at, series, requests in made if len(series) > 2 and requests >= 2 * len(series)]
    if not drawn:
        return None

    def paint(figure: "Figure") -> None:
        lines = [(at, 1e3 * np.array(series)) for at, series in drawn]
        _numbered(figure, lines, "batch", "mean latency from its start, ms")

    return Plot(
        key="by-round",
        title="Latency batch by batch (as DIRECTOR's Figure 8)",
        caption="Mean over the requests that start together, without the wait for earlier batches." + _which_seed(runs),
        alt="; ".join(f"{_series(at, 'seed')}: {min(s):.3g} to {max(s):.3g} s" for at, s in drawn),
        height=3.0,
        paint=paint,
    )


def utilisation(runs: Sequence[Run]) -> Plot | None:
    """Return the utilization of each GPU, busiest first."""
    drawn = _one_seed(runs)

    def paint(figure: "Figure") -> None:
        lines = [(at, 100 * np.sort(found.utilisation_G)[::-1]) for at, found in drawn]
        _numbered(figure, lines, "GPU, the busiest first", "busy, % of the time")
        figure.axes[0].set_ylim(bottom=0)

    return Plot(
        key="utilisation",
        title="GPU utilization",
        caption="Share of the run that each GPU computed. A steep line means load imbalance: others wait for the "
        f"busiest GPU.{_which_seed(runs)}",
        alt="; ".join(f"{_series(at, 'seed')}: {percent(max(found.utilisation_G))} at most" for at, found in drawn),
        height=2.8,
        paint=paint,
    )


def links(runs: Sequence[Run]) -> Plot | None:
    """Return a map of bytes between servers per planner; None where links are not between two servers."""
    drawn = []
    for at, found in _one_seed(runs)[:4]:
        sent = {tuple(name.split(" -> ")): size for name, size, _ in found.links if " -> " in name}
        names = sorted({one.server for one in found.served} | {end for pair in sent for end in pair})
        if any(len(pair) != 2 or pair[1] == "others" for pair in sent) or not 1 < len(names) <= _MOST_SERVERS:
            continue
        sent_NN = np.array([[sent.get((a, b), np.nan) if a != b else np.nan for b in names] for a in names]) / 1e6
        drawn.append((_series(at, "seed"), names, sent_NN))
    if not any(np.isfinite(sent_NN).any() for _, _, sent_NN in drawn):
        return None
    high = max(float(np.nanmax(sent_NN)) for _, _, sent_NN in drawn if np.isfinite(sent_NN).any())

    def paint(figure: "Figure") -> None:
        panels = maps(figure, [sent_NN for _, _, sent_NN in drawn], high, "MB", columns=len(drawn), share=False)
        for axes, (name, names, _) in zip(panels, drawn, strict=True):
            axes.set_title(name)
            if len(names) <= 12:
                axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
                axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
            axes.set_xlabel("to")
        panels[0].set_ylabel("from")

    return Plot(
        key="links",
        title="Bytes from server to server",
        caption="Dispatch, combine and expert migration traffic." + _which_seed(runs),
        alt="; ".join(f"{name}: {float(np.nansum(sent_NN)):,.0f} MB" for name, _, sent_NN in drawn),
        height=3.0,
        paint=paint,
    )
