"""Runs of a serving bench: an engine, forward by forward over the same requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moetool.base.errors import MoetoolError
from moetool.bench.bench_result import Row
from moetool.bench.forced_routes import ForcedRoutes
from moetool.caching.machine_split import MachineSplit
from moetool.caching.policy import Policy
from moetool.caching.residency import Counts, Residency
from moetool.models.loading import LoadedModel
from moetool.runtime.decoding import Batch
from moetool.runtime.experts.device_stores import fill_device, open_stores
from moetool.runtime.experts.forward import ExpertRuntime
from moetool.runtime.experts.store import ExpertStore
from moetool.runtime.loop.engine import Engine
from moetool.runtime.loop.own_caches import open_batcher
from moetool.runtime.request import Output, SamplingParams
from moetool.runtime.split_costs import measure

_SPARE_TOKENS = 64  # whole pages of the cache, and a reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of every line, one after the other.

    Attributes:
        new_tokens: tokens that each request generates; the first comes from the prompt's last forward.
        chunk_tokens: most prompt tokens of one forward; None: every prompt is one forward.
        splits: whether the host computes some misses, by costs measured first.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    chunk_tokens: int | None = None
    splits: bool = False

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def kv_tokens(self) -> int:
        """Tokens in a cache for one request."""
        return self.longest_prompt + self.new_tokens + _SPARE_TOKENS


def phase_row(
    seconds: Sequence[float],
    *,
    bytes_read: float = 0.0,
    ahead_bytes: float = 0.0,
    stall_s: float = 0.0,
    host_bytes: float = 0.0,
    hosted_s: float = 0.0,
    booking_s: float = 0.0,
    cpu_s: float = 0.0,
) -> Row:
    """Return the values of one phase of one run, with means per forward and shares of the time.

    Args:
        seconds: seconds of each forward; the others are totals over all.
        bytes_read: bytes that the store read; `ahead_bytes` of them were prefetched.
        stall_s: seconds that the model's thread waited for bytes.
        host_bytes: bytes that came from host memory.
        hosted_s: seconds of products on the host, which may overlap all others.
        booking_s: seconds of the policy and the residency on that thread, prediction included.
        cpu_s: CPU seconds of all threads; other processes affect it less.
    """
    count, spent = len(seconds), sum(seconds)
    return {
        "seconds": list(seconds),
        "bytes_read": bytes_read,
        "ahead_bytes": ahead_bytes,
        "stall_s": stall_s,
        "host_bytes": host_bytes,
        "hosted_s": hosted_s,
        "booking_s": booking_s,
        "cpu_s": cpu_s,
        "mean_s": spent / count,
        "p50_s": float(np.quantile(seconds, 0.5)),
        "p95_s": float(np.quantile(seconds, 0.95)),
        "mean_bytes": bytes_read / count,
        "mean_moved_bytes": (bytes_read + host_bytes) / count,
        "mean_cpu_s": cpu_s / count,
        "stall_share": stall_s / spent,
        "booking_share": booking_s / spent,
    }


def run_row(prefill: Row, decode: Row, residency: Residency, earlier: tuple[Counts, Counts] | None = None) -> Row:
    """Return the values of one run over the workload.

    Args:
        prefill, decode: by `phase_row`: an entry per prompt, over all its forwards; an entry per decoded token.
        residency: counts of hits and misses.
        earlier: its counts of prefill and decode before the run (default: none).
    """
    prefill_counts, decode_counts = (
        counts - before
        for counts, before in zip((residency.prefill, residency.decode), earlier or (Counts(), Counts()), strict=True)
    )
    seconds = (*prefill["seconds"], *decode["seconds"])  # the first token of each request comes from its prompt
    return {
        "prefill": prefill,
        "decode": decode,
        "tokens_s": len(seconds) / sum(seconds),
        "prefill_counts": prefill_counts.to_json(),
        "decode_counts": decode_counts.to_json(),
        "hit_rate": decode_counts.hit_rate,
    }


def run_engine(
    loaded: LoadedModel,
    policy: Policy,
    workload: Workload,
    *,
    io_threads: int,
    forced: ForcedRoutes | None = None,
    warm: Policy | None = None,
    host_memory_bytes: int | None = None,
    layer_slots: Sequence[int] = (),
) -> Row:
    """Serve the workload with a new engine, cold: empty pool, new policy.

    Args:
        forced: routes to follow (default: the routers').
        warm: policy that serves the workload once before, unmeasured; `policy` starts with its resident experts.
        host_memory_bytes: memory for experts in the host tier.
        layer_slots: guaranteed slots per layer.

    Effects: allocates the pool, and frees it at the end.

    Raises:
        MoetoolError: a forward failed.
    """
    batcher = open_batcher(
        loaded.model,
        max_requests=1,
        kv_tokens=workload.kv_tokens,
        max_batch_tokens=workload.chunk_tokens or max(512, workload.longest_prompt),
    )
    split = MachineSplit(loaded.spec) if workload.splits else None
    residency = _Booked(policy if warm is None else warm, layer_slots=layer_slots, split=split)
    store = open_stores(loaded, residency, io_threads, host_memory_bytes, hosts=workload.splits)
    if split is not None:
        assert isinstance(store, ExpertStore)
        split.begin(measure(loaded, residency, store), None)
    fill_device(residency, store)
    for key, slot in residency.slot_of.items():
        store.ready(key, slot)
    runtime = ExpertRuntime(loaded, residency, store)
    engine = Engine(loaded, None, runtime, batcher, model_name=loaded.spec.name, closes_model=False)
    try:
        engine.state = "ready"  # driven forward by forward without the engine's own thread
        _announce(batcher, forced)
        earlier = Counts(), Counts()
        if warm is not None:
            _drive(engine, workload, forced, residency)
            residency.change(policy, layer_slots)
            earlier = residency.prefill + Counts(), residency.decode + Counts()  # copies: a residency goes on counting
        return run_row(*_drive(engine, workload, forced, residency), residency, earlier)
    finally:
        engine.close()


class _Booked(Residency):
    """A residency that measures its own time, including policy and predictor."""

    booked_s = 0.0


def _timed(name: str) -> Callable[..., Any]:
    def method(self: _Booked, *args: Any) -> Any:
        began = time.perf_counter()
        found = getattr(super(_Booked, self), name)(*args)
        self.booked_s += time.perf_counter() - began
        return found

    return method


for _name in ("begin_forward", "route", "event", "end_forward", "end_request"):
    setattr(_Booked, _name, _timed(_name))


def _announce(batcher: Any, forced: ForcedRoutes | None) -> None:
    """Announce each forward to the forced routes before other listeners."""
    if forced is None:
        return
    heard = batcher.on_forward

    def on_forward(batch: Batch) -> None:
        forced.begin_forward(batch.info)
        if heard is not None:
            heard(batch)

    batcher.on_forward = on_forward


def _drive(engine: Engine, workload: Workload, forced: ForcedRoutes | None, residency: _Booked) -> tuple[Row, Row]:
    """Run requests one after the other: forwards of each prompt, then of each decoded token."""
    params = SamplingParams(max_tokens=workload.new_tokens, ignore_eos=True)
    phases: tuple[list[list[float]], list[list[float]]] = ([], [])

    made = 0  # tokens of the request

    def sink(output: Output) -> None:
        nonlocal made
        if output.error is not None:
            raise MoetoolError(f"a forward failed: {output.error}")
        made += 1

    before = _totals(engine, residency)
    for number, prompt in enumerate(workload.prompts):
        request = engine.submit(list(prompt), params, sink)
        if forced is not None:
            forced.follow(request, number)
        made, prompt_rows = 0, 0
        while not engine.idle:
            decodes = made > 0
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
            after = _totals(engine, residency)
            row = [seconds, *(b - a for a, b in zip(before, after, strict=True))]
            before = after
            if decodes or not prompt_rows:
                phases[decodes].append(row)
            else:
                phases[0][-1] = [a + b for a, b in zip(phases[0][-1], row, strict=True)]
            prompt_rows += not decodes
        assert made == workload.new_tokens, "every forward after the prompt's is of one token"
    prefill, decode = map(_phase, phases)
    return prefill, decode


def _totals(engine: Engine, residency: _Booked) -> list[float]:
    """Totals so far, in the order of `_TOTALS`."""
    stats = engine.store.stats
    moved = (stats.bytes_read, stats.prefetch_bytes, stats.stall_seconds, stats.host_bytes, stats.hosted_seconds)
    return [*moved, residency.booked_s, time.process_time()]


_TOTALS = ("bytes_read", "ahead_bytes", "stall_s", "host_bytes", "hosted_s", "booking_s", "cpu_s")


def _phase(forwards: Sequence[Sequence[float]]) -> Row:
    seconds, *totals = zip(*forwards, strict=True)
    return phase_row(seconds, **dict(zip(_TOTALS, map(sum, totals), strict=True)))
