"""Logs of engine, store, server, capture and workers, for debugging.

Every module logs to the logger of its own name, e.g. `moetool.runtime.loop.engine`, by the standard library's
`logging`. The variable MOETOOL_LOG sets the levels of this process and its children, workers of a cluster included:
`MOETOOL_LOG=info`, or `MOETOOL_LOG=warning,runtime=debug,cluster.edge=info`. Narration counts as a warning, so that
`error` silences it. By default, warnings are shown.
"""

import contextlib
import logging
import os
import sys
from typing import Any

from moetool.base.errors import UsageError, unknown_name

VARIABLE = "MOETOOL_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s[%(process)d] %(message)s"

_ROOT = logging.getLogger("moetool")


class _Stderr(logging.StreamHandler[Any]):
    """Writes to the current stderr: a progress bar replaces it and prints above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))

    @property
    def stream(self) -> Any:
        return sys.stderr


_HANDLER = _Stderr()


def configure(levels: str | None = None) -> None:
    """Set the levels of this process.

    Args:
        levels: levels as in MOETOOL_LOG (default: the variable's).

    Effects: replaces the levels of an earlier call.

    Raises:
        UsageError: the text has an unknown level or another form; levels then stay unchanged.
    """
    level, packages = _parse(os.environ.get(VARIABLE, "") if levels is None else levels)
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("moetool.")]:
        logging.getLogger(name).setLevel(logging.NOTSET)
    _ROOT.setLevel(level.upper())
    _ROOT.propagate = False
    if _HANDLER not in _ROOT.handlers:
        _ROOT.addHandler(_HANDLER)
    for package, own in packages.items():
        logging.getLogger(f"moetool.{package}").setLevel(own.upper())


def configure_if_readable() -> None:
    """Call `configure`, unless MOETOOL_LOG is invalid, which the command line reports later."""
    with contextlib.suppress(UsageError):
        configure()


def set_verbosity(verbose: int = 0, quiet: bool = False) -> None:
    """Apply `-v` (info), `-vv` (debug) and `-q` (error) over MOETOOL_LOG's level; levels of packages stay.

    Effects: changes MOETOOL_LOG of this process, so that its children log alike.

    Raises:
        UsageError: -v and -q are combined, or MOETOOL_LOG is invalid.
    """
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other; give one of them")
    level, packages = _parse(os.environ.get(VARIABLE, ""))
    if verbose or quiet:
        level = "error" if quiet else "info" if verbose == 1 else "debug"
        os.environ[VARIABLE] = ",".join([level, *(f"{package}={own}" for package, own in packages.items())])
    configure()


def environment() -> dict[str, str]:
    """Return environment variables that make a remote process log like this one."""
    return {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}


def narrates() -> bool:
    """Whether narration and progress are shown."""
    return _ROOT.isEnabledFor(logging.WARNING)


def _parse(levels: str) -> tuple[str, dict[str, str]]:
    """Return the general level, and those of packages."""
    level, packages = "warning", {}
    for part in filter(None, levels.replace(" ", "").split(",")):
        package, equals, own = part.rpartition("=")
        own = own.lower()
        if own not in LEVELS:
            raise unknown_name("level", own, LEVELS, f"{VARIABLE}={levels}")
        if not equals:
            level = own
        elif package:
            packages[package.removeprefix("moetool.")] = own
        else:
            raise UsageError(f"{VARIABLE}={levels} has no package before '='; write it as info,runtime=debug")
    return level, packages
