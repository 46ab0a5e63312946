"""Output of every `moetool bench`: files, figures, tables."""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from moetool import durable, tables
from moetool.json_files import JsonRecord

M = TypeVar("M", bound=JsonRecord)


def command_line() -> str:
    """Return the command as typed, to print with its results."""
    return shlex.join(["moetool", *sys.argv[1:]])


def hand_over(
    made: M,
    file: Path | None,
    print_tables: Callable[[M], None],
    *,
    as_json: bool,
    draw: Callable[[M, Path], Sequence[Path]] | None = None,
) -> None:
    """Write results to a file, if one is given, with figures next to it; print them as tables or JSON.

    Args:
        draw: draws figures in a folder and returns their files.
    """
    if file is not None:
        durable.write_text(file, json.dumps(made.to_json(), indent=1) + "\n")
        if draw is not None:
            tables.narrate(f"moetool: {', '.join(str(path) for path in (file, *draw(made, file.parent)))}")
    if as_json:
        tables.print_json(made.to_json())
    else:
        print_tables(made)


def results_file(folder: Path | None, name: str, overwrite: bool) -> Path | None:
    """Return the path of the results. Raises: UsageError before measuring if it cannot be written."""
    if folder is None:
        return None
    durable.require_new_file(folder / name, overwrite)
    return folder / name
