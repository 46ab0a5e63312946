"""What a bench of expert parallelism says: tables, and DIRECTOR's figures in miniature."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool import tables
from moetool.bench.expert_parallelism import Bench, RankRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def batch_s(run: RankRun) -> float:
    """Median seconds of a batch: on a busy machine a single one may take many times as long."""
    return statistics.median(run.batch_s)


def busiest_bytes(run: RankRun) -> int:
    """Bytes on the busiest way from GPU to GPU."""
    return max(max(row) for row in run.sent_GG)


def paired(bench: Bench, name: str, base: str, of: Callable[[RankRun], float]) -> tuple[float, float, float]:
    """Median, least and most of the ratios of two variants, round by round."""
    ratios = [of(a) / of(b) for a, b in zip(bench.runs[name], bench.runs[base], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def print_parallel_bench(bench: Bench) -> None:
    """A table of all variants and one of the migrations; what was emulated and what was counted."""
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
            *("variant", "ms a batch", f"x {base}, paired", "hottest GPU's rows", "x even"),
            *("busiest link", "sent in all", "placed", "simulated"),
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
            "experts on the move, a run; times are of a batch, or of a decision",
            [
                *("variant", "moved", "in an all-to-all", "ms waited before it", "ms all-to-alls waited"),
                *("ms waited for a decision", "ms to predict", "ms to plan", "asked"),
            ],
            moved,
        )
    stop, overlap = "stop", "overlap"
    if stop in bench.runs and overlap in bench.runs:
        median, low, high = paired(bench, overlap, stop, batch_s)
        print(f"overlapped against stop-the-world, paired: {median:.3f} of its time ({low:.2f} to {high:.2f})")
    print(
        f"emulated: {1e6 * o.expert_token_s:g} us an expert's row, {tables.count(o.link_bytes_s, 'B')}/s out of a GPU; "
        f"the other times are of this machine; rows and bytes are counted"
    )
    if bench.costs:
        row_s, link, move = (bench.costs[name] for name in ("row_s", "link_bytes_s", "move_bytes_s"))
        asked = "".join(
            f"; {name} {1e3 * statistics.median(taken):.3g} ms a prompt's token"
            for name, taken in bench.token_s.items()
            if name != "oracle" and all(taken)
        )
        print(
            f"measured while serving: {1e6 * row_s:.3g} us an expert's row, {tables.count(link, 'B')}/s of rows, "
            f"{tables.count(move, 'B')}/s of experts{asked}"
        )


def draw(bench: Bench, folder: Path) -> list[Path]:
    """Figures as SVG files, one for each of the paper's that the variants make up."""
    from moetool.report import drawing

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number in (6, 7, 8, 10, 11):
        names = [one.name for one in bench.variants if number in one.figures]
        if len(names) < 2:
            continue
        path = folder / f"director-figure-{number}.svg"
        paint = _traces if number == 8 else _bars

        def painted(figure: "Figure", paint: Any = paint, names: Sequence[str] = names) -> None:
            paint(figure, bench, names)

        drawing.save(path, 3.2, painted)
        written.append(path)
    return written


def _bars(figure: "Figure", bench: Bench, names: Sequence[str]) -> None:
    """Median batch latency against the first variant's, and the hottest GPU's rows over an even share."""
    from moetool.report import drawing

    panels: Any = figure.subplots(1, 2)
    base = names[0]
    ratios = [paired(bench, name, base, batch_s) for name in names]
    even = [_median(bench.runs[name], lambda run: run.hottest * bench.options.ranks / run.rows) for name in names]
    colours = [drawing.STYLES[place % len(drawing.STYLES)][0] for place in range(len(names))]
    low = [median - least for median, least, _ in ratios]
    high = [most - median for median, _, most in ratios]
    panels[0].bar(names, [median for median, _, _ in ratios], yerr=[low, high], color=colours, capsize=3)
    panels[0].set_ylabel(f"batch latency, x {base}")
    panels[1].bar(names, even, color=colours)
    panels[1].set_ylabel("hottest GPU's rows, x even")
    for axes in panels:
        axes.tick_params(axis="x", labelrotation=12)


def _traces(figure: "Figure", bench: Bench, names: Sequence[str]) -> None:
    """Each batch's latency, the median over the rounds."""
    from moetool.report import drawing

    axes: Any = figure.subplots()
    for number, name in enumerate(names):
        columns = zip(*(run.batch_s for run in bench.runs[name]), strict=True)
        medians = [statistics.median(column) for column in columns]
        drawing.line(axes, range(1, len(medians) + 1), medians, number, name)
    axes.set_xlabel("batch")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.legend()


def _median(runs: Sequence[RankRun], of: Callable[[RankRun], float]) -> float:
    return statistics.median(map(of, runs))
