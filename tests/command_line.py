"""The command line, run in this process."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from moetool.cli import main as cli

Run = Callable[..., tuple[int, str, str]]
"""Type of the fixture `run`: from arguments to exit code, stdout and stderr."""


def exit_code(monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    """Run `moetool` with these arguments and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["moetool", *map(str, args)])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    return 0
