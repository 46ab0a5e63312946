"""Messages between the scheduler of a cluster and its workers. Servers are numbered as in the plan's cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Expert placement, as servers are told.

    Attributes:
        version: rises with every change; a worker ignores one that is older than its own.
        servers_LE: for each MoE layer and expert the servers that have it, ascending. Nobody: not covered just now.
        peers: for each server (host, port) where its experts are called; None: it is not there.
    """

    version: int
    servers_LE: tuple[tuple[tuple[int, ...], ...], ...]
    peers: tuple[tuple[str, int] | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker that is ready.

    Attributes:
        url: of its OpenAI endpoint, for the server's own users.
        peer: (host, port) where others call its experts.
        held: (layer, expert) that it holds.
        slots: how many experts it has room for.
        version: of the expert placement that it follows; -1: it has heard of none.
    """

    server: int
    url: str
    peer: tuple[str, int]
    held: tuple[tuple[int, int], ...]
    slots: int
    version: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """Counters of a worker since the last report.

    Attributes:
        seconds: since then.
        tokens_LE: (token, expert) pairs that its own users' tokens needed, by layer and expert.
        local_pairs: those of them that were computed here.
        remote_pairs: those that others computed.
        expert_s: seconds of computing experts, its own and others', and
        expert_pairs: for so many pairs.
        call_s: by server the seconds that calls to it took, from sending to the answer, and
        calls: how many calls, and
        call_pairs: for so many pairs.
        bytes_out: by server the bytes sent to it, calls and answers, and
        migrated_bytes: of experts.
        request_s: of each request that has ended, the seconds that it took.
        failed: requests that ended in an error.
        waiting: requests that run or wait now.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivedExpert:
    """An expert that has come to a server.

    Attributes:
        source: the server that it came from, -1 for the worker's own disk.
    """

    source: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldersChange:
    """Changes of the expert placement, for a server that has an earlier one.

    Attributes:
        base: version that the server has.
        version: that it has then.
        servers: of each changed (layer, expert) the servers that have it, ascending.
        peers: as of `Holders`.
    """

    base: int
    version: int
    servers: Mapping[tuple[int, int], tuple[int, ...]]
    peers: tuple[tuple[str, int] | None, ...]

    def applied_to(self, holders: Holders) -> Holders | None:
        """The placement after these changes; None where `holders` is not their base."""
        if holders.version != self.base:
            return None
        servers_LE = [list(servers_E) for servers_E in holders.servers_LE]
        for (layer, expert), servers in self.servers.items():
            servers_LE[layer][expert] = servers
        return Holders(version=self.version, servers_LE=tuple(map(tuple, servers_LE)), peers=self.peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRound:
    """Results of one round of a migration.

    Attributes:
        arrived: by (server, (layer, expert)).
        failed: (server, (layer, expert), why) of drops and copies that were not to be.
    """

    arrived: Mapping[tuple[int, tuple[int, int]], ArrivedExpert]
    failed: Sequence[tuple[int, tuple[int, int], Exception]]
