"""The folder of a cluster that a command starts, and the logs in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moetool import tables

if TYPE_CHECKING:
    from moetool.cluster.cluster_folder import ClusterFolder


@contextmanager
def open_folder(name: str, processes: str) -> Iterator["ClusterFolder"]:
    """A cluster's folder. After an error its logs stay, and are named.

    Args:
        processes: in its logs, in words.
    """
    from moetool.cluster.cluster_folder import ClusterFolder

    folder, failed = ClusterFolder(name), False
    try:
        yield folder
    except Exception:
        failed = True
        if logs := folder.logs:
            tables.narrate(f"moetool: logs of the {processes}: {' '.join(map(str, logs))}")
        raise
    finally:
        folder.close(keep_logs=failed)


def folder_name(port: int) -> str:
    """Name of a cluster's folder by the port of its first endpoint (0: by this process)."""
    return f"port-{port}" if port else f"process-{os.getpid()}"


def said_where(folder: "ClusterFolder", count: int | None) -> str:
    """Words for the logs of processes of this machine (`count` of them), or nothing."""
    return f"; their logs: {folder.path}{os.sep}*.log" if count else ""
