"""The command line, run in this process."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetool.cli import main as cli

Run = Callable[..., tuple[int, str, str]]
"""Type of the fixture `run`: from arguments to exit code, stdout and stderr."""


def child_environment(*folders: Path, **more: str) -> dict[str, str]:
    """The environment of a Python process that imports from these folders and this working tree."""
    path = [*map(str, folders), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def exit_code(monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    """Run `moetool` with these arguments and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["moetool", *map(str, args)])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0
