"""The expert pools of several devices as one pool, with the slot numbers of `moetool.caching.devices.DevicePools`."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields

import torch

from moetool.caching.devices import Pool
from moetool.models.experts.stored_expert import Weight
from moetool.models.loading import LoadedModel, parse_devices
from moetool.runtime.experts.copies import Copies
from moetool.runtime.experts.source import StoreStats
from moetool.runtime.experts.store import ExpertStore, open_store


class Stores:
    """One store per device; slots are numbered across devices, and an expert's key determines its host tier.

    Attributes:
        stores: those of the devices, in their order.
        devices: the device of each store's slots.
        meter: None, as costs are measured on one device only.
        files: the expert files that all stores read.
        copies: those of the first device, which computes everything except the other devices' experts.

    Effects: `close` closes all stores.
    """

    meter = None

    def __init__(self, stores: Sequence[ExpertStore]) -> None:
        self.stores = tuple(stores)
        self._starts = [0]
        for store in self.stores:
            self._starts.append(self._starts[-1] + store.num_slots)
        self.devices: tuple[torch.device, ...] = tuple(store.copies.device for store in self.stores)
        self.files = self.stores[0].files
        self.copies: Copies = self.stores[0].copies

    @property
    def num_slots(self) -> int:
        return self._starts[-1]

    @property
    def pool_bytes(self) -> int:
        return sum(store.pool_bytes for store in self.stores)

    @property
    def host_pool_bytes(self) -> int:
        return sum(store.host_pool_bytes for store in self.stores)

    @property
    def stats(self) -> StoreStats:
        """Sum of all devices' counters; simultaneous waits of two devices count twice."""
        every = [store.stats for store in self.stores]
        return StoreStats(**{f.name: sum(getattr(stats, f.name) for stats in every) for f in fields(StoreStats)})

    def device_of(self, key: int) -> int:
        return key % len(self.stores)

    def read_ahead(self, keys: Iterable[int]) -> None:
        """See `ExpertStore.read_ahead`; each expert into the host memory of its own device."""
        own: list[list[int]] = [[] for _ in self.stores]
        for key in keys:
            own[self.device_of(key)].append(key)
        for store, its in zip(self.stores, own, strict=True):
            store.read_ahead(its)

    def load(self, key: int, slot: int, prefetch: bool) -> None:
        """See `ExpertStore.load`."""
        store, own_slot = self._at(slot)
        store.load(key, own_slot, prefetch)

    def load_together(self, loads: Iterable[tuple[int, int]]) -> None:
        """See `ExpertStore.load_together`; one batch per device."""
        own: list[list[tuple[int, int]]] = [[] for _ in self.stores]
        for key, slot in loads:
            device = self.device_of(key)
            own[device].append((key, slot - self._starts[device]))
        for store, its in zip(self.stores, own, strict=True):
            store.load_together(its)

    def holds(self, key: int, slot: int) -> bool:
        """See `ExpertStore.holds`."""
        store, own_slot = self._at(slot)
        return store.holds(key, own_slot)

    def ready(self, key: int, slot: int) -> tuple[Weight, ...]:
        """See `ExpertStore.ready`."""
        store, own_slot = self._at(slot)
        return store.ready(key, own_slot)

    def computed(self, slots: Iterable[int]) -> None:
        """See `ExpertStore.computed`."""
        for store, own_slot in map(self._at, slots):
            store.computed([own_slot])

    def put(self, key: int, slot: int, data: torch.Tensor) -> None:
        """See `ExpertStore.put`."""
        store, own_slot = self._at(slot)
        store.put(key, own_slot, data)

    def bytes_of(self, key: int, slot: int) -> torch.Tensor:
        """See `ExpertStore.bytes_of`."""
        store, own_slot = self._at(slot)
        return store.bytes_of(key, own_slot)

    def host(self, key: int) -> AbstractContextManager[tuple[Weight, ...]]:
        """See `ExpertStore.host`; uses the host tier of the expert's device."""
        return self.stores[self.device_of(key)].host(key)

    def host_copy(self, key: int) -> AbstractContextManager[tuple[Weight, ...]] | None:
        """See `ExpertStore.host_copy`."""
        return self.stores[self.device_of(key)].host_copy(key)

    def close(self) -> None:
        """End all stores' threads."""
        for store in self.stores:
            store.close()

    def _at(self, slot: int) -> tuple[ExpertStore, int]:
        device = bisect_right(self._starts, slot) - 1
        return self.stores[device], slot - self._starts[device]


Store = ExpertStore | Stores
"""The slots of one device or of several."""


def open_stores(
    loaded: LoadedModel, pool: Pool, num_threads: int = 2, host_memory_bytes: int | None = None, *, hosts: bool = False
) -> Store:
    """Open the store of a model from `load_lazy`: on the model's device, or one on each device that shares it.

    Args:
        num_threads: I/O threads of each device.
        host_memory_bytes: split evenly between devices.
        hosts: as for `open_store`; on one device.

    Raises:
        UsageError: the machine has fewer GPUs.
        CapacityError: as for `ExpertStore`.
    """
    count = len(pool.residencies)
    if count == 1:
        return open_store(loaded, pool.residencies[0], num_threads, host_memory_bytes, hosts=hosts)
    devices = parse_devices(loaded.device.type, count, loaded.device.index or 0)
    host = None if host_memory_bytes is None else host_memory_bytes // count
    stores: list[ExpertStore] = []
    try:
        for device, residency in zip(devices, pool.residencies, strict=True):
            stores.append(open_store(loaded, residency, num_threads, host, device=device))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return Stores(stores)


def load_residents(keys: Sequence[int], residency: Pool, store: Store) -> None:
    """Start to load experts into free slots; on-demand loads go first."""
    for key in keys[-residency.policy.num_slots :]:
        if (step := residency.load_into_free_slot(key)) is not None:
            store.load(step.key, step.slot, prefetch=True)


def fill_device(residency: Pool, store: Store) -> None:
    """Start to load every expert if a GPU has slots for all: then no layer has to fetch its routes."""
    total = residency.policy.spec.total_experts
    if len(store.devices) == 1 and store.copies.staged and residency.policy.num_slots >= total:
        load_residents(range(total), residency, store)
