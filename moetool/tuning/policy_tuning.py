"""Beyond a cache policy's defaults: how far ahead it prefetches, what is pinned, and what prefetching may cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetool.cache_plan import PrefetchLimits
from moetool.caching._policy import MIN_SLOTS, parse_options, policy_class, slots_within
from moetool.tuning.candidates import Candidates, best, sees_far_enough
from moetool.tuning.replay import ReplayRow

_FARTHEST = 4
_PINNED_SHARES = (8, 4, 2)  # one n-th of the slots
_LEAST_RECALL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """A policy as it would serve, and what it did on the requests that choices are made on.

    Attributes:
        options: values for its `Options`.
        pinned: keys of experts that never leave the device.
        limits: of its prefetching; None: none.
        row: of the replay.
    """

    options: dict[str, Any]
    pinned: tuple[int, ...] = ()
    limits: PrefetchLimits | None = None
    row: ReplayRow

    @property
    def distance(self) -> int:
        """How many layers ahead it prefetches."""
        kind = policy_class(self.row.policy)
        return int(getattr(parse_options(self.row.policy, self.options), "distance", kind.prefetch_distance))

    def replay(self, candidates: Candidates, requests: frozenset[int]) -> ReplayRow:
        """The same on these requests."""
        options = {self.row.policy: self.options}
        asked: dict[str, Any] = {"options": options, "pinned": self.pinned, "limits": self.limits}
        (row,) = candidates.replay([self.row.policy], [self.row.budget_bytes], requests, **asked)
        return row


def as_it_comes(candidates: Candidates, budget_bytes: int) -> PolicySetup:
    """The best candidate for a budget, with the options that it was given."""
    row = candidates.winners([budget_bytes])[budget_bytes]
    return PolicySetup(options=dict(candidates.options.get(row.policy, {})), row=row)


def tune(candidates: Candidates, budget_bytes: int, base: PolicySetup) -> PolicySetup:
    """What is better than `base` (of `as_it_comes`) on the requests that choices are made on; itself if nothing is.

    One after the other, each kept only where it is better: the prefetch distance of every candidate that has such an
    option and was given none, from 1 to 4 layers, as far as the trace looks ahead; for the winner the most used
    experts pinned, in an eighth, a quarter or half of the slots; and where it prefetches, the limits that stop it
    below a recall of one half, or let a forward prefetch half the bytes that one token's experts have. It is a search
    along one axis after the other, not over all combinations.
    """
    found = _nearer_or_farther(candidates, base, budget_bytes)
    found = _best([found, *_pinning(candidates, found)])
    return _best([found, *_limited(candidates, found)])


def _best(setups: Sequence[PolicySetup]) -> PolicySetup:
    """The best, of equal ones the first."""
    row = best([setup.row for setup in setups])
    return next(setup for setup in setups if setup.row is row)


def _again(candidates: Candidates, setup: PolicySetup) -> PolicySetup:
    """A changed setup with its own row."""
    return replace(setup, row=setup.replay(candidates, candidates.used))


def _nearer_or_farther(candidates: Candidates, base: PolicySetup, budget_bytes: int) -> PolicySetup:
    """Of the setups with other prefetch distances and the base the best; the least distance where several are."""
    fitting = [name for name in candidates.fitting(budget_bytes) if _may_choose_distance(candidates, name)]
    rooms: dict[int, list[str]] = {}
    for name in fitting:
        rooms.setdefault(candidates.for_experts(name, budget_bytes), []).append(name)
    own: list[PolicySetup] = []
    others: list[PolicySetup] = []
    for distance in range(1, min(_FARTHEST, candidates.spec.num_layers - 1) + 1):
        for room, names in rooms.items():
            options = {name: {**candidates.options.get(name, {}), "distance": distance} for name in names}
            seeing = [name for name in names if sees_far_enough(name, candidates.trace, options[name])]
            for row in () if not seeing else candidates.replay(seeing, [room], candidates.used, options=options):
                made = PolicySetup(options=options[row.policy], row=row)
                if row.policy != base.row.policy:
                    others.append(made)
                elif distance != base.distance:
                    own.append(made)
    return _best([*sorted([*own, base], key=lambda setup: setup.distance), *others])


def _may_choose_distance(candidates: Candidates, name: str) -> bool:
    given = candidates.options.get(name, {})
    return "distance" not in given and hasattr(parse_options(name, given), "distance")


def _pinning(candidates: Candidates, base: PolicySetup) -> list[PolicySetup]:
    """The base with more and more experts pinned, as far as the policy's own slots allow."""
    spec, name = candidates.spec, base.row.policy
    slots = slots_within(spec, base.row.budget_bytes)
    fewest = max(MIN_SLOTS, policy_class(name).min_slots(spec, parse_options(name, base.options)))
    counts = {slots // share for share in _PINNED_SHARES}
    ranked = _most_used(candidates)
    return [
        _again(candidates, replace(base, pinned=tuple(sorted(ranked[:count]))))
        for count in sorted(counts)
        if count and slots - count >= fewest
    ]


def _limited(candidates: Candidates, base: PolicySetup) -> list[PolicySetup]:
    """The base with limits of its prefetching, where it prefetches."""
    if not base.distance:
        return []
    spec = candidates.spec
    token_bytes = sum(k * size for k, size in zip(spec.top_k_L, spec.expert_bytes_L, strict=True))
    limits = (PrefetchLimits(min_recall=_LEAST_RECALL), PrefetchLimits(forward_bytes=token_bytes // 2))
    return [_again(candidates, replace(base, limits=one)) for one in limits]


def _most_used(candidates: Candidates) -> list[int]:
    """Keys of the experts by how many events needed them, on the requests that choices are made on."""
    spec, uses = candidates.spec, Counter[int]()
    for _, events in candidates.trace.forwards(sequential=True, requests=candidates.used):
        for event in events:
            uses.update(spec.expert_key(event.layer, expert) for expert in event.needed)
    return sorted(uses, key=lambda key: (-uses[key], key))
