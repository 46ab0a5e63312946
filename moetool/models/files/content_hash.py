"""Full identity of a checkpoint: the sha256 of its config and of every byte of its weights, computed once.

`moetool.models.files.revision` samples a checkpoint in seconds, and misses a changed byte between two samples. Machines
that compute one answer together compare this full hash.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moetool.base import durable, tables
from moetool.base.assets import cache_folder
from moetool.base.errors import MismatchError
from moetool.base.json_files import parse_object

KEPT_BYTES = 64 << 20
"""Smallest file whose hash is cached; smaller ones are hashed in less than a tenth of a second."""
_THREADS = 4


def content_hashes(files: Sequence[Path], folder: Path) -> dict[str, str]:
    """Return the sha256 of files, by path relative to `folder`.

    The user's cache folder (`moetool.base.assets.cache_folder`) keeps the hash of a large file until the file changes.
    The name of a blob in the hub's cache is not trusted: its bytes may have changed after the download.

    Effects: progress on stderr while files are read.

    Raises:
        MismatchError: a file changes while it is read.
    """
    known = {file: _cached_hash(file) for file in files}
    unknown = [file for file in files if not known[file]]
    if unknown:
        total = sum(file.stat().st_size for file in unknown)
        done = 0
        with (
            ThreadPoolExecutor(_THREADS) as threads,
            tables.progress("hashing weights (MB)", total // 10**6) as on_progress,
        ):
            for file, found in zip(unknown, threads.map(_computed, unknown), strict=True):
                known[file] = found
                done += file.stat().st_size
                on_progress(done // 10**6)
    return {file.relative_to(folder).as_posix(): known[file] for file in files}


def differing_file(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return the first file that is missing on one side or differs; None if all are equal."""
    return next((name for name in sorted({*mine, *theirs}) if mine.get(name) != theirs.get(name)), None)


def _cached_hash(file: Path) -> str:
    """Return the cached hash of a file; empty if there is none or the file has changed."""
    cached = _cache_file(file)
    if file.stat().st_size < KEPT_BYTES or not cached.is_file():
        return ""
    try:
        record = parse_object(cached.read_bytes()[:4096])
    except (OSError, ValueError):
        return ""
    digest = record.get("sha256")
    return digest if record.get("stamp") == _stamp(file) and isinstance(digest, str) else ""


def _computed(file: Path) -> str:
    stamp = _stamp(file)
    digest = durable.sha256_file(file)
    if _stamp(file) != stamp:
        raise MismatchError(f"{file} changed while it was read; try again")
    if file.stat().st_size >= KEPT_BYTES:
        cached = _cache_file(file)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(cached, json.dumps({"stamp": stamp, "sha256": digest}))
        except OSError:
            pass  # an unwritable cache costs only time
    return digest


def _stamp(file: Path) -> list[int]:
    """Numbers that change when a file is written or replaced: ctime changes even if mtime is reset."""
    found = file.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _cache_file(file: Path) -> Path:
    """File of the cache that holds the hash of a file."""
    return cache_folder() / "sha256" / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
