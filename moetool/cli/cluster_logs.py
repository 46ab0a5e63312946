"""The folder of a cluster that a command starts, and the logs in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moetool.base import tables

if TYPE_CHECKING:
    from moetool.cluster.cluster_folder import ClusterFolder


@contextmanager
def open_folder(name: str, processes: str) -> Iterator["ClusterFolder"]:
    """Open a cluster's folder. After an error its logs are kept, and a message names them.

    Args:
        processes: name of the logging processes, for that message.
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
    """Return the name of a cluster's folder: by the port of its first endpoint, or by this process for port 0."""
    return f"port-{port}" if port else f"process-{os.getpid()}"


def log_location(folder: "ClusterFolder", count: int | None) -> str:
    """Return the location of logs for a message; empty unless this machine runs the `count` processes."""
    return f"; their logs: {folder.path}{os.sep}*.log" if count else ""
