"""Results of a bench of expert parallelism: tables, and DIRECTOR's figures in miniature."""

import statistics
from collections.abc import Callable
from pathlib import Path

from moetool import tables
from moetool.bench.expert_parallelism import Bench, RankRun, Variant
from moetool.bench.paper.found_figure import draw_all
from moetool.bench.paper.verdict import Found


def batch_s(run: RankRun) -> float:
    """Median seconds of a batch, since single ones take many times as long on a busy machine."""
    return statistics.median(run.batch_s)


def busiest_bytes(run: RankRun) -> int:
    """Bytes on the busiest link between two GPUs."""
    return max(max(row) for row in run.sent_GG)


def paired(bench: Bench, name: str, base: str, of: Callable[[RankRun], float]) -> tuple[float, float, float]:
    """Median, minimum and maximum of two variants' ratio over rounds."""
    ratios = [of(a) / of(b) for a, b in zip(bench.runs[name], bench.runs[base], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def print_parallel_bench(bench: Bench) -> None:
    """Print tables of variants and migrations, and which values are emulated or counted."""
    o = bench.options
    base = next(name for name in ("offline", *bench.runs) if name in bench.runs)

    def median(one: Variant, of: Callable[[RankRun], float], scale: float = 1.0) -> float:
        return scale * statistics.median(map(of, bench.runs[one.name]))

    def simulated(one: Variant) -> str:
        told = bench.simulated.get(one.name)
        return "-" if told is None else f"{told['latency_s']:.3f} s"

    columns: dict[str, Callable[[Variant], str]] = {
        "variant": lambda one: one.name,
        "ms/batch": lambda one: f"{median(one, batch_s, 1e3):,.0f}",
        f"x {base}, paired": lambda one: "{:.3f} ({:.2f} to {:.2f})".format(*paired(bench, one.name, base, batch_s)),
        "busiest GPU's rows": lambda one: f"{median(one, lambda run: run.hottest):,.0f}",
        "x even": lambda one: f"{median(one, lambda run: run.hottest * o.ranks / run.rows):.3f}",
        "busiest link": lambda one: tables.count(median(one, busiest_bytes), "B"),
        "sent": lambda one: tables.count(median(one, lambda run: sum(map(sum, run.sent_GG))), "B"),
        "placed": lambda one: f"{bench.runs[one.name][0].placed}",
        "simulated": simulated,
    }
    title = f"{o.batches - 1} batches of {o.ranks * o.seats} requests, each of {o.tasks} tasks; "
    tables.table_of(f"{title}medians of {o.rounds} rounds", bench.variants, columns).print()
    moving = [one for one in bench.variants if any(run.moved_bytes for run in bench.runs[one.name])]
    batch_ms = 1e3 / (o.batches - 1)
    columns = {
        "variant": lambda one: one.name,
        "moved": lambda one: tables.count(median(one, lambda run: run.moved_bytes), "B"),
        "in an all-to-all": lambda one: tables.count(median(one, lambda run: run.during_exchange), "B"),
        "ms waited before batch": lambda one: f"{median(one, lambda run: run.ready_s, batch_ms):,.1f}",
        "ms all-to-alls waited": lambda one: f"{median(one, lambda run: run.waited_s, batch_ms):,.1f}",
        "ms waited for a decision": lambda one: f"{median(one, lambda run: run.decided_s, batch_ms):,.1f}",
        "ms to predict": lambda one: f"{median(one, lambda run: run.predict_s, 1e3):,.0f}",
        "ms to plan": lambda one: f"{median(one, lambda run: run.plan_s, 1e3):,.0f}",
        "asked": lambda one: ", ".join(f"{name} {n}" for name, n in bench.runs[one.name][0].asked.items()) or "-",
    }
    if moving:
        tables.table_of("experts migrated per run; times are per batch or per decision", moving, columns).print()
    if {"stop", "overlap"} <= bench.runs.keys():
        median_x, low, high = paired(bench, "overlap", "stop", batch_s)
        print(f"overlap against stop-the-world migration, paired: {median_x:.3f} of its time ({low:.2f} to {high:.2f})")
    tables.print_paragraph(
        f"emulated: {1e6 * o.expert_token_s:g} µs per expert row, {tables.count(o.link_bytes_s, 'B')}/s out of a GPU; "
        f"other times are measured on this machine; rows and bytes are counted"
    )
    if bench.costs:
        row_s, link, move = (bench.costs[name] for name in ("row_s", "link_bytes_s", "move_bytes_s"))
        asked = "".join(
            f"; {name} {1e3 * statistics.median(taken):.3g} ms per prompt token"
            for name, taken in bench.token_s.items()
            if name != "oracle" and all(taken)
        )
        tables.print_paragraph(
            f"measured while serving: {1e6 * row_s:.3g} µs per expert row, {tables.count(link, 'B')}/s of rows, "
            f"{tables.count(move, 'B')}/s of experts{asked}"
        )


def draw(bench: Bench, folder: Path) -> list[Path]:
    """Draw batch latency, mean and by batch, as one SVG file per DIRECTOR figure that the variants cover."""
    founds = {}
    for number in (6, 7, 8, 10, 11):
        names = [one.name for one in bench.variants if number in one.figures]
        if len(names) < 2:
            continue
        base = [batch_s(run) for run in bench.runs[names[0]]]
        batches = tuple(range(1, len(bench.runs[names[0]][0].batch_s) + 1))
        founds[f"director-figure-{number}"] = Found(
            values={n: [batch_s(a) / b for a, b in zip(bench.runs[n], base, strict=True)] for n in names},
            what=f"batch latency, x {names[0]}",
            unit="",
            on=f"{bench.options.ranks} ranks, times emulated",
            curves={n: [(batches, tuple(run.batch_s)) for run in bench.runs[n]] for n in names},
            axes=("batch", "seconds"),
        )
    return draw_all(folder, founds)
