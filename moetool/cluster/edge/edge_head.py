"""The head of a cluster of edge servers: starts them, tells each where experts are, and repairs failures.

It carries no tokens and no tensors. Without it the servers go on unchanged: none is restarted and no expert moves. The
next head takes them over with their placement.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from moetool.base.errors import CapacityError, MoetoolError, first_line
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.placement_table import PlacementTable
from moetool.cluster.edge.protocol import ArrivedExpert, ExpertLocations, MigrationRoundResult, WorkerInfo, WorkerStats
from moetool.cluster.edge.worker import WorkerSettings
from moetool.cluster.worker_link import WorkerDied
from moetool.placement.plan import Place

_LOG = logging.getLogger(__name__)

T = TypeVar("T")
_ENDED = "its process has ended"
_TELL_S = 10.0  # for a worker to receive the table of experts
RESTART_S = (1.0, 10.0)  # wait after the first failed start, doubled after each further one, and its limit


class Processes(Protocol):
    """The workers' processes, one per server, like `moetool.cluster.launch.Workers`."""

    def call(self, n: int, method: str, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> Any: ...
    def restart(self, n: int, arguments: Mapping[str, Any] | None = None) -> None: ...
    def kill(self, n: int) -> None: ...
    def release(self, n: int) -> None: ...
    def is_started(self, n: int) -> bool: ...
    def watch(self, n: int, on_death: Callable[[int], None]) -> None: ...
    def close(self) -> None: ...
    def __len__(self) -> int: ...


class MigrationScheduler(Protocol):
    """Decides on migrations.

    Attributes:
        tick_s: seconds between calls.
    """

    tick_s: float

    def on_tick(self, head: "EdgeHead") -> None:
        """Look at `head.stats()` and `head.held()`, and `move` experts.

        Called on a separate thread, after the last call has returned. Errors are printed, and ticks continue.
        """
        ...


class EdgeHead:
    """Starts, watches and restarts the servers of a cluster, and moves experts between them.

    It knows the experts of every server, and tells the servers. A server that dies, or does not answer for `hang_s`, is
    removed from the table. Servers with free capacity adopt experts that no other server holds, from their disks. Then
    the server is restarted with its experts of the current placement, and adopted ones are dropped. A server that is
    leaving (SIGTERM) is replaced in the same way before it ends, and stays away until its machine joins again.

    Methods may be called from any thread.

    Args:
        processes: each server's process, started with its settings.
        narrate: called with a line for the user about each event.
        scheduler: decides on migrations; None: experts stay as planned.

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
        scheduler: MigrationScheduler | None = None,
    ) -> None:
        self.names = tuple(names)
        self._processes, self._settings = processes, tuple(settings)
        self._options = options or ClusterOptions()
        self._narrate, self._scheduler = narrate, scheduler
        self._table = PlacementTable([own.held for own in settings], num_experts_L, names)
        self._ports = [own.port for own in settings]
        self._was_there = [False] * len(settings)
        self._mending = threading.Lock()
        self._counting = threading.Lock()
        self._moves_begun = self._moves_under_way = 0
        self._telling = [threading.Lock() for _ in settings]
        self._told = [-1] * len(settings)  # version of the table that each has received
        self._died = [threading.Event() for _ in settings]
        self._closing = threading.Event()
        self.threads: list[threading.Thread] = []

    # -- the cluster's life --------------------------------------------------------------------------------------

    def start(self, *, taken_over: bool = False) -> list[WorkerInfo]:
        """Wait until every server with a machine serves, and send the table of experts to each.

        The others start when their machines join; until then their experts are elsewhere.

        Args:
            taken_over: some servers come from an earlier head: they go on serving if others fail.

        Raises: the error of the first worker that failed to start, unless some were taken over.
        """

        def ask(n: int) -> WorkerInfo | None:
            if not self._processes.is_started(n):
                return None
            try:
                info: WorkerInfo = self._call(n, "info", timeout_s=self._options.start_timeout_s)
            except MoetoolError as error:
                if not taken_over:
                    raise
                self._narrate(f"server {self.names[n]} does not serve: {first_line(error)}; restarting it")
                return None
            return info

        infos = _at_once(ask, len(self.names))
        for info in filter(None, infos):
            self._arrived(info, at_home=True)
        self.publish()
        for info in filter(None, infos):
            self._processes.watch(info.server, self._on_death)
        self._cover()
        for n, info_or_none in enumerate(infos):
            self._thread(f"server-{n}", self._supervise, n, info_or_none is not None)
        if self._scheduler is not None:
            self._thread("scheduler", self._schedule)
        return [info for info in self.infos() if info is not None]

    def drain(self, timeout_s: float) -> None:
        """Let all servers finish their requests and accept no new ones."""
        self._closing.set()
        self._each("drain", timeout_s=timeout_s)

    def close(self) -> None:
        """End the servers and all threads."""
        self._closing.set()
        for event in self._died:
            event.set()
        self._processes.close()
        for thread in self.threads:
            thread.join(5.0)

    # -- for schedulers -----------------------------------------------------------------------

    def infos(self) -> list[WorkerInfo | None]:
        """Each server's own description; None while it is down."""
        return self._table.infos()

    def held(self) -> list[frozenset[Place]]:
        """Experts of each server, including those adopted for a lost server."""
        return self._table.held()

    def holders(self) -> ExpertLocations:
        """Expert placement, as sent to servers."""
        return self._table.holders()

    def stats(self) -> list[WorkerStats | None]:
        """Counters of each server since the last report; None: no answer."""
        return self._each("stats", timeout_s=self._options.hang_s)

    def adopt(self, server: int, layer: int, expert: int, source: int) -> ArrivedExpert:
        """Have a server hold an expert from now on, and tell all servers.

        Raises: errors of the server's `PlacedExperts.adopt`; MoetoolError: the server is down.
        """
        with self._moving():
            moved: ArrivedExpert = self._ask(server, "adopt", layer, expert, source)
            _LOG.info(
                "server %s adopted expert %d of MoE layer %d in %.3g s",
                *(self.names[server], expert, layer, moved.seconds),
            )
            self._table.moved_in(server, (layer, expert))
            self.publish()
        return moved

    def drop(self, server: int, layer: int, expert: int) -> None:
        """Have a server drop an expert; all servers are told first.

        Raises:
            MoetoolError: no other server holds it now, or the server is down.
        """
        with self._moving():
            self._table.move_out(server, (layer, expert))
            self.publish()
            self._ask(server, "drop", layer, expert)
        _LOG.info("server %s dropped expert %d of MoE layer %d", self.names[server], expert, layer)

    def move(
        self, drops: Sequence[tuple[int, Place]], copies: Sequence[tuple[int, Place, int]]
    ) -> MigrationRoundResult:
        """Run one round of moves: first all drops in parallel, then all copies.

        All servers receive the new placement before the drops and after the copies.

        Args:
            drops: (server, place); a drop is refused where no other server has the expert.
            copies: (server, place, source); -1: the server's own disk.
        """
        with self._moving():
            return self._move(drops, copies)

    def time_copies(self, copies: Sequence[tuple[int, Place, int]]) -> list[tuple[int, ArrivedExpert]]:
        """Time transfers of experts that change nothing.

        Servers work in parallel, each on its own copies in order.

        Args:
            copies: as for `move`.

        Returns:
            (server, transfer) of those that succeeded.
        """
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for server, at, source in copies:
            wanted.setdefault(server, []).append((*at, source))
        answers = self._ask_each("time_copies", wanted).items()
        return [(server, copy) for (server, _), done in answers if not isinstance(done, Exception) for copy in done]

    def publish(self) -> None:
        """Send the table of experts to all servers; returns when all running ones have received it."""
        self._table.holders(newer=True)
        _at_once(self._tell, len(self.names))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _move(
        self, drops: Sequence[tuple[int, Place]], copies: Sequence[tuple[int, Place, int]]
    ) -> MigrationRoundResult:
        failed: list[tuple[int, Place, Exception]] = []
        dropped: dict[int, list[Place]] = {}
        for server, at in drops:
            try:
                self._table.move_out(server, at)
                dropped.setdefault(server, []).append(at)
            except MoetoolError as error:
                failed.append((server, at, error))
        if dropped:
            self.publish()
            for (server, places), answer in self._ask_each("drop_all", dropped).items():
                failed += [(server, at, answer) for at in places if isinstance(answer, Exception)]
        wanted: dict[int, list[tuple[int, int, int]]] = {}
        for server, at, source in copies:
            wanted.setdefault(server, []).append((*at, source))
        arrived: dict[tuple[int, Place], ArrivedExpert] = {}
        for (server, moves), answer in self._ask_each("adopt_all", wanted).items():
            answers = [answer] * len(moves) if isinstance(answer, Exception) else answer
            for (layer, expert, _), moved in zip(moves, answers, strict=True):
                at = layer, expert
                if isinstance(moved, ArrivedExpert):
                    self._table.moved_in(server, at)
                    arrived[server, at] = moved
                else:
                    failed.append((server, at, moved if isinstance(moved, Exception) else MoetoolError(moved)))
        if arrived or not drops:
            self.publish()
        _LOG.info("a round of moves: %d dropped, %d arrived, %d failed", len(drops), len(arrived), len(failed))
        return MigrationRoundResult(arrived=arrived, failed=failed)

    @contextlib.contextmanager
    def _moving(self) -> Iterator[None]:
        """Mark a period in which experts move, so that the table and the servers' experts may differ."""
        with self._counting:
            self._moves_begun += 1
            self._moves_under_way += 1
        try:
            yield
        finally:
            with self._counting:
                self._moves_under_way -= 1

    def _check(self, n: int) -> bool:
        """Check a server's health, and correct the table if an earlier answer about a move was lost.

        Returns:
            Whether it is leaving.
        """
        with self._counting:
            begun, were_under_way = self._moves_begun, self._moves_under_way
        info = self._call(n, "info", timeout_s=self._options.hang_s)
        with self._counting:
            is_settled = not (were_under_way or self._moves_under_way) and self._moves_begun == begun
            corrected = is_settled and self._table.corrected(n, info.held)
        if corrected:
            _LOG.info("server %s holds %d experts, not those of the table", self.names[n], len(info.held))
            self.publish()
            self._cover()
        return bool(info.leaving)

    def _tell(self, n: int) -> None:
        """Send the expert placement to one running server that lacks it."""
        with self._telling[n]:
            table, told = self._table.holders(), self._told[n]
            if table.peers[n] is None or told == table.version:
                return
            try:
                if told >= 0:
                    change = self._table.change_since(told)
                    if self._call(n, "change_holders", change, timeout_s=_TELL_S):
                        self._told[n] = change.version
                        return
                self._call(n, "set_holders", table, timeout_s=_TELL_S)
                self._told[n] = table.version
            except Exception as error:  # its supervisor restarts it or sends the table again
                _LOG.info("server %s was not told of placement %d: %s", self.names[n], table.version, error)

    def _arrived(self, info: WorkerInfo, *, at_home: bool = False) -> None:
        n = info.server
        self._told[n], self._was_there[n] = -1, True
        self._ports[n] = int(info.url.rpartition(":")[2])
        self._table.arrived(info, at_home=at_home)

    def _call(self, n: int, method: str, *args: Any, timeout_s: float) -> Any:
        return self._processes.call(n, method, *args, timeout_s=timeout_s)

    def _ask(self, n: int, method: str, *args: Any) -> Any:
        self._table.require(n)
        return self._call(n, method, *args, timeout_s=self._options.fetch_timeout_s + _TELL_S)

    def _ask_each(self, method: str, asked: Mapping[int, list[Any]]) -> dict[tuple[int, tuple[Any, ...]], Any]:
        """Call a method of several servers in parallel; returns answers or errors by server and argument."""

        def ask(i: int) -> Any:
            try:
                return self._ask(servers[i], method, asked[servers[i]])
            except MoetoolError as error:
                return error

        servers = list(asked)
        return {
            (server, tuple(asked[server])): answer
            for server, answer in zip(servers, _at_once(ask, len(servers)), strict=True)
        }

    def _each(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of every running server in parallel; None for those that do not answer."""

        def ask(n: int) -> Any:
            try:
                return None if peers[n] is None else self._call(n, method, *args, timeout_s=timeout_s)
            except MoetoolError:
                return None  # its supervisor restarts it

        peers = self._table.holders().peers
        return _at_once(ask, len(peers))

    def _thread(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def _on_death(self, n: int) -> None:
        self._died[n].set()

    def _supervise(self, n: int, is_there: bool) -> None:
        """Supervise one server: check its health, and repair it after a failure."""
        if not is_there:
            self._restart(n)
        while not self._closing.is_set():
            if not self._died[n].wait(self._options.ping_s):
                try:
                    if self._check(n):
                        self._release(n)
                    else:
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
            self._restart(n)

    def _release(self, n: int) -> None:
        """Place a leaving server's experts on other servers, and end it once it has finished its requests."""
        if self._closing.is_set():
            return
        most_s = self._settings[n].limits.drain_timeout_s
        self._narrate(
            f"server {self.names[n]} is leaving: it finishes its requests within {most_s:g} s and accepts no new ones"
        )
        self._table.leave(n)
        self.publish()
        self._cover()
        with contextlib.suppress(MoetoolError):  # it ends in any case
            self._call(n, "drain", timeout_s=most_s + 15.0)
        self._table.lost(n)
        self.publish()  # first, so that nobody calls it when it ends
        self._processes.release(n)
        self._narrate(
            f"server {self.names[n]} has left; it returns when its machine joins again, or with the next head"
        )
        self._restart(n, waits_for_machine=True)

    def _lose(self, n: int) -> None:
        """Remove a server from the table, and place its experts on other servers."""
        self._table.lost(n)
        self.publish()
        self._cover()

    def _cover(self) -> None:
        """Have servers with capacity, or with a replica to drop, adopt unplaced experts from disk."""
        with self._mending, self._moving():
            missing = self._table.uncovered()
            count = sum(self._adopt_somewhere(at) for at in missing)
            if count:
                self.publish()
                self._narrate(f"{count} experts without a server are placed on other servers until theirs returns")
            if count < len(missing) and not self._closing.is_set():
                self._narrate(
                    f"{len(missing) - count} experts are unplaced until their server returns: each server reads them "
                    "from its own disk on demand"
                )

    def _adopt_somewhere(self, at: Place) -> bool:
        tried: set[int] = set()
        while not self._closing.is_set() and (roomiest := self._table.roomiest(but=tried)) is not None:
            server, room = roomiest
            tried.add(server)
            if room <= 0 and not self._make_room(server):
                continue
            try:
                self._ask(server, "adopt", *at, -1)
            except MoetoolError as error:
                _LOG.info("server %s cannot adopt an unplaced expert: %s", self.names[server], error)
                continue
            if self._table.add_adopted(server, at):
                return True
        return False

    def _make_room(self, server: int) -> bool:
        """Have a server drop an expert that another also holds; `_restore` brings it back."""
        if (redundant := self._table.drop_redundant(server)) is None:
            return False
        self.publish()
        try:
            self._ask(server, "drop", *redundant)
        except MoetoolError:
            return False
        return True

    def _restart(self, n: int, *, waits_for_machine: bool = False) -> None:
        """Restart a server until it serves, and give it its experts back.

        Args:
            waits_for_machine: whether users know that it waits for one.
        """
        wait, most = RESTART_S
        port = self._ports[n]  # the same port for its users, if it is still free
        while not self._closing.is_set():
            settings = replace(self._settings[n], held=self._table.home(n), port=port)
            try:
                self._died[n].clear()
                self._processes.restart(n, {"settings": settings})
                self._processes.watch(n, self._on_death)
                info = self._call(n, "info", timeout_s=self._options.start_timeout_s)
                break
            except CapacityError as error:  # a machine may still join
                _LOG.info("server %s is not started: %s", self.names[n], first_line(error))
                if not waits_for_machine:
                    self._narrate(f"server {self.names[n]} waits for a machine: {first_line(error)}")
                waits_for_machine = True
            except Exception as error:
                if self._closing.is_set():
                    return
                self._narrate(f"server {self.names[n]} failed to start: {first_line(error)}; retrying")
                port = self._settings[n].port
            if self._closing.wait(wait):
                return
            wait = min(most, 2 * wait)
        else:
            return
        _LOG.info("server %s is restarted as %s", self.names[n], info.peer)
        came = "is back on" if self._was_there[n] else "has joined and serves on"
        self._narrate(f"server {self.names[n]} {came} {info.url}/v1 with {len(info.held)} experts")
        self._arrived(info)
        self.publish()
        self._restore()

    def _restore(self) -> None:
        """After a server is back, drop experts adopted for it, and restore those dropped for them."""
        with self._mending, self._moving():
            if back := self._table.drop_replaced():
                self.publish()
            for server, at in back:
                with contextlib.suppress(MoetoolError):  # it may have ended and lost the expert
                    self._ask(server, "drop", *at)
            missing = self._table.missing()
            for server, at, source in missing:
                with contextlib.suppress(MoetoolError):
                    self._ask(server, "adopt", *at, source)
                    self._table.moved_in(server, at)
            if missing:
                self.publish()

    def _schedule(self) -> None:
        assert self._scheduler is not None
        while not self._closing.wait(self._scheduler.tick_s):
            try:
                self._scheduler.on_tick(self)
            except Exception as error:  # e.g. a server died: the next tick sees the new state
                self._narrate(f"the scheduler: {type(error).__name__}: {first_line(error)}")


def _at_once(work: Callable[[int], T], count: int) -> list[T]:
    """Return `work(n)` for each n below `count`, each from its own thread. Raises: the first one's exception."""
    results: list[Future[T]] = [Future() for _ in range(count)]

    def run(n: int) -> None:
        try:
            results[n].set_result(work(n))
        except BaseException as error:
            results[n].set_exception(error)

    for n in range(count):
        threading.Thread(target=run, args=(n,), daemon=True).start()
    return [result.result() for result in results]
