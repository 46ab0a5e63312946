"""A memory cgroup for a server under test."""

import contextlib
import os
from pathlib import Path

from tests.servers import eventually


class MemoryGroup:
    """A memory cgroup, version 1 or 2."""

    def __init__(self, name: str) -> None:
        second = Path("/sys/fs/cgroup/cgroup.controllers").exists()
        parent = Path("/sys/fs/cgroup") if second else Path("/sys/fs/cgroup/memory")
        self.folder = parent / f"{name}-{os.getpid()}"
        self._limit = self.folder / ("memory.max" if second else "memory.limit_in_bytes")
        self._none = "max" if second else "-1"
        self._held = "anon " if second else "rss "
        try:
            self.folder.mkdir()
            self.usable = self._limit.exists()
        except OSError:
            self.usable = False

    @property
    def prefix(self) -> list[str]:
        """Command prefix that runs a command in the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh"] if self.usable else []

    def squeeze(self, spare: int) -> None:
        """Limit the group to its unreclaimable memory plus `spare` bytes."""
        lines = (self.folder / "memory.stat").read_text().splitlines()
        held = next(int(line.split()[1]) for line in lines if line.startswith(self._held))
        with contextlib.suppress(OSError):  # EBUSY: the group could not shrink enough
            self._limit.write_text(str(held + spare))

    def limit(self, num_bytes: int) -> None:
        """Set the group's limit in bytes."""
        self._limit.write_text(str(num_bytes))

    def release(self) -> None:
        """Remove the limit."""
        self._limit.write_text(self._none)

    def close(self) -> None:
        if self.usable:
            eventually(lambda: not (self.folder / "cgroup.procs").read_text(), within_s=30)
            self.folder.rmdir()
