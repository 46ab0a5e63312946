"""What a person at a terminal sees: tables on stdout, narration and progress on stderr."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1) -> None:
    """A table on stdout; the first `num_text` columns are text, the others are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def print_evaluations(rows: Sequence[Any]) -> None:
    """Predictors side by side (`moetool.evaluation.Evaluation`), then the share matched by layer."""
    first = rows[0]
    held_out = "held-out requests" if first.requests == "test" else "requests that it has not seen"
    print_table(
        f"next layer's experts on {first.num_requests} {held_out}, {first.num_tokens:,} tokens",
        ["predictor", "match", "exact", "at least one", "in decode", "ms / token", "size", "of the experts"],
        [
            [
                row.predictor if row.baseline is None else f"{row.predictor} ({row.baseline})",
                *(f"{value:.3f}" for value in (row.scores[0].match, row.scores[0].exact, row.scores[0].at_least_one)),
                *(f"{score.match:.3f}" for score in row.scores if score.phase == "decode" and score.layer is None),
                f"{row.step_ms:.2f}",
                count(row.size_bytes, "B"),
                f"{row.expert_bytes_share:.1%}",
            ]
            for row in rows
        ],
    )
    layers = [score.layer for score in first.scores if score.phase == "all" and score.layer is not None]
    print_table(
        "match by MoE layer",
        ["predictor", *map(str, layers)],
        [
            [row.predictor, *(f"{s.match:.3f}" for s in row.scores if s.phase == "all" and s.layer is not None)]
            for row in rows
        ],
    )


def narrate(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr, flush=True)


def count(number: float, unit: str = "") -> str:
    """A number for people: `12.3 MB` for bytes (unit `B`), `12,345` otherwise."""
    if unit != "B":
        return f"{number:,.0f}{unit}"
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:,.0f} B" if not prefix else f"{number:,.1f} {prefix}B"
        number /= 1000
    return f"{number:,.1f} TB"


@contextlib.contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left, on stderr, if that is a terminal.

    Gives:
        A function that is called with how much is done.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
