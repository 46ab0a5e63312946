"""What a person at a terminal sees: tables on stdout, narration and progress on stderr."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=1))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column is text, the others are numbers."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


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
