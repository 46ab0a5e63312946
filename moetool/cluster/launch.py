"""The workers of a cluster: one process per server, started, called, watched and restarted by a head.

`local:N` runs them on this machine. On several machines Ray starts them and ends those that hang; they do not use Ray
otherwise and outlive it. The head calls them over its own connections (`moetool.cluster.worker_link`).
"""

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from moetool.base.errors import CapacityError, MoetoolError, UsageError
from moetool.cluster.certificates import Authority
from moetool.cluster.cluster_folder import ClusterFolder
from moetool.cluster.fork_server import ForkServer
from moetool.cluster.worker_link import WorkerDied, WorkerLink
from moetool.cluster.worker_process import ProcessOrder, ProcessRecord, end_process, lives, new_mark, start_process

_LOG = logging.getLogger(__name__)

_CLOSE_S = 25.0
"""Seconds for all workers to close before their processes are ended."""
_GONE_S = 5.0
"""Seconds for their processes to end after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """The parsed value of `--cluster`.

    Attributes:
        count: workers on this machine (`local:3`), or None for machines that joined with `ray start`.
        address: address of their Ray head, or None.
    """

    count: int | None = None
    address: str | None = None


def parse_where(text: str) -> ClusterAddress:
    """Parse `local:N` or the address of a Ray head. Raises: UsageError."""
    kind, _, rest = text.partition(":")
    if kind == "local":
        if not rest.isdecimal() or int(rest) < 1:
            raise UsageError(f"--cluster {text!r} lacks the number of servers; write e.g. local:3")
        return ClusterAddress(count=int(rest))
    if not kind or not rest.isdecimal() or not 0 < int(rest) < 2**16:
        raise UsageError(f"--cluster {text!r} is neither local:N nor the host:port that 'ray start --head' printed")
    return ClusterAddress(address=text)


def prepare(where: ClusterAddress, module: str, threads: int) -> ForkServer | None:
    """Start importing the workers' modules in the background; None if workers are not forked.

    Args:
        module, threads: as for `ForkServer`.
    """
    if where.count is None or not ForkServer.is_possible():
        return None
    return ForkServer(module, threads)


class Machines(Protocol):
    """Machines that run worker processes."""

    def start(self, n: int, order: ProcessOrder) -> ProcessRecord:
        """Start a worker process. Raises: CapacityError: no machine is free for it; MoetoolError: it does not start."""

    def adopt(self, n: int, record: ProcessRecord) -> None:
        """Register a process that an earlier head started."""

    def end(self, n: int, record: ProcessRecord) -> None:
        """End a process at once, if its machine can be reached."""

    def release(self, n: int) -> None:
        """Start no process of this worker on its machine until that has joined again."""

    def close(self) -> None:
        """Release resources; the processes have already been told to end."""


class ThisMachine:
    """Worker processes on this machine.

    Args:
        threads: compute threads of each (0: the libraries' default).
        folder: folder for logs (default: not kept).
        fork_server: forks them (default: each process imports its modules itself).

    Effects: owns the fork server.
    """

    def __init__(
        self, names: Sequence[str], threads: int, folder: ClusterFolder | None, fork_server: ForkServer | None = None
    ) -> None:
        self._names, self._threads, self._folder, self._fork_server = names, threads, folder, fork_server
        self._started: list[ProcessRecord] = []
        self._released: set[int] = set()
        self._children: list[subprocess.Popen[bytes]] = []

    def start(self, n: int, order: ProcessOrder) -> ProcessRecord:
        """Start a process; it may outlive this one. Raises: CapacityError: it was released."""
        if n in self._released:
            raise CapacityError("it was drained, and starts again with the next head")
        path = Path(os.devnull) if self._folder is None else self._folder.log(self._names[n])
        if self._fork_server is not None:
            record = self._fork_server.start(order, path)
        else:
            with path.open("ab") as log:
                record, child = start_process(order, threads=self._threads, log=log)
            self._children.append(child)
        self._started.append(record)
        return record

    def adopt(self, n: int, record: ProcessRecord) -> None:
        """Do nothing."""

    def end(self, n: int, record: ProcessRecord) -> None:
        """End a process at once."""
        end_process(record.pid, record.started)
        for child in self._children:
            child.poll()  # avoids zombies

    def release(self, n: int) -> None:
        """Start no process of this worker from now on."""
        self._released.add(n)

    def close(self) -> None:
        """Wait until the processes have ended; kill the others."""
        by = time.monotonic() + _GONE_S
        for record in self._started:
            while lives(record.pid, record.started) and time.monotonic() < by:
                time.sleep(0.01)
            end_process(record.pid, record.started)
        for child in self._children:
            try:
                child.wait(max(0.0, by - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if self._fork_server is not None:
            self._fork_server.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """Behavior of workers after their head has ended.

    Attributes:
        folder: folder in which the next head finds them; None: they cannot be taken over.
        living: workers of an earlier head to take over, by name.
        orphan_s: seconds without a head after which a worker ends.
        port: port of the first worker for its head; the next worker has the next port (0: any free ones).
    """

    folder: ClusterFolder | None = None
    living: Mapping[str, ProcessRecord] = field(default_factory=dict)
    orphan_s: float = 0.0
    port: int = 0


class Workers:
    """One worker process per server.

    A worker is the result of `build(**arguments)` in its own process. Its methods are called by name, from several
    threads at once; `close()` is called at the end.

    Args:
        where: this machine, or machines of a Ray head.
        build: a function or class of a module that the other process can import.
        arguments: arguments of `build` for each server, of types that `moetool.cluster.control_messages` supports.
        names: names of the servers. A machine started with `ray start --resources '{"moetool:NAME": 1}'` gets the
            server of that name. The others get theirs in the order of their addresses (`ray_hosts.choose`).
        threads: compute threads of each worker's libraries (0: the libraries' default).
        late: whether to leave out servers without a machine until `restart` finds one; with taken-over workers also
            those that do not start.
        detached: what workers do after this process ends without `close` (default: end at once).
        fork_server: forks processes of this machine (default: a new one, where forking is possible).

    Attributes:
        taken_over: servers whose worker already ran.

    Effects: joins Ray unless all workers are on this machine, and starts the processes. `close` ends them.

    Raises:
        UsageError: Ray is not installed, or no head is at the address.
        CapacityError: fewer machines than servers and not `late`, or no machine at all.
        MoetoolError: a process does not start.
    """

    def __init__(
        self,
        where: ClusterAddress,
        build: Callable[..., Any],
        arguments: Sequence[Mapping[str, Any]],
        names: Sequence[str],
        *,
        threads: int = 0,
        late: bool = False,
        detached: Detached | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._build, self._arguments = f"{build.__module__}:{build.__qualname__}", [dict(one) for one in arguments]
        self._names, self._detached = tuple(names), detached or Detached()
        folder, living = self._detached.folder, self._detached.living
        self._head = Authority.new().issue("head") if folder is None else folder.identity("head")
        self._lock = threading.Lock()
        self._closing = False
        self._links: list[WorkerLink | None] = [None] * len(names)
        self._toward = ""
        self._machines: Machines
        if where.address is None:
            fork_server = fork_server or prepare(where, build.__module__, threads)
            self._machines = ThisMachine(self._names, threads, folder, fork_server)
        else:
            from moetool.cluster.ray_launch import RayMachines

            ray = RayMachines(where.address, self._names, threads)
            self._machines, self._toward = ray, ray.toward
        self.taken_over = [n for n, name in enumerate(names) if name in living]
        try:
            for n in self.taken_over:
                self._machines.adopt(n, living[names[n]])
                self._links[n] = WorkerLink(names[n], living[names[n]], self._head, None)
            for n in range(len(names)):
                try:
                    if self._links[n] is None:
                        self._start(n)
                except (MoetoolError, OSError) as error:
                    if not self.taken_over and not (late and isinstance(error, CapacityError)):
                        raise
            if not any(self._links):
                raise CapacityError(f"no machine has joined the Ray head at {where.address} for a server")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._names)

    def is_started(self, n: int) -> bool:
        """Whether worker `n` has been started."""
        return self._links[n] is not None

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any:
        """Call a method of worker `n` and wait for its result.

        Raises:
            WorkerDied: it ended before it answered.
            MoetoolError: no answer in time, or the method's own error.
        """
        return self._link(n).call(method, args, kwargs, timeout_s)

    def pid(self, n: int) -> int:
        """Return the process id of a worker, on its own machine. Raises: WorkerDied."""
        return self._link(n).record.pid

    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None:
        """Replace a worker's process.

        Args:
            arguments: new arguments of `build` (default: the former ones).

        Raises:
            CapacityError: no machine is free for it.
            MoetoolError: it does not start.
        """
        if arguments is not None:
            self._arguments[n] = dict(arguments)
        self.kill(n)
        self._start(n)

    def kill(self, n: int) -> None:
        """Kill a worker if it lives; later calls of it fail."""
        if (link := self._links[n]) is not None:
            self._kill(n, link)

    def release(self, n: int) -> None:
        """End a drained worker, and start none in its place until its machine has joined again."""
        link = self._links[n]  # once, since a replacement may start meanwhile
        self._machines.release(n)
        if link is not None:
            with contextlib.suppress(MoetoolError):  # its process is ended below
                link.end(_CLOSE_S)
                link.wait(_GONE_S)
            self._kill(n, link)

    def watch(self, n: int, on_death: Callable[[int], None]) -> None:
        """Call `on_death(n)` in another thread if the current process of a worker ends unexpectedly."""
        self._link(n).when_ended(lambda: on_death(n))

    def close(self) -> None:
        """Close all live workers and end their processes."""
        with self._lock:
            self._closing = True
        links = {n: link for n, link in enumerate(self._links) if link is not None}
        closed: set[int] = set()

        def close(n: int, link: WorkerLink) -> None:
            with contextlib.suppress(MoetoolError):  # its process is ended below
                link.end(_CLOSE_S)
                closed.add(n)

        threads = [threading.Thread(target=close, args=one, daemon=True) for one in links.items()]
        for thread in threads:
            thread.start()
        by = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(0.0, by - time.monotonic()))
        for n, link in links.items():
            if n not in closed:
                self.kill(n)
            link.close("it was closed")
            if self._detached.folder is not None:
                self._detached.folder.forget(n)
        self._machines.close()

    def _kill(self, n: int, link: WorkerLink) -> None:
        _LOG.info("ending the process of %s", self._names[n])
        link.close("it was killed")  # a requested end is not reported
        self._machines.end(n, link.record)
        if self._detached.folder is not None and self._links[n] is link:
            self._detached.folder.forget(n)

    def _start(self, n: int) -> None:
        folder, port = self._detached.folder, self._detached.port
        mark = new_mark()
        order = ProcessOrder(
            mark=mark,
            authority=self._head.authority,
            toward=self._toward,
            port=port + n if port else 0,
            orphan_s=self._detached.orphan_s,
            record="" if folder is None or self._toward else str(folder.record_of(n)),
        )
        record = self._machines.start(n, order)
        with self._lock:
            if not self._closing:
                if folder is not None:
                    folder.keep(n, self._names[n], record)
                build = {"do": "build", "build": self._build, "arguments": self._arguments[n]}
                self._links[n] = WorkerLink(self._names[n], record, self._head, build)
                _LOG.info("started a process for %s at %s:%d", self._names[n], record.host, record.port)
                return
        self._machines.end(n, record)
        raise MoetoolError("the cluster is being closed")

    def _link(self, n: int) -> WorkerLink:
        if (link := self._links[n]) is None:
            raise WorkerDied(f"no machine has joined for server {self._names[n]}")
        return link
