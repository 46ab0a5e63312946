"""Worker processes on machines that have joined a Ray head."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from moetool.base.errors import CapacityError, MoetoolError, UsageError, first_line
from moetool.cluster.ray_check import ask_head, require_fitting, use_mode
from moetool.cluster.ray_hosts import choose, head_of
from moetool.cluster.worker_process import ProcessOrder, ProcessRecord, end_process, start_process

_LOG = logging.getLogger(__name__)

_START_S = 90.0
_END_S = 10.0


class RayMachines:
    """Worker processes on the machines of a Ray head, as `moetool.cluster.launch.Machines`.

    A Ray task starts each process; the process then outlives the head and Ray.

    Args:
        address: address of the Ray head.
        threads: compute threads of each (0: the libraries' default).

    Attributes:
        toward: address of the Ray head's machine, as all machines know it.

    Effects: joins Ray unless this process has joined; `close` then leaves it.

    Raises:
        UsageError: Ray is not installed, or no head is at the address.
    """

    def __init__(self, address: str, names: Sequence[str], threads: int) -> None:
        self._names, self._threads = names, threads
        self._ray = require_ray()
        self._own = not self._ray.is_initialized()
        if self._own:
            _connect(self._ray, address)
        self._lock = threading.Lock()
        self._nodes: list[str | None] = [None] * len(names)
        # Address of the machine, and the nodes of Ray at the release: each `ray start` makes a new one.
        self._released: dict[int, tuple[str | None, frozenset[str]]] = {}
        self.toward = head_of(self._ray.nodes())

    def start(self, n: int, order: ProcessOrder) -> ProcessRecord:
        """Start a process on its machine. Raises: CapacityError, MoetoolError."""
        with self._lock:
            nodes = self._ray.nodes()
            if n in self._released:
                self._nodes[n] = self._joined_again(n, nodes)
                del self._released[n]
            taken = {*self._nodes[:n], *self._nodes[n + 1 :]}
            self._nodes[n] = node = choose(self._names[n], self._nodes[n], taken, nodes)
        record: ProcessRecord = self._run(node, _START_S, _start_there, order, self._threads)
        return replace(record, machine=node)

    def adopt(self, n: int, record: ProcessRecord) -> None:
        """Register its machine, which may have rejoined Ray since."""
        self._nodes[n] = self._node_of(record)

    def end(self, n: int, record: ProcessRecord) -> None:
        """End a process at once; if its machine cannot be reached, it ends itself for lack of a head."""
        try:
            if (node := self._node_of(record)) is not None:
                self._run(node, _END_S, end_process, record.pid, record.started)
        except Exception as error:  # Ray's own errors when its head is gone
            _LOG.info("cannot end the process of %s: %s", self._names[n], first_line(error))

    def release(self, n: int) -> None:
        """Start no process of this worker on its machine until that has joined again."""
        with self._lock:
            if n in self._released:
                return
            addresses: dict[str, str] = {}
            with contextlib.suppress(Exception):  # Ray's own errors when its head is gone: all machines join again
                addresses = {str(node["NodeID"]): node["NodeManagerAddress"] for node in self._ray.nodes()}
            self._released[n] = addresses.get(str(self._nodes[n])), frozenset(addresses)

    def close(self) -> None:
        """Leave Ray."""
        if self._own:
            self._ray.shutdown()

    def _joined_again(self, n: int, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Return the new node of a released worker's machine. Raises: CapacityError: it has not joined again."""
        address, before = self._released[n]
        for node in nodes:
            is_new = node["Alive"] and str(node["NodeID"]) not in before
            if is_new and address in (None, node["NodeManagerAddress"]):
                return str(node["NodeID"])
        raise CapacityError(f"{self._names[n]} was drained; it returns when its machine joins again with: ray start")

    def _node_of(self, record: ProcessRecord) -> str | None:
        there = {str(node["NodeID"]): node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        again = next((number for number, address in there.items() if address == record.host), None)
        return record.machine if record.machine in there else again

    def _run(self, node: str, timeout_s: float, work: Any, *args: Any) -> Any:
        """Run a function on a machine. Raises: MoetoolError: no answer from it; or the function's own error."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        where = NodeAffinitySchedulingStrategy(node, soft=False)
        task = self._ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=where)
        try:
            return self._ray.get(task.remote(*args), timeout=timeout_s)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, MoetoolError) else MoetoolError(first_line(error)) from None
        except self._ray.exceptions.RayError as error:
            why = first_line(error).partition(" lease_id=")[0]  # Ray's number for it follows
            raise MoetoolError(f"a machine of the cluster does not answer ({why})") from None


def _start_there(order: ProcessOrder, threads: int) -> ProcessRecord:
    record, _ = start_process(order, threads=threads, detach=True)
    return record


def head_address(address: str | None) -> str:
    """Return the address of the Ray head's machine, as joined machines know it; empty without a Ray head.

    Effects: joins Ray and leaves it again.

    Raises:
        UsageError: no head is at the address, or other machines cannot reach its address.
    """
    if address is None:
        return ""
    machines = RayMachines(address, (), 0)
    machines.close()
    return machines.toward


def _connect(ray: Any, address: str) -> None:
    """Join Ray. Raises: UsageError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    answer = ask_head(address)
    require_fitting(address, answer)
    if answer.asks_token:
        use_mode("token")
    try:
        with _sigterm_kept():
            ray.init(address=address, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"cannot join the Ray head at {address} ({first_line(error)})") from None


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep this process's SIGTERM handler: Ray's handler aborts without cleanup."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: the handler was not set from Python
            signal.signal(signal.SIGTERM, before)


def require_ray() -> Any:
    """Import `ray`. Raises: UsageError: it is not installed."""
    # Ray would print pages of logs about ended processes to stdout.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed|The node with node|Raylet is term")
    try:
        import ray
    except ImportError:
        raise UsageError(
            "clusters of several hosts need Ray; install it with: pip install 'moetool[cluster]'"
        ) from None
    return ray
