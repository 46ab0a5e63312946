"""The kernel of every bench: paired rounds give rows of values, rows give tables, figures and one JSON file.

A bench fills the `BenchResult` of `recorded`. Its module (`BENCHES`) has `tables(made)`, which yields tables and
sentences, and may have `figures(made)`. Both use the result alone, so a file shows what its run showed.
"""

import contextlib
import importlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moetool.base import config, durable, tables
from moetool.base.errors import MismatchError, UsageError, first_line, shortened
from moetool.base.json_files import read_json
from moetool.base.machine import load_average
from moetool.base.tables import TextTable
from moetool.bench.experiment_figure import ExperimentResult, draw_all
from moetool.models.libraries import read_machine

T = TypeVar("T")
Row = dict[str, Any]
"""Values by name, as JSON has them; `rounds` holds the raw values, one entry per round."""
Columns = Mapping[str, tuple[str | Callable[[Row], Any], str]]
SCHEMA = 1
BENCHES = {
    "serve": "serving_results",
    "policies": "policy_table",
    "predictors": "predictor_table",
    "rivals": "rivals",
    "gpu": "gpu",
    "cluster": "live_cluster.cluster_results",
    "paper": "paper.paper_results",
}
"""By bench, the module in this package that shows its results."""
_FORMS: dict[str, Callable[[Any], str]] = {
    "ms": lambda seconds: f"{1e3 * seconds:,.1f}" if seconds < 1 else f"{1e3 * seconds:,.0f}",
    "seconds": lambda seconds: f"{seconds:.3g} s",
    "us": lambda seconds: f"{1e6 * seconds:,.0f} µs",
    "MB": lambda num_bytes: f"{num_bytes / 1e6:,.3g}" if num_bytes < 1e8 else f"{num_bytes / 1e6:,.0f}",
    "bytes": lambda num_bytes: tables.count(num_bytes, "B"),
    "ratios": lambda ratios: (
        f"{statistics.median(ratios):.3f}" + (f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else "")
    ),
}
"""How columns print values; other forms are format specifications, of a share such as `.1%`."""


@dataclass(slots=True, kw_only=True)
class BenchResult:
    """Rows of values, and the conditions of their measurement.

    Attributes:
        bench: name in `BENCHES`.
        facts: values that hold for all rows, by name.
        notes: sentences for the reader.
        command: the typed command.
        machine: facts of `moetool.base.machine.Machine`, by name.
        load: load average over a minute before the first run, and after the last.
        file: JSON file, written anew after each row or run, so that a bench that is killed keeps them; None: none.
    """

    bench: str
    options: Row
    facts: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: str
    machine: Row
    load: list[float]
    file: Path | None = None

    def add(self, **row: Any) -> None:
        """Add a row. Effects: writes the file."""
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        """Write the file, if there is one, whole or not at all."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(self.file, json.dumps(self.to_json(), indent=1) + "\n")

    def to_json(self) -> Row:
        """All fields but the file, and the schema version."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "file"}
        return {"schema_version": SCHEMA, **values}

    def of(self, **wanted: Any) -> list[Row]:
        """The rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in wanted.items())]


@contextlib.contextmanager
def recorded(bench: str, options: Any, file: Path | None = None) -> Iterator[BenchResult]:
    """Record options, command, machine and load around the measurements of a block, which adds the rows.

    Args:
        options: a dataclass.
    """
    name = Path(sys.argv[0]).name.replace("__main__.py", "moetool")
    made = BenchResult(
        bench=bench,
        options=asdict(options),
        command=shlex.join([name, *sys.argv[1:]]),
        machine=asdict(read_machine()),
        load=[load_average()],
        file=file,
    )
    yield made
    made.load.append(load_average())
    made.save()


def in_rounds(
    made: BenchResult,
    lines: Sequence[T],
    rounds: int,
    run: Callable[[T, int], Row | None],
    rows: Callable[[list[tuple[T, list[Row]]]], Iterable[Row]],
    on_progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Run each line once per round, and keep the rows of the runs so far after each; another line begins each round.

    A slow minute of the machine so affects all lines, and ratios within a round are fair.

    Args:
        run: measures a line in a round; None if it cannot be measured.
        rows: makes rows from the lines that have run, in their order, and the runs of each, one per round.
        on_progress: called with the percentage done after each run.

    Effects: writes the file of `made` after each run; earlier rows stay.
    """
    earlier, runs = made.rows, [(line, list[Row]()) for line in lines]
    for done in range(rounds * len(lines)):
        number, place = divmod(done, len(lines))
        line, mine = runs[(number + place) % len(lines)]
        if (found := run(line, number)) is not None:
            mine.append(found)
        made.rows = [*earlier, *rows([one for one in runs if one[1]])]
        made.save()
        on_progress(100 * (done + 1) // (rounds * len(lines)))


def median(rows: Sequence[Row], name: str) -> Any:
    """Median over rows of the values that are known; None without any."""
    known = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(known) if known else None


def read_result(path: Path) -> BenchResult:
    """Read the file of a bench.

    Raises:
        UsageError: there is no such file.
        MismatchError: it is damaged, or not the file of a bench of this version.
    """
    if not path.is_file():
        raise UsageError(f"no results at {path}; give the JSON file of a bench")
    with _damage_refused():
        return _parsed(read_json(path, advice="measure again", constants=True), str(path))


def _parsed(values: Row, where: str) -> BenchResult:
    found, bench = values.pop("schema_version", None), values.get("bench")
    if found != SCHEMA:
        again = f" with: {values['command']}" if isinstance(values.get("command"), str) else ""
        raise MismatchError(
            f"{where} has schema_version {shortened(found)} of a bench, expected {SCHEMA}; measure again{again}"
        )
    if not isinstance(bench, str) or bench not in BENCHES:
        raise MismatchError(
            f"{where} has results of bench {shortened(bench)!r}, expected one of: {', '.join(BENCHES)}; measure again"
        )
    try:
        return config.parse(BenchResult, values, where)
    except UsageError as error:
        raise MismatchError(f"{first_line(error)}; measure again") from None


def show(made: BenchResult) -> None:
    """Print the tables, then notes and conditions. Raises: MismatchError: a value is missing or of another type."""
    with _damage_refused():
        made = _parsed(json.loads(json.dumps(made.to_json())), f"the file of bench {made.bench}")
        machine, load = made.machine, " to ".join(f"{average:.1f}" for average in made.load)
        device = machine["gpu"] or machine["cpu"]
        conditions = f"{device}, {machine['cores']} cores, load {load}, torch {machine['torch']}"
        cut = ["cut short: these are the rows until then"] if len(made.load) == 1 else []
        for part in [*_module(made).tables(made), *made.notes, *cut, conditions]:
            if isinstance(part, TextTable):
                part.print()
            else:
                tables.print_paragraph(part)
        print(made.command)


def draw(made: BenchResult, folder: Path) -> list[Path]:
    """Draw the figures, if the bench has any, as SVG files.

    Effects: writes into `folder`.

    Raises:
        MismatchError: a value is missing or of another type.
    """
    figures: Callable[[BenchResult], dict[str, ExperimentResult]] = getattr(_module(made), "figures", lambda made: {})
    with _damage_refused():
        founds = figures(made)
        return draw_all(folder, founds) if founds else []


@contextlib.contextmanager
def _damage_refused() -> Iterator[None]:
    """Refuse results whose values are missing or of another type, in one line."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise MismatchError(
            f"the results are damaged ({type(error).__name__}: {first_line(error)}); measure again"
        ) from None


def _module(made: BenchResult) -> Any:
    return importlib.import_module(f"moetool.bench.{BENCHES[made.bench]}")


def table(title: str, rows: Sequence[Row], columns: Columns, **more: Any) -> TextTable:
    """Return a table with a line for each row.

    Args:
        columns: by heading, the name of a value (`decode.x_bound`: in a part of the row) or a function of the row, and
            its form: one of `_FORMS`, or a format specification. A missing value prints `-`.
        more: other fields of the table.
    """

    def cell(row: Row, name: str | Callable[[Row], Any], form: str) -> str:
        value: Any = name(row) if callable(name) else row
        for part in () if callable(name) else name.split("."):
            value = None if value is None else value.get(part)
        if value is None or value == []:
            return "-"
        if form.endswith("%"):
            return tables.percent(value, f"{form[:-1]}f")
        return _FORMS[form](value) if form in _FORMS else f"{value:{form}}"

    cells = {heading: partial(cell, name=name, form=form) for heading, (name, form) in columns.items()}
    return tables.table_of(title, rows, cells, **more)


def not_measured(made: BenchResult, name: Callable[[Row], str]) -> Iterator[str]:
    """Sentences about rows that say `why` they were not measured, one for each reason."""
    for why in dict.fromkeys(row["why"] for row in made.rows if "why" in row):
        yield f"not measured: {', '.join(map(name, made.of(why=why)))}: {why}"
