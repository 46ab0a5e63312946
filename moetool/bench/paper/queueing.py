"""Requests that queue for servers of one request at a time, with the seconds that each takes known."""

from collections.abc import Sequence


def serve_in_turn(
    work: Sequence[tuple[float, int, float]], num_servers: int, *, redirect: bool = False
) -> list[tuple[int, float]]:
    """Serve requests first come, first served.

    Args:
        work: of each request when it arrives, at which server, and how long it takes there; in the order of arrival.
        redirect: a request goes to the server that is free first, ties to its own, then to the lower number.

    Returns:
        Of each request the server that it came to, and the seconds from its arrival to its end.
    """
    free = [0.0] * num_servers
    latencies = []
    for at_s, home, takes_s in work:
        chosen = home
        if redirect:
            chosen = min(range(num_servers), key=lambda n: (max(free[n], at_s), n != home, n))
        free[chosen] = max(free[chosen], at_s) + takes_s
        latencies.append((home, free[chosen] - at_s))
    return latencies


def mean_by_server(served: Sequence[tuple[int, float]]) -> list[float]:
    """Mean latency of the requests of each server that has any, by number, then of all."""
    servers = sorted({server for server, _ in served})
    groups = [[s for server, s in served if server == mine] for mine in servers] + [[s for _, s in served]]
    return [sum(group) / len(group) for group in groups]
