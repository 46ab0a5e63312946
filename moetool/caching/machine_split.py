"""Split of an event's misses between the link and the host's cores, so that the event ends first, above any policy.

Link, host and device are modelled: a `MachineSplit` advances them by the costs of its own decisions, never by a clock.
So decisions are functions of events and costs, and a replay repeats those of a server. Compiled code takes the same
decisions in its place (`moetool.caching.compiled_split`), unless Python is asked for as an oracle.
"""

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import add, itemgetter
from typing import Any

from moetool.base.config import POSITIVE, SHARE, Span, require_within
from moetool.base.errors import UsageError, unknown_name
from moetool.base.types import GateEvent, ModelSpec
from moetool.caching.host_split import tokens_of

MODES = ("host", "both")
"""The host computes all misses; or some, while the others are loaded."""
PREFETCH = 2
"""`moetool.caching.residency.StepKind`"""
_FEW, _FEW_WITH_READS = 10, 8
"""Misses of an event of which every split is tried; of more, moving one expert gains little."""
_MOST_QUEUED = 2
"""Transfers in the link's queue with which an expert that the host computed is still admitted (guide of benchmarks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCosts:
    """Seconds of a machine's link, host and device, alone and together.

    Attributes:
        load_s: one expert from host memory over the link.
        host_s, device_s: one expert for one token, on the host and on the device.
        host_knots, device_knots: further numbers of tokens, rising, and the seconds of one expert for them; straight
            between them and after the last. Empty: the seconds of one token for any number.
        layer_s: the device's time between the experts of two layers.
        start_s: moving rows to the host and back, for an event with experts there.
        link_share, host_share: rates of link and host while both work, relative to each alone.
        disk_s: one expert from disk to host memory, before either.

    Raises:
        UsageError: a cost is negative, a share is not above 0 and at most 1, or tokens do not rise.
    """

    load_s: float
    host_s: float
    device_s: float = 0.0
    host_knots: tuple[tuple[float, float], ...] = ()
    device_knots: tuple[tuple[float, float], ...] = ()
    layer_s: float = 0.0
    start_s: float = 0.0
    link_share: float = 1.0
    host_share: float = 1.0
    disk_s: float = 0.0

    def __post_init__(self) -> None:
        seconds = [name for name in self.__dataclass_fields__ if name.endswith("_s")]
        require_within(self, "costs of the split: ", **dict.fromkeys(seconds, Span(0)))
        require_within(self, "costs of the split: ", load_s=POSITIVE, host_s=POSITIVE)
        require_within(self, "costs of the split: ", link_share=SHARE, host_share=SHARE)
        for name in ("host_knots", "device_knots"):
            knots = getattr(self, name)
            rise = all(a < b for (a, _), (b, _) in pairwise([(1.0, 0.0), *knots]))
            if not rise or any(value < 0 for _, value in knots):
                raise UsageError(f"costs of the split: {name} is {knots}, expected rising tokens above 1 and seconds")

    @property
    def digest(self) -> str:
        """Return a digest of the costs, by which logs name them."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def host(self, tokens: int) -> float:
        """Return the seconds of one expert on the host."""
        return _at(tokens, self.host_s, self.host_knots)

    def device(self, tokens: int) -> float:
        """Return the seconds of one expert on the device."""
        return _at(tokens, self.device_s, self.device_knots)

    @property
    def missed_s(self) -> float:
        """Return the least seconds of a miss, of one token, at the rates of link and host together."""
        return 1 / (self.link_share / self.load_s + self.host_share / self.host_s)

    def together(self, link_s: float, host_s: float) -> tuple[float, float]:
        """Return the ends of link and host, which begin together and take these seconds alone."""
        link, host = link_s / self.link_share, host_s / self.host_share
        if link <= host:
            return link, link + host_s - link * self.host_share
        return host + link_s - host * self.link_share, host


def _at(tokens: int, one_s: float, knots: tuple[tuple[float, float], ...]) -> float:
    if tokens == 1 or not knots:
        return one_s
    left, right = (1.0, one_s), knots[0]
    for further in knots[1:]:
        if right[0] >= tokens:
            break
        left, right = right, further
    return max(0.0, left[1] + (right[1] - left[1]) * (tokens - left[0]) / (right[0] - left[0]))


def _sum(seconds: Iterable[float]) -> float:
    """Add in order, as compiled code does; since Python 3.12 `sum` compensates for rounding."""
    return reduce(add, seconds, 0.0)


@dataclass(slots=True, kw_only=True)
class EventWork:
    """The work of one event, with its misses in the order in which to load them.

    Attributes:
        costs: those of the machine.
        resident_s: seconds of the experts in slots on the device.
        link_s: seconds of the transfers that go before the misses: the running one, and those of late prefetches.
        waiting_s: seconds of the transfers that go after them.
        host_N, device_N: seconds of each miss on the host and on the device.
        on_disk_N: whether each must be read from disk first. Reads go one after the other, in this order.
    """

    costs: SplitCosts
    resident_s: float = 0.0
    link_s: float = 0.0
    waiting_s: float = 0.0
    host_N: Sequence[float]
    device_N: Sequence[float]
    on_disk_N: Sequence[bool] = ()

    def loaded(self) -> list[int]:
        """Return the misses to load so that the event ends first, the others on the host.

        A load takes equally long for every miss, so loads take those with most tokens from the host, unless the device
        then ends last. Experts on disk go to the side that finishes them first.
        """
        here = [i for i in range(len(self.host_N)) if not (self.on_disk_N and self.on_disk_N[i])]
        on_disk = [i for i in range(len(self.host_N)) if self.on_disk_N and self.on_disk_N[i]]
        best: list[int] = []
        least = float("inf")
        load_s, device_ends = self.costs.load_s, False
        link_s, host_s, device_s = self.link_s, _sum(self.host_N[i] for i in here), self.resident_s
        for count in range(len(here) + 1):
            if count:
                link_s += load_s
                host_s -= self.host_N[here[count - 1]]
                device_s += self.device_N[here[count - 1]]
            if not on_disk:
                end = self._ends(link_s, host_s if count < len(here) else 0.0, device_s)[0]
                if end <= least:
                    best, least = here[:count], end
                if count and end <= device_s:
                    device_ends = True
                    best, least = min(((best, least), *self._for_device(here, count)), key=itemgetter(1))
                continue
            for shares in ((1.0, 1.0), (self.costs.link_share, self.costs.host_share), (0.0, 1.0), (1.0, 0.0)):
                loaded = [*here[:count], *self._loaded_from_disk(on_disk, link_s, host_s, shares)]
                end = self.ends(loaded)[0]
                if end <= least:
                    best, least = loaded, end
        if len(self.host_N) <= (_FEW_WITH_READS if on_disk else _FEW if device_ends else 0):
            return self._best(best, least)
        return best

    def _for_device(self, here: Sequence[int], count: int) -> Iterator[tuple[list[int], float]]:
        """Yield loads of `count` misses, some with most tokens and some with fewest, so that no side ends much later
        than the device; and the ends of the event."""
        first, last = 0, count
        while first < last:
            middle = (first + last) // 2
            loaded = [*here[:middle], *here[len(here) - count + middle :]]
            end = self.ends(loaded)[0]
            yield loaded, end
            if self.resident_s + _sum(self.device_N[i] for i in loaded) < end:
                first = middle + 1
            else:
                last = middle

    def _best(self, best: list[int], least: float) -> list[int]:
        """Try every split in which no side alone takes as long as the best so far."""
        places = range(len(self.host_N))
        for number in range(2 ** len(places)):
            loaded = [i for i in places if number >> i & 1]
            link_s = self.link_s + self.costs.load_s * len(loaded)
            host_s = _sum(self.host_N[i] for i in places if not number >> i & 1)
            device_s = self.resident_s + _sum(self.device_N[i] for i in loaded)
            if max(link_s, host_s, device_s) < least and (end := self.ends(loaded)[0]) < least:
                best, least = loaded, end
        return best

    def ends(self, loaded: Collection[int]) -> tuple[float, float]:
        """Return the seconds until the event ends, and until the host ends, if these misses are loaded."""
        chosen = set(loaded)
        if any(self.on_disk_N):
            return self._ends_with_reads(chosen)
        host_s = _sum(seconds for i, seconds in enumerate(self.host_N) if i not in chosen)
        device_s = self.resident_s + _sum(self.device_N[i] for i in sorted(chosen))
        return self._ends(self.link_s + self.costs.load_s * len(chosen), host_s, device_s)

    def _ends_with_reads(self, loaded: Collection[int]) -> tuple[float, float]:
        """Like `ends`, from one change of a side to the next: each waits for reads and is slower beside the other."""
        costs, num = self.costs, len(self.host_N)
        reads = list(accumulate(costs.disk_s * on_disk for on_disk in self.on_disk_N))
        ready_N = [read if on_disk else 0.0 for read, on_disk in zip(reads, self.on_disk_N, strict=True)]
        order = sorted(range(num), key=ready_N.__getitem__)
        link = deque([(0.0, self.link_s), *((ready_N[i], costs.load_s) for i in order if i in loaded)])
        host = deque((ready_N[i], self.host_N[i]) for i in order if i not in loaded)
        if host:
            host.appendleft((0.0, costs.start_s))
        sides = ((link, costs.link_share), (host, costs.host_share))
        now, ends = 0.0, [0.0, 0.0]
        while link or host:
            together = all(queue and queue[0][0] <= now for queue, _ in sides)
            rates = [share if together else 1.0 for _, share in sides]
            nexts = [
                queue[0][1] / rate if queue[0][0] <= now else queue[0][0] - now
                for (queue, _), rate in zip(sides, rates, strict=True)
                if queue
            ]
            passed = min(nexts)
            for side, ((queue, _), rate) in enumerate(zip(sides, rates, strict=True)):
                if queue and queue[0][0] <= now:
                    at, left = queue.popleft()
                    if left / rate > passed:
                        queue.appendleft((at, left - passed * rate))
                    else:
                        ends[side] = now + passed
            now += passed
        device_s = self.resident_s + _sum(self.device_N[i] for i in sorted(loaded))
        arrived = ends[0] + costs.device_s if loaded or self.link_s else 0.0
        return max(device_s, arrived, ends[1]), ends[1]

    def _ends(self, link_s: float, host_s: float, device_s: float) -> tuple[float, float]:
        """Return the ends of the event and of the host, with the work of each side alone."""
        costs = self.costs
        arrived, host_end = link_s, 0.0
        if host_s:
            arrived, host_end = costs.together(link_s, host_s + costs.start_s)
            if self.waiting_s:
                host_end = costs.together(link_s + self.waiting_s, host_s + costs.start_s)[1]
        return max(device_s, arrived + costs.device_s if link_s else 0.0, host_end), host_end

    def _loaded_from_disk(
        self, on_disk: Sequence[int], link_s: float, host_s: float, shares: tuple[float, float]
    ) -> list[int]:
        """Return the experts on disk that link rather than host would finish first, at these shares of their rates."""
        if not all(shares):
            return list(on_disk) if shares[0] else []
        costs, read_s, loaded = self.costs, 0.0, []
        link_s, host_s = link_s / shares[0], (host_s + costs.start_s) / shares[1]
        for i in on_disk:
            read_s += costs.disk_s
            by_link, by_host = max(link_s, read_s) + costs.load_s, max(host_s, read_s) + self.host_N[i]
            if by_link <= by_host:
                link_s = by_link
                loaded.append(i)
            else:
                host_s = by_host
        return loaded


EQUAL_COSTS = SplitCosts(load_s=1.0, host_s=1.0)


class MachineSplit:
    """Splits the misses of a pool's events, and models link, host and device.

    Args:
        mode: of `MODES`.
        costs: those of the machine (default: until `begin`, a load and an expert on the host cost the same).
        host_experts: experts that host memory holds; None: all. The model keeps those that were read last.

    Attributes:
        active: whether misses are split now; it may change between forwards. Otherwise all are loaded.

    Effects: `choose` and `note` advance the model, event by event.
    """

    def __init__(
        self, spec: ModelSpec, costs: SplitCosts = EQUAL_COSTS, mode: str = "both", host_experts: int | None = None
    ) -> None:
        if mode not in MODES:
            raise unknown_name("place of misses", mode, MODES)
        self.spec, self.mode, self.active = spec, mode, True
        self.begin(costs, host_experts)

    def begin(self, costs: SplitCosts, host_experts: int | None) -> None:
        """Set the costs and the experts in host memory, before the first event."""
        self.costs, self.host_experts = costs, host_experts
        self._queue: OrderedDict[int, float] = OrderedDict()  # seconds of transfers by key; the first one runs
        self._memory: OrderedDict[int, None] | None = None if host_experts is None else OrderedDict()

    def to_json(self) -> dict[str, Any]:
        """Return what a replay needs for the same decisions, and the digest of the costs."""
        return {"costs": asdict(self.costs), "digest": self.costs.digest, "host_experts": self.host_experts}

    def admits(self, free: bool) -> bool:
        """Whether the link takes an expert that the host has computed: always while slots are `free`, else by queue."""
        return free or len(self._queue) <= _MOST_QUEUED

    def choose(
        self, event: GateEvent, hits: Collection[int], misses: Sequence[int], worth: Sequence[float]
    ) -> set[int]:
        """Return the misses that the host computes.

        Args:
            worth: what residency of each miss is worth. Those with most tokens are loaded first, then the most worthy.
        """
        costs, queue, base = self.costs, self._queue, event.layer * self.spec.num_experts
        self._advance(costs.layer_s, 0.0)
        tokens = tokens_of(event, self.spec) if len(event.experts_TK) > 1 else None
        order = sorted(range(len(misses)), key=lambda i: -worth[i])
        resident_s = costs.device_s * len(hits)
        host_N, device_N = [costs.host_s] * len(order), [costs.device_s] * len(order)
        if tokens is not None:
            order.sort(key=lambda i: -tokens[misses[i] - base])
            host_N = [costs.host(tokens[misses[i] - base]) for i in order]
            device_N = [costs.device(tokens[misses[i] - base]) for i in order]
            resident_s = _sum(costs.device(tokens[key - base]) for key in sorted(hits))
        running = next(iter(queue), -1)
        late = [key for key in hits if key in queue and key != running]
        ranked = [misses[i] for i in order]
        work = EventWork(
            costs=costs,
            resident_s=resident_s,
            link_s=queue.get(running, 0.0) + costs.load_s * len(late),
            waiting_s=costs.load_s * max(0, len(queue) - len(late) - 1),
            host_N=host_N,
            device_N=device_N,
            on_disk_N=self._read(ranked),
        )
        loaded = work.loaded() if self.mode == "both" else []
        waiting = [key for key in queue if key != running and key not in late]
        queue.update((ranked[i], costs.load_s) for i in sorted(loaded))
        for key in waiting:
            queue.move_to_end(key)
        self._advance(*work.ends(loaded))
        return {ranked[i] for i in set(range(len(ranked))).difference(loaded)}

    def note(self, steps: Iterable[tuple[int, int, int, int]]) -> None:
        """Add the prefetches of a program (`moetool.caching.residency.Step`) to the link's queue."""
        queue = self._queue
        for kind, key, _, evicted in steps:
            if kind == PREFETCH:
                if evicted in queue and evicted != next(iter(queue)):
                    del queue[evicted]
                queue[key] = self.costs.load_s
                self._read([key])

    def _advance(self, seconds: float, host_s: float) -> None:
        """Let the link work for these seconds, in the first `host_s` of which the host works too."""
        queue = self._queue
        left = seconds - min(host_s, seconds) * (1 - self.costs.link_share)
        while queue and left > 0:
            key, rest = next(iter(queue.items()))
            if rest > left:
                queue[key] = rest - left
                return
            left -= rest
            del queue[key]

    def _read(self, keys: Sequence[int]) -> Sequence[bool]:
        """Bring experts into host memory; return whether each was on disk only."""
        memory = self._memory
        if memory is None:
            return ()
        on_disk = [key not in memory for key in keys]
        for key in keys:
            memory.pop(key, None)
            memory[key] = None
        while len(memory) > (self.host_experts or 0):
            memory.popitem(last=False)
        return on_disk
