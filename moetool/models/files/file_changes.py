"""Detection of changes to the content of open files, even if their size and time of modification are set back.

A file's time of change (ctime) cannot be set. It moves with every write, but also with permissions, links and names,
which leave the content alone. To hash a file again could take a minute, in which nothing could be served. Two cheap
signs tell writes from the rest when it has moved:

- The system reports writes to the file since it was opened (inotify, on Linux). They need no reading.
- Parts that are read again are compared with their checksum. This finds writes that are not reported: through a memory
  map, or by another machine on a network file system.

So a reported write anywhere in a file is found, and one that is not reported in parts that were read before. Where the
system reports no writes, parts that were not read before cannot be judged and are refused.
"""

import contextlib
import ctypes
import logging
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

from moetool.models.files.tensor_index import FileStamp

_LOG = logging.getLogger(__name__)
_MODIFY, _OVERFLOW = 0x2, 0x4000  # IN_MODIFY, IN_Q_OVERFLOW
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of a name


class FileChanges:
    """Changes to open files. Thread-safe.

    Args:
        files: their paths, for messages.
        stamps: their stamps when they were first looked at.
        descriptors: their open descriptors, which the caller closes after `close`.

    Attributes:
        opening: why a file is not the one of its stamp; empty if all are.
    """

    def __init__(self, files: Sequence[Path], stamps: Sequence[FileStamp], descriptors: Sequence[int]) -> None:
        self._files = files
        self._stamps = list(stamps)
        self._descriptors = descriptors
        self._checksums: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._moved: set[int] = set()
        self._lock = threading.Lock()
        self._writes = WriteReports(descriptors)  # before the stamps are compared: no write is missed between
        self.opening = next(filter(None, map(self._at_opening, range(len(files)))), "")

    def close(self) -> None:
        """Stop watching."""
        self._writes.close()

    def of_file(self, number: int) -> str:
        """Return why a file's content may have changed since it was opened; empty if it has not.

        Costs one fstat, about a microsecond, while the file is left alone.

        Effects: logs a warning when its time of change moves without a write.
        """
        return self._reason(number) or self._unknown(number, "it")

    def _unknown(self, number: int, part: str) -> str:
        if number not in self._moved or self._writes.reported:
            return ""
        return (
            f"{self._files[number].name} may have been written to after the model was opened: its time of change "
            f"moved, and {part} cannot be compared with what was there before"
        )

    def _reason(self, number: int) -> str:
        """Return which change shows in its stamp or in the reports of writes."""
        if FileStamp.of(os.fstat(self._descriptors[number])) == self._stamps[number]:
            return ""
        with self._lock:
            found, expected = FileStamp.of(os.fstat(self._descriptors[number])), self._stamps[number]
            if found == expected:
                return ""
            name = self._files[number].name
            if found.num_bytes != expected.num_bytes:
                return f"{name} has changed from {expected.num_bytes:,} to {found.num_bytes:,} bytes in place"
            if found.written_ns != expected.written_ns:
                return f"{name} was written to after the model was opened"
            if self._writes.to(number):
                return f"{name} was written to after the model was opened, and its time of modification set back"
            how = "no write was reported" if self._writes.reported else "parts that were read before are compared"
            _LOG.warning("%s: its permissions, links or name changed; %s, so its weights stay in use", name, how)
            self._stamps[number] = found
            self._moved.add(number)
            return ""

    def of_part(self, number: int, offset: int, data: memoryview) -> str:
        """Return why a part that was just read may differ from the file's content at opening; empty if it does not.

        Effects: keeps the checksum of a part that is read for the first time (about 4 GB/s, once).
        """
        if changed := self._reason(number):
            return changed
        part, now = (number, offset, len(data)), self._stamps[number].changed_ns
        known = self._checksums.get(part)
        if known is not None and known[1] == now:
            return ""
        where = f"the part of {len(data):,} bytes at {offset:,}"
        if known is None and (unknown := self._unknown(number, where)):
            return unknown
        checksum = zlib.crc32(data)
        if known is not None and known[0] != checksum:
            return f"{self._files[number].name} was written to after the model was opened, in {where}"
        self._checksums[part] = checksum, now
        return ""

    def _at_opening(self, number: int) -> str:
        found, expected = FileStamp.of(os.fstat(self._descriptors[number])), self._stamps[number]
        name = self._files[number].name
        if (found.device, found.inode) != (expected.device, expected.inode):
            return f"{name} was replaced while the model was being opened"
        return f"{name} was written to or changed while the model was being opened" if found != expected else ""


class WriteReports:
    """The system's reports of writes to open files since this was made. Not thread-safe.

    Writes through a memory map, and those of other machines, are not reported.

    Attributes:
        reported: whether the system reports writes; False after it lost some.

    Effects: keeps one descriptor open until `close`.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._written: set[int] = set()
        self._watched: dict[int, list[int]] = {}  # two names of one file share a watch
        self._queue = -1
        self.reported = False
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or too many watches
            self.watch(descriptors)
            self.reported = True

    def close(self) -> None:
        if self._queue >= 0:
            os.close(self._queue)
        self._queue, self.reported = -1, False

    def to(self, number: int) -> bool:
        """Return whether a write to a file has been reported."""
        self._receive()
        return number in self._written

    def watch(self, descriptors: Sequence[int]) -> None:
        """Ask for reports of writes to these files.

        Raises:
            AttributeError: the system is not Linux.
            OSError: it has no watch left.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if queue < 0:
            raise OSError(ctypes.get_errno(), "no more watched files")
        self._queue = queue
        for number, descriptor in enumerate(descriptors):
            # By the descriptor: another file may have the name by now.
            watch = libc.inotify_add_watch(queue, f"/proc/self/fd/{descriptor}".encode(), _MODIFY)
            if watch < 0:
                raise OSError(ctypes.get_errno(), "no more watched files")
            self._watched.setdefault(watch, []).append(number)

    def _receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._queue >= 0:
                data = os.read(self._queue, 1 << 16)
                position = 0
                while position < len(data):
                    watch, mask, _, length = _EVENT.unpack_from(data, position)
                    position += _EVENT.size + length
                    if mask & _OVERFLOW:
                        self.reported = False
                    elif mask & _MODIFY:
                        self._written.update(self._watched.get(watch, ()))
