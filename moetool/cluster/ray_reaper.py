"""Ray's processes on this machine end with the moetool that started them, even by SIGKILL, and leave no folder behind.

Ray ends its own daemons where their parent is gone, but not the agents that they have started, nor its session's
folder. So a process of its own reads from a pipe that only its parent holds: at its end it ends every process that has
a file of that folder open, or named in its command line, and removes the folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PREFIX = "moetool-ray-"
_MOST_CHARACTERS = 24
"""Maximum length of the path above: Ray puts sockets below it, whose paths may have 107 bytes."""
_GRACE_S = 2.0
"""Time for Ray to stop its own processes."""
_WITHIN_S = 10.0


class RaySession:
    """A folder for a Ray that starts here, and who removes it and ends what runs in it.

    Attributes:
        folder: for Ray's `_temp_dir`; this user's alone.

    Effects: starts a process, which outlives this one by seconds. `close` ends the Ray; so does the end of this one.
    """

    def __init__(self) -> None:
        above = tempfile.gettempdir()
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=above if len(above) <= _MOST_CHARACTERS else "/tmp"))
        # A file and no module: nothing has to be found, and nothing imported, once the rest has gone.
        self._reaper = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(self.folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for its parent
        )

    def close(self) -> None:
        """Have all of it end now, and wait until it has."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._reaper.wait(_GRACE_S + _WITHIN_S)


def processes_of(folder: Path, but: int) -> list[int]:
    """Ray's processes that have a file below a folder open, or name one; by /proc, none where there is no such.

    Args:
        but: a process that is left out.
    """
    inside = f"{folder}/"
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = path.joinpath("cmdline").read_bytes().decode(errors="replace")
            if not command.startswith("ray::") and "/ray/" not in command:
                continue
            names = [command, *(str(fd.readlink()) for fd in path.joinpath("fd").iterdir())]
        except OSError:
            continue  # it has ended, or is another user's
        if int(path.name) != but and any(inside in name for name in names):
            found.append(int(path.name))
    return found


def reap(folder: Path, but: int) -> None:
    """End Ray's processes of a folder, and remove it. Args: as of `processes_of`."""
    by = time.monotonic() + _WITHIN_S
    while (pids := processes_of(folder, but)) and time.monotonic() < by:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until its parent has ended, in whatever way, or closes its end
    end, here, parent = time.monotonic() + _GRACE_S, Path(sys.argv[1]), int(sys.argv[2])
    while processes_of(here, parent) and time.monotonic() < end:
        time.sleep(0.1)
    reap(here, parent)
