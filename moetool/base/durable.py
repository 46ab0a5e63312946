"""Durable writes: a kill, a full disk or a crash leaves the old result or none, never half of one.

Every output is written under a temporary name and renamed when it is complete and on disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from moetool.base.errors import UsageError

PARTIAL = ".partial"
LOCK = ".lock"
OLD = ".old"
_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, whole or not at all."""
    with staged_file(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """Open a file that becomes `path` at the end of the block.

    Effects: writes `path.partial`, and removes it on an exception.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        _name(error, path)
        raise
    sync(path.parent)


def _name(error: BaseException, path: Path) -> None:
    """Name the output in the error of a write, which knows only a descriptor."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_WRITES:
        error.filename = str(path)


def require_absent(out: Path, overwrite: bool | None = False, marker: str | None = None) -> None:
    """Refuse an existing output.

    Args:
        overwrite: whether to replace it; None if there is no such option.
        marker: a file of earlier results; a folder without it is never replaced.

    Raises:
        UsageError: `out` exists and `overwrite` is not true, or it is not an earlier result.
    """
    if not out.exists():
        return
    if not overwrite:
        remedy = "choose another" if overwrite is None else "choose another or pass --overwrite"
        raise UsageError(f"{out} exists already; {remedy}")
    if marker is not None and not (out / marker).is_file():
        raise UsageError(
            f"{out} holds no {marker}, so moetool did not write it and will not replace it; choose another"
        )


def require_writable(path: Path) -> None:
    """Check that a file can be written, before the work for it.

    Effects: creates its folder.

    Raises:
        UsageError: the path is a folder, or its file system takes no files.
        OSError: its folder cannot be created or written to.
    """
    if path.is_dir() or not path.name:
        raise UsageError(f"{path} is a directory, expected the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        code = errno.EROFS if os.statvfs(path.parent).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(path.parent))
    trial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        trial.touch()
    except FileNotFoundError:  # a file system that takes no new files, such as /proc
        raise UsageError(f"{path.parent} takes no files; choose another place for {path.name}") from None
    trial.unlink()


def require_new_file(path: Path, overwrite: bool = False) -> None:
    """Check that a file can be written and does not exist.

    Raises:
        UsageError: it exists and `overwrite` is false.
        UsageError, OSError: as `require_writable`.
    """
    require_writable(path)
    require_absent(path, overwrite)


@contextlib.contextmanager
def staged_directory(
    out: Path, overwrite: bool = False, marker: str | None = None, *, locked: bool = False
) -> Iterator[Path]:
    """Create a folder that becomes `out` at the end of the block.

    Args:
        locked: the caller is within `alone(out)`.

    Effects: creates an empty `out.partial`. On success syncs its files and renames it to `out`; on an exception removes
    it. A killed process leaves `out.partial`, which no command reads and the next run replaces. Killed between the two
    renames of an overwrite, it leaves the old result as `out.old`, which the next run restores first.

    Raises:
        UsageError: as `require_absent`.
    """
    with contextlib.nullcontext() if locked else alone(out):
        yield from _staged(out, overwrite, marker)


def put_back(out: Path) -> Path:
    """Undo a half overwrite after a kill between its two renames; return the path of the old result."""
    old = out.with_name(out.name + OLD)
    if old.exists() and not out.exists():
        old.rename(out)
    return old


def _staged(out: Path, overwrite: bool, marker: str | None) -> Iterator[Path]:
    old = put_back(out)
    require_absent(out, overwrite, marker)
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
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        _name(error, out)
        raise


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold `out.lock` while writing `out`; a killed process releases it.

    Effects: creates the parent folder of `out`.

    Raises:
        UsageError: another process is writing there.
    """
    path = out.with_name(out.name + LOCK)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # a file system that takes no new files, such as /proc
        raise UsageError(f"{out.parent} takes no files; choose another place for {out.name}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another moetool is writing {out}; wait for it, or choose another") from None
        if not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino:
            raise UsageError(f"another moetool has just written {out}; try again")  # and removed the lock
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def is_being_written(out: Path) -> bool:
    """Whether a process is within `alone(out)`."""
    try:
        descriptor = os.open(out.with_name(out.name + LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def set_aside(out: Path) -> Path:
    """Rename a folder to its name with the first free number, such as `log.1`; return the new path."""
    for number in itertools.count(1):
        kept = out.with_name(f"{out.name}.{number}")
        if not kept.exists():
            out.rename(kept)
            sync(out.parent)
            return kept
    raise AssertionError


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
