"""Tuning of a cache policy: slots by layer, prefetch distance, pinned experts and limits of prefetching."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moetool.caching.layer_slots import POOL_FORMS, SHARES, equal_slots, require_pool_form
from moetool.caching.plan import PrefetchLimits
from moetool.caching.policy import MIN_SLOTS, parse_options, policy_class, slots_within
from moetool.tuning.candidates import Candidates, best, sees_far_enough
from moetool.tuning.replay import ReplayRow

FORMS = ("auto", *POOL_FORMS)
_FARTHEST = 4
_PINNED_SHARES = (8, 4, 2)  # one n-th of the slots
_LEAST_RECALL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySetup:
    """A policy with its serving options, and its replay on the choosing requests.

    Attributes:
        options: values for its `Options`.
        layer_slots: guaranteed slots of each layer; empty: one pool for all layers.
        pinned: keys of experts that never leave the device.
        limits: limits of its prefetching; None: none.
        row: row of the replay.
    """

    options: dict[str, Any]
    layer_slots: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    limits: PrefetchLimits | None = None
    row: ReplayRow

    @property
    def distance(self) -> int:
        """Return the prefetch distance in layers."""
        kind = policy_class(self.row.policy)
        return int(getattr(parse_options(self.row.policy, self.options), "distance", kind.prefetch_distance))

    def replay(self, candidates: Candidates, requests: frozenset[int]) -> ReplayRow:
        """Replay the setup on these requests."""
        options = {self.row.policy: self.options}
        asked: dict[str, Any] = {
            "options": options,
            "layer_slots": self.layer_slots,
            "pinned": self.pinned,
            "limits": self.limits,
        }
        (row,) = candidates.replay([self.row.policy], [self.row.budget_bytes], requests, **asked)
        return row


def untuned_setup(candidates: Candidates, budget_bytes: int) -> PolicySetup:
    """Return the best candidate for a budget, with its given options."""
    row = candidates.winners([budget_bytes])[budget_bytes]
    return PolicySetup(options=dict(candidates.options.get(row.policy, {})), row=row)


def divide(candidates: Candidates, budget_bytes: int, base: PolicySetup, pool: str = "auto") -> PolicySetup:
    """Return the best form of the pool with its best candidate; `base` (of `untuned_setup`) if none is better.

    Predicting candidates keep one pool, unless they are the best in it. With fewer than two slots per layer, only one
    pool is tried.

    Args:
        pool: one of `FORMS`: `one` for all layers; equal slots for each layer (`layer`), or half of that (`mixed`);
            `auto` tries all.

    Raises:
        UsageError: the form is unknown.
    """
    require_pool_form("pool", pool, FORMS)
    names = [
        name for name in candidates.fitting(budget_bytes) if name == base.row.policy or not candidates.predicts(name)
    ]
    divided = [] if pool == "one" else _by_layer(candidates, names, budget_bytes, pool)
    return _best([base, *divided] if pool in ("auto", "one") or not divided else divided)


def _by_layer(candidates: Candidates, names: Sequence[str], budget_bytes: int, pool: str) -> list[PolicySetup]:
    """Return these candidates with slots for each layer, if there are enough for all layers."""
    spec, made = candidates.spec, []
    rooms: dict[int, list[str]] = {}
    for name in names:
        rooms.setdefault(candidates.for_experts(name, budget_bytes), []).append(name)
    for room, held in rooms.items():
        slots = slots_within(spec, room)
        if slots < 2 * spec.num_layers:  # otherwise half of them leaves a layer without slots
            continue
        forms = [equal_slots(spec, slots, share) for name, share in SHARES.items() if pool in ("auto", name)]
        for form in dict.fromkeys(forms):
            fits = [name for name in held if candidates.slots_used(name, slots) >= sum(form)]
            for row in candidates.replay(fits, [room], candidates.used, layer_slots=form) if fits else ():
                options = dict(candidates.options.get(row.policy, {}))
                made.append(PolicySetup(options=options, layer_slots=form, row=row))
    return made


def tune(candidates: Candidates, budget_bytes: int, base: PolicySetup) -> PolicySetup:
    """Return the best setup found from `base` (of `untuned_setup`) on the choosing requests.

    The search varies one axis after the other and keeps improvements. Axes are: prefetch distances from 1 to 4 layers,
    for candidates with such an option left at its default, within the trace's reach; the most used experts pinned in an
    eighth, a quarter or half of the winner's slots; and, for a prefetching winner, a minimum recall of one half, or at
    most half the bytes of one token's experts per forward.
    """
    found = _nearer_or_farther(candidates, base, budget_bytes)
    found = _best([found, *_pinning(candidates, found)])
    return _best([found, *_limited(candidates, found)])


def _best(setups: Sequence[PolicySetup]) -> PolicySetup:
    """Return the best setup, of equal ones the first."""
    row = best([setup.row for setup in setups])
    return next(setup for setup in setups if setup.row is row)


def _again(candidates: Candidates, setup: PolicySetup) -> PolicySetup:
    """Return a changed setup with its own row."""
    return replace(setup, row=setup.replay(candidates, candidates.used))


def _nearer_or_farther(candidates: Candidates, base: PolicySetup, budget_bytes: int) -> PolicySetup:
    """Return the best of the base and other prefetch distances; the least distance among equals."""
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
    """Return the base with more pinned experts, within the policy's slots; none with slots per layer."""
    if base.layer_slots:
        return []
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
    """Return the base with limits of prefetching, if it prefetches."""
    if not base.distance:
        return []
    spec = candidates.spec
    token_bytes = sum(k * size for k, size in zip(spec.top_k_L, spec.expert_bytes_L, strict=True))
    limits = (PrefetchLimits(min_recall=_LEAST_RECALL), PrefetchLimits(forward_bytes=token_bytes // 2))
    return [_again(candidates, replace(base, limits=one)) for one in limits]


def _most_used(candidates: Candidates) -> list[int]:
    """Return expert keys by their number of events on the choosing requests."""
    spec, uses = candidates.spec, Counter[int]()
    for _, events in candidates.trace.forwards(sequential=True, requests=candidates.used):
        for event in events:
            uses.update(spec.expert_key(event.layer, expert) for expert in event.needed)
    return sorted(uses, key=lambda key: (-uses[key], key))
