"""Split of an event's misses between loading and computing on the host, by cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moetool.base.errors import UsageError
from moetool.base.types import GateEvent, ModelSpec


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Costs of loading an expert and of computing it on the host, for policies that weigh the two.

    They come from a cost profile; only their ratios matter. Without `load_s` and `host_s`, and without `live`, every
    miss is loaded.

    Attributes:
        load_s: seconds to load one expert.
        host_s: seconds to compute one expert for one token on the host.
        host_token_s: seconds for each further token.
        host: whether the host computes experts; if not, every miss is loaded.
        live: whether a server replaces the costs by averages over its last loads and host computations
            (`moetool.runtime.experts.cost_meter`). Before the first measurement the given costs hold; without them,
            loading and computing cost the same. A replay uses the costs in the server's log, else the given ones.

    Raises:
        UsageError: a cost is negative, or only one of `load_s` and `host_s` is given.
    """

    load_s: float = 0.0
    host_s: float = 0.0
    host_token_s: float = 0.0
    host: bool = True
    live: bool = False

    def __post_init__(self) -> None:
        if min(self.load_s, self.host_s, self.host_token_s) < 0 or (self.load_s > 0) != (self.host_s > 0):
            raise UsageError(
                f"load_s is {self.load_s}, host_s {self.host_s} and host_token_s {self.host_token_s}, expected 0 or "
                f"more; give load_s and host_s together or neither"
            )

    @property
    def splits(self) -> bool:
        """Whether misses may be split: the host computes experts, and costs are given or measured."""
        return self.host and (self.load_s > 0 or self.live)

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of one expert on the host."""
        return self.host_s + self.host_token_s * (num_tokens - 1)

    def at_first(self) -> "HostCosts":
        """Return the costs before the first measurement."""
        return HostCosts(load_s=1.0, host_s=1.0) if self.live and not self.load_s else self

    def measured(self, load_s: float, host_s: float) -> "HostCosts":
        """Return measured averages; `host_s` is an average over whole events, so further tokens add nothing."""
        return replace(self, load_s=load_s, host_s=host_s, host_token_s=0.0)


def two_pointers(host_s: Sequence[float], load_s: float, *, finish: bool) -> int:
    """Return how many experts to load, from the first on; the host computes the others, last first.

    Args:
        host_s: host seconds of each expert, those most worth loading first.
        load_s: seconds to load one expert.
        finish: whether the next expert goes to the side that would finish it first (a tie: load). This minimizes the
            longer side if all experts take the host equally long. Otherwise it goes to the side that is free first.

    Source: SMoE, Algorithm 2, which is `finish=False`. It always loads the first expert, so its longer side may exceed
    the minimum of Eq. 4 by up to one expert.
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
    """Return the number of an event's tokens for each expert of its layer."""
    chosen = np.asarray(event.experts_TK).reshape(-1)
    return np.bincount(chosen, minlength=spec.num_experts_L[event.layer]).tolist()
