"""Simulations over a grid of GPUs, links, arrivals, modes and seeds."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from moetool.base.config import parse_bytes
from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import Cluster, Server
from moetool.placement.demand import one_model
from moetool.simulation.simulate import SimulationInputs, read_world, simulate
from moetool.simulation.simulation_options import SimulationOptions
from moetool.simulation.simulation_results import Simulated
from moetool.trace.reader import Trace

SWEEPS = ("gpus", "bandwidth", "gap", "planner", "seed", "lookahead", "migrate")


def parse_sweeps(given: Sequence[str]) -> dict[str, list[str]]:
    """Parse sweeps into lists.

    Examples: `gpus=4,16`, `bandwidth=100Mbps,62.5MB`, `gap=8s,15s`, `planner=uniform,prism`, `seed=0,1`,
    `lookahead=true,predicted`, `migrate=free,overlap`.

    Raises:
        UsageError: a sweep has an unknown name or no values.
    """
    swept: dict[str, list[str]] = {}
    for text in given:
        name, _, values = text.partition("=")
        if name not in SWEEPS:
            raise unknown_name("--sweep", name, SWEEPS)
        swept[name] = [value for value in values.split(",") if value]
        if not swept[name]:
            raise UsageError(f"--sweep {text!r} has no value; write {name}=A,B")
    return swept


def sweep(
    traces: Mapping[str, Trace],
    cluster: Cluster,
    swept: Mapping[str, Sequence[str]],
    planner: str,
    arrivals: str,
    requests: int,
    options: SimulationOptions | None = None,
    history: Mapping[str, Trace] | None = None,
    **more: Any,
) -> list[tuple[dict[str, str], Simulated]]:
    """Run each combination of the swept values; other settings are fixed.

    `gpus` resizes the cluster by copies of its servers in turn. Copies of a server have as many requests as it, from
    the same trace: arrivals are per server, so requests grow with the GPUs.

    Args:
        history: traces by server for the first placement (default: the past of `traces`).
        more: arguments of `simulate`.

    Raises:
        UsageError: a value is invalid; else as `simulate`.
    """
    one_model(traces, cluster)  # before traces of servers that the cluster lacks are left out
    options = options or SimulationOptions()
    names, runs = list(swept), []
    worlds: dict[tuple[str | None, str | None], SimulationInputs] = {}
    for values in product(*(swept[name] for name in names)):
        at = dict(zip(names, values, strict=True))
        key = at.get("gpus"), at.get("seed")
        chosen = replace(
            options,
            lookahead=at.get("lookahead", options.lookahead),
            migrate=at.get("migrate", options.migrate),
            seed=_whole("seed", at["seed"]) if "seed" in at else options.seed,
        )
        if key not in worlds:
            scaled = cluster if "gpus" not in at else resize(cluster, _whole("gpus", at["gpus"]))
            predictor = more["inputs"].predictor if more.get("inputs") else None
            worlds[key] = read_world(_by_copy(traces, scaled), scaled, chosen, predictor)
            if history is not None:
                past = read_world(_by_copy(history, scaled), scaled, chosen).history
                worlds[key] = replace(worlds[key], history=past)
        world = worlds[key]
        if "bandwidth" in at:
            rate = _rate(at["bandwidth"])
            machines = replace(
                world.cluster,
                link_bytes_s=rate,
                links=tuple(replace(link, bytes_s=rate) for link in world.cluster.links),
            )
            world = replace(world, cluster=machines, history=replace(world.history, cluster=machines))
        gap = arrivals if "gap" not in at else f"{arrivals.partition(':')[0]}:{at['gap']}"
        count = requests * len(world.sources) // max(1, len(traces))
        runs.append((at, simulate(world, at.get("planner", planner), gap, count, chosen, **more)))
    return runs


def _by_copy(traces: Mapping[str, Trace], cluster: Cluster) -> dict[str, Trace]:
    """Return each server's trace; copies of a server share one."""
    originals = {server.name: server.name.partition("#")[0] for server in cluster.servers}
    return {name: traces[original] for name, original in originals.items() if original in traces}


def resize(cluster: Cluster, num_gpus: int) -> Cluster:
    """Return a cluster of this many GPUs: its servers in turn, copies numbered; the last may have fewer GPUs.

    Raises:
        UsageError: the cluster has [[links]] between servers, which copies would lack.
    """
    if cluster.links:
        raise UsageError("--sweep gpus copies servers, and the cluster has [[links]] between some; leave those out")
    servers: list[Server] = []
    left, turn = num_gpus, 0
    while left > 0:
        server, copy = cluster.servers[turn % len(cluster.servers)], turn // len(cluster.servers)
        gpus = server.gpus[:left]
        servers.append(replace(server, name=f"{server.name}#{copy}" if copy else server.name, gpus=gpus))
        left -= len(gpus)
        turn += 1
    return replace(cluster, servers=tuple(servers))


def _whole(name: str, text: str) -> int:
    least = int(name == "gpus")
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"--sweep {name}: found {text!r}, expected a whole number, {least} or more")
    return int(text)


def _rate(text: str) -> float:
    """Parse bytes per second from `500Mbps`, `1Gbps` or an amount of bytes."""
    bits = next((bits for unit, bits in _BITS.items() if text.lower().endswith(unit)), None)
    with contextlib.suppress(UsageError, ValueError):
        rate = float(parse_bytes(text)) if bits is None else float(text[:-4]) * bits / 8
        if 0 < rate < float("inf"):
            return rate
    raise UsageError(f"--sweep bandwidth: found {text!r}, expected a rate such as 500Mbps or 62.5MB")


_BITS = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}
