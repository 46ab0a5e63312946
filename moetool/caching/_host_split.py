"""Which of an event's misses to load and which to compute out of host memory, by what both cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetool.errors import UsageError
from moetool.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Cost of an expert on the host and of its load, for policies that weigh the two.

    They come from a cost profile; only their ratios matter. Without both of the first two, everything is loaded, unless
    they are measured.

    Attributes:
        load_s: seconds to load one expert.
        host_s: seconds to compute one expert for one token on the host.
        host_token_s: seconds that each further token adds to that.
        host: whether the host computes at all; without, everything is loaded whatever the costs.
        live: whether a server puts the averages of its last loads and host computations in their place
            (`moetool.runtime.cost_meter`); until there are some, both cost the same unless given. A replay takes those
            that the log of a server holds, and else what is given.
    """

    load_s: float = 0.0
    host_s: float = 0.0
    host_token_s: float = 0.0
    host: bool = True
    live: bool = False

    def __post_init__(self) -> None:
        if min(self.load_s, self.host_s, self.host_token_s) < 0 or (self.load_s > 0) != (self.host_s > 0):
            raise UsageError(
                f"load_s {self.load_s}, host_s {self.host_s} and host_token_s {self.host_token_s} cannot be costs: "
                f"none may be negative, and the first two are given together or not at all"
            )

    @property
    def splits(self) -> bool:
        """Whether the host may compute, and costs are given or measured."""
        return self.host and (self.load_s > 0 or self.live)

    def seconds(self, num_tokens: int) -> float:
        """Seconds that the host takes for one expert."""
        return self.host_s + self.host_token_s * (num_tokens - 1)

    def at_first(self) -> "HostCosts":
        """The costs before any is measured."""
        return HostCosts(load_s=1.0, host_s=1.0) if self.live and not self.load_s else self

    def measured(self, load_s: float, host_s: float) -> "HostCosts":
        """Replace the costs by measured averages; `host_s` is averaged over whole events, so tokens add nothing."""
        return replace(self, load_s=load_s, host_s=host_s, host_token_s=0.0)


def two_pointers(host_s: Sequence[float], load_s: float, *, finish: bool) -> int:
    """Number of experts to load, from the first on; the host computes the others, last first.

    Args:
        host_s: host seconds of each, in the order in which loading them is worth most.
        load_s: seconds to load one.
        finish: give the next expert to the side that is done with it first, a tie to the link. That makes the longer
            side the shortest where all cost the host the same. Otherwise to the side that is free first.

    Source: SMoE, Algorithm 2, which is `finish=False`. It loads a first expert whatever that costs, so its longer side
        may be up to one expert longer than the minimum that Eq. 4 asks for.
    """
    loading = computing = 0.0
    first, last = 0, len(host_s) - 1
    while first <= last:
        ahead = loading + load_s <= computing + host_s[last] if finish else loading <= computing
        if ahead:
            loading += load_s
            first += 1
        else:
            computing += host_s[last]
            last -= 1
    return first


def tokens_of(event: GateEvent, spec: ModelSpec) -> list[int]:
    """Tokens of the event per expert of its layer."""
    chosen = np.asarray(event.experts_TK).reshape(-1)
    counts: list[int] = np.bincount(chosen, minlength=spec.num_experts_L[event.layer]).tolist()
    return counts
