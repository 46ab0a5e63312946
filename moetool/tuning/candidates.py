"""Candidate policies of a cache plan, and their replayed costs by budget."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any

from moetool.base import plugins
from moetool.base.errors import UsageError
from moetool.base.types import ModelSpec
from moetool.caching.devices import own_part, split_slots
from moetool.caching.policy import MIN_SLOTS, computes_on_host, parse_options, policy_class, require_slots, slots_within
from moetool.costing.pricing import Prices, with_host_costs
from moetool.trace.reader import Trace
from moetool.tuning.replay import AS_RECORDED, ReplayRow, ReplaySetup
from moetool.tuning.replay_jobs import replay_with_jobs

_LOG = logging.getLogger(__name__)
_ACTIVITY = "replaying candidates (requests)"
SAMPLED_TOKENS = 500
_BEHIND = 1.25
"""Cost on the sample, relative to the best candidate's, from which a candidate is not replayed on all requests."""


def servable(trace: Trace, predictor: Any) -> list[str]:
    """Return the lossless policies that work with this trace's columns and this predictor, if any."""
    kinds = {name: policy_class(name) for name in plugins.names("policy")}
    return [
        name
        for name, kind in kinds.items()
        if kind.lossless
        and not kind.needs_future
        and kind.needs <= trace.columns
        and ("ahead" not in kind.needs or trace.ahead >= min(_distance(name, {}), trace.spec.num_layers - 1))
        and (predictor is not None or not kind.needs_predictor)
    ]


def _distance(policy: str, options: Mapping[str, Any]) -> int:
    """Return the prefetch distance of a policy in layers."""
    return int(getattr(parse_options(policy, options), "distance", policy_class(policy).prefetch_distance))


def too_large(
    names: Iterable[str], spec: ModelSpec, budget_bytes: int, options: Mapping[str, Mapping[str, Any]], devices: int = 1
) -> dict[str, str]:
    """Return the policies that need more slots than (each device's part of) a budget holds, with the reason."""
    slots = min(split_slots(spec, slots_within(spec, budget_bytes), devices))
    sizes = own_part(spec, 0, devices)
    needs = {name: policy_class(name).min_slots(sizes, parse_options(name, options.get(name, {}))) for name in names}
    return {name: f"which needs {fewest} slots" for name, fewest in needs.items() if fewest > slots}


def best(rows: Sequence[ReplayRow]) -> ReplayRow:
    """Return the best row: by time per output token, or without a timeline by bytes per decode token.

    Ties are broken by total bytes, then by the smallest pool.
    """

    return min(rows, key=lambda row: (cost(row), touched_bytes(row), row.loaded_bytes, row.slots))


def touched_bytes(row: ReplayRow) -> float:
    """Return the bytes per decode token that were loaded, or read by host compute."""
    return row.bytes_per_decode_token + row.host_bytes_per_decode_token


def tpot_s(row: ReplayRow) -> float | None:
    """Return the mean time per output token; None without a timeline or such tokens."""
    return None if row.timing is None else row.timing.tpot_mean_s


def cost(row: ReplayRow) -> float:
    """Return the time per output token, or without a timeline the bytes per decode token."""
    return touched_bytes(row) if row.timing is None else row.timing.tpot_mean_s or 0.0


class SearchProgress:
    """The replays of a search as one amount: pools times their requests.

    Args:
        report: called with the activity, the amount done and the total.
    """

    def __init__(self, report: Callable[[str, int, int], None]) -> None:
        self._report = report
        self._begun = self._expected = 0

    def expect(self, amount: int) -> None:
        """Expect this amount in all; more may follow."""
        self._expected = amount

    def part(self, amount: int) -> Callable[[str, int, int], None]:
        """Begin a replay of this amount; returns what shows its progress."""
        before, self._begun = self._begun, self._begun + amount

        def show(_: str, tokens: int, all_tokens: int) -> None:
            done = before + amount * tokens // max(1, all_tokens)
            self._report(_ACTIVITY, done, max(self._expected, self._begun))

        return show

    def end(self) -> None:
        """Report that no replay follows."""
        total = max(self._expected, self._begun)
        self._report(_ACTIVITY, total, total)


class Candidates:
    """Candidate policies, replayed on one half of the requests, once per budget.

    Attributes:
        options: values for the policies' `Options`, with the host's costs for policies that use them.
        used: choosing requests.
        progress: of all replays together.

    Unless policies are requested by name, those that cannot win are not replayed: without a profile, those that load
    every needed expert anew, since lru never loads more; where every expert has a slot, all but lru; and where the
    choosing requests have 1,000 tokens or more, those that cost over 1.25 times the best one on every n-th of them.

    Policies with host compute are timed as if their experts lay in host memory. If these lie on disk, only policies
    requested by name are candidates.

    Args:
        setup: predictor, options and machine of the replay.
        names: candidates (default: those of `servable`).
        predictor_bytes: size of the predictor, charged to the policies that use it.
        room: stored bytes for experts in a budget, beside a predictor of some bytes.
    """

    def __init__(
        self,
        trace: Trace,
        used: frozenset[int],
        held_out: frozenset[int],
        setup: ReplaySetup = AS_RECORDED,
        *,
        names: Sequence[str] | None = None,
        predictor_bytes: int = 0,
        room: Callable[[int, int], int] = lambda budget_bytes, predictor_bytes: budget_bytes - predictor_bytes,
    ) -> None:
        self.trace, self.spec = trace, trace.spec
        self.used, self.held_out = used, held_out
        self.options: dict[str, Mapping[str, Any]] = dict(setup.options)
        profile, timeline = setup.profile, setup.timeline
        self._asked = bool(names)
        self._names = list(names) if names else servable(trace, setup.predictor)
        if profile is not None:
            self.options = with_host_costs(self._names, self.options, Prices(profile, trace.spec, timeline))
        self._setup = replace(setup, options=self.options, pool_unit="slots")
        self._predictor_bytes, self._room = predictor_bytes, room
        self.progress = SearchProgress(setup.on_progress)
        self._rows: dict[int, list[ReplayRow]] = {}
        self._behind: dict[int, dict[str, str]] = {}  # by budget: those that a sample left out, with the reason
        self._mispriced: dict[str, str] = {}
        for name in self._names:
            hosts = computes_on_host(name, self.options.get(name, {}))
            if hosts and profile is not None and timeline.tier == "disk" and not self._asked:
                self._mispriced[name] = "whose host compute is timed for experts in host memory, not on disk"

    @property
    def paid_bytes(self) -> int:
        """Return the most that a candidate's predictor takes of a budget."""
        return self._predictor_bytes if any(self.pays(name) for name in self._names) else 0

    def predicts(self, name: str) -> bool:
        """Whether a policy prefetches by a predictor."""
        return policy_class(name).uses() or bool(policy_class(name).prefetch_distance)

    def distance(self, name: str) -> int:
        """Return the prefetch distance of a policy in layers."""
        return _distance(name, self.options.get(name, {}))

    def slots_used(self, name: str, num_slots: int) -> int:
        """Return the slots that a policy uses of those that fit."""
        options = parse_options(name, self.options.get(name, {}))
        return policy_class(name).slots_used(self.spec, options, num_slots)

    def pays(self, name: str) -> bool:
        """Whether a policy's predictor is charged to its budget."""
        predictor = self._setup.predictor
        return predictor is not None and policy_class(name).uses(predictor)

    def for_experts(self, name: str, budget_bytes: int) -> int:
        """Return the bytes of a budget that a policy has for experts."""
        return self._room(budget_bytes, self._predictor_bytes if self.pays(name) else 0)

    def left_out(self, budget_bytes: int) -> dict[str, str]:
        """Return the candidates that do not fit into a budget, with the reason."""
        lost = dict(self._mispriced)
        for name in self._names:
            if name in lost:
                continue
            room = self.for_experts(name, budget_bytes)
            if room < MIN_SLOTS * self.spec.slot_bytes:
                lost[name] = f"whose predictor of {self._predictor_bytes:,} bytes leaves no room for experts"
            else:
                lost |= too_large([name], self.spec, room, self.options)
        return {**lost, **self._surpassed(budget_bytes, lost), **self._behind.get(budget_bytes, {})}

    def _surpassed(self, budget_bytes: int, lost: Collection[str]) -> dict[str, str]:
        """Return the candidates that cannot surpass lru, with the reason."""
        others = {name for name in self._names if name != "lru" and name not in lost}
        if self._asked or "lru" not in self._names or "lru" in lost:
            return {}
        slots = slots_within(self.spec, self.for_experts("lru", budget_bytes))
        if slots == self.spec.total_experts:
            return dict.fromkeys(sorted(others), "where every expert has a slot")
        if self._setup.profile is not None:
            return {}
        anew = sorted(name for name in others if policy_class(name).reloads(self.spec, slots))
        return dict.fromkeys(anew, "where every needed expert is loaded anew")

    def fitting(self, budget_bytes: int) -> list[str]:
        lost = self.left_out(budget_bytes)
        return [name for name in self._names if name not in lost]

    def require(self, budget_bytes: int) -> dict[str, str]:
        """Return the candidates that do not fit, if that is no error.

        Raises:
            CapacityError: none fits, or one requested by name needs more slots.
        """
        lost = self.left_out(budget_bytes)
        if len(lost) == len(self._names) or self._asked:
            roomy = [n for n in self._names if self.for_experts(n, budget_bytes) >= MIN_SLOTS * self.spec.slot_bytes]
            for name in roomy or self._names:
                slots = slots_within(self.spec, self.for_experts(name, budget_bytes))
                require_slots(name, self.spec, self.options.get(name, {}), slots)
        return lost

    def rows(self, budgets: Sequence[int], requests: frozenset[int], *also: str) -> list[list[ReplayRow]]:
        """Return for each budget the rows of the candidates that fit, and of the policies in `also`.

        The trace is read once for all policies that fit into the same budgets.
        """
        made: list[dict[str, ReplayRow]] = [{} for _ in budgets]
        lost = [self.left_out(budget) for budget in budgets]
        groups: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for name in (*self._names, *also):
            fits = tuple((i, self.for_experts(name, b)) for i, b in enumerate(budgets) if name not in lost[i])
            groups.setdefault(fits, []).append(name)
        for fits, names in groups.items():
            if not fits:
                continue
            replayed = self.replay(names, [room for _, room in fits], requests)
            for (name, (i, _)), row in zip(product(names, fits), replayed, strict=True):
                made[i][name] = row
        order = sorted((*self._names, *also), key=self.pays)
        return [[found[name] for name in order if name in found] for found in made]

    def replay(
        self, names: Sequence[str], budgets: Sequence[int], requests: frozenset[int], **changes: Any
    ) -> list[ReplayRow]:
        """`moetool.tuning.replay_jobs.replay_with_jobs` on this trace and machine.

        Args:
            budgets: budgets for experts alone.
            changes: values of `ReplaySetup` instead of the candidates' own.
        """
        show = self.progress.part(len(names) * len(budgets) * len(requests))
        setup = replace(self._setup, requests=requests, on_progress=show, **changes)
        return replay_with_jobs(self.trace, names, budgets, setup)

    def winners(self, budgets: Iterable[int]) -> dict[int, ReplayRow]:
        """Return the best candidate for each budget, on the choosing requests; none where none fits."""
        budgets = sorted(set(budgets))
        missing = [budget for budget in budgets if budget not in self._rows]
        self._race(missing)
        for budget, rows in zip(missing, self.rows(missing, self.used) if missing else (), strict=True):
            self._rows[budget] = rows
            for row in rows:
                _LOG.info(
                    "candidate %s in %d bytes: %d slots, decode hit rate %.4f, %.0f bytes and %s s per token",
                    *(row.policy, budget, row.slots, row.decode.hit_rate, touched_bytes(row), tpot_s(row)),
                )
        return {budget: self._winner(self._rows[budget]) for budget in budgets if self._rows[budget]}

    def _race(self, budgets: Sequence[int]) -> None:
        """Leave out, at each budget, the candidates that fall far behind on a sample of the choosing requests."""
        table = self.trace.requests
        counts = zip(table["request"].to_pylist(), table["tokens"].to_pylist(), strict=True)
        tokens = {request: count for request, count in counts if request in self.used}
        every = sum(tokens.values()) // SAMPLED_TOKENS
        sample = frozenset(sorted(tokens)[:: max(every, 1)])
        if every < 2 or self._asked or not budgets:
            return
        why = f"over {_BEHIND} x the best on a sample of {sum(tokens[request] for request in sample):,} tokens"
        for budget, rows in zip(budgets, self.rows(budgets, sample), strict=True):
            most = _BEHIND * cost(best(rows)) if rows else 0.0
            self._behind[budget] = {row.policy: why for row in rows if cost(row) > most}
            _LOG.info("on a sample, in %d bytes: %s", budget, {row.policy: cost(row) for row in rows})

    def _winner(self, rows: Sequence[ReplayRow]) -> ReplayRow:
        """Return the best row. Where every expert has a slot, it is lru: policies differ in the first loads only."""
        whole = [row for row in rows if row.policy == "lru" and row.slots >= self.trace.spec.total_experts]
        return whole[0] if whole else best(rows)

    def worth_their_predictor(self, budget_bytes: int) -> "Candidates":
        """Return these candidates, without the predictor if its bytes are worth more as expert slots.

        Policies with an optional predictor are replayed without it too.
        """
        pay = [name for name in self._names if self.pays(name)]
        alone = copy(self)
        alone._setup, alone._predictor_bytes = replace(self._setup, predictor=None), 0
        alone._names = [name for name in self._names if not policy_class(name).needs_predictor]
        alone._behind = {b: {n: why for n, why in lost.items() if n not in pay} for b, lost in self._behind.items()}
        optional = [name for name in alone.fitting(budget_bytes) if name in pay]
        if not optional:
            return self
        with_it = self.winners([budget_bytes])[budget_bytes]
        without = alone.replay(optional, [self._room(budget_bytes, 0)], self.used)
        if best([with_it, *without]) is with_it:
            return self
        alone._rows = {budget_bytes: [*(r for r in self._rows[budget_bytes] if r.policy not in pay), *without]}
        return alone

    def require_decoding(self, row: ReplayRow) -> float:
        """Return a row's time per output token. Raises: UsageError if the requests decode nothing."""
        seconds = tpot_s(row)
        if seconds is None:
            raise UsageError(
                f"{self.trace.path} has no decoded tokens among the requests that a plan is chosen on, so there is no "
                f"time per output token; capture with --max-new-tokens above 0"
            )
        return seconds
