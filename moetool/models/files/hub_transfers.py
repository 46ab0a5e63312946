"""Downloads of large files from the hub, continued by range requests and checked when complete."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from moetool.base import tables
from moetool.base.durable import sha256_file
from moetool.base.errors import MismatchError, MoetoolError, first_line

_WORKERS = 4  # concurrent downloads
MOST_FAILURES = 5  # consecutive attempts without data
_POLL_SECONDS = 0.2  # between checks of another process's lock; Ctrl-C ends the wait
PARTIAL = ".moetool-partial"
"""Suffix of an incomplete blob."""


class Blob(NamedTuple):
    """A file of a repository; `sha256` is empty if the hub stores it in git."""

    path: str
    num_bytes: int
    sha256: str


class _Stopped(Exception):
    """Another download failed, or the user stopped all."""


def fetch_range(repository: str, commit: str, endpoint: str, file: Blob, first: int, end: int) -> bytes:
    """Return bytes of a file from `first` to before `end`, or to its end; fewer if the connection breaks.

    Raises: errors of huggingface_hub and its HTTP client, if the hub refuses or does not answer.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repository, file.path, revision=commit, endpoint=endpoint)
    headers = build_hf_headers(library_name="moetool") | {"Range": f"bytes={first}-{min(end, file.num_bytes) - 1}"}
    found = bytearray()
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == 206 else first  # a server without ranges sends the whole file
        try:
            for chunk in response.iter_bytes():
                found += chunk
                if len(found) >= skipped + end - first:
                    break
        except Exception as error:
            if not (is_connection_error(error) and len(found) > skipped):
                raise
    return bytes(found[skipped : skipped + end - first])


def is_connection_error(error: Exception) -> bool:
    """Whether an error comes from the connection, not from the hub."""
    return type(error).__module__.startswith(("httpx", "httpcore")) or isinstance(error, ConnectionError)


class Transfers:
    """Concurrent downloads of complete blobs.

    Effects: `blobs/SHA256` for each complete blob, `blobs/SHA256.moetool-partial` for each incomplete one.
    """

    def __init__(
        self, repository: str, commit: str, endpoint: str, blobs: Path, on_progress: Callable[[int], None]
    ) -> None:
        from huggingface_hub.utils import build_hf_headers

        self._repository = repository
        self._commit = commit
        self._endpoint = endpoint
        self._blobs = blobs
        self._on_progress = on_progress
        self._headers = build_hf_headers(library_name="moetool")
        self._done = 0
        self._narrated = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    def run(self, files: Sequence[Blob]) -> None:
        """Download all. Raises: the first failure's error."""
        with ThreadPoolExecutor(_WORKERS) as threads:
            running = [threads.submit(self._whole, file) for file in files]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                self._stopping.set()  # no effect on finished ones
                for each in running:
                    each.cancel()
            errors = [each.exception() for each in running if each.done() and not each.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def _whole(self, file: Blob) -> None:
        partial, blob = self._blobs / f"{file.sha256}{PARTIAL}", self._blobs / file.sha256
        with partial.open("ab") as stream:
            self._acquire(file, stream)
            if not blob.exists():
                self._add(stream.seek(0, os.SEEK_END))  # another process may have written meanwhile
                self._rest(file, stream)
                stream.flush()
                if (found := sha256_file(partial)) != file.sha256:
                    stream.truncate(0)
                    raise MismatchError(
                        f"{self._repository}: {file.path} has sha256 {found[:12]}, expected {file.sha256[:12]}; "
                        "run the command again to download it anew"
                    )
                partial.replace(blob)
            else:
                partial.unlink(missing_ok=True)

    def _acquire(self, file: Blob, stream: Any) -> None:
        """Lock a partial file, so that one of several processes downloads. Raises: _Stopped while it waits."""
        while True:
            try:
                return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with self._lock:
                    narrated, self._narrated = self._narrated, True
            if not narrated:
                tables.narrate(f"moetool: waiting for another download of {self._repository}/{file.path}")
            if self._stopping.wait(_POLL_SECONDS):
                raise _Stopped

    def _rest(self, file: Blob, stream: Any) -> None:
        """Continue a file to its end, with retries after broken connections."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get

        url = hf_hub_url(self._repository, file.path, revision=self._commit, endpoint=self._endpoint)
        failures = 0
        while True:
            before = stream.seek(0, os.SEEK_END)
            if before > file.num_bytes:
                stream.truncate(0)
                before = stream.seek(0)
            try:
                http_get(
                    url,
                    stream,
                    resume_size=before,
                    headers=dict(self._headers),
                    expected_size=file.num_bytes,
                    _tqdm_bar=_Bar(self._add),
                )
                return
            except (_Stopped, MoetoolError):
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                    raise
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise
                stream.flush()
                failures = 0 if stream.tell() > before else failures + 1
                if failures == MOST_FAILURES:
                    raise MoetoolError(
                        f"the download of {file.path} stopped at {tables.count(stream.tell(), 'B')} of "
                        f"{tables.count(file.num_bytes, 'B')} ({first_line(error)}); run the command again to continue"
                    ) from None
                time.sleep(failures)

    def _add(self, num_bytes: int) -> None:
        if self._stopping.is_set():
            raise _Stopped
        with self._lock:
            self._done += num_bytes
            self._on_progress(self._done // 10**6)


class _Bar:
    """Progress bar for huggingface_hub that calls `update` with the bytes of each chunk."""

    def __init__(self, update: Callable[[int], None]) -> None:
        self.update = update
