"""Order of migrations between placements that keeps every expert available."""

from collections.abc import Sequence
from math import ceil, inf

import numpy as np

from moetool.base.errors import CapacityError
from moetool.base.types import Cluster, ModelSpec
from moetool.placement.plan import Move, Place


def windows(seconds: Sequence[float], window_s: float) -> int:
    """Return the number of compute phases for ordered moves, none of which overlaps an all-to-all.

    A move longer than a phase is cut into pieces of one phase each, and begins with a new phase.
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


def order_moves(
    spec: ModelSpec, cluster: Cluster, old_GLE: np.ndarray, new_GLE: np.ndarray, *, buffered: bool = False
) -> list[Move]:
    """Order moves so that after each one every expert is held somewhere and every GPU fits.

    GPUs take turns. Each copies experts that fit, first those that another GPU drops; else it drops unneeded experts
    that have another copy. If no GPU can proceed, an expert is staged: on a GPU with room that waits for nothing, or
    else in host memory, where the host computes it until it arrives. If hosts have no room either, a GPU drops a needed
    copy that another GPU holds, and gets it back later. If even that fails, unneeded copies are dropped first.

    Args:
        buffered: GPUs have room for new experts next to the old ones: all copies come first.

    Raises:
        CapacityError: there is no room to stage an expert.
    """
    try:
        return _Mover(spec, cluster, old_GLE, new_GLE, buffered).run()
    except CapacityError:
        left_GLE, drops = old_GLE.copy(), []
        for g, layer, expert in np.argwhere(old_GLE & ~new_GLE).tolist():
            if left_GLE[:, layer, expert].sum() > 1:
                left_GLE[g, layer, expert] = False
                drops.append(Move(kind="drop", layer=layer, expert=expert, gpu=g))
        return [*drops, *_Mover(spec, cluster, left_GLE, new_GLE).run()]


class _Mover:
    def __init__(
        self, spec: ModelSpec, cluster: Cluster, old_GLE: np.ndarray, new_GLE: np.ndarray, buffered: bool = False
    ) -> None:
        self.spec, self.cluster = spec, cluster
        self.server_G, self.gpus = cluster.server_G, cluster.gpus
        self.links: dict[tuple[int, int], tuple[float, float]] = {}  # from a server's memory to each GPU
        num_gpus = len(self.server_G)
        self.held: dict[Place, set[int]] = {}
        for g, layer, expert in np.argwhere(old_GLE).tolist():
            self.held.setdefault((layer, expert), set()).add(g)
        self.adds = [[(p[0], p[1]) for p in np.argwhere(new_GLE[g] & ~old_GLE[g]).tolist()] for g in range(num_gpus)]
        self.drops = [[(p[0], p[1]) for p in np.argwhere(old_GLE[g] & ~new_GLE[g]).tolist()] for g in range(num_gpus)]
        unwanted_LE = (old_GLE & ~new_GLE).any(axis=0)
        for places in self.adds:
            if not buffered:  # otherwise in the order of layers, as a forward needs them
                places.sort(key=lambda place: not unwanted_LE[place])
        sizes_L = np.array(spec.expert_bytes_L)
        used_G = old_GLE.sum(axis=2) @ sizes_L
        self.free: list[float] = [
            inf if buffered else gpu.expert_bytes - int(used) for gpu, used in zip(self.gpus, used_G, strict=True)
        ]
        self.host_free = [server.host_memory_bytes for server in cluster.servers]
        self.staged: dict[Place, int] = {}  # staged experts, and the server whose memory holds each
        self.given_up: set[tuple[int, Place]] = set()  # temporarily dropped copies: each once, to guarantee termination
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
        """Copy and drop on one GPU until neither is possible; return the number of moves."""
        done = 0
        while self.adds[g]:
            fits = next((place for place in self.adds[g] if self._size(place) <= self.free[g]), None)
            if fits is not None:
                self.adds[g].remove(fits)
                self._copy(g, fits)
            else:
                redundant = next((place for place in self.drops[g] if len(self.held[place]) > 1), None)
                if redundant is None:
                    break
                self._drop(g, redundant)
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
            f"no GPU has room to stage an expert, and the host of server {' or '.join(hosts)} lacks {size:,} bytes; "
            f"leave a slot free or raise host_memory_bytes"
        )

    def _put_aside(self, g: int, place: Place) -> bool:
        """Stage an expert of a GPU; return whether there was room."""
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
        seconds = size / self.gpus[g].host_to_device_bytes_s
        self._note("stage", place, g, -1, size, seconds)
        self._release(g, place)
        return True

    def _give_up(self, g: int) -> bool:
        """Temporarily drop a needed copy that another GPU holds; return whether there was one."""
        for place, holders in self.held.items():
            if g in holders and len(holders) > 1 and (g, place) not in self.given_up:
                self.given_up.add((g, place))
                self.adds[g].append(place)
                self.drops[g].append(place)
                self._drop(g, place)
                return True
        return False

    def _copy(self, g: int, place: Place) -> None:
        size, gpu = self._size(place), self.gpus[g]
        if place in self.staged and not self.held[place]:
            source, server = -1, self.staged[place]
        else:
            source = min(self.held[place], key=lambda h: (-self._link(self.server_G[h], g)[0], h))
            server = self.server_G[source]
        bytes_s, latency_s = self._link(server, g)
        self._note("copy", place, g, source, size, latency_s + size / min(bytes_s, gpu.host_to_device_bytes_s))
        self.held[place].add(g)
        self.free[g] -= size
        if place in self.staged:
            server = self.staged.pop(place)
            self.host_free[server] += size
            self._note("unstage", place, g, -1, 0, 0.0)

    def _link(self, server: int, g: int) -> tuple[float, float]:
        """Return bytes per second from a server's memory to a GPU's host, and the latency."""
        if (server, g) not in self.links:
            own = server == self.server_G[g]
            bytes_s, latency_s = self.cluster.link(server, self.server_G[g])
            self.links[server, g] = self.gpus[g].host_to_device_bytes_s if own else bytes_s, latency_s
        return self.links[server, g]

    def _drop(self, g: int, place: Place) -> None:
        self._note("drop", place, g, -1, 0, 0.0)
        self._release(g, place)

    def _release(self, g: int, place: Place) -> None:
        self.drops[g].remove(place)
        self.held[place].discard(g)
        self.free[g] += self._size(place)

    def _size(self, place: Place) -> int:
        return self.spec.expert_bytes_L[place[0]]

    def _note(self, kind: str, place: Place, gpu: int, source: int, size: int, seconds: float) -> None:
        layer, expert = place
        self.moves.append(
            Move(kind=kind, layer=layer, expert=expert, gpu=gpu, source=source, bytes=size, seconds=seconds)
        )
