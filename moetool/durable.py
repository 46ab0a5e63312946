"""Writing so that a kill, a full disk or a crash leaves the old result or none, never half of one.

Everything is written beside its final name and renamed when it is whole and on disk.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moetool.errors import UsageError

PARTIAL = ".partial"


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` as a whole, or leave it as it was."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_text(text, encoding="utf-8")
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def require_absent(out: Path, overwrite: bool = False) -> None:
    """Refuse an output that is there already.

    Raises:
        UsageError: `out` exists and `overwrite` is false.
    """
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists already; choose another --out, or pass --overwrite to replace it")


@contextlib.contextmanager
def staged_directory(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `out` when the block ends, and only then.

    Effects: makes `out.partial`, emptied if a killed run left one; on success syncs its files and renames it to
    `out`; on an exception removes it and keeps the old `out`. A process that is killed outright leaves `out.partial`,
    which no command reads and the next run replaces; between the two renames that replace an old `out`, it leaves
    that as `out.old`, and the next run puts it back.

    Raises:
        UsageError: `out` exists and `overwrite` is false.
    """
    old = out.with_name(out.name + ".old")
    if old.exists() and not out.exists():
        old.rename(out)
    require_absent(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        for file in sorted(partial.rglob("*")):
            sync(file)
        sync(partial)
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
            out.rename(old)
            try:
                partial.rename(out)
            except BaseException:
                old.rename(out)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            partial.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def sha256_file(path: Path) -> str:
    """sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
