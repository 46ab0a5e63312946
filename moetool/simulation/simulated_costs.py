"""Costs of the simulated machines: seconds of dense layers, of experts, and of messages on links."""

from dataclasses import dataclass

import numpy as np

from moetool.base.config import Span, require_within
from moetool.base.errors import MismatchError, UsageError
from moetool.base.types import Cluster, ModelSpec
from moetool.costing.costs import CostProfile
from moetool.placement.latency import Latency, linear_latency

LINKS = ("pair", "server")


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedCosts:
    """Assumed costs without a profile: straight lines, on a GPU of speed 1.

    Attributes:
        dense_s: seconds of a layer without its experts for one token: attention, router, shared experts, launches.
        dense_token_s: seconds of each further token.
        expert_s: seconds of one expert for one token, whose weights must be read.
        expert_token_s: seconds of each further token.

    Raises:
        UsageError: a value is below 0.
    """

    dense_s: float = 200e-6
    dense_token_s: float = 4e-6
    expert_s: float = 50e-6
    expert_token_s: float = 1e-6

    def __post_init__(self) -> None:
        require_within(self, "--set ", **dict.fromkeys(self.__dataclass_fields__, Span(0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeconds:
    """Seconds on a GPU of speed 1, by tokens.

    Attributes:
        name: origin of the costs.
        dense: a layer without its experts, by tokens (index 0: no token) up to the largest forward.
        expert: the same for one expert.
    """

    name: str
    dense: list[float]
    expert: list[float]


def assumed(costs: AssumedCosts, most_tokens: int) -> GpuSeconds:
    """Return tables of assumed costs."""
    return GpuSeconds(
        name="assumed costs, no profile",
        dense=[0.0, *(costs.dense_s + costs.dense_token_s * n for n in range(most_tokens))],
        expert=[0.0, *(costs.expert_s + costs.expert_token_s * n for n in range(most_tokens))],
    )


def profiled(profile: CostProfile, spec: ModelSpec, most_tokens: int, context: int) -> GpuSeconds:
    """Return tables of a profile: attention, router and shared experts are the dense part.

    Args:
        context: tokens that a decoded token attends to, equal for all requests.

    Raises:
        MismatchError: the profile is of another model.
    """
    profile.check(spec)
    devices = {costs.device for costs in profile.compute}
    known = profile.on("cuda" if "cuda" in devices else "cpu")
    sizes = range(1, most_tokens + 1)
    attention = [known.attention(context), *(known.prompt_attention(n) for n in sizes[1:])]
    return GpuSeconds(
        name=f"profile of {profile.spec.name}",
        dense=[
            0.0,
            *(attended + known.gate(n) + known.shared(n) for attended, n in zip(attention, sizes, strict=True)),
        ],
        expert=[0.0, *(known.expert(n) for n in sizes)],
    )


def token_bytes(spec: ModelSpec, value_bytes: int, given: int = 0) -> int:
    """Return the bytes of a token's hidden state. Raises: MismatchError: they are neither given nor known."""
    if given > 0:
        return given
    if spec.hidden_size <= 0:
        raise MismatchError(
            f"the hidden size of {spec.name} is unknown, and with it the bytes per token; give --set token_bytes=4096"
        )
    return spec.hidden_size * value_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Links as numbered queues.

    Attributes:
        names: display name of each queue.
        byte_s: seconds per byte of each queue.
        latency_s: latency of each queue, after the last byte is sent.
        queue_GG: queue from GPU to GPU; the diagonal is unused.
        distance_NN: seconds of one token between servers.
        even: whether all links between servers are equal.
    """

    names: list[str]
    byte_s: list[float]
    latency_s: list[float]
    queue_GG: list[list[int]]
    distance_NN: np.ndarray
    even: bool


def make_network(cluster: Cluster, bytes_per_token: int, links: str = "pair") -> Network:
    """Return the queues of a cluster.

    Args:
        links: `pair`: one link for each ordered pair of servers. `server`: one outgoing link per server, as if its
            network card were the limit.

    Raises:
        UsageError: neither of these, or `server` with unequal links.
    """
    if links not in LINKS:
        raise UsageError(f"--set links: found {links!r}, expected {' or '.join(LINKS)}")
    if links == "server" and cluster.links:
        raise UsageError("--set links=server needs equal links, but the cluster has [[links]]; leave it out")
    names: list[str] = []
    byte_s: list[float] = []
    latency_s: list[float] = []
    number: dict[tuple[int, ...], int] = {}
    num_servers, server_G = len(cluster.servers), cluster.server_G
    special = {frozenset(link.between) for link in cluster.links}
    distance_NN = np.zeros((num_servers, num_servers))

    def queue(key: tuple[int, ...], name: str, rate: float, latency: float) -> int:
        if key not in number:
            number[key] = len(names)
            names.append(name)
            byte_s.append(1.0 / rate)
            latency_s.append(latency)
        return number[key]

    between: dict[tuple[int, int], int] = {}
    for a in range(num_servers):
        for b in range(num_servers):
            if a == b:
                continue
            here, there = cluster.servers[a].name, cluster.servers[b].name
            known = bool(special) and frozenset((here, there)) in special
            rate, latency = cluster.link(a, b) if known else (cluster.link_bytes_s, cluster.link_latency_s)
            distance_NN[a, b] = latency + bytes_per_token / rate
            key, name = ((a, b), f"{here} -> {there}") if links == "pair" else ((a,), f"{here} -> others")
            between[a, b] = queue(key, name, rate, latency)
    queue_GG = []
    for g, a in enumerate(server_G):
        inside = queue((-1, g), f"{cluster.servers[a].name} inside, GPU {g}", cluster.servers[a].gpu_link_bytes_s, 0.0)
        queue_GG.append([inside if a == b else between[a, b] for b in server_G])
    return Network(
        names=names, byte_s=byte_s, latency_s=latency_s, queue_GG=queue_GG, distance_NN=distance_NN, even=not special
    )


def planning_latency(cluster: Cluster, call_s: float, bytes_per_token: int, name: str) -> Latency:
    """Return a simulated machine's costs for planners: straight lines through 0. Links cost their bytes only.

    Args:
        call_s: seconds of an expert call.
        name: origin of the costs.
    """
    rate_GG = [[cluster.link(a, b)[0] for b in cluster.server_G] for a in cluster.server_G]
    byte_s_GG = 1.0 / np.array(rate_GG)
    return linear_latency(cluster, max(call_s, 1e-12), byte_s_GG, float(bytes_per_token), name)
