"""Ctrl-C from the first moment on: one line and exit code 130, never a traceback.

Imports nothing heavy: an interruption of an import shows as any exception that the library makes of it, or aborts the
process where C++ does not expect it.
"""

import os
import sys
import time
from _thread import get_ident, start_new_thread

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from sys import UnraisableHookArgs
    from types import FrameType
else:
    import _signal as signal  # built in; the module around it makes enumerations, which takes milliseconds

EXIT_CODE = 130
"""128 and the signal's number."""
_AGAIN_S = 0.05

_waits = False  # an interruption, for an import to end
_own = False  # the next one is that one again


def ends_process() -> None:
    """Let Ctrl-C end the process where it stands. For the time in which it holds nothing that could be lost.

    Effects: on this process's handler of SIGINT, unless a parent has set it to be ignored.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def raises() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that work in progress is tidied up.

    During an import it is raised once that is over; a second Ctrl-C meanwhile ends the process. Where it was raised
    and nobody could hear of it, as in a finalizer, it is raised again.

    Effects: on this process's handler of SIGINT, if it is that of `ends_process`, and on `sys.unraisablehook`.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)
        sys.unraisablehook = _ignored


def is_behind(error: BaseException | None) -> bool:
    """Whether an exception came of an interruption."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _end(number: int, frame: "FrameType | None") -> None:
    os.write(2, b"moetool: stopped\n")
    os._exit(EXIT_CODE)


def _raise(number: int, frame: "FrameType | None") -> None:
    global _waits, _own
    if not _imports(frame):
        _waits = _own = False
        raise KeyboardInterrupt
    if _waits and not _own:
        _end(number, frame)
    _again()


def _again() -> None:
    """Have the interruption of now come a little later."""
    global _waits, _own
    _waits, _own = True, False
    start_new_thread(_repeat, (get_ident(),))  # a handler runs on the main thread


def _repeat(main: int) -> None:
    global _own
    time.sleep(_AGAIN_S)
    _own = True
    signal.pthread_kill(main, signal.SIGINT)


def _ignored(what: "UnraisableHookArgs") -> None:
    if isinstance(what.exc_value, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is _raise:
        _again()
    else:
        sys.__unraisablehook__(what)


def _imports(frame: "FrameType | None") -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
