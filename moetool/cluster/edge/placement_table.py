"""The head's table: live servers, and the actual and planned experts of each."""

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from moetool.base.errors import MoetoolError
from moetool.cluster.edge.protocol import ExpertLocations, ExpertLocationsUpdate, WorkerInfo
from moetool.placement.plan import Place


class PlacementTable:
    """Live servers and their experts. Methods may be called from any thread; none waits for a server.

    An expert is *at home* on the servers of the current placement, and *adopted* by one that holds it for a missing
    one. A server that is leaving counts as missing, but is told of placements and called for experts that no other
    holds.

    Args:
        home: each server's experts in the plan.
    """

    def __init__(self, home: Sequence[Collection[Place]], num_experts_L: Sequence[int], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._every = [(layer, expert) for layer, num in enumerate(num_experts_L) for expert in range(num)]
        self._num_experts_L = tuple(num_experts_L)
        self._lock = threading.RLock()
        self._infos: list[WorkerInfo | None] = [None] * len(home)
        self._held: list[set[Place]] = [set() for _ in home]
        self._home: list[set[Place]] = [set(own) for own in home]
        self._adopted: set[tuple[int, Place]] = set()
        self._leaving: dict[int, tuple[tuple[str, int], frozenset[Place]]] = {}  # address and experts
        self._changed: dict[Place, int] = {}  # version of the last change of its servers
        self._holders = ExpertLocations(
            version=0, servers_LE=tuple(((),) * num for num in num_experts_L), peers=(None,) * len(home)
        )

    def infos(self) -> list[WorkerInfo | None]:
        """Each server's own description; None while it is down."""
        with self._lock:
            return list(self._infos)

    def held(self) -> list[frozenset[Place]]:
        """Experts that each server holds."""
        with self._lock:
            return [frozenset(held) for held in self._held]

    def home(self, server: int) -> tuple[Place, ...]:
        """Experts that a server should hold, ascending."""
        with self._lock:
            return tuple(sorted(self._home[server]))

    def holders(self, *, newer: bool = False) -> ExpertLocations:
        """The table as sent to servers; with `newer`, under a version not yet sent."""
        with self._lock:
            if newer:
                servers_LE: list[list[list[int]]] = [[[] for _ in range(num)] for num in self._num_experts_L]
                for n, held in enumerate(self._held):
                    for layer, expert in held:
                        servers_LE[layer][expert].append(n)
                peers = [None if info is None else info.peer for info in self._infos]
                for n, (peer, own) in self._leaving.items():
                    peers[n] = peer
                    for layer, expert in own:
                        servers_LE[layer][expert] = servers_LE[layer][expert] or [n]
                before_LE, version = self._holders.servers_LE, self._holders.version + 1
                now_LE = tuple(tuple(tuple(servers) for servers in experts) for experts in servers_LE)
                for layer, expert in self._every:
                    if now_LE[layer][expert] != before_LE[layer][expert]:
                        self._changed[layer, expert] = version
                self._holders = ExpertLocations(version=version, servers_LE=now_LE, peers=tuple(peers))
            return self._holders

    def change_since(self, base: int) -> ExpertLocationsUpdate:
        """Changes of `holders` since an earlier version."""
        with self._lock:
            now = self._holders
            servers = {at: now.servers_LE[at[0]][at[1]] for at, version in self._changed.items() if version > base}
            return ExpertLocationsUpdate(base=base, version=now.version, servers=servers, peers=now.peers)

    def require(self, server: int) -> None:
        """Require that a server is up. Raises: MoetoolError."""
        if self.infos()[server] is None:
            raise MoetoolError(f"server {self.names[server]} is unavailable")

    def arrived(self, info: WorkerInfo, *, at_home: bool = False) -> None:
        """Add a running server.

        Args:
            at_home: whether it comes from an earlier head, so that its experts are the current placement.
        """
        with self._lock:
            self._infos[info.server] = info
            self._held[info.server] = set(info.held)
            if at_home:
                self._home[info.server] = set(info.held)
                if info.version > self._holders.version:  # later versions must be newer
                    self._holders = replace(self._holders, version=info.version)

    def corrected(self, server: int, held: Collection[Place]) -> bool:
        """Set a live server's experts; returns whether the table differed."""
        with self._lock:
            if self._infos[server] is None or self._held[server] == set(held):
                return False
            self._held[server] = set(held)
            self._adopted = {(n, at) for n, at in self._adopted if n != server or at in self._held[n]}
            return True

    def lost(self, server: int) -> None:
        """Remove a server and its experts."""
        with self._lock:
            self._infos[server] = None
            self._leaving.pop(server, None)
            self._held[server].clear()
            self._adopted = {(n, at) for n, at in self._adopted if n != server}

    def leave(self, server: int) -> None:
        """Remove a running server as `lost`, but have it called for experts that no other holds, until it is lost."""
        with self._lock:
            info, held = self._infos[server], frozenset(self._held[server])
            self.lost(server)
            if info is not None:
                self._leaving[server] = info.peer, held

    def moved_in(self, server: int, at: Place) -> None:
        """Add an expert to a server in a new placement."""
        with self._lock:
            self._home[server].add(at)
            self._adopted.discard((server, at))
            if self._infos[server] is not None:
                self._held[server].add(at)

    def move_out(self, server: int, at: Place) -> None:
        """Remove an expert from a server in a new placement.

        Raises:
            MoetoolError: no other server holds it, or the server is down.
        """
        with self._lock:
            self.require(server)
            if not any(at in held for n, held in enumerate(self._held) if n != server):
                raise MoetoolError(
                    f"server {self.names[server]} is the only one that holds expert {at[1]} of MoE layer {at[0]}; have "
                    "another adopt it first"
                )
            self._held[server].discard(at)
            self._home[server].discard(at)
            self._adopted.discard((server, at))

    def uncovered(self) -> list[Place]:
        """Experts that no server holds."""
        with self._lock:
            covered = set().union(*self._held)
        return [at for at in self._every if at not in covered]

    def roomiest(self, but: Collection[int]) -> tuple[int, int] | None:
        """The server with the most free slots, and their number; None if all live servers are in `but`."""
        with self._lock:
            room = {
                n: info.slots - len(self._held[n])
                for n, info in enumerate(self._infos)
                if info is not None and n not in but
            }
        server = max(room, key=lambda n: (room[n], -n), default=None)
        return None if server is None else (server, room[server])

    def add_adopted(self, server: int, at: Place) -> bool:
        """Record an expert adopted for another server; returns whether the adopter still lives."""
        with self._lock:
            if self._infos[server] is None:
                return False
            self._held[server].add(at)
            self._adopted.add((server, at))
            return True

    def drop_redundant(self, server: int) -> Place | None:
        """Remove from a server the expert with the most other holders; None if it has none."""
        with self._lock:
            holders = Counter(at for held in self._held for at in held)
            redundant = max(
                (at for at in self._held[server] if holders[at] > 1 and (server, at) not in self._adopted),
                key=lambda at: (holders[at], at),
                default=None,
            )
            if redundant is not None:
                self._held[server].discard(redundant)
            return redundant

    def drop_replaced(self) -> list[tuple[int, Place]]:
        """Remove adopted experts that another server holds again."""
        with self._lock:
            back = sorted(
                (server, at)
                for server, at in self._adopted
                if any(at in held for n, held in enumerate(self._held) if (n, at) not in self._adopted)
            )
            for server, at in back:
                self._adopted.discard((server, at))
                self._held[server].discard(at)
            return back

    def missing(self) -> list[tuple[int, Place, int]]:
        """Experts that live servers should hold but do not, each with a current holder (-1: none)."""
        with self._lock:
            return [
                (n, at, next((other for other, held in enumerate(self._held) if at in held), -1))
                for n, info in enumerate(self._infos)
                if info is not None
                for at in sorted(self._home[n] - self._held[n])
            ]
