"""Workers of a cluster with real state and randomly drawn tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moetool.base.errors import CapacityError, MoetoolError
from moetool.base.types import Cluster, ModelSpec
from moetool.cluster.edge.protocol import (
    ArrivedExpert,
    ExpertLocations,
    ExpertLocationsUpdate,
    MigrationRoundResult,
    WorkerInfo,
    WorkerStats,
)
from moetool.cluster.worker_link import WorkerDied
from moetool.placement.plan import Place


class DrawnWorker:
    """A server whose tokens choose experts with given probabilities.

    Args:
        others: all workers by server, including this one once it is made.
        odds_LE: probability that a token chooses each expert.
        call_s: seconds of a remote (token, expert) pair, besides `expert_s` of compute.
        move_s: seconds of an expert's transfer.
        trial_share: of them, in a trial copy.
    """

    def __init__(
        self,
        server: int,
        spec: ModelSpec,
        held: set[Place],
        slots: int,
        odds_LE: np.ndarray,
        others: dict[int, "DrawnWorker"],
        *,
        call_s: float = 1e-3,
        expert_s: float = 1e-4,
        move_s: float = 0.05,
    ) -> None:
        self.server, self.spec, self.held, self.slots = server, spec, set(held), slots
        self.odds_LE, self.others = odds_LE, others
        self.call_s, self.expert_s, self.move_s = call_s, expert_s, move_s
        self.trial_share = 1.0
        self.holders: ExpertLocations | None = None
        self.dead = False
        self.fails: dict[Place, int] = {}
        self.adopted: list[tuple[Place, int]] = []
        self.local = self.remote = 0
        self._rng = np.random.default_rng([7, server])
        self._clear()
        others[server] = self

    def serve(self, tokens: int, seconds: float, request_tokens: int = 20) -> None:
        """Route and serve this many tokens of this server's users."""
        self._seconds += seconds
        self._request_s += [0.1] * (tokens // request_tokens)
        for layer, (num_experts, top_k) in enumerate(zip(self.spec.num_experts_L, self.spec.top_k_L, strict=True)):
            keys_TE = self._rng.random((tokens, num_experts)) ** (1 / self.odds_LE[layer, :num_experts])
            chosen_TK = np.argsort(-keys_TE, axis=1)[:, :top_k]
            counts_E = np.bincount(chosen_TK.ravel(), minlength=num_experts)
            self._tokens_LE[layer, :num_experts] += counts_E
            for expert, count in enumerate(counts_E.tolist()):
                if (layer, expert) in self.held:
                    self._local += count
                    continue
                assert self.holders is not None
                there = [n for n in self.holders.servers_LE[layer][expert] if n != self.server]
                if not count:
                    continue
                assert there, f"nobody holds {layer, expert}"
                assert (layer, expert) in self.others[there[0]].held, "sent to one that does not hold it"
                self._remote += count
                self._call_s[there[0]] = self._call_s.get(there[0], 0.0) + count * (self.call_s + self.expert_s)
                self._call_pairs[there[0]] = self._call_pairs.get(there[0], 0) + count

    def info(self) -> WorkerInfo:
        self._live()
        return WorkerInfo(
            server=self.server,
            url=f"http://127.0.0.1:{9000 + self.server}",
            peer=("127.0.0.1", 9100 + self.server),
            held=tuple(sorted(self.held)),
            slots=self.slots,
        )

    def stats(self) -> WorkerStats:
        self._live()
        made = WorkerStats(
            server=self.server,
            seconds=self._seconds,
            tokens_LE=self._tokens_LE,
            local_pairs=self._local,
            remote_pairs=self._remote,
            expert_s=self._local * self.expert_s,
            expert_pairs=self._local,
            call_s=self._call_s,
            calls=dict(self._call_pairs),
            call_pairs=self._call_pairs,
            bytes_out={n: pairs * 512 for n, pairs in self._call_pairs.items()},
            migrated_bytes=self._migrated,
            request_s=tuple(self._request_s),
        )
        self.local, self.remote = self.local + self._local, self.remote + self._remote
        self._clear()
        return made

    def change_holders(self, change: ExpertLocationsUpdate) -> bool:
        self._live()
        if self.holders is None or (changed := change.applied_to(self.holders)) is None:
            return False
        self.holders = changed
        return True

    def adopt_all(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert | str]:
        arrived: list[ArrivedExpert | str] = []
        for move in moves:
            try:
                arrived.append(self.adopt(*move))
            except WorkerDied:
                raise
            except MoetoolError as error:
                arrived.append(str(error))
        return arrived

    def time_copies(self, moves: Sequence[tuple[int, int, int]]) -> list[ArrivedExpert]:
        self._live()
        size, seconds = self.spec.slot_bytes, self.trial_share * self.move_s
        return [ArrivedExpert(source=source, bytes=size, seconds=seconds) for *_, source in moves]

    def drop_all(self, places: Sequence[Place]) -> None:
        for place in places:
            self.drop(*place)

    def set_holders(self, holders: ExpertLocations) -> None:
        self._live()
        assert self.holders is None or holders.version > self.holders.version
        self.holders = holders

    def adopt(self, layer: int, expert: int, source: int) -> ArrivedExpert:
        self._live()
        place = layer, expert
        if self.fails.get(place, 0):
            self.fails[place] -= 1
            raise MoetoolError(f"expert {place} could not be read")
        assert place not in self.held, "it is here already"
        if len(self.held) >= self.slots:
            raise CapacityError("no slot is free")
        assert source == -1 or place in self.others[source].held, "it is not there"
        self.held.add(place)
        self.adopted.append((place, source))
        self._migrated += self.spec.slot_bytes
        return ArrivedExpert(source=source, bytes=self.spec.slot_bytes, seconds=self.move_s)

    def drop(self, layer: int, expert: int) -> None:
        self._live()
        self.held.remove((layer, expert))

    def drain(self) -> None:
        """No request runs here."""

    def close(self) -> None:
        """Nothing to close."""

    def _live(self) -> None:
        if self.dead:
            raise WorkerDied(f"server {self.server} has ended (a test)")

    def _clear(self) -> None:
        self._tokens_LE = np.zeros((self.spec.num_layers, self.spec.num_experts), np.int64)
        self._local = self._remote = self._migrated = 0
        self._seconds = 0.0
        self._call_s: dict[int, float] = {}
        self._call_pairs: dict[int, int] = {}
        self._request_s: list[float] = []


def odds(spec: ModelSpec, num_servers: int, seed: int = 0) -> np.ndarray:
    """Skewed probabilities [N, L, E] of experts, different on each server."""
    drawn_NLE = np.random.default_rng(seed).random((num_servers, spec.num_layers, spec.num_experts)) ** 6 + 1e-3
    return drawn_NLE / drawn_NLE.sum(axis=2, keepdims=True)


class Table:
    """Live servers and their experts for a scheduler: like a cluster's head, but without restarts."""

    def __init__(self, spec: ModelSpec, workers: Mapping[int, Any], version: int = 0) -> None:
        self.spec = spec
        self._workers = dict(workers)
        self._infos: list[WorkerInfo | None] = [None] * len(workers)
        self._held: list[set[Place]] = [set() for _ in workers]
        self.version = version
        for n in self._workers:
            self.join(n)

    def infos(self) -> list[WorkerInfo | None]:
        return list(self._infos)

    def held(self) -> list[frozenset[Place]]:
        return [frozenset(places) for places in self._held]

    def stats(self) -> list[WorkerStats | None]:
        made: list[WorkerStats | None] = []
        for n, info in enumerate(self._infos):
            try:
                made.append(None if info is None else self._workers[n].stats())
            except WorkerDied:
                made.append(None)
        return made

    def adopt(self, server: int, layer: int, expert: int, source: int) -> ArrivedExpert:
        moved = self._workers[server].adopt(layer, expert, source)
        self._held[server].add((layer, expert))
        self._publish()
        return moved

    def move(
        self, drops: Sequence[tuple[int, Place]], copies: Sequence[tuple[int, Place, int]]
    ) -> MigrationRoundResult:
        arrived, failed = {}, list[tuple[int, Place, Exception]]()
        for server, at in drops:
            try:
                self.drop(server, *at)
            except MoetoolError as error:
                failed.append((server, at, error))
        for server, at, source in copies:
            try:
                arrived[server, at] = self.adopt(server, *at, source)
            except MoetoolError as error:
                failed.append((server, at, error))
        return MigrationRoundResult(arrived=arrived, failed=failed)

    def time_copies(self, copies: Sequence[tuple[int, Place, int]]) -> list[tuple[int, ArrivedExpert]]:
        timed = []
        for server, at, source in copies:
            try:
                timed += [(server, one) for one in self._workers[server].time_copies([(*at, source)])]
            except WorkerDied:
                continue
        return timed

    def drop(self, server: int, layer: int, expert: int) -> None:
        if not any((layer, expert) in held for n, held in enumerate(self._held) if n != server):
            raise MoetoolError("nobody else holds it")
        self._held[server].discard((layer, expert))
        self._publish()
        self._workers[server].drop(layer, expert)

    def join(self, server: int) -> None:
        info = self._workers[server].info()
        self._infos[server], self._held[server] = info, set(info.held)
        self._publish()

    def leave(self, server: int) -> None:
        self._infos[server] = None
        self._held[server] = set()
        self._publish()

    def uncovered(self) -> list[Place]:
        found = set[Place]().union(*self._held)
        return [(i, e) for i, num in enumerate(self.spec.num_experts_L) for e in range(num) if (i, e) not in found]

    def _publish(self) -> None:
        self.version += 1
        holders = ExpertLocations(
            version=self.version,
            servers_LE=tuple(
                tuple(tuple(n for n, held in enumerate(self._held) if (layer, expert) in held) for expert in range(num))
                for layer, num in enumerate(self.spec.num_experts_L)
            ),
            peers=tuple(None if info is None else info.peer for info in self._infos),
        )
        for n, info in enumerate(self._infos):
            if info is not None:
                try:
                    self._workers[n].set_holders(holders)
                except WorkerDied:
                    continue  # nobody has noticed yet


def open_cluster(
    spec: ModelSpec, cluster: Cluster, held: Mapping[int, set[Place]], slots: Sequence[int], odds_NLE: np.ndarray
) -> tuple[dict[int, DrawnWorker], Table]:
    """Workers that have joined, one per server."""
    workers: dict[int, DrawnWorker] = {}
    for n in range(len(cluster.servers)):
        DrawnWorker(n, spec, held[n], slots[n], odds_NLE[n], workers)
    return workers, Table(spec, workers)
