"""The form of the pool of a cache plan: one for all layers, or slots for each layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from moetool.caching.layer_slots import POOL_FORMS, SHARES, equal_slots, require_pool_form
from moetool.caching.policy import slots_within
from moetool.tuning.candidates import Candidates, best
from moetool.tuning.replay import ReplayRow

FORMS = ("auto", *POOL_FORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """A candidate and the form of its pool.

    Attributes:
        layer_slots: guaranteed slots of each layer; empty: one pool for all layers.
        row: its replay on the choosing requests.
    """

    layer_slots: tuple[int, ...] = ()
    row: ReplayRow

    def replay(self, candidates: Candidates, requests: frozenset[int]) -> ReplayRow:
        name, budget_bytes = self.row.policy, self.row.budget_bytes
        (row,) = candidates.replay([name], [budget_bytes], requests, layer_slots=self.layer_slots)
        return row


def divide(candidates: Candidates, budget_bytes: int, base: PoolChoice, pool: str = "auto") -> PoolChoice:
    """Return the best form of the pool with its best candidate; `base`, the best one in one pool, if none is better.

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


def _by_layer(candidates: Candidates, names: Sequence[str], budget_bytes: int, pool: str) -> list[PoolChoice]:
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
            rows = candidates.replay(fits, [room], candidates.used, layer_slots=form) if fits else []
            made += [PoolChoice(layer_slots=form, row=row) for row in rows]
    return made


def _best(choices: Sequence[PoolChoice]) -> PoolChoice:
    """Return the best choice, of equal ones the first."""
    row = best([choice.row for choice in choices])
    return next(choice for choice in choices if choice.row is row)
