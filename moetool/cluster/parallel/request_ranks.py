"""Rank that a request's tokens start on, by a placement plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moetool.errors import unknown_name
from moetool.placement._demand import STARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Deals requests to the ranks.

    A plan is made for requests of each server; here all come to one endpoint, so servers take turns. A request that
    finds no free seat waits for one.

    Attributes:
        starts: `round_robin`: ranks take turns, those with the most free seats first; `random`: a rank with a free
            seat, drawn by `seed` and the request's number; `first`: the first rank of each server, so that no more
            requests run than those have seats.
        server_G: the server of each GPU.

    Raises:
        UsageError: another way to start.
    """

    server_G: tuple[int, ...]
    starts: str = "round_robin"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.starts not in STARTS:
            raise unknown_name("--set starts", self.starts, STARTS)

    def ranks(self, members: Sequence[int]) -> list[int]:
        """The GPUs among those that are there on which requests start."""
        if self.starts != "first":
            return list(members)
        first: dict[int, int] = {}
        for gpu in members:
            first.setdefault(self.server_G[gpu], gpu)
        return list(first.values())

    def deal(
        self, requests: Sequence[int], members: Sequence[int], seats: int, taken: Mapping[int, int] | None = None
    ) -> list[int]:
        """The GPU of each request, by their numbers in the order of the queue, for as many as there are free seats.

        Args:
            members: the GPUs that are there.
            seats: on each.
            taken: seats in use, by GPU (default: none).
        """
        free = {gpu: seats - (taken or {}).get(gpu, 0) for gpu in self.ranks(members)}
        dealt: list[int] = []
        for number in requests:
            open_to = [gpu for gpu, left in free.items() if left > 0]
            if not open_to:
                break
            if self.starts == "random":
                gpu = open_to[int(np.random.default_rng([self.seed, number]).integers(len(open_to)))]
            else:
                gpu = max(open_to, key=lambda gpu: free[gpu])  # the first of those with the most free seats
            free[gpu] -= 1
            dealt.append(gpu)
        return dealt
