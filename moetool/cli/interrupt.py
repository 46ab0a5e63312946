"""Ctrl-C from the first moment on: one line and exit code 130, never a traceback.

Imports nothing heavy: an interruption of an import shows as any exception that the library makes of it.
"""

import os
import signal
from types import FrameType

EXIT_CODE = 130
"""128 and the signal's number."""


def ends_process() -> None:
    """Let Ctrl-C end the process where it stands. For the time in which it holds nothing that could be lost.

    Effects: on this process's handler of SIGINT, unless a parent has set it to be ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def raises() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that work in progress is tidied up."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_behind(error: BaseException | None) -> bool:
    """Whether an exception came of an interruption."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"moetool: stopped\n")
    os._exit(EXIT_CODE)
