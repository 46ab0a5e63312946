"""The head of a cluster of edge servers: starts them, tells each who holds what, and mends what breaks.

It carries no token and no tensor. While it is gone nobody starts servers anew or moves experts; and since Ray ends the
workers of a driver that ends, the cluster ends with it: users see closed connections, and the next start begins with
the plan.
"""

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from moetool.cluster.launch import WorkerDied
from moetool.cluster.protocol import Holders, Moved, WorkerInfo, WorkerStats
from moetool.cluster.worker import WorkerSettings
from moetool.errors import MoetoolError, UsageError, first_line

T = TypeVar("T")
Expert = tuple[int, int]
"""(MoE layer, expert)."""

_ENDED = "its process has ended"
_TELL_S = 10.0  # for a worker to take in who holds what
_BACKOFF_S = (1.0, 30.0)  # after the first start that failed, and at most


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What `moetool serve --cluster … --set cluster.NAME=VALUE` sets.

    Attributes:
        emulate_links: whether servers send to each other no faster than the plan's links allow.
        call_timeout_s, fetch_timeout_s, last_resort: as for `moetool.cluster.experts.CallOptions`.
        slots: of each server's pool, 0: one for each expert that the plan's cluster gives it room for. With fewer, the
            least recently used lie on its disk.
        ping_s: how often each server is asked whether it is well.
        hang_s: a server that does not answer for so long is killed and started anew.
        start_timeout_s: for a server to read the model and to serve.
        token_file: whose content is the cluster's token (empty: $MOETOOL_CLUSTER_TOKEN, or one made for this run).
    """

    emulate_links: bool = False
    call_timeout_s: float = 10.0
    fetch_timeout_s: float = 60.0
    last_resort: bool = True
    slots: int = 0
    ping_s: float = 1.0
    hang_s: float = 10.0
    start_timeout_s: float = 300.0
    token_file: str = ""

    def __post_init__(self) -> None:
        for name in ("call_timeout_s", "fetch_timeout_s", "ping_s", "hang_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"cluster.{name} is {getattr(self, name)}, expected more than 0")
        if self.slots < 0:
            raise UsageError(f"cluster.slots is {self.slots}, expected 0 or more")


class Processes(Protocol):
    """The workers' processes, one a server; `moetool.cluster.launch.Workers` has them in Ray."""

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any: ...
    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None: ...
    def kill(self, n: int) -> None: ...
    def watch_again(self, n: int, on_death: Callable[[int], None]) -> None: ...
    def close(self) -> None: ...
    def __len__(self) -> int: ...


class Scheduler(Protocol):
    """Decides about migrations.

    Attributes:
        tick_s: how often it is asked.
    """

    tick_s: float

    def on_tick(self, head: "Head") -> None:
        """Look at `head.stats()` and `head.held()`, and `adopt` and `drop`, one expert at a time.

        Called on a thread of its own, not before the last call has returned. An error is narrated, and the next tick
        comes.
        """
        ...


class Head:
    """What starts, watches and mends the servers of a cluster, and moves experts between them.

    It knows what every server holds, and that is what servers are told. A server that dies, or does not answer for
    `hang_s`, is taken out of the table; experts that nobody else holds are adopted by servers with room, from their
    disks; then it is started anew with what it held by the placement in force, and what was adopted for it is given up.

    Methods may be called from any thread.

    Args:
        processes: for each server the one that was started with its settings.
        settings: of each server.
        names: of the servers.
        narrate: is given a line about what happens.
        scheduler: decides about migrations; without one, experts stay where the plan has them.

    Effects: `start` starts threads; `close` ends them and the processes.
    """

    def __init__(
        self,
        processes: Processes,
        settings: Sequence[WorkerSettings],
        names: Sequence[str],
        num_experts_L: Sequence[int],
        *,
        options: ClusterOptions | None = None,
        narrate: Callable[[str], object] = lambda line: None,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.names = tuple(names)
        self._processes, self._settings = processes, tuple(settings)
        self._num_experts_L = tuple(num_experts_L)
        self._options = options or ClusterOptions()
        self._narrate, self._scheduler = narrate, scheduler
        self._lock = threading.RLock()  # what follows, never held while a worker is asked
        self._infos: list[WorkerInfo | None] = [None] * len(settings)
        self._held: list[set[Expert]] = [set() for _ in settings]
        self._home: list[set[Expert]] = [set(own.held) for own in settings]  # by the placement in force
        self._lent: set[tuple[int, Expert]] = set()  # adopted for a server that is not there
        self._ports = [own.port for own in settings]
        self._version = 0
        self._covering = threading.Lock()
        self._telling = [threading.Lock() for _ in settings]
        self._told = [-1] * len(settings)  # version of the table that each has heard
        self._died = [threading.Event() for _ in settings]
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    # -- the cluster's life --------------------------------------------------------------------------------------

    def start(self) -> list[WorkerInfo]:
        """Wait until every server serves, and tell each who holds what.

        Raises: as the first worker that could not be started.
        """
        timeout_s = self._options.start_timeout_s
        for info in _at_once(lambda n: self._call(n, "info", timeout_s=timeout_s), len(self.names)):
            self._arrived(info)
        self.publish()
        for n in range(len(self.names)):
            self._processes.watch_again(n, self._on_death)
            self._thread(f"server-{n}", self._supervise, n)
        if self._scheduler is not None:
            self._thread("scheduler", self._schedule)
        return [info for info in self.infos() if info is not None]

    def drain(self, timeout_s: float) -> None:
        """Let all servers finish what their users have asked for, and take nothing new."""
        self._closing.set()
        self._each("drain", timeout_s=timeout_s)

    def close(self) -> None:
        """End the servers and all threads."""
        self._closing.set()
        for event in self._died:
            event.set()
        self._processes.close()
        for thread in self._threads:
            thread.join(5.0)

    # -- for whoever decides about placement -----------------------------------------------------------------------

    def infos(self) -> list[WorkerInfo | None]:
        """What each server said of itself when it came; None: it is not there just now."""
        with self._lock:
            return list(self._infos)

    def held(self) -> list[frozenset[Expert]]:
        """What each server holds now, with what it has adopted for one that is not there."""
        with self._lock:
            return [frozenset(held) for held in self._held]

    def holders(self) -> Holders:
        """The table as it was last published."""
        with self._lock:
            return self._table()

    def stats(self) -> list[WorkerStats | None]:
        """What each server counted since it was last asked; None: it gave no answer."""
        return self._each("stats", timeout_s=self._options.hang_s)

    def adopt(self, server: int, layer: int, expert: int, source: int) -> Moved:
        """Have a server hold an expert from now on, and tell all of it.

        Raises: as `moetool.cluster.protocol.EdgeWorker.adopt`, and MoetoolError where the server is not there.
        """
        moved: Moved = self._ask(server, "adopt", layer, expert, source)
        with self._lock:
            self._home[server].add((layer, expert))
            self._lent.discard((server, (layer, expert)))
            if self._infos[server] is not None:
                self._held[server].add((layer, expert))
        self.publish()
        return moved

    def drop(self, server: int, layer: int, expert: int) -> None:
        """Have a server hold an expert no longer: all are told first.

        Raises:
            MoetoolError: nobody else holds it now, or the server is not there.
        """
        at = (layer, expert)
        with self._lock:
            self._require(server)
            if not any(at in held for n, held in enumerate(self._held) if n != server):
                raise MoetoolError(
                    f"server {self.names[server]} is the only one that holds expert {expert} of MoE layer {layer}; "
                    "have another adopt it first"
                )
            self._held[server].discard(at)
            self._home[server].discard(at)
            self._lent.discard((server, at))
        self.publish()
        self._ask(server, "drop", layer, expert)

    def publish(self) -> None:
        """Tell all servers who holds what; returns when those that are there have heard it."""
        with self._lock:
            self._version += 1
        _at_once(self._tell, len(self.names))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _tell(self, n: int) -> None:
        """Tell one server who holds what, if it is there and has not heard it."""
        with self._telling[n]:
            with self._lock:
                table = self._table()
                if self._infos[n] is None or self._told[n] == table.version:
                    return
            try:
                self._call(n, "set_holders", table, timeout_s=_TELL_S)
                self._told[n] = table.version
            except Exception:
                return  # whoever supervises it sees the same, or tells it again

    def _table(self) -> Holders:
        servers_LE: list[list[list[int]]] = [[[] for _ in range(num)] for num in self._num_experts_L]
        for n, held in enumerate(self._held):
            for layer, expert in held:
                servers_LE[layer][expert].append(n)
        return Holders(
            version=self._version,
            servers_LE=tuple(tuple(tuple(servers) for servers in experts) for experts in servers_LE),
            peers=tuple(None if info is None else info.peer for info in self._infos),
        )

    def _arrived(self, info: WorkerInfo) -> None:
        with self._lock:
            self._told[info.server] = -1
            self._ports[info.server] = int(info.url.rpartition(":")[2])
            self._infos[info.server] = info
            self._held[info.server] = set(info.held)

    def _call(self, n: int, method: str, *args: Any, timeout_s: float) -> Any:
        return self._processes.call(n, method, *args, timeout_s=timeout_s)

    def _ask(self, n: int, method: str, *args: Any) -> Any:
        self._require(n)
        return self._call(n, method, *args, timeout_s=self._options.fetch_timeout_s + _TELL_S)

    def _require(self, n: int) -> None:
        if self.infos()[n] is None:
            raise MoetoolError(f"server {self.names[n]} is not there just now")

    def _each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every server that is there, at once; None for those that do not answer."""

        def ask(n: int) -> Any:
            try:
                return None if infos[n] is None else self._call(n, method, *args, timeout_s=timeout_s)
            except MoetoolError:
                return None  # whoever supervises it sees the same

        infos = self.infos()
        return _at_once(ask, len(infos))

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _on_death(self, n: int) -> None:
        self._died[n].set()

    def _supervise(self, n: int) -> None:
        """The life of one server: ask whether it is well; when it is not, mend."""
        while not self._closing.is_set():
            if not self._died[n].wait(self._options.ping_s):
                try:
                    self._call(n, "info", timeout_s=self._options.hang_s)
                    self._tell(n)
                    continue
                except Exception as error:
                    reason = _ENDED if isinstance(error, WorkerDied) else first_line(error)
                    if not self._closing.is_set():
                        self._processes.kill(n)
            else:
                reason = _ENDED
            if self._closing.is_set():
                return
            self._narrate(f"server {self.names[n]} is gone: {reason}")
            self._lose(n)
            self._bring_back(n)

    def _lose(self, n: int) -> None:
        """Take a server out of the table, and give its experts another place."""
        with self._lock:
            self._infos[n] = None
            self._held[n].clear()
            self._lent = {(server, at) for server, at in self._lent if server != n}
        self.publish()
        self._cover()

    def _cover(self) -> None:
        """Have experts that nobody holds adopted, from disk, by servers with room, or that give up a replica for it."""
        with self._covering:
            missing = self._uncovered()
            count = sum(self._adopt_somewhere(at) for at in missing)
            if count:
                self.publish()
                self._narrate(f"{count} experts that only it held have another place until it is back")
            if count < len(missing):
                self._narrate(
                    f"{len(missing) - count} experts have no place until it is back: each server reads them from its "
                    "own disk when it needs them"
                )

    def _uncovered(self) -> list[Expert]:
        with self._lock:
            found = set().union(*self._held)
        every = [(layer, expert) for layer, num in enumerate(self._num_experts_L) for expert in range(num)]
        return [at for at in every if at not in found]

    def _adopt_somewhere(self, at: Expert) -> bool:
        tried: set[int] = set()
        while not self._closing.is_set():
            with self._lock:
                room = {
                    n: info.slots - len(self._held[n])
                    for n, info in enumerate(self._infos)
                    if info is not None and n not in tried
                }
            if not room:
                return False
            server = max(room, key=lambda n: (room[n], -n))
            tried.add(server)
            if room[server] <= 0 and not self._make_room(server):
                continue
            try:
                self._ask(server, "adopt", *at, -1)
            except MoetoolError:
                continue
            with self._lock:
                if self._infos[server] is not None:
                    self._held[server].add(at)
                    self._lent.add((server, at))
                    return True
        return False

    def _make_room(self, server: int) -> bool:
        """Have a server give up an expert that another has too; it gets it back by `_restore`."""
        with self._lock:
            holders = Counter(at for held in self._held for at in held)
            spare = max(
                (at for at in self._held[server] if holders[at] > 1 and (server, at) not in self._lent),
                key=lambda at: (holders[at], at),
                default=None,
            )
            if spare is None:
                return False
            self._held[server].discard(spare)
        self.publish()
        try:
            self._ask(server, "drop", *spare)
        except MoetoolError:
            return False
        return True

    def _bring_back(self, n: int) -> None:
        """Start a server anew until it serves, and give it its experts back."""
        wait, most = _BACKOFF_S
        port = self._ports[n]  # its users find it where it was, if nobody has taken that
        while not self._closing.is_set():
            with self._lock:
                settings = replace(self._settings[n], held=tuple(sorted(self._home[n])), port=port)
            try:
                self._died[n].clear()
                self._processes.restart(n, {"settings": settings})
                self._processes.watch_again(n, self._on_death)
                info = self._call(n, "info", timeout_s=self._options.start_timeout_s)
                break
            except Exception as error:
                self._narrate(f"server {self.names[n]} could not be started: {first_line(error)}; trying again")
            port = self._settings[n].port
            if self._closing.wait(wait):
                return
            wait = min(most, 2 * wait)
        else:
            return
        self._arrived(info)
        self.publish()
        self._narrate(f"server {self.names[n]} is back on {info.url}/v1 with {len(info.held)} experts")
        self._restore()

    def _restore(self) -> None:
        """After a server is back: drop what was adopted for it, and bring back what was given up for that."""
        with self._covering:
            with self._lock:
                lent = sorted(
                    (server, at)
                    for server, at in self._lent
                    if any(at in held for n, held in enumerate(self._held) if (n, at) not in self._lent)
                )
                for server, at in lent:
                    self._lent.discard((server, at))
                    self._held[server].discard(at)
            if lent:
                self.publish()
            for server, at in lent:
                with contextlib.suppress(MoetoolError):  # it may have gone, and the expert with it
                    self._ask(server, "drop", *at)
            with self._lock:
                missing = [
                    (n, at)
                    for n, info in enumerate(self._infos)
                    for at in sorted(self._home[n] - self._held[n])
                    if info is not None
                ]
            for n, at in missing:
                with self._lock:
                    source = next((other for other, held in enumerate(self._held) if at in held), -1)
                with contextlib.suppress(MoetoolError):
                    self._ask(n, "adopt", *at, source)
                    with self._lock:
                        if self._infos[n] is not None:
                            self._held[n].add(at)
            if missing:
                self.publish()

    def _schedule(self) -> None:
        assert self._scheduler is not None
        while not self._closing.wait(self._scheduler.tick_s):
            try:
                self._scheduler.on_tick(self)
            except Exception as error:  # a server died under its hands, say: the next tick sees what is there now
                self._narrate(f"the scheduler: {type(error).__name__}: {first_line(error)}")


def _at_once(work: Callable[[int], T], count: int) -> list[T]:
    """What `work` gives for each number below `count`, each on a thread of its own that nobody waits for at the end.

    Raises: what the first of them raised.
    """
    results: list[Future[T]] = [Future() for _ in range(count)]

    def run(n: int) -> None:
        try:
            results[n].set_result(work(n))
        except BaseException as error:
            results[n].set_exception(error)

    for n in range(count):
        threading.Thread(target=run, args=(n,), daemon=True).start()
    return [result.result() for result in results]


def read_token(options: ClusterOptions, environment: Mapping[str, str]) -> bytes:
    """The cluster's token: of the file that the options name, of $MOETOOL_CLUSTER_TOKEN, or a new one.

    Raises:
        UsageError: the file cannot be read, or the token is too short to keep anybody out.
    """
    where, text = "$MOETOOL_CLUSTER_TOKEN", environment.get("MOETOOL_CLUSTER_TOKEN", "")
    if options.token_file:
        where = options.token_file
        try:
            text = Path(options.token_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the cluster's token from {where}: {first_line(error)}") from None
    elif not text:
        return secrets.token_bytes(32)
    token = text.strip().encode()
    if len(token) < 16:
        raise UsageError(f"the cluster's token in {where} has {len(token)} characters, expected at least 16")
    return token
