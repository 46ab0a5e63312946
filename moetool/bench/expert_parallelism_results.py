"""Results of a bench of expert parallelism: tables, and DIRECTOR's figures in miniature."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moetool import tables
from moetool.bench.expert_parallelism import Bench, RankRun
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
    rows: list[list[Any]] = []
    for one in bench.variants:
        runs = bench.runs[one.name]
        ratio, low, high = paired(bench, one.name, base, batch_s)
        told = bench.simulated.get(one.name)
        rows.append(
            [
                one.name,
                f"{1e3 * statistics.median(map(batch_s, runs)):,.0f}",
                f"{ratio:.3f} ({low:.2f} to {high:.2f})",
                f"{_median(runs, lambda run: run.hottest):,.0f}",
                f"{_median(runs, lambda run: run.hottest * o.ranks / run.rows):.3f}",
                tables.count(_median(runs, busiest_bytes), "B"),
                tables.count(_median(runs, lambda run: sum(map(sum, run.sent_GG))), "B"),
                f"{runs[0].placed}",
                "-" if told is None else f"{told['latency_s']:.3f} s",
            ]
        )
    tables.print_table(
        f"{o.batches - 1} batches of {o.ranks * o.seats} requests, each of {o.tasks} tasks; medians of {o.rounds} "
        f"rounds",
        [
            *("variant", "ms/batch", f"x {base}, paired", "busiest GPU's rows", "x even"),
            *("busiest link", "sent", "placed", "simulated"),
        ],
        rows,
    )
    moved = [
        [
            one.name,
            tables.count(_median(runs, lambda run: run.moved_bytes), "B"),
            tables.count(_median(runs, lambda run: run.during_exchange), "B"),
            f"{1e3 * _median(runs, lambda run: run.ready_s) / (o.batches - 1):,.1f}",
            f"{1e3 * _median(runs, lambda run: run.waited_s) / (o.batches - 1):,.1f}",
            f"{1e3 * _median(runs, lambda run: run.decided_s) / (o.batches - 1):,.1f}",
            f"{1e3 * _median(runs, lambda run: run.predict_s):,.0f}",
            f"{1e3 * _median(runs, lambda run: run.plan_s):,.0f}",
            ", ".join(f"{name} {count}" for name, count in runs[0].asked.items()) or "-",
        ]
        for one in bench.variants
        for runs in [bench.runs[one.name]]
        if any(run.moved_bytes for run in runs)
    ]
    if moved:
        tables.print_table(
            "experts migrated per run; times are of a batch, or of a decision",
            [
                *("variant", "moved", "in an all-to-all", "ms waited before batch", "ms all-to-alls waited"),
                *("ms waited for a decision", "ms to predict", "ms to plan", "asked"),
            ],
            moved,
        )
    stop, overlap = "stop", "overlap"
    if stop in bench.runs and overlap in bench.runs:
        median, low, high = paired(bench, overlap, stop, batch_s)
        print(f"overlap against stop-the-world migration, paired: {median:.3f} of its time ({low:.2f} to {high:.2f})")
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


def _median(runs: Sequence[RankRun], of: Callable[[RankRun], float]) -> float:
    return statistics.median(map(of, runs))
