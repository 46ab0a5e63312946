"""Reading files that somebody else may have written: regular files only, of a bounded size and nesting.

Whatever is wrong with a file's content or kind is a `ValueError` of one line, what the system refuses an `OSError`;
the readers of artefacts make errors of `moetool.errors` of both, with the next command.
"""

import os
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

TOML_BYTES = 2**20
DEPTH = 64
"""Levels of nesting of TOML; below the depth at which recursive code (dataclasses, pydantic) fails."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_regular(path: Path) -> int:
    """The size of a regular file in bytes.

    Raises:
        OSError: it is not there, or a folder.
        ValueError: it is a pipe, a socket or a device, whose opening might wait for ever.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'no file')}, expected a regular file")
    return found.st_size


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes; errors as of `require_regular`."""
    require_regular(path)
    # Whatever takes the file's place in this moment is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no longer a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file. Raises: ValueError where it is longer than `limit`; as of `require_regular`."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_toml(path: Path, limit: int = TOML_BYTES) -> dict[str, Any]:
    """The table in a TOML file; errors as of `read_bytes` and `parse_toml`."""
    return parse_toml(read_bytes(path, limit).decode("utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """A table. Raises: ValueError where the text is not valid TOML or nested too deep."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    _require_shallow(value)
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH} levels")
