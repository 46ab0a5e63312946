"""Costs of a device's link and of the host's cores for the split of misses, measured at a model's first start here.

They are kept in the user's cache folder, by machine, device and stored form of the experts. The parts that serve are
timed: copies into slots, experts of the first layer on the host in one call, both at once, products over slots, and
decode steps without experts (`moetool.runtime.layer_time`).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from moetool.caching.machine_split import SplitCosts
from moetool.caching.residency import Residency
from moetool.models.loading import LoadedModel
from moetool.runtime.experts.copies import stride_of
from moetool.runtime.experts.host_compute import HostCompute
from moetool.runtime.experts.machines import ExpertPool
from moetool.runtime.experts.pooled_experts import PooledExperts
from moetool.runtime.experts.store import ExpertStore
from moetool.runtime.kept_costs import kept_costs
from moetool.runtime.layer_time import layer_seconds

_ROUNDS = 5
_EXPERTS = 8  # most that are timed together
_KNOWN = 32  # most that take turns
_ROWS = (4, 16, 64)
_LEAST_SHARE = 0.05  # of a rate while both work


def split_costs(loaded: LoadedModel, residency: Residency, store: ExpertStore) -> SplitCosts:
    """Return the kept costs, or measure and keep them (`kept_costs`).

    Args:
        store: opened with `hosts`, before any load; its slots are overwritten.

    Effects: binds the model's experts; call it before a runtime does, and before a batcher has the model's attention.
    """
    parts = store.views_of(0, 0)
    forms = [[type(part).__name__, str(getattr(part, "dtype", "")), list(getattr(part, "shape", ()))] for part in parts]
    return kept_costs(loaded, SplitCosts, {"expert_parts": forms}, lambda: measure(loaded, residency, store))


def measure(loaded: LoadedModel, residency: Residency, store: ExpertStore) -> SplitCosts:
    """Measure link and host alone and together, products on the device, and layers; as for `split_costs`."""
    layer_s = layer_seconds(loaded)
    host = HostCompute(store)
    try:
        with torch.inference_mode():
            pooled = PooledExperts(loaded, residency, ExpertPool(store, host))
            return replace(_Measurement(loaded, pooled, host).costs(), layer_s=layer_s)
    finally:
        host.close()


class _Measurement:
    """Times the parts of one pool; experts take turns, so that processors' caches do not shorten the time."""

    def __init__(self, loaded: LoadedModel, pooled: PooledExperts, host: HostCompute) -> None:
        self._pooled, self._store, self._host, self._layer = pooled, pooled.store, host, loaded.layers[0]
        self._dtype = loaded.model.dtype
        self._device = pooled.store.copies.device
        buffers = self._store.host_pool_bytes // stride_of(self._store.files.stored_bytes)
        # They stay in host memory meanwhile.
        self._known = max(1, min(self._layer.form.num_experts, _KNOWN, buffers // 2))
        self._turn = 0

    def costs(self) -> SplitCosts:
        read_s = statistics.median(_timed(partial(self._load, [key])) for key in range(self._known))
        count = min(_EXPERTS, self._known, self._store.num_slots)
        load_s = _fastest(lambda: self._load(self._next(count))) / count
        few, many = (_fastest(partial(self._compute, number)) for number in (1, count))
        host_s = (many - few) / (count - 1) if count > 1 and many > few else many / count
        start_s = max(0.0, few - host_s)
        rounds = [self._together(load_s, host_s, start_s, count) for _ in range(_ROUNDS)]
        link_share, host_share = max(rounds, key=sum)
        host_knots = [
            (rows, max(0.0, _fastest(partial(self._compute, count, rows)) - start_s) / count) for rows in _ROWS
        ]
        self._load(keys := range(count))
        device_s, *device_knots = (
            (rows, _fastest(partial(self._multiply, keys, rows)) / count) for rows in (1, *_ROWS)
        )
        return SplitCosts(
            load_s=load_s,
            host_s=host_s,
            device_s=device_s[1],
            host_knots=tuple(host_knots),
            device_knots=tuple(device_knots),
            start_s=start_s,
            link_share=link_share,
            host_share=host_share,
            disk_s=max(0.0, read_s - load_s),
        )

    def _together(self, load_s: float, host_s: float, start_s: float, count: int) -> tuple[float, float]:
        """Return the shares of their rates that link and host reach together; inverts `SplitCosts.together`."""
        batches = max(1, round((start_s + count * host_s) / (count * load_s)))
        computed = max(1, min(self._known, round((batches * count * load_s - start_s) / host_s)))
        link_s, alone_s = batches * count * load_s, start_s + computed * host_s
        with ThreadPoolExecutor(1) as thread:
            began = time.perf_counter()
            waiting = thread.submit(self._host_alone, computed)
            for _ in range(batches):
                self._load(self._next(count))
            link_end, host_end = time.perf_counter() - began, waiting.result()
        both = min(link_end, host_end)
        link, host = (
            (link_s, alone_s - (host_end - link_end))
            if link_end <= host_end
            else (link_s - link_end + host_end, alone_s)
        )
        return tuple(min(1.0, max(_LEAST_SHARE, work / both)) for work in (link, host))  # type: ignore[return-value]

    def _host_alone(self, count: int) -> float:
        """Return the seconds of experts on the host; their rows do not queue behind the loads of another thread."""
        cuda = self._device.type == "cuda"
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self._device)) if cuda else nullcontext():
            return _timed(partial(self._compute, count))

    def _next(self, count: int) -> list[int]:
        self._turn += count
        return [(self._turn + number) % self._known for number in range(count)]

    def _load(self, keys: Sequence[int]) -> None:
        loads = [(key, slot) for slot, key in enumerate(keys)]
        self._store.load_together(loads)
        for key, slot in loads:
            self._store.ready(key, slot)
        self._finish()

    def _compute(self, count: int, rows: int = 1) -> None:
        keys = self._next(count)
        xs = [self._input(rows) for _ in keys]
        for finished in self._host.start(self._layer.form, keys, xs):
            finished()
        self._finish()

    def _multiply(self, keys: Sequence[int], rows: int) -> None:
        chosen = torch.tensor([list(keys)] * rows, device=self._device)
        self._pooled.compute_some(self._layer, {key: key for key in keys}, self._input(rows), chosen)
        self._finish()

    def _input(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self._layer.form.input_size), 0.02, dtype=self._dtype, device=self._device)

    def _finish(self) -> None:
        self._store.copies.finish(self._store.copies.mark())


def _fastest(work: Callable[[], None]) -> float:
    """Seconds of the fastest of a few rounds, after one that warms up: other processes only add to them."""
    work()
    return min(_timed(work) for _ in range(_ROUNDS))


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
