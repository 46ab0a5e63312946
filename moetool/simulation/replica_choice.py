"""Choice of an expert's copy for a token: on its own GPU, its own server, or the nearest one (ties: least loaded)."""

from collections.abc import Sequence

import numpy as np

from moetool.base.types import Cluster
from moetool.simulation.simulated_costs import Network

Target = int | tuple[int, ...]
"""A GPU, or several, of which the least loaded is chosen when the token leaves."""


class Routing:
    """Current expert locations, for the event loop.

    Attributes:
        near: near[g][layer][expert], for tokens that start on GPU g.

    Args:
        most: maximum number of equally near copies to compare by load. With more, servers compare different ones.
    """

    def __init__(self, cluster: Cluster, network: Network, placed_GLE: np.ndarray, most: int = 4) -> None:
        self._server_G, self._network, self._most = cluster.server_G, network, most
        self._gpus_N = [[g for g, n in enumerate(self._server_G) if n == m] for m in range(len(cluster.servers))]
        num_gpus, num_layers, num_experts = placed_GLE.shape
        self._held: dict[tuple[int, int], list[int]] = {}
        self._aside: dict[tuple[int, int], set[int]] = {}
        self.near: list[list[list[Target]]] = [[[-1] * num_experts for _ in range(num_layers)] for _ in range(num_gpus)]
        for layer in range(num_layers):
            for expert in np.flatnonzero(placed_GLE[:, layer].any(axis=0)).tolist():
                self._held[layer, expert] = np.flatnonzero(placed_GLE[:, layer, expert]).tolist()
                self._point(layer, expert)

    def add(self, layer: int, expert: int, gpu: int) -> None:
        """Record that a GPU holds an expert."""
        self._held[layer, expert] = sorted({*self._held[layer, expert], gpu} - self._aside.pop((layer, expert), set()))
        self._point(layer, expert)

    def remove(self, layer: int, expert: int, gpu: int) -> None:
        """Record that a GPU drops an expert. The last holder computes it from host memory until another holds it."""
        left = [g for g in self._held[layer, expert] if g != gpu]
        if not left:
            self._aside[layer, expert] = {gpu}
            return
        self._held[layer, expert] = left
        self._point(layer, expert)

    def _point(self, layer: int, expert: int) -> None:
        holders = self._held[layer, expert]
        inside: dict[int, list[int]] = {}
        for g in holders:
            inside.setdefault(self._server_G[g], []).append(g)
        for server, gpus in enumerate(self._gpus_N):
            mine = inside.get(server)
            target = self._pick(mine or self._nearest(server, holders), server, expert)
            for g in gpus:
                self.near[g][layer][expert] = g if mine and g in mine else target

    def _nearest(self, server: int, holders: Sequence[int]) -> Sequence[int]:
        if self._network.even:
            return holders
        distance = [self._network.distance_NN[server, self._server_G[g]] for g in holders]
        least = min(distance)
        return [g for g, far in zip(holders, distance, strict=True) if far <= least]

    def _pick(self, holders: Sequence[int], server: int, expert: int) -> Target:
        if len(holders) == 1:
            return holders[0]
        if len(holders) > self._most:
            start = (server * 31 + expert) % len(holders)
            holders = [holders[(start + i) % len(holders)] for i in range(self._most)]
        return tuple(holders)
