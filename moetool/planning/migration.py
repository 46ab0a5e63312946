"""From one placement to another: moves in an order that never breaks serving, what they take, and whether they pay."""

from collections.abc import Sequence
from math import ceil

import numpy as np

from moetool.errors import CapacityError, MismatchError
from moetool.placement_plan import MigrationPlan, Move, PlacementPlan
from moetool.planning.demand import Demand, per_server
from moetool.types import Cluster, ModelSpec

_Place = tuple[int, int]  # layer, expert


def plan_migration(
    old: PlacementPlan,
    new: PlacementPlan,
    demand: Demand,
    *,
    horizon_tokens: float,
    call_s: float | None = None,
    window_s: float | None = None,
    value_bytes: int = 2,
) -> MigrationPlan:
    """Plan the way from one placement to another of the same model and cluster.

    Args:
        demand: what the calls of both placements are counted on.
        horizon_tokens: tokens of the whole cluster until the placement is next changed.
        call_s: seconds of a remote call; by default the mean over pairs of servers of a token's way there and back.
        window_s: length of the compute phases that the moves are fitted into.

    Source: Prism § III-C3, Eqs. 3 and 4; DIRECTOR § V-B for the windows. Repairs:
        - Eq. 3 charges additions only; as printed, dropping an expert would cost as much as loading it.
        - Eq. 4 compares a number of calls with seconds. Here both sides are seconds: the calls saved over the horizon,
          each as long as a remote call takes, against Eq. 3 or, if they take longer, against all moves one after the
          other: Eq. 3 loads every expert at the GPU's own rate, also one that comes over a slow link.

    Raises:
        MismatchError: the plans are of different models or clusters; without `call_s`, the model's hidden size is not
            known.
        CapacityError: neither a GPU nor a host has room for an expert on its way.
    """
    new.spec.require_same(old.spec, "the new plan", "the old plan")
    if old.cluster != new.cluster:
        raise MismatchError("the two plans are for different clusters; plan both for one with: moetool plan placement")
    demand.spec.require_same(new.spec, "the trace", "the plan")
    spec, cluster = new.spec, new.cluster
    moves = order_moves(spec, cluster, old.placed_GLE, new.placed_GLE)
    added_GL = (new.placed_GLE & ~old.placed_GLE).sum(axis=2)
    rate_G = np.array([gpu.host_to_device_bytes_s for gpu in cluster.gpus])
    eq3_s = float((added_GL @ np.array(spec.expert_bytes_L) / rate_G).sum())
    tokens = float(demand.tokens_GLE.sum()) / sum(spec.top_k_L)
    before, after = (remote_calls(demand, p.placed_GLE) * horizon_tokens / tokens for p in (old, new))
    if call_s is None and spec.hidden_size <= 0:
        raise MismatchError(
            f"the hidden size of {spec.name} is not known, so what a remote call takes is not; measure one and give "
            f"--call-ms"
        )
    each_s = remote_call_s(spec, cluster, value_bytes) if call_s is None else call_s
    saved_s = (before - after) * each_s
    seconds = sum(move.seconds for move in moves)
    return MigrationPlan(
        spec=spec,
        cluster=cluster,
        moves=tuple(moves),
        bytes=sum(move.bytes for move in moves),
        seconds=seconds,
        eq3_s=eq3_s,
        calls_before=before,
        calls_after=after,
        call_s=each_s,
        saved_s=saved_s,
        horizon_tokens=horizon_tokens,
        worth_it=saved_s > max(eq3_s, seconds),
        windows=None if window_s is None else windows([move.seconds for move in moves], window_s),
        window_s=window_s,
    )


def remote_calls(demand: Demand, placed_GLE: np.ndarray) -> float:
    """Prism's Eq. 2 in calls."""
    held_NLE = per_server(demand.cluster, placed_GLE) > 0
    return float((demand.tokens_NLE * ~held_NLE).sum())


def remote_call_s(spec: ModelSpec, cluster: Cluster, value_bytes: int = 2) -> float:
    """A token's way to another server and back, without the computing: the mean over pairs of servers."""
    num_servers = len(cluster.servers)
    ways = []
    for a in range(num_servers):
        for b in range(a):
            bytes_s, latency_s = cluster.link(a, b)
            ways.append(2 * (latency_s + spec.hidden_size * value_bytes / bytes_s))
    return float(np.mean(ways)) if ways else 0.0


def windows(seconds: Sequence[float], window_s: float) -> int:
    """Compute phases that moves take, in order: none runs on into an all-to-all.

    A move that is longer than a phase is cut into pieces of one phase each, and begins with a fresh one.
    """
    used, left = 0, 0.0
    for need in seconds:
        if need <= 0:
            continue
        if need <= left:
            left -= need
            continue
        pieces = max(1, ceil(need / window_s - 1e-9))
        used += pieces
        left = pieces * window_s - need
    return used


def order_moves(spec: ModelSpec, cluster: Cluster, old_GLE: np.ndarray, new_GLE: np.ndarray) -> list[Move]:
    """Moves after each of which every expert has a place and every GPU fits.

    GPUs take turns: copy what fits, first what another wants to be rid of; else drop what has another copy and is not
    wanted. Where none can go on, an expert steps aside: to a GPU that has room and waits for nothing, or else to the
    memory of its host, which computes it there until it has arrived. Where hosts have no room either, a GPU gives up a
    copy that it wants and another GPU has, and gets it back later.

    Raises:
        CapacityError: no room to step aside.
    """
    return _Mover(spec, cluster, old_GLE, new_GLE).run()


class _Mover:
    def __init__(self, spec: ModelSpec, cluster: Cluster, old_GLE: np.ndarray, new_GLE: np.ndarray) -> None:
        self.spec, self.cluster = spec, cluster
        self.server_G = cluster.server_G
        num_gpus = len(self.server_G)
        self.held: dict[_Place, set[int]] = {}
        for g, layer, expert in np.argwhere(old_GLE).tolist():
            self.held.setdefault((layer, expert), set()).add(g)
        self.adds = [[(p[0], p[1]) for p in np.argwhere(new_GLE[g] & ~old_GLE[g]).tolist()] for g in range(num_gpus)]
        self.drops = [[(p[0], p[1]) for p in np.argwhere(old_GLE[g] & ~new_GLE[g]).tolist()] for g in range(num_gpus)]
        unwanted_LE = (old_GLE & ~new_GLE).any(axis=0)
        for places in self.adds:
            places.sort(key=lambda place: not unwanted_LE[place])
        sizes_L = np.array(spec.expert_bytes_L)
        used_G = old_GLE.sum(axis=2) @ sizes_L
        self.free = [gpu.expert_bytes - int(used) for gpu, used in zip(cluster.gpus, used_G, strict=True)]
        self.host_free = [server.host_memory_bytes for server in cluster.servers]
        self.staged: dict[_Place, int] = {}  # and the server whose memory holds it
        self.given_up: set[tuple[int, _Place]] = set()  # each copy at most once, so that there is an end
        self.moves: list[Move] = []

    def run(self) -> list[Move]:
        while any(self.adds):
            if not sum(self._advance(g) for g in range(len(self.adds))):
                self._step_aside()
        for g, places in enumerate(self.drops):
            for place in list(places):
                self._drop(g, place)
        return self.moves

    def _advance(self, g: int) -> int:
        """Copies and drops on one GPU until it can do neither; how many."""
        done = 0
        while self.adds[g]:
            fits = next((place for place in self.adds[g] if self._size(place) <= self.free[g]), None)
            if fits is not None:
                self.adds[g].remove(fits)
                self._copy(g, fits)
            else:
                spare = next((place for place in self.drops[g] if len(self.held[place]) > 1), None)
                if spare is None:
                    break
                self._drop(g, spare)
            done += 1
        return done

    def _step_aside(self) -> None:
        waiting = [(g, place) for g, places in enumerate(self.adds) if places for place in self.drops[g]]
        if any(self._put_aside(g, place) for g, place in waiting):
            return
        if any(self._give_up(g) for g, places in enumerate(self.adds) if places):
            return
        size = min(self._size(place) for _, place in waiting)
        hosts = sorted({self.cluster.servers[self.server_G[g]].name for g, _ in waiting})
        raise CapacityError(
            f"no GPU has room for an expert on its way, nor has the host of server {' or '.join(hosts)} {size:,} "
            f"bytes; leave a slot free or raise host_memory_bytes"
        )

    def _put_aside(self, g: int, place: _Place) -> bool:
        """Take an expert from a GPU for a while; false if there is nowhere to put it."""
        size = self._size(place)
        for h, room in enumerate(self.free):
            if h != g and room >= size and not self.adds[h]:
                self._copy(h, place)
                self.drops[h].append(place)
                self._drop(g, place)
                return True
        server = self.server_G[g]
        if self.host_free[server] < size:
            return False
        self.host_free[server] -= size
        self.staged[place] = server
        seconds = size / self.cluster.gpus[g].host_to_device_bytes_s
        self._note("stage", place, g, -1, size, seconds)
        self._release(g, place)
        return True

    def _give_up(self, g: int) -> bool:
        """Drop a copy that is to be here in the end, while another GPU has one; false if there is none."""
        for place, holders in self.held.items():
            if g in holders and len(holders) > 1 and (g, place) not in self.given_up:
                self.given_up.add((g, place))
                self.adds[g].append(place)
                self.drops[g].append(place)
                self._drop(g, place)
                return True
        return False

    def _copy(self, g: int, place: _Place) -> None:
        size, gpu = self._size(place), self.cluster.gpus[g]
        if place in self.staged and not self.held[place]:
            source, server = -1, self.staged[place]
        else:
            source = min(self.held[place], key=lambda h: (-self._rate(self.server_G[h], g), h))
            server = self.server_G[source]
        latency_s = self.cluster.link(server, self.server_G[g])[1]
        self._note(
            "copy", place, g, source, size, latency_s + size / min(self._rate(server, g), gpu.host_to_device_bytes_s)
        )
        self.held[place].add(g)
        self.free[g] -= size
        if place in self.staged:
            server = self.staged.pop(place)
            self.host_free[server] += size
            self._note("unstage", place, g, -1, 0, 0.0)

    def _rate(self, server: int, g: int) -> float:
        """Bytes a second from a server's memory to a GPU's host."""
        own = server == self.server_G[g]
        return self.cluster.gpus[g].host_to_device_bytes_s if own else self.cluster.link(server, self.server_G[g])[0]

    def _drop(self, g: int, place: _Place) -> None:
        self._note("drop", place, g, -1, 0, 0.0)
        self._release(g, place)

    def _release(self, g: int, place: _Place) -> None:
        self.drops[g].remove(place)
        self.held[place].discard(g)
        self.free[g] += self._size(place)

    def _size(self, place: _Place) -> int:
        return self.spec.expert_bytes_L[place[0]]

    def _note(self, kind: str, place: _Place, gpu: int, source: int, size: int, seconds: float) -> None:
        layer, expert = place
        self.moves.append(
            Move(kind=kind, layer=layer, expert=expert, gpu=gpu, source=source, bytes=size, seconds=seconds)
        )
