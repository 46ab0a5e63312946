"""Results of a simulation: latencies, local compute share, utilization, bytes by link, migrations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from moetool.base.types import Cluster
from moetool.placement.replacement_record import ReplacementRecord
from moetool.simulation.event_loop import EventLoop
from moetool.simulation.lockstep_serving import LockstepServing
from moetool.simulation.workload import SimulatedRequest

PERCENTILES = (50, 90, 95, 99)
_MIGRATION = (
    *("at_s", "calls_before", "calls_after", "saved_s", "cost_s", "printed_s", "worth_it", "made", "copies", "bytes"),
    *("plan_s", "waited_s", "done_s"),
)
"""Fields of `ReplacementRecord` in JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """One request, in seconds since the simulation's start.

    Attributes:
        first_s: time of its first token.
    """

    server: str
    gpu: int
    prompt_tokens: int
    new_tokens: int
    arrived_s: float
    started_s: float
    first_s: float
    finished_s: float

    @property
    def latency_s(self) -> float:
        """Return seconds from arrival to the last token, waiting included."""
        return self.finished_s - self.arrived_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Expert calls from the previous window to `until_s`.

    Attributes:
        local: local compute share; None without calls.
    """

    until_s: float
    calls: int
    local: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """One run of the simulator.

    Attributes:
        costs: origin of compute seconds.
        served: requests, in the order of arrival.
        local: local compute share: expert calls computed by the request's own server.
        windows: local compute share over time.
        utilisation_G: compute share of each GPU's time until the last request's end.
        links: name, bytes and busy share of the time of each used link.
        migrations: decisions that proposed moves or delayed a round.
        seconds: end of the last request.
    """

    mode: str
    seed: int
    costs: str
    served: tuple[ServedRequest, ...]
    local: float
    windows: tuple[Window, ...]
    utilisation_G: tuple[float, ...]
    links: tuple[tuple[str, int, float], ...]
    migrations: tuple[ReplacementRecord, ...]
    seconds: float

    @property
    def mean_s(self) -> float:
        """Return the mean latency."""
        return sum(one.latency_s for one in self.served) / len(self.served)

    @property
    def mean_wait_s(self) -> float:
        """Return the mean time between arrival and start."""
        return sum(one.started_s - one.arrived_s for one in self.served) / len(self.served)

    @property
    def mean_first_s(self) -> float:
        """Return the mean time to the first token, from arrival."""
        return sum(one.first_s - one.arrived_s for one in self.served) / len(self.served)

    @property
    def tokens_per_s(self) -> float:
        """Return tokens of prompts and replies per second of the whole run."""
        return sum(one.prompt_tokens + one.new_tokens for one in self.served) / self.seconds if self.seconds else 0.0

    @property
    def latencies_s(self) -> list[float]:
        """Return the latencies, ascending."""
        return sorted(one.latency_s for one in self.served)

    @property
    def mean_by_server(self) -> dict[str, float]:
        """Return the mean latency of each server's requests."""
        found: dict[str, list[float]] = {}
        for one in self.served:
            found.setdefault(one.server, []).append(one.latency_s)
        return {name: sum(values) / len(values) for name, values in sorted(found.items())}

    @property
    def sent_bytes(self) -> int:
        """Return the bytes of all links."""
        return sum(sent for _, sent, _ in self.links)

    def to_json(self, requests: bool = True) -> dict[str, Any]:
        """Return a JSON object.

        Args:
            requests: whether to include every request, as lists.
        """
        values: dict[str, Any] = {
            "planner": self.mode,
            "seed": self.seed,
            "costs": self.costs,
            "requests": len(self.served),
            "seconds": self.seconds,
            "latency_s": {
                "mean": self.mean_s,
                **{f"p{p}": percentile(self.latencies_s, p) for p in PERCENTILES},
                "by_server": self.mean_by_server,
            },
            "mean_wait_s": self.mean_wait_s,
            "mean_first_token_s": self.mean_first_s,
            "tokens_per_s": self.tokens_per_s,
            "local": self.local,
            "local_over_time": [[one.until_s, one.calls, one.local] for one in self.windows],
            "utilisation_G": list(self.utilisation_G),
            "links": [{"link": name, "bytes": sent, "busy": busy} for name, sent, busy in self.links],
            "migrations": [{name: getattr(one, name) for name in _MIGRATION} for one in self.migrations],
        }
        if requests:
            names = ("server", "gpu", "prompt_tokens", "new_tokens", "arrived_s", "started_s", "first_s", "finished_s")
            values["served"] = {name: [getattr(one, name) for one in self.served] for name in names}
        return values


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return the percentile by nearest rank."""
    return ascending[max(0, math.ceil(percent / 100 * len(ascending)) - 1)]


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half of its 95 % confidence interval by Student's t; no interval for a single value."""
    count = len(values)
    if count < 2:
        return float(values[0]), None
    from scipy.special import stdtrit

    return float(np.mean(values)), float(stdtrit(count - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(count)


def collect(engine: EventLoop, mode: str, seed: int, migrations: Sequence[ReplacementRecord]) -> Simulated:
    seconds = max(request.finished_s for request in engine.finished)
    byte_s = engine.network.byte_s
    return Simulated(
        mode=mode,
        seed=seed,
        costs=engine.computing.name,
        served=_served(engine.cluster, engine.finished),
        local=engine.local_calls / engine.calls,
        windows=_windows([*engine.windows, (seconds, engine.calls, engine.local_calls)]),
        utilisation_G=tuple(busy / seconds for busy in engine.busy_G),
        links=tuple(
            (name, sent, sent * each / seconds)
            for name, sent, each in zip(engine.network.names, engine.sent_Q, byte_s, strict=True)
            if sent
        ),
        migrations=tuple(migrations),
        seconds=seconds,
    )


def collect_ranks(serving: LockstepServing, mode: str, seed: int) -> Simulated:
    """Collect the results of ranks in lockstep that have served all requests.

    Links are those of pairs of servers: as many as the smaller server's GPUs, each of the link's rate.
    """
    cluster, ranks = serving.machines.cluster, serving.ranks
    seconds = max(request.finished_s for request in serving.finished)
    server_G, names = np.array(cluster.server_G), [server.name for server in cluster.servers]
    sent_NN = np.zeros((len(names), len(names)))
    for bytes_GG in (ranks.sent_GG, serving.moved_GG):
        np.add.at(sent_NN, (server_G[:, None], server_G[None, :]), bytes_GG)
    links = []
    for a, b in np.argwhere(sent_NN).tolist():
        sent, rate = int(sent_NN[a, b]), cluster.link(a, b)[0]
        at_once = min(len(cluster.servers[n].gpus) for n in (a, b))
        name = f"{names[a]} inside" if a == b else f"{names[a]} -> {names[b]}"
        links.append((name, sent, sent / rate / at_once / seconds))
    return Simulated(
        mode=mode,
        seed=seed,
        costs=serving.machines.seconds.name,
        served=_served(cluster, serving.finished),
        local=ranks.local_calls / ranks.calls,
        windows=_windows([*serving.windows, (seconds, ranks.calls, ranks.local_calls)]),
        utilisation_G=tuple((ranks.busy_G / seconds).tolist()),
        links=tuple(links),
        migrations=tuple(serving.decisions.records),
        seconds=seconds,
    )


def _served(cluster: Cluster, finished: Sequence[SimulatedRequest]) -> tuple[ServedRequest, ...]:
    names = [cluster.servers[n].name for n in cluster.server_G]
    return tuple(
        ServedRequest(
            server=names[request.gpu],
            gpu=request.gpu,
            prompt_tokens=request.route.prompt_tokens,
            new_tokens=request.route.new_tokens,
            **{name: getattr(request, name) for name in ("arrived_s", "started_s", "first_s", "finished_s")},
        )
        for request in sorted(finished, key=lambda request: request.number)
    )


def _windows(cuts: Sequence[tuple[float, int, int]]) -> tuple[Window, ...]:
    """Return windows from cumulative (seconds, calls, local calls)."""
    windows = []
    for (_, calls, local), (until_s, more, more_local) in pairwise([(0.0, 0, 0), *cuts]):
        share = (more_local - local) / (more - calls) if more > calls else None
        windows.append(Window(until_s=until_s, calls=more - calls, local=share))
    return tuple(windows)
