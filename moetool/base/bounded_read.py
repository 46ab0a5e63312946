"""Reading of untrusted files: regular files only, of bounded size and nesting.

A fault of a file's content or kind is a `ValueError` of one line, a refusal of the system an `OSError`. Readers of
artefacts convert both to errors of `moetool.base.errors` with the next command. A file that stands for another one
(`require_itself`) is a `MismatchError`, since no reader's own advice helps there.
"""

import os
import re
import stat
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

from moetool.base.errors import MismatchError

TOML_BYTES = 2**20
DEPTH = 64
"""Limit of nesting in TOML, below the depth at which recursive code (dataclasses, pydantic) fails."""

_HEAD_BYTES = 512
_WEB_PAGE = rb"(?i)\s*<(!doctype\s+html|html\b)"
_SUBSTITUTES = (
    (rb"version https://git-lfs\.github\.com/spec/", "is a Git LFS pointer; run 'git lfs pull' in its directory"),
    (_WEB_PAGE, "is a web page; it says why the file itself was not downloaded"),
    (rb"\0{512}", "begins with zeros, as a download does that is not complete; finish the download"),
)
"""Beginnings of files that stand for other ones."""

_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def require_regular(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
        OSError: the file does not exist, or is a folder.
        ValueError: it is a pipe, a socket or a device, which may block when opened.
    """
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(21, "Is a directory", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"it is {_KINDS.get(stat.S_IFMT(found.st_mode), 'not a file')}, expected a regular file")
    return found.st_size


def require_itself(path: Path) -> None:
    """Refuse a file that stands for another one; other kinds of paths pass, and web pages as plain text (`.txt`).

    Raises:
        MismatchError: it is a Git LFS pointer, a web page in place of a download, or zeros where a download is missing.
        OSError: it cannot be read.
    """
    if path.is_file():
        with path.open("rb") as file:
            _require_itself(path, file.read(_HEAD_BYTES))


def _require_itself(path: Path, head: bytes) -> None:
    for pattern, problem in _SUBSTITUTES:
        if re.match(pattern, head) and not (pattern is _WEB_PAGE and path.suffix.lower() == ".txt"):
            raise MismatchError(f"{path} {problem}")


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes; errors as in `require_regular` and `require_itself`."""
    require_regular(path)
    # Do not block if a pipe replaces the file now.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no longer a regular file")
        _require_itself(path, os.pread(descriptor, _HEAD_BYTES, 0))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a file. Raises: ValueError where it is longer than `limit`; as in `require_regular`."""
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_toml(path: Path, limit: int = TOML_BYTES) -> dict[str, Any]:
    """Return the table of a TOML file; errors as in `read_bytes` and `parse_toml`."""
    return parse_toml(read_bytes(path, limit).decode("utf-8"))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML table. Raises: ValueError where the text is not valid TOML or nested too deep."""
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    require_depth(value, DEPTH)
    return value


def require_depth(values: Any, most: int) -> None:
    """Raise ValueError where dictionaries and lists are nested in more than this many levels."""
    level = [values]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {most} levels")
