"""A cluster of edge servers in one process: real runtimes and real connections on loopback, no Ray."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from moetool.caching.devices import build_policies, open_pool, split_slots
from moetool.cluster.cluster_options import ClusterOptions
from moetool.cluster.edge.meter import Meter
from moetool.cluster.edge.peers import Peers
from moetool.cluster.edge.placed_experts import PlacedExperts
from moetool.cluster.edge.protocol import ExpertLocations
from moetool.cluster.frames import Frame
from moetool.cluster.links import Links
from moetool.cluster.listener import listen
from moetool.cluster.transport import Listener
from moetool.models.checkpoint import Checkpoint
from moetool.models.loading import load_lazy
from moetool.runtime.experts.device_stores import open_stores
from moetool.runtime.loop.batching import Batcher
from moetool.runtime.loop.engine import Engine
from tests.identities import identity

PATIENT = ClusterOptions(hedge_s=0.0)
"""Disables checks for slow peers, so that counts do not depend on the machine's load."""


class Node:
    """One server: an engine without a thread, and a listener for calls of peers.

    Attributes:
        on_call: if set, called with every message before it is answered.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        server: int,
        held: Sequence[tuple[int, int]],
        *,
        capacity: int,
        slots: int,
        distance: Sequence[float],
        options: ClusterOptions,
        devices: int = 1,
    ) -> None:
        self.server = server
        self.on_call: Callable[[Frame], None] | None = None
        loaded = load_lazy(Checkpoint.open(path), torch.float32)
        self.links = Links()
        self.meter = Meter(server, loaded.spec, self.links)
        self.peers = Peers(server, identity(f"server-{server}"), distance, links=self.links)

        shares = [slots] if devices == 1 else split_slots(loaded.spec, slots, devices)
        residency = open_pool(build_policies("lru", loaded.spec, {}, shares))
        self.experts = PlacedExperts(
            loaded,
            residency,
            open_stores(loaded, residency),
            held=held,
            capacity=capacity,
            peers=self.peers,
            meter=self.meter,
            options=options,
        )
        batcher = Batcher(loaded.model, max_requests=8, kv_tokens=1024)
        self.engine = Engine(loaded, tokenizer, self.experts.runtime, batcher, model_name="reference")
        self.engine.state = "ready"
        self.listener = Listener(listen("127.0.0.1"), identity(f"server-{self.server}"), self._handle, links=self.links)

    def listen_again(self) -> None:
        """Listen again at another address."""
        self.listener.close()
        self.listener = Listener(listen("127.0.0.1"), identity(f"server-{self.server}"), self._handle, links=self.links)

    def close(self) -> None:
        self.listener.close()
        self.engine.close()

    def _handle(self, message: Frame) -> Frame:
        if self.on_call is not None:
            self.on_call(message)
        return self.experts.handle(message)


class Nodes:
    """The servers of a cluster and their experts."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.version = 0
        self.publish()

    def __getitem__(self, server: int) -> Node:
        return self.nodes[server]

    def arrange(self, held: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Set the experts of each server, and publish them."""
        for node, experts in zip(self.nodes, held, strict=True):
            for at in set(node.experts.held) - set(experts):
                node.experts.drop(*at)
            for at in sorted(set(experts) - set(node.experts.held)):
                node.experts.adopt(*at, source=-1)
        self.publish()

    def publish(self, gone: Sequence[int] = ()) -> ExpertLocations:
        """Tell all servers which experts each server holds."""
        self.version += 1
        spec = self.nodes[0].experts.spec
        servers_LE = [[[] for _ in range(num)] for num in spec.num_experts_L]  # type: list[list[list[int]]]
        for node in self.nodes:
            for layer, expert in node.experts.held if node.server not in gone else ():
                servers_LE[layer][expert].append(node.server)
        holders = ExpertLocations(
            version=self.version,
            servers_LE=tuple(tuple(tuple(servers) for servers in experts) for experts in servers_LE),
            peers=tuple(None if node.server in gone else node.listener.address for node in self.nodes),
        )
        for node in self.nodes:
            node.experts.set_holders(holders)
        return holders


@contextlib.contextmanager
def cluster(
    path: Path,
    tokenizer: Any,
    held: Sequence[Sequence[tuple[int, int]]],
    *,
    capacity: int = 256,
    slots: int | None = None,
    distance: Sequence[Sequence[float]] | None = None,
    options: ClusterOptions | None = None,
    devices: Sequence[int] = (),
) -> Iterator[Nodes]:
    """A cluster with one server per list of held experts, on this number of devices (default: one each)."""
    near = distance or [[1.0] * len(held)] * len(held)
    nodes: list[Node] = []
    try:
        for server, experts in enumerate(held):
            given: dict[str, Any] = {"capacity": capacity, "slots": slots or capacity, "options": options or PATIENT}
            given["devices"] = devices[server] if devices else 1
            nodes.append(Node(path, tokenizer, server, experts, distance=near[server], **given))
        yield Nodes(nodes)
    finally:
        for node in nodes:
            node.close()
