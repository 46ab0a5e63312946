"""A local server with the Hugging Face hub's protocol, for models in folders."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c0ffee" + "0" * 34
_LFS = (".safetensors", ".gguf", ".bin", ".pth")


class Hub:
    """Served models and injected faults.

    Attributes:
        folders: files of each repository.
        gated: repositories that require accepted terms.
        breaks: for each file, the bytes after which its next downloads break off.
        corrupts: files whose bytes are corrupted.
        gets: (file, first byte) of every download.
        commit: commit of the main branch.
        moves: commits that the main branch moves to after the download of a file, by file.
        ranges: whether range requests are answered.
        sent: requested bytes of each file.
    """

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.breaks: dict[str, list[int]] = {}
        self.corrupts: set[str] = set()
        self.gets: list[tuple[str, int]] = []
        self.commit = COMMIT
        self.moves: dict[str, str] = {}
        self.ranges = True
        self.sent: dict[str, int] = {}
        self.instead: bytes | None = None  # replaces every answer

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        if self.instead is not None:
            _send(request, 200, {"Content-Type": "text/html"}, self.instead)
        elif found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/([\w-]+)/([^/]+))?(?:/.*)?", path):
            self._describe(request, found[1], found[2] or "revision", found[3] or "main")
        elif found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._send_file(request, found[1], found[2], found[3])
        else:
            _send(request, 404, {})

    def _refused(self, request: BaseHTTPRequestHandler, name: str, revision: str) -> bool:
        if name not in self.folders:
            _send(request, 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif name in self.gated:
            _send(request, 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to {name} is restricted"})
        elif revision not in ("main", COMMIT, self.commit):
            _send(request, 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        else:
            return False
        return True

    def _describe(self, request: BaseHTTPRequestHandler, name: str, what: str, revision: str) -> None:
        if self._refused(request, name, revision):
            return
        folder, rows = self.folders[name], []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = file.read_bytes()
            row: dict[str, Any] = {"type": "file", "path": str(file.relative_to(folder)), "size": len(content)}
            row["oid"] = hashlib.sha1(content).hexdigest()
            if file.suffix in _LFS:
                row["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            rows.append(row)
        siblings = [{"rfilename": row["path"]} for row in rows]
        body: Any = (
            rows
            if what in ("tree", "paths-info")
            else {"id": name, "sha": self.commit if revision == "main" else revision, "siblings": siblings}
        )
        _send(request, 200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, revision: str, path: str) -> None:
        if self._refused(request, name, revision):
            return
        file = self.folders[name] / path
        if not file.is_file():
            _send(request, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        content = file.read_bytes()
        commit = self.commit if revision == "main" else revision
        digest = (hashlib.sha256 if file.suffix in _LFS else hashlib.sha1)(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        if request.command == "HEAD":
            _send(request, 200, {**headers, "Content-Length": str(len(content))})
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")) if self.ranges else None
        first = int(wanted[1]) if wanted else 0
        end = int(wanted[2]) + 1 if wanted and wanted[2] else len(content)
        self.gets.append((path, first))
        self.commit = self.moves.pop(path, self.commit)
        body = content[first:end]
        if path in self.corrupts:
            body = bytes(byte ^ 1 for byte in body)
        headers["Content-Length"] = str(len(body))
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self.sent[path] = self.sent.get(path, 0) + len(body)
        if breaks := self.breaks.get(path):
            body = body[: breaks.pop(0)]
            request.close_connection = True
        _send(request, 206 if wanted else 200, headers, body)


def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes = b"") -> None:
    request.send_response(status)
    for name, value in ({"Content-Length": str(len(body))} | headers).items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


@contextlib.contextmanager
def running(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub for huggingface_hub in this process, with its own cache."""
    from huggingface_hub import constants

    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50_000)  # limits the bytes that a broken connection loses
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
