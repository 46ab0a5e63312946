"""Simulated clock of a replay: the time of a run of `moetool.caching.residency` on the machine of a `CostProfile`.

One stream computes, and another moves experts from their memory tier. Time is integer nanoseconds. Programs run as
in `moetool.runtime.experts.store`: loads are asynchronous, and the compute stream waits for an expert just before
computing it. A running transfer is never interrupted. On-demand loads precede all prefetches that have not begun, and a
transfer that the compute stream waits for precedes all others that have not begun. A prefetch that has not begun when
its slot is reused is dropped.

While the host computes experts beside a GPU, transfers and the host have the shares of their rates that the profile
gives. Not modelled: Python's own time, sampling, and contention of reads and compute on one processor. A call to a
predictor's `scores`, a policy's own search and its look at later gates each cost a prediction's time; a forward through
resident experts costs that layer's time, and where it reuses outputs, it begins after these.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moetool.base.types import ForwardInfo, GateEvent, Phase
from moetool.caching.policy import Policy
from moetool.caching.program import run
from moetool.caching.residency import Step, StepKind
from moetool.costing.pricing import Prices
from moetool.costing.timing import Spent, Timing, percentiles

_QUEUED = -1


class MeteredPredictor:
    """Forwards every call to a predictor and counts its predictions."""

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor
        self._asked = 0

    def scores(self, layer: int) -> Any:
        self._asked += 1
        return self._predictor.scores(layer)

    def take(self) -> int:
        """Return the number of predictions since the last call."""
        asked, self._asked = self._asked, 0
        return asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._predictor, name)


class _Job:
    """One load of an expert into a slot. `done` is the time of its end, or `_QUEUED` before it begins."""

    __slots__ = ("done", "dropped", "earliest", "key", "ns", "num_bytes", "prefetch")

    def __init__(self, key: int, ns: int, num_bytes: int, prefetch: bool, earliest: int) -> None:
        self.key = key
        self.ns = ns
        self.num_bytes = num_bytes
        self.prefetch = prefetch
        self.earliest = earliest
        self.done = _QUEUED
        self.dropped = False


class _Stream:
    """The transfers, one at a time: on-demand loads first, each kind first come, first served.

    Until `host_until` the host computes, and transfers have this share of their rate.
    """

    __slots__ = ("busy", "demand", "free_at", "host_until", "prefetches", "read_bytes", "share")

    def __init__(self, share: float) -> None:
        self.share = share
        self.host_until = 0
        self.demand: deque[_Job] = deque()
        self.prefetches: deque[_Job] = deque()
        self.free_at = 0
        self.busy = 0
        self.read_bytes = 0

    def advance(self, now: int) -> None:
        """Begin the transfers that start before `now`; at `now` itself a more urgent one may still come."""
        while queue := self.demand or self.prefetches:
            job = queue[0]
            if job.dropped or job.done != _QUEUED:
                queue.popleft()
                continue
            start = max(self.free_at, job.earliest)
            if start >= now:
                return
            queue.popleft()
            self.begin(job, start)

    def begin(self, job: _Job, start: int) -> None:
        ns = _stretched(job.ns, self.host_until - start, self.share)
        job.done = self.free_at = start + ns
        self.busy += ns
        self.read_bytes += job.num_bytes

    def queued_until(self, now: int) -> int:
        """Return when the transfers so far end."""
        queued = (job for queue in (self.demand, self.prefetches) for job in queue)
        left = sum(job.ns for job in queued if job.done == _QUEUED and not job.dropped)
        return max(now, self.free_at) + left

    def busy_until(self, now: int) -> int:
        """Return the busy time up to `now`."""
        self.advance(now)
        return self.busy - max(0, self.free_at - now)


def _stretched(ns: int, shared_ns: int, share: float) -> int:
    """Return the time of work that has only a share of its rate for the first `shared_ns`."""
    if shared_ns <= 0 or share == 1:
        return ns
    slow = round(ns / share)
    return slow if slow <= shared_ns else shared_ns + ns - round(shared_ns * share)


class _Tally:
    """Running sums of one phase, in nanoseconds, and counters."""

    __slots__ = (
        *("compute", "dropped", "elapsed", "host", "host_wait", "io", "late", "prediction", "promoted", "read_bytes"),
        "stall",
    )

    def __init__(self) -> None:
        self.elapsed = self.compute = self.prediction = self.stall = self.host = self.host_wait = 0
        self.late = self.promoted = self.dropped = self.io = self.read_bytes = 0

    def spent(self, tier: str) -> Spent:
        return Spent(
            seconds=self.elapsed / 1e9,
            compute_s=self.compute / 1e9,
            prediction_s=self.prediction / 1e9,
            stall_s=self.stall / 1e9,
            host_s=self.host / 1e9,
            host_wait_s=self.host_wait / 1e9,
            io_s={tier: self.io / 1e9},
            read_bytes=self.read_bytes,
            late=self.late,
            promoted=self.promoted,
            dropped=self.dropped,
        )


class Timeline:
    """Executes the programs of one run in simulated time, as a `moetool.caching.program.Machine`.

    A request's time to first token runs from the start of the first forward with its prompt tokens to the end of the
    last one. Arrival times are not modelled. The time per output token is that of a forward without prompt tokens.

    Args:
        prices: costs, shared by concurrent runs.
        predictor: the policy's predictor, if any. Without a lag, predictions take time on the compute stream.
        prediction_lag: as `Policy.prediction_lag`. If not None, predictions run on their own stream, and the compute
            stream waits for each before the first expert of the event that uses it. What is predicted before the first
            MoE layer is used at once.
        policy: whose own searches and partial forwards take time like predictions (default: they are free).
    """

    in_waves = False

    def __init__(
        self,
        prices: Prices,
        *,
        predictor: MeteredPredictor | None = None,
        prediction_lag: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.now = 0
        self._prices = prices
        self._predictor = predictor
        self._prediction_lag = prediction_lag
        self._policy, self._searched, self._partial = policy, 0, 0
        self._predicted_at = 0  # when the prediction stream is free
        self._answers: deque[int] = deque()  # times of the forward's predictions, oldest first
        # The event that runs: the end of its prediction, prices, compute time, and end of host computation.
        self._event: GateEvent
        self._answer = 0
        self._expert_ns: Mapping[int, int] = {}
        self._computed = self._hosted = 0
        self._outputs_at = 0  # earliest start of prefetches that a partial forward predicts
        self._stride = prices.spec.num_experts
        self._tier = prices.options.tier
        self._stream = _Stream(prices.link_share)
        self._jobs: dict[int, _Job] = {}  # by slot
        self._ahead: list[_Job] = []  # prefetches that the next experts wait for
        self._tallies = {Phase.PREFILL: _Tally(), Phase.DECODE: _Tally()}
        self._tally = self._tallies[Phase.DECODE]
        self._began = 0
        self._seen = 0, 0  # busy nanoseconds and bytes of the stream, at the last forward's end
        self._prompt_began: dict[int, int] = {}
        self._prompt_ns: dict[int, int] = {}
        self._decodes: list[int] = []
        self._requests: dict[int, list[int]] = {}  # nanoseconds of a request's forwards, with prompt tokens and without

    def begin_forward(self, info: ForwardInfo, steps: Sequence[Step]) -> None:
        """Begin a forward with these prefetches."""
        self._tally = self._tallies[Phase.PREFILL if info.prefill else Phase.DECODE]
        self._began = self.now
        self._answers.clear()
        self._wait_for(self.now + self._asked_ns(info, None))
        run(steps, self)

    def event(self, event: GateEvent, steps: Sequence[Step]) -> None:
        """Run one MoE layer's program, from the layers since the previous MoE layer to its shared experts."""
        tally, forward = self._tally, self._prices.forward(event.forward)
        self.now += forward.before_L[event.layer]
        for job in self._ahead:
            if not job.dropped:
                self._wait(job)
        self._ahead.clear()
        began, partial = self.now, self._partial
        self._answer = self._predict(event)
        self._event, self._expert_ns = event, self._prices.experts(event)
        if self._partial > partial and self._prices.options.reuse_residents:
            self._outputs_at = began + self._reused_ns(steps) + self._prices.partial_forward_ns(event)
        self._computed = self._hosted = 0
        if self._prices.miss_ns and any(step.kind in (StepKind.LOAD, StepKind.HOST) for step in steps):
            self._computed += self._prices.miss_ns
            self.now += self._prices.miss_ns
        run(steps, self)
        self._answer = self._wait_for(self._answer)
        if self._hosted > self.now:
            tally.host_wait += self._hosted - self.now
            self.now = self._hosted
        self.now += forward.after
        tally.compute += forward.before_L[event.layer] + self._computed + forward.after

    def load(self, steps: Sequence[Step], idle: bool) -> None:
        """See `moetool.caching.program.Machine`, also for the methods below."""
        for _, key, slot, _ in steps:
            self._load(key, slot, False)

    def prefetch(self, step: Step) -> None:
        self._load(step.key, step.slot, True)

    def wait(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._wait(self._jobs[step.slot])

    def compute_on_host(self, steps: Sequence[Step]) -> None:
        if self._prices.host_is_device:
            self._answer = self._wait_for(self._answer)
        total = sum(self._prices.host_expert_ns(self._event, step.key) for step in steps)
        if self._prices.host_is_device:
            self._computed += total
            self.now += total
            return
        began = max(self._hosted, self.now)
        loading = round((self._stream.queued_until(began) - began) / self._prices.link_share)  # while the host computes
        total = _stretched(total, loading, self._prices.host_share)
        self._hosted = began + total
        self._tally.host += total
        self._stream.host_until = self._hosted

    def compute(self, wave: Sequence[Step]) -> None:
        if self._answer:
            self._answer = self._wait_for(self._answer)
        for _, key, slot, _ in wave:
            job = self._jobs[slot]
            assert job.key == key, "computed with another expert's weights"
            if job.done == _QUEUED or job.done > self.now:
                self._wait(job)
            ns = self._expert_ns[key]
            self._computed += ns
            self.now += ns

    def end_forward(self, info: ForwardInfo) -> None:
        """Complete the forward: the layers after the last MoE layer, and the head."""
        tally, rest = self._tally, self._prices.forward(info).rest
        tally.compute += rest
        self.now += rest
        elapsed = self.now - self._began
        tally.elapsed += elapsed
        for request in dict.fromkeys(info.request_T):
            self._requests.setdefault(request, [0, 0])[not info.prefill] += elapsed
        busy, read_bytes = self._stream.busy_until(self.now), self._stream.read_bytes
        tally.io += busy - self._seen[0]
        tally.read_bytes += read_bytes - self._seen[1]
        self._seen = busy, read_bytes
        if not info.prefill:
            self._decodes.append(elapsed)
            return
        for request, phase in zip(info.request_T, info.phase_T, strict=True):
            if phase == Phase.PREFILL:
                began = self._prompt_began.setdefault(request, self._began)
                self._prompt_ns[request] = self.now - began

    def timing(self) -> Timing:
        decodes = [ns / 1e9 for ns in self._decodes]
        prompts = [ns / 1e9 for ns in self._prompt_ns.values()]
        tpot_p50, tpot_p95 = percentiles(decodes)
        ttft_p50, ttft_p95 = percentiles(prompts)
        return Timing(
            prefill=self._tallies[Phase.PREFILL].spent(self._tier),
            decode=self._tallies[Phase.DECODE].spent(self._tier),
            decode_forwards=len(decodes),
            ttft_p50_s=ttft_p50,
            ttft_p95_s=ttft_p95,
            tpot_p50_s=tpot_p50,
            tpot_p95_s=tpot_p95,
            request_s={request: (a / 1e9, b / 1e9) for request, (a, b) in self._requests.items()},
        )

    def _asked_ns(self, info: ForwardInfo, event: GateEvent | None) -> int:
        """Return the time of the predictions, searches and partial forwards since the last call."""
        tokens, total = len(info.request_T), 0
        asked = 0 if self._predictor is None else self._predictor.take()
        if asked:
            total += asked * self._prices.prediction_ns(tokens)
        if self._policy is not None:
            searched, self._searched = self._policy.searches - self._searched, self._policy.searches
            total += searched * self._prices.search_ns(tokens)
            partial, self._partial = self._policy.partial_forwards - self._partial, self._policy.partial_forwards
            total += partial * self._prices.partial_forward_ns(event) if partial and event is not None else 0
        return total

    def _predict(self, event: GateEvent) -> int:
        """Begin the requested predictions; return the end of the one that this event waits for."""
        asked_ns = self._asked_ns(event.forward, event)
        ready = self.now + asked_ns
        if self._prediction_lag is None:
            return self._wait_for(ready)
        if asked_ns:
            ready = self._predicted_at = ready + max(0, self._predicted_at - self.now)
        self._answers.append(ready)
        return self._answers.popleft() if len(self._answers) > self._prediction_lag else 0

    def _reused_ns(self, steps: Sequence[Step]) -> int:
        """Return the time of the shared experts, and of those that the event computes without loading them."""
        loaded = {step.key for step in steps if step.kind is StepKind.LOAD}
        computed = {step.key for step in steps if step.kind is StepKind.COMPUTE} - loaded
        shared = self._prices.forward(self._event.forward).after
        return shared + sum(self._expert_ns[key] for key in computed)

    def _wait_for(self, answer: int) -> int:
        """Let the compute stream wait for a prediction; return 0, the time of no prediction."""
        waited = max(0, answer - self.now)
        self._tally.prediction += waited
        self.now += waited
        return 0

    def _load(self, key: int, slot: int, prefetch: bool) -> None:
        """Queue a transfer; drop an earlier one to the same slot that has not begun."""
        stream, before = self._stream, self._jobs.get(slot)
        earliest = max(self.now, self._outputs_at) if prefetch else self.now
        if before is not None:
            stream.advance(self.now)
            if before.done == _QUEUED:
                before.dropped = True
                self._tally.dropped += 1
                earliest = max(earliest, before.earliest)
            else:
                earliest = max(earliest, before.done)  # it may still be writing
        layer = key // self._stride
        ns, num_bytes = self._prices.load_ns(self._tier, layer), self._prices.spec.expert_bytes_L[layer]
        job = self._jobs[slot] = _Job(key, ns, num_bytes, prefetch, earliest)
        stream.advance(self.now)
        (stream.prefetches if prefetch else stream.demand).append(job)
        if prefetch and self._prices.options.synchronous:
            self._ahead.append(job)

    def _wait(self, job: _Job) -> None:
        """Let the compute stream wait for a job, which precedes all others that have not begun."""
        stream, tally = self._stream, self._tally
        if job.done == _QUEUED:
            stream.advance(self.now)
        queued = job.done == _QUEUED
        if queued:
            stream.begin(job, max(stream.free_at, job.earliest, self.now))
        if job.prefetch and (queued or job.done > self.now):
            tally.late += 1
            tally.promoted += queued
        if job.done > self.now:
            tally.stall += job.done - self.now
            self.now = job.done
