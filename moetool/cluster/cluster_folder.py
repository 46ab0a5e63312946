"""A cluster's folder on the machine of its head; with it the next head takes over running servers."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from moetool import __version__
from moetool.base import assets, durable
from moetool.base.errors import MismatchError, UsageError
from moetool.base.json_files import read_json
from moetool.cluster.certificates import Authority, Identity
from moetool.cluster.control_messages import to_plain
from moetool.cluster.worker_link import serves
from moetool.cluster.worker_process import RECORD, ProcessRecord, end_process

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
_PEM = "-----BEGIN "


class ClusterFolder:
    """Folder with the addresses of a cluster's servers and their certificates. One head holds it at a time.

    Args:
        name: name of the cluster, at most 64 characters.
        above: folder of all clusters (default: in the user's cache folder).

    Attributes:
        path: the folder, accessible only to this user.

    Effects: makes the folder, and holds its lock until `close`.

    Raises:
        UsageError: another head has it, other users can access it, or the name is not valid for a folder.
        MismatchError: its content is damaged.
    """

    def __init__(self, name: str, above: Path | None = None) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(f"cluster.name is {name!r}, expected letters, digits, '.', '_' and '-', at most 64")
        self.name = name
        self.path = (above or assets.cache_folder() / "clusters") / name
        self._held = contextlib.ExitStack()
        try:
            self._held.enter_context(durable.alone(self.path))
        except UsageError:
            raise UsageError(
                f"cluster {name} already has a head, another moetool serve; stop it first, or choose another name with "
                "--set cluster.name=NAME"
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot make the cluster's folder {self.path} ({error.strerror}); set XDG_CACHE_HOME to a folder of "
                "yours"
            ) from None
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
            _require_own(self.path)
            self._file = self.path / "cluster.json"
            if not self._file.exists():
                self._write({"authority": asdict(Authority.new()), "identities": {}, "settings": ""})
            self._read()
        except BaseException:
            self._held.close()
            raise

    def identity(self, name: str) -> Identity:
        """Return a process's key and certificate, the same each time. Raises: MoetoolError: they cannot be created."""
        values = self._read()
        if name not in values["identities"]:
            values["identities"][name] = asdict(Authority(**values["authority"]).issue(name))
            self._write(values)
        return Identity(**values["identities"][name])

    @property
    def scheduler_state(self) -> Path:
        """Return the file of the scheduler's state."""
        return self.path / "scheduler.json"

    def log(self, server: str) -> Path:
        """Return the log file of a server's process."""
        return self.path / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', server)}.log"

    def living(self) -> dict[str, ProcessRecord]:
        """Return the live processes of an earlier head, by server; end and forget the others."""
        kept = []
        for path in self._records():
            values = read_json(path, advice="remove it")
            try:
                kept.append((path, str(values.pop("server")), ProcessRecord(**values)))
            except (KeyError, TypeError):
                raise MismatchError(f"{path} does not describe a server's process; remove it") from None
        found, head = {}, self.identity("head")
        with ThreadPoolExecutor(max(1, len(kept))) as pool:  # each may take seconds
            answers = list(pool.map(lambda one: serves(one[2], head), kept))
        for (path, server, record), is_serving in zip(kept, answers, strict=True):
            if is_serving:
                found[server] = record
            else:
                if not record.machine:
                    end_process(record.pid, record.started)
                path.unlink(missing_ok=True)
        return found

    def record_of(self, n: int) -> Path:
        """Return the file with the address of server `n`."""
        return self.path / f"{n}{RECORD}"

    def keep(self, n: int, server: str, record: ProcessRecord) -> None:
        """Store the address of a server's process."""
        durable.write_text(self.record_of(n), json.dumps({"server": server, **asdict(record)}) + "\n")

    def forget(self, n: int) -> None:
        """Forget a server's process that has ended."""
        self.record_of(n).unlink(missing_ok=True)

    def require_same(self, settings: Sequence[Any], living: Mapping[str, ProcessRecord]) -> None:
        """Store the servers' settings; they must be those of the servers that already run.

        Args:
            living: the running servers' processes, by server.

        Raises:
            MismatchError: they differ.
        """
        found = hashlib.sha256(json.dumps([__version__, *to_plain(list(settings))]).encode()).hexdigest()
        values = self._read()
        if values["settings"] != found and living:
            pids = " ".join(f"{one.pid} on {one.host}" for one in living.values())
            raise MismatchError(
                f"the servers of cluster {self.name} run another model, plan or options; end them "
                f"(processes {pids}), or choose another name with --set cluster.name=NAME"
            )
        self._write({**values, "settings": found})

    @property
    def logs(self) -> list[Path]:
        """Return the log files that are not empty."""
        return sorted(path for path in self.path.glob("*.log") if path.stat().st_size)

    def close(self, keep_logs: bool = False) -> None:
        """Release the lock; remove the folder if it holds no process.

        Args:
            keep_logs: leave the folder with its logs, if there are any.
        """
        if not self._records():
            if keep_logs and self.logs:
                for path in set(self.path.iterdir()) - set(self.logs):
                    path.unlink()
            else:
                shutil.rmtree(self.path, ignore_errors=True)
        self._held.close()

    def _records(self) -> list[Path]:
        return sorted(self.path.glob(f"*{RECORD}"))

    def _read(self) -> dict[str, Any]:
        values = read_json(self._file, advice=f"remove {self.path}")
        authority, identities, settings = (values.get(name) for name in ("authority", "identities", "settings"))
        whole = isinstance(settings, str) and _holds(authority, Authority) and isinstance(identities, dict)
        if not whole or not all(_holds(one, Identity) for one in dict(identities or {}).values()):
            raise MismatchError(f"{self._file} is damaged (it holds no certificates and settings); remove {self.path}")
        return {"authority": authority, "identities": identities, "settings": settings}

    def _write(self, values: dict[str, Any]) -> None:
        with durable.staged_file(self._file) as partial:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(values) + "\n", encoding="utf-8")


def _holds(values: Any, kind: type[Authority] | type[Identity]) -> bool:
    """Whether values from a file have the fields of a class: PEM texts and, if any, a name."""
    if not isinstance(values, dict) or set(values) != {one.name for one in fields(kind)}:
        return False
    return all(isinstance(one, str) and (name == "name" or one.startswith(_PEM)) for name, one in values.items())


def _require_own(path: Path) -> None:
    """Require a folder of this user only. Raises: UsageError: no folder, another user's, or open to others."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{path} is not a folder; remove it")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}, expected {os.geteuid()}; set XDG_CACHE_HOME")
    if found.st_mode & 0o077:
        raise UsageError(
            f"{path} has mode {found.st_mode & 0o777:o}, expected 700: others may know its keys; remove it after its "
            "servers have ended"
        )
