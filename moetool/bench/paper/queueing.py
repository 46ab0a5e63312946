"""Queueing of requests at servers with one request at a time."""

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def serve_in_turn(
    work: Sequence[tuple[float, int, Item]],
    num_servers: int,
    serve: Callable[[int, Item], float],
    *,
    redirect: bool = False,
) -> list[tuple[int, float]]:
    """Serve requests first come, first served.

    Args:
        work: arrival time, server and item of each request, in order of arrival.
        serve: seconds that a server takes for an item, after those that it served before.
        redirect: a request goes to the first free server; its own, then the lowest number, on ties.

    Returns:
        Each request's server and latency in seconds.
    """
    free = [0.0] * num_servers
    latencies = []
    for at_s, home, item in work:
        chosen = home
        if redirect:
            chosen = min(range(num_servers), key=lambda n: (max(free[n], at_s), n != home, n))
        free[chosen] = max(free[chosen], at_s) + serve(chosen, item)
        latencies.append((home, free[chosen] - at_s))
    return latencies


def mean_by_server(served: Sequence[tuple[int, float]]) -> list[float]:
    """Mean latency per server with requests, by number, then over all."""
    servers = sorted({server for server, _ in served})
    groups = [[s for server, s in served if server == mine] for mine in servers] + [[s for _, s in served]]
    return [sum(group) / len(group) for group in groups]
