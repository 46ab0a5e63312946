"""Recent load and costs of a cluster, from its workers' counters; the caller gives the time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from moetool.base.errors import MismatchError
from moetool.base.types import Cluster, Link, ModelSpec
from moetool.base.validation import require, require_number
from moetool.cluster.edge.protocol import ArrivedExpert, WorkerStats
from moetool.placement.latency import Latency, linear_latency, unit_latency

_FOLDS = 4
_TRACE = 1e-6
_OLDER_MOVES, _STALE_MOVES = 0.8, 0.1
_OVERRUN = 0.5, 4.0
_FORGOTTEN = 0.9  # exponent: 20 decisions take 4 to 1.2
_MOST = 1e18
"""Largest tokens, bytes or seconds in a state, so that sums and products stay finite."""


class Statistics:
    """Live statistics of each server, in the form of a plan's inputs.

    Routes and calls are summed since the last change of placement and decay with `half_life_s`. Time is split into
    blocks, and the routes of every fourth block are held out to judge a placement made from the others. On its own
    tokens any placement looks better than the current one. Blocks must be longer than requests, which would otherwise
    be on both sides.

    Args:
        num_servers: numbered as in the plan's cluster.
        half_life_s: half-life of counts; 0: no decay.
        block_s: length of a block.
        compute_s: window of compute time, after which it replaces the previous value.

    Attributes:
        since_s: time of the last change of placement, or of the first report.

    Source: Prism § IV-A: averages of all executions since the last change of placement, and load-dependent compute
    time, renewed every 30 seconds. Deviation: old tokens decay, because plain averages detect a change of requests
    later the longer a placement lasts (their Fig. 7 needs two migrations for one change).
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_servers: int,
        *,
        half_life_s: float = 300.0,
        block_s: float = 75.0,
        compute_s: float = 30.0,
    ) -> None:
        self.spec = spec
        self.since_s: float | None = None
        self._half_life_s, self._block_s, self._compute_s = half_life_s, block_s, compute_s
        shape = (_FOLDS, num_servers, spec.num_layers, spec.num_experts)
        self._tokens_FNLE = np.zeros(shape)
        self._seconds = 0.0
        self._decayed_s: float | None = None
        self._restored = False
        self._call = np.zeros(2)  # seconds, pairs
        self._call_s: float | None = None
        self._computed_N = np.zeros((num_servers, 3))  # seconds, pairs, since when
        self._expert_s_N = np.full(num_servers, np.nan)
        self._moved_NN = np.zeros((num_servers, num_servers, 2))  # bytes, seconds
        self._fresh: set[frozenset[int]] = set()
        self._rounds = np.zeros(2)  # seconds of migrations besides transfer, rounds
        self._overrun = 1.0  # seconds of migrations' transfers by their estimate

    def add(self, stats: WorkerStats, now_s: float) -> None:
        """Count a worker's report. Raises: MismatchError: it is of another model."""
        n = stats.server
        if stats.tokens_LE.shape != self._tokens_FNLE.shape[2:]:
            raise MismatchError(
                f"server {n} counts {stats.tokens_LE.shape} experts, expected {self._tokens_FNLE.shape[2:]} of "
                f"{self.spec.name}; start it with the plan's model"
            )
        self._decay(now_s)
        self._tokens_FNLE[int(now_s // self._block_s) % _FOLDS, n] += stats.tokens_LE
        self._call += (sum(stats.call_s.values()), sum(stats.call_pairs.values()))
        if stats.expert_pairs:
            self._computed_N[n, :2] += (stats.expert_s, stats.expert_pairs)
        seconds, pairs, began_s = self._computed_N[n]
        if pairs and (np.isnan(self._expert_s_N[n]) or now_s - began_s >= self._compute_s):
            self._expert_s_N[n] = seconds / pairs
            self._computed_N[n] = (0.0, 0.0, now_s)

    def moved(self, server: int, moved: ArrivedExpert) -> None:
        """Count an expert copied to a server, in a migration or a trial.

        Later ones weigh more, and those before `measure_again` little.
        """
        if moved.source >= 0 and moved.seconds > 0:
            if frozenset((moved.source, server)) not in self._fresh:
                self._moved_NN[[moved.source, server], [server, moved.source]] *= _STALE_MOVES
            self._moved_NN[moved.source, server] *= _OLDER_MOVES
            self._moved_NN[moved.source, server] += (moved.bytes, moved.seconds)
            self._fresh.add(frozenset((moved.source, server)))

    @property
    def moved_between(self) -> frozenset[frozenset[int]]:
        """Pairs of servers whose transfers were measured since `measure_again`."""
        return frozenset(self._fresh)

    def measure_again(self) -> None:
        """Let the next decision time every link that no migration uses until then: load changes their rates."""
        self._fresh.clear()

    def migrated(self, rounds: int, beside_s: float) -> None:
        """Count a migration, or a trial, and its seconds without transfer time; later ones weigh more."""
        self._rounds = _OLDER_MOVES * self._rounds + (beside_s, rounds)

    def overran(self, times: float) -> None:
        """Count a migration whose copies took this many times the estimate: beside other load, trials are too short."""
        self._overrun = float(np.clip(self._overrun * times, *_OVERRUN))

    def stayed(self) -> None:
        """Count a decision without a migration: load that made the last one slow may be over, or none would follow."""
        self._overrun **= _FORGOTTEN

    @property
    def round_s(self) -> float:
        """Seconds of a round of a migration besides transfer: informing all servers, and waiting for computations."""
        seconds, count = self._rounds
        return max(0.0, float(seconds / count)) if count else 0.0

    def changed(self, now_s: float) -> None:
        """Start over with a new placement. The time of a call is kept until it is measured again."""
        self._call_s = self.call_s
        self._tokens_FNLE[:] = 0.0
        self._call[:] = 0.0
        self._seconds = 0.0
        self._decayed_s = self.since_s = now_s

    @property
    def tokens_NLE(self) -> np.ndarray:
        """(token, expert) pairs of each server's own users, decayed."""
        return self._tokens_FNLE.sum(axis=0)

    @property
    def tokens_s(self) -> float:
        """Tokens per second of the whole cluster."""
        if self._seconds <= 0:
            return 0.0
        return float(self._tokens_FNLE.sum()) / sum(self.spec.top_k_L) / self._seconds

    @property
    def expert_s(self) -> float | None:
        """Seconds of computing one (token, expert) pair, the mean over servers; None: not measured yet."""
        return None if np.isnan(self._expert_s_N).all() else float(np.nanmean(self._expert_s_N))

    def latency(self, cluster: Cluster, servers: Sequence[int]) -> Latency:
        """Measured costs of computing a pair on each server and of calling another, as `call_s`.

        Args:
            cluster: some servers, one GPU each.
            servers: their numbers.
        """
        mean_s, own_s_N = self.expert_s, self._expert_s_N[list(servers)]
        if mean_s is None or self.call_s is None:
            return unit_latency(cluster)
        own_s_N = np.where(own_s_N > 0, own_s_N, mean_s)  # false for NaN
        speed_G = tuple((mean_s / own_s_N if mean_s else np.ones(len(servers))).tolist())
        linear = linear_latency(cluster, mean_s, self.call_s / 2, 1.0, "measured")  # dispatch and combine
        return replace(linear, speed_G=speed_G)

    @property
    def call_s(self) -> float | None:
        """Extra seconds of a pair because another server computes it; None: not measured yet.

        From sending to the answer, without compute time, which local pairs need too. A call carries all pairs of a
        layer and destination; they share its seconds. Parallel calls and overlapping computation are not subtracted: it
        is an upper bound of a user's wait.
        """
        seconds, pairs = self._call
        if not pairs:
            return self._call_s
        return max(0.0, float(seconds / pairs) - (self.expert_s or 0.0))

    def tokens_of(self, servers: Sequence[int]) -> np.ndarray:
        """`tokens_NLE` of some servers, without residues of decayed tokens."""
        return _clean(self.tokens_NLE[list(servers)])

    def folds(self, servers: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """`tokens_of`, split into blocks for planning and held-out blocks for judging.

        Every token is in one held-out part. Empty while all tokens came in one block.
        """
        chosen, every_NLE = list(servers), self.tokens_NLE
        parted = [(_clean((every_NLE - fold_NLE)[chosen]), _clean(fold_NLE[chosen])) for fold_NLE in self._tokens_FNLE]
        return [(made_NLE, judge_NLE) for made_NLE, judge_NLE in parted if made_NLE.any() and judge_NLE.any()]

    def measured(self, cluster: Cluster) -> Cluster:
        """The cluster with link rates measured by expert transfers where known, both directions together."""
        links = {frozenset(link.between): link for link in cluster.links}
        for a in range(len(cluster.servers)):
            for b in range(a):
                size, seconds = self._moved_NN[a, b] + self._moved_NN[b, a]
                if size > 0 and seconds > 0:
                    names = cluster.servers[a].name, cluster.servers[b].name
                    # The rate includes the latency.
                    links[frozenset(names)] = Link(between=names, bytes_s=float(size / seconds / self._overrun))
        return replace(cluster, links=tuple(links.values()))

    def to_json(self) -> dict[str, Any]:
        """State for `restore`."""
        return {
            "since_s": self.since_s,
            "decayed_s": self._decayed_s,
            "seconds": self._seconds,
            "tokens": np.round(self._tokens_FNLE, 3).tolist(),
            "call": self._call.tolist(),
            "call_s": self._call_s,
            "expert_s": [None if np.isnan(value) else float(value) for value in self._expert_s_N],
            "moved": self._moved_NN.tolist(),
            "rounds": self._rounds.tolist(),
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore a state of `to_json`. Raises: MismatchError: it is damaged, or of another model or cluster."""
        num_servers = len(self._expert_s_N)
        tokens_FNLE, moved_NN = np.array(values["tokens"], float), np.array(values["moved"], float)
        if tokens_FNLE.shape != self._tokens_FNLE.shape or moved_NN.shape != self._moved_NN.shape:
            raise MismatchError(
                f"the scheduler's state is of {tokens_FNLE.shape[1:]} (server, layer, expert), expected "
                f"{self._tokens_FNLE.shape[1:]}; remove it or give another file"
            )
        call = np.array(values["call"], float)
        rounds = np.array(values["rounds"], float)
        plausible = rounds.shape == (2,) and bool((np.abs(rounds) <= _MOST).all()) and rounds[1] >= 0
        require(plausible, "statistics.rounds", rounds, "seconds and rounds")
        expert_s_N = np.array([np.nan if value is None else value for value in values["expert_s"]], float)
        require(call.shape == (2,), "statistics.call", call.shape, "seconds and pairs")
        require(expert_s_N.shape == (num_servers,), "statistics.expert_s", expert_s_N.shape, f"{num_servers} servers")
        for name, counts in {"tokens": tokens_FNLE, "moved": moved_NN, "call": call}.items():
            plausible = bool(((counts >= 0) & (counts <= _MOST)).all())  # false for NaN
            require(plausible, f"statistics.{name}", counts, "amounts")
        for name in ("since_s", "decayed_s", "call_s"):
            if values[name] is not None:
                require_number(f"statistics.{name}", values[name], most=_MOST)
        require_number("statistics.seconds", values["seconds"], most=_MOST)
        for value in expert_s_N[~np.isnan(expert_s_N)]:
            require_number("statistics.expert_s", float(value), most=_MOST)
        self._tokens_FNLE, self._moved_NN = tokens_FNLE, moved_NN
        self._call, self._expert_s_N, self._rounds = call, expert_s_N, rounds
        self._call_s = values["call_s"]
        self.since_s, self._decayed_s = values["since_s"], values["decayed_s"]
        self._seconds, self._restored = float(values["seconds"]), True

    def _decay(self, now_s: float) -> None:
        if self._decayed_s is None:
            self._decayed_s = self.since_s = now_s
            self._computed_N[:, 2] = now_s
        passed_s = max(0.0, now_s - self._decayed_s)
        counted_s, self._restored = 0.0 if self._restored else passed_s, False  # first report after a restore
        kept = 0.5 ** (passed_s / self._half_life_s) if self._half_life_s else 1.0
        self._tokens_FNLE *= kept
        self._seconds = self._seconds * kept + counted_s
        self._call *= kept
        self._decayed_s = max(now_s, self._decayed_s)


def _clean(tokens_NLE: np.ndarray) -> np.ndarray:
    """Drop residues of cancelled or decayed sums."""
    return np.where(tokens_NLE > _TRACE, tokens_NLE, 0.0)
