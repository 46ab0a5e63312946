"""Sites of a cluster bench's servers: processes, threads of this process, or hosts in network namespaces."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from moetool.base.errors import MoetoolError
from moetool.base.types import Cluster
from moetool.cluster.edge.edge_head import Processes
from moetool.cluster.edge.server_settings import Endpoints

if TYPE_CHECKING:
    from moetool.bench.live_cluster.namespaces import Hosts

Build = Callable[..., Any]


class Threads:
    """Workers in this process, for `moetool.cluster.edge.edge_head.EdgeHead`: they never restart or die."""

    def __init__(self, build: Build, arguments: Sequence[Mapping[str, Any]]) -> None:
        self._workers: list[Any] = []
        try:
            for one in arguments:
                self._workers.append(build(**one))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    def is_started(self, n: int) -> bool:
        """Return at once: all run from the start."""
        return True

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        """Call a method of a worker, without a deadline."""
        return getattr(self._workers[n], method)(*args, **kwargs)

    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None:
        """Raises: MoetoolError."""
        raise MoetoolError("a worker of this process cannot be restarted")

    def kill(self, n: int) -> None:
        """Do nothing: a thread cannot be ended from outside."""

    def release(self, n: int) -> None:
        """Do nothing: it lives as long as this process."""

    def watch(self, n: int, on_death: Callable[[int], None]) -> None:
        """Do nothing: it lives as long as this process."""

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class Site:
    """Site of the servers.

    Args:
        where: see `ClusterBenchOptions`.
        hosts: hosts joined to Ray, if the servers have their own.

    Attributes:
        endpoints: addresses of the servers for users.
    """

    def __init__(self, where: str, hosts: "Hosts | None" = None) -> None:
        self._where, self._hosts = where, hosts
        self.endpoints = Endpoints() if hosts is None else Endpoints(host="0.0.0.0", toward=hosts.address(None))

    @property
    def has_links(self) -> bool:
        """Whether links between servers are shaped outside the servers."""
        return self._hosts is not None

    def link(self, cluster: Cluster) -> None:
        """Shape the links like the cluster's, if it has any; link latency is ignored."""
        if self._hosts is not None:
            servers = range(len(cluster.servers))
            for sender, receiver in ((n, m) for n in servers for m in servers if n != m):
                self._hosts.shape(sender, receiver, cluster.link(sender, receiver)[0])

    def start(self, build: Build, arguments: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Processes:
        """Workers, one per server."""
        if self._where == "threads":
            return Threads(build, arguments)
        from moetool.cluster.launch import ClusterAddress, Workers

        where = (
            ClusterAddress(count=len(names)) if self._hosts is None else ClusterAddress(address=self._hosts.ray_address)
        )
        threads = max(1, (os.cpu_count() or 1) // len(names))
        return Workers(where, build, arguments, names, threads=threads)


@contextmanager
def open_site(where: str, names: Sequence[str]) -> Iterator[Site]:
    """Open a site for servers of these names.

    Effects: for servers with their own hosts, creates the hosts, starts Ray on each, moves this thread to the head's
    host meanwhile, and removes everything.

    Raises:
        UsageError: this user or machine cannot create hosts.
    """
    if where != "namespaces":
        yield Site(where)
        return
    from moetool.bench.live_cluster.namespaces import Hosts

    with ExitStack() as undo:
        undo.enter_context(_ends_in_order())
        hosts = undo.enter_context(Hosts(len(names)))
        hosts.start_ray(names)
        undo.enter_context(_environment(hosts.environment))
        undo.enter_context(hosts.inside())
        yield Site(where, hosts)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables during the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _ends_in_order() -> Iterator[None]:
    """Turn the first SIGTERM into an exception: otherwise Ray's daemons on hosts would outlive the process."""

    def end(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one ends it at once
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
