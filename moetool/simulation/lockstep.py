"""Ranks in lockstep: the seconds of a step of expert parallelism, with a barrier in every layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moetool.base.types import Cluster, ModelSpec
from moetool.placement.replica_routing import destinations
from moetool.simulation.rank_seconds import RankSeconds, RankWork

EXCHANGES = ("rows", "gather")
MOST_COUNTERS = 1 << 22
"""Counters at once; layers of large clusters are counted in parts."""
_FEW = 16
"""Counters per key above which keys are sorted instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachines:
    """A model, the ranks that compute it, and the links between them.

    Attributes:
        token_bytes: bytes of a token's hidden state.
        exchange: `rows`: a token goes to a rank once for each of its experts there (DIRECTOR, Eq. 3, and `serve --mode
            ep`); `gather`: every token goes to every rank, and partial sums return (vLLM's default).
    """

    spec: ModelSpec
    cluster: Cluster
    seconds: RankSeconds
    token_bytes: int
    exchange: str = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step, each layer's slowest rank counted.

    Attributes:
        dense: layers without their experts, and the parts outside the layers.
        experts: routed experts.
        exchange: all-to-alls, both ways.
    """

    dense: float
    experts: float
    exchange: float

    @property
    def computing(self) -> float:
        """Return the seconds in which no rank sends."""
        return self.dense + self.experts


class LockstepRanks:
    """Ranks that go through the layers together.

    Each layer: dense part; barrier; dispatch; experts; barrier; combine. Rows of all requests for an expert on a rank
    are one product, so its weights are read once a rank and step. A rank's messages follow each other in rounds, one
    peer after the other, and the slowest rank ends the exchange (DIRECTOR, Eqs. 2 and 4).

    Args:
        placed_GLE: initial placement.

    Attributes:
        busy_G: compute seconds of each rank.
        rows_GL: rows of experts computed by each rank in each layer.
        sent_GG: bytes from rank to rank, both ways of the exchange.
        calls, local_calls: rows of experts, and those computed on the server of their token.

    Source: DIRECTOR § II-B, § VI-A. Deviations: as `moetool.placement.latency.Latency` (`sides="both"`): a rank's
    exchange takes as long as the larger of sending and receiving, and the combine as long as the dispatch. Not
    modelled: the exchange of counts, and micro-batches that overlap compute and exchange. Each GPU has its own
    network card: it sends to another server at the link's full rate, whatever the other GPUs of its server send.
    """

    def __init__(self, machines: RankMachines, placed_GLE: np.ndarray) -> None:
        self._machines = machines
        spec, cluster = machines.spec, machines.cluster
        num_ranks = len(cluster.gpus)
        self._slow_G = 1.0 / np.array([gpu.speed for gpu in cluster.gpus])
        self._server_G = np.array(cluster.server_G)
        rates = [[cluster.link(a, b) for b in range(len(cluster.servers))] for a in range(len(cluster.servers))]
        self._byte_s_NN = np.array([[1.0 / rate for rate, _ in row] for row in rates])
        self._latency_NN = np.array([[latency for _, latency in row] for row in rates])
        self._layer_S = np.repeat(np.arange(spec.num_layers), spec.top_k_L)
        self.busy_G = np.zeros(num_ranks)
        self.rows_GL = np.zeros((num_ranks, spec.num_layers), np.int64)
        self.sent_GG = np.zeros((num_ranks, num_ranks))
        self.calls = self.local_calls = 0
        self.place(placed_GLE)

    def place(self, placed_GLE: np.ndarray) -> None:
        """Switch to another placement before the next step."""
        self._to_GLE = destinations(placed_GLE, self._machines.cluster.server_G).astype(np.int32)

    def step(self, gpu_T: np.ndarray, rows_TS: np.ndarray, work_G: Sequence[RankWork]) -> StepSeconds:
        """Compute a step.

        Args:
            gpu_T: rank on which each token starts.
            rows_TS: its experts, layer-major.
            work_G: the same tokens, by rank.
        """
        costs, slow_G = self._machines.seconds, self._slow_G
        num_layers = self._machines.spec.num_layers
        each = {work: (costs.dense(work), costs.once(work)) for work in set(work_G)}
        dense_G = np.array([each[work][0] for work in work_G]) * slow_G
        once_G = np.array([each[work][1] for work in work_G]) * slow_G
        self.busy_G += num_layers * dense_G + once_G
        expert_s = exchange_s = 0.0
        for layers in self._parts(len(gpu_T)):
            to_TS = self._to_GLE[gpu_T[:, None], self._layer_S[layers], rows_TS[:, layers]]
            expert_s += self._experts(layers, to_TS, rows_TS[:, layers])
            exchange_s += self._exchange(layers, gpu_T, to_TS)
        return StepSeconds(
            dense=num_layers * float(dense_G.max()) + float(once_G.max()), experts=expert_s, exchange=exchange_s
        )

    def _parts(self, num_tokens: int) -> Iterator[slice]:
        """Yield columns of whole layers."""
        spec, num_ranks = self._machines.spec, len(self._slow_G)
        keys, counters = num_tokens * max(spec.top_k_L), num_ranks * max(num_ranks, spec.num_experts)
        most = max(1, MOST_COUNTERS // max(keys, min(counters, _FEW * keys)))
        ends = np.concatenate([[0], np.cumsum(spec.top_k_L)])
        for first in range(0, spec.num_layers, most):
            yield slice(int(ends[first]), int(ends[min(spec.num_layers, first + most)]))

    def _experts(self, layers: slice, to_TS: np.ndarray, rows_TS: np.ndarray) -> float:
        """Return the seconds of the slowest rank, summed over the layers."""
        num_ranks, num_experts = len(self._slow_G), self._machines.spec.num_experts
        first = int(self._layer_S[layers.start])
        num_layers = int(self._layer_S[layers.stop - 1]) + 1 - first
        at_S = self._layer_S[layers] - first
        keys_TS = (at_S * num_ranks + to_TS) * num_experts + rows_TS
        used_X, rows_X = _count(keys_TS, num_layers * num_ranks * num_experts)
        rank_X = used_X // num_experts  # of every layer
        taken = self._machines.seconds.experts(rows_X, rank_X, num_layers * num_ranks)
        taken_LG = taken.reshape(num_layers, num_ranks) * self._slow_G
        self.busy_G += taken_LG.sum(axis=0)
        rows_LG = np.bincount(rank_X, rows_X, num_layers * num_ranks).reshape(num_layers, num_ranks)
        self.rows_GL[:, first : first + num_layers] += rows_LG.T.astype(np.int64)
        return float(taken_LG.max(axis=1).sum())

    def _exchange(self, layers: slice, gpu_T: np.ndarray, to_TS: np.ndarray) -> float:
        """Return the seconds of dispatch and combine of the slowest rank, summed over the layers."""
        num_ranks = len(self._slow_G)
        at_S = self._layer_S[layers] - self._layer_S[layers.start]
        num_layers = int(at_S[-1]) + 1
        keys_TS = (at_S * num_ranks + gpu_T[:, None]) * num_ranks + to_TS
        used_X, tokens_X = _count(keys_TS, num_layers * num_ranks**2)
        layer_X, from_X, to_X = used_X // num_ranks**2, used_X // num_ranks % num_ranks, used_X % num_ranks
        same_X = self._server_G[from_X] == self._server_G[to_X]
        self.calls += int(tokens_X.sum())
        self.local_calls += int(tokens_X[same_X].sum())
        if self._machines.exchange == "gather":
            tokens_G = np.bincount(gpu_T, minlength=num_ranks)
            pairs_GG = np.repeat(tokens_G[:, None], num_ranks, axis=1)
            layer_X, from_X, to_X = np.nonzero(np.broadcast_to(pairs_GG, (num_layers, num_ranks, num_ranks)))
            tokens_X = pairs_GG[from_X, to_X]
        away = from_X != to_X
        layer_X, from_X, to_X = layer_X[away], from_X[away], to_X[away]
        bytes_X = tokens_X[away] * self._machines.token_bytes
        server_X, other_X = self._server_G[from_X], self._server_G[to_X]
        taken_X = self._latency_NN[server_X, other_X] + bytes_X * self._byte_s_NN[server_X, other_X]
        slowest_L = np.zeros(num_layers)
        for end_X in (from_X, to_X):
            ends = np.bincount(layer_X * num_ranks + end_X, taken_X, num_layers * num_ranks)
            slowest_L = np.maximum(slowest_L, ends.reshape(num_layers, num_ranks).max(axis=1))
        np.add.at(self.sent_GG, (from_X, to_X), bytes_X)
        np.add.at(self.sent_GG, (to_X, from_X), bytes_X)
        return 2.0 * float(slowest_L.sum())


def _count(keys_TS: np.ndarray, num_counters: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys that occur, ascending, and how often."""
    if _FEW * keys_TS.size < num_counters:
        return np.unique(keys_TS, return_counts=True)
    counts_X = np.bincount(keys_TS.ravel(), minlength=num_counters)
    used_X = np.flatnonzero(counts_X)
    return used_X, counts_X[used_X]
