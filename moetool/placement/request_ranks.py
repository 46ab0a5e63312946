"""Choice of the rank on which a request's tokens start."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moetool.base.errors import unknown_name
from moetool.placement.demand import STARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """Assigns requests to ranks.

    A plan has its requests by server, but all requests come to one endpoint, so the servers take turns. A request waits
    until a seat is free.

    Attributes:
        server_G: the server of each GPU.
        starts: `round_robin`: ranks take turns, those with the most free seats first; `random`: a rank with a free
            seat, drawn by `seed` and the request's number; `first`: the first rank of each server, whose seats limit
            the number of running requests.
        seed: seed of `random`.

    Raises:
        UsageError: an unknown value of `starts`.
    """

    server_G: tuple[int, ...]
    starts: str = "round_robin"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.starts not in STARTS:
            raise unknown_name("--set starts", self.starts, STARTS)

    def ranks(self, members: Sequence[int]) -> list[int]:
        """Return the available GPUs on which requests start."""
        if self.starts != "first":
            return list(members)
        first: dict[int, int] = {}
        for gpu in members:
            first.setdefault(self.server_G[gpu], gpu)
        return list(first.values())

    def deal(
        self, requests: Sequence[int], members: Sequence[int], seats: int, taken: Mapping[int, int] | None = None
    ) -> list[int]:
        """Return a GPU for each request in queue order, as far as seats are free.

        Args:
            members: the available GPUs.
            seats: seats per GPU.
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
