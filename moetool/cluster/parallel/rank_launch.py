"""Ranks as processes, on this machine or on several."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moetool.cluster.cluster_folder import ClusterFolder
from moetool.cluster.fork_server import ForkServer
from moetool.cluster.launch import ClusterAddress, Detached, Workers
from moetool.cluster.parallel.rank import Rank

_BUILD_S = 180.0


class RankProcesses:
    """A `Launcher` of rank processes over `moetool.cluster.launch.Workers`.

    Args:
        where, fork_server: as for `Workers`.
        names: names of the ranks.
        threads: compute threads of each rank's libraries.
        folder: folder for the logs of ranks on this machine (default: not kept).
    """

    def __init__(
        self,
        where: ClusterAddress,
        names: Sequence[str],
        *,
        threads: int = 0,
        folder: ClusterFolder | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._where, self._names, self._threads = where, names, threads
        self._folder, self._fork_server = folder, fork_server
        self._workers: Workers | None = None
        self._on_death: Callable[[int], None] = lambda gpu: None

    def launch(self, arguments: Sequence[Mapping[str, Any]], on_death: Callable[[int], None]) -> None:
        """Start all ranks and wait until each is built. Raises: as `Workers`, and errors of building a rank."""
        self._on_death = on_death
        detached = Detached(folder=self._folder)  # ranks end as soon as their head has ended
        self._workers = Workers(
            *(self._where, Rank, arguments, self._names),
            threads=self._threads,
            detached=detached,
            fork_server=self._fork_server,
        )
        for gpu in range(len(self._workers)):
            self._workers.call(gpu, "ready", timeout_s=_BUILD_S)
            self._workers.watch(gpu, on_death)

    def restart(self, gpu: int) -> None:
        """Start a new process for a rank whose process has ended. Raises: as `Workers.restart`."""
        if (workers := self._workers) is not None:
            workers.restart(gpu)
            workers.watch(gpu, self._on_death)

    def kill(self, gpu: int) -> None:
        """End a rank's process at once."""
        if self._workers is not None:
            self._workers.kill(gpu)

    def release(self, gpu: int) -> None:
        """End a drained rank, and start none in its place until its machine has joined again."""
        if self._workers is not None:
            self._workers.release(gpu)

    def pid(self, gpu: int) -> int:
        """Return the process id of a rank, on its own machine."""
        assert self._workers is not None
        return self._workers.pid(gpu)

    def close(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
