"""Terminal output: tables on stdout, narration and progress on stderr."""

import contextlib
import json
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moetool.base import logs

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_S = 10.0
START_S = 2.0
_spoken = threading.Event()


@contextlib.contextmanager
def start_line() -> Iterator[None]:
    """Say that the command is starting if nothing is printed for two seconds on a terminal, or ten without one."""
    _spoken.clear()

    def wait() -> None:
        if not _spoken.wait(START_S if sys.stderr.isatty() else LINE_S):
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                narrate("moetool: starting")

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        _spoken.set()


@contextlib.contextmanager
def line_if_slow(line: str) -> Iterator[None]:
    """Narrate a line if the work takes longer than two seconds."""

    def say() -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed
            narrate(line)

    timer = threading.Timer(START_S, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    _spoken.set()
    print(json.dumps(value, indent=1))


def print_markdown(text: str) -> None:
    """Print Markdown: formatted and paged on a terminal, raw elsewhere."""
    _spoken.set()
    if not sys.stdout.isatty():
        print(text, end="")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text), width=min(console.width, 120))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table for terminal and pages.

    Attributes:
        title: heading of the table.
        columns: headings of the columns.
        rows: cells, one per heading.
        num_text, num_keys: as in `print_table`.
        notes: lines below the table.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1
    num_keys: int = 1
    notes: tuple[str, ...] = ()

    def print(self) -> None:
        print_table(self.title, self.columns, self.rows, self.num_text, self.num_keys)
        for note in self.notes:
            print_paragraph(note)
        if self.notes:
            print()


def table_of(title: str, rows: Iterable[Any], columns: Mapping[str, Callable[[Any], str]], **more: Any) -> TextTable:
    """Return a table with a line for each row.

    Args:
        columns: by heading, a function that gives a row's cell.
        more: other fields of the table.
    """
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    return TextTable(title=title, columns=tuple(columns), rows=cells, **more)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int = 1, num_keys: int = 1
) -> None:
    """Print a table on stdout; the first `num_text` columns are text, the others numbers.

    On a narrow terminal it is split into parts, each with the text columns, or the first `num_keys` columns if more, at
    its left. Numbers and names in the first column are never broken.
    """
    _spoken.set()
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    num_keys = max(num_text, num_keys)
    keys, parts = _widths(columns, rows, num_text, num_keys, console.width)
    for part, widths in enumerate(parts):
        heading = title if part == 0 else f"(part {part + 1} of {len(parts)})"
        table = Table(title=Text(printable(heading)), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
        for i, width in (keys | widths).items():
            table.add_column(columns[i], justify="left" if i < num_text else "right", overflow="fold", width=width)
        for row in rows:
            table.add_row(*(Text(printable(row[i])) for i in keys | widths))
        console.print(table)


_GAP = 3
"""Width of a table's column separator; the edge has one more."""


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], num_text: int, num_keys: int, width: int
) -> tuple[dict[int, int | None], list[dict[int, int | None]]]:
    """Return the columns of every part of a table, and the others by part, each with its width; None is flexible."""
    cells = [[column, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    full = [max(len(line) for cell in column for line in cell.split("\n")) for column in cells]
    least = [max(map(len, [*_UNIT.sub(r"\1_", heading).split(), *numbers]), default=0) for heading, *numbers in cells]
    keys: dict[int, int | None] = {i: None if i < num_text else least[i] for i in range(num_keys)}
    left = sum((full if i < num_text else least)[i] + _GAP for i in keys)
    if num_text and full[0] <= width // 3:
        keys[0] = full[0]
    room = width - 1 - min(left, width // 2)  # longer texts wrap
    parts: list[dict[int, int]] = [{}]
    for i in range(num_keys, len(columns)):
        if parts[-1] and sum(parts[-1].values()) + _GAP * (len(parts[-1]) + 1) + least[i] > room:
            parts.append({})
        parts[-1][i] = least[i]
    numbers = max(sum(part.values()) + _GAP * len(part) for part in parts)
    keys |= _text_widths(keys, cells, full, width - 1 - numbers)
    for part in parts:  # headings wrap only if necessary
        for _ in range(room - sum(part.values()) - _GAP * len(part)):
            tightest = max(part, key=lambda i: full[i] - part[i], default=None)
            if tightest is None or part[tightest] >= full[tightest]:
                break
            part[tightest] += 1
    return keys, [dict(part) for part in parts]


def _text_widths(
    keys: dict[int, int | None], cells: Sequence[Sequence[str]], full: Sequence[int], width: int
) -> dict[int, int]:
    """Return widths for flexible text columns that must wrap, so that words stay whole; none if they do not fit."""
    flexible = [i for i, fixed in keys.items() if fixed is None]
    room = width - sum(fixed for fixed in keys.values() if fixed is not None) - _GAP * len(keys)
    words = {i: max((len(word) for cell in cells[i] for word in cell.split()), default=0) for i in flexible}
    if sum(full[i] for i in flexible) <= room or sum(words.values()) > room:
        return {}
    for _ in range(room - sum(words.values())):
        tightest = max(flexible, key=lambda i: full[i] / words[i])
        words[tightest] += 1
    return words


def significant(number: float, digits: int = 4) -> str:
    """Format a number with significant digits and without an exponent if large: `142,844`, `0.4143`."""
    return f"{number:,.0f}" if abs(number) >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def percent(share: float, form: str = ".1f") -> str:
    """Format a share as percent, `12.5 %`; `form` is the number's format."""
    return f"{100 * share:{form}} %"


def numbered(number: int, noun: str, plural: str = "") -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def printable(text: str, keep: str = "\n") -> str:
    """Return foreign text with terminal control characters made visible, except those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def print_lines(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print name, value and meaning, one line each; on a terminal meanings wrap in their column, or all below.

    The column of values is left out if all are empty.
    """
    _spoken.set()
    names, values, longest = (max(map(len, column)) for column in zip(*rows, strict=True))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    left = names + 2 + (values + 2 if values else 0)
    for name, value, meaning in rows:
        line = f"{name:<{names}}  {value:<{values}}  " if values else f"{name:<{names}}  "
        if not width:
            print(line + meaning)
        elif width - left >= min(longest, _NARROWEST):
            parts = textwrap.wrap(meaning, width - left, break_on_hyphens=False)
            print(line + f"\n{' ' * left}".join(parts))
        else:
            indent = " " * (names + 2)
            print(f"{name:<{names}}  {value}")
            room = max(width, _NARROWEST)
            print(textwrap.fill(meaning, room, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))


def print_paragraph(text: str) -> None:
    """Print an indented sentence, wrapped on a terminal."""
    _spoken.set()
    if not sys.stdout.isatty():
        print(text)
        return
    indent = " " * (len(text) - len(text.lstrip()))
    width = shutil.get_terminal_size().columns
    text = unbroken(text)
    filled = textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    print(filled.replace("\xa0", " "))


def unbroken(text: str) -> str:
    """Return a text with no-break spaces between numbers and units."""
    return _UNIT.sub("\\1\xa0", text)


_UNIT = re.compile(r"(\d) (?=(?:%|[kMGT]?B(?:/s)?|[mu]?s|nats|bits)(?![\w/]))")
"""The space between a number and its unit, which does not wrap."""
_NARROWEST = 40
"""Least readable width of a sentence."""


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def narrate(line: str) -> None:
    """Print one line on stderr, wrapped on a terminal, unless only errors are shown."""
    _spoken.set()
    if logs.narrates():
        print(_wrapped(line), file=sys.stderr, flush=True)


def complain(line: str) -> None:
    """Print one error line on stderr, wrapped on a terminal."""
    _spoken.set()
    sys.stderr.write(f"{_wrapped(line)}\n")  # in one call: `print` can be interrupted before the end of the line
    sys.stderr.flush()


def _wrapped(line: str) -> str:
    if not sys.stderr.isatty():
        return line
    width = shutil.get_terminal_size().columns
    lines = textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return "\n".join(lines) or line


def shows_progress() -> bool:
    """Whether stderr is a terminal and more than errors are shown."""
    return sys.stderr.isatty() and logs.narrates()


def asks() -> bool:
    """Whether somebody can read a question on stderr and answer it on stdin."""
    return sys.stdin.isatty() and shows_progress()


def count(number: float, unit: str = "") -> str:
    """Format a number: `12.3 MB` for bytes (unit `B`), `12,345` otherwise."""
    if unit != "B":
        return f"{number:,.0f}{unit}"
    for prefix in ("", "k", "M", "G"):
        if abs(number) < 1000:
            return f"{number:,.0f} B" if not prefix else f"{number:,.1f} {prefix}B"
        number /= 1000
    return f"{number:,.1f} TB"


@contextlib.contextmanager
def steps(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show `progress` for work that reports its own number of steps."""
    with contextlib.ExitStack() as stack:
        shown: list[Callable[[int], None]] = []

        def report(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(progress(title, total)))
            shown[0](done)

        yield report


def aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a line for each setting, its value and the reason, in columns."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in (0, 1)]
    return [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {why}" for name, value, why in rows]


@contextlib.contextmanager
def _lines(title: str = "") -> Iterator[Callable[..., None]]:
    """Show progress without a terminal: a line on stderr every ten seconds.

    Gives:
        A function to call with the activity, the amount done, the total, and optionally a note.
    """
    _spoken.set()
    over, now = threading.Event(), time.monotonic
    state: tuple[str, int, int | None, float, str] = title, 0, None, now(), ""

    def report(what: str, done: int, total: int | None, note: str = "") -> None:
        nonlocal state
        state = what, done, total, state[3] if what == state[0] else now(), note and f"; {note}"

    def say() -> None:
        while not over.wait(LINE_S):
            what, done, total, began_s, note = state
            passed_s = now() - began_s
            amount = f"{count(done)}{f' of {count(total)}' if total else ''}, " if done else ""
            left = f", {(total - done) * passed_s / done:,.0f} s left" if total and 0 < done <= total else ""
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                narrate(f"moetool: {what}: {amount}{passed_s:,.0f} s{left}{note}")

    teller = threading.Thread(target=say, daemon=True)
    teller.start()
    try:
        yield report
    finally:
        over.set()
        teller.join()


def _bars() -> "Progress":
    """Return transient bars on stderr, each in one line; the amount stays whole on a narrow terminal."""
    _spoken.set()
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table
    from rich.text import Text

    console = Console(stderr=True)
    begun: dict[int, tuple[float, float]] = {}  # amount and time when a task first had an amount: excludes loading
    longest: dict[int, int] = {}  # so that the bar keeps its width

    class Line(ProgressColumn):
        def render(self, task: Task) -> Table:
            now_s, total = task.elapsed or 0.0, task.total or 0
            done, began_s = begun.setdefault(task.id, (task.completed, now_s)) if task.completed else (0.0, now_s)
            speed = (task.completed - done) / max(now_s - began_s, 1e-9)
            amount = f"{now_s:,.0f} s"
            if total > 1:  # "0 of 1" says less than the seconds
                amount = _amount(task.completed, total, speed, says_speed=not task.fields.get("note"))
            longest[task.id] = max(len(amount), longest.get(task.id, 0))
            room = console.width - longest[task.id] - 1
            width = min(40 if console.width >= 100 else 16, room - len(task.description) - 1)
            bar = ProgressBar(total=task.total, completed=task.completed, width=width, pulse=total <= 1)
            bars = [bar] if width >= _SHORTEST_BAR else []
            title = Text(task.description, no_wrap=True)
            title.truncate(room - (width + 1) * len(bars), overflow="ellipsis")
            line = Table.grid(padding=(0, 1))
            line.add_row(title, *bars, Text(amount, no_wrap=True))
            return line

    return Progress(Line(table_column=Column(no_wrap=True)), console=console, transient=True)


_SHORTEST_BAR = 8


def _amount(done: float, total: float, speed: float, *, says_speed: bool) -> str:
    """Format `814 of 7,409, 7,923/s, 1 s left`; `says_speed` is false where a note has a rate of its own."""
    parts = [f"{count(done)} of {count(total)}"]
    if speed > 0:
        parts += [f"{significant(speed, 2)}/s"] * says_speed + [f"{(total - done) / speed:,.0f} s left"]
    return ", ".join(parts)


@contextlib.contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show progress with rate and time left on stderr: a bar on a terminal, else a line every ten seconds.

    Gives:
        A function to call with the amount done.
    """
    if not shows_progress():
        with _lines(title) as say:
            yield lambda done: say(title, done, total)
        return
    with _bars() as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


@contextlib.contextmanager
def stages() -> Iterator[Callable[..., None]]:
    """Show progress of work in several stages, with rate and time left; see `progress`.

    Gives:
        A function to call with the activity ("training on tokens"), the amount done, the total (None: not known yet),
        and optionally a note.
    """
    if not shows_progress():
        with _lines("preparing") as say:
            yield say
        return
    with _bars() as bar:
        task: Any = None
        name, latest = "", 0

        def report(what: str, done: int, total: int | None, note: str = "") -> None:
            nonlocal task, name, latest
            if task is None or what != name or done < latest:  # a new stage, or the same one again
                if task is not None:
                    bar.remove_task(task)
                task = bar.add_task(what, total=total)
            name, latest = what, done
            bar.update(task, completed=done, total=total, note=note, description=f"{what}: {note}" if note else what)

        yield report
