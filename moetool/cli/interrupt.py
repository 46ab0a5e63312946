"""Ctrl-C from the first moment on: one line and exit code 130, never a traceback.

Imports nothing heavy: an interrupted import can raise any exception of the imported library, or abort the process in
C++.
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
    import _signal as signal  # built in; importing its wrapper takes milliseconds

EXIT_CODE = 130
"""128 + the signal's number."""
_AGAIN_S = 0.05

_waits = False  # an interruption waits for the end of an import
_own = False  # the next interruption repeats the waiting one


def ends_process() -> None:
    """Let Ctrl-C end the process at once, while there is nothing to lose.

    Effects: sets this process's handler of SIGINT, unless a parent has set it to be ignored.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)


def raises() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that running work is cleaned up.

    During an import it is raised at the import's end; a second Ctrl-C meanwhile ends the process. An interruption that
    was swallowed, as in a finalizer, is raised again.

    Effects: sets this process's handler of SIGINT, if it is that of `ends_process`, and on `sys.unraisablehook`.
    """
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, _raise)
        sys.unraisablehook = _ignored


def is_behind(error: BaseException | None) -> bool:
    """Whether an exception was caused by an interruption."""
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
    """Repeat this interruption a little later."""
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
