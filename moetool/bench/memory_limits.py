"""Limit the memory of processes by a control group each, of version 1 or 2."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from moetool.base.errors import CapacityError

_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_group(num_bytes: int, root: Path = _ROOT) -> Iterator[list[str]]:
    """Create a control group with this limit, page cache included; yields the prefix of a command that runs in it.

    Effects: makes the group and removes it; its processes must have ended by then.

    Raises:
        CapacityError: the user lacks the permission.
    """
    first = root / "memory"
    parent, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (root, "memory.max")
    group = parent / f"moetool-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(num_bytes))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise CapacityError(
            f"cannot limit memory by a control group at {parent} ({error.strerror}): run as root, or in a delegated "
            "group; without it only models that fit in memory are measured"
        ) from None
    try:
        yield ["/bin/sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
    finally:
        with contextlib.suppress(OSError):
            group.rmdir()


def drop_from_cache(folder: Path) -> None:
    """Drop a file or a folder's files from the page cache, which would be outside any limit."""
    for file in [folder] if folder.is_file() else [file for file in folder.iterdir() if file.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bytes_read(process: "subprocess.Popen[bytes]") -> int:
    """Bytes that a process has read from disk so far; 0 if the kernel does not report them."""
    try:
        for line in Path(f"/proc/{process.pid}/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0
