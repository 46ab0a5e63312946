"""Logs, below the narration: what engine, store, server, capture and workers do, for whoever debugs them.

Every module logs to the logger of its own name, `moetool.runtime.engine`, by the standard library's `logging`. The
variable MOETOOL_LOG sets the levels of this process and of all that it starts, workers of a cluster included:
`MOETOOL_LOG=info`, or `MOETOOL_LOG=warning,runtime=debug,cluster.edge=info`. Narration counts as a warning, so that
`error` silences it. Where MOETOOL_LOG is not set and no flag says otherwise, warnings are shown.
"""

import contextlib
import logging
import os
import sys
from typing import Any

from moetool.errors import UsageError, unknown_name

VARIABLE = "MOETOOL_LOG"
LEVELS = ("debug", "info", "warning", "error")
FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s[%(process)d] %(message)s"

_ROOT = logging.getLogger("moetool")


class _Stderr(logging.StreamHandler[Any]):
    """Writes to whatever stderr is at the moment: a progress bar puts itself in its place, and prints above itself."""

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
        levels: as in MOETOOL_LOG, which is read where this is None.

    Effects: replaces the levels that an earlier call has set.

    Raises:
        UsageError: no such level, or not of this form; nothing has changed then.
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
    """`configure`, unless MOETOOL_LOG cannot be read: the command line says so where it can be said."""
    with contextlib.suppress(UsageError):
        configure()


def set_verbosity(verbose: int = 0, quiet: bool = False) -> None:
    """Put `-v` (info), `-vv` (debug) and `-q` (error) above MOETOOL_LOG's level; levels of packages stay.

    Effects: changes MOETOOL_LOG of this process, so that those that it starts log alike.

    Raises:
        UsageError: both are asked for, or MOETOOL_LOG cannot be read.
    """
    if verbose and quiet:
        raise UsageError("-v says more and -q says less; give one of them")
    level, packages = _parse(os.environ.get(VARIABLE, ""))
    if verbose or quiet:
        level = "error" if quiet else "info" if verbose == 1 else "debug"
        os.environ[VARIABLE] = ",".join([level, *(f"{package}={own}" for package, own in packages.items())])
    configure()


def environment() -> dict[str, str]:
    """Environment of a remote process that makes it log as this one does."""
    return {VARIABLE: os.environ[VARIABLE]} if os.environ.get(VARIABLE) else {}


def narrates() -> bool:
    """Whether narration and progress are shown."""
    return _ROOT.isEnabledFor(logging.WARNING)


def _parse(levels: str) -> tuple[str, dict[str, str]]:
    """The level of all, and those of packages."""
    level, packages = "warning", {}
    for part in filter(None, levels.replace(" ", "").split(",")):
        package, equals, own = part.rpartition("=")
        own = own.lower()
        if own not in LEVELS:
            raise unknown_name(f"level in {VARIABLE}={levels}:", own, LEVELS)
        if not equals:
            level = own
        elif package:
            packages[package.removeprefix("moetool.")] = own
        else:
            raise UsageError(f"{VARIABLE}={levels} names no package before '='; write it as info,runtime=debug")
    return level, packages
