"""Messages between the scheduler of a cluster and its workers. Servers are numbered as in the plan's cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLocations:
    """Expert placement, as sent to servers.

    Attributes:
        version: rises with every change; a worker ignores one that is older than its own.
        servers_LE: for each MoE layer and expert its servers, ascending; empty: unplaced.
        peers: each server's (host, port) for expert calls; None: it is down.
    """

    version: int
    servers_LE: tuple[tuple[tuple[int, ...], ...], ...]
    peers: tuple[tuple[str, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that is ready.

    Attributes:
        url: URL of its OpenAI endpoint, for the server's own users.
        peer: (host, port) for expert calls.
        held: (layer, expert) that it holds.
        slots: most experts that it can hold.
        version: version of its expert placement; -1: none received.
        leaving: whether it accepts no more requests, and ends once its head has had its experts placed elsewhere.
    """

    server: int
    url: str
    peer: tuple[str, int]
    held: tuple[tuple[int, int], ...]
    slots: int
    version: int = -1
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counters of a worker since the last report.

    Attributes:
        seconds: seconds since the last report.
        tokens_LE: (token, expert) pairs of its own users, by layer and expert.
        local_pairs: pairs computed here.
        remote_pairs: pairs computed by others.
        expert_s: seconds of computing experts, for own and other users.
        expert_pairs: pairs in `expert_s`.
        call_s: seconds of calls to each server, from sending to the answer.
        call_pairs: pairs in `call_s`.
        bytes_out: bytes sent to each server, calls and answers.
        migrated_bytes: bytes of experts received from other servers.
        request_s: seconds of each finished request.
        failed: requests that ended in an error.
        waiting: unfinished requests.
        memory_bytes: bytes of memory by use.
    """

    server: int
    seconds: float
    tokens_LE: np.ndarray
    local_pairs: int
    remote_pairs: int
    expert_s: float
    expert_pairs: int
    call_s: Mapping[int, float] = field(default_factory=dict)
    calls: Mapping[int, int] = field(default_factory=dict)
    call_pairs: Mapping[int, int] = field(default_factory=dict)
    bytes_out: Mapping[int, int] = field(default_factory=dict)
    migrated_bytes: int = 0
    request_s: tuple[float, ...] = ()
    failed: int = 0
    waiting: int = 0
    memory_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedExpert:
    """An expert copied to a server.

    Attributes:
        source: source server; -1: the worker's own disk.
    """

    source: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLocationsUpdate:
    """Changes of the expert placement, for a server that has an earlier one.

    Attributes:
        base: version of the server's table.
        version: version after the change.
        servers: servers of each changed (layer, expert), ascending.
        peers: see `ExpertLocations`.
    """

    base: int
    version: int
    servers: Mapping[tuple[int, int], tuple[int, ...]]
    peers: tuple[tuple[str, int] | None, ...]

    def applied_to(self, holders: ExpertLocations) -> ExpertLocations | None:
        """Return the placement after these changes; None if `holders` is not their base."""
        if holders.version != self.base:
            return None
        servers_LE = [list(servers_E) for servers_E in holders.servers_LE]
        for (layer, expert), servers in self.servers.items():
            servers_LE[layer][expert] = servers
        return ExpertLocations(version=self.version, servers_LE=tuple(map(tuple, servers_LE)), peers=self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRoundResult:
    """Results of one round of a migration.

    Attributes:
        arrived: copies by (server, (layer, expert)).
        failed: (server, (layer, expert), reason) of failed drops and copies.
    """

    arrived: Mapping[tuple[int, tuple[int, int]], ArrivedExpert]
    failed: Sequence[tuple[int, tuple[int, int], Exception]]
