"""Which servers are there and who holds what: the one place where that changes, and from where all are told."""

import threading
from collections.abc import Callable, Mapping, Sequence

from moetool.cluster.protocol import EdgeWorker, Holders, WorkerInfo
from moetool.errors import MoetoolError
from moetool.types import ModelSpec

Place = tuple[int, int]
"""MoE layer and expert."""


class Membership:
    """The workers of a cluster that serve, and what each holds.

    May be used from several threads. Every change is published to all workers before the method returns; a worker that
    cannot be told is passed over, since it will be told of the next change, or be found dead by whoever watches it.

    Args:
        names: of the servers, in the plan's order.
        on_untold: called with a server and the error, if it could not be told.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: Sequence[str],
        on_untold: Callable[[int, MoetoolError], None] = lambda server, error: None,
    ) -> None:
        self.spec = spec
        self.names = tuple(names)
        self._on_untold = on_untold
        self._workers: dict[int, EdgeWorker] = {}
        self._infos: dict[int, WorkerInfo] = {}
        self._held: dict[int, set[Place]] = {}
        self._version = 0
        self._lock = threading.RLock()

    def workers(self) -> Mapping[int, EdgeWorker]:
        """Those that serve now, by server."""
        with self._lock:
            return dict(sorted(self._workers.items()))

    def infos(self) -> Mapping[int, WorkerInfo]:
        """What they said of themselves when they joined."""
        with self._lock:
            return dict(sorted(self._infos.items()))

    def held(self) -> dict[int, set[Place]]:
        """What they hold."""
        with self._lock:
            return {server: set(places) for server, places in sorted(self._held.items())}

    def uncovered(self) -> list[Place]:
        """Experts that nobody holds just now."""
        with self._lock:
            known = set().union(*self._held.values())
        return [
            (layer, expert)
            for layer, count in enumerate(self.spec.num_experts_L)
            for expert in range(count)
            if (layer, expert) not in known
        ]

    def join(self, server: int, worker: EdgeWorker) -> WorkerInfo:
        """A worker serves: ask what it holds, and tell all."""
        info = worker.info()
        with self._lock:
            self._workers[server], self._infos[server], self._held[server] = worker, info, set(info.held)
            self._publish()
        return info

    def refresh(self, server: int) -> None:
        """Ask a worker that has joined what it holds, and tell all if that is something else.

        Raises: as `EdgeWorker.info`.
        """
        worker = self.workers().get(server)
        if worker is None:
            return
        info = worker.info()
        with self._lock:
            if self._workers.get(server) is worker:
                self._infos[server] = info
                if self._held[server] != set(info.held):
                    self._held[server] = set(info.held)
                    self._publish()

    def leave(self, server: int) -> None:
        """A worker is gone, and what it held with it."""
        with self._lock:
            for known in (self._workers, self._infos, self._held):
                known.pop(server, None)
            self._publish()

    def hold(self, server: int, place: Place) -> None:
        """A worker holds an expert from now on."""
        with self._lock:
            if server in self._held and place not in self._held[server]:
                self._held[server].add(place)
                self._publish()

    def release(self, server: int, place: Place) -> bool:
        """Send nobody there for this expert any more; refused (False) if nobody else has it."""
        with self._lock:
            if place not in self._held.get(server, ()):
                return False
            if not any(place in held for other, held in self._held.items() if other != server):
                return False
            self._held[server].discard(place)
            self._publish()
            return True

    def holders(self) -> Holders:
        """As last published."""
        with self._lock:
            holding: dict[Place, list[int]] = {}
            for server, places in sorted(self._held.items()):
                for place in places:
                    holding.setdefault(place, []).append(server)
            return Holders(
                version=self._version,
                servers_LE=tuple(
                    tuple(tuple(holding.get((layer, expert), ())) for expert in range(count))
                    for layer, count in enumerate(self.spec.num_experts_L)
                ),
                peers=tuple(
                    self._infos[server].peer if server in self._infos else None for server in range(len(self.names))
                ),
            )

    def _publish(self) -> None:
        self._version += 1
        holders = self.holders()
        for server, worker in self._workers.items():
            try:
                worker.set_holders(holders)
            except MoetoolError as error:
                self._on_untold(server, error)
