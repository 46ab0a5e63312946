"""Rank that a request's tokens start on, by a placement plan."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moetool.errors import unknown_name
from moetool.placement._demand import STARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Deals the requests of a batch to the ranks.

    A plan is made for requests of each server; here all come to one endpoint, so servers take turns. What does not fit
    into a batch waits for the next.

    Attributes:
        starts: `round_robin`: ranks take turns; `random`: a rank with a free seat, drawn by `seed` and the request's
            number; `first`: the first rank of each server, so that a batch has no more requests than those have seats.
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

    def deal(self, requests: Sequence[int], members: Sequence[int], seats: int) -> list[int]:
        """The GPU of each request, by their numbers in the order of the queue, for as many as a batch has room for.

        Args:
            members: the GPUs that are there.
            seats: on each.
        """
        ranks = self.ranks(members)
        numbers = requests[: seats * len(ranks)]
        if self.starts != "random":
            return [ranks[place % len(ranks)] for place in range(len(numbers))]
        free = dict.fromkeys(ranks, seats)
        dealt = []
        for number in numbers:
            open_to = [gpu for gpu, left in free.items() if left]
            gpu = open_to[int(np.random.default_rng([self.seed, number]).integers(len(open_to)))]
            free[gpu] -= 1
            dealt.append(gpu)
        return dealt
