"""Download the files that moetool reads from the Hugging Face hub, so that an interruption loses nothing.

Small files go through huggingface_hub. Weights are written next to their final path in the hub's own cache. A later
request continues an incomplete file by range requests. A complete file is checked against the hub's sha256.
"""

import contextlib
import errno
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from moetool.base import durable, tables
from moetool.base.assets import cache_folder
from moetool.base.errors import CapacityError, MismatchError, MoetoolError, UsageError, first_line
from moetool.base.json_files import read_json
from moetool.models.files.hub_transfers import MOST_FAILURES, PARTIAL, Blob, Transfers, fetch_range, is_connection_error
from moetool.models.files.weight_files import INDEX, SINGLE, choose_weights, names_of_index, second_set

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?P<file>/[\w./-]+\.gguf)?(?:@(?P<revision>[\w.-][\w./-]*))?")
_SMALL = ("config.json", "generation_config.json", INDEX)
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template.*"),
)
_INDEX_BYTES = 64 << 20
FIRST_BYTES = 4 << 20
"""Bytes of a GGUF file fetched first for its header; each further step fetches four times as many."""
_KEPT_FREE = 64 << 20  # kept free on the disk for other files written during a download


class HubName(NamedTuple):
    """A name on the hub: `org/name`, `org/name@revision`, or one of its GGUF files, `org/name/FILE.gguf`.

    Attributes:
        file: path of the GGUF file in the repository; empty for a model in Hugging Face format.
        revision: branch, tag or commit; empty for the repository's main branch.
    """

    repository: str
    file: str
    revision: str

    @property
    def model(self) -> str:
        """The name without a revision."""
        return f"{self.repository}/{self.file}" if self.file else self.repository


def parse_hub_name(model: str) -> HubName | None:
    """Parse a name on the hub; None if it cannot be one."""
    found = None if model.startswith((".", "~", "/")) else _NAME.fullmatch(model)
    if found is None or ".." in re.split("[/@]", model):
        return None
    return HubName(found["repository"], (found["file"] or "")[1:], found["revision"] or "")


def with_revision(model: str, revision: str | None) -> str:
    """Name of a model at a revision. Raises: UsageError: only names on the hub have revisions."""
    if revision is None:
        return model
    name = parse_hub_name(model)
    if name is None or Path(model).exists():
        raise UsageError(f"--revision {revision!r} is for a name on the hub like org/model, not for {model!r}")
    if name.revision or parse_hub_name(f"{model}@{revision}") is None:
        raise UsageError(f"--revision {revision!r} does not go with {model!r}; give one branch, tag or commit")
    return f"{model}@{revision}"


def is_downloaded(name: HubName) -> bool:
    """Whether the hub's cache has a model with its weights, at the newest commit known here."""
    try:
        _cached(name, True, "")
    except MoetoolError:
        return False
    return True


def snapshot_name(path: Path) -> str | None:
    """The model's name if a folder is a snapshot in the hub's cache, which is named after a commit."""
    parents = path.parents
    if len(parents) < 2 or parents[0].name != "snapshots" or not parents[1].name.startswith("models--"):
        return None
    return parents[1].name.rpartition("--")[2]


def download(name: HubName, *, weights: bool) -> Path:
    """Download a model's missing files into the hub's cache.

    Args:
        weights: also download its weights; otherwise only config and tokenizer, or the headers of its GGUF files.

    Returns:
        The folder of the snapshot, or the GGUF file in it; without weights the file may be only its header, in the
        user's cache folder.

    Effects: writes to the disk of the hub's cache; progress on stderr. With HF_HUB_OFFLINE, or if the hub cannot be
    reached, the cache is used.

    Raises:
        UsageError: no such model or revision, no access to it, or no weights in a supported format.
        CapacityError: the disk is too small.
        MoetoolError: the hub cannot be reached.
        MismatchError: the downloaded bytes differ from the hub's digest.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()
    logging.set_verbosity_error()  # each failed attempt would print a line
    if constants.is_offline_mode():
        return _cached(name, weights, "HF_HUB_OFFLINE is set: unset it to download")
    try:
        with _hub_errors(name):
            return _Download(name, constants.HF_HUB_CACHE, constants.ENDPOINT).run(weights)
    except _Unreachable as error:
        path = _cached(name, weights, f"{error}; check the network and HF_ENDPOINT", MoetoolError)
        tables.narrate(f"moetool: {error}; using {name.model} from the cache")
        return path


class _Unreachable(MoetoolError):
    """The hub did not answer."""


class _Download:
    """Download of one model into the cache."""

    def __init__(self, name: HubName, cache: str, endpoint: str) -> None:
        from huggingface_hub import HfApi

        self._name = name
        self._endpoint = endpoint
        self._cache = Path(cache)
        self._folder = self._cache / f"models--{name.repository.replace('/', '--')}"
        self._revision = name.revision or "main"
        self._api = HfApi(endpoint=endpoint, library_name="moetool")

    def run(self, weights: bool) -> Path:
        """Download what is missing; returns the path of the snapshot or file."""
        commit, files = self._describe()
        small = [path for path in files if _is_small(path)]
        if self._name.file:
            if self._name.file not in files:
                raise UsageError(_no_such_gguf(self._name, files))
            wanted, small = _parts(self._name.file, files), []
            snapshot = self._folder / "snapshots" / commit
            if not weights and not all((snapshot / path).is_file() for path in wanted):
                return self._headers([files[path] for path in wanted], commit)
        else:
            if "config.json" not in files:
                raise UsageError(_no_such_gguf(self._name, files))
            self._link(commit, small)
            wanted = self._weights(commit, files) if weights else []
        self._fetch([files[path] for path in wanted], commit)
        self._link(commit, [*small, *wanted])
        self._keep_reference(self._folder, commit)
        snapshot = self._folder / "snapshots" / commit
        return snapshot / self._name.file if self._name.file else snapshot

    def _headers(self, files: Sequence[Blob], commit: str) -> Path:
        """Fetch the headers of GGUF files; returns the path of the named one."""
        folder = _header_folder(self._name.repository) / commit
        for file in files:
            _read_header(folder / file.path, file, partial(fetch_range, self._name.repository, commit, self._endpoint))
        self._keep_reference(folder.parent, commit)
        return folder / self._name.file

    def _describe(self) -> tuple[str, dict[str, Blob]]:
        """The commit and its files by path. Raises: _Unreachable: the endpoint is not a hub."""
        try:
            info = self._api.model_info(self._name.repository, revision=self._revision)
            commit = str(info.sha)
            entries: Any = self._api.list_repo_tree(self._name.repository, recursive=True, revision=commit)
            files = {
                entry.path: Blob(entry.path, entry.size, _sha256(entry))
                for entry in entries
                if hasattr(entry, "blob_id")  # not a folder
            }
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise _Unreachable(f"{self._endpoint} does not answer as a hub ({first_line(error)})") from None
        if not re.fullmatch("[0-9a-f]{40,64}", commit):
            raise _Unreachable(f"{self._endpoint} does not answer as a hub (it names no commit)")
        return commit, files

    def _link(self, commit: str, paths: Sequence[str]) -> None:
        """Download the small files through huggingface_hub, and link all files into a commit's snapshot.

        A branch may move during the download, so `run` resolves it once.
        """
        from huggingface_hub import snapshot_download

        snapshot_download(
            self._name.repository,
            revision=commit,
            allow_patterns=[re.sub(r"([*?[])", r"[\1]", path) for path in paths],
            cache_dir=self._cache,
            endpoint=self._endpoint,
            library_name="moetool",
        )

    def _keep_reference(self, folder: Path, commit: str) -> None:
        """Record the commit of a branch or tag, as huggingface_hub does, for use without the hub."""
        reference = folder / "refs" / self._revision
        if self._revision != commit and not (reference.is_file() and reference.read_text() == commit):
            reference.parent.mkdir(parents=True, exist_ok=True)
            durable.write_text(reference, commit)

    def _weights(self, commit: str, files: dict[str, Blob]) -> list[str]:
        """Weight files to read (`choose_weights`)."""
        chosen = choose_weights([path for path in files if "/" not in path], self._name.model)
        index = self._folder / "snapshots" / commit / INDEX
        if chosen == SINGLE:
            if said := second_set(index, files, self._name.model):
                tables.narrate(f"moetool: {said}")
            return [SINGLE]
        named = names_of_index(read_json(index, advice="choose another --revision", max_bytes=_INDEX_BYTES))
        if not named:
            raise MismatchError(f"{self._name.model}: its {INDEX} names no files; choose another --revision")
        if lost := sorted(named - files.keys()):
            raise MismatchError(
                f"{self._name.model}: its {INDEX} names {lost[0]}, which is not in the repository; choose another "
                "--revision"
            )
        return sorted(named)

    def _fetch(self, files: Sequence[Blob], commit: str) -> None:
        """Check the free disk space and download the weight files that the cache lacks."""
        from huggingface_hub import constants

        snapshot, blobs = self._folder / "snapshots" / commit, self._folder / "blobs"
        missing = [file for file in files if not (snapshot / file.path).exists()]
        missing = [file for file in missing if not (file.sha256 and (blobs / file.sha256).exists())]
        here = {file.path: _size(blobs / f"{file.sha256}{PARTIAL}") if file.sha256 else 0 for file in missing}
        needed = sum(max(0, file.num_bytes - here[file.path]) for file in missing)
        if not missing:
            return
        blobs.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(blobs).free) < needed + _KEPT_FREE:
            raise self._full(needed, free)
        total = sum(file.num_bytes for file in missing)
        again = f", {tables.count(total - needed, 'B')} of them already downloaded" if needed < total else ""
        tables.narrate(
            f"moetool: downloading {tables.numbered(len(missing), 'file')} of {self._name.model}@{commit[:12]}, "
            f"{tables.count(total, 'B')}{again}, to {self._cache}"
        )
        # Files in git are small, and files above the hub's HTTP limit need its own protocol: huggingface_hub gets both.
        large = [file for file in missing if file.sha256 and file.num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE]
        try:
            with tables.progress(f"downloading {self._name.model} (MB)", total // 10**6) as on_progress:
                Transfers(self._name.repository, commit, self._endpoint, blobs, on_progress).run(large)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._full(needed, shutil.disk_usage(blobs).free) from None
            raise

    def _full(self, needed: int, free: int) -> CapacityError:
        return CapacityError(
            f"{self._name.model} needs {tables.count(needed + _KEPT_FREE, 'B')} more on the disk of {self._cache}, "
            f"which has {tables.count(free, 'B')} free; make room there, or set HF_HOME to a larger disk"
        )


def _cached(name: HubName, weights: bool, why: str, kind: type[MoetoolError] = UsageError) -> Path:
    """Return the cached model. Raises: `kind`: it is not cached; `why` tells why it cannot be downloaded."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repository.replace('/', '--')}"
    reference = folder / "refs" / (name.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else name.revision
    snapshot = folder / "snapshots" / commit
    path = snapshot / (name.file or "config.json")
    if not weights and name.file and not path.is_file() and (header := _kept_header(name)):
        return header
    if not commit or not path.is_file():
        at = f" at {name.revision}" if name.revision else ""
        raise kind(
            f"cannot get {name.model!r}{at} from the hub: it is not in {constants.HF_HUB_CACHE}, and {why}; or give a "
            "local directory or 'reference'"
        )
    if weights and not name.file and (lost := _missing_weights(snapshot)):
        raise kind(f"{name.model} is in {constants.HF_HUB_CACHE} without {lost}, and {why}")
    return path if name.file else snapshot


def _header_folder(repository: str) -> Path:
    """Cache directory of the headers of a repository's GGUF files, by commit."""
    return cache_folder() / "headers" / repository.replace("/", "--")


def _kept_header(name: HubName) -> Path | None:
    """A GGUF file's header, fetched by an earlier run."""
    reference = _header_folder(name.repository) / "refs" / (name.revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else name.revision
    path = _header_folder(name.repository) / commit / name.file
    return path if commit and path.is_file() else None


def _read_header(to: Path, file: Blob, fetch: Callable[[Blob, int, int], bytes]) -> None:
    """Write the part of a GGUF file that contains its header, unless it exists.

    Args:
        fetch: returns bytes of the file.

    Raises:
        MismatchError, UsageError: see `read_gguf_header`; and errors that `fetch` raises repeatedly.
    """
    from moetool.models.files.gguf_header import HeaderCut, require_header  # imports torch, which --help does not need

    if to.is_file():
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    begun = to.with_name(f"{to.name}{PARTIAL}")
    content, end, failures = b"", FIRST_BYTES, 0
    while True:
        try:
            content += fetch(file, len(content), end)
            failures = 0
        except Exception as error:
            failures += 1
            if not is_connection_error(error) or failures == MOST_FAILURES:
                raise
            time.sleep(failures)
            continue
        if len(content) < min(end, file.num_bytes):
            continue
        begun.write_bytes(content)
        try:
            require_header(begun)
        except HeaderCut:
            if len(content) >= file.num_bytes:
                raise
            end *= 4
        else:
            begun.replace(to)
            return


def _missing_weights(snapshot: Path) -> str:
    """The first weight file that a snapshot lacks; empty if its weights are complete."""
    if (snapshot / SINGLE).is_file():
        return ""
    index = snapshot / INDEX
    if not index.is_file():
        return "its weights"
    named = names_of_index(read_json(index, advice="download the model again", max_bytes=_INDEX_BYTES))
    return next((file for file in sorted(named) if not (snapshot / file).is_file()), "")


def _is_small(path: str) -> bool:
    return "/" not in path and (path in _SMALL or any(fnmatch(path, pattern) for pattern in _TOKENIZER))


def _parts(file: str, files: Mapping[str, Blob]) -> list[str]:
    """A GGUF file and the other parts of its model."""
    split = re.fullmatch(r"(.+)-\d{5}-(of-\d{5})\.gguf", file)
    if split is None:
        return [file]
    named = re.compile(rf"{re.escape(split[1])}-\d{{5}}-{split[2]}\.gguf")
    return sorted(path for path in files if named.fullmatch(path))


def _no_such_gguf(name: HubName, files: dict[str, Blob]) -> str:
    offered = sorted(path for path in files if path.endswith(".gguf"))
    if not offered:
        return f"{name.model} has no config.json and no .gguf file; name a model that has one"
    choices = ", ".join(f"{name.repository}/{path}" for path in offered[:4])
    return f"{name.model} does not name one of its GGUF files; give one of {len(offered)}, such as {choices}"


def _sha256(entry: Any) -> str:
    """A file's sha256 on the hub; empty for a file in git."""
    digest = str(entry.lfs.sha256) if entry.lfs else ""
    return digest if re.fullmatch("[0-9a-f]{64}", digest) else ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextlib.contextmanager
def _hub_errors(name: HubName) -> Iterator[None]:
    """Convert the hub's refusals to one-line errors.

    Raises:
        _Unreachable: it did not answer, or reported an internal failure.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name.repository}"
    try:
        yield
    except MoetoolError:
        raise
    except GatedRepoError:
        raise UsageError(
            f"cannot get {name.model!r} from the hub: it is gated; accept its terms at {page}, then log in with "
            "'hf auth login' or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise UsageError(
            f"cannot get {name.model!r} from the hub: it has no revision {name.revision or 'main'!r}; see "
            f"{page}/tree/main for its branches and commits"
        ) from None
    except RepositoryNotFoundError:
        raise UsageError(
            f"cannot get {name.model!r} from the hub: {constants.ENDPOINT} has no such model, or it is private; check "
            "the name, or log in with 'hf auth login'"
        ) from None
    except HFValidationError as error:
        raise UsageError(f"{name.model!r} is not a valid name on the hub: {first_line(error)}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UsageError(
                f"cannot get {name.model!r} from the hub: it answered {status}; log in with 'hf auth login', or set "
                "HF_TOKEN to a token with access"
            ) from None
        raise _Unreachable(f"the hub at {constants.ENDPOINT} answered {status}") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"the disk of {constants.HF_HUB_CACHE} is full; make room there, or set HF_HOME to a larger disk"
            ) from None
        if is_connection_error(error):
            raise _Unreachable(f"the hub at {constants.ENDPOINT} cannot be reached ({first_line(error)})") from None
        raise
